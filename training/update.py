"""Update the weights: Adam, gradient clipping, the moving average, and the check that skips a failed update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers.optimization import get_scheduler
from ema_pytorch import EMA

from common.errors import RunFailed, UserError
from common.machine import Stopwatch
from common.processes import Processes
from common.randomness import derive_seed
from run_folder.checkpoints import POWER_LENGTHS, last_good, power_exponent
from run_folder.config import TrainingConfig
from training.tracking import Window

NEVER_FAILED = torch.iinfo(torch.int64).max  # the step of a failure that has not happened
# Under fp16 the gradient scaler starts at 65536 and halves at every overflow; below this they are no coincidence.
SMALLEST_LOSS_SCALE = 2.0**-8
MOST_LISTED = 10  # timesteps in the report of a failure


class Update:
    """The part of a step that turns gradients into new weights, with the state that it has to remember."""

    def __init__(self, config: TrainingConfig, unet: torch.nn.Module, total_steps: int, processes: Processes):
        self.unet, self.processes, self.max_grad_norm, self.seed = unet, processes, config.max_grad_norm, config.seed
        self.optimizer, self.averages = build_optimizer(config, unet), build_averages(config, unet)
        self.scaler: torch.amp.GradScaler | None = processes.accelerator.scaler
        self.learning_rate = learning_rate_schedule(config, total_steps)
        self.replicas = config.clip_per_replica  # how many parts of the batch are clipped separately, if any
        if self.replicas and self.scaler is not None:
            raise UserError("--clip_per_replica does not go with fp16, which scales gradients; use bf16 or no")
        self._clipped = [torch.zeros_like(weight) for weight in unet.parameters()] if self.replicas else []
        self.failed_at = torch.full((), NEVER_FAILED, device=processes.device)
        self.objective = torch.zeros((), device=processes.device)  # of the step, on this process
        self.gradient_norm = torch.zeros((), device=processes.device)  # before clipping

    @property
    def ema(self) -> ExactEMA | None:
        """Return the moving average that is sampled from, saved and published, if there is one."""
        return next(iter(self.averages), None)

    def begin(self, step: int) -> None:
        """Set the learning rate of a step, and seed torch's generators, which dropout alone uses."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.learning_rate(step))
            else:
                group["lr"] = self.learning_rate(step)
        torch.manual_seed(derive_seed(self.seed, "dropout", step, self.processes.index))
        if self.replicas:
            torch._foreach_zero_(self._clipped)

    def backward(self, objective: torch.Tensor) -> None:
        """Add one forward pass's share to the objective, and its gradient to the gradients."""
        (objective if self.scaler is None else self.scaler.scale(objective)).backward()
        self.objective += objective.detach()
        if self.replicas:
            self._clip_replica()

    def _clip_replica(self) -> None:
        """Move one forward pass's gradient into the running sum, clipped as a replica of the original clips its own.

        There, with R replicas, the gradient and the limit are both scaled by 1/R (`tpu_utils.py` of the original). Here
        both are scaled by 1 over the number of this process's passes.
        """
        gradients = [weight.grad for weight in self.unet.parameters()]
        limit = self.max_grad_norm * self.processes.count / self.replicas
        factor = (limit / torch.nn.utils.get_total_norm(gradients)).clamp(max=1)
        torch._foreach_mul_(gradients, factor)
        torch._foreach_add_(self._clipped, gradients)
        self.optimizer.zero_grad()

    def _average_replicas(self, exchange_timer: Stopwatch) -> None:
        """Replace the gradient by the mean over all replicas."""
        if self.processes.count > 1:
            total = torch.cat([gradient.flatten() for gradient in self._clipped])
            exchange_timer.start()
            dist.all_reduce(total)
            exchange_timer.stop()
            parts = (total / self.processes.count).split([gradient.numel() for gradient in self._clipped])
            shaped = [part.view_as(gradient) for part, gradient in zip(parts, self._clipped, strict=True)]
            torch._foreach_copy_(self._clipped, shaped)
        for weight, gradient in zip(self.unet.parameters(), self._clipped, strict=True):
            weight.grad = gradient
        self.gradient_norm = torch.nn.utils.get_total_norm(self._clipped)

    def clip(self, exchange_timer: Stopwatch) -> None:
        """Clip the gradient at `max_grad_norm`; time spent waiting for other processes is added to `exchange_timer`."""
        if self.replicas:
            self._average_replicas(exchange_timer)
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.unet.parameters(), self.max_grad_norm)

    @property
    def is_finite(self) -> torch.Tensor:
        """Tell, on the device, whether objective and gradient are finite; the scaler handles overflows under fp16."""
        finite = self.objective.isfinite()
        return finite if self.scaler is not None else finite & self.gradient_norm.isfinite()

    def step(self, step: int | torch.Tensor, all_finite: torch.Tensor) -> None:
        """Update the weights, unless this step or one before it failed on any process.

        The fused optimiser reads `found_inf` on the device, so that an update is skipped without the host waiting.
        Under fp16 the scaler decides.
        """
        self.failed_at.copy_(torch.where(all_finite, self.failed_at, self.failed_at.clamp(max=step)))
        if self.scaler is None:
            failed = self.failed_at != NEVER_FAILED
            self.optimizer.found_inf = failed.float()
            # The fused kernel of MPS ignores `found_inf`, so there the host has to check.
            if self.processes.device.type != "mps" or not failed:
                self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Update the moving averages, with one operation for each; their decay is computed on the host."""
        for average in self.averages:
            average.update()

    def check(self, next_step: int, window: Window, last_checkpoint: Callable[[], Path | None]) -> None:
        """Raise if loss or gradient were not finite, or if fp16 overflows at every scale; this waits for the device."""
        failed_at = int(self.failed_at)
        if failed_at != NEVER_FAILED:
            t, errors = window.latest[failed_at - next_step]  # counted back from the newest step
            bad, drawn = (set().union(*self.processes.all_gather(some.tolist())) for some in (t[~errors.isfinite()], t))
            what = f"loss at {listed(bad)}" if bad else f"gradient (at {listed(drawn)})"
            raise RunFailed(
                f"step {failed_at}: the {what} is not finite; the weights were not updated with it, and "
                f"{last_good(last_checkpoint())}. Try a lower --learning_rate, a longer --lr_warmup_steps or "
                f"--mixed_precision no"
            )
        line_due = next_step % window.length == 0
        if line_due and self.scaler is not None and self.scaler.get_scale() < SMALLEST_LOSS_SCALE:
            raise RunFailed(
                f"step {next_step}: gradients overflow in fp16 whatever the loss scale; no update was made with them, "
                f"and {last_good(last_checkpoint())}; continue with --mixed_precision bf16 or no"
            )


def listed(timesteps: set[int]) -> str:
    more = f" and {len(timesteps) - MOST_LISTED} more" if len(timesteps) > MOST_LISTED else ""
    return f"timestep(s) {', '.join(map(str, sorted(timesteps)[:MOST_LISTED]))}{more}"


class ExactEMA(EMA):
    """ema-pytorch's moving average with its decay in float64.

    The library's float32 turns a decay of 0.9999 into 0.99989998 and makes the new weights' share 1.7e-4 too large.
    The counters stay on the CPU, where reading them waits for no device: never call `.to()` on it.
    """

    def __init__(self, unet: torch.nn.Module, **settings: float):
        super().__init__(unet, update_after_step=0, update_every=1, include_online_model=False, **settings)
        self.ema_model.requires_grad_()  # otherwise autocast would cast every weight again at every step of a grid

    def get_current_decay(self) -> float:
        """Return 1 - (1 + n / inv_gamma)^-power n updates after the copy, between `min_value` and `beta`."""
        updates = self.step.item() - self.update_after_step - 1
        if updates <= 0:
            return 0.0
        return min(max(1 - (1 + updates / self.inv_gamma) ** -self.power, self.min_value), self.beta)

    def update_moving_average(self, ma_model: torch.nn.Module, current_model: torch.nn.Module) -> None:
        """Compute ema <- ema + (1 - decay) (weights - ema) over lists of tensors that are made once."""
        torch._foreach_lerp_(*self._averages_and_weights, 1.0 - self.get_current_decay())

    @property
    def memory(self) -> float:
        """Return about how many steps the average looks back once its decay has reached the maximum."""
        return 1 / (1 - self.beta)

    @cached_property
    def _averages_and_weights(self) -> list[list[torch.Tensor]]:
        of_both = zip(tensors_of(self.ema_model), tensors_of(self.model), strict=True)
        return [[tensor.data for tensor in some] for some in zip(*of_both, strict=True)]


class PowerEMA(ExactEMA):
    """The average with weights proportional to t^gamma over the steps t (Karras et al. 2023, EDM2, eq. 1 and 2).

    Its length grows with the training: `length` is its standard deviation as a share of the steps so far. ema-pytorch's
    `KarrasEMA` counts its updates one too far, so that its first weights count as two steps.
    """

    memory = 0.0  # it never lags behind by more than a share of the steps so far

    def __init__(self, unet: torch.nn.Module, length: float):
        super().__init__(unet)
        self.length, self.gamma = length, power_exponent(length)

    def get_current_decay(self) -> float:
        """Return (1 - 1 / t)^(gamma + 1) at the update of step t, counted from 1; the first is a copy."""
        step = self.step.item()
        return (1 - 1 / step) ** (self.gamma + 1) if step > 0 else 0.0


def tensors_of(network: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that are averaged: floating-point weights and buffers."""
    return (tensor for tensor in (*network.parameters(), *network.buffers()) if tensor.is_floating_point())


