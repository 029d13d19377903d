"""What one call of evaluate.py does: find the images and the reference, measure, write down."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common import interruption
from common.errors import UserError
from common.machine import default_num_workers
from conditions.guidance import ALL, GenerationCondition, conditions_at
from evaluation.asked import Asked, add_classes, check_unconditional, describe_classes
from evaluation.curves import draw_guidance, draw_run
from evaluation.evaluate_options import FEWEST_IMAGES
from evaluation.features import announce_speed, compile_networks, extract
from evaluation.image_sets import EncodedImages, ImageSet, batches_of, open_images
from evaluation.measure import columns_of, measure
from evaluation.results import (
    RESULTS,
    Measured,
    add_result,
    describe_result,
    describe_rows,
    find_row,
    forget_replaced,
    log_to_tensorboard,
    read_results,
)
from evaluation.samples import (
    generated_batches,
    keep_images,
    kept_images,
    measured_images,
    measured_of,
    models_of,
    training_images,
)
from evaluation.statistics import Statistics, named_statistics, reference_statistics, save_statistics
from generation.engine import Job
from generation.generate_options import ConditionOptions
from generation.methods import build_method
from generation.sample_folder import RECORD
from image_data.sources import load_images, spread
from run_folder.folder import RunFolder
from run_folder.publish import update_evaluation

if TYPE_CHECKING:
    from common.processes import Processes
    from evaluation.evaluate_options import EvaluationOptions
    from evaluation.image_sets import Batch
    from evaluation.networks import FeatureNetwork
    from run_folder.saved_model import SavedModel

logger = logging.getLogger(__name__)

DEFAULT_IMAGES = 10_000


class Session:
    """The networks and the processes that share the work; the main one computes the metrics and writes."""

    def __init__(
        self, options: EvaluationOptions, networks: list[FeatureNetwork], cache_dir: Path, processes: Processes
    ):
        self.options, self.networks, self.processes, self.cache_dir = options, networks, processes, cache_dir
        self.num_workers = options.dataloader_num_workers
        if self.num_workers is None:
            self.num_workers = default_num_workers(processes.local_count)
        self.prepared, self.announced = False, None
        if not self._has_score:
            logger.info(
                "No Inception Score: the Inception network found here has no last layer. inception-2015-12-05.pt has "
                "(--inception_weights)"
            )

    @property
    def _has_score(self) -> bool:
        """Not of an Inception network without its last layer, and that is to be said."""
        return self.networks[0].name != "inception" or self.networks[0].has_logits

    def measure_images(self) -> None:
        """A folder or file of generated images."""
        options = self.options
        images = open_images(options.generated, "--generated")
        count = len(images) if options.num_images is None else options.num_images
        if count > len(images):
            raise UserError(f"--num_images {count}: there are only {len(images)} images in {options.generated}")
        if count < FEWEST_IMAGES:
            raise UserError(f"--generated {options.generated}: {count} images, at least {FEWEST_IMAGES} are needed")
        output_dir = Path(options.output_dir).expanduser() if options.output_dir else None
        _, reference = self._reference(images.size, images.is_grey(), count)
        measured = None
        if self.processes.is_main:
            identity = reference[0].identity
            measured = measured_images(options.generated, images, count, identity, options.mixed_precision)
        self._prepare(count, images.size)
        # generate.py's are in the order of their seeds; of others the first by name may all be of one kind.
        is_ours = (Path(options.generated).expanduser() / RECORD).is_file()
        chosen = torch.arange(count) if is_ours else torch.as_tensor(spread(len(images), count))
        self._measure(measured, count, self._batches_of(images, chosen), images.name, reference, output_dir)

    def measure_run(self) -> None:
        """Every checkpoint of a run that has not been measured in this way."""
        options, processes = self.options, self.processes
        run_dir = Path(options.run_dir).expanduser()
        output_dir = Path(options.output_dir).expanduser() if options.output_dir else run_dir
        models = models_of(options.run_dir, options.checkpoints, options.weights) if processes.is_main else None
        models = processes.broadcast(models)
        count = DEFAULT_IMAGES if options.num_images is None else options.num_images
        methods = [build_method(options, model) for model in models]
        for model in models:
            check_unconditional(model, options.guidance_scales)
        channels, *size = models[0].shape
        images, reference = self._reference(
            tuple(size), channels == 1, count * len(models) * len(options.guidance_scales)
        )
        asked, conditions = self._asked(models[0], images, count)
        if processes.is_main and output_dir == run_dir:
            forget_replaced(output_dir, {(model.step, model.weights): model.sha256 for model in models})
        jobs = [
            Job(model, method, condition=condition)
            for model, method in zip(models, methods, strict=True)
            for condition in conditions
        ]
        for number, job in enumerate(jobs, start=1):
            measured, done = None, False
            if processes.is_main:
                measured = measured_of(job, count, reference[0].identity, options.mixed_precision)
                row = find_row(read_results(output_dir), measured)
                wanted = [
                    column
                    for network, statistics in zip(self.networks, reference, strict=True)
                    for column in columns_of(network, count, statistics)
                ] + (asked.columns() if asked else [])
                done = row is not None and all(row.get(column) is not None for column in wanted)
            named = " ".join(filter(None, [job.model.name, job.condition.guidance.name]))
            if processes.broadcast(done):
                logger.info("%s (%d of %d) has been measured already", named, number, len(jobs))
                continue
            logger.info("%s (%d of %d), weights=%s", named, number, len(jobs), job.model.weights)
            self._prepare(count, tuple(size), others=count * (len(jobs) - number))
            try:
                metrics = self._measure(measured, count, *self._images_of(job, count), reference, output_dir, asked)
            except interruption.Interrupted as stop:
                raise interruption.Interrupted(
                    f"{str(stop).partition(':')[0]}: stopped at {named}; the ones before it are in "
                    f"{output_dir / RESULTS}; start the same command again to continue"
                ) from stop
            if processes.is_main and job.model.step is not None:
                logging_dir = RunFolder(run_dir).read_config().logging_dir
                log_to_tensorboard(output_dir / logging_dir, measured, metrics)
        if processes.is_main:
            rows = read_results(output_dir)
            print(f"\n{describe_rows(rows, count)}\n")
            for picture in [*draw_run(output_dir, rows, self._has_score), *draw_guidance(output_dir, rows)]:
                logger.info("Drew %s", picture)
            update_evaluation(output_dir)

    def _asked(
        self, model: SavedModel, images: ImageSet | None, count: int
    ) -> tuple[Asked | None, list[GenerationCondition]]:
        """For a conditional run what its samples are to show, and what they are told at every guidance scale."""
        options, told = self.options, model.condition
        if told is None:
            return None, [GenerationCondition()]
        try:
            real = images
            if not self._reference_is_labelled:
                real = training_images(options.run_dir, "train", options.cache_dir, self.num_workers)
            run_dir = Path(options.run_dir).expanduser()
            asked = Asked(run_dir, told, real, count, self.num_workers, self.cache_dir, self.processes)
        except UserError as error:
            if told["condition"] != "class":
                raise  # without captions there is nothing to draw
            logger.warning("What the samples show is not looked at: %s", error)
            every_class = ConditionOptions(class_labels=[ALL])
            return None, conditions_at(options.guidance_scales, every_class, model, self.processes.device)
        return asked, asked.conditions(model, options.guidance_scales)

    def save_statistics(self) -> None:
        """Only the real images' statistics."""
        self._reference((self.options.resolution, self.options.resolution), is_grey=None, others=0)

    def _reference(
        self, size: tuple[int, int], is_grey: bool | None, others: int
    ) -> tuple[ImageSet | None, list[Statistics]]:
        """The real images, if there are any; and on the main process their statistics, one for each network.

        `others` is how many images are to be measured besides.
        """
        options, processes = self.options, self.processes
        if options.statistics:
            if not processes.is_main:
                return None, []
            return None, [
                named_statistics(options.statistics, options.statistics_mode, network, size)
                for network in self.networks
            ]
        with processes.main_first():
            images = self._real_images(size)
        if len(images) < FEWEST_IMAGES:
            raise UserError(f"{images.name}: {len(images)} real images, at least {FEWEST_IMAGES} are needed")
        if tuple(images.size) != tuple(size):
            logger.warning(
                "The real images are %dx%d, the generated ones %dx%d", *reversed(images.size), *reversed(size)
            )
        if is_grey is not None and images.is_grey() != is_grey:
            kinds = ("in colour", "grey")
            logger.warning(
                "The generated images are %s, the real ones %s: both are measured as RGB",
                kinds[is_grey],
                kinds[not is_grey],
            )
        reference = reference_statistics(
            images,
            self.networks,
            options.feature_batch_size,
            self.num_workers,
            processes,
            self.cache_dir,
            before=lambda: self._prepare(len(images), images.size, others),
        )
        if processes.is_main:
            logger.info("Reference: %s", reference[0].identity.describe())
            if options.save_statistics:
                save_statistics(reference[0], Path(options.save_statistics))
                logger.info("Its statistics are in %s", options.save_statistics)
        return images, reference

    @property
    def _reference_is_labelled(self) -> bool:
        """Whether the real images are a data set, whose classes or captions are known, and not a folder or less."""
        return not (self.options.real or self.options.statistics)

    def _real_images(self, size: tuple[int, int]) -> ImageSet:
        options = self.options
        # Images that are not square are compared as they are.
        resolution = options.resolution or (size[0] if size[0] == size[1] else None)
        if options.real:
            images = open_images(options.real, "--real", resolution)
        elif options.dataset_name or options.train_data_dir:
            images = EncodedImages(load_images(options, options.split), resolution)
        else:
            return training_images(options.run_dir, options.split, options.cache_dir, self.num_workers)
        skipping = options.on_bad_image == "skip" and isinstance(images, EncodedImages)
        return images.without_bad(self.num_workers) if skipping else images

    def _prepare(self, count: int, size: tuple[int, int], others: int = 0) -> None:
        """Before the first of `count` images, and others later: compile where that pays, and say how long it takes."""
        batch_size = self.options.feature_batch_size
        if not self.prepared and self.options.compile:
            compile_networks(self.networks, size, batch_size, count + others, self.processes)
        self.prepared = True
        if self.announced != (count, size):
            self.announced = count, size
            announce_speed(self.networks, size, batch_size, count, self.processes)

    def _images_of(self, job: Job, count: int) -> tuple[Iterable[Batch], str | None]:
        """Images of a checkpoint, kept or made now, and a name for the bar unless they come with their own."""
        options, processes = self.options, self.processes
        precision = options.mixed_precision
        kept = processes.broadcast(kept_images(job, count, precision) if processes.is_main else None)
        if kept is None and options.keep_images:
            kept = keep_images(job, count, options.batch_size, precision, processes)
        if kept is not None:
            logger.info("Its images are in %s", kept)
            return self._batches_of(open_images(str(kept), "--run_dir"), torch.arange(count)), job.model.name
        largest = options.feature_batch_size
        return generated_batches(job, count, options.batch_size, largest, precision, processes), None

    def _batches_of(self, images: ImageSet, chosen: torch.Tensor) -> Iterable[Batch]:
        return batches_of(images, chosen, self.options.feature_batch_size, self.num_workers, self.processes)

    def _measure(
        self,
        measured: Measured | None,
        count: int,
        batches: Iterable[Batch],
        description: str | None,
        reference: list[Statistics],
        output_dir: Path | None,
        asked: Asked | None = None,
    ) -> dict[str, float]:
        """One pass over the images, all metrics from it, and a row of the table; on the main process."""
        processes, batch_size = self.processes, self.options.feature_batch_size
        batches = asked.reading(batches) if asked else batches
        extracted = extract(self.networks, batches, count, batch_size, processes, description)
        metrics = asked.measure() if asked else {}
        if processes.is_main:
            for network, features, statistics in zip(self.networks, extracted, reference, strict=True):
                metrics |= measure(network, features, statistics, processes.device)
            classes = []
            if asked and self._reference_is_labelled:
                classes = asked.measure_classes(self.networks[0], extracted[0], reference[0])
            print(f"\n{describe_result(measured, metrics)}\n", flush=True)
            if classes:
                print(f"{describe_classes(classes)}\n", flush=True)
                add_classes(output_dir, measured, classes)
            dimensions = max(features.features.shape[1] for features in extracted)
            fewest = min([count, *filter(None, [reference[0].identity.count]), *(row["samples"] for row in classes)])
            if fewest < dimensions:
                logger.warning(
                    "FID of %d images is far above that of many: its covariance wants %s at least%s",
                    fewest,
                    f"{dimensions:,}",
                    "" if reference[0].features is None else ". Read kid, which is not biased",
                )
            if output_dir is not None:
                add_result(output_dir, measured, metrics)
        processes.barrier()
        return metrics
