"""The course of an evaluation: find the images and the reference, measure, write the results."""

import itertools
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError, user_errors
from common.interruption import Interrupted
from common.machine import default_num_workers
from common.processes import Processes
from conditions.guidance import ALL, GenerationCondition, conditions_at
from evaluation import results
from evaluation.condition_accuracy import ConditionAccuracy, add_classes, describe_classes, request_conditions
from evaluation.curves import draw_guidance, draw_lengths, draw_run
from evaluation.evaluate_options import FEWEST_IMAGES, EvaluationOptions
from evaluation.features import FeatureExtractor, Features
from evaluation.image_sets import EncodedImages, ImageSet, open_images
from evaluation.metrics import CONDITION_ACCURACY, measure, metrics_of
from evaluation.networks import FeatureNetwork
from evaluation.samples import Samples, describe_measured, models_of, training_images
from evaluation.statistics import Statistics, named_statistics, reference_statistics, save_statistics
from evaluation.watching import BestCheckpoint, appearing
from generation.engine import Job
from generation.generate_options import ConditionOptions
from generation.methods import build_method
from generation.sample_folder import read_record, seeds_in
from image_data.data_options import INTERPOLATION, DataOptions
from image_data.sources import load_images, spread
from run_folder.config import ConditionalConfig
from run_folder.folder import RunFolder
from run_folder.publish import curves_at, log_evaluation, update_evaluation
from run_folder.saved_model import SavedModel

logger = logging.getLogger(__name__)

DEFAULT_IMAGES = 10_000


