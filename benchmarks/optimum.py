"""How far are networks from the best there is? The least error of epsilon at much noise, beside that of a race's runs.

    python -m benchmarks.optimum benchmarks/races/cifar10_32_screen.yaml

The best guess at the noise in x_t = sqrt(a) x_0 + sqrt(1 - a) epsilon averages over all training images x_i:

    E[epsilon | x_t] = (x_t - sqrt(a) sum_i w_i x_i) / sqrt(1 - a),  w = softmax(-|x_t - sqrt(a) x_i|^2 / (2 (1 - a)))

No network can do better where many images are likely. With less noise a single image is: the best guess would be to
know the training images by heart, which is not what a network is for, so those noise levels are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from benchmarks.race import record
from benchmarks.race.plan import RESULTS, Entry, read_race
from common.errors import run_script
from common.files import write_atomically
from common.processes import start_processes
from common.randomness import generator_for
from image_data.sources import open_source, spread
from image_data.store import load_training_images
from schedulers.loss import normalise
from schedulers.timestep_samplers import LogSNRBins
from training.setup import build_process

FOLDER = RESULTS / "optimum"
LOOKED_AT, AT_ONCE = 512, 64  # images
LIKELY = 100  # images, by 1 / sum w^2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a race, whose images and schedule these are")
    arguments = parser.parse_args()
    race = read_race(arguments.file)
    torch.set_num_threads(race.threads)
    config = record.config_of(race, Entry(race.baseline, race.seeds[0]))
    processes = start_processes(config)
    data = load_training_images(config, open_source(config, processes), processes)
    rows = torch.arange(len(data.images))
    images = normalise(data.images.crops(rows, torch.full((len(rows), 2), 0.5)))
    everything = torch.cat([images, images.flip(-1)]) if data.random_flip else images
    levels = LogSNRBins(build_process(config).alphas_cumprod).centres.tolist()
    errors = []
    for level in levels:
        found = least_error(everything.flatten(1), images[torch.as_tensor(spread(len(rows), LOOKED_AT))], level)
        if found is None:
            break
        errors.append({"log_snr": round(level, 5), **found})
        print(f"log SNR {level:.1f}: {found['error']:.3g} +- {found['standard_error']:.1g}", flush=True)
    known = {"race": race.name, "images": len(images), "looked_at": LOOKED_AT, "levels": errors}
    path = FOLDER / f"{race.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known, indent=1) + "\n")
    print(f"{path}; with more than this little noise, hardly more than one training image is likely")


def least_error(everything: torch.Tensor, images: torch.Tensor, log_snr: float) -> dict[str, float] | None:
    """Return the mean squared error of the best guess at the noise in some images, if it is about more than a few."""
    snr = math.exp(log_snr)
    scale, deviation = math.sqrt(snr / (1 + snr)), math.sqrt(1 / (1 + snr))
    squares, errors, likely = everything.square().sum(1), [], []
    for number, x_0 in enumerate(images.flatten(1).split(AT_ONCE)):
        epsilon = torch.randn(x_0.shape, generator=generator_for("optimum", number))
        x_t = scale * x_0 + deviation * epsilon
        weights = ((scale * x_t @ everything.T - scale**2 * squares / 2) / deviation**2).softmax(1)
        guess = (x_t - scale * weights @ everything) / deviation
        errors.append((guess - epsilon).square().mean(1))
        likely.append(1 / weights.square().sum(1))
    if torch.cat(likely).median() < LIKELY:
        return None
    error = torch.cat(errors)
    return {"error": error.mean().item(), "standard_error": (error.std() / math.sqrt(len(error))).item()}


if __name__ == "__main__":
    sys.argv[0] = "benchmarks.optimum"
    run_script(main)
