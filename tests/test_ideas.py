"""The ideas that were raced against log_snr: each sees what it says, and a resumed run goes on where it stopped."""

import json
import math

import numpy as np
import pytest
import torch
from storm import lines_but_for_times

from benchmarks.races.ideas import (
    BoundToSimple,
    GradientMoments,
    LearningSpeed,
    RecordedWeights,
    Spectrum,
    Transfer,
    power_spectrum,
)
from common.randomness import generator_for
from schedulers.adaptive_samplers import SaturatingBound
from schedulers.ddpm import build_scheduler
from schedulers.timestep_samplers import UniformLogSNR, UpdateProbe

CUMULATIVE = build_scheduler(num_train_timesteps=1000).alphas_cumprod
PRIOR = UniformLogSNR(CUMULATIVE).describe()
LOOKING = (GradientMoments, Transfer, Spectrum)


class Says:
    def __init__(self, sample: torch.Tensor):
        self.sample = sample


class Linear(torch.nn.Module):
    """epsilon_theta(x_t, t) = a x_t, whose best a differs from one noise level to another."""

    def __init__(self, a: float = 0.5):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a))

    def forward(self, x: torch.Tensor, t: torch.Tensor | int) -> Says:
        return Says(self.a * x)


def update_of(network: torch.nn.Module, images: torch.Tensor, step: int = 63) -> UpdateProbe:
    count = len(images)
    return UpdateProbe(step, count, torch.arange(count), images, network, lambda *_: None, lambda tensor: tensor)


def noise_images(count: int = 64) -> torch.Tensor:
    return torch.randint(256, (count, 3, 8, 8), generator=generator_for("images"), dtype=torch.uint8)


@pytest.mark.parametrize("kind", LOOKING)
def test_before_the_first_look_it_is_log_snr(kind):
    sampler = kind(CUMULATIVE)
    sampler.before_update(update_of(Linear(), noise_images(), step=62))
    torch.testing.assert_close(sampler.describe(), PRIOR)
    sampler.before_update(update_of(Linear(), noise_images(), step=63))
    assert sampler.looks == 1
    assert (sampler.describe() - PRIOR).abs().sum() > 0.02
    assert sampler.describe().min() >= 0.03 / 1000 - 1e-12


def test_it_looks_a_given_number_of_times_a_doubling():
    sampler, steps = Transfer(CUMULATIVE), []
    sampler.look = lambda update: steps.append(update.step + 1) or torch.ones(len(sampler.bins))
    for step in range(1024):
        sampler.before_update(update_of(Linear(), noise_images(1), step))
    assert steps == [math.ceil(64 * 2 ** (number / 2) - 1e-9) for number in range(9)]


def test_what_is_not_a_number_is_not_followed():
    sampler = Transfer(CUMULATIVE)
    sampler.before_update(update_of(Linear(math.nan), noise_images()))
    torch.testing.assert_close(sampler.describe(), PRIOR)
    assert sampler.looks == 0


def test_gradient_moments_keep_the_objective_of_log_snr():
    """p times the weight is the prior, to the last timestep, and the prior's draws are the noisier ones."""
    sampler = GradientMoments(CUMULATIVE)
    sampler.before_update(update_of(Linear(), noise_images()))
    _, weights = sampler.sample(4096, generator_for("draws"))
    torch.testing.assert_close(sampler.describe() * sampler._corrections, PRIOR, rtol=1e-5, atol=0)
    assert weights.mean().item() == pytest.approx(1, abs=0.05)
    moments = sampler.values[sampler.bins.of_timestep]

    def second_moment(density: torch.Tensor) -> float:
        return (PRIOR.square() * moments / density).sum().item()

    assert second_moment(sampler.describe()) < second_moment(PRIOR)


def test_transfer_leaves_noise_levels_whose_gradient_points_the_other_way():
    """x_t is epsilon and little else at high noise, so a = 0.9 is too little there and too much at low noise."""
    sampler = Transfer(CUMULATIVE)
    sampler.before_update(update_of(Linear(0.9), noise_images()))
    assert sampler.values[sampler.bins.centres < -6].max() < sampler.values[sampler.bins.centres > 2].min()


def test_the_power_of_noise_and_of_a_wave():
    noise = torch.randn(4096, 3, 8, 8, generator=generator_for("noise"))
    torch.testing.assert_close(power_spectrum(noise), torch.ones(4, dtype=torch.float64), rtol=0.02, atol=0)
    x = torch.arange(8)
    wave = math.sqrt(2) * (2 * math.pi * 2 * x / 8).cos().expand(1, 1, 8, 8)  # of variance 1, all of it at radius 2
    power = power_spectrum(wave)
    assert power[[0, 2, 3]].max() < 1e-12
    assert power[1].item() == pytest.approx(64 / 12)  # shared by the twelve frequencies of that radius


