"""Replace files so that either the old or the new one is always whole, and lock folders for one process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import xxhash

from common.errors import UserError, user_errors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOCK_FILE, TURN_FILE = ".lock", ".turn.lock"
CHECKSUM = "checksum"  # in the metadata of what `save_safetensors` writes
MOST_LAYERS = 1000
UMASK = os.umask(0o077)  # reading it means setting another, so this is done before there are threads
os.umask(UMASK)
_locks: dict[Path, IO] = {}


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, has reached the disk and not only the kernel."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written_aside(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that takes the place of `path` at the end, or is removed if something is raised.

    Unless it is `durable`, a file may be empty after the machine itself has failed, but many are written faster.
    """
    # Processes of several machines that share a folder may have the same number.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        if durable:
            sync(aside)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):  # after a replacement there is none, and what was raised matters more
            aside.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step."""
    with written_aside(path) as aside:
        aside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as one file, whole or not at all, making its folder; whatever goes wrong is an `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = metadata or {}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()  # removes an empty folder that is in the way; fails if the folder holds anything
    with written_aside(path) as aside:
        try:
            save_file(tensors, aside, {**metadata, CHECKSUM: checksum(tensors, metadata)})
            follow_umask(aside)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def follow_umask(path: Path) -> None:
    """Give safetensors, one file or all in a folder, the umask's permissions: as written, only the owner has any."""
    for file in path.rglob("*.safetensors") if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # some file systems have no such rights
            file.chmod(0o666 & ~UMASK)


def load_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read the tensors and the metadata of `save_safetensors`; whatever is wrong with the file is an `OSError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if metadata.pop(CHECKSUM, None) != checksum(tensors, metadata):
        raise OSError("it is not what was written")
    return tensors, metadata


def checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """Hash tensors and metadata as fast as they are read: it tells of damage, not of malice."""
    import torch

    digest = xxhash.xxh3_128(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def file_checksum(path: Path) -> str:
    """Hash a file as `checksum` does tensors."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_layers(settings: object, name: str = "") -> None:
    """Raise for the settings of a network with more layers than any has, since to build it would take for ever."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            check_layers(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            check_layers(value, name)
    elif "layer" in name and isinstance(settings, int | float) and settings > MOST_LAYERS:
        raise ValueError(f"{name} is {settings}, and no network has more than {MOST_LAYERS} layers")


def make_folder(path: Path) -> None:
    """Make a folder that the user names, unless it is there."""
    with user_errors(f"{path}: this folder cannot be made", OSError):
        path.mkdir(parents=True, exist_ok=True)
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


def copy_by_links(folder: Path, target: Path) -> None:
    """Copy a folder whose files never change: as hard links, which take no room, where the file system has them."""

    def copy(source: str, copied: str) -> None:
        try:
            os.link(source, copied)
        except OSError:  # the file system has none
            shutil.copyfile(source, copied)

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, copy_function=copy)


def first_existing(path: Path, flag: str = "--output_dir") -> Path:
    """Return the path itself or the nearest folder above it that is there."""
    with user_errors(f"{flag} {path}: cannot be the name of a folder", OSError):
        return next(folder for folder in (path, *path.parents) if folder.exists())


def check_folder(path: Path, flag: str = "--output_dir") -> bool:
    """Raise unless this is, or can become, a folder to write to; return whether it is there."""
    existing = first_existing(path, flag)
    if not existing.is_dir():
        raise UserError(f"{flag} {path}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{flag} {path}: no permission to write in {existing}")
    return existing == path


def default_cache_dir() -> Path:
    """Return the folder that keeps, between runs, whatever can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "exact-ddpm"


def lock(path: Path, flag: str = "--output_dir") -> None:
    """Hold the folder until this process ends, however it ends; data workers that outlive it do not hold it."""
    if path.resolve() in _locks:
        return
    file = (path / LOCK_FILE).open("a")
    try:
        # Not filelock, whose flock(2) a forked data worker would inherit and hold after this process has died.
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


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Let only one process at a time work on this folder, so that it can read, change and write back a file.

    This is separate from `lock`, which a training holds while others measure its run. No file is left behind.
    """
    path, is_ours = folder / TURN_FILE, False
    while not is_ours:
        with path.open("a") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                logger.warning("%s cannot be locked (%s): make sure that nobody else writes", folder, error.strerror)
            with contextlib.suppress(FileNotFoundError):  # the previous process has removed the awaited file
                is_ours = os.path.samefile(path, file.fileno())
            if is_ours:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)


def unlock(path: Path) -> None:
    """Release a folder that `lock` holds, and leave no trace of this process in it."""
    if file := _locks.pop(path.resolve(), None):
        (path / LOCK_FILE).unlink(missing_ok=True)
        file.close()


def portable(name: str) -> str:
    """Return a name in the form that all machines share: macOS stores an accent apart, and bytes may not be text."""
    try:
        data = name.encode("utf-8", "surrogateescape")  # the bytes that the system has
    except UnicodeEncodeError:  # of JSON
        data = name.encode("utf-8", "surrogatepass")
    text = data.decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text)


def printable(name: str) -> str:
    """Return a name on one line of any terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in portable(name))
