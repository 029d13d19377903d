"""The forward process, what a network predicts of it, and one step back (Ho et al. 2020), on diffusers' DDPMScheduler.

x_t = signal x_0 + spread epsilon, with signal = sqrt(a_t) and spread = sqrt(1 - a_t). A new prediction type is one
entry of PREDICTIONS.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import DDPMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMSchedulerOutput
from diffusers.utils.torch_utils import randn_tensor

from schedulers.betas import BETA_END, BETA_START, DIFFUSERS_NAMES, make_betas

FIXED_VARIANCES = ("fixed_large", "fixed_small")
LEARNED_VARIANCES = ("learned", "learned_range")
VARIANCE_TYPES = (*FIXED_VARIANCES, *LEARNED_VARIANCES)
LOG_VARIANCE = " and log variance"  # ends the prediction type of a pipeline that diffusers cannot sample


class Level(NamedTuple):
    """The coefficients at t: tensors that multiply images in training, numbers in generation."""

    signal: torch.Tensor | float  # x_t = signal x_0 + spread epsilon
    spread: torch.Tensor | float
    x_0_coefficient: torch.Tensor | float  # of mu-tilde, the mean of the posterior (Ho et al. 2020, eq. 7)
    x_t_coefficient: torch.Tensor | float


@dataclass(frozen=True)
class Prediction:
    """A quantity that a network can predict."""

    symbol: str  # for pictures
    target: Callable[[torch.Tensor, torch.Tensor, Level], torch.Tensor]  # of x_0, epsilon
    x_0: Callable[[torch.Tensor, torch.Tensor, Level], torch.Tensor]  # of the network's output, x_t
    error_ratio: Callable[[torch.Tensor], torch.Tensor]  # from all a_t: at every t, its squared error over that of x_0


def signal_to_noise(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """Compute SNR_t = a_t / (1 - a_t)."""
    return alphas_cumprod / (1 - alphas_cumprod)


def previous_levels(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """Return a_t-1 for every t: a_t shifted by one step, 1 at t = 0."""
    return torch.cat([torch.ones_like(alphas_cumprod[:1]), alphas_cumprod[:-1]])


def posterior_coefficients(
    a_t: torch.Tensor | float, a_s: torch.Tensor | float
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Compute the factors of x_0 and x_t in mu-tilde, the mean of q(x_s | x_t, x_0) for s < t (eq. 7)."""
    alpha = a_t / a_s
    return a_s**0.5 * (1 - alpha) / (1 - a_t), alpha**0.5 * (1 - a_s) / (1 - a_t)


PREDICTIONS = {
    "epsilon": Prediction(
        r"$\epsilon$",
        target=lambda x_0, epsilon, at: epsilon,
        x_0=lambda output, x_t, at: (x_t - at.spread * output) / at.signal,  # Ho et al. 2020, eq. 15
        error_ratio=signal_to_noise,
    ),
    "v_prediction": Prediction(  # Salimans & Ho 2022
        "$v$",
        target=lambda x_0, epsilon, at: at.signal * epsilon.float() - at.spread * x_0.float(),
        x_0=lambda output, x_t, at: at.signal * x_t - at.spread * output,
        error_ratio=lambda alphas_cumprod: signal_to_noise(alphas_cumprod) + 1,
    ),
    "sample": Prediction(
        "$x_0$",
        target=lambda x_0, epsilon, at: x_0,
        x_0=lambda output, x_t, at: output,
        error_ratio=torch.ones_like,
    ),
    "mean": Prediction(  # Ho et al. 2020, eq. 8, the baseline of their Table 2
        r"$\tilde\mu$",
        target=lambda x_0, epsilon, at: (
            (at.x_0_coefficient + at.x_t_coefficient * at.signal) * x_0 + at.x_t_coefficient * at.spread * epsilon
        ),
        x_0=lambda output, x_t, at: (output - at.x_t_coefficient * x_t) / at.x_0_coefficient,
        error_ratio=lambda alphas_cumprod: (
            posterior_coefficients(alphas_cumprod, previous_levels(alphas_cumprod))[0] ** 2
        ),
    ),
}


