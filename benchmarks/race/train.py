"""One run of a race: the project's own training loop, with the moving average kept at given times.

    python -m benchmarks.race.train FILE.yaml METHOD SEED

It is started in a process of its own for every run, so that none warms up for the next.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.race.plan import Entry, Race, read_race
from common.errors import run_script
from common.files import replace_folder, write_atomically
from common.interruption import stops_deferred
from common.processes import start_processes
from conditions.condition import NoCondition
from image_data.sources import open_source
from image_data.store import load_training_images
from run_folder.config import TrainingConfig, parse_config
from schedulers.loss import sampler_state
from training.loop import train
from training.milestones import Milestones
from training.setup import build_run, check_before_work, opened

if TYPE_CHECKING:
    from training.setup import Ending, Run, TrainingState

SNAPSHOT, NUMBERS, DENSITY = "snapshot-{:g}", "numbers.json", "density.json"


class Snapshots(Milestones):
    """Keeps the moving average whenever the next of the given times has passed; the clock stands still meanwhile."""

    def __init__(self, run: Run, writer, unit: str, times: list[float]):
        super().__init__(run, writer)
        self.unit, self.times = unit, times

    def after_step(self, state: TrainingState, ending: Ending) -> None:
        now = state.step if self.unit == "steps" else self.run.tracking.clock.train_seconds
        wanted = [time for time in self.times if time <= now and not self.path(time).exists()]
        if ending == "finished" and not self.path(self.times[-1]).exists():
            wanted = [self.times[-1]]
        if wanted:
            with self.run.tracking.paused():
                state.train_seconds = self.run.tracking.clock.train_seconds
                self.keep(state, wanted[-1])
        super().after_step(state, ending)

    def path(self, time: float) -> Path:
        return self.folder.path / SNAPSHOT.format(time)

    def keep(self, state: TrainingState, time: float) -> None:
        """Write the network, when it was, and what the timestep sampler does by then."""
        aside = self.folder.path / ".snapshot.tmp"
        network = state.unet if state.update.ema is None else state.update.ema.ema_model
        network.save_pretrained(aside, safe_serialization=True)
        sampler = state.loss.sampler
        numbers = {
            "time": time,
            "step": state.step,
            "train_seconds": round(state.train_seconds, 3),
            "sampler_seconds": round(state.loss.sampler_seconds, 3),
            "smoothed_loss": state.smoothed_loss,
        }
        (aside / NUMBERS).write_text(json.dumps(numbers))
        (aside / DENSITY).write_text(json.dumps(sampler.describe().tolist()))
        torch.save(sampler_state(state.loss.state_dict()), aside / "sampler.pt")
        replace_folder(aside, self.path(time))


def config_of(race: Race, entry: Entry) -> TrainingConfig:
    """Return the options of a run: the race's, the method's, and nothing that costs time beside training."""
    length = race.budget * entry.length
    own = {
        "output_dir": race.runs / entry.name,
        "seed": entry.seed,
        f"max_train_{race.unit}": round(length) if race.unit == "steps" else length,
        "checkpointing_steps": 10**9,
        "save_images_steps": 10**9,
        "eval_batch_size": 1,  # of the grid that the end of a run draws
        "ddpm_num_inference_steps": 1,
        "checkpoints_total_limit": 1,
        "logger": "none",
    }
    return parse_config(flags_of({**race.training, **race.methods[entry.method], **own}))


def flags_of(options: dict[str, object]) -> list[str]:
    """Spell options as flags."""
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags.append(f"--{name}={value}")
    return flags


def main() -> None:
    file, method, seed = sys.argv[1:4]
    race = read_race(Path(file))
    entry = Entry(method, int(seed), race.lengths.get(method, 1.0))
    torch.set_num_threads(race.threads)
    config = config_of(race, entry)
    processes = start_processes(config)
    check_before_work(config, processes)
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, NoCondition())
    start = time.time()
    with stops_deferred(), opened(run):
        run.milestones = Snapshots(run, run.milestones.writer, race.unit, race.snapshots(entry))
        train(run)
    numbers = {"started": start, "step": run.state.step, "train_seconds": run.state.train_seconds}
    write_atomically(Path(config.output_dir) / "finished.json", json.dumps(numbers))


if __name__ == "__main__":
    run_script(main)
