"""Timestep samplers: the interface, draws from any density over t, and the fixed densities of several papers.

Every process draws the timesteps of the whole global batch from the step's generator and takes those of its own
images: what is drawn does not depend on the number of processes, and a sampler may look at the batch as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from schedulers.ddpm import signal_to_noise


@dataclass(frozen=True)
class UpdateProbe:
    """One optimiser step, for a sampler that measures what the step changes.

    `kl(rows, timesteps, noise_rows)` is KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)) of this process's images `rows` as
    the network now stands, up to what no update changes, in bits per dimension; without gradients or dropout. The
    noise is a function of the step and of `noise_rows`: the same before and after the update.
    """

    step: int
    batch_size: int
    positions: torch.Tensor  # of this process's images in the global batch
    images: torch.Tensor  # this process's, uint8, on the host
    network: torch.nn.Module
    kl: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    total: Callable[[torch.Tensor], torch.Tensor]  # the sum over all processes, which all must ask for


def check_timesteps(t: torch.Tensor, count: int, steps: int) -> None:
    """Raise unless `t` holds `count` timesteps from 0 to steps - 1; on the host this takes microseconds."""
    if t.shape != (count,) or t.dtype != torch.int64:
        raise ValueError(f"draws {list(t.shape)} timesteps of {t.dtype} where [{count}] of torch.int64 are wanted")
    if not 0 <= t.min() <= t.max() < steps:
        raise ValueError(f"draws t from {t.min()} to {t.max()}; they must be from 0 to {steps - 1}")


class TimestepSampler:
    """Draws from a density p_t over the timesteps; a new sampler needs to call `set_density` and no more.

    Its constructor takes the diffusion's a_t, the cumulative product of 1 - beta, and options with the paper's values
    as defaults. `objective` says what its draws train: "same" as uniform ones, because losses are weighted by
    1 / (T p_t) or because p_t is uniform, or "changed", because they are not.
    """

    objective: Literal["same", "changed"] = "same"
    stratified = False
    needs_squared_errors = False  # whether it observes squared errors, from which those of x_0 follow

    def __init__(self, alphas_cumprod: torch.Tensor):
        self.num_train_timesteps = len(alphas_cumprod)
        # The weight of a squared error of x_0 at every t in the losses it observes; here, an error of epsilon weighs 1.
        self.x_0_weights = signal_to_noise(alphas_cumprod)
        self.set_density(torch.ones(self.num_train_timesteps))

    def set_density(self, density: torch.Tensor, floor: float = 0.0) -> None:
        """Draw from this density, which need not sum to 1, with a share `floor` of all draws uniform over all t."""
        if not 0 <= floor <= 1:
            raise ValueError(f"floor {floor}: must be from 0 to 1")
        density, steps = density.double(), self.num_train_timesteps
        if density.shape != (steps,) or not (density >= 0).all() or not 0 < density.sum() < math.inf:
            raise ValueError(f"a density must be {steps} numbers, one for each timestep, none below 0 and not all 0")
        self._density = (1 - floor) * (density / density.sum()) + floor / steps
        cumulative = self._density.cumsum(0)
        self._cumulative = cumulative / cumulative[-1]
        if self.objective == "same" and not (self._density > 0).all():
            raise ValueError(f"{type(self).__name__} never draws some timesteps, so its objective is not the same")
        corrections = 1 / (steps * self._density)
        self._corrections = (corrections if self.objective == "same" else torch.ones_like(corrections)).float()

    def describe(self) -> torch.Tensor:
        """Return the probability of every timestep, in float64."""
        return self._density

    def signals(self) -> dict[str, torch.Tensor]:
        """Return the quantities that it adapts to, by name, as far as they are known: a number for every timestep."""
        return {}

    @property
    def least_probability(self) -> float:
        """Return a lower bound on every timestep's probability, now and after the sampler has adapted."""
        return self.describe().min().item()

    # Draws.

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the timesteps of a global batch, and the weights of their losses."""
        timesteps = self.draw(batch_size, generator)
        check_timesteps(timesteps, batch_size, len(self._corrections))
        return timesteps, self._corrections[timesteps]

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        return self.inverse_cumulative(self.quantiles(batch_size, generator))

    def quantiles(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Draw uniform numbers on [0, 1): independent, or stratified, (i + U_i) / n in random order.

        Stratified, each is still uniform on its own, and a batch, spread evenly, has a less noisy gradient.
        """
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return (torch.randperm(count, generator=generator) + uniform) / count if self.stratified else uniform

    def inverse_cumulative(self, quantiles: torch.Tensor) -> torch.Tensor:
        """Return the smallest t with P(at most t) > u."""
        return torch.searchsorted(self._cumulative, quantiles, right=True)

    def sample_for(
        self, images: torch.Tensor, positions: torch.Tensor, batch_size: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw as `sample` does, but looking at the images: this process's, at `positions` in the global batch."""
        raise NotImplementedError

    # What a sampler that learns overrides.

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Take note of the losses of a step's global batch, the same on every process, DELAY steps later.

        They have the loss weighting but not this sampler's own weights.
        """

    def start(self, shape: tuple[int, int, int], device: torch.device) -> None:
        """Get ready for a run with images of this shape, and for the state of a checkpoint."""

    def resize(self, shape: tuple[int, int, int]) -> None:
        """Expect images of this shape from the next draw on.

        A resumed run repeats this call after the state is loaded, as long as the shape differs from that of `start`.
        """

    def before_update(self, update: UpdateProbe) -> None:
        """Look at the network before its weights are updated."""

    def after_update(self, update: UpdateProbe) -> None:
        """Look at the network after its weights have been updated."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return tensors that every checkpoint saves."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {', '.join(state)}")

    # What a run asks of it.

    def overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(TimestepSampler, name) for name in names)

    @property
    def looks_at_updates(self) -> bool:
        return self.overrides("before_update", "after_update")

    @property
    def adapts(self) -> bool:
        return self.looks_at_updates or self.overrides("observe")

    @property
    def can_be_stratified(self) -> bool:
        """Tell whether its draws use `quantiles`; a class whose own `draw` uses them sets this to True."""
        return not self.overrides("sample", "draw", "sample_for")