class Session:
    """One call of evaluate.py. All processes share the work; the main one computes the metrics and writes."""

    def __init__(
        self, options: EvaluationOptions, networks: list[FeatureNetwork], cache_dir: Path, processes: Processes
    ):
        self.options, self.processes, self.cache_dir = options, processes, cache_dir
        workers = options.num_workers
        workers = default_num_workers(processes.local_count) if workers is None else workers
        self.extractor = FeatureExtractor(networks, options.feature_batch_size, workers, processes, options.compile)
        self.extractor.unfinished_dir = cache_dir / "unfinished"
        self.run = RunFolder(Path(options.run_dir).expanduser()) if options.run_dir else None
        folder = options.output_dir or options.run_dir
        self.output_dir = Path(folder).expanduser() if folder else None
        self.real_images: list[ImageSet] = []  # of every split
        self.references: list[list[Statistics]] = []  # of these for each network, on the main process
        # The classes or captions of a data set are known; those of a folder or of statistics are not.
        self.is_reference_labelled = not (options.real or options.statistics)
        self.best: BestCheckpoint | None = None  # to keep, on the main process
        self.conditions: list[GenerationCondition] | None = None  # what the samples of a run are to show
        self.accuracy: ConditionAccuracy | None = None  # of a conditional run
        if networks[0].name == "inception" and not networks[0].has_logits:
            reason = "the network found here has no last layer; inception-2015-12-05.pt has one (--inception_weights)"
            logger.info("No Inception Score: %s", reason)

    def save_statistics(self) -> None:
        """Compute only the real images' statistics."""
        self._load_references((self.options.resolution, self.options.resolution), is_grey=None, later=0)

    def measure_images(self) -> None:
        """Measure a folder or file of generated images."""
        options = self.options
        images = open_images(options.generated, "--generated", on_bad_image=options.on_bad_image)
        count = options.num_images or len(images)
        if count > len(images):
            raise UserError(f"--num_images {count}: there are only {len(images)} images in {options.generated}")
        if count < FEWEST_IMAGES:
            raise UserError(f"--generated {options.generated}: {count} images, at least {FEWEST_IMAGES} are needed")
        path = Path(options.generated).expanduser()
        record = read_record(path)  # of a folder of generate.py's
        self._load_references(images.size, images.is_grey(), later=count)
        self.extractor.prepare(count, images.size)
        # generate.py's are in the order of their seeds; of others the first by name may all be of one kind.
        chosen = torch.as_tensor(range(count) if record else spread(len(images), count))
        batches = self.extractor.batches(images, chosen)
        features = self.extractor.extract(batches, count, images.name, identity=f"{images.fingerprint} {bool(record)}")
        if self.processes.is_main:
            known = {**(record or {}), "name": path.name if record else images.name, "sha256": images.fingerprint}
            for reference in self.references:
                measured = describe_measured(known, count, reference[0].identity, options.precision)
                self._report(measured, features, reference, {})
        self.processes.barrier()
        self.extractor.forget()

    def measure_run(self) -> None:
        """Measure every checkpoint of a run that has not been measured in this way."""
        options, processes = self.options, self.processes
        lengths, main = options.ema_length, processes.is_main
        models = models_of(self.run, options.checkpoints, options.weights, lengths) if main else None
        models: list[SavedModel] = processes.broadcast(models)
        self._check_table(models)
        self._prepare(models)
        self._measure_models(models)

    def watch_run(self) -> None:
        """Measure every checkpoint of a run that is being trained, each once as it appears, until the run is over."""
        self._prepare([])
        steps = []
        try:
            with closing(appearing(self.run, self.options.weights, self.processes)) as models:
                for model in models:
                    self._check_table([model])
                    self._measure_models([model])
                    steps.append(model.step)
        except Interrupted as stop:
            raise Interrupted(stop.signal_name, f"{stop.outcome}; {self.run.path} is no longer watched") from stop
        logger.info("The run is complete, and every checkpoint that could be read has been measured")
        # Only now: as long as the training went on, wandb and trackio were its own.
        for step in steps if self.processes.is_main else []:
            log_evaluation(self.run, curves_at(RunFolder(self.output_dir), step), step)

    def _check_table(self, models: list[SavedModel]) -> None:
        """Remove rows of these models' earlier weights from the run's table; in another folder they are an error."""
        if self.processes.is_main:
            is_own = self.output_dir.resolve() == self.run.path.resolve()
            (results.remove_replaced if is_own else results.check_same_run)(self.output_dir, models)

    def _prepare(self, models: list[SavedModel]) -> None:
        """Load the reference for the run's images, of which those of the models are measured later."""
        config, options, count = self.run.read_config(), self.options, self.options.num_images or DEFAULT_IMAGES
        conditional = isinstance(config, ConditionalConfig)
        if not conditional and options.guidance_scales != [1.0]:
            scales = " ".join(f"{scale:g}" for scale in options.guidance_scales)
            raise UserError(f"--guidance_scales {scales}: {self.run.path} was trained without a condition")
        shape = models[0].shape if models else (int(config.channels), config.resolution, config.resolution)
        self._load_references(shape[1:], shape[0] == 1, count * len(models) * len(options.guidance_scales))
        if options.keep_best and self.processes.is_main:
            network = self.extractor.networks[0]
            columns = {one.name: one.column(network, count) for one in metrics_of(network, self.references[0][0])}
            columns |= {CONDITION_ACCURACY.name: f"{CONDITION_ACCURACY.name}@{count}"} if conditional else {}
            if options.keep_best not in columns:
                raise UserError(f"--keep_best {options.keep_best}: must be one of {', '.join(columns)}")
            self.best = BestCheckpoint(self.run, columns[options.keep_best])

    def _measure_models(self, models: list[SavedModel]) -> None:
        """Measure these checkpoints of the run, and draw its curves."""
        options, processes = self.options, self.processes
        if not models:
            return
        jobs = [Job(model, build_method(options, model)) for model in models]
        count = options.num_images or DEFAULT_IMAGES
        if self.conditions is None:
            self.conditions = self._choose_conditions(models[0], count)
            if options.keep_best == CONDITION_ACCURACY.name and self.accuracy is None:
                raise UserError(
                    f"--keep_best {CONDITION_ACCURACY.name}: is not measured here, where images have free captions or "
                    f"their labels are missing; choose another metric"
                )

        sets = [range(number * count, (number + 1) * count) for number in range(options.repeats)]
        jobs = [replace(job, condition=condition) for job in jobs for condition in self.conditions]
        numbers, total = itertools.count(1), len(jobs) * len(sets)
        for job in jobs:
            all_samples = [Samples(job, seeds, options, processes) for seeds in sets]
            parts = [self._measure_set(samples, next(numbers), total) for samples in all_samples]
            if processes.is_main:
                means = [self._report_mean(list(of_reference)) for of_reference in zip(*parts, strict=True)]
                if self.best:
                    self.best.consider(job.model, means[0], results.read_results(self.output_dir))

        if processes.is_main:
            rows = results.read_results(self.output_dir)
            pictures = (draw(self.output_dir, rows) for draw in (draw_run, draw_guidance, draw_lengths))
            for plot in itertools.chain(*pictures):
                logger.info("Drew %s", plot)
            update_evaluation(self.output_dir)
            print(f"\n{results.describe_rows(rows, count)}\n")

    def _measure_set(self, samples: Samples, number: int, total: int) -> list[results.Measured]:
        """Measure one of all sets of images, unless that has been done; return on the main process its rows."""
        processes = self.processes
        references = self.references if processes.is_main else []
        measured = [samples.describe(reference[0].identity) for reference in references]
        if processes.broadcast(processes.is_main and self._is_measured(measured)):
            logger.info("%s (%d of %d) has been measured already", samples.name, number, total)
            if processes.is_main:
                samples.discard(self.output_dir)
            return measured
        model = samples.job.model
        logger.info("%s (%d of %d), weights=%s", samples.name, number, total, model.weights)
        self.extractor.prepare(samples.count, model.shape[1:], later=samples.count * (total - number))
        try:
            self._measure_samples(samples, measured)
        except Interrupted as stop:
            raise Interrupted(
                stop.signal_name,
                f"stopped at {samples.name} (its images so far are kept); earlier results are in "
                f"{self.output_dir / results.RESULTS}; start the same command again to continue",
            ) from stop
        return measured

    def _load_references(self, size: tuple[int, int], is_grey: bool | None, later: int) -> None:
        """Load the real images' statistics, for generated images of this size, of which so many are measured later."""
        options, processes = self.options, self.processes
        if options.statistics:
            if processes.is_main:
                named = options.statistics, options.statistics_mode
                self.references = [[named_statistics(*named, network, size) for network in self.extractor.networks]]
            return
        with processes.main_first():
            self.real_images = [self._open_real_images(size, split) for split in options.split or ["train"]]
        for images in self.real_images:
            self._check_real_images(images, size, is_grey)
        for number, images in enumerate(self.real_images, start=1):
            still = later + sum(map(len, self.real_images[number:]))
            self.references.append(reference_statistics(images, self.extractor, self.cache_dir, still))
        if processes.is_main:
            for reference in self.references:
                logger.info("Reference: %s", reference[0].identity.describe())
            if options.save_statistics:
                save_statistics(self.references[0][0], Path(options.save_statistics))
                logger.info("Its statistics are in %s", options.save_statistics)

    def _check_real_images(self, images: ImageSet, size: tuple[int, int], is_grey: bool | None) -> None:
        """Raise if the images are too few, and warn of those that are of another kind than the generated ones."""
        if len(images) < FEWEST_IMAGES:
            raise UserError(f"{images.name}: {len(images)} real images, at least {FEWEST_IMAGES} are needed")
        if tuple(images.size) != tuple(size):
            sizes = *reversed(images.size), *reversed(size)
            logger.warning("The real images are %dx%d, the generated ones %dx%d", *sizes)
        if is_grey is not None and images.is_grey() != is_grey:
            kinds = ("grey", "in colour") if is_grey else ("in colour", "grey")
            logger.warning("The generated images are %s, the real ones %s: both are measured as RGB", *kinds)

    def _open_real_images(self, size: tuple[int, int], split: str) -> ImageSet:
        options, num_workers = self.options, self.extractor.num_workers
        # Images that are not square are compared as they are.
        resolution = options.resolution or (size[0] if size[0] == size[1] else None)
        interpolation = self.run.read_config().interpolation if self.run else INTERPOLATION
        if options.real:
            images = open_images(options.real, "--real", resolution, options.on_bad_image, interpolation)
        elif options.dataset_name or options.train_data_dir:
            named = "dataset_name dataset_config_name train_data_dir image_column cache_dir on_bad_image".split()
            data = DataOptions(**{name: getattr(options, name) for name in named})
            images = EncodedImages(load_images(data, split), resolution, interpolation=interpolation)
        else:
            return training_images(self.run.read_config(), split, options.cache_dir, num_workers)
        skipping = options.on_bad_image == "skip" and isinstance(images, EncodedImages)
        return images.without_bad(num_workers) if skipping else images

    def _choose_conditions(self, model: SavedModel, count: int) -> list[GenerationCondition]:
        """Choose what the samples of a conditional run are to show, at every guidance scale; prepare to check it."""
        options, processes, num_workers = self.options, self.processes, self.extractor.num_workers
        if model.condition is None:
            return [GenerationCondition()]
        try:
            config = self.run.read_config()
            if self.is_reference_labelled:
                real = self.real_images[0]
            else:
                real = training_images(config, "train", options.cache_dir, num_workers)
            requested = request_conditions(config, model.condition, real, count)
            if requested.class_names:
                self.accuracy = ConditionAccuracy(requested, real, num_workers, self.cache_dir, processes)
            shown = requested.options
        except UserError as error:
            if model.condition["condition"] != "class":
                raise  # without captions there is nothing to draw
            logger.warning("Not checked whether samples show what was asked for: %s", error)
            shown = ConditionOptions(class_labels=[ALL])
        return conditions_at(options.guidance_scales, shown, model, processes.device)

    def _is_measured(self, measured: list[results.Measured]) -> bool:
        """Return whether the table has all metrics of a measurement."""
        rows = results.read_results(self.output_dir)
        for one, reference in zip(measured, self.references, strict=True):
            wanted = [
                metric.column(network, one.num_images)
                for network, statistics in zip(self.extractor.networks, reference, strict=True)
                for metric in metrics_of(network, statistics)
            ]
            wanted += self.accuracy.columns() if self.accuracy else []
            row = results.find_row(rows, one)
            if row is None or any(row.get(column) is None for column in wanted):
                return False
        return True

    def _measure_samples(self, samples: Samples, measured: list[results.Measured]) -> None:
        """Measure the images of a checkpoint, which are kept or generated now, against every reference."""
        options, processes = self.options, self.processes
        folder = processes.broadcast(samples.find_kept() if processes.is_main else None)
        if folder is None:
            folder = samples.keep() if options.keep_images else samples.generate(self.output_dir)
        else:
            logger.info("Its images are in %s", folder)
        images, seeds = open_images(str(folder), "--run_dir"), samples.seeds
        # There may be images of other seeds too.
        chosen = torch.tensor(np.searchsorted(seeds_in(read_record(folder)), seeds))
        batches = self.extractor.batches(images, chosen)
        batches = self.accuracy.observe(batches, seeds) if self.accuracy else batches
        features = self.extractor.extract(batches, samples.count, samples.job.model.name, identity=samples.identity)
        accuracy = self.accuracy.measure() if self.accuracy else {}
        for one, reference in zip(measured, self.references, strict=True) if processes.is_main else ():
            metrics = self._report(one, features, reference, accuracy)
            if one.step is not None and not samples.which:
                results.log_results(self.run, self.output_dir, one, metrics, to_trackers=not options.watch)
        processes.barrier()
        self.extractor.forget()
        if processes.is_main:
            samples.discard(self.output_dir)

    def _report_mean(self, parts: list[results.Measured]) -> results.Measured:
        """Add the mean and spread over several sets of images to the results; return what all sets together are."""
        if len(parts) == 1:
            return parts[0]
        rows = results.read_results(self.output_dir)
        metrics = results.mean_and_spread([results.find_row(rows, part) for part in parts])
        measured = results.repeated(parts[0], len(parts))
        known = results.find_row(rows, measured)
        if known is None or any(known.get(column) != value for column, value in metrics.items()):
            results.add_result(self.output_dir, measured, metrics)
            print(f"\n{results.describe_result(measured, metrics)}\n", flush=True)
            if measured.step is not None:
                to_trackers = not self.options.watch
                results.log_results(self.run, self.output_dir, measured, metrics, to_trackers)
        return measured

    def _report(
        self,
        measured: results.Measured,
        extracted: list[Features],
        reference: list[Statistics],
        known: dict[str, float],
    ) -> dict[str, float]:
        """Add all metrics to those that are known, put them into the tables, print and return them."""
        networks, metrics = self.extractor.networks, dict(known)
        for network, features, statistics in zip(networks, extracted, reference, strict=True):
            metrics |= measure(network, features, statistics, self.processes.device)
        classes = []
        if self.accuracy and self.is_reference_labelled and reference is self.references[0]:
            classes = self.accuracy.measure_classes(networks[0], extracted[0], reference[0])
        text = results.describe_result(measured, metrics) + (f"\n\n{describe_classes(classes)}" if classes else "")
        try:
            with user_errors(f"{self.output_dir}: the results cannot be written there", OSError):
                if classes:
                    add_classes(self.output_dir, measured, classes)
                if self.output_dir is not None:
                    results.add_result(self.output_dir, measured, metrics)
        finally:  # on the disk before the screen, and on the screen if there is no disk
            print(f"\n{text}\n", flush=True)
        dimensions = max(features.features.shape[1] for features in extracted)
        counts = [measured.num_images, reference[0].identity.count, *(row["samples"] for row in classes)]
        fewest = min(filter(None, counts))  # how many are behind an .npz is not known
        if fewest < dimensions:
            advice = "" if reference[0].features is None else ". Use KID, which is unbiased"
            message = f"the covariance needs at least {dimensions:,} images{advice}"
            logger.warning("FID of %d images is much too high: %s", fewest, message)
        return metrics
