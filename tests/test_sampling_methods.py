"""Every sampling method against closed forms in float64, over any sub-sequence."""

import numpy as np
import pytest
import torch

from common.randomness import generator_for
from schedulers.ddpm import ExactDDPMScheduler, build_scheduler
from schedulers.denoising import (
    DDIM,
    DDPM,
    DiffusersMethod,
    UnusableScheduler,
    denoise,
    linear,
    quadratic,
    with_variance,
)

T = 1000
SHAPE = (1, 8, 8)
CUMULATIVE = np.cumprod(1 - np.linspace(1e-4, 0.02, T))
COMPATIBLE = sorted(compatible.__name__ for compatible in ExactDDPMScheduler().compatibles)
UNUSABLE = {"EDMEulerScheduler": "noise levels of its own", "DPMSolverSDEScheduler": "torchsde"}


def subsequence(kind: str) -> list[int]:
    if kind == "random":
        return torch.randperm(T, generator=generator_for("subsequence"))[:60].sort(descending=True).values.tolist()
    name, steps = kind.split("-")
    return {"linear": linear, "quadratic": quadratic}[name](T, int(steps))


def levels(timesteps: list[int], number: int) -> tuple[float, float]:
    """a_t and a_s of a step."""
    a_s = CUMULATIVE[timesteps[number]] if number < len(timesteps) else 1.0
    return CUMULATIVE[timesteps[number - 1]], a_s


