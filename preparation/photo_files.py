"""Files as people have them: found without going round in circles, read without hanging, named in one line."""

import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.files import LOCK_FILE
from image_data.decode import UndecodableImage

# What is meant to be an image by its name. Some of these Pillow cannot read; they are then named, not passed over.
IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .apng .gif .bmp .dib .tif .tiff .webp .ppm .pgm .pbm .pnm .tga .jp2 .avif .heic .heif"
    .split()
)  # fmt: skip
HIDDEN = (".", "__")  # what systems and archivers leave behind: .DS_Store, ._photo.jpg, __MACOSX
LARGEST_FILE = 2**30  # no photo; reading it might take all memory


@dataclass
class Files:
    """What is in a folder and below it, as names relative to it."""

    images: list[str]
    others: list[str]
    problems: dict[str, str]  # what could not be searched, and why


def find_files(folder: Path, leave_out: Path | None = None) -> Files:
    """All files in a folder, sorted; links are followed, but every folder is searched once."""
    files = Files([], [], {})
    seen, pending, linked = set(), [""], []
    own = _identity(leave_out) if leave_out is not None and leave_out.exists() else None
    while pending or linked:
        name = pending.pop() if pending else linked.pop(0)  # links last: a folder keeps its own name
        path = os.path.join(folder, name)
        try:
            identity = _identity(path)
            if identity == own or identity in seen:
                continue
            seen.add(identity)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            files.problems[name or "."] = error.strerror or str(error)
            continue
        if name and any(entry.name == LOCK_FILE for entry in entries):
            continue  # a run, a prepared folder or a report of ours, made among the photos
        for entry in entries:
            below = f"{name}/{entry.name}" if name else entry.name
            if entry.name.startswith(HIDDEN):
                continue
            if os.path.isdir(entry.path):
                (linked if entry.is_symlink() else pending).append(below)
            else:
                is_image = os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES
                (files.images if is_image else files.others).append(below)
    files.images.sort(key=portable)
    files.others.sort(key=portable)
    return files


def read_file(path: str) -> bytes:
    """The bytes of an image file; `UndecodableImage` if they cannot be had."""
    with _one_kind_of_error():
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UndecodableImage("not a regular file")  # reading a pipe would wait for ever
        if status.st_size > LARGEST_FILE:
            raise UndecodableImage(f"a file of {status.st_size / 2**30:.1f} GB is no photo")
        if status.st_size == 0:
            raise UndecodableImage("the file is empty")
        return Path(path).read_bytes()


def modified_at(path: str) -> float:
    """When a file was last changed; `UndecodableImage` if it is not there."""
    with _one_kind_of_error():
        return os.stat(path).st_mtime


@contextmanager
def _one_kind_of_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UndecodableImage(error.strerror or str(error)) from error
    except UndecodableImage:
        raise
    except ValueError as error:  # a name from a table that no file can have
        raise UndecodableImage(str(error)) from error


def portable(name: str) -> str:
    """A name as it is on every machine: macOS writes accents in two characters, and bytes may be no text at all."""
    text = name.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text)


def printable(name: str) -> str:
    """A name on one line of any terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in portable(name))


def _identity(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
