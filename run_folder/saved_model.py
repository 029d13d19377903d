"""From what a user names to saved networks: a run, checkpoints of it, a pipeline's folder or one on the Hub."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import UserError, first_cause, first_line
from common.files import sha256
from run_folder.checkpoints import (
    MANIFEST,
    PREFIX,
    WEIGHTS,
    InvalidCheckpoint,
    checkpoints,
    step_of,
    verify,
)

if TYPE_CHECKING:
    import torch

    from schedulers.ddpm import ExactDDPMScheduler

logger = logging.getLogger(__name__)

RUNS = Path("runs")
METRICS, CONFIG, PIPELINE = "metrics.jsonl", "config.yaml", "model_index.json"
PARTS = ["*.json", "unet/*", "scheduler/*", "text_encoder/*", "tokenizer/*"]
NETWORK_FOLDERS = {"raw": "unet", "ema": "unet_ema"}
TRAIN_FIRST = "train one first, e.g. python train_unconditional.py, or name a model with --model"


@dataclass(frozen=True)
class SavedModel:
    """A network on the disk, with what it was trained to undo."""

    name: str  # what the user calls it
    path: Path  # the checkpoint's or the pipeline's folder
    home: Path  # where what is made from it goes by default: the run's folder
    step: int | None
    weights: str  # "ema", "raw", or "pipeline" when nothing tells
    train_seconds: float | None
    sha256: str  # of the weights' file
    network_folder: Path
    scheduler_config: dict[str, Any]  # of a DDPMScheduler

    @property
    def source(self) -> str:
        """Where somebody else would find it."""
        return self.name if self.step is None else str(self.path)

    @property
    def label(self) -> str:
        """For names of files and lines of the log."""
        return f"{'pipeline' if self.step is None else f'step-{self.step}'}-{self.weights}".removesuffix("-pipeline")

    @cached_property
    def network_config(self) -> dict[str, Any]:
        return json.loads((self.network_folder / "config.json").read_text(encoding="utf-8"))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the samples."""
        size = self.network_config["sample_size"]
        height, width = (size, size) if isinstance(size, int) else size
        return self.network_config["in_channels"], height, width

    @cached_property
    def scheduler(self) -> ExactDDPMScheduler:
        from schedulers.ddpm import ExactDDPMScheduler

        # The variance is a choice of the sampling method. Some that pipelines name are not exact here.
        return ExactDDPMScheduler.from_config({**self.scheduler_config, "variance_type": "fixed_large"})

    def load(self, device: torch.device) -> torch.nn.Module:
        """The network, ready for inference."""
        import diffusers

        try:
            network_class = getattr(diffusers, self.network_config["_class_name"])
            network = network_class.from_pretrained(self.network_folder)
        except Exception as error:  # diffusers raises whatever a wrong file runs into
            raise UserError(f"{self.network_folder}: cannot be loaded ({first_line(error)})") from error
        return network.to(device).eval()


def find_models(model: str | None, steps: list[str], weights: str | None) -> list[SavedModel]:
    """The models that --model, --checkpoints and --weights name; without them the newest of the latest run.

    The moving average is taken where there is one, unless `weights` says otherwise.
    """
    folder = latest_run() if model is None else _folder(model)
    if _is_checkpoint(folder):
        if steps:
            raise UserError(f"--checkpoints {' '.join(steps)}: --model {model} is a checkpoint; name its run instead")
        return [_checkpoint(folder, weights, f"--model {model}")]
    if steps:
        return _chosen(folder, steps, weights)
    for checkpoint in reversed(checkpoints(folder)):
        try:
            return [_read_checkpoint(checkpoint, weights)]
        except InvalidCheckpoint as error:
            logger.warning("%s is left out: %s", checkpoint, error)
    if not (folder / PIPELINE).exists():
        raise UserError(
            f"{folder} is not a model: it has no valid {PREFIX}<step> folder, as a run has, and no {PIPELINE}, as a "
            f"pipeline has"
        )
    return [_pipeline(folder, folder.name if model is None else model, weights)]


def latest_run() -> Path:
    """The run under runs/ that has written metrics last."""
    found = [path for depth in ("*", "*/*") for path in RUNS.glob(f"{depth}/{METRICS}") if _has_model(path.parent)]
    if not found:
        raise UserError(f"there is no run with a checkpoint under {RUNS.resolve()}: {TRAIN_FIRST}")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _has_model(run: Path) -> bool:
    return bool(checkpoints(run)) or (run / PIPELINE).exists()


