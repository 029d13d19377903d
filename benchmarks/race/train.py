"""One run of a race: the project's own training loop, with the moving average kept at given times.

    python -m benchmarks.race.train PLAN.json

It is started in a process of its own for every run, so that none warms up for the next. The plan says all there is to
know: a race's file may be edited while its runs go on.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.race.plan import in_full_steps
from common.errors import run_script
from common.files import LOCK_FILE, lock, replace_folder, write_atomically
from common.interruption import stops_deferred
from common.processes import start_processes
from conditions.condition import NoCondition
from image_data.sources import open_source
from image_data.store import load_training_images
from run_folder.checkpoints import STATE, find_checkpoint, read_file
from run_folder.config import TrainingConfig, parse_config
from run_folder.folder import RunFolder
from schedulers.loss import sampler_state
from training.loop import train
from training.milestones import Milestones
from training.setup import build_run, check_before_work, opened

if TYPE_CHECKING:
    from training.setup import Ending, Run, TrainingState

SNAPSHOT, NUMBERS, DENSITY, FINISHED = "snapshot-", "numbers.json", "density.json", "finished.json"


class Snapshots(Milestones):
    """Keeps the moving average whenever the next of the given times has passed; the clock stands still meanwhile."""

    def __init__(self, run: Run, plan: dict[str, object]):
        super().__init__(run, run.milestones.writer)
        self.unit, self.batch_share = plan["unit"], plan["batch_share"]
        self.waiting = [time for time in plan["snapshots"] if not snapshot_of(self.folder.path, time).exists()]

    def after_step(self, state: TrainingState, ending: Ending) -> None:
        steps = in_full_steps(state.step, self.run.config.half_resolution_steps, self.batch_share)
        now = steps if self.unit == "steps" else self.run.tracking.clock.train_seconds
        while self.waiting and (self.waiting[0] <= now or ending == "finished"):
            with self.run.tracking.paused():
                self.keep(state, self.waiting.pop(0))
        super().after_step(state, ending)

    def keep(self, state: TrainingState, time: float) -> None:
        """Write the network, when it was, and what the timestep sampler does by then."""
        state.train_seconds = self.run.tracking.clock.train_seconds
        aside = self.folder.path / ".snapshot.tmp"
        network = state.unet if state.update.ema is None else state.update.ema.ema_model
        network.save_pretrained(aside, safe_serialization=True)
        numbers = {
            "time": time,
            "step": state.step,
            "train_seconds": round(state.train_seconds, 3),
            "sampler_seconds": round(state.loss.sampler_seconds, 3),
            "smoothed_loss": state.smoothed_loss,
        }
        (aside / NUMBERS).write_text(json.dumps(numbers))
        (aside / DENSITY).write_text(json.dumps(state.loss.sampler.describe().tolist()))
        torch.save(sampler_state(state.loss.state_dict()), aside / "sampler.pt")
        replace_folder(aside, snapshot_of(self.folder.path, time))


def snapshot_of(run: Path, time: float) -> Path:
    return run / f"{SNAPSHOT}{time:.10g}"


def snapshots_of(run: Path) -> list[tuple[Path, dict]]:
    """Return the snapshots of a run, oldest first, with their numbers."""
    found = [(path, json.loads((path / NUMBERS).read_text())) for path in run.glob(f"{SNAPSHOT}*")]
    return sorted(found, key=lambda one: one[1]["time"])


def remove_leftovers(config: TrainingConfig) -> None:
    """Leave of a run that was stopped what its newest checkpoint knows of, and nothing if it has none.

    A run begins again from step 0 then: what it kept by the clock would not be what it comes to this time.
    """
    folder = Path(config.output_dir)
    if not folder.exists():
        return
    lock(folder)
    checkpoint = find_checkpoint(config)
    if checkpoint is None or not RunFolder(folder).is_run:
        later = [entry for entry in folder.iterdir() if entry.name != LOCK_FILE]
        if later:
            print(f"{folder}: was stopped without a checkpoint and begins again", flush=True)
    else:
        step = read_file(checkpoint, STATE)["step"]
        later = [folder / ".snapshot.tmp"]
        later += [snapshot for snapshot, numbers in snapshots_of(folder) if numbers["step"] > step]
    for entry in later:
        shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


def machine() -> dict[str, object]:
    """Describe what the training runs on."""
    packages = ("torch", "diffusers", "accelerate")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = parse_config(plan["flags"])
    remove_leftovers(config)
    processes = start_processes(config)
    torch.set_num_threads(plan["threads"])
    check_before_work(config, processes)
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, NoCondition())
    start = time.time()
    with stops_deferred(), opened(run):
        run.milestones = Snapshots(run, plan)
        train(run)
    numbers = {"started": start, "step": run.state.step, "train_seconds": run.state.train_seconds, "machine": machine()}
    write_atomically(Path(config.output_dir) / FINISHED, json.dumps(numbers))


if __name__ == "__main__":
    run_script(main)
