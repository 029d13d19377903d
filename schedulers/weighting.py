"""Loss weights: how much the squared error at each timestep counts, as a table over t.

A weighting multiplies the mean squared error of what the network predicts, so one idea has one table per prediction
type; with the same prediction of x_0 behind them the errors are related by the signal-to-noise ratio of x_t:

    (epsilon error)^2 = SNR (x_0 error)^2        (v error)^2 = (SNR + 1) (x_0 error)^2

Every function takes a_t, the prediction type and options with the paper's values as defaults.
"""

from collections.abc import Callable

import torch

from schedulers.ddpm import (
    LEARNED_VARIANCES,
    ExactDDPMScheduler,
    previous_levels,
    signal_to_noise,
    weight_of_prediction,
)
from schedulers.timestep_samplers import LogSNRBins, speed_tau


def none(alphas_cumprod: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The simple loss: every timestep counts the same (Ho et al. 2020, eq. 14)."""
    return torch.ones_like(alphas_cumprod)


def bound(alphas_cumprod: torch.Tensor, prediction_type: str, variance_type: str = "fixed_large") -> torch.Tensor:
    """1 / (2 sigma_t^2) on the error of mu-tilde: the variational bound L (Ho et al. 2020, eq. 8).

    As in the paper's code the mean over t is L / T in bits per dimension, here up to what no network changes. At t = 0
    the Gaussian's density stands for the decoder's integral (section 3.4). With a learned variance the loss itself is
    L, and every t counts 1.
    """
    if variance_type in LEARNED_VARIANCES:
        return torch.ones_like(alphas_cumprod)
    if len(alphas_cumprod) < 2:
        raise ValueError("needs at least two timesteps (--ddpm_num_steps)")
    betas = 1 - alphas_cumprod / previous_levels(alphas_cumprod)
    known = {"trained_betas": betas.tolist(), "variance_type": variance_type, "prediction_type": prediction_type}
    return ExactDDPMScheduler(len(betas), **known).divergence_weights()


def min_snr(alphas_cumprod: torch.Tensor, prediction_type: str, gamma: float = 5.0) -> torch.Tensor:
    """min(SNR, gamma) on the error of x_0 (Hang et al. 2023, section 3.4)."""
    snr = signal_to_noise(alphas_cumprod)
    return weight_of_prediction(snr.clamp(max=gamma), alphas_cumprod, prediction_type)


def soft_min_snr(alphas_cumprod: torch.Tensor, prediction_type: str, gamma: float = 4.0) -> torch.Tensor:
    """SNR gamma / (SNR + gamma) on the error of x_0: Min-SNR without its corner (Crowson et al. 2024, section 4.4).

    There it is 1 / (sigma^2 + 1 / gamma) with gamma = 1 / sigma_data^2 = 4.
    """
    snr = signal_to_noise(alphas_cumprod)
    return weight_of_prediction(snr * gamma / (snr + gamma), alphas_cumprod, prediction_type)


def p2(alphas_cumprod: torch.Tensor, prediction_type: str, gamma: float = 1.0, k: float = 1.0) -> torch.Tensor:
    """1 / (k + SNR)^gamma on the error of epsilon (Choi et al. 2022, eq. 8)."""
    snr = signal_to_noise(alphas_cumprod)
    return weight_of_prediction(snr / (k + snr) ** gamma, alphas_cumprod, prediction_type)


def edm(
    alphas_cumprod: torch.Tensor, prediction_type: str, sigma_data: float = 0.5, cap: float | None = None
) -> torch.Tensor:
    """lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 on the error of x_0 (Karras et al., table 1).

    With sigma^2 = 1 / SNR. It makes the loss of every sigma 1 for a network that knows nothing but sigma_data, in
    EDM's own preconditioning; on epsilon it is 1 + (sigma / sigma_data)^2, which `cap`, not the paper, keeps finite.
    """
    snr = signal_to_noise(alphas_cumprod)
    weight = snr + 1 / sigma_data**2
    weight = weight if cap is None else torch.minimum(weight, cap * snr)
    return weight_of_prediction(weight, alphas_cumprod, prediction_type)


def sigmoid(alphas_cumprod: torch.Tensor, prediction_type: str, k: float = 2.0) -> torch.Tensor:
    """sigmoid(k - lambda) (-d lambda / dt) on the error of epsilon, over its mean (Kingma & Gao 2023).

    lambda = log SNR. As sigmoid(k - lambda) rises with the noise, it is a variational bound, of images with noise.
    """
    bins = LogSNRBins(alphas_cumprod)
    weight = (k - bins.log_snr).sigmoid() * bins.widths
    snr = signal_to_noise(alphas_cumprod)
    return weight_of_prediction(snr * weight / weight.mean(), alphas_cumprod, prediction_type)


def speed(
    alphas_cumprod: torch.Tensor, prediction_type: str, tau: int | None = None, lambda_: float = 0.6
) -> torch.Tensor:
    """SpeeD's change-aware weight (Wang et al. 2024, eq. 6) of the error of epsilon, for which alone the paper has it.

    (1 - lambda) + (2 lambda - 1) (g_t - min g) / (max g - min g) for t < tau, with the rise g_t of 1 - a_t; then 1.
    """
    if prediction_type != "epsilon":
        raise ValueError(f"is only defined for epsilon prediction, not for {prediction_type}")
    if len(alphas_cumprod) < 3:
        raise ValueError(f"needs the rise of noise over at least 3 timesteps, not {len(alphas_cumprod)}")
    rise = torch.gradient(1 - alphas_cumprod)[0]
    scaled = (rise - rise.min()) / (rise.max() - rise.min())
    t = torch.arange(len(alphas_cumprod))
    return torch.where(t < speed_tau(tau, len(alphas_cumprod)), (1 - lambda_) + (2 * lambda_ - 1) * scaled, 1.0)


LOSS_WEIGHTINGS: dict[str, Callable[..., torch.Tensor]] = {
    "none": none,
    "bound": bound,
    "min_snr": min_snr,
    "soft_min_snr": soft_min_snr,
    "p2": p2,
    "edm": edm,
    "sigmoid": sigmoid,
    "speed": speed,
}


def weighting_table(name: str, alphas_cumprod: torch.Tensor, prediction_type: str, **options: float) -> torch.Tensor:
    """Compute the weight at every t, in float32."""
    return LOSS_WEIGHTINGS[name](alphas_cumprod, prediction_type, **options).float()
