"""Sampling methods: which timesteps are visited on the way from noise to samples, and the step from each to the next.

A method knows nothing of networks and seeds. The loop that uses it is `schedulers/denoising_loop.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from common.randomness import derive_seed
from schedulers.ddpm import ExactDDPMScheduler


class StepNoise(Protocol):
    """The Gaussian noise of one step, drawn only when a step asks for it; each image's is a function of its seed."""

    def __call__(self) -> torch.Tensor: ...

    def generators(self) -> list[torch.Generator]:
        """One for each image, for diffusers' schedulers, which draw the noise themselves."""


# Sub-sequences of the timesteps 0 .. T-1, descending.


def linear(num_train_timesteps: int, num_inference_steps: int) -> list[int]:
    """S timesteps spread evenly, the first and the last among them; S = T gives all.

    The code of DDIM steps by T // S instead, which ends before T-1 and for many S gives another number of steps.
    """
    if num_inference_steps == 1:
        return [num_train_timesteps - 1]
    sequence = torch.linspace(0, num_train_timesteps - 1, num_inference_steps, dtype=torch.float64)
    return sequence.round().long().flip(0).tolist()


def quadratic(num_train_timesteps: int, num_inference_steps: int) -> list[int]:
    """linspace(0, sqrt(0.8 T), S)^2, rounded down, dense near 0 (Song et al. 2021, DDIM, appendix D.2 and its code).

    For larger S several of the first ones round to the same timestep. A step from t to t changes nothing, so each is
    visited once and the samples are those of the code, in fewer steps: 96 for S = 100 and T = 1000. S = 1 is the last.
    """
    roots = np.linspace(0, np.sqrt(num_train_timesteps * 0.8), num_inference_steps)
    if num_inference_steps == 1:
        roots = np.sqrt([num_train_timesteps * 0.8])
    return np.unique((roots**2).astype(int))[::-1].tolist()


SKIP_SCHEDULES: dict[str, Callable[[int, int], list[int]]] = {"linear": linear, "quadratic": quadratic}


class SamplingMethod:
    """The interface. Step number n, counted from 1, starts at `timesteps[n - 1]`; a network call belongs to each.

    `settings` is what makes another method of this one, for file names and records; `adds_noise` is whether a step
    may ask for noise.
    """

    name: str
    timesteps: list[float]
    settings: dict[str, object]
    adds_noise: bool
    noise_scale: float = 1.0  # of the noise that it all starts from

    def begin(self, device: torch.device) -> None:
        """Called before the first step for a batch, for methods that remember earlier steps."""

    def network_input(self, sample: torch.Tensor, number: int) -> torch.Tensor:
        """What the network is shown of the sample."""
        return sample

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        """From the sample at this step's timestep to that at the next one's; after the last step, the image."""
        raise NotImplementedError


