"""The start of the log and its end; the audit: what the paper says, what this run does, and where the two differ.

The rows are read off the objects that train, not off the flags, so that a default that slipped in would show.
"""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import torch

from common.machine import multiplies_bf16
from run_folder.config import PAPER_BATCH_SIZE, TimestepOptions, TrainingConfig, as_yaml
from schedulers.betas import NAMES_OF_DIFFUSERS
from schedulers.ddpm import LEARNED_VARIANCES, ExactDDPMScheduler
from schedulers.loss import SHARE_OF_BOUND, DiffusionLoss
from training.network import PAPER_ARITHMETIC, PAPER_CIFAR10, PAPER_CIFAR10_PARAMETERS, Network, describe_initialization
from training.update import ExactEMA, PowerEMA

if TYPE_CHECKING:
    from training.setup import Run

logger = logging.getLogger(__name__)

MOST_SIGNAL_AT_END = 0.1  # of x_T, as sqrt(a_T); the paper has 0.006
PAPER_REPLICAS = 8  # cores of a TPU v3-8, each with a part of the batch


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
    config, sizes, unet, scheduler = run.config, run.sizes, run.state.unet, run.state.loss.process
    adam = run.state.update.optimizer.param_groups[0]
    optimizer = "Adam({:g}, {:g}), eps {:g}, decay {:g}, clip {:g}".format(
        *adam["betas"], adam["eps"], adam["weight_decay"], config.max_grad_norm
    )
    if config.clip_per_replica not in (None, PAPER_REPLICAS):
        optimizer += f" in each of {config.clip_per_replica} replicas"
    warmup = "" if config.lr_scheduler == "constant" else f", {config.lr_warmup_steps} steps"
    rate = f"{config.learning_rate:g}, {config.lr_scheduler}{warmup}"
    batch = f"{sizes.total}"
    if sizes.total != PAPER_BATCH_SIZE:
        batch += f" = {sizes.per_device} per device x {run.processes.count} x {sizes.accumulation}"
    precision = "float32" if config.mixed_precision == "no" else f"{config.mixed_precision} network, float32 noise"
    halved = f", at half their size for {config.half_resolution_steps:,} steps" if config.half_resolution_steps else ""
    tf32 = " with TF32" if torch.backends.cuda.matmul.allow_tf32 else ""
    return [
        Row("data", "50,000 images", f"{len(run.batches.images):,} images{halved}"),
        Row("network", f"{PAPER_CIFAR10_PARAMETERS:,} parameters, 32x32x3", describe_network(unet)),
        Row("condition", "none", describe_condition(unet)),
        Row("dropout", "0.1", f"{unet.config.dropout:g}"),
        Row("init", "Xavier-uniform, zero residual outputs", describe_initialization(unet)),
        Row("schedule", "linear 0.0001 to 0.02, T=1000, float64", describe_schedule(scheduler)),
        Row("variance", "fixed_large", scheduler.config.variance_type),
        Row("prediction", "epsilon", scheduler.config.prediction_type),
        Row("timesteps", "uniform", describe_choice(config, config.timestep_sampler, config.stratified)),
        Row("loss", "l2", describe_loss(config)),
        Row("loss weights", "none", describe_choice(config, config.loss_weighting)),
        Row("optimiser", "Adam(0.9, 0.999), eps 1e-08, decay 0, clip 1", optimizer),
        Row("learning rate", "0.0002, constant_with_warmup, 5000 steps", rate),
        Row("EMA", "a copy first, then 0.9999", describe_ema(run.state.update.averages)),
        Row("batch", f"{PAPER_BATCH_SIZE}", batch),
        Row("precision", "float32", precision + tf32),
        Row("flips", "random", "random" if config.random_flip else "none"),
    ]


def describe_network(unet: Network) -> str:
    """Give size and count, and the settings that make another network of the same size and count."""
    count, size = unet.num_parameters(), unet.config.sample_size
    text = f"{count:,} parameters, {size}x{size}x{unet.config.in_channels}"
    telling = PAPER_CIFAR10.keys() - {"dropout"} if count == PAPER_CIFAR10_PARAMETERS else PAPER_ARITHMETIC.keys()
    # Tuples come back from a file as lists.
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in unet.config.items()}
    hidden = sorted(name for name in telling if own[name] != PAPER_CIFAR10[name])
    return text + (f", other {', '.join(hidden)}" if hidden else "")


def describe_condition(unet: Network) -> str:
    """Say what the network is told of an image besides its timestep."""
    if unet.class_embedding is not None:
        return f"{unet.config.num_class_embeds - 1} classes, and none"
    width = unet.config.get("cross_attention_dim")
    return "none" if width is None else f"text, {width} wide"


