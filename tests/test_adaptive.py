"""Samplers that learn: what they learn, and that processes and resumed runs learn the same."""

import json
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import preloaded
import pytest
import torch
from conftest import metrics_of, run_training
from safetensors.torch import load_file, save_file
from scipy.stats import beta, kstest
from sklearn.feature_selection import SelectKBest, f_regression
from storm import lines_but_for_times

import schedulers.adaptive_samplers
import training.setup
from common.errors import UserError
from common.randomness import generator_for
from run_folder.checkpoints import copy_out
from run_folder.config import TrainingConfig
from schedulers.adaptive_samplers import (
    EDM2,
    TRIES,
    AdaptiveTimestepSampling,
    ErrorsByOctave,
    InfoNoise,
    KingmaGao,
    LossSecondMoment,
    MarginalReturn,
    SaturatingBound,
    beta_draws,
    most_telling,
)
from schedulers.ddpm import build_scheduler
from schedulers.loss import DiffusionLoss, build_loss
from schedulers.timestep_samplers import LogSNRBins, TimestepSampler, UniformLogSNR, UpdateProbe
from training.update import Update

T = 20
CUMULATIVE = build_scheduler(num_train_timesteps=T).alphas_cumprod
BY_OCTAVE = ("saturating_bound", "marginal_return")  # samplers that expect errors by octaves of steps


# Loss second moment.


def test_loss_second_moment_against_the_definition():
    """Uniform until ten losses of every t are known; the last ten of each from then on."""
    sampler = LossSecondMoment(CUMULATIVE)
    known = defaultdict(lambda: deque(maxlen=10))
    uniform = learned = 0
    for step in range(40):
        timesteps, weights = sampler.sample(16, generator_for("timesteps", step))
        if all(len(known[t]) == 10 for t in range(T)):
            root = np.array([np.mean(np.square(known[t])) ** 0.5 for t in range(T)])
            expected, learned = 0.999 * root / root.sum() + 0.001 / T, learned + 1
            np.testing.assert_allclose(sampler.signals()["root_mean_square_loss"], root, rtol=1e-12)
        else:
            assert sampler.signals() == {}
            expected, uniform = np.full(T, 1 / T), uniform + 1
        np.testing.assert_allclose(sampler.describe(), expected, rtol=1e-12)
        np.testing.assert_allclose(weights, 1 / (T * expected[timesteps]), rtol=1e-6)
        losses = torch.rand(16, generator=generator_for("losses", step), dtype=torch.float64)
        for t, loss in zip(timesteps.tolist(), losses.tolist(), strict=True):
            known[t].append(loss)
        sampler.observe(step, timesteps, losses)
    assert uniform > 5
    assert learned > 5


def test_no_timestep_is_forgotten():
    sampler = LossSecondMoment(CUMULATIVE, history=1)
    sampler.observe(0, torch.arange(T), torch.zeros(T, dtype=torch.float64).index_fill(0, torch.tensor(3), 1.0))
    assert sampler.describe().min().item() == pytest.approx(sampler.least_probability) == pytest.approx(0.001 / T)
    assert sampler.describe()[3].item() == pytest.approx(0.999 + 0.001 / T)


# Average losses by log SNR.

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")


def widths(cumulative: np.ndarray) -> np.ndarray:
    log_snr = np.log(cumulative / (1 - cumulative))
    return np.diff(np.concatenate([log_snr[:1], (log_snr[1:] + log_snr[:-1]) / 2, log_snr[-1:]])) * -1


