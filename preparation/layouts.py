"""Recognise a collection of photos, and read class, caption and split from its folders.

To add a layout, write a function that returns the photos of a folder, or None if the folder has another layout, and
add it to `LAYOUTS`.
"""

import csv
import io
import json
import logging
import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import UserError
from common.files import portable, printable
from image_data.annotations import ANIMALS10, CAPTION_COLUMNS, LABEL_COLUMNS
from preparation.photo_files import Folder, find_files

logger = logging.getLogger(__name__)

SPLITS = {
    **dict.fromkeys(("train", "training", "train_data"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "eval_data"), "test"),
}
NORMALISED_COPY = "normalized_eval_data"  # of eval_data: the same photos again
DTD_SPLITS = {"train1.txt": "train", "val1.txt": "validation", "test1.txt": "test"}
METADATA_FILES = ("metadata.jsonl", "metadata.csv")
SPLIT_COLUMN = "split"
FILE_COLUMNS = ("file_name", "filename", "file", "image", "path")


@dataclass(frozen=True)
class Photo:
    """An image file of a collection, and what the collection says of it."""

    path: str
    name: str  # relative to the collection, the same on every machine
    label: str | None = None
    caption: str | tuple[str, ...] | None = None  # several, if the collection has several
    split: str | None = None


@dataclass
class Collection:
    layout: str
    photos: list[Photo]
    left_out: dict[str, str] = field(default_factory=dict)  # names, and why

    @property
    def has_split(self) -> bool:
        return all(photo.split is not None for photo in self.photos)

    def only_classes(self, classes: list[str]) -> "Collection":
        """Return the photos of these classes, or all if none are named."""
        known = sorted({photo.label for photo in self.photos if photo.label is not None})
        for name in classes:
            if name not in known:
                there = f"there are: {', '.join(known)}" if known else "these photos have no classes"
                raise UserError(f"--classes {name}: there is no such class; {there}")
        return replace(self, photos=[photo for photo in self.photos if not classes or photo.label in classes])


def recognise(source: Path, leave_out: Path | None = None) -> Collection:
    """Return the photos in a folder, by the first layout that fits; what is in `leave_out` does not count."""
    folder = find_files(source, leave_out)
    layout, found = _find_layout(folder)
    photos: dict[str, Photo] = {}
    for photo in found:
        # A table may name a file twice, and two spellings of an accent are one name.
        if photos.setdefault(photo.name, photo) is not photo:
            folder.left_out[f"{photo.name} (again)"] = "there is another of this name"
    for what, of in (("class", "label"), ("split", "split")):
        if any(getattr(photo, of) is not None for photo in photos.values()):
            for name in [photo.name for photo in photos.values() if getattr(photo, of) is None]:
                folder.left_out[name] = f"has no {what}, while others have"
                del photos[name]
    return Collection(layout, [photos[name] for name in sorted(photos)], folder.left_out)


def _find_layout(folder: Folder) -> tuple[str, list[Photo]]:
    while True:
        for layout, photos_of in LAYOUTS.items():
            if (photos := photos_of(folder)) is not None:
                return layout, photos
        inside = folder.sub_folders
        if len(inside) != 1 or any("/" not in name for name in folder.images):
            return "a folder of images", _all_photos(folder)
        folder = folder.below(inside[0])  # sysu-shape-dataset-master/, raw-img/: the collection is one level down