def describe_schedule(scheduler: ExactDDPMScheduler) -> str:
    betas, listed = scheduler.betas, scheduler.config.trained_betas is not None
    name = "listed" if listed else NAMES_OF_DIFFUSERS[scheduler.config.beta_schedule]
    precision = str(betas.dtype).removeprefix("torch.")
    return f"{name} {betas[0].item():.4g} to {betas[-1].item():.4g}, T={len(betas)}, {precision}"


def describe_choice(config: TrainingConfig, name: str, stratified: bool = False) -> str:
    """Name a timestep sampler or loss weighting, with those of its options that are not its paper's."""
    own = [entry for entry in fields(TimestepOptions) if entry.name.startswith(f"{name}_")]
    changed = {entry.name: getattr(config, entry.name) for entry in own if getattr(config, entry.name) != entry.default}
    options = ", ".join(f"{option.removeprefix(f'{name}_')} {value:g}" for option, value in changed.items())
    return name + (f" ({options})" if options else "") + (", stratified" if stratified else "")


def describe_loss(config: TrainingConfig) -> str:
    perturbation, loss = config.input_perturbation, config.loss
    if config.variance_type in LEARNED_VARIANCES:
        loss = "L, with the variance" if config.loss_weighting == "bound" else f"{loss} + {SHARE_OF_BOUND} L_vlb"
    return f"{loss}, input perturbed by {perturbation:g}" if perturbation else loss


def describe_ema(averages: list[ExactEMA]) -> str:
    if not averages:
        return "none"
    ema, *others = averages
    if isinstance(ema, PowerEMA):
        return f"power function of length {ema.length:g}; kept for others: {ema.length:g}, {others[0].length:g}"
    if ema.min_value == ema.beta and ema.update_every == 1 and ema.update_after_step == 0:
        return f"a copy first, then {ema.beta:g}"
    return f"1 - (1 + step / {ema.inv_gamma:g})^-{ema.power:g}, at most {ema.beta:g}"


