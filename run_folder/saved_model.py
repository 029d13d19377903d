"""Saved networks, found by what the user names: a run, checkpoints of it, a pipeline's folder or one on the Hub."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, reason_of_hub, user_errors
from common.files import check_layers, sha256
from common.options import NUM_STEPS, RESOLUTION
from run_folder.checkpoints import (
    CONDITION_FILE,
    MANIFEST,
    NETWORK_FOLDERS,
    PREFIX,
    STATE,
    WEIGHTS,
    InvalidCheckpoint,
    checkpoints,
    read_file,
    step_of,
    verify,
)
from run_folder.config import scheduler_of
from run_folder.ema_length import at_length, combine_snapshots
from run_folder.folder import PIPELINE, RunFolder

if TYPE_CHECKING:
    import torch

    from schedulers.ddpm import ExactDDPMScheduler

logger = logging.getLogger(__name__)

NETWORKS = ("UNet2DModel", "UNet2DConditionModel")
# All that is fetched of a repository: data, and no code. Old pipelines have all files side by side.
FETCHED = ("*.json", "*.txt", "*.model", WEIGHTS, f"unet/{WEIGHTS}", "text_encoder/model.safetensors")
LATENT_MODELS = {"vae", "vqvae", "movq"}  # parts of pipelines whose networks see no images
NOT_HASHED = {"_diffusers_version", "_name_or_path", "_use_default_values"}  # which change no image
RUNS = Path("runs")
TRAIN_FIRST = "train one first, e.g. python train_unconditional.py, or name a model with --model"


@dataclass(frozen=True)
class SavedModel:
    """A network on the disk, with the diffusion that it was trained to undo."""

    name: str  # what the user calls it
    path: Path  # the checkpoint's or the pipeline's folder
    home: Path  # the run's folder, where generated images go by default
    weights: str  # "ema", "raw", "ema-0.05" for an average of that length, or "pipeline" if it is not known which
    sha256: str  # of the weights' file, with the configuration beside it unless a run wrote that
    network_folder: Path
    scheduler_config: dict[str, Any]  # of a DDPMScheduler
    step: int | None = None  # this and the next only for a checkpoint
    train_seconds: float | None = None
    ema_length: float | None = None  # of an average that is made of a run's snapshots
    snapshot_step: int | None = None  # of that average

    @property
    def source(self) -> str:
        """Return the name or path under which others can find the model."""
        return self.name if self.step is None else str(self.path)

    @property
    def label(self) -> str:
        """Return a name for files and lines of the log."""
        return f"{'pipeline' if self.step is None else f'step-{self.step}'}-{self.weights}".removesuffix("-pipeline")

    @cached_property
    def network_config(self) -> dict[str, Any]:
        path = self.network_folder / "config.json"
        with user_errors(f"{path}: cannot be read", OSError, ValueError, RecursionError):
            config = read_file(path.parent, path.name)
        if (name := config.get("_class_name")) not in NETWORKS:  # it may name any class; one is loaded if listed here
            raise UserError(f"{path}: its network is a {name}; {' and '.join(NETWORKS)} are loaded")
        return config

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of the samples."""
        size = self.network_config["sample_size"]
        return self.network_config["in_channels"], *((size, size) if isinstance(size, int) else size)

    @property
    def learns_variance(self) -> bool:
        return self.network_config["out_channels"] == 2 * self.network_config["in_channels"]

    @cached_property
    def condition(self) -> dict[str, Any] | None:
        """Return the description of the condition that the network was trained with."""
        if (self.path / CONDITION_FILE).exists():
            path = self.path / CONDITION_FILE
            with user_errors(f"{path}: does not describe a condition", OSError, ValueError, RecursionError):
                return check_condition(read_file(path.parent, path.name))
        config = self.network_config
        if (
            config.get("_class_name") != "UNet2DModel"
            or config.get("num_class_embeds")
            or config.get("class_embed_type")
        ):
            raise UserError(
                f"{self.name}: its network takes a condition, but there is no {CONDITION_FILE} that describes it; "
                f"models of train_conditional.py have one"
            )
        return None

    @property
    def text_encoder_folders(self) -> tuple[str, str] | None:
        """Return the folders of the text encoder and its tokenizer in the pipeline or the checkpoint's run."""
        folders = [(home / "text_encoder", home / "tokenizer") for home in (self.path, self.path.parent)]
        return next((tuple(map(str, found)) for found in folders if all(map(Path.is_dir, found))), None)

    @cached_property
    def scheduler(self) -> ExactDDPMScheduler:
        from schedulers.ddpm import FIXED_VARIANCES, LEARNED_VARIANCES, ExactDDPMScheduler

        variance_type = self.scheduler_config.get("variance_type")
        # Some variances that pipelines name are not exact here, and diffusers' default is not the paper's: in another
        # project's pipeline the variance may never have been chosen by anybody.
        chosen = self.step is not None or RunFolder(self.path).is_ours
        if not self.learns_variance and not (chosen and variance_type in FIXED_VARIANCES):
            variance_type = "fixed_large"
        where = self.path / STATE if self.step is not None else f"{self.name}: its scheduler_config.json"
        with user_errors(f"{where} cannot be used", Exception):  # whatever stands there
            steps = self.scheduler_config["num_train_timesteps"]
            if type(steps) is not int or not NUM_STEPS.accepts(steps):
                raise ValueError(f"num_train_timesteps {steps}: must be {NUM_STEPS.wanted}")
            if self.scheduler_config.get("rescale_betas_zero_snr"):
                raise ValueError("its betas are rescaled (rescale_betas_zero_snr), which is not supported")
            if self.scheduler_config.get("thresholding"):
                raise ValueError("it clips samples by dynamic thresholding, which is not supported")
            if self.learns_variance and variance_type not in LEARNED_VARIANCES:
                raise ValueError(f"its network predicts a variance too, but variance_type is {variance_type}")
            scheduler = ExactDDPMScheduler.from_config(self.scheduler_config, variance_type=variance_type)
            if scheduler.ends_without_signal and scheduler.config.prediction_type == "epsilon":
                raise ValueError(
                    "its last x_t holds no signal, so x_0 cannot be recovered from a prediction of epsilon"
                )
            return scheduler

    def load(self, device: torch.device) -> torch.nn.Module:
        """Load the network, ready for inference."""
        import diffusers

        kind = getattr(diffusers, self.network_config["_class_name"])
        # diffusers raises whatever a wrong file runs into. Other formats of weights can hold code.
        with user_errors(f"{self.network_folder}: cannot be loaded", Exception):
            check_layers(self.network_config)
            network, found = kind.from_pretrained(self.network_folder, use_safetensors=True, output_loading_info=True)
            if missing := found["missing_keys"]:
                raise ValueError(f"{WEIGHTS} has no {sorted(missing)[0]}")
            if self.ema_length is not None:
                network.load_state_dict(combine_snapshots(self.home, self.snapshot_step, self.ema_length))
        return network.to(device).eval()

    def check(self) -> None:
        """Raise if no images can be made with the model; its weights are checked only when they are loaded."""
        config, where = self.network_config, f"{self.network_folder / 'config.json'}"
        channels, size = config.get("in_channels"), config.get("sample_size")
        if type(channels) is not int or config.get("out_channels") not in (channels, 2 * channels):
            raise UserError(
                f"{where}: its network has {channels} channels in and {config.get('out_channels')} out; it must have "
                f"as many, or twice as many with a variance"
            )
        sides = size if isinstance(size, list) else [size, size]
        known = [type(side) for side in sides] == [int, int] and all(map(RESOLUTION.accepts, sides))
        if not known or channels not in (1, 3, 4):
            raise UserError(
                f"{where}: its network does not make images of a known size, {RESOLUTION.wanted}, with 1, 3 or 4 "
                f"channels, but of {size} with {channels}"
            )
        if (condition := self.condition) is not None:
            of_text = condition["condition"] == "text"
            rows = None if of_text else len(condition["class_names"]) + 1  # the last stands for no class
            if of_text != (config["_class_name"] == "UNet2DConditionModel") or config.get("num_class_embeds") != rows:
                raise UserError(f"{where}: its network does not take the condition that {CONDITION_FILE} describes")
        _ = self.scheduler


