"""A run while it is trained: its checkpoints as they appear, and the best of them, which is kept."""

import glob
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from common.errors import reason_of, user_errors
from common.files import copy_by_links, in_turn, replace_folder, write_atomically
from common.processes import Processes
from evaluation.metrics import metric_of
from evaluation.results import Measured, Row, find_row
from run_folder.checkpoints import MANIFEST, InvalidCheckpoint, checkpoints, newest, read_file, step_of
from run_folder.folder import BEST_OF, METHOD, RunFolder, is_over
from run_folder.saved_model import SavedModel, read_checkpoint

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 10.0
HELD = "watched"  # .checkpoint-500.watched-HOST-PID: what the training may prune meanwhile


def appearing(run: RunFolder, weights: str | None, processes: Processes) -> Iterator[SavedModel]:
    """Yield every checkpoint of a run once, oldest first, as it appears, until that of the run's end has been.

    While one is yielded its files stay: they have a second name, which pruning does not know.
    """
    seen: set[tuple[str, int]] = set()
    waiting = None
    if processes.is_main:
        remove_abandoned(run.path)
    while True:
        model = processes.broadcast(next_checkpoint(run, weights, seen) if processes.is_main else None)
        if model is not None:
            try:
                yield model
                processes.barrier()
            finally:
                if processes.is_main:
                    shutil.rmtree(model.path, ignore_errors=True)
        elif processes.broadcast(processes.is_main and has_ended(run, seen)):
            return
        else:
            if waiting != len(seen):
                waiting = len(seen)
                logger.info("Waiting for the next checkpoint in %s", run.path)
            time.sleep(SECONDS_BETWEEN_LOOKS)


def next_checkpoint(run: RunFolder, weights: str | None, seen: set[tuple[str, int]]) -> SavedModel | None:
    """Return the oldest whole checkpoint that has not been seen, held under another name, and note all up to it."""
    for folder in checkpoints(run.path):
        try:
            key = folder.name, (folder / MANIFEST).stat().st_mtime_ns  # a run that starts over writes others
        except OSError:  # pruned, or somebody took its manifest away
            continue
        if key in seen:
            continue
        seen.add(key)
        held = folder.with_name(f".{folder.name}.{HELD}-{platform.node()}-{os.getpid()}")
        try:
            with user_errors(f"{run.path}: --watch cannot write there", PermissionError):
                copy_by_links(folder, held)
            model = replace(read_checkpoint(held, weights), name=folder.name)
            replace(model).check()
        except (InvalidCheckpoint, OSError) as error:  # of shutil when files go while they are copied
            shutil.rmtree(held, ignore_errors=True)
            gone = isinstance(error, OSError) and not folder.exists()
            why = "it was pruned before it could be read" if gone else reason_of(error)
            logger.warning("%s is not measured: %s", folder, why)
        else:
            return model
    return None


def remove_abandoned(run: Path) -> None:
    """Remove checkpoints still held by watchers on this machine that have been killed."""
    for folder in run.glob(f".*.{HELD}-{glob.escape(platform.node())}-*"):
        pid = folder.name.rpartition("-")[2]
        if not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def has_ended(run: RunFolder, seen: set[tuple[str, int]]) -> bool:
    """Return whether the newest checkpoint has been seen and is of the run's end; if there is none, the pipeline is."""
    folder = newest(run.path)
    if folder is not None and folder.name not in dict(seen):
        return False  # it has come since they were looked through
    step = run.pipeline_step() if folder is None else step_of(folder)
    seconds = [line["train_seconds"] for line in run.read_metrics() if line.get("step") == step]
    return step is not None and is_over(run.read_config(), step, max(seconds, default=0))


class BestCheckpoint:
    """The folder `best` of a run: the best of the checkpoints by a column of the results."""

    def __init__(self, run: RunFolder, column: str):
        self.folder, self.column = run.best, column

    def consider(self, model: SavedModel, measured: Measured, rows: list[Row]) -> None:
        """Put a checkpoint there, whole, if it is better than the one that is, or that was chosen in another way."""
        value = (find_row(rows, measured) or {}).get(self.column)
        if value is None or not (model.path / MANIFEST).is_file():  # a pipeline is no checkpoint
            return
        aside = self.folder.with_name(f".{self.folder.name}.tmp")
        try:
            with in_turn(self.folder.parent):
                known = self._known(measured)
                better = known is None or (value < known if metric_of(self.column).lower_is_better else value > known)
                if not better:
                    return
                copy_by_links(model.path, aside)
                text = json.dumps({"metric": self.column, "value": value, **asdict(measured)}, indent=2)
                write_atomically(aside / BEST_OF, text + "\n")
                replace_folder(aside, self.folder)
        except OSError as error:  # it was pruned, or the disk is full
            shutil.rmtree(aside, ignore_errors=True)
            logger.warning("%s, the best so far, is not kept in %s: %s", model.name, self.folder, reason_of(error))
        else:
            logger.info("%s is the best so far by %s (%.5g): kept in %s", model.name, self.column, value, self.folder)

    def _known(self, measured: Measured) -> float | None:
        """Return the value of the checkpoint that is there, if it was chosen in the same way."""
        old = self.folder.with_name(f".{self.folder.name}.old")
        if old.exists() and not self.folder.exists():  # killed between the two renames of `replace_folder`
            old.rename(self.folder)
        try:
            known = read_file(self.folder, BEST_OF)
            wanted = {"metric": self.column, **{name: getattr(measured, name) for name in METHOD}}
            return float(known["value"]) if all(known[name] == wanted[name] for name in wanted) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