def _table_of_images(folder: Folder) -> list[Photo] | None:
    """Read `metadata.jsonl`, `metadata.csv`, or the only CSV file, with a row for every image."""
    tables = [name for name in folder.others if "/" not in name and name.lower().endswith((".jsonl", ".csv"))]
    named = [name for name in METADATA_FILES if name in tables]
    if not named and (len(tables) != 1 or not tables[0].lower().endswith(".csv") or not folder.images):
        return None
    table = folder.path / (named or tables)[0]
    rows = _read_rows(table)
    columns = {column for _, row in rows for column in row}
    file_column, label_column, caption_column = (
        next((column for column in usual if column in columns), None)
        for usual in (FILE_COLUMNS, LABEL_COLUMNS, CAPTION_COLUMNS)
    )
    if file_column is None and named:
        raise UserError(f"{printable(str(table))}: no column with file names ({', '.join(FILE_COLUMNS)})")
    on_disk = {portable(name): name for name in folder.images}
    if not named and not any(portable(str(row.get(file_column))) in on_disk for _, row in rows):
        return None  # a table of something else
    # Without a column for them, classes are folders, if there are several and every image is in one.
    are_folders = len(folder.sub_folders) > 1 and all("/" in name for name in folder.images)
    are_folders &= label_column is None and not any(name.lower() in SPLITS for name in folder.sub_folders)
    split_of, photos = _splits(folder), []
    if not split_of and SPLIT_COLUMN not in columns:
        _refuse_test_folders(folder)
    for number, row in rows:
        if any(row.get(None, ())):  # where csv puts what is beyond the header
            raise UserError(
                f"{printable(str(table))} line {number}: has {len(row) - 1 + len(row[None])} fields, but the header "
                f"{len(row) - 1}; put quotes around text that contains commas"
            )
        name = row.get(file_column)
        if not isinstance(name, str) or not name or "\0" in name:
            folder.left_out[f"{table.name} line {number}"] = f"{file_column} is not the name of a file"
        elif posixpath.isabs(name) or posixpath.normpath(name).startswith(".."):
            folder.left_out[portable(name)] = f"{table.name} line {number} leads out of the folder"
        else:
            name = posixpath.normpath(name)
            caption = row.get(caption_column)
            caption = tuple(map(str, caption)) or None if isinstance(caption, list) else _text(caption)
            label = portable(name.partition("/")[0]) if are_folders else _text(row.get(label_column))
            split = split_of.get(name.partition("/")[0])
            if SPLIT_COLUMN in columns:
                split = SPLITS.get(str(row.get(SPLIT_COLUMN)).strip().lower())
                if split is None:
                    raise UserError(
                        f"{printable(str(table))} line {number}: {SPLIT_COLUMN} {row.get(SPLIT_COLUMN)!r}: must be "
                        "train, validation or test; rename the column if it means something else"
                    )
            photo = _photo(folder, on_disk.get(portable(name), name), label)
            photos.append(replace(photo, caption=caption, split=split))
    for name in sorted(set(on_disk) - {photo.name for photo in photos}):
        folder.left_out[name] = f"not in {table.name}"
    return photos


def _splits(folder: Folder) -> dict[str, str]:
    """Return which split each folder is, if all of them are, with one to train on."""
    splits = {name: SPLITS.get(name.lower()) for name in folder.sub_folders if name != NORMALISED_COPY}
    return {} if len(splits) < 2 or None in splits.values() or "train" not in splits.values() else splits


def _refuse_test_folders(folder: Folder) -> None:
    """Raise if a folder of test images is no split here: it must not be trained on without a word."""
    splits = [name for name in folder.sub_folders if name.lower() in SPLITS]
    others = [name for name in folder.sub_folders if name not in splits]
    others += ["photos"] if any("/" not in name for name in folder.images) else []
    is_alone = len(splits) == 1 and not others  # and so the folder to look into
    if any(SPLITS[name.lower()] != "train" for name in splits) and not is_alone:
        beside = f"{', '.join(others)} beside them; move these elsewhere" if others else "none to train on"
        where = printable(str(folder.path))
        raise UserError(f"{where}: has folders of splits ({', '.join(splits)}) and {beside}, or name the folder to use")


def _split_folders(folder: Folder) -> list[Photo] | None:
    """Read `train/`, `test/` and such, each with classes, captions or photos."""
    splits = _splits(folder)
    if not splits:
        return None
    for name in folder.images:
        if "/" not in name:
            folder.left_out[portable(name)] = "beside the split folders, so it has no split"
    photos = []
    for name, split in splits.items():
        inner = folder.below(name)
        for photo in _table_of_images(inner) or _class_folders(inner) or _all_photos(inner):
            photos.append(replace(photo, name=f"{portable(name)}/{photo.name}", split=split))  # noqa: PERF401
    return photos