def test_averages_are_those_of_all_losses_then_of_the_latest():
    sampler = KingmaGao(CUMULATIVE, bins=4, history=15)
    per_unit, average, count = widths(CUMULATIVE.numpy()), np.zeros(4), np.zeros(4)

    def density(factor: np.ndarray | float) -> np.ndarray:
        return 0.999 * factor * per_unit / (factor * per_unit).sum() + 0.001 / T

    for step in range(30):
        timesteps, _ = sampler.sample(16, generator_for("timesteps", step))
        losses = torch.rand(16, generator=generator_for("losses", step), dtype=torch.float64)
        sampler.observe(step, timesteps, losses)
        for bin in range(4):
            mine = (sampler.bins.of_timestep[timesteps] == bin).numpy()
            if mine.any():
                count[bin] += mine.sum()
                rated = losses.numpy()[mine] / per_unit[timesteps.numpy()[mine]]
                share = mine.sum() / min(count[bin], 15)
                average[bin] = (1 - share) * average[bin] + share * rated.mean()
        np.testing.assert_allclose(sampler.averages, average, rtol=1e-9)
        if count.min() < 10:
            np.testing.assert_allclose(sampler.describe(), density(1.0), rtol=1e-9)
            assert sampler.signals() == {}
    assert count.min() > 15
    expected = density(average[sampler.bins.of_timestep])
    np.testing.assert_allclose(sampler.describe(), expected, rtol=1e-9)
    np.testing.assert_allclose(sampler._corrections, 1 / (T * expected), rtol=1e-6)
    np.testing.assert_allclose(sampler.signals()["loss_per_log_snr"], average[sampler.bins.of_timestep], rtol=1e-9)


def gaussian_channel(weighting: str, prediction_type: str, **options) -> tuple[InfoNoise, np.ndarray, np.ndarray]:
    """InfoNoise after the losses of the best network for Gaussian images of variance 1/4; their errors, and SNR."""
    process = build_scheduler(prediction_type=prediction_type)
    config = TrainingConfig(
        timestep_sampler="infonoise", loss_weighting=weighting, prediction_type=prediction_type, infonoise_bins=1000
    )
    loss = build_loss(vars(config) | options, process)
    snr = process.alphas_cumprod / (1 - process.alphas_cumprod)
    mmse = 1 / (snr + 4)
    ratio = {"epsilon": snr, "sample": 1, "v_prediction": snr + 1}[prediction_type]
    steps = torch.arange(1000)
    for step in range(10):
        loss.sampler.observe(step, steps, loss.weights.double() * ratio * mmse)
    return loss.sampler, mmse.numpy(), snr.numpy()


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("weighting", ["none", "edm"])
def test_infonoise_draws_times_weights_follow_the_gated_entropy_rate(weighting, prediction_type):
    """Of a Gaussian source, for which it is known, whatever is predicted and weighted."""
    sampler, mmse, snr = gaussian_channel(weighting, prediction_type)
    np.testing.assert_allclose(sampler.signals()["x_0_error"], mmse, rtol=0.02)
    cumulative = build_scheduler().alphas_cumprod.numpy()
    ratio = {"epsilon": snr, "sample": 1, "v_prediction": snr + 1}[prediction_type]
    weight_of_x_0 = snr + 4 if weighting == "edm" else ratio
    sigma = snr**-0.5
    rate = snr * mmse * sigma**3 / (sigma**3 + 0.15**3) * widths(cumulative)
    allocation = sampler.describe().numpy() * weight_of_x_0
    np.testing.assert_allclose(allocation / allocation.sum(), rate / rate.sum(), rtol=0.04)


def test_infonoise_does_not_take_a_bad_network_for_information():
    """Pixels in [-1, 1] have an error of at most 1; that of an epsilon network at high noise is a million."""
    good, _, _ = gaussian_channel("none", "epsilon")
    steps = torch.arange(1000)
    for step in range(1000):
        good.observe(step, steps, torch.ones(1000, dtype=torch.float64))
    density, per_unit = good.describe().numpy(), widths(build_scheduler().alphas_cumprod.numpy())
    np.testing.assert_allclose(density[900:990] / per_unit[900:990], density[900] / per_unit[900], rtol=1e-3)


@pytest.mark.parametrize("error", ["l1", "huber"])
def test_infonoise_needs_squared_errors(error):
    config = TrainingConfig(timestep_sampler="infonoise", loss=error)
    with pytest.raises(UserError, match=f"--loss {error}: infonoise learns from squared errors"):
        build_loss(vars(config), build_scheduler())


# A schedule that ends with noise alone.