class Uniform(TimestepSampler):
    """t uniform on 0 .. T-1, independently for every image (Ho et al. 2020, algorithm 1). The same objective."""

    can_be_stratified = True

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        if self.stratified:
            return super().draw(batch_size, generator)
        return torch.randint(self.num_train_timesteps, (batch_size,), generator=generator)

    def inverse_cumulative(self, quantiles: torch.Tensor) -> torch.Tensor:
        return (quantiles * self.num_train_timesteps).long()


class Stratified(Uniform):
    """One t from each of n equal slices of 0 .. T-1, in random order: t_i = floor(T (i + U_i) / n).

    As in Crowson's k-diffusion; `--stratified` does it to any other density. The same objective.
    """

    stratified = True


class LogitNormal(TimestepSampler):
    """t = floor(T sigmoid(N(mean, std^2))) (Esser et al. 2024, eq. 19, which has it for rectified flows).

    P(t) = Phi((logit((t + 1) / T) - mean) / std) - Phi((logit(t / T) - mean) / std). Another objective.
    """

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, mean: float = 0.0, std: float = 1.0):
        super().__init__(alphas_cumprod)
        positive(std=std)
        edges = torch.linspace(0, 1, self.num_train_timesteps + 1, dtype=torch.float64)
        self.set_density(normal_mass((edges.logit() - mean) / std))


class EDM(TimestepSampler):
    """ln sigma ~ N(mean, std^2) (Karras et al. 2022, table 1), t the one whose log sigma_t is nearest.

    sigma_t = sqrt((1 - a_t) / a_t) is the noise beside an image of unit scale. Another objective: its own weights are
    `--loss_weighting edm`. The paper has no floor.
    """

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, mean: float = -1.2, std: float = 1.2, floor: float = 0.0):
        super().__init__(alphas_cumprod)
        positive(std=std)
        log_sigma = ((1 - alphas_cumprod) / alphas_cumprod).log() / 2
        self.set_density(normal_mass((cells(log_sigma) - mean) / std), floor)


