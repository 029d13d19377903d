"""The checkpoints of a run: which they are, the images generated for each, and the real ones they are held against."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.files import sha256
from evaluation.image_sets import EncodedImages, as_rgb, open_images
from evaluation.results import Measured
from generation.engine import InferenceSettings, Job, generate_images, prefers_channels_last
from generation.methods import METHOD_SETTINGS
from generation.sample_folder import (
    RECORD,
    SampleFolder,
    UnusableFolder,
    complete_folders,
    default_folder,
    read_record,
)
from image_data.sources import load_images
from run_folder.checkpoints import WEIGHTS, checkpoints
from run_folder.folder import RunFolder
from run_folder.saved_model import SavedModel, find_models

if TYPE_CHECKING:
    from common.processes import Processes
    from evaluation.image_sets import Batch, ImageSet
    from evaluation.statistics import Identity

logger = logging.getLogger(__name__)

NAMED_SETTINGS = (*METHOD_SETTINGS, "guidance_scale")


def models_of(run_dir: str, steps: list[str], weights: str | None) -> list[SavedModel]:
    """The checkpoints of a run, oldest first, and its pipeline where that holds other weights than all of them."""
    run = Path(run_dir).expanduser()
    if not checkpoints(run):
        models = find_models(run_dir, steps, weights)
        return [_at_last_step(model) for model in models]
    models = find_models(run_dir, steps or ["all"], weights)
    if not steps and weights != "raw" and RunFolder(run).pipeline_file.is_file():
        models += _pipeline_beside(run, models)
    return models


def _at_last_step(pipeline: SavedModel) -> SavedModel:
    """A pipeline without checkpoints is what the run ended with."""
    lines = RunFolder(pipeline.path).read_metrics()
    if not lines:
        return pipeline
    return replace(pipeline, step=lines[-1]["step"], train_seconds=lines[-1]["train_seconds"])


def _pipeline_beside(run: Path, models: list[SavedModel]) -> list[SavedModel]:
    weights = RunFolder(run).network_folder / WEIGHTS
    digest = sha256(weights) if weights.is_file() else None
    if digest is None or digest in {model.sha256 for model in models}:
        return []
    logger.info("The pipeline in %s holds other weights than the checkpoints, of a step that nothing tells", run)
    beside = {"path": run, "step": None, "train_seconds": None, "sha256": digest, "network_folder": weights.parent}
    return [replace(models[-1], name="pipeline", **beside)]


def training_images(run_dir: str, split: str, cache_dir: str | None, num_workers: int) -> EncodedImages:
    """The very images that a run was trained on, or of another split, at its resolution, cropped at the centre."""
    config = replace(RunFolder(Path(run_dir).expanduser()).read_config(), cache_dir=cache_dir)
    source = load_images(config, split)
    images = EncodedImages(source, config.resolution, int(config.channels))
    return images.without_bad(num_workers) if config.on_bad_image == "skip" else images


def measured_of(job: Job, num_images: int, reference: Identity, precision: str) -> Measured:
    return Measured(
        step=job.model.step,
        train_seconds=job.model.train_seconds,
        weights=job.model.weights,
        num_images=num_images,
        images=job.model.name,
        sha256=job.model.sha256,
        reference=reference.describe(),
        reference_fingerprint=reference.short_fingerprint,
        precision=precision,
        **_named_settings(job.method.settings | job.condition.settings),
    )


def measured_images(named: str, images: ImageSet, num_images: int, reference: Identity, precision: str) -> Measured:
    """What is known of a set of images; of a folder of generate.py's that is much."""
    record = read_record(Path(named).expanduser()) if Path(named).expanduser().is_dir() else None
    nothing = {"sampler": None, "steps": None, "settings": None}
    return Measured(
        step=record and record["step"],
        train_seconds=record and record["train_seconds"],
        weights=record and record["weights"],
        num_images=num_images,
        images=Path(named).name if record else images.name,
        sha256=images.fingerprint,
        reference=reference.describe(),
        reference_fingerprint=reference.short_fingerprint,
        precision=precision,
        **(_named_settings({name: record.get(name) for name in NAMED_SETTINGS}) if record else nothing),
    )


def _named_settings(settings: dict[str, object]) -> dict[str, object]:
    """The columns of a sampling method: its name, its steps, and what else was set."""
    rest = {name: value for name, value in settings.items() if name in NAMED_SETTINGS[2:] and value is not None}
    return {
        "sampler": settings["sampler"],
        "steps": settings["num_inference_steps"],
        "settings": " ".join(f"{name}={value}" for name, value in rest.items()) or None,
    }


def kept_images(job: Job, num_images: int, precision: str) -> Path | None:
    """The folder with images of this model and method that generate.py or an evaluation kept, if there are enough."""
    folder = default_folder(job, precision)
    record = read_record(folder)
    if record is None or not record["complete"] or record["sha256"] != job.model.sha256:
        return None
    settings = job.method.settings | job.condition.settings
    same_method = all(record.get(name) == value for name, value in settings.items())
    first, _, last = record["seeds"].partition(",")[0].partition("-")
    if not same_method or first != "0" or int(last or 0) + 1 < num_images:
        return None
    found = len(open_images(str(folder), "--run_dir"))
    if found != record["images"]:
        raise UserError(
            f"{folder} holds {found} images, but {record['images']} according to its {RECORD}: move it away, or "
            f"complete it with the generate.py command that made it"
        )
    return folder


def keep_images(
    job: Job,
    num_images: int,
    batch_size: int | None,
    precision: str,
    processes: Processes,
) -> Path:
    """Generate images into the folder that generate.py would choose, as it would: with samples.json and a grid."""
    folder = SampleFolder(default_folder(job, precision), job, range(num_images))
    try:
        complete_folders([folder], processes, inference_settings(precision, batch_size, processes))
    except UnusableFolder as error:
        raise UserError(f"--keep_images, whose folder must be moved away first: {error}") from error
    processes.barrier()
    return folder.path


def generated_batches(
    job: Job,
    num_images: int,
    batch_size: int | None,
    feature_batch_size: int,
    precision: str,
    processes: Processes,
) -> Iterator[Batch]:
    """Images of the seeds 0 .. num_images - 1, straight from the network; this process's share of them."""
    settings = inference_settings(precision, batch_size, processes)
    for seeds, images in generate_images(job, range(num_images), processes, settings):
        # Not joined with those of the next batch, which depends on what the other processes do.
        parts = torch.tensor(seeds).split(feature_batch_size), as_rgb(images).split(feature_batch_size)
        yield from zip(*parts, strict=True)


def inference_settings(precision: str, batch_size: int | None, processes: Processes) -> InferenceSettings:
    """Return how networks are run, as generate.py decides it, so that the images are the same."""
    channels_last = prefers_channels_last(processes.device, precision)
    return InferenceSettings(precision, channels_last=channels_last, batch_size=batch_size)
