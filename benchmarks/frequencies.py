"""At which frequencies of an image is a network's epsilon wrong? Its error beside that of the Wiener filter.

    python -m benchmarks.frequencies benchmarks/races/cifar10_32_ddpm_250.yaml uniform --seed 3

The Wiener filter is the best linear guess that knows the power S of the training images at each frequency and nothing
else: its error of epsilon is S SNR / (S SNR + 1), in units of the noise. Frequency 0 is the mean of an image, its
colour. The network is a run's of a race, the moving average; the images are training images. The numbers go to
benchmarks/results/frequencies.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.corrected import power_by_frequency, reference_images, snapshot_from_arguments
from benchmarks.race import record
from benchmarks.race.measure import snapshot_model
from benchmarks.race.plan import RESULTS
from common.errors import run_script
from common.files import write_atomically
from common.randomness import derive_seed, standard_normal
from schedulers.ddpm import signal_to_noise

FOLDER = RESULTS / "frequencies"
LOG_SNRS = (-8, -6, -4, -2, 0, 2, 4, 6)
IMAGES, TOGETHER = 256, 64
NOISE_KEY = derive_seed("frequencies")


@torch.no_grad()
def errors_at(network: torch.nn.Module, images: torch.Tensor, t: int, signal: float) -> torch.Tensor:
    """Return the mean squared error of epsilon at each frequency; `signal` is sqrt(a_t)."""
    errors = []
    for rows in torch.arange(len(images)).split(TOGETHER):
        epsilon = standard_normal(NOISE_KEY, rows, t, images.shape[1:])
        x_t = signal * images[rows] + (1 - signal**2) ** 0.5 * epsilon
        errors.append(network(x_t, torch.tensor(t)).sample.float() - epsilon)
    return power_by_frequency(torch.cat(errors))


def main() -> None:
    race, entry, time, folder = snapshot_from_arguments(__doc__)
    torch.set_num_threads(race.threads)
    config = record.config_of(race, entry)
    model, reference = snapshot_model(folder, config), reference_images(config)
    network, alphas = model.load(torch.device("cpu")).eval(), model.scheduler.alphas_cumprod
    power, images, levels = power_by_frequency(reference), reference[:IMAGES], []
    for wanted in LOG_SNRS:
        t = int((alphas.logit() - wanted).abs().argmin())
        levels.append(
            {
                "log_snr": wanted,
                "t": t,
                "error": errors_at(network, images, t, float(alphas[t].sqrt())).tolist(),
                "wiener": (1 / (1 + 1 / (power * signal_to_noise(alphas)[t]))).tolist(),
            }
        )
        print(f"log SNR {wanted}: error of the mean {levels[-1]['error'][0]:.3f}, Wiener {levels[-1]['wiener'][0]:.3f}")
    result = {"method": entry.method, "seed": entry.seed, race.unit: time, "images": IMAGES, "levels": levels}
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_atomically(FOLDER / f"{race.name}-{entry.name}-{time:g}.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.argv[0] = "benchmarks.frequencies"
    run_script(main)
