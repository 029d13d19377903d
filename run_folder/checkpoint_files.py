"""Checkpoints: a folder that is whole or not there, and that holds no code.

    checkpoint-<step>/
        unet/  unet_ema/          diffusers folders, safetensors
        optimizer.safetensors     exp_avg, exp_avg_sq and step of every parameter, by name
        sampler.safetensors       the state of the timestep sampler
        condition.json            classes, or encoder and vocabulary, if the network is told something of the images
        state.json                step, training time and the few numbers that are not tensors
        manifest.json             size and SHA-256 of every other file, written last

Learning rate, noise, data order and sampling points are functions of the step, so nothing else is needed.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common import interruption
from common.errors import RunFailed, UserError
from common.files import replace_folder, sync
from conditions.guidance import CONDITION_FILE
from run_folder.checkpoints import (
    PREFIX,
    WEIGHTS,
    InvalidCheckpoint,
    as_json,
    checkpoints,
    newest,
    step_of,
    verify,
    write_manifest,
)
from run_folder.config import TrainingConfig

if TYPE_CHECKING:
    from training.setup import TrainingState

logger = logging.getLogger(__name__)

# A run with another of these is no continuation of the same run.
ANOTHER_TASK = """
    ddpm_num_steps ddpm_beta_schedule prediction_type resolution channels images use_ema condition class_names encoder
