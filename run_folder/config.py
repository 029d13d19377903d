"""What a run is told: one dataclass that is the source of the flags, the help and the YAML keys.

The defaults are the paper's (Ho et al. 2020, CIFAR-10), the names are those of the diffusers examples.
Nothing heavy is imported here, so that `--help` answers at once.
"""

import difflib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import yaml

from common.errors import UserError
from common.files import write_atomically
from common.options import (
    check_below_one,
    check_not_negative,
    check_positive,
    check_values,
    lists_of,
    names_flag,
    names_of,
    option,
    parse_options,
    read_config_file,
    value_of_flag,
)

PAPER_STEPS = 800_000
PAPER_BATCH_SIZE = 128

# The registry in schedulers/timesteps.py, by what they train, without importing it.
SAME_OBJECTIVE = ("uniform", "stratified", "loss_second_moment")
CHANGED_OBJECTIVE = ("logit_normal", "edm", "speed", "ats")


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


@dataclass
class DataOptions:
    _argument_group_name = "data"

    dataset_name: str | None = option(
        None,
        "Hub id or local folder of a data set, or 'digits' (embedded, and the default when no data is named).",
    )
    dataset_config_name: str | None = option(None, "Configuration of the data set, if it has several.")
    train_data_dir: str | None = option(None, "Folder of images, instead of dataset_name.")
    image_column: str | None = option(None, "Column with the images; found by itself if there is only one.")
    max_train_samples: int | None = option(None, "Use only so many images, evenly spread over the data set.")
    cache_dir: str | None = option(
        None, "Folder for downloaded and decoded data (default: that of datasets, and ~/.cache/exact-ddpm)."
    )
    resolution: int = option(32, "Size of the images; others are resized, the shorter side to this.")
    channels: Literal["auto", "1", "3", "4"] = option("auto", "1 grey, 3 RGB, 4 RGBA; auto: 1 if all are grey.")
    center_crop: bool = option(False, "Crop at the centre instead of at random.")
    random_flip: bool = option(True, "Flip images horizontally at random.")
    dataloader_num_workers: int | None = option(
        None, "Processes that decode images (default: min(4, usable cores / processes on this machine))."
    )
    in_memory_limit_gb: float = option(8.0, "Decoded data up to this size is held in memory, more is streamed.")
    on_bad_image: Literal["fail", "skip"] = option("fail", "What to do with a file that cannot be decoded.")


@dataclass
class ConditioningOptions:
    """Of train_conditional.py alone."""

    _argument_group_name = "condition"

    condition: Literal["class", "text"] = option("class", "What the network is told of each image.")
    label_column: str | None = option(
        None, "Column with the classes; found by itself if there is only one, or by the folders the images are in."
    )
    caption_column: str | None = option(
        None, "Column with one or several captions of each image; found by itself. Without one, classes are described."
    )
    caption_template: list[str] = option(
        [],
        "One or several captions made of the class, as in 'a photo of a {class}', which is also the default when there "
        "are no captions; which of them an image gets is drawn at every step.",
    )
    text_encoder: str = option(
        "openai/clip-vit-base-patch32",
        "Frozen encoder of the captions: an id on the Hub, a folder, or all-MiniLM-L6-v2, which comes as a package.",
    )
    condition_dropout: float = option(0.1, "Share of the images without a condition, for classifier-free guidance.")
    balance: bool = option(False, "Show all classes equally often, however many images they have.")
    validation_prompts: list[str] = option([], "Prompts of the sample grids (default: a caption of each class).")


@dataclass
class NetworkOptions:
    _argument_group_name = "network"

    model_config_name_or_path: str | None = option(
        None,
        "UNet2DModel configuration instead of the paper's network for this resolution; reading text, its attention is "
        "to the words too. A UNet2DConditionModel's also reads text.",
    )
    dropout: float = option(0.1, "Dropout in the residual blocks of the paper's network.")