def prediction_of(prediction_type: str) -> Prediction:
    """Look up a prediction type; an unknown one is an error, never silently replaced by another."""
    if prediction_type not in PREDICTIONS:
        raise ValueError(f"prediction_type {prediction_type!r}: must be one of {', '.join(PREDICTIONS)}")
    return PREDICTIONS[prediction_type]


def weight_of_prediction(
    weight_of_x_0: torch.Tensor, alphas_cumprod: torch.Tensor, prediction_type: str
) -> torch.Tensor:
    """Convert a weight on the squared error of x_0 at every t to one on the error of the network's prediction."""
    return weight_of_x_0 / prediction_of(prediction_type).error_ratio(alphas_cumprod)


def decoder_nats(x_0: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Compute -log of a Gaussian integrated over each grey level, the outermost to infinity (Ho et al. 2020, eq. 13).

    As in the paper's code a tanh stands for the Gaussian's distribution function, and probabilities are at least 1e-12.
    """

    def cumulative(edge: torch.Tensor) -> torch.Tensor:
        z = (x_0 + edge - mean) * torch.exp(-log_variance / 2)
        return (1 + torch.tanh((2 / math.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2

    above = torch.where(x_0 > 0.999, 1.0, cumulative(1 / 255))
    below = torch.where(x_0 < -0.999, 0.0, cumulative(-1 / 255))
    return -(above - below).clamp(min=1e-12).log()


class ExactDDPMScheduler(DDPMScheduler):
    """DDPMScheduler whose tables are float64, whose coefficients are rounded once, and whose noise stays float32.

    Notation: a_t is the cumulative product of 1 - beta, a_s that of the timestep stepped to (1 when that is -1).
    With a learned variance the network's output has twice the channels of an image: the prediction, then the variance.
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
        self.register_to_config(prediction_type=self.config.prediction_type.removesuffix(LOG_VARIANCE))
        prediction_of(self.config.prediction_type)
        if self.learns_variance and len(self.betas) < 2:
            raise ValueError(f"variance_type '{self.config.variance_type}' needs at least two timesteps")
        self.alphas = 1 - self.betas
        self.alphas_cumprod = self.alphas.cumprod(0)
        if not self.alphas_cumprod[:-1].all():
            raise ValueError("they are too large: no signal is left before the last timestep")
        self._rounded: dict[tuple[torch.device, str], torch.Tensor] = {}

    @property
    def learns_variance(self) -> bool:
        return self.config.variance_type in LEARNED_VARIANCES

    @property
    def ends_without_signal(self) -> bool:
        """Tell whether the last x_t is pure noise, where epsilon says nothing about x_0 (Lin et al. 2024)."""
        return self.alphas_cumprod[-1].item() == 0

    def plain(self) -> DDPMScheduler:
        """Make the stock scheduler with the same configuration: what is saved in a run.

        A `learned` variance is a logarithm, which diffusers would take for the variance itself, and draw NaN. The added
        suffix makes it reject the prediction type as unknown, as it rejects "mean".
        """
        suffix = LOG_VARIANCE if self.config.variance_type == "learned" else ""
        return DDPMScheduler.from_config(self.config, prediction_type=self.config.prediction_type + suffix)

    # The forward process.

    def _gather(self, timesteps: torch.Tensor, name: str) -> torch.Tensor:
        """Look up a table's values for a batch of timesteps, in float32 and in a shape that multiplies images."""
        key = timesteps.device, name
        if key not in self._rounded:
            self._rounded[key] = torch.stack(getattr(self, name)(), dim=1).float().to(timesteps.device)
        return self._rounded[key][timesteps].T[:, :, None, None, None]

    def _coefficients(self) -> list[torch.Tensor]:
        a_t = self.alphas_cumprod
        return [a_t.sqrt(), (1 - a_t).sqrt(), *posterior_coefficients(a_t, previous_levels(a_t))]

    def _level(self, timesteps: torch.Tensor) -> Level:
        return Level(*self._gather(timesteps, "_coefficients"))

    def _level_at(self, t: int) -> Level:
        a_t, a_s = self._levels(t, t - 1)
        return Level(a_t**0.5, (1 - a_t) ** 0.5, *posterior_coefficients(a_t, a_s))

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Compute x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise (eq. 4), in float32: bf16 loses the noise of small t."""
        at = self._level(timesteps)
        return at.signal * original_samples.float() + at.spread * noise.float()

    def target(self, images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return what the network is asked to predict."""
        return prediction_of(self.config.prediction_type).target(images, noise, self._level(timesteps))

    # The variational bound.

    def divergence_weights(self) -> torch.Tensor:
        """Compute the weight of the prediction's squared error at t in KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)).

        The means differ by sqrt(a_s) beta_t / (1 - a_t) times the error of x_0 (eq. 7), and the KL is the square of
        that over 2 sigma_t^2 (eq. 8), up to terms that no network changes. In bits per dimension.
        """
        a_t = self.alphas_cumprod
        variances = [self.variance(t, t - 1) for t in range(len(a_t))]
        scale = 2 * math.log(2) * torch.tensor(variances, dtype=a_t.dtype)
        x_0_coefficient = previous_levels(a_t) * (self.betas / (1 - a_t)) ** 2 / scale
        return weight_of_prediction(x_0_coefficient, a_t, self.config.prediction_type)

    def log_variance(self, values: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Compute log sigma_t^2 for a batch of timesteps from the network's output for the variance."""
        return self._learned(values, *self._gather(timesteps, "_log_variances"))

    def _log_variances(self) -> list[torch.Tensor]:
        """Compute the logarithms of the posterior's variance and of beta_t at every t."""
        posterior = [self.variance(t, t - 1) for t in range(len(self.betas))]
        return [torch.tensor(posterior, dtype=torch.float64).log(), self.betas.log()]

    def _learned(
        self, values: torch.Tensor, lowest: torch.Tensor | float, highest: torch.Tensor | float
    ) -> torch.Tensor:
        """Read log sigma^2 off the network's second half.

        `learned` outputs it directly (Ho et al. 2020, code); `learned_range` outputs its place between the logarithms
        of the posterior's variance, at -1, and of beta, at 1 (Nichol & Dhariwal 2021, eq. 15).
        """
        if self.config.variance_type == "learned":
            return values
        fraction = (values + 1) / 2
        return fraction * highest + (1 - fraction) * lowest

    def bits_of_step(
        self, original: torch.Tensor, values: torch.Tensor, x_0: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Compute KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)) of each image with the learned variance; eq. 13 at t = 0.

        `original` is the predicted x_0, and `values` is the network's output for the variance. The result is in bits
        per dimension.
        """
        log_posterior, _ = self._gather(timesteps, "_log_variances")
        log_variance = self.log_variance(values, timesteps)
        squares = (self._level(timesteps).x_0_coefficient * (x_0 - original)).square()
        divergence = log_variance - log_posterior - 1 + torch.exp(log_posterior - log_variance)
        divergence = (divergence + squares * torch.exp(-log_variance)) / 2
        decoder = decoder_nats(x_0, original, log_variance)
        nats = torch.where(timesteps[:, None, None, None] == 0, decoder, divergence)
        return nats.flatten(1).mean(1) / math.log(2)

    def bound(
        self, model_output: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Compute `bits_of_step` in training, where the network's x_0 is not clipped."""
        output, values = model_output.chunk(2, dim=1)
        original = prediction_of(self.config.prediction_type).x_0(output, x_t, self._level(timesteps))
        return self.bits_of_step(original, values, x_0, timesteps)

    # One step back.

    def predict_original(self, model_output: torch.Tensor, t: int, sample: torch.Tensor) -> torch.Tensor:
        """Compute the predicted x_0, clipped to [-1, 1] before it enters any mean."""
        output = model_output[:, : sample.shape[1]]  # what follows is a variance
        original = prediction_of(self.config.prediction_type).x_0(output, sample, self._level_at(t))
        if self.config.clip_sample:
            original = original.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        return original

    def variance(self, t: int, previous: int) -> float:
        """Return sigma_t^2: beta_t (fixed_large) or the posterior's, (1 - a_s) / (1 - a_t) beta_t (fixed_small; eq. 7).

        The last step, whose posterior variance is zero, always uses that of t = 1, as in the paper's code. If the
        variance is learned, the posterior's is returned, the lowest.
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
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return mean (eq. 7) and deviation of the step from t to any earlier timestep; the last step's deviation is 0.

        A learned deviation is a tensor with a value for every pixel.
        """
        a_t, a_s = self._levels(t, previous)
        x_0_coefficient, x_t_coefficient = posterior_coefficients(a_t, a_s)
        mean = x_0_coefficient * self.predict_original(model_output, t, sample) + x_t_coefficient * sample
        if previous < 0:
            return mean, 0.0
        variance = self.variance(t, previous)
        if not self.learns_variance:
            return mean, variance**0.5
        values = model_output[:, sample.shape[1] :]
        return mean, (self._learned(values, math.log(variance), math.log(1 - a_t / a_s)) / 2).exp()

    def implicit(
        self, model_output: torch.Tensor, t: int, previous: int, sample: torch.Tensor, eta: float
    ) -> tuple[torch.Tensor, float]:
        """Compute mean and standard deviation of DDIM's step (Song et al. 2021, eq. 12 and 16) to any earlier timestep.

        sqrt(a_s) x_0 + sqrt(1 - a_s - sigma^2) epsilon, where x_0 is clipped as the configuration says (DDIM's own code
        does not) and epsilon is what is left of x_t without that x_0, so that eta = 1 gives the posterior's mean.
        """
        a_t, a_s = self._levels(t, previous)
        variance = eta**2 * (1 - a_s) / (1 - a_t) * (1 - a_t / a_s)
        x_t_coefficient = ((1 - a_s - variance) / (1 - a_t)) ** 0.5
        x_0_coefficient = a_s**0.5 - a_t**0.5 * x_t_coefficient
        mean = x_0_coefficient * self.predict_original(model_output, t, sample) + x_t_coefficient * sample
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
        if adds_noise(deviation):
            noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
            mean = mean + deviation * noise
        return DDPMSchedulerOutput(prev_sample=mean) if return_dict else (mean,)


def adds_noise(deviation: torch.Tensor | float) -> bool:
    """Tell whether a step adds noise; a learned deviation always does, so it need not be fetched from its device."""
    return isinstance(deviation, torch.Tensor) or deviation > 0


def build_scheduler(
    beta_schedule: str = "linear",
    num_train_timesteps: int = 1000,
    variance_type: str = "fixed_large",
    prediction_type: str = "epsilon",
    beta_start: float = BETA_START,
    beta_end: float = BETA_END,
) -> ExactDDPMScheduler:
    """Build the paper's diffusion by default. Schedules that diffusers does not know travel as a list of betas.

    If the mean is predicted, x_0 is not clipped: the paper's code uses that mean as it is.
    """
    if beta_schedule in DIFFUSERS_NAMES or beta_schedule in DIFFUSERS_NAMES.values():
        schedule = {"beta_schedule": DIFFUSERS_NAMES.get(beta_schedule, beta_schedule)}
    else:
        schedule = {"trained_betas": make_betas(beta_schedule, num_train_timesteps, beta_start, beta_end).tolist()}
    return ExactDDPMScheduler(
        num_train_timesteps=num_train_timesteps,
        variance_type=variance_type,
        prediction_type=prediction_type,
        clip_sample=prediction_type != "mean",
        beta_start=beta_start,
        beta_end=beta_end,
        **schedule,
    )
