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

from common import faults, interruption
from common.errors import RunFailed
from common.randomness import derive_seed, generator_for, standard_normal
from schedulers.weighting import weighting_table

if TYPE_CHECKING:
    from ema_pytorch import EMA

    from common.processes import Processes
    from image_data.batches import TrainingBatches
    from schedulers.ddpm import ExactDDPMScheduler
    from schedulers.timesteps import TimestepSampler
    from training.conditioning import Unconditional
    from training.config import TrainingConfig
    from training.milestones import Milestones
    from training.tracking import Tracking

HEALTHY = torch.iinfo(torch.int64).max  # the step of a failure that has not happened
QUARTERS = 4
# Under fp16 the gradient scaler halves its scale at every overflow, from 65536; below this they are not by chance.
SMALLEST_LOSS_SCALE = 2.0**-8


@dataclass
class Window:
    """Sums over the steps since the last line of metrics and over all processes.

    They are made step by step and saved in checkpoints, so that a line is the same whether the run stopped within it
    or not. The sums stay on the device until they are asked for.
    """

    sums: torch.Tensor  # losses by quarter of t, the objective, the gradient norm
    counts: list[int] = field(default_factory=lambda: [0] * QUARTERS)  # images by quarter of t
    steps: int = 0
    # For the report of a failure: timesteps of the global batch and losses of this process, of the latest steps.
    latest: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, device: torch.device) -> Window:
        return cls(torch.zeros(QUARTERS + 2, dtype=summing_dtype(device), device=device))

    def numbers(self) -> dict:
        return {"sums": self.sums.tolist(), "counts": self.counts, "steps": self.steps}

    def load_numbers(self, numbers: dict) -> None:
        self.sums.copy_(torch.tensor(numbers["sums"], dtype=torch.float64))
        self.counts, self.steps = list(numbers["counts"]), numbers["steps"]


def summing_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class TrainingState:
    """All that changes during a run: what a checkpoint holds."""

    unet: torch.nn.Module
    ema: EMA | None
    optimizer: torch.optim.Optimizer
    sampler: TimestepSampler
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
    condition: Unconditional,
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
    weight_of = weighting_table(config.loss_weighting, scheduler.alphas_cumprod, config.prediction_type)
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
        draw = generator_for(config.seed, "timesteps", step)
        timesteps, weights = state.sampler.sample(batches.total_batch_size, draw)
        weights = weights * weight_of[timesteps]
        told = condition.draw(batches.indices(step), step)

        # Dropout alone draws from torch's global generators.
        torch.manual_seed(derive_seed(config.seed, "dropout", step, processes.index))

        # Forward and backward; the processes exchange gradients on the last pass.
        losses, objective = [], torch.zeros((), device=device)
        for images, rows, rows_here in zip(pixels, positions, positions_here, strict=True):
            images = to_device(images, device).float() / 127.5 - 1
            t, weight = to_device(timesteps[rows], device), to_device(weights[rows], device)
            noise = standard_normal(noise_key, rows_here, step, images.shape[1:])
            exchange = len(losses) == len(positions) - 1
            with nullcontext() if exchange else processes.accelerator.no_sync(model):
                inputs = {name: to_device(value, device) for name, value in condition.inputs(told[rows]).items()}
                loss = diffusion_loss(partial(model, **inputs), scheduler, images, noise, t)
                share = (weight * loss).mean() / len(positions)
                (share if state.scaler is None else state.scaler.scale(share)).backward()
            losses.append(loss.detach())
            objective += share.detach()

        # Clip, and update unless something is not finite anywhere.
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        gradient_norm = torch.nn.utils.clip_grad_norm_(state.unet.parameters(), config.max_grad_norm)
        losses, mine = torch.cat(losses), timesteps[positions.flatten()]
        sums, all_finite = sum_over_processes(losses, mine, objective, gradient_norm, state, processes, len(weight_of))
        failed_at = torch.where(all_finite, failed_at, failed_at.clamp(max=step))
        update(state, failed_at)
        faults.point("update")

        # Take note.
        state.step += 1
        window.sums += sums
        window.steps += 1
        for quarter, count in enumerate(count_by_quarter(timesteps, len(weight_of))):
            window.counts[quarter] += count
        window.latest = [*window.latest[1 - config.logging_steps :], (timesteps, losses)]
        tracking.advance()

        # A CPU can be asked after every step, a GPU where its results are fetched anyway.
        finished = is_over(config, processes, state.step, tracking.clock.train_seconds, total_steps)
        stopped = not finished and processes.any(interruption.requested() is not None)
        line_due = state.step % config.logging_steps == 0
        if (
            line_due or finished or stopped or device.type == "cpu" or milestones.due(state.step)
        ) and failed_at.item() != HEALTHY:
            raise failure(int(failed_at), state, positions.flatten(), processes, milestones.last_checkpoint)
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


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory a copy to a GPU does not wait for the work before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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


def sum_over_processes(
    losses: torch.Tensor,
    timesteps: torch.Tensor,
    objective: torch.Tensor,
    gradient_norm: torch.Tensor,
    state: TrainingState,
    processes: Processes,
    num_train_timesteps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the window adds up, and whether all losses and gradients are finite; on the device, in one exchange.

    Gradients that overflow under fp16 are the gradient scaler's business: it lowers the scale and leaves the update
    out, as it should.
    """
    dtype = summing_dtype(losses.device)
    quarter = to_device(timesteps * QUARTERS // num_train_timesteps, losses.device)
    of_quarter = quarter == torch.arange(QUARTERS, device=losses.device)[:, None]
    by_quarter = torch.where(of_quarter, losses.to(dtype), 0).sum(1)
    finite = objective.isfinite() if state.scaler is not None else objective.isfinite() & gradient_norm.isfinite()
    shared = torch.cat([by_quarter, torch.stack([objective.to(dtype) / processes.count, (~finite).to(dtype)])])
    if processes.count > 1:
        dist.all_reduce(shared)
    # The gradients were averaged before the norm, which is therefore the same everywhere.
    return torch.cat([shared[:-1], gradient_norm.detach().to(dtype)[None]]), shared[-1] == 0


def count_by_quarter(timesteps: torch.Tensor, num_train_timesteps: int) -> list[int]:
    return torch.bincount(timesteps * QUARTERS // num_train_timesteps, minlength=QUARTERS).tolist()


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


def failure(
    failed_at: int, state: TrainingState, positions: torch.Tensor, processes: Processes, checkpoint: Path | None
) -> RunFailed:
    """What to tell the user when the loss or a gradient is no longer a number."""
    timesteps, losses = state.window.latest[failed_at - state.step]  # counted back from the newest step
    bad = timesteps[positions[~losses.isfinite().cpu()]].tolist()
    named = sorted({t for share in processes.collect(bad) for t in share})
    what = f"loss at {listed(named)}" if named else f"gradient (at {listed(sorted(set(timesteps.tolist())))})"
    left = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    return RunFailed(
        f"step {failed_at}: the {what} is not finite; the weights were not updated with it, and {left}. "
        f"Try a lower --learning_rate, a longer --lr_warmup_steps or --mixed_precision no"
    )


def listed(timesteps: list[int]) -> str:
    more = f" and {len(timesteps) - 10} more" if len(timesteps) > 10 else ""
    return f"timestep(s) {', '.join(map(str, timesteps[:10]))}{more}"
