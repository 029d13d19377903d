"""Samples of a conditional run against what was asked for: class by class, at every guidance scale."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.files import write_atomically
from conditions.guidance import conditions_at
from evaluation.classifier import load_classifier
from evaluation.image_sets import batches_of
from evaluation.metrics import Moments, frechet_distance
from evaluation.results import KEYS, as_csv
from evaluation.statistics import MOST_FEATURES_KEPT
from generation.generate_options import ConditionOptions
from image_data.annotations import fill_templates, find_captions, find_labels
from image_data.sources import spread
from run_folder.folder import RunFolder

if TYPE_CHECKING:
    from common.processes import Processes
    from conditions.guidance import GenerationCondition
    from evaluation.classifier import Classifier
    from evaluation.features import Features
    from evaluation.image_sets import Batch, EncodedImages
    from evaluation.networks import FeatureNetwork
    from evaluation.results import Measured
    from evaluation.statistics import Statistics
    from run_folder.saved_model import SavedModel

logger = logging.getLogger(__name__)

PER_CLASS = "evaluation_per_class.csv"
MOST_READ = 50_000  # real images that the classifier learns from, evenly spread
FEWEST_OF_A_CLASS = 10


class Asked:
    """The classes of real images, a classifier of them, and what `count` samples are told to show.

    They are told the classes in the proportions of the real images, or the prompts of these classes, or captions of the
    images: samples must be as various as these to be compared with them. `told` is the run's own description.
    """

    def __init__(
        self,
        run_dir: Path,
        told: dict[str, object],
        real: EncodedImages,
        count: int,
        num_workers: int,
        cache_dir: Path,
        processes: Processes,
    ):
        self.config = vars(RunFolder(run_dir).read_config())
        self.processes, self.classifier, self.count = processes, None, count
        rows = torch.as_tensor(real.rows)
        by_text = self.config["condition"] == "text"
        captions = find_captions(real.files, self.config["caption_column"]) if by_text else None
        if captions is not None and not self.config["caption_template"]:
            self.told = {
                "prompt": [captions[row][0] for row in rows[torch.as_tensor(spread(len(rows), count))].tolist()]
            }
            return
        found = find_labels(real.files, self.config["label_column"])
        self.names, self.labels = found.names, found.of_row[rows]
        if not by_text and self.names != told["class_names"]:
            raise UserError(
                f"the classes of {real.name} are not those that the run knows: {', '.join(self.names[:10])}"
            )
        sizes = torch.bincount(self.labels, minlength=len(self.names))
        # Classes of one size take turns, as those of generate.py do, whose images can then be used.
        in_turn, self.asked = torch.arange(count) % len(self.names), in_proportion(sizes, count)
        is_even = torch.equal(*(torch.bincount(some, minlength=len(self.names)) for some in (in_turn, self.asked)))
        if is_even:
            self.asked = in_turn
        said = self.names
        if by_text:
            said = [several[0] for several in fill_templates(self.config["caption_template"], self.names)]
        told_in_turn = said if is_even else [said[label] for label in self.asked.tolist()]
        self.told = {"prompt" if by_text else "class_labels": told_in_turn}
        # The images take memory that the other processes need not spend as well.
        made = self._classifier_of(real, num_workers, cache_dir) if processes.is_main else None
        made = processes.broadcast(made)
        if isinstance(made, UserError):
            raise made
        made.network.to(processes.device)
        self.classifier = made

    def _classifier_of(self, real: EncodedImages, num_workers: int, cache_dir: Path) -> Classifier | UserError:
        """On the host, or the mistake that all processes are to hear of."""
        chosen = torch.as_tensor(spread(len(real), MOST_READ))
        try:
            pixels = torch.cat([images for _, images in batches_of(real, chosen, 256, num_workers)])
            classifier = load_classifier(pixels, self.labels[chosen], cache_dir, self.processes.device)
        except UserError as error:
            return error
        classifier.network.cpu()
        return classifier

    def conditions(self, model: SavedModel, scales: list[float]) -> list[GenerationCondition]:
        """What the models of a run are told, at each guidance scale."""
        return conditions_at(scales, ConditionOptions(**self.told), model, self.processes.device)

    def columns(self) -> list[str]:
        """The names under which `measure` will file what it finds."""
        if self.classifier is None:
            return []
        return [f"as_asked@{self.count}", f"classifier_accuracy@{self.classifier.num_held_out}"]

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass the samples on, and note what class each is read as."""
        self._indices, self._read = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for indices, images in batches:
            if self.classifier is not None:
                self._indices.append(indices)
                self._read.append(self.classifier.classes_of(images))
            yield indices, images

    def measure(self) -> dict[str, float]:
        """The share of samples that show what was asked for; all processes must ask."""
        if self.classifier is None:
            return {}
        indices, read = (self.processes.gather_rows(torch.cat(parts)) for parts in (self._indices, self._read))
        if not self.processes.is_main:
            return {}
        self._right = read[indices.argsort()] == self.asked
        values = self._right.double().mean().item(), self.classifier.accuracy
        return dict(zip(self.columns(), values, strict=True))

    def measure_classes(
        self, network: FeatureNetwork, generated: Features, reference: Statistics
    ) -> list[dict[str, object]]:
        """A row for every class: the distance of its samples from its real images, with the number of both."""
        if self.classifier is None or reference.features is None:
            return []
        labels = self.labels[torch.as_tensor(spread(len(self.labels), MOST_FEATURES_KEPT))]
        rows = []
        for label, name in enumerate(self.names):
            samples, real = generated.features[self.asked == label], reference.features[labels == label]
            if min(len(samples), len(real)) < FEWEST_OF_A_CLASS:
                logger.warning("Class %s: %d samples, %d real images are too few", name, len(samples), len(real))
                continue
            rows.append(
                {
                    "class": name,
                    "metric": network.column("fid", len(samples)),
                    "value": frechet_distance(moments_of(samples), moments_of(real)),
                    "samples": len(samples),
                    "real_images": len(real),
                    "as_asked": self._right[self.asked == label].double().mean().item(),
                }
            )
        return rows


