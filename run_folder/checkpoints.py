"""Checkpoints: a folder that is whole or not there, and that holds no code.

    checkpoint-<step>/
        unet/  unet_ema/          diffusers folders, safetensors
        unet_ema_longer/          the second average of --ema power
        optimizer.safetensors     exp_avg, exp_avg_sq and step of every parameter, by name
        sampler.safetensors       the state of the timestep sampler
        condition.json            classes, or encoder and vocabulary, if the network has a condition
        state.json                step, training time and the few numbers that are not tensors
        manifest.json             size and SHA-256 of every other file, written last

Learning rate, noise, data order and sampling points are functions of the step, so nothing else is needed.

    ema_snapshots/step-<step>.safetensors

Beside the checkpoints, a run with --ema power keeps both averages in float16 at each of them, and none of these is ever
pruned: averages of other lengths are made of all of them (run_folder/ema_length.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import RunFailed, UserError, reason_of
from common.files import follow_umask, replace_folder, save_safetensors, sha256, sync, write_atomically
from common.interruption import fault_point
from common.options import facts_of
from run_folder.config import ConditionalConfig, TrainingConfig

if TYPE_CHECKING:
    import torch

    from training.setup import TrainingState

    CheckpointFile = str | dict[str, torch.Tensor]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
PREFIX = "checkpoint-"
MANIFEST, STATE, CONDITION_FILE = "manifest.json", "state.json", "condition.json"
NETWORK_FOLDERS = {"raw": "unet", "ema": "unet_ema"}
AVERAGE_FOLDERS = (NETWORK_FOLDERS["ema"], "unet_ema_longer")
WEIGHTS = "diffusion_pytorch_model.safetensors"
SNAPSHOTS = "ema_snapshots"
# The relative standard deviations of the averages that --ema power keeps, as in EDM2; the first is the run's own.
POWER_LENGTHS = (0.05, 0.1)
SAVED = f".{PREFIX}saved"  # marks that checkpoints were saved, so that a run can tell when they were taken away

# A run in which any of these differs is not a continuation of the same run.
FIXED = {name for name, facts in facts_of(ConditionalConfig).items() if facts.fixed}
FIXED |= {"images", "class_names", "encoder"}


class InvalidCheckpoint(Exception):
    """Raised for a checkpoint that differs from what was written; gives the reason."""


def step_of(checkpoint: Path | str) -> int | None:
    """Return the step of a checkpoint by the name of its folder, or None if it is another folder's."""
    step = Path(checkpoint).name.removeprefix(PREFIX)
    return int(step) if step.isascii() and step.isdigit() else None  # int() takes no superscript


def step_in(checkpoint: Path) -> int:
    """Read the step of a checkpoint, whatever the name of its folder."""
    return read_file(checkpoint, STATE)["step"]


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    folders = (path for path in output_dir.glob(f"{PREFIX}*") if step_of(path) is not None and path.is_dir())
    return sorted(folders, key=step_of)


def last_good(checkpoint: Path | None) -> str:
    """Say, at the end of a message about a failure, what there is to go on from."""
    return f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


def newest(output_dir: Path) -> Path | None:
    return next(reversed(checkpoints(output_dir)), None)


# Writing


