"""Which timesteps a step trains on. A new idea is one class here and one line in the registry."""

import math

import torch

from schedulers.adaptive import AdaptiveTimestepSampling, LossSecondMoment
from schedulers.sampler import TimestepSampler


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
    `--loss_weighting edm`.
    """

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, mean: float = -1.2, std: float = 1.2):
        super().__init__(alphas_cumprod)
        positive(std=std)
        log_sigma = ((1 - alphas_cumprod) / alphas_cumprod).log() / 2
        midpoints = (log_sigma[1:] + log_sigma[:-1]) / 2
        infinity = torch.full((1,), math.inf, dtype=torch.float64)
        self.set_density(normal_mass((torch.cat([-infinity, midpoints, infinity]) - mean) / std))


class SpeeD(TimestepSampler):
    """Timesteps below tau k times as likely as those from tau on (Wang et al. 2024, eq. 5), drawn in dual pairs.

    Half of the batch and one is drawn so; the others are their duals, m - t if t < m and t - m from there on, as in
    the authors' code, where m is one more than the first t at which sqrt(1 - a_t) rises by less than 1e-4 a step.
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
        """Of the first draws and their duals together, in the proportion of the latest batch."""
        first = super().describe()
        duals = torch.zeros_like(first).index_add(0, self.dual(torch.arange(self.num_train_timesteps)), first)
        return self._primary_share * first + (1 - self._primary_share) * duals


def saturation(alphas_cumprod: torch.Tensor) -> int:
    """SpeeD's m: 642 for the linear schedule of 1000 steps; the slope is that of 1000 steps whatever their number."""
    slope = torch.gradient((1 - alphas_cumprod).sqrt())[0] * (len(alphas_cumprod) / 1000)
    flat = (slope < 1e-4).nonzero()
    last = len(alphas_cumprod) - 1
    return min(flat[0].item() + 1, last) if len(flat) else last


def speed_tau(tau: int | None, num_train_timesteps: int) -> int:
    """SpeeD's tau, by default the paper's share of the timesteps."""
    if tau is None:
        return round(0.7 * num_train_timesteps)
    if not 0 < tau <= num_train_timesteps:
        raise ValueError(f"tau {tau}: must be from 1 to the {num_train_timesteps} timesteps")
    return tau


def normal_mass(edges: torch.Tensor) -> torch.Tensor:
    """The standard normal's probability of each cell between edges; of the upper half by symmetry, for precision."""
    below, above = torch.special.ndtr(edges), torch.special.ndtr(-edges)
    return torch.where(edges[1:] <= 0, below[1:] - below[:-1], above[:-1] - above[1:])


def positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} {value}: must be greater than 0")


TIMESTEP_SAMPLERS: dict[str, type[TimestepSampler]] = {
    "uniform": Uniform,
    "stratified": Stratified,
    "logit_normal": LogitNormal,
    "edm": EDM,
    "speed": SpeeD,
    "loss_second_moment": LossSecondMoment,
    "ats": AdaptiveTimestepSampling,
}
