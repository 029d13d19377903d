"""The audit: what the paper says, what this run does, and every place where the two differ.

The rows are read off the objects that train (the network's configuration, the scheduler's tables, the optimiser's
groups), not off the flags, so that a default that slipped in would show.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from run_folder.config import PAPER_BATCH_SIZE, TimestepOptions, as_yaml
from schedulers.betas import NAMES_OF_DIFFUSERS
from training.network import PAPER_ARITHMETIC, PAPER_CIFAR10, PAPER_CIFAR10_PARAMETERS, describe_initialization

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel, UNet2DModel
    from ema_pytorch import EMA

    from run_folder.config import TrainingConfig
    from schedulers.ddpm import ExactDDPMScheduler
    from schedulers.loss import DiffusionLoss
    from training.setup import Run

logger = logging.getLogger(__name__)


@dataclass
class Row:
    what: str
    paper: str
    this_run: str

    @property
    def deviates(self) -> bool:
        return self.this_run != self.paper


def audit(run: Run) -> list[Row]:
    """List the rows of the table, for the paper's CIFAR-10 run."""
    config, sizes, unet = run.config, run.sizes, run.state.unet
    scheduler, update = run.process, run.state.update
    division = f"{sizes.total} = {sizes.per_device} per device x {run.processes.count} x {sizes.accumulation}"
    return [
        Row("data", "50,000 images", f"{len(run.batches.images):,} images"),
        Row("network", f"{PAPER_CIFAR10_PARAMETERS:,} parameters, 32x32x3", describe_network(unet)),
        Row("condition", "none", describe_condition(unet)),
        Row("dropout", "0.1", f"{unet.config.dropout:g}"),
        Row("init", "Xavier-uniform, zero residual outputs", describe_initialization(unet)),
        Row("schedule", "linear 0.0001 to 0.02, T=1000, float64", describe_schedule(scheduler)),
        Row("variance", "fixed_large", scheduler.config.variance_type),
        Row("prediction", "epsilon", scheduler.config.prediction_type),
        Row("timesteps", "uniform", describe_choice(config, config.timestep_sampler, config.stratified)),
        Row("loss", "l2", config.loss),
        Row("loss weights", "none", describe_choice(config, config.loss_weighting)),
        Row("optimiser", "Adam(0.9, 0.999), eps 1e-08, decay 0, clip 1", describe_optimizer(config, update.optimizer)),
        Row("learning rate", "0.0002, constant_with_warmup, 5000 steps", describe_learning_rate(config)),
        Row("EMA", "a copy first, then 0.9999", describe_ema(update.ema)),
        Row(
            "batch",
            str(PAPER_BATCH_SIZE),
            str(PAPER_BATCH_SIZE) if sizes.total == PAPER_BATCH_SIZE else division,
        ),
        Row("precision", "float32", describe_precision(config.mixed_precision)),
        Row("flips", "random", "random" if config.random_flip else "none"),
    ]


def describe_network(unet: UNet2DModel) -> str:
    """Give size and count, and the settings that make another network of the same size and count."""
    count, size = unet.num_parameters(), unet.config.sample_size
    text = f"{count:,} parameters, {size}x{size}x{unet.config.in_channels}"
    telling = PAPER_CIFAR10.keys() - {"dropout"} if count == PAPER_CIFAR10_PARAMETERS else PAPER_ARITHMETIC.keys()
    hidden = sorted(name for name in telling if _plain(unet.config[name]) != PAPER_CIFAR10[name])
    return text + (f", other {', '.join(hidden)}" if hidden else "")


def describe_condition(unet: UNet2DModel | UNet2DConditionModel) -> str:
    """Say what the network is told of an image besides its timestep."""
    if unet.class_embedding is not None:
        return f"{unet.config.num_class_embeds - 1} classes, and none"
    width = unet.config.get("cross_attention_dim")
    return "none" if width is None else f"text, {width} wide"


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def describe_schedule(scheduler: ExactDDPMScheduler) -> str:
    betas = scheduler.betas
    name = (
        "listed" if scheduler.config.trained_betas is not None else NAMES_OF_DIFFUSERS[scheduler.config.beta_schedule]
    )
    precision = str(betas.dtype).removeprefix("torch.")
    return f"{name} {betas[0].item():.4g} to {betas[-1].item():.4g}, T={len(betas)}, {precision}"


def describe_choice(config: TrainingConfig, name: str, stratified: bool = False) -> str:
    """Name a timestep sampler or loss weighting, with those of its options that are not its paper's."""
    own = [entry for entry in fields(TimestepOptions) if entry.name.startswith(f"{name}_")]
    changed = {entry.name: getattr(config, entry.name) for entry in own if getattr(config, entry.name) != entry.default}
    options = ", ".join(f"{option.removeprefix(f'{name}_')} {value:g}" for option, value in changed.items())
    return name + (f" ({options})" if options else "") + (", stratified" if stratified else "")


