"""The objective that a run trains on: which timesteps are drawn, what an error counts, and how it is measured.

Algorithm 1 of Ho et al. 2020 draws t uniformly, weights every t alike and takes the squared error of epsilon. Each of
the three is a table (TIMESTEP_SAMPLERS and LOSSES here, LOSS_WEIGHTINGS in schedulers/weighting.py), so that another
idea is one function or class and one line.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import yaml

from common.errors import RunFailed, UserError, user_errors
from common.machine import PendingCopy, to_device
from common.processes import Processes
from common.randomness import derive_seed, generator_for, standard_normal
from schedulers.adaptive_samplers import (
    EDM2,
    AdaptiveTimestepSampling,
    InfoNoise,
    KingmaGao,
    LossSecondMoment,
    MarginalReturn,
    SaturatingBound,
)
from schedulers.ddpm import ExactDDPMScheduler, prediction_of
from schedulers.timestep_samplers import (
    EDM,
    BetaTimesteps,
    Laplace,
    LogitNormal,
    SpeeD,
    Stratified,
    TimestepSampler,
    Uniform,
    UniformLogSNR,
    UpdateProbe,
    check_timesteps,
)
from schedulers.weighting import LOSS_WEIGHTINGS, weighting_table

if TYPE_CHECKING:
    from image_data.batches import Batch

TIMESTEP_SAMPLERS: dict[str, type[TimestepSampler]] = {
    "uniform": Uniform,
    "stratified": Stratified,
    "logit_normal": LogitNormal,
    "edm": EDM,
    "log_snr": UniformLogSNR,
    "laplace": Laplace,
    "beta": BetaTimesteps,
    "speed": SpeeD,
    "loss_second_moment": LossSecondMoment,
    "kingma_gao": KingmaGao,
    "infonoise": InfoNoise,
    "edm2": EDM2,
    "saturating_bound": SaturatingBound,
    "marginal_return": MarginalReturn,
    "ats": AdaptiveTimestepSampling,
}

# From output and target to the error of every pixel, whose mean is that of the image.
PixelLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, PixelLoss] = {
    "l2": lambda output, target: (output - target).square(),
    "l1": lambda output, target: (output - target).abs(),
    "huber": lambda output, target: F.huber_loss(output, target, reduction="none"),  # e^2 / 2 up to 1, then |e| - 1/2
}

ConditionInputs = Callable[[torch.Tensor], dict[str, torch.Tensor]]

# Steps until a sampler observes its losses: with two the device has the next step to work on while the host waits.
DELAY = 2
SHARE_OF_BOUND = 0.001  # of L_vlb in L_hybrid
BATCHES_TRIED, IMAGES_TRIED = 8, 128  # drawn from a user's own sampler to try it out before a run
PENDING = "on_their_way."  # prefix in a checkpoint for losses that the sampler has not observed yet


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Bring uint8 images to [-1, 1], as the network sees them."""
    return images.float() / 127.5 - 1


