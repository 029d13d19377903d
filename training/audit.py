"""The audit: what the paper says, what this run does, and every place where the two differ.

The rows are read off the objects that train (the network's configuration, the scheduler's tables, the optimiser's
groups), not off the flags, so that a default that slipped in would show.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from run_folder.config import PAPER_BATCH_SIZE, TimestepOptions
from schedulers.betas import NAMES_OF_DIFFUSERS
from training.network import PAPER_ARITHMETIC, PAPER_CIFAR10, PAPER_CIFAR10_PARAMETERS, describe_initialization

if TYPE_CHECKING:
    import torch
    from diffusers import UNet2DConditionModel, UNet2DModel
    from ema_pytorch import EMA

    from run_folder.config import Batch, TrainingConfig
    from schedulers.ddpm import ExactDDPMScheduler


@dataclass
class Row:
    what: str
    paper: str
    this_run: str

    @property
    def deviates(self) -> bool:
        return self.this_run != self.paper


def audit(
    config: TrainingConfig,
    unet: UNet2DModel,
    scheduler: ExactDDPMScheduler,
    ema: EMA | None,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    num_processes: int,
    precision: str,
    num_images: int,
) -> list[Row]:
    """The rows of the table, for the paper's CIFAR-10 run."""
    division = f"{batch.total} = {batch.per_device} per device x {num_processes} x {batch.accumulation}"
    return [
        Row("data", "50,000 images", f"{num_images:,} images"),
        Row("network", f"{PAPER_CIFAR10_PARAMETERS:,} parameters, 32x32x3", describe_network(unet)),
        Row("condition", "none", describe_condition(unet)),
        Row("dropout", "0.1", f"{unet.config.dropout:g}"),
        Row("init", "Xavier-uniform, zero residual outputs", describe_initialization(unet)),
        Row("schedule", "linear 0.0001 to 0.02, T=1000, float64", describe_schedule(scheduler)),
        Row("variance", "fixed_large", scheduler.config.variance_type),
        Row("prediction", "epsilon", scheduler.config.prediction_type),
        Row("timesteps", "uniform", describe_choice(config, config.timestep_sampler, config.stratified)),
        Row("loss weights", "none", describe_choice(config, config.loss_weighting)),
        Row("optimiser", "Adam(0.9, 0.999), eps 1e-08, decay 0, clip 1", describe_optimizer(config, optimizer)),
        Row("learning rate", "0.0002, constant_with_warmup, 5000 steps", describe_learning_rate(config)),
        Row("EMA", "a copy first, then 0.9999", describe_ema(ema)),
        Row(
            "batch",
            str(PAPER_BATCH_SIZE),
            str(PAPER_BATCH_SIZE) if batch.total == PAPER_BATCH_SIZE else division,
        ),
        Row("precision", "float32", describe_precision(precision)),
        Row("flips", "random", "random" if config.random_flip else "none"),
    ]


def describe_network(unet: UNet2DModel) -> str:
    """Size and count, and the settings that make another network of the same size and count."""
    count, size = unet.num_parameters(), unet.config.sample_size
    text = f"{count:,} parameters, {size}x{size}x{unet.config.in_channels}"
    telling = PAPER_CIFAR10.keys() - {"dropout"} if count == PAPER_CIFAR10_PARAMETERS else PAPER_ARITHMETIC.keys()
    hidden = sorted(name for name in telling if _plain(unet.config[name]) != PAPER_CIFAR10[name])
    return text + (f", other {', '.join(hidden)}" if hidden else "")


def describe_condition(unet: UNet2DModel | UNet2DConditionModel) -> str:
    """What the network is told of an image besides its timestep."""
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
    """A timestep sampler or loss weighting, with those of its options that are not its paper's."""
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
    import torch

    name = "float32" if precision == "no" else f"{precision} network, float32 noise"
    return name + (" with TF32" if torch.backends.cuda.matmul.allow_tf32 else "")


def format_audit(rows: list[Row]) -> str:
    """The table, with a mark at every deviation and their count below."""
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
