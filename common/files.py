"""Files that are whole, the old one or the new one, whatever happens in between; and folders of one process."""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import IO

from common.errors import UserError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_locks: dict[Path, IO] = {}


def sync(path: Path) -> None:
    """Return when the disk, not only the kernel, knows a file or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder that the user names, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: this folder cannot be made ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{path}: no permission to write to this folder")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_folder(new: Path, target: Path) -> None:
    """Put a finished folder in the place of another of the same name, if there is one."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def first_existing(path: Path) -> Path:
    """Return the path itself or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def default_cache_dir() -> Path:
    """Return where what can be made again is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "exact-ddpm"


def lock(path: Path, flag: str = "--output_dir") -> None:
    """Hold the folder until this process ends, however it ends.

    A POSIX lock belongs to the process: data workers that outlive it for a moment do not hold it.
    """
    if path.resolve() in _locks:
        return
    file = (path / LOCK_FILE).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("%s cannot be locked (%s): make sure that no other run writes there", path, error.strerror)
            return
        raise UserError(
            f"{flag} {path}: another run is writing there at this moment; wait for it or choose another folder"
        ) from error
    _locks[path.resolve()] = file