@dataclass
class DiffusionOptions:
    _argument_group_name = "diffusion"

    ddpm_num_steps: int = option(1000, "T, the number of diffusion steps.")
    ddpm_beta_schedule: Literal[
        "linear", "quadratic", "scaled_linear", "cosine", "squaredcos_cap_v2", "sigmoid", "constant",
        "warmup10", "warmup50",
    ] = option("linear", "Beta schedule, by its name in papers or in diffusers.")  # fmt: skip
    variance_type: Literal["fixed_large", "fixed_small"] = option(
        "fixed_large", "Variance of the ancestral steps: beta_t or the posterior's."
    )
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = option("epsilon", "What the network predicts.")


@dataclass
class TimestepOptions:
    """An option that belongs to one sampler or weighting bears its name: `edm_mean` is the `mean` of `edm`."""

    _argument_group_name = "timestep samplers and loss weights"

    timestep_sampler: str = option(
        "uniform",
        f"Which timesteps a step trains on. The paper's objective: {listed(SAME_OBJECTIVE)}. Another objective: "
        f"{listed(CHANGED_OBJECTIVE)}. Or a class in a file of your own: my_file.py:MySampler.",
    )
    stratified: bool = option(False, "Spread each batch evenly over the sampler's density, whatever that is.")
    loss_weighting: Literal["none", "min_snr", "soft_min_snr", "p2", "edm", "speed"] = option(
        "none", "Weight of the loss at each timestep; all but none change the objective."
    )
    loss: Literal["l2", "l1", "huber"] = option(
        "l2", "Error of a pixel: squared, absolute, or Huber's, which is squared up to 1 and linear beyond."
    )
    timestep_sampler_options: list[str] = option(
        [], "Arguments of a timestep sampler in a file of your own, as in width=3 name=x."
    )
    logit_normal_mean: float = option(0.0, "Mean of logit(t / T).")
    logit_normal_std: float = option(1.0, "Standard deviation of logit(t / T).")
    edm_mean: float = option(-1.2, "Mean of ln sigma of the sampler.")
    edm_std: float = option(1.2, "Standard deviation of ln sigma of the sampler.")
    edm_sigma_data: float = option(0.5, "sigma_data of the weighting.")
    speed_tau: int | None = option(None, "From this timestep on steps count as trivial (default: 0.7 T, the paper's).")
    speed_k: float = option(5.0, "How much likelier the sampler draws the timesteps below tau.")
    speed_lambda: float = option(0.6, "Weights below tau lie between 1 - lambda and lambda.")
    loss_second_moment_history: int = option(10, "Losses remembered of every timestep.")
    loss_second_moment_uniform: float = option(0.001, "Share of uniform draws.")
    ats_interval: int = option(40, "Steps between updates of the policy.")
    ats_grid: int = option(50, "Timesteps whose losses are compared before and after an update.")
    ats_queue: int = option(20, "Comparisons remembered for the choice of timesteps.")
    ats_features: int = option(3, "Timesteps chosen for the reward.")
    ats_entropy: float = option(0.01, "Weight of the policy's entropy.")
    ats_learning_rate: float = option(0.01, "Learning rate of the policy.")
    min_snr_gamma: float = option(5.0, "The signal-to-noise ratio is cut off here.", aliases=["--snr_gamma"])
    soft_min_snr_gamma: float = option(4.0, "The signal-to-noise ratio saturates here.")
    p2_gamma: float = option(1.0, "Exponent of 1 / (k + SNR).")
    p2_k: float = option(1.0, "k of 1 / (k + SNR).")


