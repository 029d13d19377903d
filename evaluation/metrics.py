"""The metrics: distances between two sets of images and the score of one, all computed from features.

FID (Heusel et al. 2017), sFID (Nash et al. 2021), KID (Binkowski et al. 2018), Inception Score (Salimans et al. 2016),
precision and recall (Kynkaanniemi et al. 2019), density and coverage (Naeem et al. 2020).

A new metric is a function here and an entry in METRICS at the end, which alone knows its columns and its direction.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

import torch

from common.errors import UserError

if TYPE_CHECKING:
    from evaluation.features import Features
    from evaluation.networks import FeatureNetwork
    from evaluation.statistics import Statistics

PUBLISHED_MODE = "legacy_tensorflow"  # how Inception sees the images behind published numbers; columns leave it out
SPREAD = "_std@"  # in columns with the standard deviation of a metric
SCORE_SPLITS = 10
KERNEL_SUBSETS, KERNEL_SUBSET_SIZE = 100, 1000
PRECISION_NEIGHBOURS, COVERAGE_NEIGHBOURS = 3, 5
DISTANCES_AT_ONCE = 2**25  # 256 MB
ROUNDING = 1e-3  # of a covariance, relative to its largest entry


@dataclass
class Moments:
    """Mean and covariance of features, in float64."""

    mean: torch.Tensor
    covariance: torch.Tensor

    def __post_init__(self) -> None:
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise UserError("the mean or covariance of the features is not finite: the network or file is damaged")

    @classmethod
    def of_sums(cls, count: int, total: torch.Tensor, outer: torch.Tensor) -> Moments:
        """Compute them from the sums of f and of f f^T; the covariance is the unbiased one, as everywhere."""
        if count < 2:
            raise UserError(f"a set of {count} image(s) has no covariance: two are needed, and many to be measured by")
        mean = total / count
        return cls(mean, (outer - count * torch.outer(mean, mean)) / (count - 1))

    @classmethod
    def of_features(cls, features: torch.Tensor) -> Moments:
        """Compute them from features [n, dimensions]."""
        features = features.double()
        return cls.of_sums(len(features), features.sum(0), features.T @ features)

    def check(self) -> None:
        """Raise for what somebody may have written into a file and is no covariance."""
        largest = self.covariance.diagonal().abs().max()
        is_symmetric = (self.covariance - self.covariance.T).abs().max() <= ROUNDING * largest
        if not is_symmetric or torch.linalg.eigvalsh(self.covariance)[0] < -ROUNDING * largest:
            raise ValueError("a covariance is symmetric and has no negative eigenvalues")

    @functools.cached_property
    def root(self) -> torch.Tensor:
        """Return the symmetric square root of the covariance."""
        values, vectors = torch.linalg.eigh(self.covariance)  # rounding may leave some of them below 0
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def frechet_distance(generated: Moments, reference: Moments) -> float:
    """Compute |m - m'|^2 + tr(C + C' - 2 sqrt(C C')), Heusel et al. 2017, equation 6."""
    # C C' has the eigenvalues of the symmetric sqrt(C') C sqrt(C'), whose root never turns complex and is fast.
    product = reference.root @ generated.covariance @ reference.root
    trace_of_root = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (generated.mean - reference.mean).square().sum()
    traces = generated.covariance.trace() + reference.covariance.trace()
    return max(0.0, (distance + traces - 2 * trace_of_root).item())


def kernel_distance(generated: torch.Tensor, reference: torch.Tensor) -> tuple[float, ...]:
    """Estimate the squared MMD with the kernel (x.y / d + 1)^3, without bias: mean, and deviation over any subsets."""
    from torch_fidelity.metric_kid import kid_features_to_metric

    size = min(KERNEL_SUBSET_SIZE, len(generated), len(reference))
    subsets = 1 if size == len(generated) == len(reference) else KERNEL_SUBSETS  # there is but one of all
    sizes = {"kid_subset_size": size, "kid_subsets": subsets}
    mean, deviation = kid_features_to_metric(generated.double(), reference.double(), **sizes, verbose=False).values()
    return (mean, deviation) if subsets > 1 else (mean,)


def inception_score(logits: torch.Tensor) -> tuple[float, float]:
    """Compute exp E KL(p(y|x) | p(y)); return mean and standard deviation over ten splits."""
    from torch_fidelity.metric_isc import isc_features_to_metric

    return tuple(isc_features_to_metric(logits, splits=SCORE_SPLITS).values())


@dataclass
class Neighbourhoods:
    """Features and, around each, the distances to its third and fifth neighbour in the same set."""

    features: torch.Tensor
    to_third: torch.Tensor
    to_fifth: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor, device: torch.device) -> Neighbourhoods:
        """Compute the distances on this device."""
        if len(features) <= COVERAGE_NEIGHBOURS:
            failure = f"a set of {len(features)} images is too small for precision and recall"
            raise UserError(f"{failure}: an image needs {COVERAGE_NEIGHBOURS} neighbours")
        # In float64 where there is any: equal images are then at a distance far below all others.
        features = features.to(device, torch.float32 if device.type == "mps" else torch.float64)
        farthest = COVERAGE_NEIGHBOURS + 1  # each is its own nearest
        blocks = features.split(_rows_at_once(features))
        nearest = torch.cat([torch.cdist(block, features).topk(farthest, largest=False).values for block in blocks])
        return cls(features, nearest[:, PRECISION_NEIGHBOURS], nearest[:, COVERAGE_NEIGHBOURS])


