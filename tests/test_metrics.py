"""The metrics, against the peers that papers used, run here on the same features."""

import contextlib
import io

import numpy as np
import pytest
import torch
from cleanfid.fid import frechet_distance as clean_fid_distance
from cleanfid.fid import kernel_distance as clean_fid_kernel_distance
from prdc import compute_prdc
from pytorch_fid.fid_score import calculate_frechet_distance as pytorch_fid_distance
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from common.errors import UserError
from evaluation.metrics import (
    Moments,
    Neighbourhoods,
    compare_neighbourhoods,
    frechet_distance,
    inception_score,
    kernel_distance,
)

CPU = torch.device("cpu")


def draw(count: int, seed: int, shift: float = 0.0, dimensions: int = 48) -> torch.Tensor:
    """Features as networks make them: correlated and not negative."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dimensions, dimensions, generator=torch.Generator().manual_seed(0)) / dimensions**0.5
    return (torch.randn(count, dimensions, generator=generator) @ mixing + shift).relu()


@pytest.fixture(scope="module")
def generated() -> torch.Tensor:
    return draw(400, seed=1, shift=0.1)


@pytest.fixture(scope="module")
def real() -> torch.Tensor:
    return draw(300, seed=2)


def moments(features: torch.Tensor) -> Moments:
    features = features.double()
    return Moments.of_sums(len(features), features.sum(dim=0), features.T @ features)


def as_numpy(features: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    values = features.double().numpy()
    return values.mean(axis=0), np.cov(values, rowvar=False)


def test_sums_give_mean_and_covariance(real):
    mean, covariance = as_numpy(real)
    ours = moments(real)
    np.testing.assert_allclose(ours.mean.numpy(), mean, rtol=1e-13)
    np.testing.assert_allclose(ours.covariance.numpy(), covariance, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("peer", [clean_fid_distance, pytorch_fid_distance])
def test_fid_is_that_of_its_peers(generated, real, peer):
    theirs = peer(*as_numpy(generated), *as_numpy(real))
    assert frechet_distance(moments(generated), moments(real)) == pytest.approx(theirs, rel=1e-8)


def test_fid_is_that_of_torch_fidelity(generated, real):
    statistics = [fid_features_to_statistics(features) for features in (generated, real)]
    theirs = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(moments(generated), moments(real)) == pytest.approx(theirs, rel=1e-3)


def test_fid_of_fewer_images_than_dimensions():
    """Singular covariances, on which square roots of matrices turn complex; known exactly from the small side."""
    few, others = draw(20, seed=3), draw(25, seed=4, shift=0.1)
    factors = [(features - features.mean(dim=0)).double() / (len(features) - 1) ** 0.5 for features in (few, others)]
    nuclear_norm = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    gap = (few.double().mean(dim=0) - others.double().mean(dim=0)).square().sum()
    exact = gap + sum(factor.square().sum() for factor in factors) - 2 * nuclear_norm
    assert frechet_distance(moments(few), moments(others)) == pytest.approx(exact.item(), rel=1e-5)


def test_fid_of_gaussians_is_the_closed_form():
    """Covariances that commute: the distance is that of means and of standard deviations."""
    one = Moments(torch.tensor([1.0, 2.0]).double(), torch.diag(torch.tensor([4.0, 9.0]).double()))
    other = Moments(torch.tensor([0.0, 2.0]).double(), torch.diag(torch.tensor([1.0, 25.0]).double()))
    assert frechet_distance(one, other) == pytest.approx(1 + (2 - 1) ** 2 + (3 - 5) ** 2)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-12)


def test_kid_is_that_of_torch_fidelity_on_the_same_subsets(monkeypatch, generated, real):
    monkeypatch.setattr("evaluation.metrics.KERNEL_SUBSET_SIZE", 100)
    theirs = kid_features_to_metric(generated, real, kid_subset_size=100, verbose=False)
    mean, deviation = kernel_distance(generated, real)
    assert mean == pytest.approx(theirs["kernel_inception_distance_mean"], abs=1e-6)
    assert deviation == pytest.approx(theirs["kernel_inception_distance_std"], abs=1e-6)


def test_kid_of_whole_sets_is_that_of_clean_fid(generated, real):
    theirs = clean_fid_kernel_distance(generated[:300].numpy(), real.numpy(), num_subsets=1)
    # Of the only subset that there is, nobody knows how far it is off.
    assert kernel_distance(generated[:300], real) == (pytest.approx(theirs, abs=1e-6),)


def neighbour_metrics(generated: torch.Tensor, real: torch.Tensor) -> dict[str, float]:
    return compare_neighbourhoods(Neighbourhoods.of(generated, CPU), Neighbourhoods.of(real, CPU))


def test_precision_and_recall_are_those_of_torch_fidelity(generated, real):
    theirs = prc_features_to_metric(generated, real, verbose=False)
    ours = neighbour_metrics(generated, real)
    assert theirs["precision"] < 0.8 < theirs["recall"] < 1
    assert ours["precision"] == pytest.approx(theirs["precision"], abs=1e-6)
    assert ours["recall"] == pytest.approx(theirs["recall"], abs=1e-6)


def test_neighbour_metrics_are_those_of_prdc(generated, real):
    with contextlib.redirect_stdout(io.StringIO()):
        of_three = compute_prdc(real.numpy(), generated.numpy(), nearest_k=3)
        of_five = compute_prdc(real.numpy(), generated.numpy(), nearest_k=5)
    wanted = {name: of_three[name] for name in ("precision", "recall")}
    wanted |= {name: of_five[name] for name in ("density", "coverage")}
    assert neighbour_metrics(generated, real) == pytest.approx(wanted, abs=1e-6)


def test_neighbour_metrics_do_not_depend_on_the_blocks(monkeypatch, generated, real):
    whole = neighbour_metrics(generated, real)
    monkeypatch.setattr("evaluation.metrics.DISTANCES_AT_ONCE", 7 * 400)
    assert neighbour_metrics(generated, real) == whole


def test_a_collapsed_set_is_precise_and_recalls_nothing(real):
    """A few real images again and again, hardly changed. Were the two confused, it would be the other way round."""
    collapsed = real[:3].repeat(100, 1) + 1e-3 * draw(300, seed=5)
    metrics = neighbour_metrics(collapsed, real)
    assert metrics["precision"] == 1
    assert metrics["recall"] < 0.02
    assert metrics["coverage"] < 0.2


def test_the_inception_score_counts_classes():
    """Images of ten classes, each recognised for certain: ten; none recognised at all: one."""
    certain = 50 * torch.nn.functional.one_hot(torch.arange(1000) % 10, 1008).float()
    assert inception_score(certain) == (pytest.approx(10, rel=0.1), pytest.approx(0, abs=0.5))
    assert inception_score(torch.zeros(100, 1008)) == (pytest.approx(1), pytest.approx(0, abs=1e-9))


def test_sets_that_cannot_be_measured_are_said(real):
    with pytest.raises(UserError, match="a set of 1 image.s. has no covariance"):
        moments(real[:1])
    with pytest.raises(UserError, match="a set of 5 images is too small for precision and recall"):
        Neighbourhoods.of(real[:5], CPU)
    assert Neighbourhoods.of(real[:6], CPU).to_fifth.isfinite().all()
    with pytest.raises(UserError, match="covariance of the features is not finite"):
        moments(torch.cat([real, real[:1] * torch.nan]))
