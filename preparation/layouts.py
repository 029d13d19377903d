"""Which collection of photos this is, and what its folders say: class, caption, split."""

import csv
import io
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from image_data.annotations import ANIMALS10, CAPTION_COLUMNS, LABEL_COLUMNS
from preparation.photo_files import find_files, portable, printable

SPLITS = {
    **dict.fromkeys(("train", "training", "train_data"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "eval_data"), "test"),
}
NORMALISED_COPY = "normalized_eval_data"  # of eval_data: the same photos again
DTD_SPLITS = {"train1.txt": "train", "val1.txt": "validation", "test1.txt": "test"}
METADATA_FILES = ("metadata.jsonl", "metadata.csv")
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


@dataclass
class _Folder:
    """A folder with the names of everything below it."""

    path: Path
    images: list[str]
    others: list[str]
    left_out: dict[str, str]

    def below(self, name: str) -> "_Folder":
        def inner(names: Iterable[str]) -> list[str]:
            return [other[len(name) + 1 :] for other in names if other.startswith(f"{name}/")]

        return _Folder(self.path / name, inner(self.images), inner(self.others), self.left_out)

    def photo(self, name: str, **facts: str | tuple[str, ...] | None) -> Photo:
        return Photo(os.path.join(self.path, name), portable(name), **facts)

    @property
    def sub_folders(self) -> list[str]:
        """Those with images in them."""
        return sorted({name.partition("/")[0] for name in self.images if "/" in name})


def recognise(source: Path, leave_out: Path | None = None) -> Collection:
    """The photos in a folder, by the first layout that fits; what is in the folder `leave_out` does not count."""
    files = find_files(source, leave_out)
    folder = _Folder(source, files.images, files.others, {portable(name): why for name, why in files.problems.items()})
    layout, photos = _recognise(folder)
    photos = _without_twins(photos, folder.left_out)
    if any(photo.label for photo in photos):
        for photo in photos:
            if photo.label is None:
                folder.left_out[photo.name] = "has no class, while others have"
        photos = [photo for photo in photos if photo.label is not None]
    return Collection(layout, sorted(photos, key=lambda photo: photo.name), folder.left_out)


def only_classes(collection: Collection, classes: list[str]) -> Collection:
    """The photos of these classes, if any are named."""
    there = sorted({photo.label for photo in collection.photos if photo.label is not None})
    for name in classes:
        if name not in there:
            raise UserError(f"--classes {name}: there is no such class; there are: {', '.join(there) or 'none'}")
    photos = [photo for photo in collection.photos if not classes or photo.label in classes]
    return Collection(collection.layout, photos, collection.left_out)


def _recognise(folder: _Folder) -> tuple[str, list[Photo]]:
    while True:
        for layout, photos_of in LAYOUTS.items():
            photos = photos_of(folder)
            if photos is not None:
                return layout, photos
        inside = folder.sub_folders
        if len(inside) != 1 or any("/" not in name for name in folder.images):
            return _folders(folder)
        folder = folder.below(inside[0])  # sysu-shape-dataset-master/, raw-img/: the collection is one level down


def _captioned(folder: _Folder) -> list[Photo] | None:
    """`metadata.jsonl`, `metadata.csv`, or one CSV file, with a row for every image."""
    tables = [name for name in folder.others if "/" not in name and name.lower().endswith((".jsonl", ".csv"))]
    named = [name for name in METADATA_FILES if name in tables]
    if not named and (len(tables) != 1 or not tables[0].lower().endswith(".csv") or not folder.images):
        return None
    table = folder.path / (named or tables)[0]
    rows = _rows(table)
    columns = {column for _, row in rows for column in row}
    file_column = _first(FILE_COLUMNS, columns)
    if file_column is None and not named:
        return None  # a table of something else
    if file_column is None:
        raise UserError(f"{printable(str(table))}: no column with file names ({', '.join(FILE_COLUMNS)})")
    on_disk = {portable(name): name for name in folder.images}
    if not named and not any(portable(str(row.get(file_column))) in on_disk for _, row in rows):
        return None
    label_column, caption_column = _first(LABEL_COLUMNS, columns), _first(CAPTION_COLUMNS, columns)
    photos = []
    for number, row in rows:
        name = row.get(file_column)
        if not isinstance(name, str) or not name or "\0" in name:
            folder.left_out[f"{table.name} line {number}"] = f"{file_column} is not the name of a file"
        elif posixpath.isabs(name) or posixpath.normpath(name).startswith(".."):
            folder.left_out[portable(name)] = f"{table.name} line {number} leads out of the folder"
        else:
            label, caption = _text(row.get(label_column)), _captions(row.get(caption_column))
            name = posixpath.normpath(name)
            photos.append(folder.photo(on_disk.get(portable(name), name), label=label, caption=caption))
    for name in sorted(set(on_disk) - {photo.name for photo in photos}):
        folder.left_out[name] = f"not in {table.name}"
    return photos


