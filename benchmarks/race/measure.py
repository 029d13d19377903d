"""Snapshots of a run measured: images from seeds, features of Inception, distances to the training images."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.race.plan import Measurement, Race
from common.files import default_cache_dir, load_safetensors, save_safetensors, sha256
from common.processes import Processes, start_processes
from evaluation.evaluate_options import EvaluationOptions
from evaluation.features import FeatureExtractor
from evaluation.image_sets import as_rgb
from evaluation.metrics import Moments, Neighbourhoods, compare_neighbourhoods, frechet_distance, kernel_distance
from evaluation.networks import FeatureNetwork, load_networks
from evaluation.samples import training_images
from generation.engine import InferenceSettings, Job, generate_images
from image_data.sources import spread
from run_folder.checkpoints import WEIGHTS
from run_folder.config import TrainingConfig, scheduler_of
from run_folder.saved_model import SavedModel
from schedulers.denoising import DDIM, DDPM

BATCH = 250


class Judge:
    """Measures snapshots against the training images, which it looks at once."""

    def __init__(self, race: Race, data: TrainingConfig):
        self.race = race
        options = EvaluationOptions(mixed_precision=race.mixed_precision, modes=["legacy_tensorflow"])
        self.processes: Processes = start_processes(options)
        torch.set_num_threads(race.threads)
        cache_dir = default_cache_dir()
        self.network: FeatureNetwork = load_networks(options, cache_dir, self.processes.device)[0]
        if race.compile:
            self.network.network = torch.compile(self.network.network)
        self.extractor = FeatureExtractor([self.network], 50, 0, self.processes)
        self.reference = self._features_of_training_images(data, cache_dir)
        self.moments = Moments.of_features(self.reference)
        self._neighbourhoods: dict[int, Neighbourhoods] = {}

    def _features_of_training_images(self, data: TrainingConfig, cache_dir: Path) -> torch.Tensor:
        """Return the features of so many of the training images, evenly spread."""
        channels = 1 if data.channels == "1" else 3  # what "auto" finds to be grey is as grey in three
        images = training_images(replace(data, channels=str(channels)), "train", data.cache_dir, 0)
        chosen = torch.as_tensor(spread(len(images), self.race.reference_images))
        pixels = hashlib.sha256(f"{images.fingerprint} {channels}".encode()).hexdigest()[:12]
        name = f"{pixels}-{data.resolution}-{len(chosen)}-{self.network.digest[:8]}"
        path = cache_dir / "race" / f"{name}-{self.network.precision_name}.safetensors"
        if path.exists():
            return load_safetensors(path)[0]["features"]
        batches = self.extractor.batches(images, chosen)
        # `batches` numbers the images as the set does; the features come in that order.
        features = self.extractor.extract(batches, len(chosen), "Training images")[0].features
        save_safetensors({"features": features}, path, {})
        return features

    def measure(self, folder: Path, measurement: Measurement, config: TrainingConfig) -> dict[str, float]:
        """Return FID, KID, precision and recall of the images of a snapshot of a run with these options."""
        return self.measure_model(snapshot_model(folder, config), measurement)

    def measure_model(self, model: SavedModel, measurement: Measurement) -> dict[str, float]:
        start = time.perf_counter()
        metrics = self.measure_images(self.generate(model, measurement), measurement.num_images)
        return {**metrics, "seconds": round(time.perf_counter() - start, 1)}

    def generate(self, model: SavedModel, measurement: Measurement) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Generate the images of a measurement, in batches with their seeds."""
        steps, count = measurement.num_inference_steps, measurement.num_images
        method = DDIM(model.scheduler, steps) if measurement.sampler == "ddim" else DDPM(model.scheduler, steps)
        settings = InferenceSettings(self.race.mixed_precision, compile=self.race.compile, batch_size=min(BATCH, count))
        return generate_images(Job(model, method), range(count), self.processes, settings)

    def measure_images(self, images: Iterable[tuple[list[int], torch.Tensor]], count: int) -> dict[str, float]:
        """Return FID, KID, precision and recall of so many images, which come in batches with their seeds."""
        batches = ((torch.tensor(seeds), as_rgb(pixels)) for seeds, pixels in images)
        features = self.extractor.extract(batches, count, None)[0].features
        if count not in self._neighbourhoods:
            chosen = self.reference[torch.as_tensor(spread(len(self.reference), count))]
            self._neighbourhoods[count] = Neighbourhoods.of(chosen, self.processes.device)
        generated = Neighbourhoods.of(features, self.processes.device)
        compared = compare_neighbourhoods(generated, self._neighbourhoods[count])
        return {
            "fid": frechet_distance(Moments.of_features(features), self.moments),
            "kid": kernel_distance(features, self.reference)[0],
            **{name: compared[name] for name in ("precision", "recall")},
        }


def snapshot_model(folder: Path, config: TrainingConfig, kind: type[SavedModel] = SavedModel, **own) -> SavedModel:
    """Return the model in a snapshot of a run with these options."""
    scheduler = scheduler_of(vars(config))
    return kind(
        name=folder.name, path=folder, home=folder, weights="ema", network_folder=folder,
        sha256=sha256(folder / WEIGHTS), scheduler_config=dict(scheduler.config), **own,
    )  # fmt: skip