class Laplace(TimestepSampler):
    """lambda = log SNR ~ exp(-|lambda - mu| / b) / (2 b), t the nearest (Hang et al. 2024).

    There lambda = mu - b sgn(1/2 - u) log(1 - 2 |u - 1/2|) for uniform u: draws gather where image and noise are
    equally strong. Another objective, unweighted.
    """

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, mu: float = 0.0, b: float = 0.5):
        super().__init__(alphas_cumprod)
        positive(b=b)
        self.set_density(symmetric_mass((cells(-alphas_cumprod.logit()) + mu) / b, laplace_cumulative))


class UniformLogSNR(TimestepSampler):
    """lambda = log SNR uniform from `low` to `high`, with a share `floor` of the draws uniform over all t.

    It is the density of the variational bound, in which the error of epsilon counts the same at every lambda (Kingma
    et al. 2021). Another objective.
    """

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, low: float = -6.5, high: float = 6.2, floor: float = 0.03):
        super().__init__(alphas_cumprod)
        self.set_density(LogSNRBins(alphas_cumprod).between(low, high), floor)


class BetaTimesteps(TimestepSampler):
    """t = floor(T u) with u ~ Beta(alpha, beta): the first timesteps more often (B-TTDM, Zheng et al., ECCV 2024).

    The paper has beta = 1 and alpha < 1, hence p_t = ((t + 1) / T)^alpha - (t / T)^alpha. Its alpha of 0.8 is known
    here at second hand, from a reimplementation for OneTrainer. Another objective, unweighted.
    """

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, alpha: float = 0.8, beta: float = 1.0):
        super().__init__(alphas_cumprod)
        positive(alpha=alpha, beta=beta)
        from scipy.special import betainc

        edges = torch.linspace(0, 1, self.num_train_timesteps + 1, dtype=torch.float64)
        self.set_density(torch.from_numpy(betainc(alpha, beta, edges.numpy())).diff())


class SpeeD(TimestepSampler):
    """Timesteps below tau k times as likely as those from tau on (Wang et al. 2024, eq. 5), drawn in dual pairs.

    Half of the batch plus one is drawn like this; the rest are duals of these, m - t for t < m and t - m otherwise, as
    in the authors' code, where m is one more than the first t at which sqrt(1 - a_t) rises by less than 1e-4 a step.
    tau is 700 of 1000 timesteps. Another objective; the weights that belong to it are `--loss_weighting speed`.
    """

    objective = "changed"
    can_be_stratified = True

    def __init__(self, alphas_cumprod: torch.Tensor, tau: int | None = None, k: float = 5.0):
        super().__init__(alphas_cumprod)
        positive(k=k)
        t = torch.arange(self.num_train_timesteps)
        self.set_density(torch.where(t < speed_tau(tau, self.num_train_timesteps), k, 1.0))
        self.mirror = saturation(alphas_cumprod)
        self._primary_share = 0.5

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        primaries = batch_size // 2 + 1
        self._primary_share = min(1.0, primaries / batch_size)
        t = super().draw(primaries, generator)
        return torch.cat([t, self.dual(t)])[:batch_size]

    def dual(self, t: torch.Tensor) -> torch.Tensor:
        return torch.where(t < self.mirror, self.mirror - t, t - self.mirror)

    def describe(self) -> torch.Tensor:
        """Return the density of first draws and duals together, in the proportion of the latest batch."""
        first = super().describe()
        duals = torch.zeros_like(first).index_add(0, self.dual(torch.arange(self.num_train_timesteps)), first)
        return self._primary_share * first + (1 - self._primary_share) * duals


