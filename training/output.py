"""The run's folder: checked before anything is made in it."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from training.checkpoint import checkpoints
from training.tracking import METRICS_FILE

if TYPE_CHECKING:
    from training.config import TrainingConfig

logger = logging.getLogger(__name__)

# Per parameter: raw weights, moving average and the two moments of Adam, four bytes each.
BYTES_PER_PARAMETER = 16


def check_output_dir(config: TrainingConfig) -> None:
    """Raise before the work starts if the run could not be written."""
    path = Path(config.output_dir)
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"--output_dir {path}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir {path}: no permission to write in {existing}")


def check_disk(config: TrainingConfig, num_parameters: int) -> None:
    """Raise if not even two checkpoints fit: the one that is kept while the next is written."""
    existing = Path(config.output_dir)
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    checkpoint = num_parameters * BYTES_PER_PARAMETER
    if free < 2 * checkpoint:
        raise UserError(
            f"--output_dir {config.output_dir}: {_size(free)} are free on its disk, but a checkpoint takes "
            f"{_size(checkpoint)} and two must fit; free some space or choose another disk"
        )
    wanted = (config.checkpoints_total_limit + 1) * checkpoint
    if free < wanted:
        logger.warning(
            "%s are free on the disk of %s; %d checkpoints take %s: consider a lower --checkpoints_total_limit",
            _size(free),
            config.output_dir,
            config.checkpoints_total_limit,
            _size(wanted),
        )


def make_output_dir(config: TrainingConfig, is_main: bool) -> Path:
    """The folder, emptied first if it is to be overwritten; a run is not written over another by accident."""
    path = Path(config.output_dir)
    if not is_main:
        return path
    has_run = (path / METRICS_FILE).exists()
    try:
        if config.overwrite_output_dir and path.exists():
            if any(path.iterdir()) and not has_run:
                raise UserError(f"--overwrite_output_dir: {path} holds something else than a run; delete it yourself")
            shutil.rmtree(path)
        elif has_run and config.resume_from_checkpoint == "none" and checkpoints(path):
            raise UserError(
                f"--output_dir {path} holds a run already; continue it with --resume_from_checkpoint latest, "
                f"delete it with --overwrite_output_dir, or choose another folder"
            )
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output_dir {path}: cannot be written ({error.strerror})") from error
    return path


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