@dataclass
class OptimizerOptions:
    _argument_group_name = "optimiser"

    train_batch_size: int | None = option(None, "Images per device and forward pass.")
    total_batch_size: int | None = option(
        None,
        "Images per step: train_batch_size x processes x gradient_accumulation_steps. What is not given follows "
        f"from what is; nothing given means the paper's {PAPER_BATCH_SIZE}.",
    )
    gradient_accumulation_steps: int | None = option(None, "Forward passes per step.")
    learning_rate: float = option(2e-4, "Learning rate after the warm-up.")
    lr_scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = option("constant_with_warmup", "Learning rate over the steps, as diffusers defines it.")
    lr_warmup_steps: int = option(5000, "Steps of the warm-up, whatever the number of processes.")
    adam_beta1: float = option(0.9, "Adam's beta1.")
    adam_beta2: float = option(0.999, "Adam's beta2.")
    adam_weight_decay: float = option(0.0, "Decoupled weight decay.")
    adam_epsilon: float = option(1e-8, "Adam's epsilon.")
    max_grad_norm: float = option(1.0, "Gradients are clipped at this norm.")


@dataclass
class EMAOptions:
    _argument_group_name = "moving average of the weights"

    use_ema: bool = option(True, "Keep the moving average; samples and the final model use it.")
    ema_max_decay: float = option(0.9999, "Decay: a copy at the first update, constant from then on.")
    ema_warmup: bool = option(False, "Let the decay rise as 1 - (1 + step / inv_gamma)^-power instead.")
    ema_inv_gamma: float = option(1.0, "inv_gamma of --ema_warmup.")
    ema_power: float = option(3 / 4, "power of --ema_warmup.")


@dataclass
class LengthOptions:
    _argument_group_name = "length and seed"

    num_epochs: int | None = option(None, "Passes over the data.")
    max_train_steps: int | None = option(
        None, f"Optimiser steps; comes before num_epochs. Neither given: the paper's {PAPER_STEPS}."
    )
    max_train_seconds: float | None = option(
        None, "Stop when the run has trained this long in all (sampling and saving do not count)."
    )
    seed: int = option(0, "All randomness is a function of this, the step and the position in the batch.")


@dataclass
class OutputOptions:
    _argument_group_name = "output"

    output_dir: str = option("runs/ddpm", "The run: configuration, metrics, samples, checkpoints, final pipeline.")
    overwrite_output_dir: bool = option(False, "Delete a run that is already there.")
    resume_from_checkpoint: str = option(
        "latest", "A checkpoint folder, 'latest' of this run if it has one, or 'none' to start anew."
    )
    checkpointing_steps: int = option(5000, "Steps between checkpoints; one more is made at the end.")
    checkpoints_total_limit: int = option(3, "Checkpoints kept, besides those of --keep_every.")
    keep_every: int | None = option(None, "Keep the checkpoints of these multiples of steps for ever.")
    save_images_steps: int = option(5000, "Steps between sample grids; one more is drawn at the end.")
    save_images_epochs: int | None = option(None, "Epochs between sample grids instead.")
    save_model_epochs: int | None = option(None, "Epochs between updates of the pipeline in output_dir.")
    eval_batch_size: int = option(16, "Images in a sample grid.")
    ddpm_num_inference_steps: int = option(1000, "Denoising steps of the sample grids.")
    logger: Literal["tensorboard", "wandb", "none"] = option(
        "tensorboard", "Where curves go besides metrics.jsonl.", aliases=["--report_to"]
    )
    logging_dir: str = option("logs", "Folder of the curves, inside output_dir.")
    logging_steps: int = option(50, "Steps between lines of metrics.")
    tracker_project_name: str = option("exact-ddpm", "Project of the curves in wandb.")


@dataclass
class HubOptions:
    _argument_group_name = "hub"

    push_to_hub: bool = option(False, "Upload the final pipeline, card, samples and curves; never checkpoints.")
    hub_model_id: str | None = option(None, "Repository to push to (default: the name of output_dir).")
    hub_token: str | None = option(None, "Token for the push (default: that of `hf auth login`); never stored.")
    hub_private_repo: bool = option(False, "Create the repository as a private one.")


