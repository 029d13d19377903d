"""Which timesteps a step trains on. A new idea is one class here and one line in the registry.

Every process draws the timesteps of the whole global batch from the step's generator and takes those of its own
images: what is drawn does not depend on the number of processes, and a sampler may look at the batch as a whole.
"""

import torch


class TimestepSampler:
    """The interface: `sample`, the density that it draws from, and a state of tensors for samplers that have one.

    `sample` returns the timesteps and the weights of their losses (1 unless the sampler corrects for its density).
    """

    def __init__(self, num_train_timesteps: int):
        self.num_train_timesteps = num_train_timesteps

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {', '.join(state)}")

    def describe(self) -> torch.Tensor:
        """The probability of every timestep."""
        return torch.full((self.num_train_timesteps,), 1 / self.num_train_timesteps, dtype=torch.float64)


class Uniform(TimestepSampler):
    """t uniform on 0 .. T-1, independently for every image (Ho et al. 2020, algorithm 1)."""

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        timesteps = torch.randint(self.num_train_timesteps, (batch_size,), generator=generator)
        return timesteps, torch.ones(batch_size)


class Stratified(TimestepSampler):
    """One t from each of n equal slices of 0 .. T-1, in random order: t_i = floor(T (i + U_i) / n).

    Every image's t is still uniform on its own, so the objective is the same and its gradient less noisy.
    """

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        jitter = torch.rand(batch_size, generator=generator, dtype=torch.float64)
        quantiles = (torch.randperm(batch_size, generator=generator) + jitter) / batch_size
        timesteps = (quantiles * self.num_train_timesteps).long().clamp(max=self.num_train_timesteps - 1)
        return timesteps, torch.ones(batch_size)


TIMESTEP_SAMPLERS: dict[str, type[TimestepSampler]] = {"uniform": Uniform, "stratified": Stratified}