def in_proportion(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Classes in turn, `count` in all, so that each has its share among the first of them, however many.

    Webster's method: the k-th of class c comes at (k + 1/2) / sizes[c].
    """
    most = int((count + len(sizes) / 2) * sizes.max() / sizes.sum()) + 2  # of one class, at the most
    turns = (torch.arange(most, dtype=torch.float64)[:, None] + 0.5) / sizes
    return turns.flatten().argsort(stable=True)[:count] % len(sizes)


def moments_of(features: torch.Tensor) -> Moments:
    features = features.double()
    return Moments.of_sums(len(features), features.sum(0), features.T @ features)


def check_unconditional(model: SavedModel, scales: list[float]) -> None:
    """Raise for guidance of a model that has none."""
    if model.condition is None and scales != [1.0]:
        shown = " ".join(f"{scale:g}" for scale in scales)
        raise UserError(f"--guidance_scales {shown}: {model.name} was trained without a condition")


def add_classes(output_dir: Path, measured: Measured, classes: list[dict[str, object]]) -> None:
    """Put the rows of a measurement into the table of classes, in place of earlier ones of the same."""
    path = output_dir / PER_CLASS
    rows: list[dict[str, object]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    what = {name: "" if value is None else str(value) for name, value in asdict(measured).items()}
    rows = [row for row in rows if any(row[name] != what[name] for name in KEYS)]
    rows += [{**what, **row} for row in classes]
    write_atomically(path, as_csv([*KEYS, "class", "metric", "value", "samples", "real_images", "as_asked"], rows))


def describe_classes(classes: list[dict[str, object]]) -> str:
    """The rows for a person."""
    width, named = (max(len(str(row[name])) for row in classes) for name in ("class", "metric"))
    return "\n".join(
        f"  {row['class']:{width}}  {row['metric']:{named}}  {row['value']:6.4g}  against {row['real_images']} real "
        f"images, {row['as_asked']:.1%} as asked"
        for row in classes
    )