def a_step(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sample, a network's output, noise."""
    draw = generator_for("step", number)
    sample, output, noise = (torch.randn(2, *SHAPE, generator=draw) for _ in range(3))
    return sample, output, noise


@pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
@pytest.mark.parametrize("kind", ["linear-1000", "linear-37", "linear-2", "linear-1", "quadratic-100", "random"])
def test_ddpm_steps(kind, variance_type):
    method = DDPM(build_scheduler(), 10, variance_type)
    method.timesteps = subsequence(kind)
    for number in range(1, len(method.timesteps) + 1):
        a_t, a_s = levels(method.timesteps, number)
        sample, output, noise = a_step(number)
        x_t, epsilon, z = (tensor.double().numpy() for tensor in (sample, output, noise))
        original = np.clip((x_t - np.sqrt(1 - a_t) * epsilon) / np.sqrt(a_t), -1, 1)
        beta = 1 - a_t / a_s
        mean = (np.sqrt(a_s) * beta * original + np.sqrt(1 - beta) * (1 - a_s) * x_t) / (1 - a_t)
        variance = beta if variance_type == "fixed_large" else beta * (1 - a_s) / (1 - a_t)
        last = number == len(method.timesteps)
        exact = mean if last else mean + np.sqrt(variance) * z
        stepped = method.step(output, number, sample, lambda noise=noise: noise)
        assert np.abs(stepped.double().numpy() - exact).max() < 2e-6, f"step {number}"


@pytest.mark.parametrize("clip_sample", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["linear-1000", "linear-37", "linear-1", "quadratic-100", "random"])
def test_ddim_steps(kind, eta, clip_sample):
    """Eq. 12 with eq. 16, as DDIM's code writes it, in terms of epsilon."""
    scheduler = ExactDDPMScheduler.from_config(build_scheduler().config, clip_sample=clip_sample)
    method = DDIM(scheduler, 10, eta)
    method.timesteps = subsequence(kind)
    for number in range(1, len(method.timesteps) + 1):
        a_t, a_s = levels(method.timesteps, number)
        sample, output, noise = a_step(number)
        x_t, epsilon, z = (tensor.double().numpy() for tensor in (sample, output, noise))
        original = (x_t - np.sqrt(1 - a_t) * epsilon) / np.sqrt(a_t)
        if clip_sample:
            original = np.clip(original, -1, 1)
            epsilon = (x_t - np.sqrt(a_t) * original) / np.sqrt(1 - a_t)
        sigma = eta * np.sqrt((1 - a_s) / (1 - a_t) * (1 - a_t / a_s))
        exact = np.sqrt(a_s) * original + np.sqrt(1 - a_s - sigma**2) * epsilon + sigma * z
        stepped = method.step(output, number, sample, lambda noise=noise: noise).double().numpy()
        assert np.abs(stepped - exact).max() < 2e-6 * max(1, np.abs(original).max()), f"step {number}"


def test_ddim_with_all_steps_and_eta_1_is_ddpm():
    ddim = DDIM(build_scheduler(), T, eta=1.0)
    ddpm = DDPM(build_scheduler(), T, "fixed_small")
    assert ddim.timesteps == ddpm.timesteps == list(range(T))[::-1]
    for number in range(1, T + 1):
        sample, output, noise = a_step(number)
        steps = [method.step(output, number, sample, lambda noise=noise: noise) for method in (ddim, ddpm)]
        assert (steps[0] - steps[1]).abs().max() < 2e-6, f"step {number}"


def test_ddim_without_noise_asks_for_none():
    method = DDIM(build_scheduler(), 20)
    sample, output, _ = a_step(0)

    def noise() -> torch.Tensor:
        raise AssertionError("noise was drawn")

    for number in range(1, 21):
        sample = method.step(output, number, sample, noise)
    assert not method.adds_noise


def test_what_variance_follows_from_the_number_of_steps():
    assert DDPM(build_scheduler(), T).settings["variance_type"] == "fixed_large"
    assert DDPM(build_scheduler(), 999).settings["variance_type"] == "fixed_small"
    assert DDPM(build_scheduler(), 100, "fixed_large").scheduler.config.variance_type == "fixed_large"
    small = with_variance(build_scheduler().config, "fixed_small")
    assert DDPM(small, T).settings["variance_type"] == "fixed_small"
    assert DDPM(small, T, "fixed_large").settings["variance_type"] == "fixed_large"


@pytest.mark.parametrize("total", [10, 100, 333, 1000, 4000])
def test_quadratic_subsequence_is_that_of_ddim(total):
    for steps in [2, 3, 10, 20, 50, 100]:
        published = [int(root**2) for root in np.linspace(0, np.sqrt(total * 0.8), steps)]
        ours = quadratic(total, steps)
        assert ours == sorted(set(published), reverse=True)
        assert all(0 <= t < total for t in ours)
    assert len(quadratic(1000, 100)) == 96
    assert quadratic(1000, 1) == [800]


def test_a_timestep_that_comes_twice_changes_nothing():
    method = DDIM(build_scheduler(), 10)
    sample, output, _ = a_step(0)
    method.scheduler.register_to_config(clip_sample=False)
    method.timesteps = [5, 5]
    assert (method.step(output, 1, sample, None) - sample).abs().max() < 1e-6


# The schedulers of diffusers, on data whose perfect network is known: x_0 ~ N(0, 0.25) in every pixel.


def perfect(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """E[epsilon | x_t]; between timesteps, where some schedulers go, the cumulative product is interpolated."""
    cumulative = np.exp(np.interp(t.item(), np.arange(T), np.log(CUMULATIVE)))
    return ((1 - cumulative) ** 0.5 / (0.25 * cumulative + 1 - cumulative)) * samples


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in COMPATIBLE if name not in UNUSABLE])
def test_schedulers_of_diffusers(name):
    """They draw the distribution that they should, and an image depends on its seed alone."""
    method = DiffusersMethod(build_scheduler(), name, 50)
    seeds = torch.arange(64)
    torch.manual_seed(0)
    samples = denoise(perfect, method, seeds, SHAPE)
    assert 0.4 < samples.std() < 0.6
    torch.manual_seed(1)
    others = torch.tensor([7, 1000, 3])
    again = denoise(perfect, method, others, SHAPE)
    torch.testing.assert_close(again[[0, 2]], samples[[7, 3]], rtol=0, atol=1e-5)
    assert not torch.equal(again[1], again[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler"])
def test_a_scheduler_visits_the_same_timesteps_whatever_a_pipeline_says_of_another(name):
    """A saved pipeline has the spacing of its DDPMScheduler written out, a checkpoint of the same run has not."""
    silent, written = build_scheduler(), ExactDDPMScheduler.from_config({**build_scheduler().config})
    written.register_to_config(timestep_spacing="leading", steps_offset=1, _use_default_values=[])
    timesteps = [DiffusersMethod(scheduler, name, 20).timesteps for scheduler in (silent, written)]
    assert timesteps[0] == timesteps[1]


@pytest.mark.parametrize("name", ["DDIMScheduler", "PNDMScheduler"])
def test_sampling_that_would_begin_with_an_image_is_refused(name):
    """Of 501 steps over 1,000 these make single ones, from t = 500 on; a distant start of few steps is how they are."""
    with pytest.raises(UnusableScheduler, match="begins at t = 500 of 1000 with 501 steps, .* that divides 1000"):
        DiffusersMethod(build_scheduler(), name, 501)
    for steps in (1, 2, 5, 60, 70, 300, 500, 1000):
        DiffusersMethod(build_scheduler(), "DDIMScheduler", steps)


@pytest.mark.parametrize("name", UNUSABLE)
def test_schedulers_that_do_not_fit_are_refused(name):
    with pytest.raises(UnusableScheduler, match=UNUSABLE[name]):
        DiffusersMethod(build_scheduler(), name, 10)


def test_a_scheduler_that_draws_noise_from_elsewhere_is_refused(monkeypatch):
    from diffusers import DDPMScheduler

    class Careless(DDPMScheduler):
        def step(self, model_output, timestep, sample, generator=None, return_dict=True):
            return super().step(model_output, timestep, sample)

    monkeypatch.setattr(ExactDDPMScheduler, "compatibles", [Careless])
    with pytest.raises(UnusableScheduler, match="depends on more than its seed"):
        DiffusersMethod(build_scheduler(), "Careless", 10)
    with pytest.raises(UnusableScheduler, match="use one of Careless"):
        DiffusersMethod(build_scheduler(), "FlowMatchEulerDiscreteScheduler", 10)


@pytest.mark.parametrize("method", [DDPM(build_scheduler(), 100), DDIM(build_scheduler(), 100)])
def test_our_methods_on_the_same_data(method):
    samples = denoise(perfect, method, torch.arange(64), SHAPE)
    assert 0.45 < samples.std() < 0.55


@pytest.mark.parametrize(
    ("kind", "steps", "warned"), [(DDPM, 1000, False), (DDPM, 100, True), (DDIM, 1000, True), (DDIM, 50, True)]
)
def test_a_mean_is_taken_as_it_is_by_all_steps_of_ddpm_alone(caplog, kind, steps, warned):
    scheduler = build_scheduler(prediction_type="mean")
    x_t = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(scheduler.posterior(x_t + 1e-4, 999, 998, x_t)[0], x_t + 1e-4)
    # An error of 1e-4 in the mean is one of 0.78 in the x_0 that the others take from it.
    assert scheduler.predict_original(x_t + 1e-4, 999, x_t).mean() == pytest.approx(0.78, abs=0.01)
    kind(scheduler, steps)
    assert ("To recover x_0 from it" in caplog.text) == warned
