"""The start of the log: the lines that people grep, what this machine gives, and the audit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from training.audit import audit, format_audit

if TYPE_CHECKING:
    from image_data.batches import TrainingBatches
    from schedulers.ddpm import ExactDDPMScheduler
    from training.config import Batch, TrainingConfig
    from training.loop import TrainingState
    from training.processes import Processes

logger = logging.getLogger(__name__)


def log_banner(
    config: TrainingConfig,
    processes: Processes,
    state: TrainingState,
    scheduler: ExactDDPMScheduler,
    batches: TrainingBatches,
    batch: Batch,
    total_steps: int,
    precision: str,
) -> None:
    """The lines of the diffusers examples, then what this run does differently from the paper."""
    logger.info("***** Running training *****")
    logger.info("  Num examples = %d", len(batches.images))
    logger.info("  Num Epochs = %d", -(-total_steps // batches.steps_per_epoch))
    logger.info("  Instantaneous batch size per device = %d", batch.per_device)
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %d", batch.total)
    logger.info("  Gradient Accumulation steps = %d", batch.accumulation)
    logger.info("  Total optimization steps = %d", total_steps)
    if config.max_train_seconds is not None:
        logger.info("  Training time at most = %g seconds", config.max_train_seconds)
    rows = audit(config, state.unet, scheduler, state.ema, state.optimizer, batch, processes.count, precision)
    logger.info("Audit against Ho et al. 2020, CIFAR-10:\n%s", format_audit(rows))
    if precision == "fp16" and config.resolution <= 32:
        logger.warning("fp16 is known to end in NaN on CIFAR-10 and its like; bf16 or no is safer")
    if state.ema is None:
        logger.warning("Without the moving average, expect an FID about four times as high (12.1 against 3.2)")