def format_audit(rows: list[Row]) -> str:
    """Format the table, with a mark at every deviation and their count below."""
    table = [("what", "paper", "this run"), *map(astuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [" | ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    marks = ["!" if row.deviates else " " for row in rows]
    lines = [f"  {mark} {line}" for mark, line in zip([" ", *marks], lines, strict=True)]
    lines.insert(1, "    " + "-+-".join("-" * width for width in widths))
    deviations = [row.what for row in rows if row.deviates]
    if deviations:
        lines.append(f"  {len(deviations)} deviation(s) from the paper's CIFAR-10 run: {', '.join(deviations)}")
    else:
        lines.append("  No deviation from the paper's CIFAR-10 run in this list.")
    return "\n".join(lines)


def describe_clip(config: TrainingConfig) -> str:
    """Say how clipping differs from the original's code; the paper does not mention it, so it is no row."""
    if config.clip_per_replica is not None:
        return ""
    parts = f"those of {PAPER_REPLICAS} parts of it (--clip_per_replica {PAPER_REPLICAS})"
    return f"\n  Gradients are clipped for the whole batch; the original's code clips {parts}."


def announce(run: Run) -> None:
    """Log the lines of the diffusers examples, then what this run does differently from the paper."""
    config, sizes, total_steps, ema = run.config, run.sizes, run.total_steps, run.state.update.ema
    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {len(run.batches.images)}")
    logger.info(f"  Num Epochs = {-(-total_steps // run.batches.steps_per_epoch)}")
    logger.info(f"  Instantaneous batch size per device = {sizes.per_device}")
    logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {sizes.total}")
    logger.info(f"  Gradient Accumulation steps = {sizes.accumulation}")
    logger.info(f"  Total optimization steps = {total_steps}")
    if config.max_train_seconds is not None:
        logger.info(f"  Training time at most = {config.max_train_seconds:g} seconds")
    logger.info(f"Audit against Ho et al. 2020, CIFAR-10:\n{format_audit(audit(run))}{describe_clip(config)}")
    log_objective(config, run.state.loss, draws=sizes.total * total_steps)
    if config.dry_run:
        logger.info(f"Configuration:\n{as_yaml(config)}")
    warn_if_short(config, ema, total_steps)
    signal = run.state.loss.process.alphas_cumprod[-1].item() ** 0.5
    if signal > MOST_SIGNAL_AT_END:
        logger.warning(
            f"With --ddpm_num_steps {config.ddpm_num_steps} and these betas the last x_t still holds {signal:.0%} of "
            "the image, but sampling starts from noise alone: choose a larger --beta_end, or "
            "--ddpm_beta_schedule cosine"
        )
    if config.mixed_precision == "fp16" and config.resolution <= 32:
        logger.warning("fp16 is known to give NaN on small images such as CIFAR-10; bf16 or no is safer")
    if config.mixed_precision == "bf16" and config.prediction_type == "mean":
        logger.warning(
            "bf16 rounds the mean that --prediction_type mean predicts to 8 bits, which costs bits per dimension at "
            "every denoising step; --mixed_precision no or another prediction loses next to none"
        )
    if run.processes.accelerator.mixed_precision == "bf16" and not multiplies_bf16(run.processes.device):
        logger.warning(f"{run.processes.device} has no instructions for bf16: it will be slower than float32")
    if ema is None:
        logger.warning(
            "Without the moving average samples are much worse (FID 12.1 against 3.2 with the original's weights)"
        )


def warn_if_short(config: TrainingConfig, ema: ExactEMA | None, steps: int) -> None:
    """Warn if the warm-up or the memory of the moving average is too long for a run of so many steps."""
    warmup = config.lr_warmup_steps
    if steps <= warmup and config.lr_scheduler != "constant":
        logger.warning(f"The learning rate is still warming up when the run ends: --lr_warmup_steps {warmup}")
    memory = 0 if ema is None or config.ema_warmup else ema.memory
    wanted = max(0.5, 1 - 10 / steps) if steps else config.ema_max_decay
    if steps < 3 * memory and wanted < config.ema_max_decay:
        logger.warning(
            f"The moving average looks back about {memory:.0f} steps, but the run has {steps}: its samples "
            f"will stay noise for a long time; --ema_max_decay {wanted:.4g} would suit it"
        )


def log_objective(config: TrainingConfig, loss: DiffusionLoss, draws: int) -> None:
    """Say which timesteps will be drawn and how they are weighted, and whether that is still the paper's objective."""
    sampler, weights, changed = loss.sampler, loss.weights, "not the paper's objective"
    objective = "the paper's objective" if sampler.objective == "same" else changed
    logger.info(f"[sampler] {config.timestep_sampler}: {objective}")
    if sampler.adapts:
        least = sampler.least_probability
        promise = f"at least {least:.3g}" if least > 0 else "no lower bound, so some may stop being drawn"
        logger.info(f"[sampler] adapts during training; probability of each timestep: {promise}")
    else:
        density = sampler.describe()
        # A rare timestep that is not expected even once in the whole run might as well have probability zero.
        drawn = (density * draws >= 1) | (density * len(density) >= 0.01)
        logger.info(
            f"[sampler] draws t in {ranges(drawn)}, each with a probability of at least {density[drawn].min():.3g}; "
            f"never: {ranges(~drawn) or 'none'}"
        )
    if loss.process.learns_variance:
        logger.info(f"[loss] {describe_loss(config)}: {changed}")
    elif config.loss_weighting != "none":
        logger.info(
            f"[weights] {config.loss_weighting}: {changed}; losses are weighted by "
            f"{weights.min():.3g} (t = {weights.argmin()}) to {weights.max():.3g} (t = {weights.argmax()})"
        )


def ranges(chosen: torch.Tensor) -> str:
    """List the timesteps that are chosen, as in '0-3, 996-999'."""
    timesteps = chosen.nonzero().flatten().tolist()
    firsts = [t for t in timesteps if t == 0 or not chosen[t - 1]]
    lasts = [t for t in timesteps if t == len(chosen) - 1 or not chosen[t + 1]]
    pairs = zip(firsts, lasts, strict=True)
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in pairs)


def log_end(run: Run) -> None:
    """Say why the run is over."""
    config, step = run.config, f"step {run.state.step} of {run.total_steps}"
    if run.state.step > run.total_steps:
        step = f"it is at step {run.state.step}, beyond the {run.total_steps} requested now"
    if run.state.step >= run.total_steps:
        logger.info(f"The run is complete: {step}. {config.output_dir} has the pipeline and its model card")
    else:
        logger.info(
            f"The run has used up its {config.max_train_seconds:g} seconds of training, at {step}; raise "
            f"--max_train_seconds to continue"
        )
        warn_if_short(config, run.state.update.ema, run.state.step)  # its length was not known before
    if run.state.step <= config.half_resolution_steps:
        logger.warning(
            "The network has not been trained on whole images yet; that begins after step %d (--half_resolution_steps)",
            config.half_resolution_steps,
        )
