"""The configuration of a run: dataclasses that are the source of the flags, the help and the YAML keys.

The defaults are the paper's (Ho et al. 2020, CIFAR-10), the names are those of the diffusers examples.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_type_hints

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

PAPER_STEPS = 800_000
PAPER_BATCH_SIZE = 128
LARGEST_GRID = 4096

# TIMESTEP_SAMPLERS of schedulers/loss.py by what they train, without importing torch.
SAME_OBJECTIVE = ("uniform", "stratified", "loss_second_moment", "kingma_gao")
CHANGED_OBJECTIVE = ("logit_normal", "edm", "log_snr", "laplace", "beta", "speed")
CHANGED_OBJECTIVE += ("infonoise", "edm2", "marginal_return", "ats")

# The options that are the arguments of build_scheduler (schedulers/ddpm.py), in order.
SCHEDULER_OPTIONS = (
    "ddpm_beta_schedule", "ddpm_num_steps", "variance_type", "prediction_type", "beta_start", "beta_end",
)  # fmt: skip
COSINE = "ddpm_beta_schedule=cosine ddpm_beta_schedule=squaredcos_cap_v2"  # which no beta is given


@section("condition")
class ConditioningOptions:
    condition: Literal["class", "text"] = option("class", "What the network is told of each image.", fixed=True)
    label_column: str | None = option(
        None, "Column with the classes; found by itself if there is only one, or by the folders the images are in."
    )
    caption_column: str | None = option(
        None,
        "Column with one or several captions of each image; found by itself. Without one, classes are described.",
        only_with="condition=text",
    )
    caption_template: list[str] = option(
        [],
        "One or several captions made of the class, such as 'a photo of a {class}', the default when there are no "
        "captions; which of them an image gets is drawn at every step.",
        only_with="condition=text",
    )
    text_encoder: str = option(
        "openai/clip-vit-base-patch32",
        "Frozen encoder of the captions: an id on the Hub, a folder, or all-MiniLM-L6-v2, which comes as a package.",
        only_with="condition=text",
        may_change=True,
        on_card=False,
    )
    condition_dropout: float = option(
        0.1, "Share of the images without a condition, for classifier-free guidance.", BELOW_ONE
    )
    balance: bool = option(False, "Show all classes equally often, however many images they have.")
    validation_prompts: list[str] = option(
        [],
        "Prompts of the sample grids (default: a caption of each class).",
        only_with="condition=text",
        may_change=True,
    )


@section("network")
class NetworkOptions:
    model_config_name_or_path: str | None = option(
        None,
        "UNet2DModel configuration instead of the paper's network for this resolution; with text, its attention "
        "is to the words too. That of a UNet2DConditionModel also reads text.",
    )
    dropout: float = option(
        0.1, "Dropout in the residual blocks of the paper's network.", BELOW_ONE, not_with="model_config_name_or_path"
    )


@section("diffusion")
class DiffusionOptions:
    ddpm_num_steps: int = option(1000, "T, the number of diffusion steps.", NUM_STEPS, fixed=True)
    ddpm_beta_schedule: Literal[
        "linear", "quadratic", "scaled_linear", "cosine", "squaredcos_cap_v2", "sigmoid", "constant",
        "warmup10", "warmup50",
    ] = option("linear", "Beta schedule, by its name in papers or in diffusers.", fixed=True)  # fmt: skip
    beta_start: float = option(
        1e-4, "The first beta.", BETWEEN_ZERO_AND_ONE, not_with=f"{COSINE} ddpm_beta_schedule=constant", fixed=True
    )
    beta_end: float = option(0.02, "The last beta.", BETWEEN_ZERO_AND_ONE, not_with=COSINE, fixed=True)
    variance_type: Literal["fixed_large", "fixed_small"] = option(
        "fixed_large", "Variance of the ancestral steps: beta_t or the posterior's."
    )
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = option(
        "epsilon", "What the network predicts.", fixed=True
    )


def owners_of(name: str) -> str:
    """Return the samplers and weightings whose option this is, by its name: `edm_mean` is the mean of `edm`."""
    samplers, weightings = [*SAME_OBJECTIVE, *CHANGED_OBJECTIVE], get_type_hints(TimestepOptions)["loss_weighting"]
    owners = [f"timestep_sampler={owner}" for owner in samplers if name.startswith(f"{owner}_")]
    owners += [f"loss_weighting={owner}" for owner in get_args(weightings) if name.startswith(f"{owner}_")]
    return " ".join(owners)


@section("timestep samplers and loss weights", on_card=False, only_with=owners_of)
class TimestepOptions:
    """An option that belongs to one sampler or weighting bears its name: `edm_mean` is the `mean` of `edm`."""

    timestep_sampler: str = option(
        "uniform",
        f"Which timesteps a step trains on. The paper's objective: {', '.join(SAME_OBJECTIVE)}. Another objective: "
        f"{', '.join(CHANGED_OBJECTIVE)}. Or a class in a file of your own: my_file.py:MySampler.",
    )
    stratified: bool = option(False, "Spread each batch evenly over the sampler's density, whatever that is.")
    loss_weighting: Literal["none", "min_snr", "soft_min_snr", "p2", "edm", "sigmoid", "speed"] = option(
        "none", "Weight of the loss at each timestep; all but none change the objective."
    )
    loss: Literal["l2", "l1", "huber"] = option(
        "l2", "Error of a pixel: squared, absolute, or Huber's, which is squared up to 1 and linear beyond."
    )
    input_perturbation: float = option(
        0.0, "gamma: the image is noised with epsilon + gamma epsilon', epsilon stays the target.", NOT_NEGATIVE
    )
    timestep_sampler_options: list[str] = option(
        [], "Arguments of a timestep sampler in a file of your own, as in width=3 name=x."
    )
    logit_normal_mean: float = option(0.0, "Mean of logit(t / T).")
    logit_normal_std: float = option(1.0, "Standard deviation of logit(t / T).", POSITIVE)
    edm_mean: float = option(-1.2, "Mean of ln sigma of the sampler.", only_with="timestep_sampler=edm")
    edm_std: float = option(
        1.2, "Standard deviation of ln sigma of the sampler.", POSITIVE, only_with="timestep_sampler=edm"
    )
    edm_floor: float = option(
        0.0, "Share of uniform draws of the sampler.", UP_TO_ONE, only_with="timestep_sampler=edm"
    )
    edm_sigma_data: float = option(0.5, "sigma_data of the weighting.", POSITIVE, only_with="loss_weighting=edm")
    edm_cap: float | None = option(
        None, "The most that the weighting gives an error of epsilon.", POSITIVE, only_with="loss_weighting=edm"
    )
    log_snr_low: float = option(-6.5, "Lowest log SNR drawn.")
    log_snr_high: float = option(6.2, "Highest log SNR drawn.")
    log_snr_floor: float = option(0.03, "Share of uniform draws.", UP_TO_ONE)
    laplace_mu: float = option(0.0, "Mean of log SNR.")
    laplace_b: float = option(0.5, "Scale of log SNR.", POSITIVE)
    beta_alpha: float = option(0.8, "alpha of the Beta distribution of t / T.", POSITIVE)
    beta_beta: float = option(1.0, "beta of the Beta distribution of t / T.", POSITIVE)
    speed_tau: int | None = option(
        None, "From this timestep on steps count as trivial (default: 0.7 T, the paper's).", POSITIVE
    )
    speed_k: float = option(
        5.0,
        "How much likelier the sampler draws the timesteps below tau.",
        POSITIVE,
        only_with="timestep_sampler=speed",
    )
    speed_lambda: float = option(
        0.6, "Weights below tau lie between 1 - lambda and lambda.", UP_TO_ONE, only_with="loss_weighting=speed"
    )
    loss_second_moment_history: int = option(10, "Losses remembered of every timestep.", POSITIVE)
    loss_second_moment_uniform: float = option(0.001, "Share of uniform draws.", POSITIVE)
    kingma_gao_bins: int = option(100, "Bins of log SNR.", POSITIVE)
    kingma_gao_history: int = option(1000, "Losses averaged in every bin.", POSITIVE)
    kingma_gao_floor: float = option(0.001, "Share of uniform draws.", UP_TO_ONE)
    infonoise_c: float = option(0.15, "The noise sigma below which information counts less and less.", NOT_NEGATIVE)
    infonoise_bins: int = option(64, "Bins of log SNR.", POSITIVE)
    infonoise_history: int = option(256, "Losses averaged in every bin.", POSITIVE)
    infonoise_floor: float = option(0.0, "Share of uniform draws.", UP_TO_ONE)
    edm2_mean: float = option(-0.4, "Mean of ln sigma.")
    edm2_std: float = option(1.0, "Standard deviation of ln sigma.", POSITIVE)
    edm2_floor: float = option(0.0, "Share of uniform draws.", UP_TO_ONE)
    edm2_learning_rate: float = option(0.01, "Learning rate of the expected loss.", POSITIVE)
    marginal_return_prior: float = option(0.3, "Share of draws that are uniform in log SNR.", UP_TO_ONE)
    marginal_return_power: float = option(0.25, "Losses are weighted by this power of 1 / the error.", NOT_NEGATIVE)
    marginal_return_floor: float = option(0.03, "Share of uniform draws.", UP_TO_ONE)
    marginal_return_low: float = option(-6.5, "Lowest log SNR drawn but for the floor.")
    marginal_return_high: float = option(6.2, "Highest log SNR drawn but for the floor.")
    ats_interval: int = option(40, "Steps between updates of the policy.", POSITIVE)
    ats_grid: int = option(50, "Timesteps whose losses are compared before and after an update.", POSITIVE)
    ats_queue: int = option(20, "Comparisons remembered for the choice of timesteps.", POSITIVE)
    ats_features: int = option(3, "Timesteps chosen for the reward.", POSITIVE)
    ats_entropy: float = option(0.01, "Weight of the policy's entropy.", NOT_NEGATIVE)
    ats_learning_rate: float = option(0.01, "Learning rate of the policy.", POSITIVE)
    min_snr_gamma: float = option(
        5.0,
        "The signal-to-noise ratio is cut off here. As --snr_gamma, its name in diffusers, it chooses min_snr too.",
        POSITIVE,
    )
    soft_min_snr_gamma: float = option(4.0, "The signal-to-noise ratio saturates here.", POSITIVE)
    sigmoid_k: float = option(2.0, "The log SNR at which the sigmoid is one half.")
    p2_gamma: float = option(1.0, "Exponent of 1 / (k + SNR).", NOT_NEGATIVE)
    p2_k: float = option(1.0, "k of 1 / (k + SNR).", POSITIVE)


@section("optimiser")
class OptimizerOptions:
    train_batch_size: int | None = option(None, "Images per device and forward pass.", POSITIVE, may_change=True)
    total_batch_size: int | None = option(
        None,
        "Images per step: train_batch_size x processes x gradient_accumulation_steps. What is not given follows "
        f"from what is; nothing given means the paper's {PAPER_BATCH_SIZE}.",
        POSITIVE,
    )
    gradient_accumulation_steps: int | None = option(None, "Forward passes per step.", POSITIVE, may_change=True)
    learning_rate: float = option(2e-4, "Learning rate after the warm-up.", POSITIVE)
    lr_scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = option("constant_with_warmup", "Learning rate over the steps, as diffusers defines it.")
    lr_warmup_steps: int = option(
        5000,
        "Steps of the warm-up, whatever the number of processes.",
        NOT_NEGATIVE,
        not_with="lr_scheduler=constant",
        nothing=0,
    )
    adam_beta1: float = option(0.9, "Adam's beta1.", BELOW_ONE)
    adam_beta2: float = option(0.999, "Adam's beta2.", BELOW_ONE)
    adam_weight_decay: float = option(0.0, "Decoupled weight decay.", NOT_NEGATIVE)
    adam_epsilon: float = option(1e-8, "Adam's epsilon.", POSITIVE)
    max_grad_norm: float = option(1.0, "Gradients are clipped at this norm.", POSITIVE)


@section("moving average of the weights")
class EMAOptions:
    use_ema: bool = option(True, "Keep the moving average; samples and the final model use it.", fixed=True)
    ema_max_decay: float = option(
        0.9999, "Decay: a copy at the first update, constant from then on.", BELOW_ONE, only_with="use_ema"
    )
    ema_warmup: bool = option(
        False, "Let the decay rise as 1 - (1 + step / inv_gamma)^-power instead.", only_with="use_ema"
    )
    ema_inv_gamma: float = option(1.0, "inv_gamma of --ema_warmup.", POSITIVE, only_with="ema_warmup")
    ema_power: float = option(3 / 4, "power of --ema_warmup.", POSITIVE, only_with="ema_warmup")


@section("length and seed", may_change=True)
class LengthOptions:
    num_epochs: int | None = option(None, "Passes over the data.", POSITIVE)
    max_train_steps: int | None = option(
        None,
        f"Optimiser steps; comes before num_epochs. Neither given: the paper's {PAPER_STEPS}.",
        POSITIVE,
        instead_of="num_epochs",
    )
    max_train_seconds: float | None = option(
        None, "Stop when the run has trained for so many seconds in all; sampling and saving do not count.", POSITIVE
    )
    seed: int = option(
        0,
        "All randomness is a function of this, the step and the position in the batch.",
        from_to(0, LARGEST_INT),
        may_change=False,
    )


@section("output", may_change=True, on_card=False)
class OutputOptions:
    output_dir: str = option(
        "runs/ddpm", "The run: configuration, metrics, samples, checkpoints, final pipeline.", saved=False
    )
    overwrite: bool = option(
        False, "Delete a run that is already there; if torchrun or SLURM starts the job again, it goes on.", saved=False
    )
    resume_from_checkpoint: str = option(
        "latest",
        "A checkpoint folder, 'latest' of this run if it has one, or 'none' to start anew.",
        saved=False,
    )
    checkpointing_steps: int = option(5000, "Steps between checkpoints; one more is made at the end.", POSITIVE)
    checkpoints_total_limit: int = option(3, "Checkpoints kept, besides those of --keep_every.", POSITIVE)
    keep_every: int | None = option(None, "Keep the checkpoints of these multiples of steps for ever.", POSITIVE)
    save_images_steps: int = option(5000, "Steps between sample grids; one more is drawn at the end.", POSITIVE)
    save_images_epochs: int | None = option(
        None, "Epochs between sample grids instead.", POSITIVE, instead_of="save_images_steps"
    )
    save_model_epochs: int | None = option(None, "Epochs between updates of the pipeline in output_dir.", POSITIVE)
    eval_batch_size: int = option(16, "Images in a sample grid.", from_to(1, LARGEST_GRID))
    ddpm_num_inference_steps: int = option(1000, "Denoising steps of the sample grids.", POSITIVE)
    logger: Literal["tensorboard", "wandb", "trackio", "all", "none"] = option(
        "tensorboard", "Where curves go besides metrics.jsonl; all: TensorBoard, and wandb and trackio if installed."
    )
    logging_dir: str = option("logs", "Folder of the curves, inside output_dir.")
    logging_steps: int = option(50, "Steps between lines of metrics.", POSITIVE)
    tracker_project_name: str = option(
        "exact-ddpm",
        "Project of the curves in wandb or trackio.",
        only_with="logger=wandb logger=trackio logger=all",
    )


@section("hub", saved=False)
class HubOptions:
    push_to_hub: bool = option(False, "Upload the final pipeline, card, samples and curves; never checkpoints.")
    hub_model_id: str | None = option(None, "Repository to push to (default: the name of output_dir).")
    hub_token: str | None = option(
        None, "Token for the push (default: that of `hf auth login`); never stored.", only_with="push_to_hub"
    )
    hub_private_repo: bool = option(False, "Create the repository as a private one.", only_with="push_to_hub")
    hub_license: str = option("unknown", "Licence of the model on its card, as the Hub names it, such as mit.")


@section("precision and invocation")
class SystemOptions:
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None, "Precision of the network (default: what `accelerate launch` says, else no); noise stays float32."
    )
    allow_tf32: bool = option(False, "Allow TF32 matrix products on GPUs that have them.")
    compile: bool = option(False, "Compile the network before the first step, which takes minutes once.")
    gradient_checkpointing: bool = option(
        False,
        "Keep only the inputs of each block and compute the rest again for the gradient: less memory, slower steps.",
        may_change=True,
        on_card=False,
    )
    profile: int | None = option(
        None, "Record so many steps after the first ten: profile.json, a trace, and profile.txt.", POSITIVE, saved=False
    )
    dry_run: bool = option(False, "Print the configuration and the audit against the paper, then stop.", saved=False)


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
    """Return flags over the YAML file over the defaults; `digits` is the file if the flags name neither it nor data."""
    arguments = in_own_names(with_first_word(arguments), ConditionalConfig)
    named = value_of_flag(arguments, "config", "the name of a YAML file")
    names_data = names_flag(arguments, "dataset_name") or names_flag(arguments, "train_data_dir")
    file = digits if named is None and not names_data else named
    from_file = read_config_file(Path(file).expanduser(), ConditionalConfig) if file else {}
    if "config" in from_file:
        raise UserError(f"--config {file}: names another file, {from_file['config'][0]}; name that one alone")
    description = f"The defaults are the paper's. Without data and without a file, configs/{digits.name} is used."
    usage = "%(prog)s [DATA | FILE.yaml] [--flag value ...]"
    typed = {name for name in facts_of(ConditionalConfig) if is_given(arguments, name)}
    with naming_the_file(file, from_file.keys() - typed):
        for name in facts_of(ConditioningOptions):
            if kind is TrainingConfig and name in typed:
                raise UserError(f"{name} is an option of train_conditional.py")
            if kind is TrainingConfig and name in from_file:
                raise UserError(f"--{name}: is an option of train_conditional.py")
        config = parse_options(kind, arguments, description=description, usage=usage, from_file=from_file)
        if is_own_sampler(config.timestep_sampler) and not names_flag(arguments, "timestep_sampler"):
            raise UserError(
                f"--config {named}: names code, {config.timestep_sampler}, which is only run if you name it: if you "
                f"trust that file, add --timestep_sampler {config.timestep_sampler}"
            )
        if any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")):
            config.overwrite = False  # it was done when the job was started for the first time
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
            raise UserError(f"{word} and --{other} are two ways to say one thing: give one of them")
    return [f"--{name}={word}", *arguments[1:]]


def holds_photos(path: Path) -> bool:
    """Tell a folder of image files from one that `datasets` or somebody else wrote as tables."""
    tables = (file for pattern in ("*", "*/*") for kind in (".parquet", ".arrow") for file in path.glob(pattern + kind))
    return path.is_dir() and all(file.stem == "metadata" for file in tables)


@contextmanager
def naming_the_file(file: Path | str | None, names: Collection[str]) -> Iterator[None]:
    """Say of a mistake in an option of the file, and not of the command line, that it is there."""
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
    check_timestep_sampler(config)
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
    """Tell a class in a file of the user's, which is code, from a name of the registry."""
    return ".py:" in name


