"""The training loop: data -> timesteps -> noise -> network -> weighted loss -> step -> moving average.

*step* counts finished optimiser steps. Everything random in step s is a function of (seed, s, position in the
global batch), so a run needs only its tensors and s to go on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common import interruption
from common.errors import RunFailed
from common.machine import to_device
from common.randomness import derive_seed, standard_normal
from image_data.batches import normalised

if TYPE_CHECKING:
    from ema_pytorch import EMA

    from common.processes import Processes
    from conditions.condition import Condition
    from image_data.batches import TrainingBatches
    from run_folder.config import TrainingConfig
    from schedulers.ddpm import ExactDDPMScheduler
    from training.milestones import Milestones
    from training.timestep_sampling import TimestepSampling
    from training.tracking import Tracking

HEALTHY = torch.iinfo(torch.int64).max  # the step of a failure that has not happened
QUARTERS = 4
# Under fp16 the gradient scaler halves its scale at every overflow, from 65536; below this they are not by chance.
SMALLEST_LOSS_SCALE = 2.0**-8


# Where the sums of a window are: of losses and images by quarter of t, of weights and their squares, then one each.
LOSSES, COUNTS, WEIGHTS = slice(0, QUARTERS), slice(QUARTERS, 2 * QUARTERS), slice(2 * QUARTERS, 2 * QUARTERS + 2)
OBJECTIVE, GRADIENT_NORM = 2 * QUARTERS + 2, 2 * QUARTERS + 3


@dataclass
class Window:
    """Sums over the steps since the last line of metrics and over all processes.

    They are made step by step and saved in checkpoints, so that a line is the same whether the run stopped within it
    or not. The sums stay on the device until they are asked for.
    """

    sums: torch.Tensor
    steps: int = 0
    # For the report of a failure: timesteps and losses of this process, of the latest steps.
    latest: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, device: torch.device) -> Window:
        return cls(torch.zeros(GRADIENT_NORM + 1, dtype=summing_dtype(device), device=device))

    def numbers(self) -> dict:
        sums = self.sums.tolist()
        return {
            "sums": [*sums[LOSSES], sums[OBJECTIVE], sums[GRADIENT_NORM]],
            "counts": [int(count) for count in sums[COUNTS]],
            "weights": sums[WEIGHTS],
            "steps": self.steps,
        }

    def load_numbers(self, numbers: dict) -> None:
        *losses, objective, gradient_norm = numbers["sums"]
        counts = numbers["counts"]
        weights = numbers.get("weights", [sum(counts)] * 2)  # version 1 was written without them at first: all were 1
        sums = [*losses, *counts, *weights, objective, gradient_norm]
        self.sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self.steps = numbers["steps"]


def summing_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class TrainingState:
    """All that changes during a run: what a checkpoint holds."""

    unet: torch.nn.Module
    ema: EMA | None
    optimizer: torch.optim.Optimizer
    timesteps: TimestepSampling
    window: Window
    settings: dict[str, object]
    condition: dict[str, object] | None = None  # what those who generate images must know of it
    scaler: torch.amp.GradScaler | None = None
    step: int = 0
    train_seconds: float = 0.0
    smoothed_loss: float | None = None

    def numbers(self) -> dict:
        """What is not a tensor, for JSON."""
        return {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "smoothed_loss": self.smoothed_loss,
            "ema_updates": None if self.ema is None else self.ema.step.item(),
            "gradient_scaler": None if self.scaler is None else self.scaler.state_dict(),
            "window": self.window.numbers(),
            "settings": self.settings,
        }

    def load_numbers(self, numbers: dict) -> None:
        self.step = numbers["step"]
        self.train_seconds = numbers["train_seconds"]
        self.smoothed_loss = numbers["smoothed_loss"]
        if self.ema is not None:
            self.ema.step.fill_(numbers["ema_updates"])
            self.ema.initted.fill_(numbers["ema_updates"] > 0)
        self.window.load_numbers(numbers["window"])
        if self.scaler is not None and numbers["gradient_scaler"]:
            self.scaler.load_state_dict(numbers["gradient_scaler"])

    @property
    def sampling_weights(self) -> dict[str, torch.nn.Module]:
        """The networks to look at: the moving average, and the raw weights while that still lags behind."""
        if self.ema is None:
            return {"raw": self.unet}
        lag = 5 / (1 - self.ema.beta)
        return {"ema": self.ema.ema_model} | ({"raw": self.unet} if self.step < lag else {})


def train(
    config: TrainingConfig,
    processes: Processes,
    model: torch.nn.Module,
    state: TrainingState,
    scheduler: ExactDDPMScheduler,
    batches: TrainingBatches,
    condition: Condition,
    learning_rate: Callable[[int], float],
    total_steps: int,
    tracking: Tracking,
    milestones: Milestones,
    over: bool,
) -> None:
    """Run from `state.step` to `total_steps`, until the time is up, or until somebody asks for a stop.

    `model` is `state.unet` as accelerate wrapped it. `over` says that there is nothing left to train.
    """
    device, window = processes.device, state.window
    noise_key = derive_seed(config.seed, "noise")
    positions = batches.positions  # [passes, images] of the global batch that are this process's
    positions_here = to_device(positions, device)
    failed_at = torch.full((), HEALTHY, device=device)
    model.train()
    milestones.catch_up(state, over)
    if over:
        return

    for pixels in tracking.timed(batches.from_step(state.step)):
        step = state.step

        # The learning rate is a function of the step.
        rate = learning_rate(step)
        for group in state.optimizer.param_groups:
            group["lr"] = rate

        # Every process draws the timesteps and conditions of the whole batch and takes those of its own images.
        timesteps, weights = state.timesteps.draw(step, pixels)
        told = condition.draw(batches.indices(step), step)[positions]

        # Dropout alone draws from torch's global generators.
        torch.manual_seed(derive_seed(config.seed, "dropout", step, processes.index))

        # Forward and backward; the processes exchange gradients on the last pass.
        losses, objective = [], torch.zeros((), device=device)
        for images, t, weight, rows, rows_here in zip(pixels, timesteps, weights, told, positions_here, strict=True):
            images = normalised(to_device(images, device))
            noise = standard_normal(noise_key, rows_here, step, images.shape[1:])
            exchange = len(losses) == len(positions) - 1
            with nullcontext() if exchange else processes.accelerator.no_sync(model):
                loss = diffusion_loss(conditioned(model, condition, rows, device), scheduler, images, noise, t)
                share = (weight * loss).mean() / len(positions)
                (share if state.scaler is None else state.scaler.scale(share)).backward()
            losses.append(loss.detach())
            objective += share.detach()

        # Clip, and update unless something is not finite anywhere.
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        gradient_norm = torch.nn.utils.clip_grad_norm_(state.unet.parameters(), config.max_grad_norm)
        losses, timesteps, weights = torch.cat(losses), timesteps.flatten(), weights.flatten()
        sums, all_finite, of_batch = sum_over_processes(
            losses, timesteps, weights, objective, gradient_norm, state, processes, scheduler.config.num_train_timesteps
        )
        failed_at = torch.where(all_finite, failed_at, failed_at.clamp(max=step))
        losses_now = partial(losses_of_rows, state.unet, scheduler, condition, pixels, told.flatten())
        with state.timesteps.around_update(step, state.unet, losses_now):
            update(state, failed_at)
        state.timesteps.hear(step, of_batch)
        interruption.fault_point("update")

        # Take note.
        state.step += 1
        window.sums += sums
        window.steps += 1
        window.latest = [*window.latest[1 - config.logging_steps :], (timesteps, losses)]
        tracking.advance()

        # A CPU can be asked after every step, a GPU where its results are fetched anyway.
        finished = is_over(config, processes, state.step, tracking.clock.train_seconds, total_steps)
        stopped = not finished and processes.any(interruption.requested() is not None)
        line_due = state.step % config.logging_steps == 0
        if (
            line_due or finished or stopped or device.type == "cpu" or milestones.due(state.step)
        ) and failed_at.item() != HEALTHY:
            raise failure(int(failed_at), state, processes, milestones.last_checkpoint)
        if line_due and state.scaler is not None and state.scaler.get_scale() < SMALLEST_LOSS_SCALE:
            raise RunFailed(
                f"step {state.step}: gradients overflow in fp16 whatever the loss scale; no update was made with them. "
                f"The last good checkpoint is {milestones.last_checkpoint}; continue with --mixed_precision bf16 or no"
            )
        if line_due:
            state.smoothed_loss = tracking.log(state, rate)
            window = state.window = Window.empty(device)
        elif finished:
            tracking.log(state, rate)  # of a part of the window; it is dropped again if the run goes on
        milestones.reach(state, finished, stopped)
        if finished:
            return


def is_over(config: TrainingConfig, processes: Processes, step: int, seconds: float, total_steps: int) -> bool:
    """Whether the steps are done, or the time is up on any process."""
    if step >= total_steps or config.max_train_seconds is None:
        return step >= total_steps
    return processes.any(seconds >= config.max_train_seconds)


def conditioned(
    model: torch.nn.Module, condition: Condition, rows: torch.Tensor, device: torch.device
) -> Callable[..., object]:
    """The network, told these rows of the table of conditions."""
    return partial(model, **{name: to_device(value, device) for name, value in condition.inputs(rows).items()})


def diffusion_loss(
    model: Callable[..., object],
    scheduler: ExactDDPMScheduler,
    images: torch.Tensor,
    noise: torch.Tensor,
    timesteps: torch.Tensor,
) -> torch.Tensor:
    """The mean squared error of each image's prediction (Ho et al. 2020, eq. 14), in float32."""
    noisy = scheduler.add_noise(images, noise, timesteps)
    prediction = model(noisy, timesteps).sample
    target = scheduler.target(images, noise, timesteps)
    return (prediction.float() - target).square().flatten(1).mean(1)


