"""A collection of photos becomes an image folder: split, resized, written, with nothing half-done at any moment.

<output>/train/<class>/<name>.png     the images
<output>/train/metadata.jsonl         file_name, label and caption of each, which `datasets` reads
<output>/test/                        the same for evaluation
<output>/prepared.json                with what settings, from which files, and what was left out
"""

import hashlib
import io
import itertools
import json
import os
import re
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from common.errors import UserError, reason_of
from common.files import printable, write_atomically
from common.interruption import fault_point
from image_data.annotations import class_in_words
from image_data.data_options import INTERPOLATION
from image_data.decode import (
    UndecodableImage,
    decode_image,
    errors_as_undecodable,
    is_grey,
    plain_suffix,
    read_image_file,
)
from image_data.workers import process_files
from preparation.layouts import Collection, Photo

MANIFEST = "prepared.json"
METADATA = "metadata.jsonl"
FORMAT_VERSION = 1
SUFFIXES = (".png", ".jpg", ".webp")
OWN_NAME = re.compile(r"-[0-9a-f]{8}([0-9a-f]{24})?\.(png|jpg|webp)$")
LONGEST_NAME = 80  # of the 255 bytes that file systems allow


@dataclass(frozen=True)
class OutputFormat:
    """The size and the channels of the images that are written."""

    resolution: int | None  # of the shorter side; None keeps the size
    center_crop: bool
    channels: int | None  # None: grey images stay grey, all others become RGB
    interpolation: str = INTERPOLATION


class Target(NamedTuple):
    """An image file to be written."""

    photo: Photo
    folder: str  # train, test, ...
    stem: str  # the file's name in it, without a suffix
    format: OutputFormat


class Outcome(NamedTuple):
    """The file that was written for a target, or the reason why there is none."""

    suffix: str | None  # None: left out
    made: bool
    reason: str = ""


def split_photos(photos: list[Photo], eval_fraction: float, eval_split: str, seed: int) -> dict[str, list[Photo]]:
    """Keep the same fraction of every class for evaluation, chosen by a hash of name and seed alone."""

    def draw(photo: Photo) -> bytes:
        return hashlib.blake2b(f"{seed}\0{photo.name}".encode(), digest_size=16).digest()

    classes = defaultdict(list)
    for photo in photos:
        classes[photo.label].append(photo)
    splits = {"train": [], eval_split: []}
    for members in classes.values():
        members.sort(key=draw)
        count = int(eval_fraction * len(members) + 0.5)
        if eval_fraction > 0 and len(members) > 1:
            count = min(max(count, 1), len(members) - 1)  # every class is in both
        splits[eval_split] += members[:count]
        splits["train"] += members[count:]
    return {split: sorted(members, key=lambda photo: photo.name) for split, members in splits.items() if members}


def own_split(photos: list[Photo]) -> dict[str, list[Photo]]:
    """Return the split that came with the collection."""
    splits = {split: [photo for photo in photos if photo.split == split] for split in ("train", "validation", "test")}
    return {split: members for split, members in splits.items() if members}


def with_captions(photos: list[Photo], template: str | None) -> list[Photo]:
    """Return photos with captions made from the names of the classes, where the collection has none of its own."""

    def caption_of(photo: Photo) -> str | tuple[str, ...] | None:
        missing = template is not None and photo.label and not photo.caption
        return template.replace("{class}", class_in_words(photo.label)) if missing else photo.caption

    return [replace(photo, caption=caption_of(photo)) for photo in photos]


def plan(
    splits: dict[str, list[Photo]], output_format: OutputFormat, folders: dict[str, str], squares: str | None
) -> list[Target]:
    """List what is to be written where; `squares` is the folder of a second, square copy of those for evaluation."""
    square_format = replace(output_format, center_crop=True, channels=output_format.channels or 3)
    targets, taken = [], set()
    for split, photos in splits.items():
        for photo in photos:
            folder, stem = folders.get(split, split), _stem(photo)
            if (folder, stem) in taken:  # as a few are among a million photos of one name
                stem = _stem(photo, digest_size=16)
            taken.add((folder, stem))
            targets.append(Target(photo, folder, stem, output_format))
            if squares is not None and split != "train":
                targets.append(targets[-1]._replace(folder=squares, format=square_format))
    return targets


