"""The training loop: data -> timesteps -> noise -> network -> weighted loss -> step -> moving average.

*step* counts finished optimiser steps. Everything random in step s is a function of (seed, s, position in the
global batch), so a run needs only its tensors and s to go on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import RunFailed
from common.randomness import derive_seed, generator_for, standard_normal
from schedulers.weighting import weighting_table

if TYPE_CHECKING:
    from ema_pytorch import EMA

    from image_data.batches import TrainingBatches
    from schedulers.ddpm import ExactDDPMScheduler
    from schedulers.timesteps import TimestepSampler
    from training.config import TrainingConfig
    from training.milestones import Milestones
    from training.processes import Processes
    from training.tracking import Tracking

HEALTHY = torch.iinfo(torch.int64).max  # the step of a failure that has not happened


@dataclass
class TrainingState:
    """All that changes during a run: what a checkpoint holds."""

    unet: torch.nn.Module
    ema: EMA | None
    optimizer: torch.optim.Optimizer
    sampler: TimestepSampler
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
        }

    def load_numbers(self, numbers: dict) -> None:
        self.step = numbers["step"]
        self.train_seconds = numbers["train_seconds"]
        self.smoothed_loss = numbers["smoothed_loss"]
        if self.ema is not None:
            self.ema.step.fill_(numbers["ema_updates"])
            self.ema.initted.fill_(numbers["ema_updates"] > 0)
        if self.scaler is not None and numbers["gradient_scaler"]:
            self.scaler.load_state_dict(numbers["gradient_scaler"])

    @property
    def sampling_weights(self) -> dict[str, torch.nn.Module]:
        """The networks to look at: the moving average, and the raw weights while that still lags behind."""
        if self.ema is None:
            return {"raw": self.unet}
        lag = 5 / (1 - self.ema.beta)
        return {"ema": self.ema.ema_model} | ({"raw": self.unet} if self.step < lag else {})


@dataclass
class Window:
    """The steps since the last line of metrics. What the device computed stays there until it is asked for."""

    positions: torch.Tensor  # this process's places in the global batch
    timesteps: list[torch.Tensor] = field(default_factory=list)  # of the whole global batch
    losses: list[torch.Tensor] = field(default_factory=list)  # of this process's images, unweighted
    objectives: list[torch.Tensor] = field(default_factory=list)  # what was minimised, on this process
    gradient_norms: list[torch.Tensor] = field(default_factory=list)
    learning_rate: float = 0.0

    def add(self, timesteps: torch.Tensor, losses: torch.Tensor, objective: torch.Tensor, norm: torch.Tensor) -> None:
        self.timesteps.append(timesteps)
        self.losses.append(losses)
        self.objectives.append(objective)
        self.gradient_norms.append(norm)


def train(
    config: TrainingConfig,
    processes: Processes,
    model: torch.nn.Module,
    state: TrainingState,
    scheduler: ExactDDPMScheduler,
    batches: TrainingBatches,
    learning_rate: Callable[[int], float],
    total_steps: int,
    tracking: Tracking,
    milestones: Milestones,
) -> None:
    """Run from `state.step` to `total_steps`, or until the time is up.

    `model` is `state.unet` as accelerate wrapped it.
    """
    device = processes.device
    weight_of = weighting_table(config.loss_weighting, scheduler.alphas_cumprod, config.prediction_type)
    noise_key = derive_seed(config.seed, "noise")
    positions = batches.positions  # [passes, images] of the global batch that are this process's
    failed_at = torch.full((), HEALTHY, device=device)
    window = Window(positions.flatten())
    model.train()
    if is_over(config, processes, state.step, tracking.clock.train_seconds, total_steps):
        return

    for pixels in tracking.timed(batches.from_step(state.step)):
        step = state.step

        # The learning rate is a function of the step.
        window.learning_rate = learning_rate(step)
        for group in state.optimizer.param_groups:
            group["lr"] = window.learning_rate

        # Every process draws the timesteps of the whole batch and takes those of its own images.
        draw = generator_for(config.seed, "timesteps", step)
        timesteps, weights = state.sampler.sample(batches.total_batch_size, draw)
        weights = weights * weight_of[timesteps]

        # Dropout alone draws from torch's global generators.
        torch.manual_seed(derive_seed(config.seed, "dropout", step, processes.index))

        # Forward and backward; the processes exchange gradients on the last pass.
        losses, objective = [], torch.zeros((), device=device)
        for images, rows in zip(pixels, positions, strict=True):
            images = to_device(images, device).float() / 127.5 - 1
            t, weight = to_device(timesteps[rows], device), to_device(weights[rows], device)
            noise = standard_normal(noise_key, to_device(rows, device), step, images.shape[1:])
            exchange = len(losses) == len(positions) - 1
            with nullcontext() if exchange else processes.accelerator.no_sync(model):
                loss = diffusion_loss(model, scheduler, images, noise, t)
                share = (weight * loss).mean() / len(positions)
                (share if state.scaler is None else state.scaler.scale(share)).backward()
            losses.append(loss.detach())
            objective += share.detach()

        # Clip, and update unless something is not finite.
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        gradient_norm = torch.nn.utils.clip_grad_norm_(state.unet.parameters(), config.max_grad_norm)
        failed_at = note_failure(failed_at, step, objective, gradient_norm, processes, state.scaler)
        update(state, failed_at)

        state.step += 1
        window.add(timesteps, torch.cat(losses), objective, gradient_norm)
        tracking.advance()

        # A CPU can be asked after every step, a GPU where its results are fetched anyway.
        finished = is_over(config, processes, state.step, tracking.clock.train_seconds, total_steps)
        log_now = finished or state.step % config.logging_steps == 0
        if (log_now or device.type == "cpu" or milestones.due(state.step)) and failed_at.item() != HEALTHY:
            raise failure(int(failed_at), state.step, window, processes, milestones.last_checkpoint)
        if log_now:
            tracking.log(state, window)
            window = Window(positions.flatten())
        milestones.reach(state, finished)
        if finished:
            break


def is_over(config: TrainingConfig, processes: Processes, step: int, seconds: float, total_steps: int) -> bool:
    """Whether the steps are done, or the time is up on any process."""
    if step >= total_steps or config.max_train_seconds is None:
        return step >= total_steps
    return processes.any(seconds >= config.max_train_seconds)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory a copy to a GPU does not wait for the work before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def diffusion_loss(
    model: torch.nn.Module,
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


def note_failure(
    failed_at: torch.Tensor,
    step: int,
    objective: torch.Tensor,
    gradient_norm: torch.Tensor,
    processes: Processes,
    scaler: torch.amp.GradScaler | None,
) -> torch.Tensor:
    """The first step at which a loss or gradient was not finite on any process, kept on the device.

    Gradients that overflow under fp16 are the gradient scaler's business: it lowers the scale and leaves the update
    out, as it should.
    """
    finite = objective.isfinite() if scaler is not None else objective.isfinite() & gradient_norm.isfinite()
    failed_now = torch.where(finite, HEALTHY, step)
    if processes.count > 1:
        dist.all_reduce(failed_now, op=dist.ReduceOp.MIN)
    return torch.minimum(failed_at, failed_now)


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


def failure(failed_at: int, step: int, window: Window, processes: Processes, checkpoint: Path | None) -> RunFailed:
    """What to tell the user when the loss or a gradient is no longer a number."""
    at = failed_at - step  # counted back from the newest step of the window
    bad = ~window.losses[at].isfinite().cpu()
    mine = window.timesteps[at][window.positions[bad]].tolist()
    timesteps = sorted({t for share in processes.collect(mine) for t in share})
    what = (
        f"loss at timestep(s) {', '.join(map(str, timesteps))}"
        if timesteps
        else (
            f"gradient (its norm is {window.gradient_norms[at].item()}; the timesteps were "
            f"{', '.join(map(str, sorted(set(window.timesteps[at].tolist()))))})"
        )
    )
    left = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    return RunFailed(
        f"step {failed_at}: the {what} is not finite; the weights were not updated with it, and {left}. "
        f"Try a lower --learning_rate, a longer --lr_warmup_steps or --mixed_precision no"
    )