class LogSNRBins:
    """Equal bins of lambda_t = log(a_t / (1 - a_t)), the log signal-to-noise ratio, over the range of a schedule.

    Noise levels compare across schedules where timesteps do not. Bins go from the noisiest to the cleanest; those
    without a timestep are left out, as at the end of the cosine schedule.
    """

    def __init__(self, alphas_cumprod: torch.Tensor, count: int = 16):
        self.log_snr = log_snr_of(alphas_cumprod)
        highest, lowest = self.log_snr[0].item(), self.log_snr[-1].item()
        if highest == lowest:  # a single timestep
            highest, lowest = highest + 0.5, lowest - 0.5
        edges = torch.linspace(lowest, highest, count + 1, dtype=torch.float64)
        filled, self.of_timestep = torch.bucketize(self.log_snr, edges[1:-1], right=True).unique(return_inverse=True)
        self.edges = torch.stack([edges[filled], edges[filled + 1]], dim=1)  # lower and upper of each bin
        self.centres = self.edges.mean(1)
        self.counts = torch.bincount(self.of_timestep)  # of timesteps
        # The part of the range that each timestep stands for, cut midway between neighbours; in all highest - lowest.
        midpoints = (self.log_snr[1:] + self.log_snr[:-1]) / 2
        cuts = torch.cat([edges[-1:], midpoints, edges[:1]])
        self.widths = cuts[:-1] - cuts[1:]  # of every t

    def __len__(self) -> int:
        return len(self.centres)

    def between(self, low: float, high: float) -> torch.Tensor:
        """Return the width that each t stands for where lambda is from low to high, and 0 elsewhere."""
        inside = self.widths * ((self.log_snr >= low) & (self.log_snr <= high))
        if not inside.any():
            raise ValueError(f"low {low}, high {high}: no timestep's log SNR is between them")
        return inside

    def smoothed(self, values: torch.Tensor) -> torch.Tensor:
        """Average the value of every bin, counted twice, with the values of its two neighbours."""
        padded = values[[0, *range(len(values)), -1]]
        return (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over all timesteps by bin."""
        return values.new_zeros(len(self)).index_add(0, self.of_timestep, values)

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Average values over all timesteps by bin."""
        return self.total(values) / self.counts

    def with_gaps(self, values: np.ndarray, filling: float) -> tuple[np.ndarray, np.ndarray]:
        """Return adjoining edges and the values of the bins between them, [bins, ...], with a filling for the gaps."""
        edges = self.edges.unique().numpy()
        filled = np.full((len(edges) - 1, *values.shape[1:]), filling, dtype=float)
        filled[np.searchsorted(edges, self.edges[:, 0].numpy())] = values
        return edges, filled


def log_snr_of(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """Compute log(a_t / (1 - a_t)); if the last t holds no signal, repeat the step before it, not -infinity."""
    log_snr = alphas_cumprod.double().logit()
    if log_snr[-1] == -math.inf:
        log_snr[-1] = log_snr[-2] - (log_snr[-3] - log_snr[-2] if len(log_snr) > 2 else 1)
    return log_snr


def saturation(alphas_cumprod: torch.Tensor) -> int:
    """Find SpeeD's m, 642 for the linear schedule; the slope is that of 1000 steps whatever their number."""
    last = len(alphas_cumprod) - 1
    if last == 0:
        return last  # one timestep has no slope
    slope = torch.gradient((1 - alphas_cumprod).sqrt())[0] * (len(alphas_cumprod) / 1000)
    flat = (slope < 1e-4).nonzero()
    return min(flat[0].item() + 1, last) if len(flat) else last


def speed_tau(tau: int | None, num_train_timesteps: int) -> int:
    """Return SpeeD's tau, by default the paper's share of the timesteps."""
    if tau is None:
        return round(0.7 * num_train_timesteps)
    if not 0 < tau <= num_train_timesteps:
        raise ValueError(f"tau {tau}: must be from 1 to the {num_train_timesteps} timesteps")
    return tau


def cells(levels: torch.Tensor) -> torch.Tensor:
    """Return the edges between which each of the rising levels is the nearest."""
    infinity = torch.full((1,), math.inf, dtype=torch.float64)
    return torch.cat([-infinity, (levels[1:] + levels[:-1]) / 2, infinity])


def symmetric_mass(edges: torch.Tensor, cumulative: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute a distribution's mass in each cell between edges; the upper half by symmetry, for precision."""
    below, above = cumulative(edges), cumulative(-edges)
    return torch.where(edges[1:] <= 0, below[1:] - below[:-1], above[:-1] - above[1:])


def normal_mass(edges: torch.Tensor) -> torch.Tensor:
    return symmetric_mass(edges, torch.special.ndtr)


def laplace_cumulative(x: torch.Tensor) -> torch.Tensor:
    tail = (-x.abs()).exp() / 2
    return torch.where(x <= 0, tail, 1 - tail)


def positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} {value}: must be greater than 0")