class DiffusionLoss:
    """The error of every image of a batch, at timesteps that a sampler draws (Ho et al. 2020, algorithm 1).

    Timesteps, weights and what a sampler observes are those of the global batch; the network sees this process's
    images. Losses reach a sampler DELAY steps later; those pending are part of the state, so a resume changes nothing.
    """

    def __init__(
        self,
        process: ExactDDPMScheduler,
        sampler: TimestepSampler,
        weights: torch.Tensor,
        error: PixelLoss = LOSSES["l2"],
        perturbation: float = 0.0,
        is_bound: bool = False,
    ):
        self.process, self.sampler, self.error, self.perturbation = process, sampler, error, perturbation
        self.weights = weights  # of the loss, at every t
        self.is_bound = is_bound  # where the variance is learned: L instead of L_hybrid
        self.half_resolution_steps = 0  # the first ones, on images of half the size
        self.sampler_seconds = 0.0  # that this process has spent on the sampler
        self._pending: deque[tuple[int, torch.Tensor, PendingCopy]] = deque()

    def start(
        self, seed: int, batch_size: int, shape: tuple[int, int, int], inputs: ConditionInputs, processes: Processes
    ) -> None:
        """Prepare for a run: its randomness, its global batch, and its network's inputs for rows of conditions."""
        self.seed, self.noise_key = seed, derive_seed(seed, "noise")
        self.batch_size, self.inputs = batch_size, inputs
        self.processes, self.device = processes, processes.device
        self.shape = self._shape_seen = shape  # of full-size images; of the images that the sampler expects
        self.sampler.start(shape, self.device)

    def __call__(self, network: torch.nn.Module, batch: Batch, t: torch.Tensor) -> torch.Tensor:
        """Return the error of every image: the mean of (epsilon - epsilon_theta(x_t, t))^2 over its pixels (eq. 14)."""
        x_0 = self._images(batch)
        epsilon = standard_normal(self.noise_key, self._to_device(batch.positions), batch.step, x_0.shape[1:])
        x_t = self.process.add_noise(x_0, self._perturbed(epsilon, batch), t)
        inputs = {name: self._to_device(value) for name, value in self.inputs(batch.condition).items()}
        output = network(x_t, t, **inputs).sample.float()
        target = self.process.target(x_0, epsilon, t)
        errors = self.error(output[:, : x_0.shape[1]], target).flatten(1).mean(1)
        return self._with_variance(errors, output, x_0, epsilon, t) if self.process.learns_variance else errors

    def _images(self, batch: Batch) -> torch.Tensor:
        """Return a batch's images in [-1, 1], averaged over blocks of 2x2 pixels during the half-size steps."""
        x_0 = normalise(self._to_device(batch.images))
        return F.avg_pool2d(x_0, 2) if self._halves(batch.step) else x_0

    def _halves(self, step: int) -> bool:
        # In a CUDA graph the step is a tensor on the device, which must not be read; such runs have no half-size steps.
        return self.half_resolution_steps > 0 and step < self.half_resolution_steps

    def _with_variance(
        self, errors: torch.Tensor, output: torch.Tensor, x_0: torch.Tensor, epsilon: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        """Return each image's L_hybrid = L_simple + 0.001 L_vlb (Nichol & Dhariwal 2021, eq. 16), or its term of L.

        L_vlb is estimated as T times the term at t. In L_hybrid it trains only the variance.
        """
        x_t = self.process.add_noise(x_0, epsilon, t)  # unperturbed, so that the target is the best prediction
        if self.is_bound:
            return self.process.bound(output, x_0, x_t, t)
        prediction, values = output.chunk(2, dim=1)
        frozen = torch.cat([prediction.detach(), values], dim=1)
        return errors + SHARE_OF_BOUND * len(self.weights) * self.process.bound(frozen, x_0, x_t, t)

    def _perturbed(self, epsilon: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return epsilon + gamma epsilon', the noise put into x_t; the target stays epsilon (Ning et al. 2023)."""
        if self.perturbation == 0:
            return epsilon
        key, positions = derive_seed(self.seed, "input perturbation"), self._to_device(batch.positions)
        return epsilon + self.perturbation * standard_normal(key, positions, batch.step, epsilon.shape[1:])

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)

    # Timesteps.

    def draw(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw t and the weight of its loss for each of this process's images, on its device.

        They are drawn for the global batch on the host, unless the sampler looks at the images on the device.
        """
        with self._timed():
            while self._pending and self._pending[0][0] <= batch.step - DELAY:
                self._let_sampler_observe(*self._pending.popleft())
            channels, height, width = self.shape
            shape = (channels, height // 2, width // 2) if self._halves(batch.step) else self.shape
            if shape != self._shape_seen:
                self._shape_seen = shape
                self.sampler.resize(shape)
            generator = generator_for(self.seed, "timesteps", batch.step)
            if self.sampler.overrides("sample_for"):
                t, weights = self.sampler.sample_for(self._images(batch), batch.positions, self.batch_size, generator)
                # Checking t would wait for the device. If it is out of range, its loss is NaN, which soon ends the run.
                inside = t.clamp(0, len(self.weights) - 1)
                return inside, (weights * self._to_device(self.weights)[inside]).where(t == inside, torch.nan)
            self._drawn, weights = self.sampler.sample(self.batch_size, generator)
            check_timesteps(self._drawn, self.batch_size, len(self.weights))
            weights = weights * self.weights[self._drawn]
            return self._to_device(self._drawn[batch.positions]), self._to_device(weights[batch.positions])

    # What the sampler learns from.

    def in_global_batch(self, errors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Put this process's errors at their places in the global batch, or return none if the sampler ignores them."""
        if not self.sampler.overrides("observe"):
            return errors[:0]
        return errors.new_zeros(self.batch_size).index_copy(0, self._to_device(batch.positions), errors)

    def observe(self, step: int, errors: torch.Tensor) -> None:
        """Start copying the global batch's errors to the host, if the sampler observes them."""
        if self.sampler.overrides("observe"):
            with self._timed():
                self._pending.append((step, self._drawn, PendingCopy(errors)))

    def _let_sampler_observe(self, step: int, timesteps: torch.Tensor, errors: PendingCopy) -> None:
        weighted = errors.get().double() * self.weights[timesteps]
        # A loss that is not finite stops the run at the host's next check; the sampler must not learn from it.
        finite = weighted.isfinite()
        self.sampler.observe(step, timesteps[finite], weighted[finite])

    @contextmanager
    def around_update(self, network: torch.nn.Module, batch: Batch) -> Iterator[None]:
        """Let a sampler that measures what an update changes look before and after it."""
        if not self.sampler.looks_at_updates:
            yield
            return
        kl = partial(self._divergences, network, batch)
        update = UpdateProbe(
            batch.step, self.batch_size, batch.positions, batch.images, network, kl, self._sum_over_processes
        )
        with self._timed():
            self.sampler.before_update(update)
        yield
        with self._timed():
            self.sampler.after_update(update)

    def _divergences(
        self, network, batch: Batch, rows: torch.Tensor, timesteps: torch.Tensor, noise_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute `UpdateProbe.kl`, in parts as large as a forward pass of the training."""
        started = time.perf_counter()
        self.processes.synchronize_device()
        self.sampler_seconds -= time.perf_counter() - started  # waiting for the training is not the sampler's time
        squared = copy(self)  # it draws noise of its own
        squared.error, squared.perturbation = LOSSES["l2"], 0.0
        squared.noise_key = derive_seed(self.seed, "timestep sampler")
        divergences = []
        network.eval()
        with torch.no_grad(), self.processes.accelerator.autocast():
            for part in torch.arange(len(rows)).split(len(batch.images) // batch.passes):
                t = self._to_device(timesteps[part])
                errors = squared(network, replace(batch[rows[part]], positions=noise_rows[part]), t)
                divergences.append(self._divergence_weights[t] * errors)
        network.train()
        self.processes.synchronize_device()
        return torch.cat(divergences)

    @cached_property
    def _divergence_weights(self) -> torch.Tensor:
        return self._to_device(self.process.divergence_weights().float())

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.processes.count > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the sampler's time; an exception in a user's own sampler ends the run with a one-line message."""
        started = time.perf_counter()
        try:
            yield
        except (Exception, SystemExit) as error:
            kind = type(self.sampler)
            if isinstance(error, UserError) or kind in TIMESTEP_SAMPLERS.values():
                raise
            raise RunFailed(
                f"the timestep sampler {kind.__name__} fails during the training with {type(error).__name__}: {error}; "
                f"the checkpoints that were saved are whole"
            ) from error
        self.sampler_seconds += time.perf_counter() - started

    # State.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sampler's tensors and the losses that it has not observed yet."""
        state = dict(self.sampler.state_dict())
        for step, timesteps, errors in self._pending:
            state |= {f"{PENDING}{step}.timesteps": timesteps, f"{PENDING}{step}.losses": errors.get()}
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.sampler.load_state_dict(sampler_state(state))
        self._pending.clear()
        for step in sorted({int(name.split(".")[1]) for name in state if name.startswith(PENDING)}):
            timesteps, losses = (state[f"{PENDING}{step}.{kind}"] for kind in ("timesteps", "losses"))
            self._pending.append((step, timesteps, PendingCopy(losses)))


def sampler_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the part of a loss's state that belongs to the sampler."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(PENDING)}


# From a run's options to its loss.


def build_loss(options: dict[str, object], process: ExactDDPMScheduler) -> DiffusionLoss:
    """Build the objective that a run's options name: sampler, weighting, loss, perturbation, and their own options."""
    sampler, weights = build_sampler(options, process.alphas_cumprod), build_weighting(options, process)
    if sampler.needs_squared_errors and options["loss"] != "l2":
        raise UserError(f"--loss {options['loss']}: {options['timestep_sampler']} learns from squared errors, of l2")
    weighting, is_bound = options["loss_weighting"], options["loss_weighting"] == "bound"
    if is_bound and options["loss"] != "l2":
        raise UserError(f"--loss {options['loss']}: --loss_weighting bound counts squared errors, of l2")
    if process.learns_variance:
        flag = f"with --variance_type {process.config.variance_type}"
        if weighting not in ("none", "bound"):
            raise UserError(f"--loss_weighting {weighting}: {flag} it must be none, for L_hybrid, or bound, for L")
        if sampler.needs_squared_errors or sampler.looks_at_updates:
            raise UserError(
                f"--timestep_sampler {options['timestep_sampler']}: learns from squared errors, and {flag} the loss is "
                f"more than that"
            )
    if options["half_resolution_steps"] and isinstance(sampler, MarginalReturn):
        raise UserError(
            f"--half_resolution_steps: {options['timestep_sampler']} would mistake the smaller errors of larger images "
            f"for learning; use another timestep sampler"
        )
    error_ratio = prediction_of(process.config.prediction_type).error_ratio
    sampler.x_0_weights = weights.double() * error_ratio(process.alphas_cumprod)
    if sampler.needs_squared_errors and len(unseen := (sampler.x_0_weights == 0).nonzero()):
        raise UserError(
            f"--loss_weighting {weighting}: counts the error of x_0 at t = {unseen[-1].item()} as 0, and "
            f"--timestep_sampler {options['timestep_sampler']} learns from that error"
        )
    loss = DiffusionLoss(process, sampler, weights, LOSSES[options["loss"]], options["input_perturbation"], is_bound)
    loss.half_resolution_steps = options["half_resolution_steps"]
    return loss


def build_sampler(options: dict[str, object], alphas_cumprod: torch.Tensor) -> TimestepSampler:
    """Build the sampler that the options name, from the registry or from the user's own file."""
    name = options["timestep_sampler"]
    kind = TIMESTEP_SAMPLERS.get(name) or load_class(name)
    own = options_of(options, name, kind) | parse_own_options(options["timestep_sampler_options"])
    # From the user's own code any exception, including an exit().
    kinds = () if name in TIMESTEP_SAMPLERS else (Exception, SystemExit)
    with blamed_on(f"--timestep_sampler {name}", *kinds):
        sampler = kind(alphas_cumprod, **own)
        if name not in TIMESTEP_SAMPLERS:
            try_out(kind(alphas_cumprod, **own), len(alphas_cumprod), options)
    if options["stratified"]:
        if not sampler.can_be_stratified:
            raise UserError(f"--stratified: {name} does not draw from one density for all images through `quantiles`")
        sampler.stratified = True
    return sampler


def try_out(sampler: TimestepSampler, steps: int, options: dict[str, object]) -> None:
    """Make the calls that a run will make to a user's own sampler, and raise for results that no run can use."""
    if sampler.objective not in ("same", "changed"):
        raise ValueError(f"its objective is {sampler.objective!r}; it must be 'same' or 'changed'")
    if sampler.overrides("sample_for") and sampler.overrides("observe"):
        raise ValueError(
            "has both sample_for and observe; what draws for images learns from before_update and after_update"
        )
    count, side = options["total_batch_size"] or IMAGES_TRIED, options["resolution"]
    channels = 3 if options["channels"] == "auto" else int(options["channels"])
    sampler.start((channels, side, side), torch.device("cpu"))
    density = sampler.describe()
    if density.shape != (steps,) or not (density >= 0).all() or abs(density.sum() - 1) > 1e-6:
        raise ValueError(f"describe() must return the probability of each of the {steps} timesteps; they sum to 1")
    images, positions = torch.zeros(1, channels, side, side).expand(count, -1, -1, -1), torch.arange(count)
    for step in range(BATCHES_TRIED):
        generator = partial(generator_for, "tried out", step)
        if sampler.overrides("sample_for"):
            t, weights = sampler.sample_for(images, positions, count, generator())
        elif sampler.overrides("sample"):
            t, weights = sampler.sample(count, generator())
        else:
            t, weights = sampler.draw(count, generator()), torch.ones(count)
        check_timesteps(t, count, steps)
        if weights.shape != (count,) or not (weights >= 0).all() or not weights.isfinite().all():
            raise ValueError(f"must give each of the {count} losses of a batch a weight, finite and not below 0")


def build_weighting(options: dict[str, object], process: ExactDDPMScheduler) -> torch.Tensor:
    """Compute the weight of the loss at every t that the options name."""
    name = options["loss_weighting"]
    own = options_of(options, name, LOSS_WEIGHTINGS[name])
    with blamed_on(f"--loss_weighting {name}"):
        return weighting_table(name, process.alphas_cumprod, process.config.prediction_type, **own)


def options_of(options: dict[str, object], name: str, function: Callable) -> dict[str, object]:
    """Pick the arguments of a sampler or weighting that are options of a run: `edm_mean` is the `mean` of `edm`."""
    names = {argument: f"{name}_{argument.rstrip('_')}" for argument in inspect.signature(function).parameters}
    if "variance_type" in names:
        names["variance_type"] = "variance_type"
    return {argument: options[option] for argument, option in names.items() if option in options}


@contextmanager
def blamed_on(flag: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn an error raised by a sampler or weighting into a `UserError` that names the flag which chose it."""
    try:
        yield
    except (ValueError, TypeError, *kinds) as error:
        kind = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        raise UserError(f"{flag}: {kind}{error}") from error


def load_class(name: str) -> type[TimestepSampler]:
    """Load a class from a user's own file, given as my_file.py:MySampler."""
    path, _, wanted = name.rpartition(":")
    # Registered under a name that no other module has, so that its own classes can find it.
    specification = importlib.util.spec_from_file_location(f"timestep_sampler_of_{Path(path).stem}", path)
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does
        raise UserError(f"--timestep_sampler {name}: {path} fails with {type(error).__name__}: {error}") from error
    classes = inspect.getmembers(
        module, lambda member: inspect.isclass(member) and member.__module__ == module.__name__
    )
    found = {own: kind for own, kind in classes if issubclass(kind, TimestepSampler)}
    if wanted not in found:
        there = f"has {', '.join(found)}" if found else "has no class that extends TimestepSampler"
        raise UserError(f"--timestep_sampler {name}: {path} has no timestep sampler {wanted}; it {there}")
    return found[wanted]


def parse_own_options(pairs: list[str]) -> dict[str, object]:
    """Parse `width=3 name=x` as the keyword arguments of a user's own sampler; values are read as YAML reads them."""
    own = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not (separator and name.isidentifier()):
            raise UserError(f"--timestep_sampler_options {pair}: must be name=value, as in width=3")
        with user_errors(f"--timestep_sampler_options {pair}: cannot be read as YAML", yaml.YAMLError):
            own[name] = yaml.safe_load(value)
    return own
