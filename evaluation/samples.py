"""The checkpoints of a run, the images generated for each, and the real ones they are compared with."""

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import sha256, unlock
from common.processes import Processes
from evaluation.evaluate_options import EvaluationOptions
from evaluation.image_sets import EncodedImages, open_images
from evaluation.results import Measured
from evaluation.statistics import Identity
from generation.engine import InferenceSettings, Job, prefers_channels_last
from generation.methods import OWN_SETTINGS
from generation.sample_folder import (
    SampleFolder,
    UnusableFolder,
    complete_folders,
    default_folder,
    read_record,
    seeds_in,
)
from image_data.sources import load_split
from run_folder.checkpoints import WEIGHTS, checkpoints
from run_folder.config import TrainingConfig
from run_folder.folder import RECORD, RunFolder
from run_folder.saved_model import SavedModel, find_models

logger = logging.getLogger(__name__)

UNMEASURED = ".unmeasured"  # in the folder of the results: images of an evaluation under way, or interrupted
NAMED_SETTINGS = (*OWN_SETTINGS, "guidance_scale")  # besides the sampler and its steps


def models_of(run: RunFolder, steps: list[str], weights: str | None, lengths: Sequence[float] = ()) -> list[SavedModel]:
    """Return the checkpoints of a run, oldest first, and its pipeline if that holds weights that none of them has.

    With `lengths` it is those averages of the newest checkpoint, or of those that are named. The steps ['none'] are
    none of them.
    """
    if steps == ["none"]:
        return []
    if not checkpoints(run.path):
        pipelines = find_models(str(run.path), steps, weights, lengths)
        step, lines = run.pipeline_step(), run.read_metrics()
        # A pipeline that names no step is of the run's end; there need not be a line of metrics of the very step.
        until = [line for line in lines if step is None or line["step"] <= step]
        known = {name: until[-1][name] for name in ("step", "train_seconds")} if until else {}
        return [replace(pipeline, **known | ({} if step is None else {"step": step})) for pipeline in pipelines]
    if lengths:
        return find_models(str(run.path), steps, weights, lengths)
    models = find_models(str(run.path), steps or ["all"], weights)
    if not steps and weights != "raw" and run.pipeline_file.is_file():
        models += _pipeline_beside(run, models)
    return models


def _pipeline_beside(run: RunFolder, models: list[SavedModel]) -> list[SavedModel]:
    weights = run.network_folder / WEIGHTS
    digest = sha256(weights) if weights.is_file() else None
    if digest is None or digest in {model.sha256 for model in models}:
        return []
    logger.info("The pipeline in %s holds other weights than the checkpoints, of an unknown step", run.path)
    beside = {"path": run.path, "step": None, "train_seconds": None, "sha256": digest, "network_folder": weights.parent}
    pipeline = replace(models[-1], name="pipeline", **beside)
    replace(pipeline).check()
    return [pipeline]


def training_images(config: TrainingConfig, split: str, cache_dir: str | None, num_workers: int) -> EncodedImages:
    """Open the very images that a run was trained on, or another split, at its resolution, cropped at the centre."""
    source = load_split(replace(config, cache_dir=cache_dir), split)
    images = EncodedImages(source, config.resolution, int(config.channels), config.interpolation)
    return images.without_bad(num_workers) if config.on_bad_image == "skip" else images


def describe_measured(known: dict[str, Any], num_images: int, reference: Identity, precision: str) -> Measured:
    """Return what is measured, by what is known of a model and its sampler, or of a set of images."""
    settings = [f"{name}={known[name]}" for name in NAMED_SETTINGS if known.get(name) is not None]
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
        reference_fingerprint=reference.fingerprint[:8],  # enough to distinguish data of one name
        precision=precision,
    )


