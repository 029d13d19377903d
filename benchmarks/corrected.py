"""Which flaws of a network's images do FID and KID see? The images as they are, and with one flaw corrected.

    python -m benchmarks.corrected benchmarks/races/cifar10_32_ddpm_250.yaml uniform --seed 3

The images are those of a run of a race, which keeps the weights of its measurements. Once their mean colours get the
distribution of those of the training images, once their spectrum gets the power that theirs has at each frequency, and
once both. Every number is kept at once, in benchmarks/results/corrected: start the same command again to go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.race import record
from benchmarks.race.__main__ import make_judge
from benchmarks.race.measure import BATCH, snapshot_model
from benchmarks.race.plan import RESULTS, Entry, Race, read_race, require
from benchmarks.race.train import snapshot_of
from common.errors import UserError, run_script
from common.files import write_atomically
from evaluation.samples import training_images
from image_data.sources import spread
from run_folder.config import TrainingConfig
from schedulers.loss import normalise

FOLDER = RESULTS / "corrected"
REFERENCE_IMAGES = 3000
Correction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def with_colours(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Shift every image so that the mean colours of all have the mean and the covariance of the reference's."""
    own, wanted = images.mean((2, 3)), reference.mean((2, 3))
    map_colours = power_of(wanted.T.cov(), 0.5) @ power_of(own.T.cov(), -0.5)
    shifted = (own - own.mean(0)) @ map_colours.T + wanted.mean(0)
    return images + (shifted - own)[:, :, None, None]


def power_of(covariance: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return a power of a symmetric, positive matrix."""
    variances, axes = torch.linalg.eigh(covariance)
    return axes @ torch.diag(variances.clamp(min=1e-9) ** exponent) @ axes.T


def with_spectrum(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Scale the frequencies by ring, so that each has the power that it has in the reference; means stay."""
    own, wanted = (power_by_frequency(some) for some in (images, reference))
    scale = (wanted / own).sqrt()
    scale[0] = 1
    return torch.fft.ifft2(torch.fft.fft2(images) * scale[frequencies(images.shape[2])]).real


def frequencies(size: int) -> torch.Tensor:
    """Return the frequency of every place of a Fourier transform, in whole cycles per image; 0 is the mean."""
    cycles = torch.fft.fftfreq(size, 1 / size)
    return (cycles[:, None].square() + cycles.square()).sqrt().round().long()


def power_by_frequency(images: torch.Tensor) -> torch.Tensor:
    """Return the mean power of images, or of errors, at each frequency; of white noise of variance 1 it is 1."""
    size = images.shape[2]
    at, power = frequencies(size).flatten(), torch.fft.fft2(images).abs().square().mean((0, 1)).flatten() / size**2
    total = torch.zeros(int(at.max()) + 1).index_add(0, at, power)
    return total / at.bincount()


CORRECTIONS: dict[str, Correction] = {
    "as they are": lambda images, reference: images,
    "colours": with_colours,
    "spectrum": with_spectrum,
    "colours and spectrum": lambda images, reference: with_spectrum(with_colours(images, reference), reference),
}


def describe(images: torch.Tensor) -> dict[str, float]:
    """Return the spread of mean colours, their saturation, and the contrast within images."""
    return {
        "variance of mean colours": images.mean((2, 3)).T.cov().trace().item(),
        "saturation": (images.amax(1) - images.amin(1)).mean().item(),
        "contrast": images.std((2, 3)).mean().item(),
    }


def reference_images(config: TrainingConfig) -> torch.Tensor:
    """Read training images, evenly spread, in [-1, 1]."""
    channels = 1 if config.channels == "1" else 3
    images = training_images(replace(config, channels=str(channels)), "train", config.cache_dir, 0)
    chosen = spread(len(images), REFERENCE_IMAGES)
    return normalise(torch.stack([torch.tensor(images.pixels(row)[:channels]) for row in chosen]))


def snapshot_from_arguments(description: str) -> tuple[Race, Entry, float, Path]:
    """Return the race, the run, the time and the folder of the weights that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a race that has been run")
    parser.add_argument("method", help="the method whose network is looked at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the budget, after which its weights are taken")
    arguments = parser.parse_args()
    race = read_race(arguments.file)
    require(arguments.method in race.methods, "method", arguments.method, f"one of {', '.join(race.methods)}")
    length = race.lengths.get(arguments.method, 1.0)
    entry, time = Entry(arguments.method, arguments.seed, length), race.time(arguments.fraction)
    folder = snapshot_of(race.runs / entry.name, time)
    if not folder.exists():
        raise UserError(f"{folder}: the race has no weights of {entry.name} at {time:g}; run it on this machine")
    return race, entry, time, folder


def main() -> None:
    race, entry, time, folder = snapshot_from_arguments(__doc__)
    path, measurement = FOLDER / f"{race.name}-{entry.name}-{time:g}.json", race.measurements[0]
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"corrected": {}}
    if result["corrected"].keys() == CORRECTIONS.keys():
        return
    judge, config = make_judge(race), record.config_of(race, entry)
    batches = judge.generate(snapshot_model(folder, config), measurement)
    images, reference = normalise(torch.cat([pixels for _, pixels in batches])), reference_images(config)
    result |= {"method": entry.method, "seed": entry.seed, race.unit: time, "measurement": measurement.name}
    result |= {"measured_with": record.measured_with(race), "training images": describe(reference)}
    for name, correct in CORRECTIONS.items():
        if name in result["corrected"]:
            continue
        changed = correct(images, reference).clamp(-1, 1)
        pixels = ((changed + 1) * 127.5).round().byte()
        seeds = torch.arange(len(pixels)).split(BATCH)
        numbers = judge.measure_images(((some.tolist(), pixels[some]) for some in seeds), len(pixels))
        result["corrected"][name] = numbers | describe(changed)
        print(f"{name}: FID {numbers['fid']:.2f}, KID {1000 * numbers['kid']:.2f}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.argv[0] = "benchmarks.corrected"
    run_script(main)