def losses_of_rows(
    model: torch.nn.Module,
    scheduler: ExactDDPMScheduler,
    condition: Condition,
    pixels: torch.Tensor,
    told: torch.Tensor,
    rows: torch.Tensor,
    noise: torch.Tensor,
    timesteps: torch.Tensor,
) -> torch.Tensor:
    """The losses of some of this process's images, for a timestep sampler that asks what an update changes."""
    images = normalised(to_device(pixels.flatten(0, 1)[rows], noise.device))
    return diffusion_loss(conditioned(model, condition, told[rows], noise.device), scheduler, images, noise, timesteps)


def sum_over_processes(
    losses: torch.Tensor,
    timesteps: torch.Tensor,
    weights: torch.Tensor,
    objective: torch.Tensor,
    gradient_norm: torch.Tensor,
    state: TrainingState,
    processes: Processes,
    num_train_timesteps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the window adds up, whether all losses and gradients are finite, and the losses that the sampler observes.

    On the device, in one exchange. Gradients that overflow under fp16 are the gradient scaler's business: it lowers
    the scale and leaves the update out, as it should.
    """
    dtype = summing_dtype(losses.device)
    of_quarter = timesteps * QUARTERS // num_train_timesteps == torch.arange(QUARTERS, device=losses.device)[:, None]
    by_quarter = torch.where(of_quarter, losses.to(dtype), 0).sum(1)
    weights = weights.to(dtype)
    finite = objective.isfinite() if state.scaler is not None else objective.isfinite() & gradient_norm.isfinite()
    single = [weights.sum(), weights.square().sum(), objective.to(dtype) / processes.count, (~finite).to(dtype)]
    observed = state.timesteps.placed(losses).to(dtype)
    shared = torch.cat([by_quarter, of_quarter.sum(1).to(dtype), torch.stack(single), observed])
    if processes.count > 1:
        dist.all_reduce(shared)
    sums, failed, observed = shared.split([GRADIENT_NORM, 1, len(observed)])
    # The gradients were averaged before the norm, which is therefore the same everywhere.
    return torch.cat([sums, gradient_norm.detach().to(dtype)[None]]), failed[0] == 0, observed


def update(state: TrainingState, failed_at: torch.Tensor) -> None:
    """One step of the optimiser and the moving average; none from the first failure on.

    The fused optimiser looks at `found_inf` on the device, so that leaving the update out needs no answer from it.
    """
    if state.scaler is None:
        state.optimizer.found_inf = (failed_at != HEALTHY).float()
        state.optimizer.step()
    else:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    state.optimizer.zero_grad()
    if state.ema is not None:
        state.ema.update()


def failure(failed_at: int, state: TrainingState, processes: Processes, checkpoint: Path | None) -> RunFailed:
    """What to tell the user when the loss or a gradient is no longer a number."""
    timesteps, losses = state.window.latest[failed_at - state.step]  # counted back from the newest step
    bad, drawn = (set().union(*processes.all_gather(t.tolist())) for t in (timesteps[~losses.isfinite()], timesteps))
    what = f"loss at {listed(sorted(bad))}" if bad else f"gradient (at {listed(sorted(drawn))})"
    left = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    return RunFailed(
        f"step {failed_at}: the {what} is not finite; the weights were not updated with it, and {left}. "
        f"Try a lower --learning_rate, a longer --lr_warmup_steps or --mixed_precision no"
    )


def listed(timesteps: list[int]) -> str:
    more = f" and {len(timesteps) - 10} more" if len(timesteps) > 10 else ""
    return f"timestep(s) {', '.join(map(str, timesteps[:10]))}{more}"