def check_condition(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a condition; raise `ValueError` unless it says all that drawing images needs."""
    lists = {"class": ("class_names",), "text": ("prompts", "vocabulary")}
    kind = description.get("condition")
    if kind not in lists:
        raise ValueError(f"condition {kind!r}: must be one of {', '.join(lists)}")
    for name in lists[kind]:
        value = description.get(name)
        words = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not words or not (value or name == "vocabulary"):
            raise ValueError(f"{name}: must be a list of words")
    for name in ("text_encoder", "encoder") if kind == "text" else ():
        if not isinstance(description.get(name), str):
            raise ValueError(f"{name}: must be a word")
    if not isinstance(description.get("dropout"), int | float):
        raise ValueError("dropout: must be a number")
    return description


def find_models(
    model: str | None, steps: list[str], weights: str | None, lengths: Iterable[float] = ()
) -> list[SavedModel]:
    """Return the models that --model, --checkpoints and --weights name; without them the newest of the latest run.

    The moving average is taken where there is one, unless `weights` says otherwise; of each of the `lengths` if there
    are any.
    """
    models = _find_models(model, steps, weights)
    if lengths:
        models = [at_length(found, length) for found in models for length in lengths]
    for found in models:
        replace(found).check()  # a copy: what it builds need not travel to other processes
    return models


def _find_models(model: str | None, steps: list[str], weights: str | None) -> list[SavedModel]:
    folder = latest_run() if model is None else _folder_of(model)
    if (folder / MANIFEST).exists() or step_of(folder) is not None:
        if steps:
            raise UserError(f"--checkpoints {' '.join(steps)}: --model {model} is a checkpoint; name its run instead")
        return [_named_checkpoint(folder, weights, f"--model {model}")]
    if steps:
        return _checkpoints_at(folder, steps, weights)
    if newest := next(_valid(reversed(checkpoints(folder)), weights), None):
        return [newest]
    if not RunFolder(folder).pipeline_file.exists():
        raise UserError(
            f"{folder} is not a model: it has no valid {PREFIX}<step> folder, as a run has, and no {PIPELINE}, as a "
            f"pipeline has"
        )
    return [_pipeline(folder, str(folder) if model is None else model, weights)]


def latest_run() -> Path:
    """Return the run under runs/ that has written metrics last."""
    runs = [RunFolder(path) for depth in ("*", "*/*") for path in RUNS.glob(depth)]
    found = [run for run in runs if run.metrics_file.exists() and (checkpoints(run.path) or run.pipeline_file.exists())]
    if not found:
        raise UserError(f"there is no run with a checkpoint under {RUNS.resolve()}: {TRAIN_FIRST}")
    return max(found, key=lambda run: run.metrics_file.stat().st_mtime).path


def _folder_of(model: str) -> Path:
    """Return the local folder of a model, fetched if it is on the Hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path if path.name not in ("", "..") else path.resolve()
    if path.exists():
        raise UserError(f"--model {model}: is a file; name the folder of a run, a checkpoint or a pipeline")
    if RunFolder(path.parent).is_run and step_of(path) is not None:
        there = ", ".join(str(step_of(checkpoint)) for checkpoint in checkpoints(path.parent)) or "none"
        raise UserError(f"--model {model}: {path.parent} has no {path.name}; its checkpoints: {there}")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"--model {model}: there is no such folder; {TRAIN_FIRST}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=[*FETCHED]))
    except Exception as error:  # of the Hub, of the network, or of a repository that holds something else
        raise UserError(
            f"--model {model}: there is no such folder, nor could it be loaded from the Hub ({reason_of_hub(error)})"
        ) from error


def _checkpoints_at(run: Path, steps: list[str], weights: str | None) -> list[SavedModel]:
    """Return the checkpoints of a run by their steps, or every valid one, oldest first."""
    folder_at = {step_of(path): path for path in checkpoints(run)}
    listed = ", ".join(map(str, folder_at)) or "none"
    if "all" in steps:
        if steps != ["all"]:
            raise UserError(f"--checkpoints {' '.join(steps)}: 'all' are all there are; leave out one or the other")
        if models := list(_valid(folder_at.values(), weights)):
            return models
        raise UserError(f"--checkpoints all: {run} has no valid checkpoint (there are: {listed})")
    models = {}
    for name in steps:
        step = step_of(name)
        if step not in folder_at:
            raise UserError(f"--checkpoints {name}: {run} has no such checkpoint; it has: {listed}")
        if step in models:
            raise UserError(f"--checkpoints {' '.join(steps)}: step {step} is given twice")
        models[step] = _named_checkpoint(folder_at[step], weights, f"--checkpoints {name}")
    return [models[step] for step in sorted(models)]


def _valid(folders: Iterable[Path], weights: str | None) -> Iterator[SavedModel]:
    for folder in folders:
        try:
            yield read_checkpoint(folder, weights)
        except InvalidCheckpoint as error:
            logger.warning("%s is left out: %s", folder, error)


def _named_checkpoint(folder: Path, weights: str | None, flag: str) -> SavedModel:
    try:
        return read_checkpoint(folder, weights)
    except InvalidCheckpoint as error:
        raise UserError(f"{flag}: {folder} is not a valid checkpoint: {error}") from error


def read_checkpoint(folder: Path, weights: str | None) -> SavedModel:
    """Return the model of a checkpoint, after verifying the files that it needs."""
    from schedulers.betas import BETA_END, BETA_START

    if weights is None:
        weights = "ema" if (folder / NETWORK_FOLDERS["ema"]).exists() else "raw"
    network = NETWORK_FOLDERS[weights]
    if weights == "ema" and (folder / MANIFEST).exists() and not (folder / network).exists():
        raise UserError(f"--weights ema: {folder} has none, it was trained without the moving average; use raw")
    parts = (f"{network}/{WEIGHTS}", f"{network}/config.json", STATE)
    hashes = verify(folder, (*parts, CONDITION_FILE) if (folder / CONDITION_FILE).exists() else parts)
    # Whatever stands there: it has the hash that somebody wrote.
    with user_errors(f"{folder / STATE}: cannot be used", Exception):
        numbers = read_file(folder, STATE)
        settings = {"beta_start": BETA_START, "beta_end": BETA_END, **numbers["settings"]}  # older ones have neither
        return SavedModel(
            name=folder.name,
            path=folder,
            home=folder.parent,
            step=int(numbers["step"]),
            weights=weights,
            train_seconds=float(numbers["train_seconds"]),
            sha256=hashes[f"{network}/{WEIGHTS}"],
            network_folder=folder / network,
            scheduler_config=dict(scheduler_of(settings).config),
        )


def _pipeline(folder: Path, name: str, weights: str | None) -> SavedModel:
    """Return the model in a folder that a DDPMPipeline was saved in; old ones have all files side by side."""
    from diffusers import DDPMScheduler

    from schedulers.ddpm import LOG_VARIANCE

    network, scheduler = (part if part.is_dir() else folder for part in (folder / "unet", folder / "scheduler"))
    run = RunFolder(folder)
    # A run's own pipeline holds the moving average if the run kept one.
    held = ("ema" if run.read_config().use_ema else "raw") if run.is_run else "pipeline"
    if weights not in (None, held):
        what = "one set of weights" if held == "pipeline" else f"the {held} weights"
        raise UserError(f"--weights {weights}: {name} is a pipeline and holds only {what}")
    with user_errors(f"{folder} is not a whole pipeline", OSError, ValueError, RecursionError):
        network_config = read_file(network, "config.json")
        scheduler_config = read_file(scheduler, "scheduler_config.json")
    weights_file = network / WEIGHTS
    if not weights_file.is_file():
        others = ", ".join(path.name for path in sorted(network.glob("diffusion_pytorch_model*")))
        found = f", only {others}, which is not read: pickles can hold code" if others else ""
        raise UserError(f"{folder} is not a whole pipeline (it has no {WEIGHTS}{found})")
    if on_latents := sorted(LATENT_MODELS & components_of(folder)):
        raise UserError(f"{name}: works on the latents of another network ({on_latents[0]}), not on images")
    if "num_train_timesteps" not in scheduler_config or "beta_schedule" not in scheduler_config:
        raise UserError(f"{name}: its scheduler, {scheduler_config.get('_class_name')}, is not one of a DDPM")
    channels = [network_config.get(name) for name in ("in_channels", "out_channels")]
    learned = scheduler_config.get("variance_type") == "learned" and channels[0] != channels[1]
    if learned and not str(scheduler_config.get("prediction_type")).endswith(LOG_VARIANCE):
        raise UserError(f"{name}: its network predicts the variance itself (variance_type learned), not its logarithm")
    known = inspect.signature(DDPMScheduler.__init__).parameters  # the configuration may be of another class
    return SavedModel(
        name=name,
        path=folder,
        home=folder if Path(name).expanduser().is_dir() else RUNS / name.replace("/", "--"),
        weights=held,
        sha256=sha256(weights_file) if run.is_run else digest_of(weights_file, network_config, scheduler_config),
        network_folder=network,
        scheduler_config={name: value for name, value in scheduler_config.items() if name in known},
    )


def components_of(folder: Path) -> set[str]:
    """Return what a pipeline is made of; old ones do not say."""
    path = folder / "model_index.json"
    with user_errors(f"{path}: cannot be read", OSError, ValueError, RecursionError):
        parts = read_file(folder, path.name) if path.exists() else {}
        return {name for name, kind in parts.items() if kind != [None, None]}  # what a pipeline can have and has not


def digest_of(weights: Path, *configurations: dict[str, Any]) -> str:
    """Hash weights with their configuration, which somebody may correct: other images come from the same weights."""
    told = [{name: one[name] for name in sorted(one) if name not in NOT_HASHED} for one in configurations]
    return hashlib.sha256(f"{sha256(weights)} {json.dumps(told)}".encode()).hexdigest()