@dataclass
class SystemOptions:
    _argument_group_name = "precision and invocation"

    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None,
        "Precision of the network (default: what `accelerate launch` says, else no); noise stays float32.",
    )
    allow_tf32: bool = option(False, "Allow TF32 matrix products on GPUs that have them.")
    dry_run: bool = option(False, "Print the configuration and the audit against the paper, then stop.")
    config: str | None = option(None, "YAML file with any of these options; flags override it.")


SECTIONS = (
    DataOptions,
    NetworkOptions,
    DiffusionOptions,
    TimestepOptions,
    OptimizerOptions,
    EMAOptions,
    LengthOptions,
    OutputOptions,
    HubOptions,
    SystemOptions,
)
CONDITIONAL_SECTIONS = (DataOptions, ConditioningOptions, *SECTIONS[1:])


@dataclass
class TrainingConfig(
    SystemOptions,
    HubOptions,
    OutputOptions,
    LengthOptions,
    EMAOptions,
    OptimizerOptions,
    TimestepOptions,
    DiffusionOptions,
    NetworkOptions,
    DataOptions,
):
    """All options of a training run."""


@dataclass
class ConditionalConfig(ConditioningOptions, TrainingConfig):
    """All options of a training run with a condition."""


CONFIGS = Path(__file__).parent.parent / "configs"

# What belongs to one invocation and not to the run, or must not be written down.
NOT_SAVED = """
    config dry_run overwrite_output_dir resume_from_checkpoint output_dir cache_dir
    push_to_hub hub_model_id hub_token hub_private_repo
""".split()

# Two ways to say one thing: given as a flag, one replaces the other in the file.
RIVALS = (
    ("dataset_name", "train_data_dir"),
    ("max_train_steps", "num_epochs"),
    ("save_images_steps", "save_images_epochs"),
)

# What fingers type when they mean one of ours.
HABITS = {
    "batch_size": "train_batch_size",
    "data": "dataset_name",
    "dataset": "dataset_name",
    "data_dir": "train_data_dir",
    "epochs": "num_epochs",
    "steps": "max_train_steps",
    "lr": "learning_rate",
    "output": "output_dir",
    "image_size": "resolution",
    "size": "resolution",
    "ema": "use_ema",
    "no_flip": "no_random_flip",
    "resume": "resume_from_checkpoint",
    "class_conditional": "condition",
    "prompt": "validation_prompts",
    "validation_prompt": "validation_prompts",
    "cfg_dropout": "condition_dropout",
}

POSITIVE = """
    resolution ddpm_num_steps train_batch_size total_batch_size gradient_accumulation_steps learning_rate max_grad_norm
    num_epochs max_train_steps max_train_seconds max_train_samples checkpointing_steps checkpoints_total_limit
    keep_every save_images_steps save_images_epochs save_model_epochs eval_batch_size ddpm_num_inference_steps
    logging_steps adam_epsilon ema_inv_gamma ema_power logit_normal_std edm_std edm_sigma_data speed_tau speed_k
    loss_second_moment_history loss_second_moment_uniform ats_interval ats_grid ats_queue ats_features
    ats_learning_rate min_snr_gamma soft_min_snr_gamma p2_k
""".split()
NOT_NEGATIVE = """
    lr_warmup_steps adam_weight_decay dataloader_num_workers seed in_memory_limit_gb p2_gamma ats_entropy
""".split()
BELOW_ONE = "dropout adam_beta1 adam_beta2 ema_max_decay".split()


def parse_config(arguments: list[str]) -> TrainingConfig:
    """The options of train_unconditional.py, `validate`d."""
    config = TrainingConfig(**parse_sections(SECTIONS, arguments, CONFIGS / "digits.yaml"))
    validate(config)
    return config


def parse_conditional_config(arguments: list[str]) -> ConditionalConfig:
    """The options of train_conditional.py, `validate`d."""
    condition = value_of_flag(arguments, "condition", "class or text")
    digits = CONFIGS / ("digits_text.yaml" if condition == "text" else "digits_class.yaml")
    config = ConditionalConfig(**parse_sections(CONDITIONAL_SECTIONS, arguments, digits))
    validate(config)
    validate_condition(config)
    return config


