"""Unpacking an archive that somebody sent: only regular files come out of it, and only into the folder."""

import contextlib
import errno
import functools
import hashlib
import logging
import lzma
import os
import posixpath
import re
import shutil
import tarfile
import zipfile
import zlib
from calendar import timegm
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from common.errors import UserError
from common.files import printable
from common.interruption import stop_if_requested
from common.progress import progress_bar
from image_data.decode import IMAGE_SUFFIXES, LARGEST_FILE
from preparation.photo_files import is_hidden

logger = logging.getLogger(__name__)

# All that a layout looks at; contours, annotations and programs stay in the archive.
WANTED = IMAGE_SUFFIXES | {".txt", ".csv", ".jsonl"}
DISK_LEFT_FREE = 2**30
BLOCK = 2**20
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, NotImplementedError)


def identity_of(source: Path) -> str | None:
    """Return a text that changes when an archive does; None for a folder."""
    if source.is_dir():
        return None
    status = source.stat()
    return hashlib.blake2b(repr((source.name, status.st_size, status.st_mtime_ns)).encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def unpacked(source: Path, beside: Path) -> Iterator[Path]:
    """Yield a folder as it is; or the images and texts of an archive, unpacked in `beside` for as long as needed."""
    if source.is_dir():
        yield source
        return
    folder = beside / f".unpacked-{identity_of(source)}"
    if not folder.is_dir():
        _unpack_whole(source, folder)
    yield folder
    shutil.rmtree(folder)


def _unpack_whole(archive: Path, folder: Path) -> None:
    """Unpack an archive; the folder gets its name when everything is in it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if not (zipfile.is_zipfile(archive) or tarfile.is_tarfile(archive)):
            raise UserError(f"{archive}: is neither a folder nor a zip or tar archive that is whole")
        _unpack(archive, partial)
        partial.rename(folder)
    except (*DAMAGED, OSError) as error:
        if getattr(error, "errno", None) is None:  # gzip and bzip2 call a damaged file an OSError, without a number
            raise UserError(f"{archive}: the archive is damaged or of an unknown kind ({error})") from error
        raise UserError(f"{archive}: cannot be unpacked to {folder} ({error.strerror})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Member(NamedTuple):
    name: str
    kind: str  # "file", "folder", or what else it is
    size: int
    modified: float
    open: Callable[[], IO[bytes]]


def _unpack(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    with contextlib.closing(_members(archive)) as members, progress_bar(desc="Unpacking", unit="files") as bar:
        for member in members:
            stop_if_requested("stopped while unpacking; the same command begins anew")
            name, path = member.name, posixpath.normpath(member.name)
            if posixpath.isabs(name) or ".." in name.split("/") or re.match(r"[A-Za-z]:", name) or "\0" in name:
                # No honest archive has such a name; of one that has it, nothing is used.
                raise UserError(f"{archive}: refused, because '{printable(name)}' in it leads out of the folder")
            *folders, file = path.split("/")
            hidden = is_hidden(file, is_folder=False) or any(is_hidden(name, is_folder=True) for name in folders)
            if hidden or member.kind == "folder" or posixpath.splitext(path)[1].lower() not in WANTED:
                continue
            if shutil.disk_usage(folder).free - member.size < DISK_LEFT_FREE:
                raise UserError(f"{archive}: no room to unpack it, less than 1 GB of disk would be left")
            reason = _write(member, folder / path) if member.kind == "file" else f"{member.kind} in the archive"
            if reason is not None:
                logger.warning("left in the archive: %s (%s)", printable(path), reason)
            bar.update()


def _members(archive: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                # Unix keeps the kind of a file in the upper half; some archivers of Windows write backslashes.
                kind = "a link" if (info.external_attr >> 28) == 0xA else "folder" if info.is_dir() else "file"
                kind = "an encrypted file" if info.flag_bits & 1 else kind
                year, month, *rest = info.date_time
                modified = timegm((year, min(max(month, 1), 12), *rest, 0, 0, 0))  # some write a month 0
                name, read = info.filename.replace("\\", "/"), functools.partial(file.open, info)
                yield _Member(name, kind, info.file_size, modified, read)
        return
    with tarfile.open(archive) as file:
        for info in file:
            kind = "file" if info.isreg() else "folder" if info.isdir() else "a link or device"
            yield _Member(info.name, kind, info.size, info.mtime, functools.partial(file.extractfile, info))
        _expect_the_end(file.fileobj)


def _expect_the_end(file: IO[bytes]) -> None:
    """Read on to the blocks of zeros that end a tar; tarfile takes a cut or a damaged header for the end as well."""
    length = 0
    while block := file.read(BLOCK):
        length += len(block)
        if any(block):
            raise tarfile.ReadError("a header in the middle cannot be read")
    if length == 0:
        raise tarfile.ReadError("its end is missing")


def _write(member: _Member, path: Path) -> str | None:
    """Unpack one file; return the reason if that is not possible."""
    if member.size > LARGEST_FILE:
        return f"a file of {member.size / 2**30:.1f} GB is no photo"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        return f"cannot be written under this name ({error.strerror})"
    with file, member.open() as source:
        remaining = member.size  # and no more, whatever comes out
        while remaining and (block := source.read(min(BLOCK, remaining))):
            file.write(block)
            remaining -= len(block)
    # The time of the original, so that a photo is known again when the archive is unpacked once more; in 32 bits,
    # because no file system keeps every time that a header may claim.
    modified = min(max(member.modified, 0), 2**32 - 1)
    os.utime(path, (modified, modified))
    return None
