"""The folder of a model's images: what samples.json says of them, what may be added to them, and what is made of them.

The main process opens the folders; all of them write into them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.errors import UserError
from common.files import LOCK_FILE, first_existing, lock, write_atomically
from generation.engine import Job, choose_batch_size, divide
from generation.generate_options import DEFAULT_IMAGES, as_ranges
from generation.writers import IMAGES_PER_FOLDER, WRITTEN, ImageWriter, open_writer, said_in_one_line

if TYPE_CHECKING:
    from common.processes import Processes
    from conditions.guidance import Layout
    from generation.generate_options import GenerationOptions
    from run_folder.saved_model import SavedModel
    from schedulers.denoising import SamplingMethod

logger = logging.getLogger(__name__)

RECORD = "samples.json"
PICTURES = ("grid.png", "progress.gif", "nearest.png")


def settings_of(job: Job, image_format: str, how: dict[str, Any]) -> dict[str, Any]:
    """What two sets of images must have in common to be one. `how` is precision and pace."""
    return {
        "sha256": job.model.sha256,
        "weights": job.model.weights,
        "num_train_timesteps": job.model.scheduler.config.num_train_timesteps,
        **{"sampler": None, "num_inference_steps": None, "skip_schedule": None, "eta": None, "variance_type": None},
        **job.method.settings,
        **{"labels": None, "prompts": None, "negative_prompt": None},
        **{"guidance_scale": None, "guidance_rescale": None, "guidance_interval": None},
        **job.condition.settings,
        **how,
        "format": image_format,
    }


def telling_of(model: SavedModel, method: SamplingMethod, device: str) -> dict[str, Any]:
    """What is good to know besides."""
    return {
        "model": model.source,
        "step": model.step,
        "train_seconds": model.train_seconds,
        "shape": list(model.shape),
        "timesteps": len(method.timesteps),
        "device": device,
        "versions": {name: version(name) for name in ("torch", "diffusers")},
    }


class Record:
    """A folder that is this process's for as long as it lives, with its samples.json. For the main process."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], telling: dict[str, Any], seeds: list[int], overwrite: bool
    ):
        """Take the folder; an error if it holds something else. Nothing is made yet."""
        self.folder, self.settings, self.telling, self.seeds = folder, settings, telling, seeds
        self.overwrite = overwrite
        self.before = None
        with said_of(folder):
            existing = first_existing(folder)
            if not existing.is_dir():
                raise UserError(f"--output_dir {folder}: {existing} is a file, not a folder")
            if existing == folder:
                lock(folder)
                self._look(folder)

    def _look(self, folder: Path) -> None:
        record = read_record(folder, self.overwrite)
        if record is None:
            foreign = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE)
            if foreign:
                raise UserError(
                    f"--output_dir {folder}: holds something else than generated images ({', '.join(foreign[:3])}); "
                    f"choose an empty or new folder"
                )
        elif not self.overwrite:
            self._refuse_other_settings(record)
            self.before = record

    def _refuse_other_settings(self, record: dict[str, Any]) -> None:
        differences = [
            f"{name} {record.get(name)} -> {value}"
            for name, value in self.settings.items()
            if record.get(name) != value and not (name == "batch_size" and value is None)
        ]
        if differences:
            raise UserError(
                f"{self.folder} holds images made with other settings ({'; '.join(differences)}): choose another "
                f"--output_dir, or delete them with --overwrite"
            )
        for name in ("device", "versions"):
            if record[name] != self.telling[name]:
                logger.warning(
                    "The images in %s were begun with another %s (%s, now %s): others may differ in their last bits",
                    self.folder,
                    name.removesuffix("s"),
                    record[name],
                    self.telling[name],
                )

    @property
    def batch_size(self) -> int | None:
        """The one of the images that are there: with it, the others get the bits that they would have had."""
        return self.settings["batch_size"] or (self.before and self.before["batch_size"])

    def begin(self, batch_size: int) -> tuple[bool, set[int]]:
        """Make the folder and samples.json; whether there are sub-folders, and the seeds that are missing."""
        self.settings["batch_size"] = batch_size
        if self.before is not None:
            self._refuse_other_settings(self.before)
            self.in_subfolders = self.before["subfolders"]
        else:
            self.in_subfolders = len(self.seeds) > IMAGES_PER_FOLDER
        with said_of(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock(self.folder)
            if self.overwrite:
                remove_images(self.folder)
            with open_writer(self.folder, self.settings["format"], self.in_subfolders) as writer:
                existing = writer.existing()
            missing = set(self.seeds) - existing
            self.seeds = sorted(existing.union(self.seeds))
            self.write(len(existing))
        return self.in_subfolders, missing

    def write(self, images: int) -> None:
        record = {
            **self.telling,
            **self.settings,
            "seeds": as_ranges(self.seeds),
            "subfolders": self.in_subfolders,
            "images": images,
            "complete": images == len(self.seeds),
        }
        write_atomically(self.folder / RECORD, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path, overwrite: bool = False) -> dict[str, Any] | None:
    """What samples.json says, if there is one."""
    path = folder / RECORD
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        if overwrite:
            return {}
        raise UserError(f"{path}: is not what was written; --overwrite makes the images anew") from error


@contextmanager
def said_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written ({error.strerror})") from error


def remove_images(folder: Path) -> None:
    """What a generation writes, and nothing else that may be there."""
    for name in (*PICTURES, *WRITTEN, RECORD):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class Collection:
    """The images of one job on this process: written where they are missing, kept where they are to be shown."""

    def __init__(
        self, job: Job, folder: Path, writer: ImageWriter, missing: set[int], layout: Layout, record: Record | None
    ):
        self.job, self.folder, self.writer = job, folder, writer
        self.missing, self.layout, self.record = missing, layout, record
        self.shown = layout.seeds
        self._kept: dict[int, torch.Tensor] = {}

    def add(self, seeds: list[int], images: torch.Tensor) -> None:
        """Images of a batch, of which some may be there from before it was interrupted."""
        places = [place for place, seed in enumerate(seeds) if seed in self.missing]
        self.writer.write([seeds[place] for place in places], images[places])
        shown = set(self.shown)
        # Copies: a view would keep, and send to the other processes, the whole batch.
        self._kept.update({seed: image.clone() for seed, image in zip(seeds, images, strict=True) if seed in shown})

    def finish(self, processes: Processes) -> torch.Tensor | None:
        """All images of all processes are there. On the main process the folder is completed; those to be shown."""
        self.writer.wait()
        kept = {seed: image for part in processes.all_gather(self._kept) for seed, image in part.items()}
        if self.record is None:
            return None
        before = [seed for seed in self.shown if seed not in kept]
        if before:
            kept.update(zip(before, self.writer.read(before), strict=True))
        with said_in_one_line(self.folder):
            self.writer.finish()
            self.record.write(len(self.record.seeds))
        return torch.stack([kept[seed] for seed in self.shown])


def open_collections(
    jobs: list[Job],
    folders: list[Path],
    seeds: list[int],
    options: GenerationOptions,
    how: dict[str, Any],
    processes: Processes,
) -> tuple[list[Collection], int]:
    """A collection for each job, whose batches are set to those in which images are missing; and the batch size."""
    records: list[Record] = []
    if processes.is_main:
        for job, folder in zip(jobs, folders, strict=True):
            settings = settings_of(job, options.format, {**how, "batch_size": options.batch_size})
            telling = telling_of(job.model, job.method, processes.device.type)
            records.append(Record(folder, settings, telling, seeds, options.overwrite))
    chosen = next((record.batch_size for record in records if record.batch_size), None)
    batch_size = processes.broadcast(chosen) or choose_batch_size(jobs[0], processes, len(seeds), how["channels_last"])
    begun = processes.broadcast([record.begin(batch_size) for record in records])
    collections = []
    for number, (in_subfolders, missing) in enumerate(begun):
        jobs[number].batches = [batch for batch in divide(seeds, batch_size) if missing.intersection(batch)]
        writer = open_writer(folders[number], options.format, in_subfolders)
        record = records[number] if processes.is_main else None
        layout = jobs[number].condition.layout(seeds, None if options.gather_grid else DEFAULT_IMAGES)
        collections.append(Collection(jobs[number], folders[number], writer, missing, layout, record))
    return collections, batch_size
