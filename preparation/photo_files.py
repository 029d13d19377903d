"""Files as people have them: found without going round in circles."""

import os
from dataclasses import dataclass
from pathlib import Path

from common.files import LOCK_FILE, portable
from image_data.decode import IMAGE_SUFFIXES


def is_hidden(name: str, is_folder: bool) -> bool:
    """Return whether this is what systems and archivers leave behind: .DS_Store, ._photo.jpg, the folder __MACOSX."""
    return name.startswith(".") or (is_folder and name.startswith("__"))


@dataclass
class Folder:
    """A folder with the names of all files below it, relative to it."""

    path: Path
    images: list[str]
    others: list[str]
    left_out: dict[str, str]  # what cannot be used, and why

    def below(self, name: str) -> "Folder":
        """Return one of the sub-folders."""
        start = f"{name}/"
        images = [file.removeprefix(start) for file in self.images if file.startswith(start)]
        others = [file.removeprefix(start) for file in self.others if file.startswith(start)]
        return Folder(self.path / name, images, others, self.left_out)

    @property
    def sub_folders(self) -> list[str]:
        """Return those with images in them."""
        return sorted({name.partition("/")[0] for name in self.images if "/" in name})


def find_files(path: Path, leave_out: Path | None = None) -> Folder:
    """Find all files in a folder, sorted; links are followed, but every folder is searched once."""
    folder = Folder(path, [], [], {})
    pending, linked = [""], []
    seen = {_identity(leave_out)} if leave_out is not None and leave_out.exists() else set()
    while pending or linked:
        name = pending.pop() if pending else linked.pop(0)  # links last: a folder keeps its own name
        searched = os.path.join(path, name)
        try:
            identity = _identity(searched)
            if identity in seen:
                continue
            seen.add(identity)
            entries = sorted(os.scandir(searched), key=lambda entry: entry.name)
        except OSError as error:
            folder.left_out[portable(name or ".")] = error.strerror or str(error)
            continue
        if name and any(entry.name == LOCK_FILE for entry in entries):
            continue  # a run, a prepared folder or a report of ours, made among the photos
        for entry in entries:
            below = f"{name}/{entry.name}" if name else entry.name
            is_folder = os.path.isdir(entry.path)
            if is_hidden(entry.name, is_folder):
                continue
            if is_folder:
                (linked if entry.is_symlink() else pending).append(below)
            else:
                is_image = os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES
                (folder.images if is_image else folder.others).append(below)
    folder.images.sort(key=portable)
    folder.others.sort(key=portable)
    return folder


def _identity(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