@pytest.mark.parametrize("weighting", ["none", "edm", "p2", "min_snr"])
@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample", "mean"])
@pytest.mark.parametrize("name", ["loss_second_moment", "kingma_gao", "infonoise", "edm2", *BY_OCTAVE])
def test_noise_alone_is_learned_from_or_refused(name, prediction_type, weighting):
    """Where nothing is left of the image, some weightings count its error as 0: the loss does not tell it."""
    process = build_scheduler("jsd", 100, prediction_type=prediction_type)
    config = TrainingConfig(timestep_sampler=name, loss_weighting=weighting, infonoise_floor=0.1, edm2_floor=0.1)
    if name in ("infonoise", *BY_OCTAVE) and weighting in ("p2", "min_snr"):
        message = f"--loss_weighting {weighting}: counts the error of x_0 at t = 99 as 0, and --timestep_sampler {name}"
        with pytest.raises(UserError, match=message):
            build_loss(vars(config), process)
        return
    loss = build_loss(vars(config), process)
    for step in range(40):
        t, weights = loss.sampler.sample(512, generator_for("timesteps", step))
        assert weights.isfinite().all()
        errors = torch.rand(512, generator=generator_for("errors", step), dtype=torch.float64)
        loss.sampler.observe(step, t, errors * loss.weights[t])
    assert loss.sampler.describe()[99] > 0
    assert loss.sampler.signals()
    assert all(signal.isfinite().all() for signal in loss.sampler.signals().values())


# EDM2's learned expectation.


def test_edm2_weighs_losses_by_one_over_their_expectation():
    cumulative = build_scheduler().alphas_cumprod
    sampler = EDM2(cumulative)
    assert (sampler._corrections == 1).all()
    expected = torch.exp(-torch.arange(1000, dtype=torch.float64) / 150) + 0.01
    for step in range(3000):
        timesteps, weights = sampler.sample(64, generator_for("timesteps", step))
        chance = 0.5 + torch.rand(64, generator=generator_for("losses", step), dtype=torch.float64)
        sampler.observe(step, timesteps, expected[timesteps] * chance)
    timesteps, weights = sampler.sample(1000, generator_for("timesteps"))
    ratio = weights * expected[timesteps]
    assert ratio.mean().item() == pytest.approx(1, abs=0.05)
    assert ratio.std() < 0.2
    torch.testing.assert_close(weights, 1 / sampler.signals()["expected_loss"][timesteps].float())


