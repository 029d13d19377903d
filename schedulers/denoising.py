"""From noise to samples (Ho et al. 2020, algorithm 2): the denoising loop, and the methods that step through it.

Image i depends on seed i alone. A method decides which timesteps are visited and how to step; it knows no networks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from common.randomness import derive_seed, generator_for, standard_normal
from schedulers.ddpm import ExactDDPMScheduler, adds_noise

logger = logging.getLogger(__name__)

NOISE_KEY = derive_seed("generation")
SPACING = ("timestep_spacing", "steps_offset")  # how a scheduler of diffusers spreads its steps

# From samples and their timestep, a tensor with one number, to the network's output in float32.
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()  # not inference_mode, in which autocast would cast every weight anew at every step
def denoise(
    predict: Predict,
    method: DenoisingMethod,
    seeds: torch.Tensor,
    shape: tuple[int, int, int],
    on_step: Callable[[int, torch.Tensor], None] = lambda number, samples: None,
    initial_noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one sample in [-1, 1] for each seed, on the seeds' device; `on_step` is called with every step's samples.

    `initial_noise` replaces the seeds' noise at the start, but not in the steps. Only the network runs in mixed
    precision: steps are computed in float32, whatever operations they use.
    """
    method.begin()
    noise = StepNoise(seeds, seeds.tolist(), 0, shape)
    samples = method.noise_scale * (noise() if initial_noise is None else initial_noise)
    # As one tensor: a number passed at each step would be copied to the device every time.
    for number, t in enumerate(torch.tensor(method.timesteps, device=seeds.device), start=1):
        model_output = predict(method.network_input(samples, number), t)
        with torch.autocast(seeds.device.type, enabled=False):
            samples = method.step(model_output, number, samples, replace(noise, number=number))
        on_step(number, samples)
    return samples


@dataclass(frozen=True)
class StepNoise:
    """The Gaussian noise of one step, drawn only when a step asks for it, from the seeds and the number alone."""

    seeds: torch.Tensor
    seeds_on_host: list[int]
    number: int  # of the step; 0 is the start
    shape: tuple[int, int, int]

    def __call__(self) -> torch.Tensor:
        return standard_normal(NOISE_KEY, self.seeds, self.number, self.shape)

    def generators(self) -> list[torch.Generator]:
        """Return a CPU generator for each image, for diffusers' schedulers, which draw the noise themselves."""
        return [generator_for("generation", seed, self.number) for seed in self.seeds_on_host]


def network_predict(network: Callable[..., Any]) -> Predict:
    """Wrap a network, perhaps with its condition bound to it, as `denoise` calls it."""
    return lambda samples, t: network(samples, t).sample.float()


def to_uint8(samples: torch.Tensor) -> torch.Tensor:
    """Map [-1, 1] to 0 .. 255, rounded to nearest."""
    return (samples * 127.5 + 128).clamp(0, 255).to(torch.uint8)


# Sub-sequences of the timesteps 0 .. T-1, descending.


def linear(num_train_timesteps: int, num_inference_steps: int) -> list[int]:
    """Spread S timesteps evenly, the first and the last among them; S = T gives all.

    The code of DDIM steps by T // S instead, which ends before T-1 and for many S gives another number of steps.
    """
    if num_inference_steps == 1:
        return [num_train_timesteps - 1]
    sequence = torch.linspace(0, num_train_timesteps - 1, num_inference_steps, dtype=torch.float64)
    return sequence.round().long().flip(0).tolist()


def quadratic(num_train_timesteps: int, num_inference_steps: int) -> list[int]:
    """Take linspace(0, sqrt(0.8 T), S)^2, rounded down, dense near 0 (Song et al. 2021, DDIM, appendix D.2).

    As in DDIM's code, but a timestep to which several values round is visited once: a step from t to t changes
    nothing. S = 100 and T = 1000 leave 96 timesteps. S = 1 gives the last one alone.
    """
    end = np.sqrt(num_train_timesteps * 0.8)
    roots = np.linspace(0 if num_inference_steps > 1 else end, end, num_inference_steps)
    return np.unique((roots**2).astype(int))[::-1].tolist()


SKIP_SCHEDULES: dict[str, Callable[[int, int], list[int]]] = {"linear": linear, "quadratic": quadratic}


