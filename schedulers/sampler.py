"""What a timestep sampler is: the interface, and draws from any density over t.

Every process draws the timesteps of the whole global batch from the step's generator and takes those of its own
images: what is drawn does not depend on the number of processes, and a sampler may look at the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Update:
    """A step of the optimiser, for a sampler that measures what it changes.

    `kl(rows, timesteps, noise_rows)` is KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)) of this process's images `rows` as
    the network now stands, up to what no update changes, in bits per dimension; without gradients or dropout. The
    noise is a function of the step and of `noise_rows`: the same before and after the update.
    """

    step: int
    batch_size: int
    positions: torch.Tensor  # of this process's images in the global batch
    kl: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    total: Callable[[torch.Tensor], torch.Tensor]  # the sum over all processes, which all must ask for


class TimestepSampler:
    """Draws from a density p_t over the timesteps; a new sampler needs to call `set_density` and no more.

    Its constructor takes the diffusion's a_t, the cumulative product of 1 - beta, and options with the paper's values
    as defaults. `objective` says what its draws train: "same" as uniform ones, because losses are weighted by
    1 / (T p_t) or because p_t is uniform, or "changed", because they are not.
    """

    objective: Literal["same", "changed"] = "same"
    stratified = False

    def __init__(self, alphas_cumprod: torch.Tensor):
        self.num_train_timesteps = len(alphas_cumprod)
        self.set_density(torch.ones(self.num_train_timesteps))

    def set_density(self, density: torch.Tensor) -> None:
        """Draw from this density from now on; it need not sum to 1."""
        self._density = density.double() / density.double().sum()
        cumulative = self._density.cumsum(0)
        self._cumulative = cumulative / cumulative[-1]
        if self.objective == "same" and not (self._density > 0).all():
            raise ValueError(f"{type(self).__name__} never draws some timesteps, so its objective is not the same")
        corrections = 1 / (self.num_train_timesteps * self._density)
        self._corrections = (corrections if self.objective == "same" else torch.ones_like(corrections)).float()

    def describe(self) -> torch.Tensor:
        """The probability of every timestep, in float64."""
        return self._density

    @property
    def least_probability(self) -> float:
        """What no timestep's probability is below, now or after the sampler has adapted."""
        return self.describe().min().item()

    # Draws.

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """The timesteps of a global batch, and the weights of their losses."""
        timesteps = self.draw(batch_size, generator)
        return timesteps, self._corrections[timesteps]

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        return self.inverse_cumulative(self.quantiles(batch_size, generator))

    def quantiles(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Uniform numbers on [0, 1): independent, or stratified, (i + U_i) / n in random order.

        Stratified, every number is still uniform on its own, so that nothing changes in expectation, and a batch
        covers the timesteps evenly, so that its gradient is less noisy.
        """
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return (torch.randperm(count, generator=generator) + uniform) / count if self.stratified else uniform

    def inverse_cumulative(self, quantiles: torch.Tensor) -> torch.Tensor:
        """The smallest t with P(at most t) > u."""
        return torch.searchsorted(self._cumulative, quantiles, right=True)

    def sample_for(
        self, images: torch.Tensor, positions: torch.Tensor, batch_size: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sample` for a sampler that looks at the images: of this process, at `positions` of the global batch."""
        raise NotImplementedError

    # What a sampler that learns overrides.

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """The losses of a step's global batch, the same on every process.

        They are the errors that the network is trained on, with the loss weighting but without this sampler's own
        weights. They come two steps late: see `training/timesteps.py`.
        """

    def start(self, channels: int, device: torch.device) -> None:
        """Before a run: what a sampler that looks at the images must know to be ready for its state."""

    def before_update(self, update: Update) -> None:
        """Before the weights are updated."""

    def after_update(self, update: Update) -> None:
        """After the weights have been updated."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors, saved in every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {', '.join(state)}")

    # What a run asks of it.

    def overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(TimestepSampler, name) for name in names)

    @property
    def observes(self) -> bool:
        return self.overrides("observe")

    @property
    def looks_at_images(self) -> bool:
        return self.overrides("sample_for")

    @property
    def measures_updates(self) -> bool:
        return self.overrides("before_update", "after_update")

    @property
    def adapts(self) -> bool:
        return self.observes or self.measures_updates

    @property
    def can_be_stratified(self) -> bool:
        """Whether its draws go through `quantiles`; a class that overrides `draw` and uses them says so."""
        return not self.overrides("sample", "draw", "sample_for")
