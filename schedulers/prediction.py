"""Prediction types: what the network is asked for, how x_0 follows from it, and what an error in it is worth.

x_t = signal x_0 + spread epsilon, with signal = sqrt(a_t) and spread = sqrt(1 - a_t). A new type is one entry below.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Prediction:
    """A thing to predict; the coefficients are tensors in training and numbers in generation."""

    symbol: str  # for pictures
    target: Callable[..., torch.Tensor]  # of x_0, epsilon, signal, spread
    x_0: Callable[..., torch.Tensor]  # of the network's output, x_t, signal, spread
    error_ratio: Callable[[torch.Tensor], torch.Tensor]  # its squared error over that of x_0, given SNR_t


PREDICTIONS = {
    "epsilon": Prediction(
        r"$\epsilon$",
        target=lambda x_0, epsilon, signal, spread: epsilon,
        x_0=lambda output, x_t, signal, spread: (x_t - spread * output) / signal,  # Ho et al. 2020, eq. 15
        error_ratio=lambda snr: snr,
    ),
    "v_prediction": Prediction(  # Salimans & Ho 2022
        "$v$",
        target=lambda x_0, epsilon, signal, spread: signal * epsilon.float() - spread * x_0.float(),
        x_0=lambda output, x_t, signal, spread: signal * x_t - spread * output,
        error_ratio=lambda snr: snr + 1,
    ),
    "sample": Prediction(
        "$x_0$",
        target=lambda x_0, epsilon, signal, spread: x_0,
        x_0=lambda output, x_t, signal, spread: output,
        error_ratio=torch.ones_like,
    ),
}


def prediction_of(prediction_type: str) -> Prediction:
    """Look up a prediction type; an unknown one is an error, never another type in silence."""
    if prediction_type not in PREDICTIONS:
        raise ValueError(f"prediction_type {prediction_type!r}: must be one of {', '.join(PREDICTIONS)}")
    return PREDICTIONS[prediction_type]


def signal_to_noise(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """Compute SNR_t = a_t / (1 - a_t)."""
    return alphas_cumprod / (1 - alphas_cumprod)


def weight_of_prediction(weight_of_original: torch.Tensor, snr: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """Restate a weight on the squared error of x_0 for the error of what the network predicts."""
    return weight_of_original / prediction_of(prediction_type).error_ratio(snr)