def test_edm2_learns_as_autograd_and_adam_do():
    sampler = EDM2(CUMULATIVE)
    layer = torch.zeros(128, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([layer], lr=0.01, betas=(0.9, 0.99))
    for step in range(20):
        timesteps, _ = sampler.sample(16, generator_for("timesteps", step))
        losses = torch.rand(16, generator=generator_for("losses", step), dtype=torch.float64)
        u = sampler.features[timesteps] @ layer
        (losses / u.exp() + u).mean().backward()
        adam.step()
        adam.zero_grad()
        sampler.observe(step, timesteps, losses)
        torch.testing.assert_close(sampler.layer, layer.detach(), rtol=1e-7, atol=1e-9)


def EagerReturn(alphas_cumprod: torch.Tensor) -> MarginalReturn:
    return MarginalReturn(alphas_cumprod, low=-math.inf, high=math.inf, prior=0.1)


def EagerBound(alphas_cumprod: torch.Tensor) -> SaturatingBound:
    sampler = SaturatingBound(alphas_cumprod, low=-math.inf, high=math.inf)
    sampler.start((3, 8, 8), torch.device("cpu"))
    return sampler


@pytest.mark.parametrize(
    "make", [partial(KingmaGao, bins=4), partial(InfoNoise, bins=4), EDM2, EagerReturn, EagerBound]
)
def test_a_restored_state_draws_and_learns_the_same(make):
    def learn(sampler: TimestepSampler, steps: range) -> list[torch.Tensor]:
        drawn = []
        for step in steps:
            timesteps, weights = sampler.sample(1024, generator_for("timesteps", step))
            drawn += [timesteps, weights]
            losses = torch.rand(1024, generator=generator_for("losses", step)).double() * (step + 1) ** -0.5 + timesteps
            sampler.observe(step, timesteps, losses)
        return drawn

    whole, parts = make(CUMULATIVE), make(CUMULATIVE)
    learn(parts, range(15))
    restored = make(CUMULATIVE)
    restored.load_state_dict({name: tensor.clone() for name, tensor in parts.state_dict().items()})
    assert torch.equal(restored.describe(), parts.describe())
    assert torch.equal(restored._corrections, parts._corrections)
    new = make(CUMULATIVE)  # it has learned
    assert not (torch.equal(parts.describe(), new.describe()) and torch.equal(parts._corrections, new._corrections))
    for mine, theirs in zip(learn(whole, range(30))[30:], learn(restored, range(15, 30)), strict=True):
        assert torch.equal(mine, theirs)
    other = make(CUMULATIVE, bins=3) if isinstance(make, partial) else None
    if other is not None:
        with pytest.raises(ValueError, match="averages of its timestep sampler has the shape"):
            other.load_state_dict(parts.state_dict())


# The errors expected by octaves of steps, and the saturating bound.


def power_laws(bins: LogSNRBins) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how high above its limit the error of each bin starts, and the limit: L = limit + height n^-1/2."""
    place = torch.linspace(0, 1, len(bins), dtype=torch.float64)
    return 0.1 + place, 0.01 + place**2


def shown_power_laws(sampler: ErrorsByOctave, steps: int, noise: float = 0.0, falling: bool = True) -> ErrorsByOctave:
    """Let a sampler see errors that fall as power laws, every bin's equally often."""
    heights, limits = power_laws(sampler.bins)
    timesteps = torch.cat([(sampler.bins.of_timestep == b).nonzero()[:1, 0] for b in range(len(sampler.bins))])
    timesteps = timesteps.repeat_interleave(8)
    bins = sampler.bins.of_timestep[timesteps]
    for step in range(steps):
        errors = limits[bins] + falling * heights[bins] * (step + 1) ** -0.5
        chance = torch.randn(len(bins), generator=generator_for("losses", step), dtype=torch.float64)
        sampler.observe(step, timesteps, errors * (1 + noise * chance))
    return sampler


def saturating(shape: tuple[int, int, int], steps: int = 1030, **options) -> SaturatingBound:
    sampler = SaturatingBound(build_scheduler().alphas_cumprod, **options)
    sampler.start(shape, torch.device("cpu"))
    return shown_power_laws(sampler, steps)


def test_errors_are_expected_to_be_the_mean_of_the_latest_octave():
    sampler = saturating((3, 8, 8))
    heights, limits = power_laws(sampler.bins)
    expected = limits + heights * np.mean(np.arange(512, 1024) ** -0.5)
    torch.testing.assert_close(sampler.expected, expected, rtol=1e-9, atol=0)
    signal = sampler.signals()["expected_error"]
    torch.testing.assert_close(signal, sampler.expected[sampler.bins.of_timestep])


def test_weights_are_the_derivative_of_the_saturating_bound():
    """Of the sum of N ln(1 + D / N) over bins, by the error of each, up to a factor: the mean of the weights is 1."""
    sampler = saturating((3, 16, 16), scale=50.0)
    errors = sampler.expected.clone().requires_grad_()
    (50 * torch.log1p(768 * errors / 50)).sum().backward()
    centres = [(sampler.bins.log_snr - centre).abs().argmin().item() for centre in sampler.bins.centres]
    ratio = sampler._corrections.double()[centres] / errors.grad
    torch.testing.assert_close(ratio[2:-2], ratio[2:-2].mean().expand_as(ratio[2:-2]), rtol=0.02, atol=0)
    assert (sampler._corrections * sampler.describe()).sum().item() == pytest.approx(1)


def test_the_more_pixels_the_less_do_large_errors_count():
    spread = [
        (weights.max() / weights.min()).item()
        for weights in (saturating((3, side, side))._corrections for side in (8, 16, 32))
    ]
    assert 1 < spread[0] < spread[1] < spread[2]
    assert (saturating((3, 16, 16), scale=1e9)._corrections - 1).abs().max() < 1e-4  # that of the bound


def test_a_state_counts_pixels_whether_it_is_loaded_before_the_start_or_after():
    known, fresh = saturating((3, 16, 16)), SaturatingBound(build_scheduler().alphas_cumprod)
    fresh.load_state_dict(known.state_dict())
    fresh.start((3, 16, 16), torch.device("cpu"))
    assert torch.equal(fresh._corrections, known._corrections)


def test_a_range_within_a_bin_is_learned_from():
    sampler = SaturatingBound(build_scheduler().alphas_cumprod, low=0.0, high=0.5)
    sampler.start((3, 32, 32), torch.device("cpu"))
    shown_power_laws(sampler, 40)
    assert not sampler.has_learned
    shown_power_laws(sampler, 1030)
    assert sampler.has_learned
    assert sampler._corrections.isfinite().all()


def test_until_errors_are_known_it_is_log_snr():
    sampler, fixed = saturating((3, 32, 32), steps=40), UniformLogSNR(build_scheduler().alphas_cumprod)
    assert torch.equal(sampler.describe(), fixed.describe())
    assert (sampler._corrections == 1).all()
    assert sampler.signals() == {}
    assert torch.equal(saturating((3, 32, 32)).describe(), fixed.describe())  # and its density is so for good


# Marginal return.


def learned_returns(steps: int, noise: float = 0.0, falling: bool = True, **options) -> MarginalReturn:
    return shown_power_laws(MarginalReturn(build_scheduler().alphas_cumprod, **options), steps, noise, falling)


def test_what_the_draws_have_earned_is_read_from_the_losses():
    """dL / d ln n of a power law; its mean over an octave, less that over the next, is that of some n between."""
    sampler = learned_returns(steps=1030, prior=0.0, power=0.0, floor=0.0)
    heights, _ = power_laws(sampler.bins)
    earned = heights * (np.mean(np.arange(257, 513) ** -0.5) - np.mean(np.arange(513, 1025) ** -0.5)) / math.log(2)
    # A bin is smoothed with its neighbours, of which it is the mean where the heights are on a line.
    torch.testing.assert_close(sampler.returns[1:-1], earned[1:-1], rtol=0.02, atol=0)
    per_log_snr = sampler.describe() / sampler.bins.widths
    inside = (sampler.range > 0) & (sampler.bins.of_timestep > 0)
    ratio = per_log_snr[inside] / sampler.returns[sampler.bins.of_timestep][inside]
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=0.03, atol=0)  # a little is left to the prior
    assert sampler.describe()[sampler.range == 0].sum() == 0


