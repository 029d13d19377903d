"""Checkpoints: a folder that is whole or not there, and that holds no code.

    checkpoint-<step>/
        unet/  unet_ema/          diffusers folders, safetensors
        optimizer.safetensors     exp_avg, exp_avg_sq and step of every parameter, by name
        sampler.safetensors       the state of the timestep sampler
        state.json                step, training time and the few numbers that are not tensors
        manifest.json             size and SHA-256 of every other file, written last

Learning rate, noise, data order and sampling points are functions of the step, so nothing else is needed.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.files import sha256, sync, write_atomically
from training.model import save_unet

if TYPE_CHECKING:
    from training.config import TrainingConfig
    from training.loop import TrainingState

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
PREFIX = "checkpoint-"


class InvalidCheckpoint(Exception):
    """A checkpoint that is not what was written, with the reason."""


def save_checkpoint(state: TrainingState, output_dir: Path, total_limit: int) -> Path:
    """Write aside, sync, rename, then remove the oldest beyond the limit: there is always a whole one."""
    from safetensors.torch import save_file

    target = output_dir / f"{PREFIX}{state.step}"
    aside = output_dir / f".{target.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_unet(state.unet, aside / "unet")
    if state.ema is not None:
        save_unet(state.ema.ema_model, aside / "unet_ema")
    save_file(optimizer_tensors(state), aside / "optimizer.safetensors")
    save_file(state.sampler.state_dict(), aside / "sampler.safetensors")
    write_atomically(aside / "state.json", as_json(state.numbers()))
    write_manifest(aside)
    if target.exists():  # an earlier run of the same steps, being repeated
        shutil.rmtree(target)
    aside.rename(target)
    sync(output_dir)
    for old in checkpoints(output_dir)[:-total_limit]:
        shutil.rmtree(old)
    return target


def write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in [*files, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files
    }
    write_atomically(folder / "manifest.json", as_json({"format_version": FORMAT_VERSION, "files": entries}))
    sync(folder)


def as_json(value: object) -> str:
    return json.dumps(value, indent=2)


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def verify(folder: Path) -> None:
    """Raise InvalidCheckpoint unless every file is there with the size and hash it was written with."""
    try:
        text = (folder / "manifest.json").read_text(encoding="utf-8")
        manifest = json.loads(text)
        version, entries = manifest["format_version"], manifest["files"].items()
        wanted = {name: (entry["size"], entry["sha256"]) for name, entry in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"manifest.json is missing or unreadable ({type(error).__name__})") from error
    if as_json(manifest) != text:
        raise InvalidCheckpoint("manifest.json is not what was written")
    if version != FORMAT_VERSION:
        raise InvalidCheckpoint(f"its format is version {version}, this program reads {FORMAT_VERSION}")
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise InvalidCheckpoint(f"{name} is missing")
        if path.stat().st_size != size or sha256(path) != digest:
            raise InvalidCheckpoint(f"{name} is not what was written")


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """The checkpoint to resume from: the one named, or the newest valid one of the run; None to start anew."""
    wanted, output_dir = config.resume_from_checkpoint, Path(config.output_dir)
    if wanted == "none" or (wanted == "latest" and config.overwrite_output_dir):
        return None
    if wanted != "latest":
        folder = Path(wanted)
        if not folder.is_dir() and (output_dir / wanted).is_dir():
            folder = output_dir / wanted
        if not folder.is_dir():
            raise UserError(f"--resume_from_checkpoint {wanted}: there is no such folder")
        try:
            verify(folder)
        except InvalidCheckpoint as error:
            raise UserError(f"--resume_from_checkpoint {wanted}: not a valid checkpoint: {error}") from error
        return folder
    for folder in reversed(checkpoints(output_dir)):
        try:
            verify(folder)
        except InvalidCheckpoint as error:
            set_aside = folder.with_name(f"{folder.name}.corrupt")
            shutil.rmtree(set_aside, ignore_errors=True)
            folder.rename(set_aside)
            logger.warning("%s is set aside as %s: %s", folder, set_aside.name, error)
        else:
            logger.info("Resuming from %s", folder)
            return folder
    return None


def load_checkpoint(state: TrainingState, folder: Path) -> None:
    """Restore a run's state from a verified checkpoint. Every process reads the files itself."""
    from safetensors.torch import load_file

    numbers = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    weights = "diffusion_pytorch_model.safetensors"
    try:
        state.unet.load_state_dict(load_file(folder / "unet" / weights))
        if state.ema is not None:
            state.ema.ema_model.load_state_dict(load_file(folder / "unet_ema" / weights))
        load_optimizer_tensors(state, load_file(folder / "optimizer.safetensors"))
        state.sampler.load_state_dict(load_file(folder / "sampler.safetensors"))
    except (RuntimeError, FileNotFoundError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder} does not fit this configuration ({reason}); use the configuration it was made with, "
            f"another --output_dir, or --resume_from_checkpoint none"
        ) from error
    state.load_numbers(numbers)


def optimizer_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """The optimiser's tensors under the names of the parameters."""
    return {
        f"{kind}.{name}": tensor.detach().contiguous()
        for name, parameter in state.unet.named_parameters()
        for kind, tensor in state.optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(state: TrainingState, tensors: dict[str, torch.Tensor]) -> None:
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition(".")
        saved.setdefault(parameter, {})[kind] = tensor
    order = [name for name, _ in state.unet.named_parameters()]
    groups = state.optimizer.state_dict()["param_groups"]
    indexed = {index: saved[name] for index, name in enumerate(order) if name in saved}
    state.optimizer.load_state_dict({"state": indexed, "param_groups": groups})
