"""The optimiser, the learning rate and the moving average, as the paper has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from ema_pytorch import EMA

if TYPE_CHECKING:
    from run_folder.config import TrainingConfig


class ExactEMA(EMA):
    """ema-pytorch's moving average with its decay in float64.

    In the float32 of the library a decay of 0.9999 is 0.99989998, and the share of the new weights 1.7e-4 too large.
    The counters stay on the CPU, where reading them waits for no device: never call `.to()` on it.
    """

    def get_current_decay(self) -> float:
        """1 - (1 + n / inv_gamma)^-power after the copy and n further updates, between `min_value` and `beta`."""
        updates = self.step.item() - self.update_after_step - 1
        if updates <= 0:
            return 0.0
        return min(max(1 - (1 + updates / self.inv_gamma) ** -self.power, self.min_value), self.beta)


def build_optimizer(config: TrainingConfig, unet: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam: AdamW with decay 0 is the same update. `fused` can skip an update on the device (see the loop)."""
    return torch.optim.AdamW(
        unet.parameters(),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate_schedule(config: TrainingConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate of step s = 0, 1, ...: a pure function, with the curves that diffusers defines.

    With warm-up it is learning_rate * min(s / warmup_steps, 1). A scheduler prepared by accelerate would be stepped
    once per process and finish the warm-up that many times too early.
    """
    from diffusers.optimization import get_scheduler

    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        config.lr_scheduler,
        optimizer=carrier,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=total_steps,
    )
    factor = scheduler.lr_lambdas[0]
    return lambda step: config.learning_rate * factor(step)


def build_ema(config: TrainingConfig, unet: torch.nn.Module) -> ExactEMA | None:
    """The first update copies the weights, every later one is ema <- decay ema + (1 - decay) weights.

    "Without warm-up" must be said in ema-pytorch's terms: the ramp's minimum is its maximum, no update is left out.
    """
    if not config.use_ema:
        return None
    return ExactEMA(
        unet,
        beta=config.ema_max_decay,
        min_value=0.0 if config.ema_warmup else config.ema_max_decay,
        inv_gamma=config.ema_inv_gamma,
        power=config.ema_power,
        update_after_step=0,
        update_every=1,
        include_online_model=False,
        use_foreach=True,
    )
