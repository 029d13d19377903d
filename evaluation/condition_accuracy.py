"""Samples of a conditional run against what they were to show: class by class, at every guidance scale."""

import csv
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import in_turn, write_atomically
from common.processes import Processes
from evaluation.classifier import Classifier, load_classifier
from evaluation.features import Features
from evaluation.image_sets import Batch, EncodedImages, batches_of
from evaluation.metrics import CLASSIFIER_ACCURACY, CONDITION_ACCURACY, FD, FID, Moments, frechet_distance
from evaluation.networks import FeatureNetwork
from evaluation.results import KEYS, Measured, as_csv, marked
from evaluation.statistics import MOST_FEATURES_KEPT, Statistics
from generation.generate_options import ConditionOptions
from image_data.annotations import fill_templates, find_captions, find_labels
from image_data.sources import spread
from run_folder.config import ConditionalConfig

logger = logging.getLogger(__name__)

MOST_LEARNT = 50_000  # real images that the classifier learns from, evenly spread
FEWEST_OF_A_CLASS = 10


@dataclass
class RequestedConditions:
    """What the samples are to show. They can be compared with the real images if they are as various as these."""

    options: ConditionOptions  # the classes, prompts or captions, in turn
    class_names: list[str] = field(default_factory=list)  # none if samples show free captions
    classes: torch.Tensor | None = None  # of the samples
    real_classes: torch.Tensor | None = None


def request_conditions(
    config: ConditionalConfig, condition: dict[str, Any], real: EncodedImages, count: int
) -> RequestedConditions:
    """Choose what `count` samples are to show: classes in the proportions of the real images, or captions of these."""
    rows = torch.as_tensor(real.rows)
    by_text = config.condition == "text"
    captions = find_captions(real.files, config.caption_column) if by_text else None
    if captions is not None and not config.caption_template:
        chosen = rows[torch.as_tensor(spread(len(rows), count))].tolist()
        return RequestedConditions(ConditionOptions(prompt=[captions[row][0] for row in chosen]))
    found = find_labels(real.files, config.label_column)
    names, real_classes = found.names, found.of_row[rows]
    if not by_text and names != condition["class_names"]:
        raise UserError(f"the classes of {real.name} are not those that the run knows: {', '.join(names[:10])}")
    classes = in_proportion(torch.bincount(real_classes, minlength=len(names)), count)
    in_turn = torch.arange(count) % len(names)
    texts = [several[0] for several in fill_templates(config.caption_template, names)] if by_text else names
    if torch.equal(*(torch.bincount(some, minlength=len(names)) for some in (in_turn, classes))):
        # Classes of one size take turns, as those of generate.py do, whose images can then be used.
        classes, choices = in_turn, texts
    else:
        choices = [texts[label] for label in classes.tolist()]
    options = ConditionOptions(**{"prompt" if by_text else "class_labels": choices})
    return RequestedConditions(options, names, classes, real_classes)


