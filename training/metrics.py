"""The sums that a line of metrics is made of, over the steps since the last line and over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.processes import Processes
from run_folder.folder import QUARTERS

if TYPE_CHECKING:
    from training.update import Update

# Where the sums are: of losses and images by quarter of t, of weights and their squares, then one each.
LOSSES, COUNTS, WEIGHTS = slice(0, QUARTERS), slice(QUARTERS, 2 * QUARTERS), slice(2 * QUARTERS, 2 * QUARTERS + 2)
OBJECTIVE, GRADIENT_NORM = 2 * QUARTERS + 2, 2 * QUARTERS + 3


class Window:
    """The steps since the last line of metrics.

    Its sums stay on the device, and checkpoints hold them: a line is the same if the run stopped within the window.
    """

    def __init__(self, processes: Processes, num_train_timesteps: int, length: int):
        self.processes, self.num_train_timesteps, self.length = processes, num_train_timesteps, length
        self._dtype = torch.float32 if processes.device.type == "mps" else torch.float64
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self.sums = torch.zeros(GRADIENT_NORM + 1, dtype=self._dtype, device=self.processes.device)
        self.steps = 0
        # For the report of a failure: timesteps and losses of this process, of the latest steps.
        self.latest: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(
        self, t: torch.Tensor, weights: torch.Tensor, errors: torch.Tensor, update: Update, observed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a step; return whether its numbers are finite everywhere, and the sum of `observed` over processes."""
        quarters = torch.arange(QUARTERS, device=t.device)[:, None]
        in_quarter = t * QUARTERS // self.num_train_timesteps == quarters
        errors_of_quarters = torch.where(in_quarter, errors.to(self._dtype), 0).sum(1)
        weights, objective = weights.to(self._dtype), update.objective.to(self._dtype) / self.processes.count
        single = torch.stack([weights.sum(), weights.square().sum(), objective, (~update.is_finite).to(self._dtype)])
        shared = torch.cat([errors_of_quarters, in_quarter.sum(1), single, observed])
        if self.processes.count > 1:
            dist.all_reduce(shared)  # all in one exchange, on the device
        sums, failures, observed = shared.split([GRADIENT_NORM, 1, len(observed)])
        # The gradients were averaged before the norm, which is therefore the same everywhere.
        self.sums += torch.cat([sums, update.gradient_norm.detach().to(self._dtype)[None]])
        self.steps += 1
        self.latest = [*self.latest[1 - self.length :], (t, errors)]
        return failures[0] == 0, observed

    def numbers(self) -> dict:
        """Return the sums as JSON holds them in a checkpoint."""
        sums = self.sums.tolist()
        return {
            "sums": [*sums[LOSSES], sums[OBJECTIVE], sums[GRADIENT_NORM]],
            "counts": [int(count) for count in sums[COUNTS]],
            "weights": sums[WEIGHTS],
            "steps": self.steps,
        }

    def load_numbers(self, numbers: dict) -> None:
        """Restore the sums that `numbers` gave."""
        *losses, objective, gradient_norm = numbers["sums"]
        counts = numbers["counts"]
        weights = numbers.get("weights", [sum(counts)] * 2)  # version 1 was written without them at first: all were 1
        sums = [*losses, *counts, *weights, objective, gradient_norm]
        self.sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self.steps = numbers["steps"]