def test_spectrum_looks_where_samples_differ():
    """Data whose low frequencies are strong, samples of a network that takes all for noise: all but that differs."""
    sampler = Spectrum(CUMULATIVE)
    smooth = torch.full((64, 3, 8, 8), 127, dtype=torch.uint8)
    smooth[..., :4] += torch.randint(100, (64, 1, 1, 1), generator=generator_for("steps"), dtype=torch.uint8)
    noisy = smooth.int() + torch.randint(-2, 3, smooth.shape, generator=generator_for("noise"))
    sampler.before_update(update_of(Linear(0.0), noisy.clamp(0, 255).to(torch.uint8)))
    assert sampler.power[-1] == 1
    assert sampler.values.max() / sampler.values.min() > 1.5
    again = Spectrum(CUMULATIVE)
    again.load_state_dict(sampler.state_dict())
    torch.testing.assert_close(again.describe(), sampler.describe(), rtol=0, atol=0)


def losses_that_fall(sampler, rates: torch.Tensor, steps: int = 2000) -> None:
    """Show it errors of epsilon that fall as n^-rate, a rate for every timestep."""
    for step in range(steps):
        t, _ = sampler.sample(64, generator_for("draws", step))
        errors = (1 + step) ** -rates[t] * (1 + 0.05 * torch.randn(64, generator=generator_for("noise", step)))
        sampler.observe(step, t, errors.double() * sampler.x_0_weights[t] / sampler.bins.log_snr.exp()[t])


def test_learning_speed_does_not_ask_how_large_a_loss_is():
    """Losses that halve as fast get draws alike, though one is many times the other; what stands still gets none."""
    sampler = LearningSpeed(CUMULATIVE)
    rates = torch.where(sampler.bins.log_snr > 0, 0.0, torch.where(sampler.bins.log_snr > -3, 0.2, 0.4))
    losses_that_fall(sampler, rates)
    share = sampler.bins.total(sampler.describe()) / sampler.bins.total(PRIOR)
    falling, standing = (
        share[(sampler.bins.centres > -6) & (sampler.bins.centres < -1)],
        share[sampler.bins.centres > 2],
    )
    assert falling.min() > 1 > 2 * standing[:-2].max()
    assert share[4].item() / share[6].item() == pytest.approx(2, abs=0.5)  # a rate twice as large


def test_bound_to_simple_moves_to_uniform_as_little_noise_is_learned():
    sampler = BoundToSimple(CUMULATIVE)
    torch.testing.assert_close(sampler.describe(), PRIOR)
    losses_that_fall(sampler, torch.full((1000,), 1.0))  # as 1 / n: the fall per octave halves and halves again, L too
    assert (sampler.describe() - PRIOR).abs().sum() < 0.1
    sampler = BoundToSimple(CUMULATIVE)
    levels = torch.zeros(1000)
    losses_that_fall(sampler, levels + 0.5, steps=500)
    largest = sampler.largest_fall.clone()
    for step in range(500, 4000):  # and now they stand still
        t, _ = sampler.sample(64, generator_for("draws", step))
        sampler.observe(step, t, 500**-0.5 * sampler.x_0_weights[t] / sampler.bins.log_snr.exp()[t])
    assert sampler.largest_fall == largest > 0
    torch.testing.assert_close(sampler.describe(), torch.full_like(PRIOR, 1 / 1000))


def test_recorded_weights_are_there_from_the_first_step_and_follow_nothing(tmp_path):
    losses = torch.linspace(0.01, 0.4, 16)
    (tmp_path / "run.json").write_text(json.dumps({"draws": {"loss": losses.tolist()}}))
    sampler = RecordedWeights(CUMULATIVE, str(tmp_path / "run.json"))
    sampler.start((3, 32, 32), torch.device("cpu"))
    timesteps = [sampler.bins.of_timestep.tolist().index(number) for number in range(16)]
    density = SaturatingBound(CUMULATIVE).describe()
    assert torch.equal(sampler.describe(), density)
    before = sampler.sample(64, generator_for("draws"))[1]
    losses_that_fall(sampler, torch.zeros(1000), steps=600)
    assert torch.equal(sampler.sample(64, generator_for("draws"))[1], before)
    weights = sampler._corrections[timesteps].double()
    log_losses = np.interp(sampler.bins.log_snr[timesteps], sampler.bins.centres, losses.log())
    expected = 1 / (1 + 3 * 32 * 32 * np.exp(log_losses) / 100)
    torch.testing.assert_close(weights / weights[0], torch.from_numpy(expected / expected[0]), rtol=1e-5, atol=0)
    assert (sampler.describe() * sampler._corrections).sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("kind", [*LOOKING, BoundToSimple, LearningSpeed])
def test_a_resumed_run_equals_the_uninterrupted(kind, train, tmp_path):
    flags = [f"--timestep_sampler=benchmarks/races/ideas.py:{kind.__name__}", "--save_images_steps=100"]
    flags += ["--ddpm_num_inference_steps=2"]
    if kind in LOOKING:
        flags += ["--timestep_sampler_options", "first=4"]
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=10")
    for steps in (7, 10):
        parts = train(tmp_path / "parts", *flags, f"--max_train_steps={steps}", f"--checkpointing_steps={steps}")
    assert lines_but_for_times(whole / "timesteps.jsonl") == lines_but_for_times(parts / "timesteps.jsonl")
    for path in (whole / "checkpoint-10").rglob("*.safetensors"):
        assert path.read_bytes() == (parts / path.relative_to(whole)).read_bytes(), path.name