def _dtd(folder: Folder) -> list[Photo] | None:
    """Read `images/<class>/<class>_0001.jpg`, with the published splits in `labels/` if they are there."""
    images = folder.below("images")
    if not images.images or not all(re.fullmatch(r"([^/]+)/\1_\d+\.[^/]+", name) for name in images.images):
        return None
    photos, split_of = _in_classes(images), {}
    for file, split in DTD_SPLITS.items():
        if f"labels/{file}" in folder.others:
            names = _read_text(folder.path / "labels" / file).split("\n")
            split_of |= {portable(name.strip()): split for name in names if name.strip()}
    if not split_of:
        return photos
    for photo in photos:
        if photo.name not in split_of:
            folder.left_out[photo.name] = f"in none of labels/{', '.join(DTD_SPLITS)}"
    return [replace(photo, split=split_of[photo.name]) for photo in photos if photo.name in split_of]


def _sysu(folder: Folder) -> list[Photo] | None:
    """Read `<class>/images/`; contours and annotations are beside it."""
    photos = replace(folder, images=[name for name in folder.images if re.fullmatch(r"[^/]+/images/[^/]+", name)])
    return _in_classes(photos) if len(photos.sub_folders) > 1 and photos.sub_folders == folder.sub_folders else None


def _animals10(folder: Folder) -> list[Photo] | None:
    """Read folders with Italian names; the classes get English ones."""
    if len(folder.sub_folders) < 2 or not set(folder.sub_folders) <= ANIMALS10.keys():
        return None
    return [replace(photo, label=ANIMALS10[photo.label]) for photo in _in_classes(folder)]


def _class_folders(folder: Folder) -> list[Photo] | None:
    """Read a folder for every class, unless most photos lie beside them."""
    _refuse_test_folders(folder)
    loose = [name for name in folder.images if "/" not in name]
    if len(folder.sub_folders) < 2 or 2 * len(loose) > len(folder.images):
        return None
    for name in folder.sub_folders:
        if name.lower() in SPLITS:
            logger.warning("%s: %s is taken for a class, like the folders beside it", folder.path, name)
    for name in loose:
        folder.left_out[portable(name)] = "beside the class folders, so it has no class"
    return _in_classes(folder)


# In this order; a folder that has none of these layouts is a folder of images.
LAYOUTS: dict[str, Callable[[Folder], list[Photo] | None]] = {
    "a table of images": _table_of_images,
    "split folders": _split_folders,
    "DTD": _dtd,
    "SYSU-Shape": _sysu,
    "Animals-10": _animals10,
    "class folders": _class_folders,
}


def _photo(folder: Folder, name: str, label: str | None = None) -> Photo:
    return Photo(os.path.join(folder.path, name), portable(name), label)


def _all_photos(folder: Folder) -> list[Photo]:
    return [_photo(folder, name) for name in folder.images]


def _in_classes(folder: Folder) -> list[Photo]:
    """Return the photos below the first level, each of the class that the folder there is named after."""
    return [_photo(folder, name, portable(name.split("/")[0])) for name in folder.images if "/" in name]


def _read_rows(table: Path) -> list[tuple[int, dict[str, object]]]:
    """Return the rows of a JSON Lines or CSV file with their line numbers."""
    text, rows = _read_text(table), []
    if table.suffix.lower() == ".csv":
        header = text.partition("\n")[0]
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count))
        try:
            return [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise UserError(f"{printable(str(table))} line {reader.line_num}: is not CSV ({error})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{printable(str(table))} line {number}: is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{printable(str(table))} line {number}: must be an object with a file_name")
            rows.append((number, row))
    return rows


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{printable(str(path))}: is not a regular file, so it cannot be read")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{printable(str(path))}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{printable(str(path))}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value).encode("utf-8", "replace").decode()
