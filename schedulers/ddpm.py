"""The forward process, what a network predicts of it, and one step back (Ho et al. 2020), on diffusers' DDPMScheduler.

x_t = signal x_0 + spread epsilon, with signal = sqrt(a_t) and spread = sqrt(1 - a_t). A new prediction type is one
entry of PREDICTIONS.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import DDPMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMSchedulerOutput
from diffusers.utils.torch_utils import randn_tensor

from schedulers.betas import BETA_END, BETA_START, DIFFUSERS_NAMES, make_betas

VARIANCE_TYPES = ("fixed_large", "fixed_small")


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


class ExactDDPMScheduler(DDPMScheduler):
    """DDPMScheduler whose tables are float64, whose coefficients are rounded once, and whose noise stays float32.

    Notation: a_t is the cumulative product of 1 - beta, a_s that of the timestep stepped to (1 when that is -1).
    Save `plain()`, not this object: a stock `DDPMPipeline` elsewhere knows only the class it came from.
    """

    @functools.wraps(DDPMScheduler.__init__)  # from_config reads the signature
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.config.variance_type not in VARIANCE_TYPES:
            raise ValueError(
                f"variance_type '{self.config.variance_type}' is not exact here "
                f"(fixed_large_log even gives NaN in diffusers); use one of {', '.join(VARIANCE_TYPES)}"
            )
        if self.config.trained_betas is not None:
            self.betas = torch.tensor(self.config.trained_betas, dtype=torch.float64)
        else:
            own = ("beta_schedule", "num_train_timesteps", "beta_start", "beta_end")
            self.betas = make_betas(*(self.config[name] for name in own))
        steps = self.config.num_train_timesteps
        # The last may be 1, as it is in jsd.
        below_one = (self.betas < 1).all() or (steps > 1 and self.betas[-1] == 1 and (self.betas[:-1] < 1).all())
        if len(self.betas) != steps or not (self.betas > 0).all() or not below_one:
            raise ValueError(f"it needs {steps} betas, each above 0 and below 1; of several the last may be 1")
        prediction_of(self.config.prediction_type)
        self.alphas = 1 - self.betas
        self.alphas_cumprod = self.alphas.cumprod(0)
        self._rounded: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def ends_without_signal(self) -> bool:
        """Tell whether the last x_t is noise alone, of which epsilon says nothing about x_0 (Lin et al. 2024)."""
        return self.alphas_cumprod[-1].item() == 0

    def plain(self) -> DDPMScheduler:
        """Make the stock scheduler with the same configuration: what is saved in a run."""
        return DDPMScheduler.from_config(self.config)

    # The forward process.

    def _signal_and_noise(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather sqrt(a_t) and sqrt(1 - a_t) for a batch of timesteps, in float32, shaped to multiply images."""
        device = timesteps.device
        if device not in self._rounded:
            tables = (self.alphas_cumprod.sqrt(), (1 - self.alphas_cumprod).sqrt())
            self._rounded[device] = tuple(table.float().to(device) for table in tables)
        return tuple(table[timesteps][:, None, None, None] for table in self._rounded[device])

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Compute x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise (eq. 4), in float32: bf16 loses the noise of small t."""
        signal, spread = self._signal_and_noise(timesteps)
        return signal * original_samples.float() + spread * noise.float()

    def target(self, images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return what the network is asked to predict."""
        prediction = prediction_of(self.config.prediction_type)
        return prediction.target(images, noise, *self._signal_and_noise(timesteps))

    def divergence_weights(self) -> torch.Tensor:
        """Compute what the squared error of the prediction at t counts in KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)).

        The means differ by sqrt(a_s) beta_t / (1 - a_t) times the error of x_0 (eq. 7), and the KL is the square of
        that over 2 sigma_t^2 (eq. 8), up to what no network changes. In bits per dimension.
        """
        a_t = self.alphas_cumprod
        a_s = torch.cat([torch.ones(1, dtype=a_t.dtype), a_t[:-1]])
        variances = [self.variance(t, t - 1) for t in range(len(a_t))]
        of_original = a_s * (self.betas / (1 - a_t)) ** 2 / (2 * math.log(2) * torch.tensor(variances, dtype=a_t.dtype))
        return weight_of_prediction(of_original, signal_to_noise(a_t), self.config.prediction_type)

    # One step back.

    def predict_original(self, model_output: torch.Tensor, t: int, sample: torch.Tensor) -> torch.Tensor:
        """Compute x_0 as the network sees it, clipped to [-1, 1] before it enters any mean."""
        a_t = self.alphas_cumprod[t].item()
        original = prediction_of(self.config.prediction_type).x_0(model_output, sample, a_t**0.5, (1 - a_t) ** 0.5)
        if self.config.clip_sample:
            original = original.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        return original

    def variance(self, t: int, previous: int) -> float:
        """Return sigma_t^2: beta_t (fixed_large) or the posterior's, (1 - a_s) / (1 - a_t) beta_t (fixed_small; eq. 7).

        The last step, for which the posterior's is zero, has that of t = 1 whatever the choice, as in the paper's code.
        """
        large = self.config.variance_type == "fixed_large" and previous >= 0
        t, previous = (t, previous) if previous >= 0 else (1, 0)
        a_t, a_s = self.alphas_cumprod[t].item(), self.alphas_cumprod[previous].item()
        beta = 1 - a_t / a_s
        return beta if large else (1 - a_s) / (1 - a_t) * beta

    def _levels(self, t: int, previous: int) -> tuple[float, float]:
        return self.alphas_cumprod[t].item(), self.alphas_cumprod[previous].item() if previous >= 0 else 1.0

    def posterior(
        self, model_output: torch.Tensor, t: int, previous: int, sample: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Return mean (eq. 7) and deviation of the step from t to any earlier timestep; no deviation at the end."""
        a_t, a_s = self._levels(t, previous)
        beta = 1 - a_t / a_s
        original = self.predict_original(model_output, t, sample)
        mean = (a_s**0.5 * beta / (1 - a_t)) * original + ((a_t / a_s) ** 0.5 * (1 - a_s) / (1 - a_t)) * sample
        return mean, self.variance(t, previous) ** 0.5 if previous >= 0 else 0.0

    def implicit(
        self, model_output: torch.Tensor, t: int, previous: int, sample: torch.Tensor, eta: float
    ) -> tuple[torch.Tensor, float]:
        """Compute mean and standard deviation of DDIM's step (Song et al. 2021, eq. 12 and 16) to any earlier timestep.

        sqrt(a_s) x_0 + sqrt(1 - a_s - sigma^2) epsilon, where x_0 is clipped as the configuration says (DDIM's own code
        does not) and epsilon is what is left of x_t without that x_0, so that eta = 1 gives the posterior's mean.
        """
        a_t, a_s = self._levels(t, previous)
        variance = eta**2 * (1 - a_s) / (1 - a_t) * (1 - a_t / a_s)
        of_sample = ((1 - a_s - variance) / (1 - a_t)) ** 0.5
        of_original = a_s**0.5 - a_t**0.5 * of_sample
        mean = of_original * self.predict_original(model_output, t, sample) + of_sample * sample
        return mean, variance**0.5

    def step(
        self,
        model_output: torch.Tensor,
        timestep: int,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> DDPMSchedulerOutput | tuple:
        """Take one ancestral step with the signature of diffusers, so that stock pipelines can use this scheduler."""
        t = int(timestep)
        mean, deviation = self.posterior(model_output, t, int(self.previous_timestep(t)), sample)
        if deviation > 0:
            noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
            mean = mean + deviation * noise
        return DDPMSchedulerOutput(prev_sample=mean) if return_dict else (mean,)


def build_scheduler(
    beta_schedule: str = "linear",
    num_train_timesteps: int = 1000,
    variance_type: str = "fixed_large",
    prediction_type: str = "epsilon",
    beta_start: float = BETA_START,
    beta_end: float = BETA_END,
) -> ExactDDPMScheduler:
    """Build the paper's diffusion by default. Schedules that diffusers does not know travel as a list of betas."""
    if beta_schedule in DIFFUSERS_NAMES or beta_schedule in DIFFUSERS_NAMES.values():
        schedule = {"beta_schedule": DIFFUSERS_NAMES.get(beta_schedule, beta_schedule)}
    else:
        schedule = {"trained_betas": make_betas(beta_schedule, num_train_timesteps, beta_start, beta_end).tolist()}
    return ExactDDPMScheduler(
        num_train_timesteps=num_train_timesteps,
        variance_type=variance_type,
        prediction_type=prediction_type,
        beta_start=beta_start,
        beta_end=beta_end,
        **schedule,
    )