class DenoisingMethod:
    """The interface. Step number n, counted from 1, starts at `timesteps[n - 1]`, with one call of the network."""

    timesteps: list[float]
    adds_noise: bool  # whether a step may ask for noise
    noise_scale: float = 1.0  # of the noise at the start

    def __init__(self, name: str, num_inference_steps: int):
        self.name = name
        # The settings that distinguish its images from those of other methods, in records.
        self.settings: dict[str, object] = {"sampler": name, "num_inference_steps": num_inference_steps}
        self.folder_name = f"{name}-{num_inference_steps}"  # its part of the name of a folder of images
        self.description = f"{name}, {num_inference_steps} steps"  # a line, with what was decided for the user

    def begin(self) -> None:
        """Forget the batch before; for methods that remember earlier steps."""

    def network_input(self, sample: torch.Tensor, number: int) -> torch.Tensor:
        """Return the sample as the network is to see it."""
        return sample

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        """Take the sample from this step's timestep to the next one's; after the last step it is the image."""
        raise NotImplementedError


class ExactMethod(DenoisingMethod):
    """Steps over any sub-sequence, with coefficients in float64 that are rounded once, when they meet the sample."""

    # From output, t, an earlier timestep (-1: the image) and sample to mean and standard deviation of the sample there.
    mean_and_deviation: Callable[[torch.Tensor, int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | float]]

    def __init__(self, name: str, scheduler: ExactDDPMScheduler, num_inference_steps: int, skip_schedule: str):
        super().__init__(name, num_inference_steps)
        self.scheduler = scheduler
        self.timesteps = SKIP_SCHEDULES[skip_schedule](scheduler.config.num_train_timesteps, num_inference_steps)
        self.settings["skip_schedule"] = skip_schedule
        self.folder_name += "" if skip_schedule == "linear" else f"-{skip_schedule}"
        self.description += f", {skip_schedule}"
        if len(self.timesteps) < num_inference_steps:
            self.description += f" ({len(self.timesteps)} different timesteps)"
        steps = scheduler.config.num_train_timesteps
        if scheduler.config.prediction_type == "mean" and (name != "ddpm" or len(self.timesteps) < steps):
            # mu-tilde has sqrt(a_t-1) beta_t / (1 - a_t) x_0 (eq. 7): 1 / 7800 at the last t of the paper's schedule.
            message = "The network predicts the mean of a step. To recover x_0 from it, as %s must, multiplies its "
            logger.warning(message + "errors; use DDPM with all %d steps", self.description, steps)

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        previous = self.timesteps[number] if number < len(self.timesteps) else -1
        mean, deviation = self.mean_and_deviation(model_output, self.timesteps[number - 1], previous, sample)
        return mean + deviation * noise() if adds_noise(deviation) else mean


class DDPM(ExactMethod):
    """Ancestral steps (Ho et al. 2020, algorithm 2).

    beta_t is a good variance between neighbours only: over 100 longer steps, with the betas of the sub-sequence, it
    gives an FID of 46.5 on CIFAR-10 where the posterior's gives 11.2 (as published by xyfJASON). So the diffusion's own
    variance is used over all steps, fixed_small over fewer. A learned variance is used if there is one, except that
    "learned" holds for single steps of the diffusion and says nothing about longer ones.
    """

    adds_noise = True

    def __init__(
        self,
        scheduler: ExactDDPMScheduler,
        num_inference_steps: int,
        variance_type: str | None = None,
        skip_schedule: str = "linear",
    ):
        super().__init__("ddpm", scheduler, num_inference_steps, skip_schedule)
        skips_timesteps = len(self.timesteps) < len(scheduler.betas)
        learned = scheduler.config.variance_type if scheduler.learns_variance else None
        if variance_type is None and learned and not (skips_timesteps and learned == "learned"):
            variance_type = learned
        variance_type = variance_type or ("fixed_small" if skips_timesteps else scheduler.config.variance_type)
        is_right = variance_type == scheduler.config.variance_type  # as in most runs; building another one takes long
        self.scheduler = scheduler if is_right else with_variance(scheduler.config, variance_type)
        self.mean_and_deviation = self.scheduler.posterior
        self.settings["variance_type"] = variance_type
        self.folder_name += f"-{variance_type}"
        self.description += f", variance {variance_type}"
        if skips_timesteps and variance_type == "fixed_small":
            self.description += ", the default of a sub-sequence (--variance_type)"


class DDIM(ExactMethod):
    """Song et al. 2021, eq. 12 and 16: eta = 0 adds no noise, the default; eta = 1 is DDPM with fixed_small."""

    def __init__(
        self,
        scheduler: ExactDDPMScheduler,
        num_inference_steps: int,
        eta: float | None = None,
        skip_schedule: str = "linear",
    ):
        super().__init__("ddim", scheduler, num_inference_steps, skip_schedule)
        self.settings["eta"] = self.eta = eta or 0.0
        self.adds_noise = self.eta > 0
        self.mean_and_deviation = partial(scheduler.implicit, eta=self.eta)
        self.folder_name += f"-eta-{self.eta:g}" if self.eta else ""
        self.description += f", eta {self.eta:g}"