def test_weights_follow_the_expected_error_and_have_mean_one():
    sampler = learned_returns(steps=1030, power=0.5)
    weights = sampler._corrections.double()
    assert (weights * sampler.describe()).sum().item() == pytest.approx(1)
    centres = [(sampler.bins.log_snr - centre).abs().argmin().item() for centre in sampler.bins.centres[2:-2]]
    product = weights[centres] * sampler.expected[2:-2].sqrt()
    torch.testing.assert_close(product, product.mean().expand_as(product), rtol=0.1, atol=0)
    assert (learned_returns(steps=1030, power=0.0)._corrections == 1).all()


def test_noise_earns_nothing_and_every_timestep_keeps_its_floor():
    prior = MarginalReturn(build_scheduler().alphas_cumprod).describe()
    noisy = learned_returns(steps=1030, noise=0.5, falling=False)
    assert (noisy.describe() - prior).abs().sum() < 0.1  # of 2, where nothing is shared
    assert (learned_returns(steps=1030, noise=0.01).describe() - prior).abs().sum() > 0.15
    assert torch.equal(learned_returns(steps=40).describe(), prior)  # too few losses to tell
    sampler = learned_returns(steps=1030)
    assert sampler.describe().min() >= sampler.least_probability * (1 - 1e-12)
    assert not torch.equal(sampler.describe(), prior)


def test_it_adapts_by_its_own_draws_within_a_few_hundred_steps():
    """A bin at the edge of the range, which is drawn a hundred times less often than others, is not waited for."""
    sampler = MarginalReturn(build_scheduler().alphas_cumprod)
    prior = sampler.describe()
    heights, limits = power_laws(sampler.bins)
    for step in range(300):
        timesteps, _ = sampler.sample(64, generator_for("timesteps", step))
        bins = sampler.bins.of_timestep[timesteps]
        sampler.observe(step, timesteps, limits[bins] + heights[bins] * (step + 1) ** -0.5)
    assert (sampler.describe() - prior).abs().sum() > 0.15


