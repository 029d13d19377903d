"""Timestep samplers that learn while the network does. Their state is tensors, the same on every process."""

import torch

from schedulers.sampler import TimestepSampler


class LossSecondMoment(TimestepSampler):
    """p_t proportional to sqrt(E[L_t^2]) over the latest losses of every t (Nichol & Dhariwal 2021, eq. 18).

    Uniform until `history` losses of every t are known; from then on at least the share `uniform` of the draws is
    uniform, so that no p_t is below uniform / T. Weighted by 1 / (T p_t): the same objective.
    """

    def __init__(self, alphas_cumprod: torch.Tensor, history: int = 10, uniform: float = 0.001):
        super().__init__(alphas_cumprod)
        if history < 1:
            raise ValueError(f"history {history}: must be 1 or greater")
        if not 0 < uniform <= 1:
            raise ValueError(f"uniform {uniform}: must be greater than 0 and at most 1")
        self.uniform = uniform
        self.losses = torch.zeros(self.num_train_timesteps, history, dtype=torch.float64)
        self.counts = torch.zeros(self.num_train_timesteps, dtype=torch.int64)

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        table, counts = self.losses.numpy(), self.counts.numpy()  # views of the same memory
        for t, loss in zip(timesteps.tolist(), losses.tolist(), strict=True):
            table[t, counts[t] % table.shape[1]] = loss
            counts[t] += 1
        self._refresh()

    def _refresh(self) -> None:
        if (self.counts >= self.losses.shape[1]).all():
            root = self.losses.square().mean(1).sqrt()
            self.set_density((1 - self.uniform) * root / root.sum() + self.uniform / self.num_train_timesteps)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"losses": self.losses, "counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_into(self, state)
        self._refresh()


def load_into(sampler: TimestepSampler, state: dict[str, torch.Tensor]) -> None:
    """Copy saved tensors into those of the same name."""
    for name, tensor in sampler.state_dict().items():
        if state[name].shape != tensor.shape:
            raise ValueError(f"{name} of the timestep sampler has shape {tuple(state[name].shape)} in the checkpoint")
        tensor.copy_(state[name])


class AdaptiveTimestepSampling(TimestepSampler):
    """A policy that learns from each image which timestep lowers the loss most (Kim et al. 2025, ATS)."""

    objective = "changed"

    def __init__(
        self,
        alphas_cumprod: torch.Tensor,
        interval: int = 40,
        grid: int = 50,
        queue: int = 20,
        features: int = 3,
        entropy: float = 0.01,
        learning_rate: float = 0.01,
    ):
        super().__init__(alphas_cumprod)