def _folder(model: str) -> Path:
    """The local folder of a model, fetched if it is on the Hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path if path.name not in ("", "..") else path.resolve()
    if path.exists():
        raise UserError(f"--model {model}: is a file; name the folder of a run, a checkpoint or a pipeline")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"--model {model}: there is no such folder; {TRAIN_FIRST}")
    from diffusers import DiffusionPipeline
    from huggingface_hub import snapshot_download

    try:
        if isinstance(DiffusionPipeline.load_config(model)["_class_name"], str):
            return Path(DiffusionPipeline.download(model))
        # It names a class of its own, such as ours. What is needed of it is data: no code is fetched or trusted.
        return Path(snapshot_download(model, allow_patterns=PARTS))
    except Exception as error:  # of the Hub, of the network, or of a repository that holds something else
        raise UserError(
            f"--model {model}: there is no such folder, and it could not be had from the Hub "
            f"({first_line(first_cause(error))})"
        ) from error


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or folder.name.removeprefix(PREFIX).isdigit()


def _chosen(run: Path, steps: list[str], weights: str | None) -> list[SavedModel]:
    """The checkpoints of a run by their steps, or every valid one, oldest first."""
    there = {step_of(path): path for path in checkpoints(run)}
    listed = ", ".join(map(str, there)) or "none"
    if "all" in steps:
        models = []
        for path in there.values():
            try:
                models.append(_read_checkpoint(path, weights))
            except InvalidCheckpoint as error:
                logger.warning("%s is left out: %s", path, error)
        if not models:
            raise UserError(f"--checkpoints all: {run} has no valid checkpoint (there are: {listed})")
        return models
    models = []
    for name in steps:
        step = name.removeprefix(PREFIX)
        if not step.isdigit() or int(step) not in there:
            raise UserError(f"--checkpoints {name}: {run} has no such checkpoint; it has: {listed}")
        models.append(_checkpoint(there[int(step)], weights, f"--checkpoints {name}"))
    return sorted({model.step: model for model in models}.values(), key=lambda model: model.step)


def _checkpoint(folder: Path, weights: str | None, flag: str) -> SavedModel:
    try:
        return _read_checkpoint(folder, weights)
    except InvalidCheckpoint as error:
        raise UserError(f"{flag}: {folder} is not a valid checkpoint: {error}") from error


def _read_checkpoint(folder: Path, weights: str | None) -> SavedModel:
    """A checkpoint of run_folder/checkpoint_files.py, after a look at the files that are needed."""
    if weights is None:
        weights = "ema" if (folder / NETWORK_FOLDERS["ema"]).exists() else "raw"
    network = NETWORK_FOLDERS[weights]
    if weights == "ema" and (folder / MANIFEST).exists() and not (folder / network).exists():
        raise UserError(f"--weights ema: {folder} has none, it was trained without the moving average; use raw")
    hashes = verify(folder, (f"{network}/", "state.json"))
    numbers = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return SavedModel(
        name=folder.name,
        path=folder,
        home=folder.parent,
        step=numbers["step"],
        weights=weights,
        train_seconds=numbers["train_seconds"],
        sha256=hashes[f"{network}/{WEIGHTS}"],
        network_folder=folder / network,
        scheduler_config=_scheduler_config_of(numbers["settings"]),
    )


def _scheduler_config_of(settings: dict[str, Any]) -> dict[str, Any]:
    from schedulers.ddpm import build_scheduler

    scheduler = build_scheduler(
        settings["ddpm_beta_schedule"],
        settings["ddpm_num_steps"],
        settings["variance_type"],
        settings["prediction_type"],
    )
    return dict(scheduler.config)


def _pipeline(folder: Path, name: str, weights: str | None) -> SavedModel:
    """A folder that a DDPMPipeline was saved in; old ones have all of its files side by side."""
    network = folder / "unet" if (folder / "unet").is_dir() else folder
    scheduler = folder / "scheduler" if (folder / "scheduler").is_dir() else folder
    kept = _weights_of_run(folder)
    if weights not in (None, kept):
        held = "one set of weights" if kept == "pipeline" else f"the {kept} weights"
        raise UserError(f"--weights {weights}: {name} is a pipeline and holds only {held}")
    try:
        network_config = json.loads((network / "config.json").read_text(encoding="utf-8"))
        scheduler_config = json.loads((scheduler / "scheduler_config.json").read_text(encoding="utf-8"))
        weights_file = next(path for path in sorted(network.glob("diffusion_pytorch_model.*")) if path.is_file())
    except (OSError, ValueError, StopIteration) as error:
        raise UserError(f"{folder} is not a whole pipeline ({first_line(error) or 'it has no weights'})") from error
    if network_config.get("in_channels") != network_config.get("out_channels"):
        raise UserError(f"{name}: its network predicts a variance too, which no sampler here uses")
    if network_config.get("sample_size") is None or network_config["in_channels"] not in (1, 3, 4):
        raise UserError(f"{name}: its network does not make images of a known size with 1, 3 or 4 channels")
    if "num_train_timesteps" not in scheduler_config or "beta_schedule" not in scheduler_config:
        raise UserError(f"{name}: its scheduler, {scheduler_config.get('_class_name')}, is not one of a DDPM")
    return SavedModel(
        name=name,
        path=folder,
        home=folder if Path(name).expanduser().is_dir() else RUNS / name.replace("/", "--"),
        step=None,
        weights=kept,
        train_seconds=None,
        sha256=sha256(weights_file),
        network_folder=network,
        scheduler_config=_of_ddpm(scheduler_config),
    )


def _of_ddpm(config: dict[str, Any]) -> dict[str, Any]:
    """What a DDPMScheduler knows of the configuration, which may be of another class."""
    import inspect

    from diffusers import DDPMScheduler

    known = inspect.signature(DDPMScheduler.__init__).parameters
    return {name: value for name, value in config.items() if name in known}


def _weights_of_run(folder: Path) -> str:
    """A run's own pipeline holds the moving average if the run kept one."""
    if not (folder / METRICS).exists() or not (folder / CONFIG).exists():
        return "pipeline"
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    return "ema" if config["use_ema"] else "raw"