class Samples:
    """The images of a model with seeds in a row, as generate.py makes them."""

    def __init__(self, job: Job, seeds: range, options: EvaluationOptions, processes: Processes):
        self.job, self.seeds, self.precision, self.processes = job, seeds, options.precision, processes
        self.count, precision = len(seeds), options.mixed_precision
        self.which = f"seeds={seeds[0]}-{seeds[-1]}" if seeds[0] > 0 else ""  # of another set than the first
        self.name = " ".join(filter(None, [job.model.name, job.condition.guidance.name, self.which]))
        self.folder = default_folder(job, precision)
        self.settings = job.method.settings | job.condition.settings
        # Whose captions are drawn: those of the first split, if it is one of the reference's.
        split = (options.split or ["train"])[0]
        has_captions = "prompts" in self.settings and not (options.real or options.statistics)
        self.captions = f"captions={split}" if has_captions and split != "train" else ""
        channels_last = prefers_channels_last(processes.device, precision)
        self.inference = InferenceSettings(precision, options.allow_tf32, channels_last, batch_size=options.batch_size)

    def describe(self, reference: Identity) -> Measured:
        """Return what is known of the images."""
        model = self.job.model
        known = {name: getattr(model, name) for name in ("step", "train_seconds", "weights", "name", "sha256")}
        measured = describe_measured(known | self.settings, self.count, reference, self.precision)
        settings = filter(None, [measured.settings, self.captions, self.which])
        return replace(measured, settings=" ".join(settings) or None)

    def find_kept(self) -> Path | None:
        """Return the folder in which generate.py or an evaluation kept these images, if there are enough."""
        record = read_record(self.folder)
        wanted = {"complete": True, "sha256": self.job.model.sha256, **self.settings}
        if record is None or any(record.get(name) != value for name, value in wanted.items()):
            return None
        # However many images were in a batch: a batch of another size was chosen for a reason.
        settings = {name: value for name, value in asdict(self.inference).items() if name != "batch_size"}
        other = [f"{name} {record.get(name)}" for name, value in settings.items() if record.get(name) != value]
        if other:
            logger.info("The images in %s are not used: they were made with %s", self.folder, ", ".join(other))
            return None
        if not set(self.seeds) <= set(seeds_in(record)):
            return None
        found = len(open_images(str(self.folder), "--run_dir"))
        if found != record["images"]:
            raise UserError(
                f"{self.folder} holds {found} images, but {record['images']} according to its {RECORD}: move it away, "
                f"or complete it with the generate.py command that made it"
            )
        return self.folder

    def keep(self) -> Path:
        """Generate the images into the folder that generate.py would choose, with samples.json and a grid."""
        try:
            return self._complete(self.folder)
        except UnusableFolder as error:
            raise UserError(f"--keep_images, whose folder must be moved away first: {error}") from error

    def generate(self, output_dir: Path) -> Path:
        """Generate the images into a folder that is there until they are measured.

        To be interrupted, even killed, therefore costs a batch: the same call goes on with what is missing.
        """
        folder = self.unmeasured(output_dir)
        logger.info("Its images are in %s until they are measured", folder)
        return self._complete(folder)

    @property
    def identity(self) -> str:
        """Return a text that identifies these images: it differs for anything that would make other images."""
        which = (self.which,) if self.which else ()
        return repr((self.job.model.sha256, *sorted(self.settings.items()), self.inference, *which))

    def unmeasured(self, output_dir: Path) -> Path:
        """Return the folder that holds the images until they are measured."""
        key = hashlib.blake2b(self.identity.encode(), digest_size=4).hexdigest()
        return output_dir / UNMEASURED / f"{self.job.model.label}-{key}"

    def discard(self, output_dir: Path) -> None:
        """Remove what `generate` made, or what an earlier one left."""
        folder = self.unmeasured(output_dir)
        unlock(folder)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are others in it, or it is not there
            folder.parent.rmdir()

    def _complete(self, folder: Path) -> Path:
        complete_folders([SampleFolder(folder, self.job, self.seeds)], self.processes, self.inference)
        self.processes.barrier()
        return folder
