"""A collection of photos becomes an image folder: split, resized, written, with nothing half-done at any moment.

<output>/train/<class>/<name>.png     the images
<output>/train/metadata.jsonl         file_name, label and caption of each, which `datasets` reads
<output>/test/                        the same for evaluation
<output>/prepared.json                with what settings, from which files, and what was left out
"""

import hashlib
import io
import json
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch.utils.data import Dataset

from common import interruption
from common.errors import UserError
from common.files import write_atomically
from image_data.annotations import class_in_words
from image_data.decode import UndecodableImage, decode_image, is_grey, plain_suffix, shorter_side
from image_data.workers import process_files
from preparation.layouts import Collection, Photo
from preparation.photo_files import modified_at, printable, read_file

MANIFEST = "prepared.json"
METADATA = "metadata.jsonl"
FORMAT_VERSION = 1
SUFFIXES = (".png", ".jpg", ".webp")
OWN_NAME = re.compile(r"-[0-9a-f]{8}\.(png|jpg|webp)$")
LONGEST_NAME = 80  # of the 255 bytes that file systems allow


@dataclass(frozen=True)
class Look:
    """What the images are made to look like."""

    resolution: int | None  # of the shorter side; None keeps the size
    center_crop: bool
    channels: int | None  # None: grey images stay grey, all others become RGB

    def square(self) -> "Look":
        return Look(self.resolution, True, self.channels or 3)


class Target(NamedTuple):
    """An image file to be written."""

    photo: Photo
    folder: str  # train, test, ...
    stem: str  # the file's name in it, without a suffix
    look: Look


class Outcome(NamedTuple):
    suffix: str | None  # None: left out
    made: bool
    reason: str = ""


def split_photos(photos: Iterable[Photo], eval_fraction: float, eval_split: str, seed: int) -> dict[str, list[Photo]]:
    """The same fraction of every class for evaluation, chosen by a hash of name and seed.

    The choice does not depend on the machine, on the order of its file system, or on whether a file is readable.
    """

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


def own_split(photos: Iterable[Photo]) -> dict[str, list[Photo]]:
    """The split that came with the collection."""
    splits = defaultdict(list)
    for photo in photos:
        splits[photo.split].append(photo)
    return {split: splits[split] for split in sorted(splits, key=("train", "validation", "test").index)}


def with_captions(photos: Iterable[Photo], template: str | None) -> list[Photo]:
    """Captions from the names of the classes, where the collection has none of its own."""
    if template is None:
        return list(photos)
    captioned = []
    for photo in photos:
        described = template.replace("{class}", class_in_words(photo.label)) if photo.label else None
        caption = photo.caption or described
        captioned.append(Photo(photo.path, photo.name, photo.label, caption, photo.split))
    return captioned


def plan(splits: dict[str, list[Photo]], look: Look, folders: dict[str, str], normalised: str | None) -> list[Target]:
    """What is to be written where; `normalised` is the folder of a second copy, square, of those for evaluation."""
    targets = []
    for split, photos in splits.items():
        for photo in photos:
            stem = _stem(photo)
            targets.append(Target(photo, folders.get(split, split), stem, look))
            if normalised is not None and split != "train":
                targets.append(Target(photo, normalised, stem, look.square()))
    return targets


