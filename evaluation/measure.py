"""From the features of two sets of images to the numbers of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evaluation.metrics import (
    Neighbourhoods,
    compare_neighbourhoods,
    frechet_distance,
    inception_score,
    kernel_distance,
)
from evaluation.networks import NEIGHBOUR_METRICS

if TYPE_CHECKING:
    import torch

    from evaluation.features import Features
    from evaluation.networks import FeatureNetwork
    from evaluation.statistics import Statistics


def measure(
    network: FeatureNetwork, generated: Features, reference: Statistics, device: torch.device
) -> dict[str, float]:
    """All that can be said of these images, under the names of the table's columns."""
    metrics = {"fid": frechet_distance(generated.moments, reference.moments)}
    if generated.spatial is not None and reference.spatial is not None:
        metrics["sfid"] = frechet_distance(generated.spatial, reference.spatial)
    if reference.features is not None:
        metrics["kid"], metrics["kid_std"] = kernel_distance(generated.features, reference.features)
    if generated.logits is not None:
        metrics["is"], metrics["is_std"] = inception_score(generated.logits)
    if reference.features is not None:
        metrics |= compare_neighbourhoods(
            Neighbourhoods.of(generated.features, device), reference.neighbourhoods(generated.count, device)
        )
    return {network.column(name, generated.count): value for name, value in metrics.items()}


def columns_of(network: FeatureNetwork, count: int, reference: Statistics) -> list[str]:
    """The names under which `measure` will file what it finds."""
    names = ["fid"] + ["sfid"] * (reference.spatial is not None) + ["is", "is_std"] * network.has_logits
    if reference.features is not None:
        names += ["kid", "kid_std", *NEIGHBOUR_METRICS]
    return [network.column(name, count) for name in names]