class _Exact(SamplingMethod):
    """Over any sub-sequence, with coefficients in float64 that are rounded once, when they meet the sample."""

    def __init__(self, scheduler: ExactDDPMScheduler, timesteps: list[int]):
        self.scheduler = scheduler
        self.timesteps = timesteps

    def _mean_and_deviation(
        self, model_output: torch.Tensor, t: int, previous: int, sample: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        raise NotImplementedError

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        previous = self.timesteps[number] if number < len(self.timesteps) else -1
        mean, deviation = self._mean_and_deviation(model_output, self.timesteps[number - 1], previous, sample)
        return mean + deviation * noise() if deviation > 0 else mean


class DDPMSampling(_Exact):
    """Ancestral steps (Ho et al. 2020, algorithm 2).

    beta_t is a good variance between neighbours only: over 100 longer steps, where it is that of the sub-sequence, it
    gives an FID of 46.5 on CIFAR-10 where the posterior's gives 11.2 (as published by xyfJASON).
    """

    name = "ddpm"

    def __init__(
        self,
        scheduler: ExactDDPMScheduler,
        num_inference_steps: int,
        variance_type: str | None = None,
        skip_schedule: str = "linear",
    ):
        total = scheduler.config.num_train_timesteps
        timesteps = SKIP_SCHEDULES[skip_schedule](total, num_inference_steps)
        if variance_type is None:
            variance_type = "fixed_large" if len(timesteps) == total else "fixed_small"
        super().__init__(with_variance(scheduler.config, variance_type), timesteps)
        self.adds_noise = True
        self.settings = {
            "sampler": self.name,
            "num_inference_steps": num_inference_steps,
            "skip_schedule": skip_schedule,
            "variance_type": variance_type,
        }

    def _mean_and_deviation(self, model_output, t, previous, sample):
        return self.scheduler.posterior(model_output, t, previous, sample)


class DDIMSampling(_Exact):
    """Song et al. 2021, eq. 12 and 16: eta = 0 adds no noise, eta = 1 is DDPM with the posterior's variance."""

    name = "ddim"

    def __init__(
        self,
        scheduler: ExactDDPMScheduler,
        num_inference_steps: int,
        eta: float = 0.0,
        skip_schedule: str = "linear",
    ):
        super().__init__(
            scheduler, SKIP_SCHEDULES[skip_schedule](scheduler.config.num_train_timesteps, num_inference_steps)
        )
        self.eta = eta
        self.adds_noise = eta > 0
        self.settings = {
            "sampler": self.name,
            "num_inference_steps": num_inference_steps,
            "skip_schedule": skip_schedule,
            "eta": eta,
        }

    def _mean_and_deviation(self, model_output, t, previous, sample):
        return self.scheduler.implicit(model_output, t, previous, sample, self.eta)


def with_variance(config: dict, variance_type: str) -> ExactDDPMScheduler:
    """The exact scheduler of a configuration, with this variance whatever it says."""
    return ExactDDPMScheduler.from_config({**config, "variance_type": variance_type})


class DiffusersSampling(SamplingMethod):
    """Any scheduler that diffusers calls compatible with DDPMScheduler, by its own step, on this model's betas.

    Noise is drawn by the scheduler from generators of our choice, one for each image and step.
    """

    def __init__(self, scheduler: ExactDDPMScheduler, name: str, num_inference_steps: int):
        classes = {compatible.__name__: compatible for compatible in scheduler.compatibles}
        if name not in classes:
            raise UnusableScheduler(f"is not one that fits; use one of {', '.join(sorted(classes))}")
        self.name = name
        self.num_inference_steps = num_inference_steps
        self.settings = {"sampler": name, "num_inference_steps": num_inference_steps}
        try:
            self._theirs = classes[name].from_config(
                scheduler.config, beta_schedule="linear", trained_betas=scheduler.betas.tolist()
            )
            if not hasattr(self._theirs, "alphas_cumprod"):
                raise UnusableScheduler("has noise levels of its own, not those that the model was trained with")
            self._takes_generator = "generator" in _parameters(self._theirs.step)
            self.begin(torch.device("cpu"))
            self.timesteps = self._theirs.timesteps.tolist()
            self.noise_scale = float(self._theirs.init_noise_sigma)
            self._try()
        except UnusableScheduler:
            raise
        except Exception as error:  # whatever the step of a scheduler made for something else runs into
            raise UnusableScheduler(f"cannot be used here ({' '.join(str(error).split())})") from error

    def begin(self, device: torch.device) -> None:
        self._theirs.set_timesteps(self.num_inference_steps, device=device)

    def network_input(self, sample: torch.Tensor, number: int) -> torch.Tensor:
        return self._theirs.scale_model_input(sample, self._theirs.timesteps[number - 1])

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        drawing = {"generator": noise.generators()} if self._takes_generator and self.adds_noise else {}
        return self._theirs.step(model_output, self._theirs.timesteps[number - 1], sample, **drawing).prev_sample

    def _try(self) -> None:
        """Run all steps on a few numbers: an image must be the same alone and among others, and know its own noise."""
        self.adds_noise = True
        among_others, alone = self._run([0, 1]), self._run([1])
        if not torch.equal(among_others[1], alone[0]):
            raise UnusableScheduler("gives an image that depends on more than its seed")
        self.adds_noise = not torch.equal(among_others[0], among_others[1])

    def _run(self, seeds: list[int]) -> torch.Tensor:
        self.begin(torch.device("cpu"))
        sample = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4).repeat(len(seeds), 1, 1, 1) * self.noise_scale
        for number in range(1, len(self.timesteps) + 1):
            model_output = self.network_input(sample, number) * 0.5
            sample = self.step(model_output, number, sample, _TrialNoise(seeds, number))
        return sample


class _TrialNoise:
    def __init__(self, seeds: list[int], number: int):
        self.seeds, self.number = seeds, number

    def generators(self) -> list[torch.Generator]:
        return noise_generators(self.seeds, self.number)


def noise_generators(seeds: list[int], number: int) -> list[torch.Generator]:
    """For each seed a CPU generator of the noise of one step: the same numbers whatever the device of the images."""
    return [torch.Generator().manual_seed(derive_seed("generation", seed, number)) for seed in seeds]


class UnusableScheduler(Exception):
    """A scheduler of diffusers that cannot be used, with the reason as the end of a sentence about it."""


def _parameters(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)