class PreparedFolder:
    """The folder that images are written to, with the manifest of what an earlier call has prepared there."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        """Begin with an empty folder or go on with one; raise if it holds something else."""
        self.path = path
        settings = {"format": FORMAT_VERSION, **settings}
        self.manifest = {"settings": settings, "images": [], "left_out": {}}
        files = sorted(path.glob("[!.]*")), path.glob("[!.]*/**/[!.]*")
        written = (file for file in itertools.chain(*files) if file.is_file() and file != path / MANIFEST)
        first = next(written, None)
        if not (path / MANIFEST).exists():
            if first is None:
                return
            found = f"is not empty ({printable(first.relative_to(path).parts[0])}) and was not made by this script"
            raise UserError(f"--output_dir {path}: {found}; name a new folder")
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            # Not every manifest says how photos were resized: once there was one way.
            before = {"interpolation": INTERPOLATION, **manifest["settings"]}
            _ = [image["file"] for image in manifest["images"]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            reason = reason_of(error)
            raise UserError(f"--output_dir {path}: {MANIFEST} cannot be read ({reason}); name a new folder") from error
        if first is None:
            return  # an earlier call was ended before its first image
        self.manifest = manifest
        differing = [name for name in settings if before.get(name) != settings[name]]
        if differing:
            changes = ", ".join(f"{name} {before.get(name)} and not {settings[name]}" for name in differing)
            raise UserError(f"--output_dir {path}: was prepared with {changes}; name another one, or delete it")

    def is_complete(self) -> bool:
        """Return whether an earlier call came to its end, and everything it made is there."""
        images = self.manifest["images"]
        return bool(images) and all((self.path / image["file"]).exists() for image in images)

    def write_images(self, targets: list[Target], num_workers: int) -> list[Outcome]:
        """Write what is not there yet, each file whole or not at all."""
        self._save_manifest(self.manifest)
        for folder in sorted({self.path / target.folder / os.path.dirname(target.stem) for target in targets}):
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in folder.glob(".*.tmp"):  # of a process that was killed
                unfinished.unlink()
        advice = "the same command goes on from there"
        return process_files(self._write_image, targets, num_workers, "Preparing", advice)

    def finish(self, collection: Collection, targets: list[Target], outcomes: list[Outcome]) -> dict[str, str]:
        """Remove what is no longer part of it, write the tables and the manifest; return what was left out."""
        left_out = dict(collection.left_out)
        images, rows = [], defaultdict(list)
        for target, outcome in zip(targets, outcomes, strict=True):
            if outcome.suffix is None:
                left_out[target.photo.name] = outcome.reason
                continue
            file, photo = f"{target.stem}{outcome.suffix}", target.photo
            images.append({"file": f"{target.folder}/{file}", "source": photo.name})
            rows[target.folder].append({"file_name": file, "label": photo.label, "caption": photo.caption})
        if not images:
            first = "".join(f"; the first: {printable(name)} ({left_out[name]})" for name in list(left_out)[:1])
            raise UserError(f"{self.manifest['settings']['source']}: there is no image that can be used{first}")
        files = {self.path / image["file"] for image in images}
        for file in self.path.glob("*/**/*"):
            if OWN_NAME.search(file.name) and file not in files:
                file.unlink()  # its original is gone, or has moved to the other side of the split
        self._write_tables(rows)
        self._save_manifest(self.manifest | {"layout": collection.layout, "images": images, "left_out": left_out})
        return left_out

    def _write_image(self, target: Target) -> Outcome:
        stem = self.path / target.folder / target.stem
        try:
            with errors_as_undecodable():
                modified = os.stat(target.photo.path).st_mtime
            for suffix in SUFFIXES:
                file = stem.with_name(stem.name + suffix)
                if file.exists() and int(file.stat().st_mtime) == int(modified):
                    return Outcome(suffix, made=False)  # a prepared image keeps the time of its original
            content, suffix = _encode(read_image_file(target.photo.path), target.format)
            file = stem.with_name(stem.name + suffix)
            write_atomically(file, content)
            fault_point("prepare-image")
            os.utime(file, (modified, modified))
        except UndecodableImage as error:
            return Outcome(None, made=False, reason=str(error))
        except MemoryError:
            return Outcome(None, made=False, reason="too large for the memory of this machine")
        except OSError as error:
            found = f"cannot be written to ({error.strerror or error}); make room there"
            raise UserError(f"--output_dir {self.path}: {found}, then give the same command again") from error
        return Outcome(suffix, made=True)

    def _write_tables(self, rows: dict[str, list[dict[str, object]]]) -> None:
        """Write the metadata of each folder; `datasets` wants the same columns, of the same kind, everywhere."""
        every_row = [row for part in rows.values() for row in part]
        used = [name for name in ("label", "caption") if any(row[name] for row in every_row)]
        if any(isinstance(row["caption"], tuple) for row in every_row):
            for row in every_row:
                row["caption"] = row["caption"] if isinstance(row["caption"], tuple) else (row["caption"] or "",)
        for folder, part in rows.items():
            lines = (json.dumps({name: row[name] or "" for name in ("file_name", *used)}) for row in part)
            write_atomically(self.path / folder / METADATA, "".join(f"{line}\n" for line in lines))

    def _save_manifest(self, manifest: dict[str, object]) -> None:
        self.manifest = manifest
        write_atomically(self.path / MANIFEST, json.dumps(manifest, indent=1))


def _encode(data: bytes, output_format: OutputFormat) -> tuple[bytes, str]:
    """Return the file to be written, and its suffix."""
    channels = output_format.channels or (1 if is_grey(data) else 3)
    resizing = output_format.resolution, output_format.center_crop, output_format.interpolation
    pixels = decode_image(data, channels, *resizing)
    if output_format.resolution is None and (suffix := plain_suffix(data, channels)) is not None:
        return data, suffix  # nothing to change, and a photo as a PNG is many times as large
    file = io.BytesIO()
    Image.fromarray(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue(), ".png"


def _stem(photo: Photo, digest_size: int = 4) -> str:
    """Return a name that any tool and file system takes, in a folder named after the label; hashes keep them apart."""
    name = f"{_plain(os.path.splitext(os.path.basename(photo.name))[0])}-{_hash(photo.name, digest_size)}"
    if photo.label is None:
        return name
    plain = _plain(photo.label)
    return f"{plain}/{name}" if plain == photo.label else f"{plain}-{_hash(photo.label)}/{name}"


def _plain(text: str) -> str:
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "_", ascii_only).strip("._-")[:LONGEST_NAME] or "image"


def _hash(text: str, digest_size: int = 4) -> str:
    return hashlib.blake2b(text.encode(), digest_size=digest_size).hexdigest()
