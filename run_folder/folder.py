"""The run's folder: the names of its files, how they are read, and what is checked before anything is made in it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from common.errors import UserError
from common.files import LOCK_FILE, first_existing, lock
from conditions.guidance import CONDITION_FILE
from run_folder.checkpoint_files import find_checkpoint
from run_folder.config import ConditionalConfig, TrainingConfig

if TYPE_CHECKING:
    from common.processes import Processes

logger = logging.getLogger(__name__)

QUARTERS = 4  # of the timesteps, whose losses a line of metrics tells apart: loss_q0 to loss_q3
METRICS_FILE, CONFIG_FILE, PIPELINE_FILE = "metrics.jsonl", "config.yaml", "model_index.json"


@dataclass(frozen=True)
class RunFolder:
    """A run on the disk. It alone knows the names of its files; who wants one asks for it here."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def pipeline_file(self) -> Path:
        return self.path / PIPELINE_FILE

    def read_config(self) -> TrainingConfig:
        """Read what the run was told, a `ConditionalConfig` if train_conditional.py wrote it."""
        try:
            values = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
            kind = ConditionalConfig if "condition" in values else TrainingConfig
            known = {entry.name for entry in fields(kind)}
            return kind(**{name: value for name, value in values.items() if name in known})
        except OSError as error:
            raise UserError(f"{self.path} is not a run: {CONFIG_FILE} cannot be read ({error.strerror})") from error
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError) as error:
            raise UserError(f"{self.config_file} is not what a training wrote there") from error

    def read_metrics(self) -> list[dict]:
        """Read the lines of metrics; one that is being written while this reads is left out."""
        lines = []
        if self.metrics_file.is_file():
            for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    break
        return lines


# Per parameter: raw weights, moving average and the two moments of Adam, four bytes each.
BYTES_PER_PARAMETER = 16
WRITTEN_BY_A_RUN = (
    *(LOCK_FILE, METRICS_FILE, CONFIG_FILE, "samples", "unet", "scheduler", PIPELINE_FILE, "README.md"),
    *("checkpoint-*", ".checkpoint-*", ".pipeline.tmp", ".unet.old", ".scheduler.old", ".*.tmp"),
    *("evaluation_results.*", "evaluation_per_class.csv", "best_scores.csv", "*_vs_*.png"),
    *(CONDITION_FILE, "conditional_pipeline.py", "text_encoder", "tokenizer", ".text_encoder.old", ".tokenizer.old"),
)


def check_disk(config: TrainingConfig, num_parameters: int) -> None:
    """Raise if not even two checkpoints fit: the one that is kept while the next is written."""
    free = shutil.disk_usage(first_existing(Path(config.output_dir))).free
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


def open_run(config: TrainingConfig, processes: Processes) -> Path | None:
    """Make the run's folder or take the one that is there; the checkpoint to go on from, if there is one.

    The main process does it and the others hear of it.
    """
    checkpoint = None
    if processes.is_main:
        path = Path(config.output_dir)
        try:
            if path.exists():
                lock(path)
            checkpoint = find_checkpoint(config)
            make_output_dir(config)
            lock(path)
        except OSError as error:
            raise UserError(f"--output_dir {path}: cannot be written ({error.strerror})") from error
    checkpoint = processes.broadcast(checkpoint)
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: not to be seen from process {processes.index}; the processes must share it")
    return checkpoint


def check_output_dir(config: TrainingConfig) -> None:
    """Raise, before the work starts, if the run could not be written or would overwrite something else."""
    path = Path(config.output_dir)
    existing = first_existing(path)
    if not existing.is_dir():
        raise UserError(f"--output_dir {path}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir {path}: no permission to write in {existing}")
    if existing != path:
        return
    foreign = sorted(entry.name for entry in path.iterdir() if not of_a_run(entry.name, config))
    if foreign and not is_run(path):
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(
            f"--output_dir {path}: holds something else than a run ({listed}); choose an empty or new folder"
        )
    if is_run(path) and config.resume_from_checkpoint == "none" and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {path} holds a run already; continue it with --resume_from_checkpoint latest, "
            f"delete it with --overwrite_output_dir, or choose another folder"
        )


def is_run(path: Path) -> bool:
    return (path / METRICS_FILE).exists() and (path / CONFIG_FILE).exists()


def of_a_run(name: str, config: TrainingConfig) -> bool:
    """Whether a run writes a file or folder of this name."""
    patterns = (*WRITTEN_BY_A_RUN, Path(config.logging_dir).parts[0])
    return any(fnmatch(name, pattern) for pattern in patterns)


def make_output_dir(config: TrainingConfig) -> None:
    """The folder; to overwrite a run is to remove what a run writes, and nothing else that may be there."""
    path = Path(config.output_dir)
    if config.overwrite_output_dir and path.exists():
        for entry in path.iterdir():
            if entry.name != LOCK_FILE and of_a_run(entry.name, config):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    path.mkdir(parents=True, exist_ok=True)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
