"""One writer for a folder at a time."""

import errno
import fcntl
import logging
from pathlib import Path
from typing import IO

from common.errors import UserError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

_locks: dict[Path, IO] = {}


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