@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample"])
def test_returns_are_of_errors_of_epsilon_whatever_is_predicted(prediction_type):
    options = vars(TrainingConfig(timestep_sampler="marginal_return", loss_weighting="min_snr"))
    process = build_scheduler(prediction_type=prediction_type)
    loss = build_loss(options, process)
    snr = process.alphas_cumprod / (1 - process.alphas_cumprod)
    of_x_0 = {"sample": 1, "v_prediction": 1 / (snr + 1)}[prediction_type]  # the error of x_0 for one of the network's
    timesteps = torch.arange(1000)
    loss.sampler.observe(0, timesteps, (loss.weights.double() / (of_x_0 * snr))[timesteps])
    count, total, _ = loss.sampler.moments[:, 0]
    torch.testing.assert_close(total, count)  # as if every error of epsilon had been 1


# ATS.


@pytest.mark.parametrize("shapes", [(1.0, 1.0), (0.3, 0.5), (3.0, 0.7), (40.0, 25.0)])
def test_beta_draws(shapes):
    count, generator = 20_000, generator_for("beta")
    normal, uniform = (
        torch.randn(count, 2, TRIES, generator=generator),
        torch.rand(count, 2, TRIES + 1, generator=generator),
    )
    drawn = beta_draws(torch.tensor([shapes]).expand(count, 2), normal, 1 - uniform)
    assert (drawn > 0).all()
    assert (drawn < 1).all()
    assert 1e-3 < kstest(drawn.double().numpy(), beta(*shapes).cdf).pvalue < 1 - 1e-3


def test_f_regression_is_that_of_scikit_learn():
    for seed in range(20):
        changes = torch.randn(12, 50, generator=generator_for(seed), dtype=torch.float64)
        best = SelectKBest(f_regression, k=3).fit(changes.numpy(), changes.sum(1).numpy())
        assert most_telling(changes, 3).tolist() == best.get_support(indices=True).tolist()
    changes[:, 7] = 0  # tells nothing
    assert 7 not in most_telling(changes, 3)


def make_ats(**options) -> AdaptiveTimestepSampling:
    sampler = AdaptiveTimestepSampling(CUMULATIVE, grid=10, interval=1, **options)
    sampler.start((1, 8, 8), torch.device("cpu"))
    return sampler


def test_an_image_is_given_its_timestep_whoever_draws_it():
    images, sampler = torch.randn(8, 1, 8, 8, generator=generator_for("images")), make_ats()
    torch.nn.init.normal_(sampler.policy.head[-1].weight, generator=generator_for("weights"))
    whole, weights = sampler.sample_for(images, torch.arange(8), 8, generator_for("draw"))
    assert (weights == 1).all()
    for part in (torch.tensor([0, 1, 4]), torch.tensor([7, 2])):
        drawn, _ = sampler.sample_for(images[part], part, 8, generator_for("draw"))
        assert torch.equal(drawn, whole[part])
    assert sampler.policy(images).std(0).min() > 0  # the policy looks at the images


def probe_of(step: int, images: torch.Tensor, kl) -> UpdateProbe:
    count = len(images)
    return UpdateProbe(step, count, torch.arange(count), images, torch.nn.Identity(), kl, lambda tensor: tensor)


def test_the_policy_learns_what_lowers_the_loss():
    """Updates help an image the more, the later its timestep: later ones become likely, and are described."""
    sampler, images = make_ats(), torch.randn(64, 1, 8, 8, generator=generator_for("images"))
    updated = False

    def kl(rows: torch.Tensor, timesteps: torch.Tensor, noise_rows: torch.Tensor) -> torch.Tensor:
        return -sampler._actions[rows] if updated else torch.zeros(len(rows))

    average = [(sampler.describe() @ torch.arange(T, dtype=torch.float64)).item()]
    for step in range(20):
        sampler.sample_for(images, torch.arange(64), 64, generator_for("draw", step))
        update = probe_of(step, images, kl)
        updated = False
        sampler.before_update(update)
        updated = True
        sampler.after_update(update)
        average.append((sampler.describe() @ torch.arange(T, dtype=torch.float64)).item())
    assert average[0] == pytest.approx((T - 1) / 2)
    assert average[-1] > 13
    drawn, _ = sampler.sample(1000, generator_for("draw"))
    assert drawn.float().mean().item() == pytest.approx(average[-1], abs=0.5)