def describe_optimizer(config: TrainingConfig, optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    return (
        f"Adam({beta1:g}, {beta2:g}), eps {group['eps']:g}, decay {group['weight_decay']:g}, "
        f"clip {config.max_grad_norm:g}"
    )


def describe_learning_rate(config: TrainingConfig) -> str:
    warmup = "" if config.lr_scheduler == "constant" else f", {config.lr_warmup_steps} steps"
    return f"{config.learning_rate:g}, {config.lr_scheduler}{warmup}"


def describe_ema(ema: EMA | None) -> str:
    if ema is None:
        return "none"
    if ema.min_value == ema.beta and ema.update_every == 1 and ema.update_after_step == 0:
        return f"a copy first, then {ema.beta:g}"
    return f"1 - (1 + step / {ema.inv_gamma:g})^-{ema.power:g}, at most {ema.beta:g}"


def describe_precision(precision: str) -> str:
    name = "float32" if precision == "no" else f"{precision} network, float32 noise"
    return name + (" with TF32" if torch.backends.cuda.matmul.allow_tf32 else "")


def format_audit(rows: list[Row]) -> str:
    """Format the table, with a mark at every deviation and their count below."""
    header = Row("what", "paper", "this run")
    widths = [max(len(getattr(row, name)) for row in [header, *rows]) for name in ("what", "paper", "this_run")]

    def line(row: Row, mark: str) -> str:
        cells = zip((row.what, row.paper, row.this_run), widths, strict=True)
        return (f"  {mark} " + " | ".join(text.ljust(width) for text, width in cells)).rstrip()

    deviations = [row for row in rows if row.deviates]
    lines = [line(header, " "), "    " + "-+-".join("-" * width for width in widths)]
    lines += [line(row, "!" if row.deviates else " ") for row in rows]
    if deviations:
        names = ", ".join(row.what for row in deviations)
        lines.append(f"  {len(deviations)} deviation(s) from the paper's CIFAR-10 run: {names}")
    else:
        lines.append("  No deviation from the paper's CIFAR-10 run in what is listed.")
    return "\n".join(lines)


# The start of the log and its end.


def announce(run: Run) -> None:
    """Log the lines of the diffusers examples, then what this run does differently from the paper."""
    config, sizes, total_steps, ema = run.config, run.sizes, run.total_steps, run.state.update.ema
    logger.info("***** Running training *****")
    logger.info("  Num examples = %d", len(run.batches.images))
    logger.info("  Num Epochs = %d", -(-total_steps // run.batches.steps_per_epoch))
    logger.info("  Instantaneous batch size per device = %d", sizes.per_device)
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %d", sizes.total)
    logger.info("  Gradient Accumulation steps = %d", sizes.accumulation)
    logger.info("  Total optimization steps = %d", total_steps)
    if config.max_train_seconds is not None:
        logger.info("  Training time at most = %g seconds", config.max_train_seconds)
    rows = audit(run)
    logger.info("Audit against Ho et al. 2020, CIFAR-10:\n%s", format_audit(rows))
    for line in describe_objective(config, run.state.loss, sizes.total * total_steps):
        logger.info(line)
    if config.dry_run:
        logger.info("Configuration:\n%s", as_yaml(config))
    if total_steps <= config.lr_warmup_steps and config.lr_scheduler != "constant":
        logger.warning(
            "The learning rate is still warming up when the run ends: --lr_warmup_steps %d", config.lr_warmup_steps
        )
    memory = 0 if ema is None or config.ema_warmup else 1 / (1 - ema.beta)
    if total_steps < 3 * memory:
        logger.warning(
            "The moving average looks back about %.0f steps, the run has %d: its samples will be noise for long; "
            "an --ema_max_decay of %.4g suits it",
            memory,
            total_steps,
            max(0.5, 1 - 10 / total_steps),
        )
    if config.mixed_precision == "fp16" and config.resolution <= 32:
        logger.warning("fp16 is known to end in NaN on CIFAR-10 and its like; bf16 or no is safer")
    if ema is None:
        logger.warning(
            "Without the moving average samples are much worse (FID 12.1 against 3.2 with the original's weights)"
        )


def describe_objective(config: TrainingConfig, loss: DiffusionLoss, draws: int) -> list[str]:
    """Say which timesteps will be drawn and how they are weighted, and whether that is still the paper's objective."""
    sampler, name = loss.sampler, config.timestep_sampler
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
        weights = loss.weights
        lines.append(
            f"[weights] {config.loss_weighting}: {objectives['changed']}; the loss at t counts "
            f"{weights.min():.3g} (t = {weights.argmin()}) to {weights.max():.3g} (t = {weights.argmax()})"
        )
    return lines


def ranges(chosen: torch.Tensor) -> str:
    """List the timesteps that are chosen, as in '0-3, 996-999'."""
    timesteps = chosen.nonzero().flatten().tolist()
    firsts = [t for t in timesteps if t == 0 or not chosen[t - 1]]
    lasts = [t for t in timesteps if t == len(chosen) - 1 or not chosen[t + 1]]
    pairs = zip(firsts, lasts, strict=True)
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in pairs)


def log_end(run: Run) -> None:
    """Say why the run is over."""
    config, step, total_steps = run.config, run.state.step, run.total_steps
    if step >= total_steps:
        logger.info(
            "The run is complete: step %d of %d. %s holds the pipeline and its card",
            step,
            total_steps,
            config.output_dir,
        )
    else:
        logger.info(
            "The run has used its %g seconds of training, at step %d of %d; a larger --max_train_seconds continues it",
            config.max_train_seconds,
            step,
            total_steps,
        )
