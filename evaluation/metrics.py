"""What papers print, from features: distances between two sets of images, and the score of one.

FID (Heusel et al. 2017), sFID (Nash et al. 2021), KID (Binkowski et al. 2018), Inception Score (Salimans et al. 2016),
precision and recall (Kynkaanniemi et al. 2019), density and coverage (Naeem et al. 2020).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from common.errors import UserError

SCORE_SPLITS = 10
KERNEL_SUBSETS, KERNEL_SUBSET_SIZE = 100, 1000
PRECISION_NEIGHBOURS, COVERAGE_NEIGHBOURS = 3, 5
DISTANCES_AT_ONCE = 2**25  # 256 MB


@dataclass
class Moments:
    """Mean and covariance of features, in float64."""

    mean: torch.Tensor
    covariance: torch.Tensor

    def __post_init__(self) -> None:
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise UserError("features whose mean and covariance are no finite numbers: the network or file is damaged")

    @classmethod
    def of_sums(cls, count: int, total: torch.Tensor, outer: torch.Tensor) -> Moments:
        """From the sums of f and of f f^T; the covariance is the unbiased one, as in every implementation of FID."""
        if count < 2:
            raise UserError(f"a set of {count} image(s) has no covariance: two are needed, and many to be measured by")
        mean = total / count
        return cls(mean, (outer - count * torch.outer(mean, mean)) / (count - 1))

    @functools.cached_property
    def root(self) -> torch.Tensor:
        """The symmetric square root of the covariance."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def frechet_distance(generated: Moments, reference: Moments) -> float:
    """|m - m'|^2 + tr(C + C' - 2 sqrt(C C')), Heusel et al. 2017, equation 6.

    C C' has the eigenvalues of the symmetric sqrt(C') C sqrt(C'), so that no square root of a matrix without symmetry
    is needed, which is slow and turns complex where images are few.
    """
    product = reference.root @ generated.covariance @ reference.root
    trace_of_root = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (generated.mean - reference.mean).square().sum()
    traces = generated.covariance.trace() + reference.covariance.trace()
    return max(0.0, (distance + traces - 2 * trace_of_root).item())


def kernel_distance(generated: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Unbiased squared MMD with the kernel (x.y / d + 1)^3: mean and standard deviation over subsets."""
    from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, KEY_METRIC_KID_STD, kid_features_to_metric

    size = min(KERNEL_SUBSET_SIZE, len(generated), len(reference))
    whole = size == len(generated) == len(reference)  # then there is one subset only
    result = kid_features_to_metric(
        generated.double(),
        reference.double(),
        kid_subset_size=size,
        kid_subsets=1 if whole else KERNEL_SUBSETS,
        verbose=False,
    )
    return result[KEY_METRIC_KID_MEAN], result[KEY_METRIC_KID_STD]


def inception_score(logits: torch.Tensor) -> tuple[float, float]:
    """exp E KL(p(y|x) | p(y)): mean and standard deviation over ten splits."""
    from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, KEY_METRIC_ISC_STD, isc_features_to_metric

    result = isc_features_to_metric(logits, splits=SCORE_SPLITS)
    return result[KEY_METRIC_ISC_MEAN], result[KEY_METRIC_ISC_STD]


@dataclass
class Neighbourhoods:
    """Features and, around each, the distances to its third and fifth neighbour in the same set."""

    features: torch.Tensor
    to_third: torch.Tensor
    to_fifth: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor, device: torch.device) -> Neighbourhoods:
        if len(features) <= COVERAGE_NEIGHBOURS:
            raise UserError(
                f"a set of {len(features)} images is too small for precision and recall: "
                f"an image needs {COVERAGE_NEIGHBOURS} neighbours"
            )
        # Where there is float64: distances between equal images are then zero but for rounding far below any other.
        features = features.to(device, torch.float32 if device.type == "mps" else torch.float64)
        farthest = COVERAGE_NEIGHBOURS + 1  # each is its own nearest
        nearest = [
            torch.cdist(block, features).topk(farthest, largest=False).values
            for block in features.split(_rows_at_once(features))
        ]
        nearest = torch.cat(nearest)
        return cls(features, nearest[:, PRECISION_NEIGHBOURS], nearest[:, COVERAGE_NEIGHBOURS])


def compare_neighbourhoods(generated: Neighbourhoods, reference: Neighbourhoods) -> dict[str, float]:
    """Precision and recall with three neighbours, density and coverage with five.

    Precision: the share of generated images within the ball of a real one; recall: of real ones within the ball of a
    generated one. Density: how many of the real balls hold a generated image, as a multiple of what is expected of the
    real ones; coverage: the share of real balls that hold one.
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