def test_the_signal_of_ats_is_the_average_of_its_queue():
    sampler = make_ats(queue=4)
    assert sampler.signals() == {}
    sampler.changes[:2], sampler.queued = torch.stack([sampler.timesteps * 1.0, sampler.timesteps * -3.0]), 2
    np.testing.assert_allclose(sampler.signals()["delta"], -np.arange(T))


def test_entropy_keeps_the_policy_from_a_corner():
    """Without any reward the entropy alone draws it back to uniform."""
    sampler, images = make_ats(entropy=1.0), torch.randn(16, 1, 8, 8, generator=generator_for("images"))
    torch.nn.init.constant_(sampler.policy.head[-1].bias, 3.0)
    for step in range(100):
        sampler.sample_for(images, torch.arange(16), 16, generator_for("draw", step))
        update = probe_of(step, images, lambda rows, t, noise: torch.zeros(len(rows)))
        sampler.before_update(update)
        sampler.after_update(update)
    torch.testing.assert_close(sampler.shapes, torch.ones(16, 2), rtol=0, atol=0.1)


def test_an_update_that_changes_nothing_has_no_effect_to_the_bit(train, tmp_path, monkeypatch):
    """Before and after are compared under the same noise and without dropout."""
    take_step = Update.step
    monkeypatch.setattr(Update, "step", lambda self, step, *rest: take_step(self, step, *rest) if step < 5 else None)
    flags = ["--timestep_sampler=ats", "--ats_interval=1", "--ats_grid=10", "--learning_rate=1e-2"]
    run = train(tmp_path / "run", *flags, "--max_train_steps=7", "--lr_warmup_steps=1")
    state = load_file(run / "checkpoint-7" / "sampler.safetensors")
    assert state["queued"] == 7
    assert (state["queue"][1:5] != 0).any(1).all()
    assert (state["queue"][5:] == 0).all()


# In a run.

LEARNING = {
    "loss_second_moment": ["--timestep_sampler=loss_second_moment", "--loss_second_moment_history=2"],
    "infonoise": ["--timestep_sampler=infonoise", "--infonoise_bins=2", "--loss_weighting=edm"],
    "kingma_gao": ["--timestep_sampler=kingma_gao", "--kingma_gao_bins=2", "--loss_weighting=sigmoid"],
    "edm2": ["--timestep_sampler=edm2", "--loss_weighting=edm"],
    **{name: [f"--timestep_sampler={name}", f"--{name}_low=-20", f"--{name}_high=20"] for name in BY_OCTAVE},
    "ats": ["--timestep_sampler=ats", "--ats_interval=2", "--ats_grid=10", "--ats_queue=4"],
}
FLAGS = [f"--ddpm_num_steps={T}", "--ddpm_num_inference_steps=2", "--logging_steps=3", "--save_images_steps=100"]


@pytest.mark.parametrize("name", ["loss_second_moment", "infonoise", "edm2", *BY_OCTAVE, "ats"])
def test_resumed_equals_uninterrupted(name, train, tmp_path, monkeypatch):
    """Stopped within a window of metrics, with losses still on their way."""
    monkeypatch.setattr(schedulers.adaptive_samplers, "WORTH_A_LOOK", 1)  # or samplers by octaves would learn nothing
    flags = [*FLAGS, *LEARNING[name], "--timestep_sampler=" + name]
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=22")
    for steps in (7, 8, 19, 22):
        parts = train(tmp_path / "parts", *flags, f"--max_train_steps={steps}", f"--checkpointing_steps={steps}")
    for file in ("metrics.jsonl", "timesteps.jsonl"):
        assert lines_but_for_times(whole / file) == lines_but_for_times(parts / file), file
    assert all("timestep_sampler_share" in line for line in metrics_of(parts))
    for path in (whole / "checkpoint-22").rglob("*.safetensors"):
        assert path.read_bytes() == (parts / path.relative_to(whole)).read_bytes(), path.name
    state = load_file(whole / "checkpoint-22" / "sampler.safetensors")
    if name == "ats":
        assert state["queued"] == 11
        assert state["shapes"].std() > 0
    else:
        assert {key for key in state if key.startswith("on_their_way")} >= {"on_their_way.20.losses"}
    if name == "loss_second_moment":
        assert (state["counts"] >= 2).all()
    if name == "infonoise":
        assert (state["counts"] >= 10).all()
    if name == "edm2":
        assert state["updates"] == 20
    if name in BY_OCTAVE:
        assert state["third"] == 12  # of octaves of steps, 3 log2(20)
    assert name == "ats" or metrics_of(whole)[-1]["weight_ess"] < 1