def compare_neighbourhoods(generated: Neighbourhoods, reference: Neighbourhoods) -> dict[str, float]:
    """Compute precision and recall with three neighbours, density and coverage with five.

    Precision is the share of generated images in the ball around a real one, recall that of real ones in the ball
    around a generated one; density the number of real balls around a generated image, as a multiple of what a real
    image has; coverage the share of real balls that hold a generated one.
    """
    precise, balls = [], []
    recalled = torch.zeros(len(reference.features), dtype=torch.bool, device=reference.features.device)
    covered = torch.zeros_like(recalled)
    rows = _rows_at_once(reference.features)
    for block, radius in zip(generated.features.split(rows), generated.to_third.split(rows), strict=True):
        distances = torch.cdist(block, reference.features)
        precise.append((distances <= reference.to_third).any(dim=1))
        recalled |= (distances <= radius[:, None]).any(dim=0)
        inside = distances < reference.to_fifth
        balls.append(inside.sum(dim=1))
        covered |= inside.any(dim=0)
    return {
        "precision": torch.cat(precise).cpu().double().mean().item(),
        "recall": recalled.cpu().double().mean().item(),
        "density": torch.cat(balls).cpu().double().mean().item() / COVERAGE_NEIGHBOURS,
        "coverage": covered.cpu().double().mean().item(),
    }


def _rows_at_once(features: torch.Tensor) -> int:
    return max(1, DISTANCES_AT_ONCE // len(features))


@dataclass(frozen=True)
class Metric:
    """A number in the tables: what its columns are called, which direction is better, how it is computed and drawn."""

    name: str  # the first word of its columns
    needs: str | None = None  # what `compute` is given, a key of the inputs in `measure`
    compute: Callable[..., float | tuple[float, float]] | None = None  # perhaps with a standard deviation
    networks: Literal["inception", "others", "all"] = "all"  # for "inception" alone, columns do not name the network
    label: str = ""  # in plots
    lower_is_better: bool = False
    of_samples: bool = True  # what is not a property of the samples has no best row
    curves: tuple[str, ...] = ()  # the plots of a run, by what they are drawn against

    def column(self, network: FeatureNetwork, count: int) -> str:
        """Return a name that says all that makes numbers comparable: `fid@10000`, `kid_clean@10000`, `fd_clip@500`."""
        network_name = "" if self.networks == "inception" else f"_{network.name}"
        has_mode = network.name == "inception" and network.mode != PUBLISHED_MODE
        return f"{self.name}{network_name}{f'_{network.mode}' if has_mode else ''}@{count}"


ALL_CURVES = STEPS, FIRST_STEPS, SECONDS = "TrainingSteps", "TrainingSteps_First25", "TrainingSeconds"
_FRECHET = {"compute": frechet_distance, "lower_is_better": True}
_KERNEL = {"compute": kernel_distance, "lower_is_better": True}

# The I of FID and KID is Inception's.
FID = Metric("fid", "moments", networks="inception", label="FID", curves=ALL_CURVES, **_FRECHET)
KID = Metric("kid", "features", networks="inception", label="KID", curves=(STEPS,), **_KERNEL)
FD = Metric("fd", "moments", networks="others", label="Fréchet distance", curves=ALL_CURVES, **_FRECHET)
INCEPTION_SCORE = Metric("is", "logits", inception_score, "inception", "Inception Score", curves=(STEPS, FIRST_STEPS))
# These two are found by evaluation/condition_accuracy.py.
CONDITION_ACCURACY = Metric("condition_accuracy", label="condition accuracy")
CLASSIFIER_ACCURACY = Metric("classifier_accuracy", of_samples=False)

METRICS = (
    FID,
    Metric("sfid", "spatial", networks="inception", **_FRECHET),
    KID,
    INCEPTION_SCORE,
    FD,
    Metric("kd", "features", networks="others", **_KERNEL),
    # Their authors measured these on VGG16, so that with Inception too the columns name the network.
    Metric("precision", "neighbours", itemgetter("precision")),
    Metric("recall", "neighbours", itemgetter("recall")),
    Metric("density", "neighbours", itemgetter("density")),
    Metric("coverage", "neighbours", itemgetter("coverage")),
    CONDITION_ACCURACY,
    CLASSIFIER_ACCURACY,
)


def metric_of(column: str) -> Metric:
    """Return the metric of a column, whatever the network, its mode and the number of images."""
    return next((metric for metric in METRICS if re.match(f"{metric.name}[_@]", column)), Metric(column))


def metrics_of(network: FeatureNetwork, reference: Statistics) -> list[Metric]:
    """Return the metrics that can be computed from this network's features and what is kept of the reference."""
    available = ["moments"] + ["spatial"] * (reference.spatial is not None) + ["logits"] * network.has_logits
    available += ["features", "neighbours"] * (reference.features is not None)
    networks = ("all", "inception" if network.name == "inception" else "others")
    return [metric for metric in METRICS if metric.needs in available and metric.networks in networks]


def measure(
    network: FeatureNetwork, generated: Features, reference: Statistics, device: torch.device
) -> dict[str, float]:
    """Compute every metric that can be, under the names of the table's columns."""
    inputs = {
        "moments": (generated.moments, reference.moments),
        "spatial": (generated.spatial, reference.spatial),
        "features": (generated.features, reference.features),
        "logits": (generated.logits,),
    }
    if reference.features is not None:
        neighbours = Neighbourhoods.of(generated.features, device), reference.neighbourhoods(generated.count, device)
        inputs["neighbours"] = (compare_neighbourhoods(*neighbours),)
    numbers: dict[str, float] = {}
    for metric in metrics_of(network, reference):
        column, value = metric.column(network, generated.count), metric.compute(*inputs[metric.needs])
        values = value if isinstance(value, tuple) else (value,)
        numbers |= zip((column, column.replace("@", SPREAD)), values, strict=False)
    return numbers
