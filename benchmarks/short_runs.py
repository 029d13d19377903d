"""Short runs for the benchmarks beside this file: training them, and measuring FID, KID and how loud colours are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from accelerate.state import AcceleratorState

from benchmarks.race.measure import BATCH, Judge
from common.interruption import stops_deferred
from common.processes import start_processes
from conditions.condition import NoCondition
from evaluation.evaluate_options import EvaluationOptions
from generation.engine import InferenceSettings, Job, generate_images
from image_data.sources import open_source
from image_data.store import load_training_images
from run_folder.config import TrainingConfig, parse_config
from run_folder.saved_model import SavedModel
from schedulers.denoising import DDIM, DDPM, DenoisingMethod
from training.loop import train
from training.setup import Run, build_run, check_before_work, opened

# Runs of minutes: the recipe of the digits, and what races on CIFAR-10 (benchmarks/races/cifar10_16_screen.yaml).
DATA = {
    "digits": ["--config=configs/digits.yaml"],
    "cifar10_16": [
        "--dataset_name=../shared/data/cifar10", "--resolution=16",
        "--model_config_name_or_path=configs/networks/small_16.json", "--train_batch_size=64",
        "--learning_rate=1e-3", "--lr_warmup_steps=100", "--logging_steps=25",
    ],
}  # fmt: skip
QUIET = [
    "--logger=none",
    "--save_images_steps=1000000",
    "--ddpm_num_inference_steps=2",
    "--num_workers=0",
    "--overwrite",
]


def train_short(flags: list[str], prepare: Callable[[Run], None] = lambda run: None) -> Run:
    """Train a run; `prepare` may add to what is tracked."""
    config = parse_config(flags)
    AcceleratorState._reset_state(reset_partial_state=True)  # of what was run before, perhaps in another precision
    processes = start_processes(config)
    torch.set_num_threads(1)
    check_before_work(config, processes)
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, NoCondition())
    prepare(run)
    with stops_deferred(), opened(run):
        train(run)
    return run


@dataclass
class Colours:
    """The mean colours of images, each a point with a number for every channel, in [-1, 1]."""

    means: torch.Tensor

    @classmethod
    def of_images(cls, images: torch.Tensor) -> Colours:
        """Take them of uint8 images [n, channels, height, width]."""
        return cls(images.double().flatten(2).mean(2) / 127.5 - 1)

    @property
    def variance(self) -> float:
        return self.means.var(0).sum().item()

    def compared_with(self, real: Colours) -> dict[str, float]:
        """Return how many times as much they vary as those of real images, and how far their centre is off.

        The latter in standard deviations of real images.
        """
        offset = (self.means.mean(0) - real.means.mean(0)).square().sum().item()
        return {"colour_variance": self.variance / real.variance, "colour_offset": (offset / real.variance) ** 0.5}


class ShortRunJudge:
    """Measures models against the training images of a run: their colours, and FID and KID if these are wanted."""

    def __init__(self, config: TrainingConfig, distances: bool):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.judge, self.settings = None, InferenceSettings(batch_size=BATCH)
        if distances:
            settings = {"mixed_precision": "bf16", "compile": True, "threads": 1, "reference_images": 10_000}
            self.judge = Judge(SimpleNamespace(**settings), config)
            self.settings = InferenceSettings("bf16", compile=True, batch_size=BATCH)
        self.processes = self.judge.processes if self.judge else start_processes(EvaluationOptions())
        images = load_training_images(config, open_source(config, self.processes), self.processes).images
        everyone = torch.arange(len(images))
        self.real = Colours.of_images(images.crops(everyone, torch.zeros(len(everyone), 2, dtype=torch.long)))

    def measure(self, model: SavedModel, method: DenoisingMethod, count: int) -> dict[str, float]:
        """Measure the images of the first seeds."""
        drawn = list(generate_images(Job(model, method), range(count), self.processes, self.settings))
        colours = Colours.of_images(torch.cat([images for _, images in drawn]))
        found = self.judge.measure_images(drawn, count) if self.judge else {}
        return {name: found[name] for name in ("fid", "kid") if found} | colours.compared_with(self.real)


def method_of(name: str, model: SavedModel) -> DenoisingMethod:
    """Return the method that a name such as DDIM-50 stands for."""
    kind, steps = name.split("-")
    return {"DDIM": DDIM, "DDPM": DDPM}[kind](model.scheduler, int(steps))