class ConditionAccuracy:
    """The share of samples that show the class they were to show, judged by a classifier of the real images."""

    def __init__(
        self,
        requested: RequestedConditions,
        real: EncodedImages,
        num_workers: int,
        cache_dir: Path,
        processes: Processes,
    ):
        self.requested, self.processes = requested, processes
        # The images take memory that the other processes need not spend as well.
        found = self._load_classifier(real, num_workers, cache_dir) if processes.is_main else None
        self.classifier = processes.broadcast(found)
        if isinstance(self.classifier, UserError):
            raise self.classifier
        self.classifier.network.to(processes.device)

    def _load_classifier(self, real: EncodedImages, num_workers: int, cache_dir: Path) -> Classifier | UserError:
        """Return the classifier, or the error that all processes are to raise."""
        chosen = torch.as_tensor(spread(len(real), MOST_LEARNT))
        try:
            pixels = torch.cat([images for _, images in batches_of(real, chosen, 256, num_workers)])
            classifier = load_classifier(pixels, self.requested.real_classes[chosen], cache_dir, self.processes.device)
        except UserError as error:
            return error
        classifier.network.cpu()  # to be sent to the other processes
        return classifier

    def columns(self) -> list[str]:
        """Return the names of what `measure` finds."""
        count = len(self.requested.classes)
        return [f"{CONDITION_ACCURACY.name}@{count}", f"{CLASSIFIER_ACCURACY.name}@{self.classifier.num_held_out}"]

    def observe(self, batches: Iterable[Batch], seeds: range) -> Iterator[Batch]:
        """Pass the samples of these seeds on, and note the class that each is recognised as."""
        options = self.requested.options
        in_turn = torch.tensor(seeds) % len(options.class_labels or options.prompt)
        self._classes = self.requested.classes[in_turn]
        self._recognised = [torch.zeros(0, 2, dtype=torch.int64)]  # which sample, which class
        for indices, images in batches:
            self._recognised.append(torch.stack([indices, self.classifier.classes_of(images)], dim=1))
            yield indices, images

    def measure(self) -> dict[str, float]:
        """Return the share of samples that show what was asked for; all processes must call this."""
        indices, recognised = self.processes.gather_rows(torch.cat(self._recognised)).T
        if not self.processes.is_main:
            return {}
        self._is_right = recognised[indices.argsort()] == self._classes
        values = self._is_right.double().mean().item(), self.classifier.accuracy
        return dict(zip(self.columns(), values, strict=True))

    def measure_classes(
        self, network: FeatureNetwork, generated: Features, reference: Statistics
    ) -> list[dict[str, object]]:
        """Return a row for every class: the distance of its samples from its real images, with the number of both."""
        if reference.features is None:
            return []
        real_classes = self.requested.real_classes
        real_classes = real_classes[torch.as_tensor(spread(len(real_classes), MOST_FEATURES_KEPT))]
        distance = FID if network.name == "inception" else FD
        rows = []
        for label, name in enumerate(self.requested.class_names):
            is_sample = self._classes == label
            samples, real = generated.features[is_sample], reference.features[real_classes == label]
            if min(len(samples), len(real)) < FEWEST_OF_A_CLASS:
                logger.warning("Class %s: %d samples, %d real images are too few", name, len(samples), len(real))
                continue
            rows.append(
                {
                    "class": name,
                    "metric": distance.column(network, len(samples)),
                    "value": frechet_distance(Moments.of_features(samples), Moments.of_features(real)),
                    "samples": len(samples),
                    "real_images": len(real),
                    "condition_accuracy": self._is_right[is_sample].double().mean().item(),
                }
            )
        return rows


def in_proportion(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return classes in turn, `count` in all, so that each has its share among the first of them, however many."""
    # Webster's method: the k-th of class c comes at (k + 1/2) / sizes[c].
    most = int((count + len(sizes) / 2) * sizes.max() / sizes.sum()) + 2  # of one class, at the most
    turns = (torch.arange(most, dtype=torch.float64)[:, None] + 0.5) / sizes
    return turns.flatten().argsort(stable=True)[:count] % len(sizes)


def add_classes(output_dir: Path, measured: Measured, classes: list[dict[str, object]]) -> None:
    """Put the rows of a measurement into the table of classes, in place of earlier ones of the same."""
    path = output_dir / "evaluation_per_class.csv"
    keys = {name: "" if value is None else str(value) for name, value in asdict(measured).items()}
    columns = [*KEYS, "class", "metric", "value", "samples", "real_images", "condition_accuracy"]
    with in_turn(output_dir):
        rows: list[dict[str, object]] = []
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if any(row[name] != keys[name] for name in KEYS)]
        write_atomically(path, as_csv(columns, [*rows, *({**keys, **row} for row in classes)]))


def describe_classes(classes: list[dict[str, object]]) -> str:
    """Describe the rows for a person."""
    width = max(len(str(row["class"])) for row in classes)
    metric_width = max(len(marked(row["metric"])) for row in classes)
    return "\n".join(
        f"  {row['class']:{width}}  {marked(row['metric']):{metric_width}}  {row['value']:6.4g}  against "
        f"{row['real_images']} real images, {row['condition_accuracy']:.1%} correct"
        for row in classes
    )
