"""Loss weights: how much the squared error at each timestep counts, as a table over t.

SNR_t = a_t / (1 - a_t) is the signal-to-noise ratio of x_t. A weighting multiplies the mean squared error of what the
network predicts, so one idea has one table per prediction type.
"""

from collections.abc import Callable

import torch


def none(snr: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The simple loss: every timestep counts the same (Ho et al. 2020, eq. 14)."""
    return torch.ones_like(snr)


def min_snr(snr: torch.Tensor, prediction_type: str, gamma: float = 5.0) -> torch.Tensor:
    """min(SNR, gamma) as a weight on the error of x_0 (Hang et al. 2023, section 3.4), restated for the prediction."""
    divisor = {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}[prediction_type]
    return snr.clamp(max=gamma) / divisor


def p2(snr: torch.Tensor, prediction_type: str, gamma: float = 1.0, k: float = 1.0) -> torch.Tensor:
    """1 / (k + SNR)^gamma on the error of epsilon (Choi et al. 2022, eq. 8), restated for the prediction."""
    # (epsilon error)^2 = SNR (x_0 error)^2 = SNR / (SNR + 1) (v error)^2
    conversion = {"epsilon": torch.ones_like(snr), "sample": snr, "v_prediction": snr / (snr + 1)}
    return conversion[prediction_type] / (k + snr) ** gamma


LOSS_WEIGHTINGS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "none": none,
    "min_snr": min_snr,
    "p2": p2,
}


def weighting_table(name: str, alphas_cumprod: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The weight at every t, float32."""
    snr = alphas_cumprod / (1 - alphas_cumprod)
    return LOSS_WEIGHTINGS[name](snr, prediction_type).float()