def parse_sections(sections: Sequence[type], arguments: list[str], digits: Path) -> dict[str, object]:
    """Flags over the YAML file over the defaults; an unknown name is an error that suggests the nearest.

    `digits` is the file that is read when the flags name neither a file nor data.
    """
    named = value_of_flag(arguments, "config", "the name of a YAML file")
    names_data = names_flag(arguments, "dataset_name") or names_flag(arguments, "train_data_dir")
    config_file = str(digits) if named is None and not names_data else named
    names = [*names_of(CONDITIONAL_SECTIONS), "report_to"]
    lists = lists_of(CONDITIONAL_SECTIONS)
    from_file = read_config_file(Path(config_file), names, HABITS, lists) if config_file else []
    for name in names_of(CONDITIONAL_SECTIONS):
        if name not in names_of(sections) and names_flag([*from_file, *arguments], name):
            raise UserError(f"{name} is an option of train_conditional.py{f' (in {named})' if named else ''}")
    for pair in RIVALS:
        for flag, rival in (pair, pair[::-1]):
            if names_flag(arguments, flag) and not names_flag(arguments, rival):
                from_file = [given for given in from_file if not given.startswith(f"--{rival}=")]
    return parse_options(
        sections,
        arguments,
        description=f"The defaults are the paper's. Without data and without a file, configs/{digits.name} is used.",
        from_file=from_file,
        habits=HABITS,
    )


def validate(config: TrainingConfig) -> None:
    """Values that no run can have."""
    check_positive(config, POSITIVE)
    check_not_negative(config, NOT_NEGATIVE)
    check_below_one(config, BELOW_ONE)
    if config.ddpm_num_inference_steps > config.ddpm_num_steps:
        raise UserError(
            f"--ddpm_num_inference_steps {config.ddpm_num_inference_steps}: more than the "
            f"{config.ddpm_num_steps} steps of the diffusion (--ddpm_num_steps)"
        )
    check_values(config, ["speed_lambda"], lambda value: 0 <= value <= 1, "from 0 to 1")
    check_timestep_sampler(config)
    if not config.output_dir.strip():
        raise UserError("--output_dir is empty: name a folder for the run")
    if config.logger == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError("--logger wandb: wandb is not installed; `pip install wandb` or use tensorboard")
    if config.logger == "wandb" and config.hub_token is not None:
        raise UserError(
            "--hub_token with --logger wandb would show the token in the run's page: use `hf auth login` instead"
        )


def check_timestep_sampler(config: TrainingConfig) -> None:
    """A name of the registry, or a file of the user's; what is in it is looked at when it is used."""
    names, name = [*SAME_OBJECTIVE, *CHANGED_OBJECTIVE], config.timestep_sampler
    if config.timestep_sampler_options and not names_own_file(name):
        raise UserError(
            f"--timestep_sampler_options {' '.join(config.timestep_sampler_options)}: are for a sampler in a file of "
            f"your own; those of {name} are flags, --{name}_..."
        )
    if names_own_file(name):
        path = Path(name.rpartition(":")[0])
        if not path.is_file():
            raise UserError(f"--timestep_sampler {name}: there is no file {path}")
    elif name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"must be one of {listed(names)}, or my_file.py:MySampler"
        raise UserError(f"--timestep_sampler {name}: {hint}")


def names_own_file(timestep_sampler: str) -> bool:
    return ".py:" in timestep_sampler


def validate_condition(config: ConditionalConfig) -> None:
    """What no condition can be."""
    check_below_one(config, ["condition_dropout"])
    for template in config.caption_template:
        if "{class}" not in template:
            raise UserError(f"--caption_template {template!r}: must say where the class comes, as in 'a {{class}}'")
    if config.condition == "class":
        for name in ("caption_column", "caption_template", "validation_prompts"):
            if getattr(config, name):
                raise UserError(f"--{name} is for captions: add --condition text")
    if config.caption_column and config.caption_template:
        raise UserError("--caption_column and --caption_template are two ways to say one thing: give one of them")