def check_timestep_sampler(config: TrainingConfig) -> None:
    """Raise unless it is in the registry or in a file of the user's, which is read when it is used."""
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
        raise UserError("--caption_column and --caption_template are two ways to say one thing: give one of them")


def settings_of(config: TrainingConfig) -> dict[str, object]:
    """Return what makes a run the run it is, for a checkpoint to remember."""
    general = (
        "timestep_sampler", "timestep_sampler_options", "stratified", "loss_weighting", "loss", "input_perturbation",
    )  # fmt: skip
    used = (f"{config.timestep_sampler}_", f"{config.loss_weighting}_")
    idle = [name for name in facts_of(TimestepOptions) if name not in general and not name.startswith(used)]
    settings = values_of(config, lambda facts: facts.saved and not facts.may_change)
    settings = {name: value for name, value in settings.items() if name not in idle}
    if config.lr_scheduler not in ("constant", "constant_with_warmup"):
        settings["max_train_steps"] = config.max_train_steps  # the learning rate falls towards the end
    return settings


def as_yaml(config: TrainingConfig) -> str:
    """Return the configuration as a file whose `--config` repeats the run, without what is of this invocation alone."""
    return yaml.safe_dump(values_of(config, lambda facts: facts.saved), sort_keys=False)


@dataclass(frozen=True)
class BatchSizes:
    """Images per device and forward pass, forward passes per step, images per step."""

    per_device: int
    accumulation: int
    total: int


def resolve_batch_sizes(config: TrainingConfig, num_processes: int) -> BatchSizes:
    """Return the three numbers: what is given of them, and what follows for the others."""
    per_device, accumulation = config.train_batch_size, config.gradient_accumulation_steps
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

    The total batch must stay; how it is divided follows from it and the number of processes, except that a device
    which could not take its share at once may not be able to elsewhere.
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
