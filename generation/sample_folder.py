"""The folder of a job's images: what samples.json says of them, what may be added to them, and how it is completed."""

import json
import logging
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from common.errors import RunFailed, UserError, user_errors
from common.files import LOCK_FILE, check_folder, lock, write_atomically
from common.interruption import stops_deferred
from common.processes import Processes
from generation.engine import InferenceSettings, Job, choose_batch_size, divide, generate, largest_worth_measuring
from generation.generate_options import (
    DEFAULT_IMAGES,
    SMALLEST_BATCH,
    ImageOptions,
    OutputOptions,
    as_ranges,
    seeds_of,
)
from generation.methods import METHOD_SETTINGS
from generation.pictures import INTERPOLATIONS, save_grid
from generation.writers import IMAGES_PER_FOLDER, WRITERS, WRITTEN, ImageWriter, one_line_if_unwritable
from run_folder.folder import GENERATED, NEAREST, RECORD

logger = logging.getLogger(__name__)

PICTURES = ("grid.png", "progress.gif", "progressive.png", "nearest.png", NEAREST)
NEEDED = {"batch_size", "subfolders", "device", "versions", "seeds", "images"}  # of a record, to go on from it
CONDITION_SETTINGS = ("labels", "prompts", "negative_prompt", "guidance_scale", "guidance_rescale", "guidance_interval")


class UnusableFolder(UserError):
    """A folder that holds something else than the images that are to be made."""


def default_folder(job: Job, precision: str) -> Path:
    """Return where the images of a job go when no folder is named, and where to look for them."""
    parts = [job.model.label, job.method.folder_name, "" if precision == "no" else precision, job.condition.name]
    return job.model.home / GENERATED / "-".join(filter(None, parts))


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return what samples.json says, if there is one."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if record is not None and (type(record["batch_size"]) is not int or not record.keys() >= NEEDED):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableFolder(
            f"{path}: is not what generate.py writes; move it away, or make the images anew with --overwrite"
        ) from error
    return record


def seeds_in(record: dict[str, Any]) -> list[int]:
    """Return the seeds of the images in a folder, in the order that the images are in, from its samples.json."""
    return seeds_of(ImageOptions(seeds=record["seeds"]))