def test_another_history_does_not_fit(train, tmp_path):
    flags = [*FLAGS, *LEARNING["loss_second_moment"]]
    run = train(tmp_path / "run", *flags, "--max_train_steps=2")
    with pytest.raises(UserError, match="losses of its timestep sampler has the shape .20, 2."):
        train(run, *flags, "--loss_second_moment_history=3", "--max_train_steps=3")


def note(name: Path, run: Callable[[], object]) -> None:
    """Run a training; write down what this process drew, and the state that its sampler ended with."""
    drawn, draw, train_loop = [], DiffusionLoss.draw, training.setup.train

    def noting_draw(self, batch):
        timesteps, weights = draw(self, batch)
        drawn.append(dict(zip(batch.positions.tolist(), timesteps.tolist(), strict=True)))
        return timesteps, weights

    def noting_loop(run):
        train_loop(run)
        save_file(copy_out(run.state.loss.state_dict()), f"{name} {run.processes.index}.safetensors")
        Path(f"{name} {run.processes.index}.json").write_text(json.dumps(drawn))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedulers.adaptive_samplers, "WORTH_A_LOOK", 1)
        patch.setattr(DiffusionLoss, "draw", noting_draw)
        patch.setattr(training.setup, "train", noting_loop)
        run()


def noted(name: Path, index: int) -> tuple[dict[str, torch.Tensor], list[dict[str, int]]]:
    return load_file(f"{name} {index}.safetensors"), json.loads(Path(f"{name} {index}.json").read_text())


# Few steps of ATS: Adam makes of gradients that round differently updates that differ.
STEPS = {
    "loss_second_moment": 16,
    "infonoise": 10,
    "kingma_gao": 10,
    "edm2": 4,
    "ats": 4,
    **dict.fromkeys(BY_OCTAVE, 12),
}


def flags_of(name: str, base: list[str]) -> list[str]:
    return [*base, *FLAGS, *LEARNING[name], "--total_batch_size=16", f"--max_train_steps={STEPS[name]}"]


@pytest.fixture(scope="module")
def two_processes(tiny_flags, network_without_dropout, tmp_path_factory) -> Path:
    """All samplers that learn with two processes and accumulation."""
    folder = tmp_path_factory.mktemp("two")
    base = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}", "--train_batch_size=4"]
    for name in LEARNING:
        preloaded.run([__file__, folder / name, folder / f"run of {name}", *flags_of(name, base)], processes=2)
    return folder


@pytest.mark.parametrize("name", LEARNING)
def test_two_processes_learn_and_draw_what_one_does(
    name, two_processes, tiny_flags, network_without_dropout, tmp_path, monkeypatch
):
    base = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}"]
    note(tmp_path / "alone", lambda: run_training(tmp_path / "run", flags_of(name, base)))
    alone, together = noted(tmp_path / "alone", 0)
    (first, drawn_by_first), (second, drawn_by_second) = (noted(two_processes / name, index) for index in range(2))
    assert first.keys() == second.keys() == alone.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key
    for key in ("losses", "counts", "averages", "layer", "moments", "queue", "shapes", "selected"):
        if key in alone:
            torch.testing.assert_close(first[key], alone[key], rtol=1e-3, atol=1e-6, msg=key)
    if "averages" in first:
        assert (first["counts"] >= 10).all()  # it has adapted
    if name in BY_OCTAVE:
        monkeypatch.setattr(schedulers.adaptive_samplers, "WORTH_A_LOOK", 1)
        sampler = SaturatingBound(CUMULATIVE, low=-20, high=20)
        sampler.load_state_dict({key: first[key] for key in ("moments", "third")})
        assert sampler.has_learned
    assert len(together) == STEPS[name]
    for whole, *parts in zip(together, drawn_by_first, drawn_by_second, strict=True):
        assert parts[0] | parts[1] == whole
        assert len(parts[0]) == len(parts[1]) == 8


if __name__ == "__main__":
    name, output_dir, *flags = sys.argv[1:]
    note(Path(name), partial(run_training, Path(output_dir), flags))