def _split_folders(folder: _Folder) -> list[Photo] | None:
    """`train/`, `test/` and such, each with classes, captions or photos."""
    parts = [name for name in folder.sub_folders if name != NORMALISED_COPY]
    splits = {name: SPLITS.get(name.lower()) for name in parts}
    if len(parts) < 2 or None in splits.values() or "train" not in splits.values():
        return None
    photos = []
    for name, split in splits.items():
        inner = folder.below(name)
        of_part = _captioned(inner) or _class_folders(inner) or [inner.photo(image) for image in inner.images]
        photos += [
            Photo(photo.path, f"{portable(name)}/{photo.name}", photo.label, photo.caption, split) for photo in of_part
        ]
    return photos


def _sysu(folder: _Folder) -> list[Photo] | None:
    """`<class>/images/`; contours and annotations are beside it."""
    inside = re.compile(r"[^/]+/images/[^/]+")
    classes = {name.split("/")[0] for name in folder.images if inside.fullmatch(name)}
    if len(classes) < 2 or classes != set(folder.sub_folders):
        return None
    photos = [name for name in folder.images if inside.fullmatch(name)]
    return [folder.photo(name, label=portable(name.split("/")[0])) for name in photos]


def _animals10(folder: _Folder) -> list[Photo] | None:
    """Folders with Italian names; the classes get English ones."""
    names = folder.sub_folders
    if len(names) < 2 or any(name not in ANIMALS10 for name in names):
        return None
    return _in_classes(folder, lambda name: ANIMALS10[name])


def _dtd(folder: _Folder) -> list[Photo] | None:
    """`images/<class>/<class>_0001.jpg`, with the published splits in `labels/` if they are there."""
    images = folder.below("images")
    if not images.images or not all(re.fullmatch(r"([^/]+)/\1_\d+\.[^/]+", name) for name in images.images):
        return None
    photos = _in_classes(images, portable)
    split_of = {}
    for file, split in DTD_SPLITS.items():
        if f"labels/{file}" in folder.others:
            names = _read_text(folder.path / "labels" / file).split("\n")
            split_of |= {portable(name.strip()): split for name in names if name.strip()}
    if not split_of:
        return photos
    for photo in photos:
        if photo.name not in split_of:
            folder.left_out[photo.name] = f"in none of labels/{', '.join(DTD_SPLITS)}"
    return [
        Photo(photo.path, photo.name, photo.label, None, split_of[photo.name])
        for photo in photos
        if photo.name in split_of
    ]


LAYOUTS: dict[str, Callable[[_Folder], list[Photo] | None]] = {
    "a table of images": _captioned,
    "split folders": _split_folders,
    "DTD": _dtd,
    "SYSU-Shape": _sysu,
    "Animals-10": _animals10,
}


def _folders(folder: _Folder) -> tuple[str, list[Photo]]:
    photos = _class_folders(folder)
    if photos is not None:
        return "class folders", photos
    return "a folder of images", [folder.photo(name) for name in folder.images]


def _class_folders(folder: _Folder) -> list[Photo] | None:
    """A folder for every class, unless most photos lie beside them."""
    loose = [name for name in folder.images if "/" not in name]
    if len(folder.sub_folders) < 2 or 2 * len(loose) > len(folder.images):
        return None
    for name in loose:
        folder.left_out[portable(name)] = "beside the class folders, so it has no class"
    return _in_classes(folder, portable)


def _in_classes(folder: _Folder, label_of: Callable[[str], str]) -> list[Photo]:
    return [folder.photo(name, label=label_of(name.split("/")[0])) for name in folder.images if "/" in name]


def _without_twins(photos: list[Photo], left_out: dict[str, str]) -> list[Photo]:
    """One photo of each name: a table may name a file twice, and two spellings of an accent are one name."""
    first: dict[str, Photo] = {}
    for photo in photos:
        if first.setdefault(photo.name, photo) is not photo:
            left_out[f"{photo.name} (again)"] = "there is another of this name"
    return list(first.values())


def _rows(table: Path) -> list[tuple[int, dict[str, object]]]:
    """The rows of a JSON Lines or CSV file with their line numbers."""
    text = _read_text(table)
    if table.suffix.lower() == ".csv":
        header = text.partition("\n")[0]
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count))
        try:
            return [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise UserError(f"{printable(str(table))} line {reader.line_num}: is not CSV ({error})") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{printable(str(table))} line {number}: is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{printable(str(table))} line {number}: must be an object with a file_name")
            rows.append((number, row))
    return rows


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{printable(str(path))}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{printable(str(path))}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _first(wanted: Iterable[str], columns: set[str]) -> str | None:
    return next((column for column in wanted if column in columns), None)


def _captions(value: object) -> str | tuple[str, ...] | None:
    return tuple(map(str, value)) or None if isinstance(value, list) else _text(value)


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value).encode("utf-8", "replace").decode()
