"""Timestep samplers that are tried in races, by their density over lambda = log SNR."""

from __future__ import annotations

import torch

from schedulers.prediction import signal_to_noise
from schedulers.timestep_samplers import TimestepSampler


def log_snr_of(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    return signal_to_noise(alphas_cumprod).log()


def widths_of(log_snr: torch.Tensor) -> torch.Tensor:
    """Return how much of lambda belongs to each timestep."""
    edges = torch.cat([log_snr[:1], (log_snr[1:] + log_snr[:-1]) / 2, log_snr[-1:]])
    return edges.diff().abs()


class UniformLogSNR(TimestepSampler):
    """p uniform in lambda between `low` and `high`, and a share of draws uniform over all timesteps."""

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, low: float = -6.5, high: float = 6.2, floor: float = 0.03):
        super().__init__(alphas_cumprod)
        log_snr = log_snr_of(alphas_cumprod)
        inside = widths_of(log_snr) * ((log_snr >= low) & (log_snr <= high))
        self.set_density((1 - floor) * inside / inside.sum() + floor / len(log_snr))