def build_optimizer(config: TrainingConfig, unet: torch.nn.Module) -> torch.optim.Optimizer:
    """Build Adam as AdamW, the same at decay 0; `fused` lets the device skip an update (see `Update.step`).

    A CUDA graph reads the learning rate on the device, in float32.
    """
    device = next(unet.parameters()).device
    return torch.optim.AdamW(
        unet.parameters(),
        lr=torch.tensor(config.learning_rate, device=device) if config.cuda_graph else config.learning_rate,
        capturable=config.cuda_graph,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate_schedule(config: TrainingConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step s = 0, 1, ..., with the curves that diffusers defines.

    A scheduler prepared by accelerate would be stepped once per process and finish the warm-up that much too early.
    """
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        config.lr_scheduler, carrier, num_warmup_steps=config.lr_warmup_steps, num_training_steps=total_steps
    )
    return lambda step: config.learning_rate * scheduler.lr_lambdas[0](step)


def build_averages(config: TrainingConfig, unet: torch.nn.Module) -> list[ExactEMA]:
    """Build the moving averages, the run's own first; without --use_ema there are none."""
    if not config.use_ema:
        return []
    if config.ema == "constant":
        return [build_ema(config, unet)]
    return [PowerEMA(unet, length) for length in POWER_LENGTHS]


def build_ema(config: TrainingConfig, unet: torch.nn.Module) -> ExactEMA:
    """Build the paper's moving average: a copy at first, then ema <- decay ema + (1 - decay) weights."""
    return ExactEMA(
        unet,
        beta=config.ema_max_decay,
        min_value=0.0 if config.ema_warmup else config.ema_max_decay,  # without warm-up the ramp is flat
        inv_gamma=config.ema_inv_gamma,
        power=config.ema_power,
    )