def with_variance(config: dict, variance_type: str) -> ExactDDPMScheduler:
    """Return the exact scheduler of a configuration, with this variance whatever it says."""
    return ExactDDPMScheduler.from_config(config, variance_type=variance_type)


class DiffusersMethod(DenoisingMethod):
    """Any scheduler that diffusers calls compatible with DDPMScheduler, by its own step, on this model's betas."""

    def __init__(self, scheduler: ExactDDPMScheduler, name: str, num_inference_steps: int):
        super().__init__(name, num_inference_steps)
        classes = {compatible.__name__: compatible for compatible in scheduler.compatibles}
        if scheduler.config.prediction_type == "mean":
            raise UnusableScheduler("cannot be used: diffusers knows no prediction of the mean; use --ddpm or --ddim")
        if name not in classes:
            raise UnusableScheduler(f"is not one that fits; use one of {', '.join(sorted(classes))}")
        try:
            # Each class visits timesteps in the way that suits it, which a pipeline's DDPMScheduler knows nothing of.
            config = {key: value for key, value in scheduler.config.items() if key not in SPACING}
            fixed = {"variance_type": "fixed_large"} if scheduler.learns_variance else {}
            self._scheduler = classes[name].from_config(
                config, beta_schedule="linear", trained_betas=scheduler.betas.tolist(), **fixed
            )
            if not hasattr(self._scheduler, "alphas_cumprod"):
                raise UnusableScheduler("has noise levels of its own, not those that the model was trained with")
            self._takes_generator = "generator" in inspect.signature(self._scheduler.step).parameters
            self.begin()
            self.timesteps = self._scheduler.timesteps.tolist()
            self.noise_scale = float(self._scheduler.init_noise_sigma)
            self._check_beginning(scheduler.config.num_train_timesteps)
            self._try_all_steps()
        except UnusableScheduler:
            raise
        except Exception as error:  # whatever the step of a scheduler made for something else runs into
            raise UnusableScheduler(f"cannot be used here ({' '.join(str(error).split())})") from error
        if len(self.timesteps) != num_inference_steps:
            self.description += f" ({len(self.timesteps)} calls of the network)"

    def begin(self) -> None:
        # Timesteps stay on the host: a step looks its own up among them, and would wait for a device that has them.
        self._scheduler.set_timesteps(self.settings["num_inference_steps"])

    def network_input(self, sample: torch.Tensor, number: int) -> torch.Tensor:
        return self._scheduler.scale_model_input(sample, self._scheduler.timesteps[number - 1])

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        drawing = {"generator": noise.generators()} if self._takes_generator and self.adds_noise else {}
        t = self._scheduler.timesteps[number - 1]
        output = model_output[:, : sample.shape[1]]  # without a variance, which few of these schedulers use
        return self._scheduler.step(output, t, sample, **drawing).prev_sample

    def _check_beginning(self, num_train_timesteps: int) -> None:
        """Raise if the first timestep is far below T: sampling begins with pure noise, but x_t there is not pure noise.

        DDIMScheduler and PNDMScheduler begin n steps at (n - 1) times the whole part of T / n.
        """
        steps, first = self.settings["num_inference_steps"], max(self.timesteps)
        if num_train_timesteps - first > max(2 * num_train_timesteps / steps, num_train_timesteps / 4):
            raise UnusableScheduler(
                f"begins at t = {first:.0f} of {num_train_timesteps} with {steps} steps, where an image is not all "
                f"noise; choose a number of steps that divides {num_train_timesteps}"
            )

    def _try_all_steps(self) -> None:
        """Denoise tiny images: check that one is the same alone and among others, and learn whether steps add noise."""

        def denoised(*seeds: int) -> torch.Tensor:
            start = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4).repeat(len(seeds), 1, 1, 1)
            return denoise(lambda samples, t: samples * 0.5, self, torch.tensor(seeds), (1, 4, 4), initial_noise=start)

        self.adds_noise = True
        among_others, alone = denoised(0, 1), denoised(1)
        if not torch.equal(among_others[1], alone[0]):
            raise UnusableScheduler("gives an image that depends on more than its seed")
        self.adds_noise = not torch.equal(among_others[0], among_others[1])


class UnusableScheduler(Exception):
    """A scheduler of diffusers that cannot be used, with the reason as the end of a sentence about it."""