class SampleFolder:
    """A folder with one image for each seed, made by one job. The main process keeps its samples.json."""

    def __init__(self, path: Path, job: Job, seeds: Sequence[int], options: OutputOptions | None = None):
        self.path, self.job, self.seeds, self.options = path, job, list(seeds), options or OutputOptions()
        self.layout = job.condition.layout(seeds, None if self.options.gather_grid else DEFAULT_IMAGES)

    # What the main process does before there are images.

    def claim(self) -> int | None:
        """Lock the folder, if it holds images, and return their batch size; make nothing yet."""
        self.record_before = None
        with user_errors(f"--output_dir {self.path}: cannot be written", OSError):
            found = {entry.name: entry for entry in self.path.iterdir()} if check_folder(self.path) else {}
            # A call that drew one picture, or was killed at once, leaves nothing that stands in the way.
            passing = (LOCK_FILE, ".*.tmp", *INTERPOLATIONS)
            others = sorted(name for name in found if not any(fnmatch(name, kind) for kind in passing))
            if not others:
                return None
            if RECORD not in found:
                raise UnusableFolder(
                    f"--output_dir {self.path}: holds files that are not generated images "
                    f"({', '.join(others[:3])}); choose an empty or new folder"
                )
            lock(self.path)
            if self.options.overwrite:
                return None
            for name in found.keys() & {*PICTURES, *WRITTEN, RECORD}:
                kind, is_one = ("file", Path.is_file) if Path(name).suffix else ("folder", Path.is_dir)
                if not name.startswith(".") and not is_one(found[name]):
                    raise UnusableFolder(f"--output_dir {self.path}: {name} is not a {kind}; move it away")
            self.record_before = read_record(self.path)
        return self.record_before["batch_size"]

    def check(self, settings: InferenceSettings, device: torch.device) -> None:
        """Raise `UnusableFolder` if the images in the folder were made otherwise than these will be."""
        model, method = self.job.model, self.job.method
        must_agree = {
            "sha256": model.sha256,
            "weights": model.weights,
            "num_train_timesteps": model.scheduler.config.num_train_timesteps,
            **dict.fromkeys(METHOD_SETTINGS),
            **method.settings,
            **dict.fromkeys(CONDITION_SETTINGS),
            **self.job.condition.settings,
            **asdict(settings),
            "format": self.options.format,
        }
        self.record = {
            "model": model.source,
            "step": model.step,
            "train_seconds": model.train_seconds,
            "shape": list(model.shape),
            "timesteps": len(method.timesteps),
            "device": device.type,
            "versions": {name: version(name) for name in ("torch", "diffusers")},
            **must_agree,
        }
        if self.record_before is None:
            return
        before, now = self.record_before, self.record
        different = [name for name in must_agree if before.get(name) != now[name]]
        differences = [f"{name} {before.get(name)} -> {now[name]}" for name in different]
        if differences:
            raise UnusableFolder(
                f"{self.path} holds images made with other settings ({'; '.join(differences)}): choose another "
                f"--output_dir, or delete them with --overwrite"
            )
        for name in ("device", "versions"):
            if before[name] != now[name]:
                other = f"another {name.removesuffix('s')} ({before[name]}, now {now[name]})"
                message = "The images in %s were begun with %s: others may differ in their last bits"
                logger.warning(message, self.path, other)

    def look(self) -> tuple[bool, set[int]]:
        """Return whether there are sub-folders, and the seeds whose images are missing."""
        before = self.record_before
        self.in_subfolders = before["subfolders"] if before else len(self.seeds) > IMAGES_PER_FOLDER
        self.existing = set()
        if before:
            advice = f"{self.path}: its images cannot be read; --overwrite makes them anew"
            with user_errors(advice, OSError, ValueError, KeyError, zipfile.BadZipFile):
                self.existing = WRITERS[self.options.format](self.path, self.in_subfolders).existing()
        return self.in_subfolders, set(self.seeds) - self.existing

    def begin(self) -> None:
        """Make the folder and samples.json."""
        with user_errors(f"--output_dir {self.path}: cannot be written", OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            lock(self.path)
            self._remove_files()
            self.all_seeds = sorted(self.existing.union(self.seeds))
            self._write_record(len(self.existing))

    def _remove_files(self) -> None:
        """Remove what a killed process left unfinished and, to overwrite, all that a generation writes."""
        unfinished = [path for path in self.path.rglob(".*.tmp") if path.is_file()]
        written = [self.path / name for name in (*PICTURES, *WRITTEN, RECORD)] if self.options.overwrite else []
        for path in [*unfinished, *written]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _write_record(self, images: int) -> None:
        record = {
            **self.record,
            "seeds": as_ranges(self.all_seeds),
            "subfolders": self.in_subfolders,
            "images": images,
            "complete": images == len(self.all_seeds),
        }
        write_atomically(self.path / RECORD, json.dumps(record, indent=2) + "\n")

    # What every process does.

    def open(self, in_subfolders: bool, missing: set[int]) -> ImageWriter:
        """Open the folder for the images of the missing seeds; the writer that is returned must be closed."""
        self.missing, self.writer = missing, WRITERS[self.options.format](self.path, in_subfolders)
        return self.writer

    def add(self, seeds: list[int], images: torch.Tensor) -> None:
        """Write the images of a batch, without those that are there."""
        places = [place for place, seed in enumerate(seeds) if seed in self.missing]
        self.writer.write([seeds[place] for place in places], images[places])

    def complete(self, processes: Processes) -> None:
        """Complete the folder when all processes have made their images; the main one keeps those that are shown."""
        self.writer.wait()
        processes.barrier()
        if processes.is_main:
            if missing := sorted(set(self.all_seeds) - self.writer.existing()):
                raise RunFailed(
                    f"{self.path}: the images of seeds {as_ranges(missing)} are not there, though they were made "
                    f"(another machine's files can be late); start the same command again to complete them"
                )
            # That they cannot be written is said otherwise: these were there before.
            with user_errors(
                f"{self.path}: images in it are damaged; --overwrite makes them anew", OSError, ValueError
            ):
                self.shown = self.writer.read(self.layout.seeds)
            with one_line_if_unwritable(self.path):
                self.writer.finish()
                self._write_record(len(self.all_seeds))


def complete_folders(
    folders: Sequence[SampleFolder], processes: Processes, settings: InferenceSettings
) -> InferenceSettings:
    """Make the images that are missing in the folders, with samples.json and grid.png, and return the settings used.

    All processes must call it. To be stopped means to keep what is whole; the same call continues with what is missing.
    """
    with stops_deferred(), ExitStack() as writers:
        found = [folder.claim() for folder in folders] if processes.is_main else []
        # With the batch size of the images that are there, the others get the bits that they would have had.
        kept = processes.broadcast(None if settings.batch_size else next(filter(None, found), None))
        batch_size = settings.batch_size or kept
        batch_size = batch_size or choose_batch_size(folders[0].job, len(folders[0].seeds), processes, settings)
        settings = replace(settings, batch_size=batch_size)
        for folder in folders if processes.is_main else []:
            folder.check(settings, processes.device)
        found = [folder.look() for folder in folders] if processes.is_main else None
        batches, folder_of = [], {folder.job: folder for folder in folders}
        for folder, (in_subfolders, missing) in zip(folders, processes.broadcast(found), strict=True):
            writers.enter_context(folder.open(in_subfolders, missing))
            all_batches = divide(folder.seeds, batch_size)
            batches += [(folder.job, batch) for batch in all_batches if missing.intersection(batch)]
        missing = sum(len(folder.missing) for folder in folders)
        logger.info("%d of %d images are missing", missing, sum(len(folder.seeds) for folder in folders))
        if kept and batch_size <= SMALLEST_BATCH < largest_worth_measuring(missing):
            logger.warning(
                "The remaining images are made in batches of %d, like those that are there, so that one image more or "
                "less changes no bit of another; in an empty folder the fastest size would be measured",
                batch_size,
            )
        generated = generate(batches, processes, settings)  # nothing is written before that has begun
        for folder in folders if processes.is_main else []:
            folder.begin()
        processes.barrier()
        for job, batch, images in generated:
            folder_of[job].add(batch, images)
        for folder in folders:
            folder.complete(processes)
    for folder in folders if processes.is_main else []:  # the others need not wait for it
        save_grid(folder.shown, folder.layout, folder.path / "grid.png")
    return settings