def open_output(output: Path, settings: dict[str, object]) -> dict[str, object]:
    """The manifest of what an earlier call has prepared here; an error if that was something else."""
    file = output / MANIFEST
    settings = {"format": FORMAT_VERSION, **settings}
    if not file.exists():
        strange = sorted(entry.name for entry in output.iterdir() if not entry.name.startswith("."))
        if strange:
            raise UserError(
                f"--output {output}: is not empty ({strange[0]}) and was not made by this script; name a new folder"
            )
        manifest = {"settings": settings, "images": [], "left_out": {}}
        write_atomically(file, json.dumps(manifest, indent=1))
        return manifest
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        before, _ = dict(manifest["settings"]), list(manifest["images"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--output {output}: {MANIFEST} cannot be read ({error}); name a new folder") from error
    differing = [name for name in settings if before.get(name) != settings[name]]
    if differing:
        changes = ", ".join(f"{name} {before.get(name)} and not {settings[name]}" for name in differing)
        raise UserError(f"--output {output}: was prepared with {changes}; name another folder, or delete this one")
    return manifest


def is_complete(output: Path, manifest: dict[str, object]) -> bool:
    """Whether an earlier call came to its end, and everything it made is there."""
    return bool(manifest["images"]) and all((output / image["file"]).exists() for image in manifest["images"])


def write_images(targets: list[Target], output: Path, num_workers: int) -> list[Outcome]:
    """Write what is not there yet, each file whole or not at all."""
    for folder in sorted({output / target.folder / os.path.dirname(target.stem) for target in targets}):
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(".*.tmp"):  # of a process that was killed
            unfinished.unlink()
    return process_files(_Writer(output), targets, num_workers, "Preparing", "the same command goes on from there")


def finish(
    collection: Collection,
    targets: list[Target],
    outcomes: list[Outcome],
    manifest: dict[str, object],
    output: Path,
) -> dict[str, str]:
    """Remove what is no longer part of it, write the tables and the manifest; what was left out is returned."""
    left_out = dict(collection.left_out)
    images, rows = [], defaultdict(list)
    for target, outcome in zip(targets, outcomes, strict=True):
        if outcome.suffix is None:
            left_out[target.photo.name] = outcome.reason
            continue
        file = f"{target.stem}{outcome.suffix}"
        images.append({"file": f"{target.folder}/{file}", "source": target.photo.name})
        facts = {"label": target.photo.label, "caption": target.photo.caption}
        rows[target.folder].append({"file_name": file, **facts})
    if not images:
        first = "".join(f"; the first: {printable(name)} ({left_out[name]})" for name in list(left_out)[:1])
        raise UserError(f"{manifest['settings']['source']}: there is no image that can be used{first}")

    files = {output / image["file"] for image in images}
    for file in output.glob("*/**/*"):
        if OWN_NAME.search(file.name) and file not in files:
            file.unlink()  # its original is gone, or has moved to the other side of the split
    # `datasets` wants the same columns, of the same kind, everywhere.
    every_row = [row for part in rows.values() for row in part]
    used = [name for name in ("label", "caption") if any(row[name] for row in every_row)]
    several = any(isinstance(row["caption"], tuple) for row in every_row)
    for folder, part in rows.items():
        for row in part:
            if several and not isinstance(row["caption"], tuple):
                row["caption"] = (row["caption"] or "",)
        lines = (json.dumps({name: row[name] or "" for name in ("file_name", *used)}) for row in part)
        write_atomically(output / folder / METADATA, "".join(f"{line}\n" for line in lines))
    manifest = {**manifest, "layout": collection.layout, "images": images, "left_out": left_out}
    write_atomically(output / MANIFEST, json.dumps(manifest, indent=1))
    return left_out


class _Writer(Dataset):
    """Prepares several images at a time, in a worker process."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def __getitem__(self, targets: list[Target]) -> list[Outcome] | UserError:
        try:
            return [self._outcome(target) for target in targets]
        except OSError as error:  # raised in a worker, it would arrive wrapped in a traceback
            return UserError(
                f"--output {self.output}: cannot be written to ({error.strerror or error}); "
                "make room there, then give the same command again"
            )

    def _outcome(self, target: Target) -> Outcome:
        file = self.output / target.folder / target.stem
        try:
            modified = modified_at(target.photo.path)
            for suffix in SUFFIXES:
                if _was_made_of(file.with_name(file.name + suffix), modified):
                    return Outcome(suffix, made=False)
            content, suffix = _encode(read_file(target.photo.path), target.look)
        except UndecodableImage as error:
            return Outcome(None, made=False, reason=str(error))
        except MemoryError:
            return Outcome(None, made=False, reason="too large for the memory of this machine")
        file = file.with_name(file.name + suffix)
        write_atomically(file, content)
        interruption.fault_point("prepare-image")
        os.utime(file, (modified, modified))
        return Outcome(suffix, made=True)


def _encode(data: bytes, look: Look) -> tuple[bytes, str]:
    """The file to be written, and its suffix."""
    channels = look.channels or (1 if is_grey(data) else 3)
    pixels = decode_image(data, channels, look.resolution or shorter_side(data), look.center_crop)
    if look.resolution is None and (suffix := plain_suffix(data, channels)) is not None:
        return data, suffix  # nothing to change, and a photo as a PNG is many times as large
    file = io.BytesIO()
    Image.fromarray(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue(), ".png"


def _was_made_of(file: Path, modified: float) -> bool:
    """Whether this is the image of a file of that time: a prepared image keeps the time of its original."""
    try:
        return int(file.stat().st_mtime) == int(modified)
    except FileNotFoundError:
        return False


def _stem(photo: Photo) -> str:
    """A name for any tool and file system, with a hash of the original's, whatever that is made of."""
    digest = hashlib.blake2b(photo.name.encode(), digest_size=4).hexdigest()
    name = _plain(os.path.splitext(os.path.basename(photo.name))[0])
    folder = "" if photo.label is None else f"{class_folder(photo.label)}/"
    return f"{folder}{name}-{digest}"


def class_folder(label: str) -> str:
    """The label, if any file system takes it; otherwise what is left of it, and a hash."""
    plain = _plain(label)
    return plain if plain == label else f"{plain}-{hashlib.blake2b(label.encode(), digest_size=4).hexdigest()}"


def _plain(text: str) -> str:
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "_", ascii_only).strip("._-")[:LONGEST_NAME] or "image"