# What may change between two parts of a run without making it another run.
HARMLESS = {
    *(entry.name for section in (HubOptions, OutputOptions, LengthOptions) for entry in fields(section)),
    *("cache_dir", "dataloader_num_workers", "in_memory_limit_gb", "on_bad_image", "train_batch_size"),
    *("gradient_accumulation_steps", "config", "dry_run", "validation_prompts"),
    "text_encoder",  # the encoder itself is compared, not the place it was loaded from
} - {"seed"}


def settings_of(config: TrainingConfig) -> dict[str, object]:
    """What makes a run the run it is, for a checkpoint to remember."""
    idle = options_of_others(config)
    settings = {name: value for name, value in asdict(config).items() if name not in HARMLESS and name not in idle}
    if config.lr_scheduler not in ("constant", "constant_with_warmup"):
        settings["max_train_steps"] = config.max_train_steps  # the learning rate falls towards the end
    return settings


def options_of_others(config: TrainingConfig) -> list[str]:
    """The options of the timestep samplers and loss weightings that the run does not use."""
    general = ("timestep_sampler", "stratified", "loss_weighting", "loss", "timestep_sampler_options")
    used = (f"{config.timestep_sampler}_", f"{config.loss_weighting}_")
    names = [entry.name for entry in fields(TimestepOptions) if entry.name not in general]
    return [name for name in names if not name.startswith(used)]


def save_config(config: TrainingConfig, path: Path) -> None:
    """Write it down; `--config` of that file repeats the run."""
    write_atomically(path, as_yaml(config))


def as_yaml(config: TrainingConfig) -> str:
    """The configuration as it would be written in a file, without what is not the run's."""
    values = {name: value for name, value in asdict(config).items() if name not in NOT_SAVED}
    ordered = {
        entry.name: values[entry.name]
        for section in CONDITIONAL_SECTIONS
        for entry in fields(section)
        if entry.name in values
    }
    return yaml.safe_dump(ordered, sort_keys=False)


@dataclass(frozen=True)
class Batch:
    """Images per device and forward pass, forward passes per step, images per step."""

    per_device: int
    accumulation: int
    total: int


def resolve_batch(config: TrainingConfig, num_processes: int) -> Batch:
    """What is given of the three numbers, and what follows for the others."""
    per_device, accumulation = config.train_batch_size, config.gradient_accumulation_steps
    total = config.total_batch_size
    if total is None:
        total = PAPER_BATCH_SIZE if per_device is None else per_device * num_processes * (accumulation or 1)
    if per_device is None:
        per_device = max(1, total // (num_processes * (accumulation or 1)))
    if accumulation is None:
        accumulation = max(1, total // (per_device * num_processes))
    product = per_device * num_processes * accumulation
    if product != total:
        raise UserError(
            f"--total_batch_size {total} is not {per_device} per device (--train_batch_size) x {num_processes} "
            f"process(es) x {accumulation} (--gradient_accumulation_steps) = {product}; change one of them"
        )
    return Batch(per_device, accumulation, total)


def resolve_steps(config: TrainingConfig, steps_per_epoch: int) -> int:
    if config.max_train_steps is not None:
        return config.max_train_steps
    return PAPER_STEPS if config.num_epochs is None else config.num_epochs * steps_per_epoch


def with_resolved(
    config: TrainingConfig, batch: Batch, total_steps: int, channels: int, precision: str
) -> TrainingConfig:
    """The configuration with what it left open filled in, so that it repeats the run on other machines too.

    The total batch is what must stay; how it is divided follows from it and the number of processes, except that a
    device which could not take its share at once may not be able to elsewhere.
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