""".split()
CheckpointFile = str | dict[str, torch.Tensor]


class CheckpointWriter:
    """Writes checkpoints while the training goes on.

    `save` copies the tensors out and returns; a thread does the rest. A second save waits for the first. A save that
    fails, on a full disk for example, is reported and leaves the earlier checkpoints as they are.
    """

    def __init__(self, config: TrainingConfig, resumed_from: Path | None):
        self.output_dir = Path(config.output_dir)
        self.total_limit = config.checkpoints_total_limit
        self.keep_every = config.keep_every
        self.resumed_from = resumed_from
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def save(self, state: TrainingState) -> None:
        self.wait()
        files = checkpoint_files(state)
        self.thread = threading.Thread(target=self._write, args=(f"{PREFIX}{state.step}", files))
        self.thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def finish(self, state: TrainingState) -> None:
        """The end of a run: what could not be saved is tried once more, and then it is an error."""
        self.wait()
        if self.failure is not None:
            self.save(state)
            self.wait()
        if self.failure is not None:
            raise RunFailed(
                f"step {state.step} could not be saved ({describe(self.failure)}); "
                f"the last good checkpoint is {newest(self.output_dir)}"
            )

    def _write(self, name: str, files: dict[str, CheckpointFile]) -> None:
        self.failure = None
        try:
            write_checkpoint(self.output_dir / name, files)
            self._prune()
            logger.info("Saved %s", self.output_dir / name)
        except Exception as error:  # of whatever kind: the training must go on
            self.failure = error
            shutil.rmtree(aside_of(self.output_dir / name), ignore_errors=True)
            logger.warning(
                "%s could not be saved: %s. The training goes on, the next save tries again; the last good one is %s",
                name,
                describe(error),
                newest(self.output_dir),
            )

    def _prune(self) -> None:
        """Remove the oldest beyond the limit, but no milestone and not the one this process came from."""
        spared = [step for step in map(step_of, checkpoints(self.output_dir)) if not self._is_milestone(step)]
        for step in spared[: -self.total_limit]:
            folder = self.output_dir / f"{PREFIX}{step}"
            if self.resumed_from is None or folder.resolve() != self.resumed_from.resolve():
                # Renamed first: a folder that is half removed must not look like a checkpoint.
                doomed = folder.with_name(f".{folder.name}.old")
                folder.rename(doomed)
                interruption.fault_point("prune")
                shutil.rmtree(doomed)

    def _is_milestone(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0


def describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def checkpoint_files(state: TrainingState) -> dict[str, CheckpointFile]:
    """Every file of a checkpoint and its content, copied: the training may go on changing the originals."""
    files: dict[str, CheckpointFile] = {}
    networks = {"unet": state.unet} | ({} if state.update.ema is None else {"unet_ema": state.update.ema.ema_model})
    for folder, network in networks.items():
        files[f"{folder}/config.json"] = network.to_json_string()
        files[f"{folder}/{WEIGHTS}"] = copy_out(network.state_dict())
    files["optimizer.safetensors"] = copy_out(optimizer_tensors(state))
    files["sampler.safetensors"] = copy_out(state.loss.state_dict())
    if state.condition is not None:
        files[CONDITION_FILE] = as_json(state.condition)
    files["state.json"] = as_json(state.numbers())
    return files


def copy_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def aside_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def write_checkpoint(target: Path, files: dict[str, CheckpointFile]) -> None:
    """Write aside, sync, rename: there is a whole folder of that name or none."""
    from safetensors.torch import save_file

    aside = aside_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    for name, content in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            save_file(content, path, metadata={"format": "pt"})
        interruption.fault_point("save-file")
    write_manifest(aside)
    interruption.fault_point("save-manifest")
    replace_folder(aside, target)
    sync(target.parent)
    interruption.fault_point("save-renamed")


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
        if folder.resolve().parent == output_dir.resolve():
            if config.overwrite_output_dir:
                raise UserError(f"--resume_from_checkpoint {wanted}: --overwrite_output_dir would delete it")
            leave_branch(output_dir, step_of(folder))
        return folder
    remove_remains(output_dir)
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
    if (output_dir / "metrics.jsonl").exists():
        logger.info("There is no checkpoint in %s: the run starts at step 0", output_dir)
    return None


def leave_branch(output_dir: Path, step: int) -> None:
    """Going back to a step, the checkpoints after it are of another run: they must not be taken for the newest."""
    for folder in checkpoints(output_dir):
        if step_of(folder) > step:
            set_aside = folder.with_name(f"{folder.name}.abandoned")
            shutil.rmtree(set_aside, ignore_errors=True)
            folder.rename(set_aside)
            logger.warning("%s is set aside as %s: the run goes on from step %d", folder, set_aside.name, step)


def remove_remains(output_dir: Path) -> None:
    """What a process that was killed left half written or half removed."""
    for pattern in (f".{PREFIX}*.tmp", f".{PREFIX}*.old"):
        for folder in output_dir.glob(pattern):
            shutil.rmtree(folder)


def load_checkpoint(state: TrainingState, folder: Path, same_run: bool) -> None:
    """Restore a run's state from a verified checkpoint. Every process reads the files itself."""
    from safetensors.torch import load_file

    numbers = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    changed = changed_settings(numbers["settings"], state.settings)
    other_task = [change for change in changed if change.split()[0] in ANOTHER_TASK]
    if other_task and same_run:
        raise UserError(
            f"{folder.parent} holds a run with other settings ({'; '.join(other_task)}): choose another --output_dir, "
            f"delete it with --overwrite_output_dir, or name the checkpoint with --resume_from_checkpoint to go on"
        )
    if changed:
        logger.warning(
            "Other settings than those of %s: %s. From step %d on this is not the run that it was",
            folder,
            "; ".join(changed),
            numbers["step"],
        )
    try:
        state.unet.load_state_dict(load_file(folder / "unet" / WEIGHTS))
        if state.update.ema is not None:
            state.update.ema.ema_model.load_state_dict(load_file(folder / "unet_ema" / WEIGHTS))
        load_optimizer_tensors(state, load_file(folder / "optimizer.safetensors"))
        # What one timestep sampler has learned says nothing to another.
        if numbers["settings"]["timestep_sampler"] == state.settings["timestep_sampler"]:
            state.loss.load_state_dict(load_file(folder / "sampler.safetensors"))
    except (RuntimeError, FileNotFoundError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder} does not fit this configuration ({reason}); use the configuration it was made with, "
            f"another --output_dir, or --overwrite_output_dir"
        ) from error
    state.load_numbers(numbers)


def changed_settings(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Each setting that makes another run of this one, with both values.

    What is not written down, because the version knew no such setting or the run did not use it, had its default.
    """
    defaults = asdict(TrainingConfig())
    names = sorted(before.keys() | now.keys())
    pairs = {name: (before.get(name, defaults.get(name)), now.get(name, defaults.get(name))) for name in names}
    return [f"{name} {earlier} -> {later}" for name, (earlier, later) in pairs.items() if earlier != later]


def optimizer_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """The optimiser's tensors under the names of the parameters."""
    return {
        f"{kind}.{name}": tensor.detach().contiguous()
        for name, parameter in state.unet.named_parameters()
        for kind, tensor in state.update.optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(state: TrainingState, tensors: dict[str, torch.Tensor]) -> None:
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition(".")
        saved.setdefault(parameter, {})[kind] = tensor
    order = [name for name, _ in state.unet.named_parameters()]
    groups = state.update.optimizer.state_dict()["param_groups"]
    indexed = {index: saved[name] for index, name in enumerate(order) if name in saved}
    state.update.optimizer.load_state_dict({"state": indexed, "param_groups": groups})
