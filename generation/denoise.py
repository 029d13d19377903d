"""From seeds to images: the denoising loop. Image i depends on seed i alone."""

from collections.abc import Callable

import torch

from common.randomness import derive_seed, standard_normal
from schedulers.ddpm import ExactDDPMScheduler, timestep_sequence

NOISE_KEY = derive_seed("generation")


def to_uint8(samples: torch.Tensor) -> torch.Tensor:
    """[-1, 1] to 0 .. 255, rounded to nearest."""
    return (samples * 127.5 + 128).clamp(0, 255).to(torch.uint8)


@torch.inference_mode()
def denoise(
    unet: torch.nn.Module,
    scheduler: ExactDDPMScheduler,
    seeds: torch.Tensor,
    shape: tuple[int, int, int],
    num_inference_steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Ancestral sampling (Ho et al. 2020, algorithm 2): one image in [-1, 1] for each seed, on the seeds' device."""
    sequence = timestep_sequence(scheduler.config.num_train_timesteps, num_inference_steps)
    on_device = torch.tensor(sequence, device=seeds.device)  # once: a number passed at each step would be copied there
    samples = standard_normal(NOISE_KEY, seeds, 0, shape)
    for number, (t, previous) in enumerate(zip(sequence, [*sequence[1:], -1], strict=True), start=1):
        model_output = unet(samples, on_device[number - 1]).sample.float()
        samples, deviation = scheduler.posterior(model_output, t, previous, samples)
        if deviation > 0:
            samples = samples + deviation * standard_normal(NOISE_KEY, seeds, number, shape)
        on_step()
    return samples
