"""Beta schedules of the forward process, in float64.

beta_t is the variance that step t of the forward process adds (Ho et al. 2020, eq. 2). In float32 the betas that one
recovers from their cumulative product are off by 5e-4 relative, so every table is made in float64 and rounded once.
"""

import math
from collections.abc import Callable
from functools import partial

import torch

BETA_START, BETA_END = 1e-4, 0.02  # the paper's


def linear(steps: int, start: float, end: float) -> torch.Tensor:
    """Equally spaced from start to end (Ho et al. 2020, section 4)."""
    return torch.linspace(start, end, steps, dtype=torch.float64)


def quadratic(steps: int, start: float, end: float) -> torch.Tensor:
    """Equally spaced in sqrt(beta); diffusers calls it `scaled_linear`."""
    return torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2


def cosine(steps: int, start: float, end: float) -> torch.Tensor:
    """alpha_bar(u) = cos^2((u + 0.008) / 1.008 * pi / 2), beta at most 0.999 (Nichol & Dhariwal 2021, eq. 17)."""
    time = torch.arange(steps + 1, dtype=torch.float64) / steps
    alpha_bar = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


def sigmoid(steps: int, start: float, end: float) -> torch.Tensor:
    """A sigmoid over [-6, 6] scaled to [start, end] (Xu et al. 2022, GeoDiff)."""
    return torch.linspace(-6, 6, steps, dtype=torch.float64).sigmoid() * (end - start) + start


def constant(steps: int, start: float, end: float) -> torch.Tensor:
    """beta_t = end at every t (Ho et al. 2020, code)."""
    return torch.full((steps,), end, dtype=torch.float64)


def warmup(fraction: float, steps: int, start: float, end: float) -> torch.Tensor:
    """Linear from start to end over the first fraction of the steps, then constant (Ho et al. 2020, code)."""
    rising = int(steps * fraction)
    return torch.cat([linear(rising, start, end), constant(steps - rising, start, end)])


def jsd(steps: int, start: float, end: float) -> torch.Tensor:
    """1/T, 1/(T-1), ..., 1 (Ho et al. 2020, code): the share a_t of the image falls evenly, to nothing at the end."""
    return 1 / torch.arange(steps, 0, -1, dtype=torch.float64)


BETA_SCHEDULES: dict[str, Callable[[int, float, float], torch.Tensor]] = {
    "linear": linear,
    "quadratic": quadratic,
    "cosine": cosine,
    "sigmoid": sigmoid,
    "constant": constant,
    "warmup10": partial(warmup, 0.1),
    "warmup50": partial(warmup, 0.5),
    "jsd": jsd,
}

# What diffusers calls the schedules that it knows too; the others are saved as a list of betas.
DIFFUSERS_NAMES = {
    "linear": "linear",
    "quadratic": "scaled_linear",
    "cosine": "squaredcos_cap_v2",
    "sigmoid": "sigmoid",
}
NAMES_OF_DIFFUSERS = {theirs: ours for ours, theirs in DIFFUSERS_NAMES.items()}


def make_betas(name: str, steps: int, start: float = BETA_START, end: float = BETA_END) -> torch.Tensor:
    """Compute the betas of a schedule by its name here or in diffusers."""
    ours = NAMES_OF_DIFFUSERS.get(name, name)
    if ours not in BETA_SCHEDULES:
        raise ValueError(f"beta_schedule {name!r}: must be one of {', '.join(BETA_SCHEDULES)}")
    return BETA_SCHEDULES[ours](steps, start, end)