class CheckpointWriter:
    """Writes checkpoints while the training goes on.

    `save` copies the tensors out and returns; a thread does the rest. A second save waits for the first. A save that
    fails, on a full disk for example, is reported and leaves the earlier checkpoints as they are.
    """

    def __init__(self, config: TrainingConfig, resumed_from: Path | None):
        self.config, self.resumed_from = config, resumed_from
        self.output_dir = Path(config.output_dir)
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def save(self, state: TrainingState, with_snapshot: bool) -> None:
        """Begin to save; snapshots, if the run keeps any, are only for regular steps, not for interruptions."""
        self.wait()
        self.with_snapshot = with_snapshot
        files = checkpoint_files(state)
        snapshot = snapshot_tensors(state) if with_snapshot else {}
        target = self.output_dir / f"{PREFIX}{state.step}"
        self.thread = threading.Thread(target=self._write, args=(target, files, snapshot))
        self.thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self.thread is not None:
            self.thread.join()

    def finish(self, state: TrainingState) -> None:
        """End a run: try once more to save what could not be saved; it is an error if that fails too."""
        self.wait()
        if self.failure is not None:
            self.save(state, self.with_snapshot)
            self.wait()
        if self.failure is not None:
            raise RunFailed(
                f"step {state.step} could not be saved ({reason_of(self.failure)}); "
                f"{last_good(newest(self.output_dir))}"
            )

    def _write(self, target: Path, files: dict[str, CheckpointFile], snapshot: dict[str, torch.Tensor]) -> None:
        self.failure = None
        aside = target.with_name(f".{target.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            if snapshot:  # first, so that a run that continues from the checkpoint has it
                save_safetensors(snapshot, snapshot_file(self.output_dir, step_of(target)))
                fault_point("save-snapshot")
            write_files(aside, files)
            for lines in self.output_dir.glob("*.jsonl"):  # a run that continues from the checkpoint goes on after them
                sync(lines)
            replace_folder(aside, target)
            (target.parent / SAVED).touch()
            sync(target.parent)
            fault_point("save-renamed")
            logger.info("Saved %s", target)
        except Exception as error:  # of whatever kind: the training must go on
            self.failure = error
            shutil.rmtree(aside, ignore_errors=True)
            logger.warning(
                f"{target.name} could not be saved: {reason_of(error)}. Training continues, and the next save tries "
                f"again; {last_good(newest(self.output_dir))}"
            )
        else:
            self._prune()

    def _prune(self) -> None:
        """Remove the oldest beyond the limit, but none of --keep_every and not the one this process came from."""
        kept_for_ever = self.config.keep_every
        found = [path for path in checkpoints(self.output_dir) if not kept_for_ever or step_of(path) % kept_for_ever]
        for folder in found[: -self.config.checkpoints_total_limit]:
            if self.resumed_from is None or folder.resolve() != self.resumed_from.resolve():
                # Renamed first: a folder that is half removed must not look like a checkpoint.
                try:
                    doomed = folder.rename(folder.with_name(f".{folder.name}.old"))
                    fault_point("prune")
                    shutil.rmtree(doomed)
                except OSError as error:
                    logger.warning("the old %s could not be deleted: %s", folder, reason_of(error))


def write_files(folder: Path, files: dict[str, CheckpointFile]) -> None:
    """Write the files of a checkpoint and, when the disk has them, the manifest."""
    from safetensors.torch import save_file

    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            save_file(content, path, metadata={"format": "pt"})
            follow_umask(path)
        fault_point("save-file")
    for path in folder.rglob("*"):
        sync(path)
    entries = {name: manifest_entry(folder / name) for name in sorted(files)}
    write_atomically(folder / MANIFEST, json.dumps({"format_version": FORMAT_VERSION, "files": entries}, indent=2))
    sync(folder)
    fault_point("save-manifest")


def manifest_entry(file: Path) -> dict[str, int | str]:
    return {"size": file.stat().st_size, "sha256": sha256(file)}


# Reading


def verify(folder: Path, parts: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Return the hash of every file; raise InvalidCheckpoint unless each has the size and hash it was written with.

    `parts` are the beginnings of the names to look at, for readers that need only some of the files.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        version, entries = manifest["format_version"], manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"{MANIFEST} is missing or unreadable ({type(error).__name__})") from error
    if json.dumps(manifest, indent=2) != text:
        raise InvalidCheckpoint(f"{MANIFEST} is not what was written")
    if version != FORMAT_VERSION:
        raise InvalidCheckpoint(f"its format is version {version}, this program reads {FORMAT_VERSION}")
    for part in parts:
        if not any(name.startswith(part) for name, _ in entries):
            raise InvalidCheckpoint(f"{MANIFEST} does not name {part or 'any file'}")
    wanted = {name: entry for name, entry in entries if name.startswith(parts)}
    for name, entry in wanted.items():
        if not (folder / name).is_file():
            raise InvalidCheckpoint(f"{name} is missing")
        if manifest_entry(folder / name) != entry:
            raise InvalidCheckpoint(f"{name} is not what was written")
    return {name: entry["sha256"] for name, entry in wanted.items()}


def read_file(folder: Path, name: str) -> dict:
    """Read the numbers or the tensors of a file of a checkpoint."""
    from safetensors.torch import load_file

    path = folder / name
    if path.suffix != ".json":
        return load_file(path)
    if path.exists() and not path.is_file():
        raise OSError(f"{name} is not a file")  # to read a pipe would wait for ever
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds a {type(content).__name__} instead of names with values")
    return content


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """Return the checkpoint to resume from: the one named, or the newest valid one of the run; None to start anew."""
    wanted, output_dir = config.resume_from_checkpoint, Path(config.output_dir)
    if wanted not in ("none", "latest"):
        return _named_checkpoint(config)
    if wanted == "none" or config.overwrite:
        return None
    return _newest_valid(output_dir)


def _newest_valid(output_dir: Path) -> Path | None:
    """Return the newest checkpoint that is whole, if there is any; newer ones are set aside."""
    # If a process was killed between the two renames of a replacement, the new folder is whole but not yet renamed.
    for old in output_dir.glob(f".{PREFIX}*.old"):
        new, target = old.with_suffix(".tmp"), output_dir / old.stem.removeprefix(".")
        if new.exists() and not target.exists():
            new.rename(target)
    for pattern in (f".{PREFIX}*.tmp", f".{PREFIX}*.old"):
        for folder in output_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)  # on NFS somebody may have a file of it open
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints(output_dir)):
        try:
            verify(folder)
        except InvalidCheckpoint as error:
            damaged[folder] = str(error)
        else:
            for newer, reason in damaged.items():
                logger.warning("%s is set aside as %s: %s", newer, set_aside(newer, "corrupt").name, reason)
            logger.info("Resuming from %s", folder)
            return folder
    if damaged:
        raise UserError(
            f"--output_dir {output_dir}: all of its checkpoints are damaged "
            f"({'; '.join(f'{folder.name}: {reason}' for folder, reason in damaged.items())}), and nothing in the run "
            f"was changed; restore a valid one, or start over with --overwrite, which deletes the run"
        )
    return None


