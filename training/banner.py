"""The start of the log: the lines that people grep, what this machine gives, and the audit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from run_folder.config import as_yaml
from training.audit import audit, format_audit

if TYPE_CHECKING:
    import torch

    from common.processes import Processes
    from image_data.batches import TrainingBatches
    from run_folder.config import Batch, TrainingConfig
    from schedulers.ddpm import ExactDDPMScheduler
    from training.loop import TrainingState
    from training.timestep_sampling import TimestepSampling

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
    rows = audit(
        config,
        state.unet,
        scheduler,
        state.ema,
        state.optimizer,
        batch,
        processes.count,
        precision,
        len(batches.images),
    )
    logger.info("Audit against Ho et al. 2020, CIFAR-10:\n%s", format_audit(rows))
    for line in describe_sampling(config, state.timesteps, batch.total * total_steps):
        logger.info(line)
    if config.dry_run:
        logger.info("Configuration:\n%s", as_yaml(config))
    if total_steps <= config.lr_warmup_steps and config.lr_scheduler != "constant":
        logger.warning(
            "The learning rate is still warming up when the run ends: --lr_warmup_steps %d", config.lr_warmup_steps
        )
    memory = 0 if state.ema is None or config.ema_warmup else 1 / (1 - state.ema.beta)
    if total_steps < 3 * memory:
        logger.warning(
            "The moving average looks back about %.0f steps, the run has %d: its samples will be noise for long; "
            "an --ema_max_decay of %.4g suits it",
            memory,
            total_steps,
            max(0.5, 1 - 10 / total_steps),
        )
    if precision == "fp16" and config.resolution <= 32:
        logger.warning("fp16 is known to end in NaN on CIFAR-10 and its like; bf16 or no is safer")
    if state.ema is None:
        logger.warning(
            "Without the moving average samples are much worse (FID 12.1 against 3.2 with the original's weights)"
        )


def describe_sampling(config: TrainingConfig, sampling: TimestepSampling, draws: int) -> list[str]:
    """Which timesteps will be drawn and how they are weighted, and whether that is still the paper's objective."""
    sampler, name = sampling.sampler, config.timestep_sampler
    objectives = {"same": "the paper's objective", "changed": "another objective than the paper's"}
    lines = [f"[sampler] {name}: {objectives[sampler.objective]}"]
    if sampler.adapts:
        least = sampler.least_probability
        promise = f"at least {least:.3g}" if least > 0 else "without a lower bound, so that some may no longer be drawn"
        lines.append(f"[sampler] adapts to the training; probability of a timestep: {promise}")
    else:
        density = sampler.describe()
        # What is rare and not to be expected once in the whole run might as well have no probability.
        drawn = (density * draws >= 1) | (density * len(density) >= 0.01)
        lines.append(
            f"[sampler] draws t in {ranges(drawn)}, each with a probability of at least {density[drawn].min():.3g}; "
            f"never: {ranges(~drawn) or 'none'}"
        )
    if config.loss_weighting != "none":
        weights = sampling.weight_of
        lines.append(
            f"[weights] {config.loss_weighting}: {objectives['changed']}; the loss at t counts "
            f"{weights.min():.3g} (t = {weights.argmin()}) to {weights.max():.3g} (t = {weights.argmax()})"
        )
    return lines


def ranges(chosen: torch.Tensor) -> str:
    """The timesteps that are chosen, as in '0-3, 996-999'."""
    timesteps = chosen.nonzero().flatten().tolist()
    firsts = [t for t in timesteps if t == 0 or not chosen[t - 1]]
    lasts = [t for t in timesteps if t == len(chosen) - 1 or not chosen[t + 1]]
    pairs = zip(firsts, lasts, strict=True)
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in pairs)


def log_end(config: TrainingConfig, state: TrainingState, total_steps: int) -> None:
    """Why the run is over."""
    if state.step >= total_steps:
        logger.info(
            "The run is complete: step %d of %d. %s holds the pipeline and its card",
            state.step,
            total_steps,
            config.output_dir,
        )
    else:
        logger.info(
            "The run has used its %g seconds of training, at step %d of %d; a larger --max_train_seconds continues it",
            config.max_train_seconds,
            state.step,
            total_steps,
        )
