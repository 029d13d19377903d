"""From seeds to samples: the denoising loop. Image i depends on seed i alone."""

from collections.abc import Callable
from typing import Any

import torch

from common.randomness import derive_seed, standard_normal
from schedulers.denoising import SamplingMethod, noise_generators

NOISE_KEY = derive_seed("generation")

# From samples and their timestep, a tensor with one number, to the network's output in float32.
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def to_uint8(samples: torch.Tensor) -> torch.Tensor:
    """[-1, 1] to 0 .. 255, rounded to nearest."""
    return (samples * 127.5 + 128).clamp(0, 255).to(torch.uint8)


class SeededNoise:
    """The noise of one step: a function of the seed and the number of the step alone. Number 0 is where it starts."""

    def __init__(self, seeds: torch.Tensor, on_host: list[int], number: int, shape: tuple[int, int, int]):
        self.seeds, self.on_host, self.number, self.shape = seeds, on_host, number, shape

    def __call__(self) -> torch.Tensor:
        return standard_normal(NOISE_KEY, self.seeds, self.number, self.shape)

    def generators(self) -> list[torch.Generator]:
        return noise_generators(self.on_host, self.number)


@torch.inference_mode()
def denoise(
    predict: Predict,
    method: SamplingMethod,
    seeds: torch.Tensor,
    shape: tuple[int, int, int],
    on_step: Callable[[int, torch.Tensor], None] = lambda number, samples: None,
    initial_noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sample in [-1, 1] for each seed, on the seeds' device. `on_step` is shown what each step made.

    `initial_noise` replaces the noise that the seeds stand for as the start, not that of the steps.
    """
    on_host = seeds.tolist()
    method.begin(seeds.device)
    # Once: a number that is passed at each step would be copied to the device there.
    timesteps = torch.tensor(method.timesteps, device=seeds.device)
    samples = SeededNoise(seeds, on_host, 0, shape)() if initial_noise is None else initial_noise
    if method.noise_scale != 1:
        samples = samples * method.noise_scale
    for number in range(1, len(method.timesteps) + 1):
        model_output = predict(method.network_input(samples, number), timesteps[number - 1])
        samples = method.step(model_output, number, samples, SeededNoise(seeds, on_host, number, shape))
        on_step(number, samples)
    return samples


def network_predict(network: Callable[..., Any]) -> Predict:
    """A network, perhaps with what it is told of the samples bound to it, as it is called by the loop."""

    def predict(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return network(samples, t).sample.float()

    return predict