def named_folder(config: TrainingConfig) -> Path | None:
    """Return the folder that --resume_from_checkpoint names, by its path or within the run, if there is one."""
    wanted = config.resume_from_checkpoint
    folders = [] if wanted in ("none", "latest") else [Path(wanted), Path(config.output_dir) / wanted]
    return next((folder for folder in folders if folder.is_dir()), None)


def is_own(checkpoint: Path | None, config: TrainingConfig) -> bool:
    """Tell whether a checkpoint, if there is one, is in the folder of the run itself."""
    return checkpoint is not None and checkpoint.resolve().parent == Path(config.output_dir).resolve()


def goes_back(config: TrainingConfig) -> bool:
    """Tell whether the run is to continue from a named checkpoint of its own, which need not be the newest."""
    return is_own(named_folder(config), config)


def _named_checkpoint(config: TrainingConfig) -> Path:
    wanted, output_dir, folder = config.resume_from_checkpoint, Path(config.output_dir), named_folder(config)
    if folder is None:
        there = ", ".join(path.name for path in checkpoints(output_dir)) or "no checkpoint"
        raise UserError(
            f"--resume_from_checkpoint {wanted}: there is no such folder; {output_dir} has {there}. Without the flag a "
            f"run continues from its newest checkpoint, or starts at step 0 if it has none"
        )
    try:
        verify(folder)
    except InvalidCheckpoint as error:
        if own := checkpoints(folder):
            there = ", ".join(path.name for path in own)
            raise UserError(
                f"--resume_from_checkpoint {wanted}: is a run; name one of its checkpoints: {there}"
            ) from error
        raise UserError(f"--resume_from_checkpoint {wanted}: not a valid checkpoint: {error}") from error
    if not goes_back(config):
        step = step_in(folder)
        # Where the run begins. Once it has checkpoints of its own, the same command continues it.
        own = None if config.overwrite else _newest_valid(output_dir)
        if own is not None and step_of(own) <= step:
            raise UserError(
                f"--resume_from_checkpoint {wanted}: {output_dir} holds another run, with {own.name}; choose another "
                f"--output_dir, or delete that run with --overwrite"
            )
        return own or folder
    if config.overwrite:
        raise UserError(f"--resume_from_checkpoint {wanted}: --overwrite would delete it")
    return folder


def set_aside(path: Path, kind: str) -> Path:
    """Rename a checkpoint, or what was made with it, so that it is no longer taken for one; return its new name."""
    return path.rename(free_name(path, kind))


def free_name(path: Path, kind: str) -> Path:
    """Return a name that says what kind of a file or folder this is now, and that nothing has yet."""
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(new for end in suffixes if not (new := path.with_name(f"{path.name}.{kind}{end}")).exists())


# The state of a training as files, and back


def checkpoint_files(state: TrainingState) -> dict[str, CheckpointFile]:
    """Return every file of a checkpoint and its content, copied: the training may go on changing the originals."""
    files: dict[str, CheckpointFile] = {}
    for folder, network in networks_of(state).items():
        files[f"{folder}/config.json"] = network.to_json_string()
        files[f"{folder}/{WEIGHTS}"] = copy_out(network.state_dict())
    files["optimizer.safetensors"] = copy_out(
        {
            f"{kind}.{name}": tensor
            for name, parameter in state.unet.named_parameters()
            for kind, tensor in state.update.optimizer.state.get(parameter, {}).items()
        }
    )
    files["sampler.safetensors"] = copy_out(state.loss.state_dict())
    if state.condition is not None:
        files[CONDITION_FILE] = json.dumps(state.condition, indent=2)
    files[STATE] = json.dumps(state.numbers(), indent=2)
    return files


