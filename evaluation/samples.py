"""The checkpoints of a run, the images generated for each, and the real ones they are compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common import interruption
from common.errors import UserError
from common.files import sha256
from evaluation.image_sets import Batch, EncodedImages, as_rgb, open_images
from evaluation.results import Measured
from generation.collection import RECORD, open_collections, read_record
from generation.engine import Job, Pace, choose_batch_size, generate, generate_images
from generation.generate_options import GenerationOptions
from generation.pictures import draw_pictures
from image_data.sources import load_images
from run_folder.checkpoints import WEIGHTS, checkpoints
from run_folder.folder import RunFolder
from run_folder.saved_model import SavedModel, find_models, output_folder

if TYPE_CHECKING:
    from common.processes import Processes
    from evaluation.statistics import Identity
    from run_folder.config import TrainingConfig

logger = logging.getLogger(__name__)

METHOD_SETTINGS = ("skip_schedule", "eta", "variance_type", "guidance_scale")  # besides the sampler and its steps


def models_of(run: RunFolder, steps: list[str], weights: str | None) -> list[SavedModel]:
    """Return the checkpoints of a run, oldest first, and its pipeline if that holds weights that none of them has."""
    if not checkpoints(run.path):
        return [_at_last_step(model) for model in find_models(str(run.path), steps, weights)]
    models = find_models(str(run.path), steps or ["all"], weights)
    if not steps and weights != "raw" and run.pipeline_file.is_file():
        models += _pipeline_beside(run, models)
    return models


def _at_last_step(pipeline: SavedModel) -> SavedModel:
    """Return a pipeline without checkpoints as what the run ended with."""
    lines = RunFolder(pipeline.path).read_metrics()
    return replace(pipeline, step=lines[-1]["step"], train_seconds=lines[-1]["train_seconds"]) if lines else pipeline


def _pipeline_beside(run: RunFolder, models: list[SavedModel]) -> list[SavedModel]:
    weights = run.network_folder / WEIGHTS
    digest = sha256(weights) if weights.is_file() else None
    if digest is None or digest in {model.sha256 for model in models}:
        return []
    logger.info("The pipeline in %s holds other weights than the checkpoints, of an unknown step", run.path)
    beside = {"path": run.path, "step": None, "train_seconds": None, "sha256": digest, "network_folder": weights.parent}
    return [replace(models[-1], name="pipeline", **beside)]


def training_images(config: TrainingConfig, split: str, cache_dir: str | None, num_workers: int) -> EncodedImages:
    """Open the very images that a run was trained on, or another split, at its resolution, cropped at the centre."""
    source = load_images(
        dataset_name=config.dataset_name,
        dataset_config_name=config.dataset_config_name,
        train_data_dir=config.train_data_dir,
        split=split,
        image_column=config.image_column,
        cache_dir=cache_dir,
        max_train_samples=config.max_train_samples,
    )
    images = EncodedImages(source, config.resolution, int(config.channels))
    return images.without_bad(num_workers) if config.on_bad_image == "skip" else images


def describe_measured(known: dict[str, Any], num_images: int, reference: Identity, precision: str) -> Measured:
    """Return what is measured, by what is known of a model and its sampler, or of a set of images."""
    settings = [f"{name}={known[name]}" for name in METHOD_SETTINGS if known.get(name) is not None]
    return Measured(
        step=known.get("step"),
        train_seconds=known.get("train_seconds"),
        weights=known.get("weights"),
        sampler=known.get("sampler"),
        steps=known.get("num_inference_steps"),
        settings=" ".join(settings) or None,
        num_images=num_images,
        images=known["name"],
        sha256=known["sha256"],
        reference=reference.describe(),
        reference_fingerprint=reference.short_fingerprint,
        precision=precision,
    )


class Samples:
    """The images of a model with the seeds 0 .. count - 1, as generate.py makes them."""

    def __init__(self, job: Job, count: int, precision: str, processes: Processes):
        self.job, self.count, self.precision, self.processes = job, count, precision, processes
        self.name = " ".join(filter(None, [job.model.name, job.condition.guidance.name]))
        self.folder = output_folder(job.model, job.method, precision, job.condition.name)
        self.settings = job.method.settings | job.condition.settings
        self.channels_last = processes.device.type == "cuda" and precision != "no"

    def describe(self, reference: Identity) -> Measured:
        """Return what is known of the images."""
        model = self.job.model
        known = {name: getattr(model, name) for name in ("step", "train_seconds", "weights", "name", "sha256")}
        return describe_measured(known | self.settings, self.count, reference, self.precision)

    def find_kept(self) -> Path | None:
        """Return the folder in which generate.py or an evaluation kept these images, if there are enough."""
        record = read_record(self.folder)
        if record is None or not record["complete"] or record["sha256"] != self.job.model.sha256:
            return None
        first, _, last = record["seeds"].partition(",")[0].partition("-")
        is_same_method = all(record.get(name) == value for name, value in self.settings.items())
        if not is_same_method or first != "0" or int(last or 0) + 1 < self.count:
            return None
        found = len(open_images(str(self.folder), "--run_dir"))
        if found != record["images"]:
            raise UserError(
                f"{self.folder} holds {found} images, but {record['images']} according to its {RECORD}: move it away, "
                f"or complete it with the generate.py command that made it"
            )
        return self.folder

    def keep(self, batch_size: int | None) -> Path:
        """Generate the images into the folder that generate.py would choose, with samples.json and a grid."""
        options = GenerationOptions(batch_size=batch_size)
        how = {"precision": self.precision, "allow_tf32": False, "channels_last": self.channels_last, "compile": False}
        with interruption.deferred():
            try:
                (collection,), batch_size = open_collections(
                    [self.job], [self.folder], list(range(self.count)), options, how, self.processes
                )
            except UserError as error:
                raise UserError(f"--keep_images, whose folder must be moved away first: {error}") from error
            pace = Pace(batch_size, self.channels_last)
            with collection.writer:
                for _, batch, images in generate([collection.job], self.processes, pace):
                    collection.add(batch, images)
                shown = collection.finish(self.processes)
        if self.processes.is_main:
            draw_pictures(options, self.job, self.processes, pace, shown, collection.layout, self.folder)
        self.processes.barrier()
        return self.folder

    def generate(self, batch_size: int | None, feature_batch_size: int) -> Iterator[Batch]:
        """Yield this process's share of the images, straight from the network."""
        if batch_size is None:
            batch_size = choose_batch_size(self.job, self.processes, self.count, self.channels_last)
        pace = Pace(batch_size, self.channels_last)
        for seeds, images in generate_images(self.job, range(self.count), self.processes, pace):
            # Not joined with those of the next batch, which depends on what the other processes do.
            parts = torch.tensor(seeds).split(feature_batch_size), as_rgb(images).split(feature_batch_size)
            yield from zip(*parts, strict=True)