def networks_of(state: TrainingState) -> dict[str, torch.nn.Module]:
    """Return the networks by their folders in a checkpoint."""
    averages = (average.ema_model for average in state.update.averages)
    return {NETWORK_FOLDERS["raw"]: state.unet} | dict(zip(AVERAGE_FOLDERS, averages, strict=False))


def copy_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


# Snapshots of power-function averages


def power_exponent(length: float) -> float:
    """Return gamma of the profile t^gamma whose standard deviation is this share of the training (EDM2, eq. 3).

    From length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), the largest root.
    """
    import numpy as np

    inverse = length**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def snapshot_file(output_dir: Path, step: int) -> Path:
    return output_dir / SNAPSHOTS / f"step-{step}.safetensors"


def snapshot_files(output_dir: Path) -> dict[int, Path]:
    """Return the snapshots of a run by their steps, in order."""
    steps = [path.stem.removeprefix("step-") for path in (output_dir / SNAPSHOTS).glob("step-*.safetensors")]
    return {step: snapshot_file(output_dir, step) for step in sorted(map(int, filter(str.isdecimal, steps)))}


def snapshot_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return the averages of --ema power in float16, copied, as `<length>.<name of the tensor>`; none without it."""
    import torch

    averages = state.update.averages if state.settings["ema"] == "power" else []
    return {
        f"{length}.{name}": tensor.detach().to("cpu", torch.float16, copy=True).contiguous()
        for length, average in zip(POWER_LENGTHS, averages, strict=False)
        for name, tensor in average.ema_model.state_dict().items()
    }


def discard_snapshots(output_dir: Path, after_step: int) -> None:
    """Remove snapshots that a run continuing from this step will write again, and leftovers of killed processes."""
    later = [path for step, path in snapshot_files(output_dir).items() if step > after_step]
    for path in [*later, *(output_dir / SNAPSHOTS).glob(".*.tmp")]:
        path.unlink()


def load_checkpoint(state: TrainingState, folder: Path, same_run: bool) -> list[str]:
    """Restore a run's state from a verified checkpoint; return which settings have changed since.

    Every process reads the files itself.
    """
    read = partial(read_file, folder)
    numbers = read(STATE)
    changed = changed_settings(numbers["settings"], state.settings)
    other_task = [change for change in changed if change.split()[0] in FIXED or is_of_learned_variance(change)]
    if other_task and same_run:
        raise UserError(
            f"{folder.parent} holds a run with other settings ({'; '.join(other_task)}): choose another --output_dir, "
            f"delete it with --overwrite, or name the checkpoint with --resume_from_checkpoint to continue"
        )
    try:
        for subfolder, network in networks_of(state).items():
            network.load_state_dict(read(f"{subfolder}/{WEIGHTS}"))
        load_optimizer_tensors(state, read("optimizer.safetensors"))
        # The state of one timestep sampler is of no use to another.
        if numbers["settings"]["timestep_sampler"] == state.settings["timestep_sampler"]:
            state.loss.load_state_dict(read("sampler.safetensors"))
    except (RuntimeError, FileNotFoundError, KeyError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines()]  # the first of PyTorch's says only where it was
        reason, *more = (lines[1] if len(lines) > 1 else reason_of(error)).split('", "')  # a list of names
        reason += f'" and {len(more)} more' if more else ""
        reason = next((change for change in changed if change.startswith("model_config_name_or_path ")), reason)
        raise UserError(
            f"{folder} does not fit this configuration ({reason}); use the configuration it was made with, "
            f"another --output_dir, or --overwrite"
        ) from error
    state.load_numbers(numbers)
    return changed


def is_of_learned_variance(change: str) -> bool:
    """Tell whether a change involves a learned variance, which alters the meaning of the network's output."""
    return change.startswith("variance_type ") and "learned" in change


def changed_settings(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Return each setting that differs between the runs, with both values; one that was not saved had its default."""
    before, now = ({**asdict(TrainingConfig()), **settings} for settings in (before, now))
    changed = (name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name))
    return [f"{name} {before.get(name)} -> {now.get(name)}" for name in changed]


def load_optimizer_tensors(state: TrainingState, tensors: dict[str, torch.Tensor]) -> None:
    """Load the optimiser's tensors, which have the names of the parameters."""
    optimizer = state.update.optimizer
    index_of = {name: index for index, (name, _) in enumerate(state.unet.named_parameters())}
    saved: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition(".")
        saved.setdefault(index_of[parameter], {})[kind] = tensor
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
