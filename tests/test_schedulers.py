"""The diffusion agrees with closed forms in float64, at every timestep."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from common.randomness import generator_for
from schedulers.betas import BETA_SCHEDULES, DIFFUSERS_NAMES, make_betas
from schedulers.ddpm import ExactDDPMScheduler, build_scheduler
from schedulers.denoising import linear
from schedulers.timestep_samplers import LogSNRBins

T = 1000


def paper_tables(schedule: str = "linear") -> dict[str, np.ndarray]:
    """The tables of the paper's code, in NumPy."""
    betas = np.linspace(1e-4, 0.02, T) if schedule == "linear" else make_betas(schedule, T).numpy()
    cumulative = np.cumprod(1 - betas)
    previous = np.append(1.0, cumulative[:-1])
    posterior = betas * (1 - previous) / (1 - cumulative)
    return {"betas": betas, "cumulative": cumulative, "previous": previous, "posterior": posterior}


def random_images(count: int = 4, seed: int = 0) -> torch.Tensor:
    pixels = torch.randint(256, (count, 3, 8, 8), generator=generator_for(seed, "images"))
    return pixels.float() / 127.5 - 1


def random_noise(images: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randn(images.shape, generator=generator_for(seed, "noise"))


@pytest.mark.parametrize("name", BETA_SCHEDULES)
def test_betas_are_float64_and_valid(name):
    betas = make_betas(name, T)
    assert betas.dtype == torch.float64
    assert betas.shape == (T,)
    assert (betas > 0).all()
    assert (betas <= 1).all()
    assert betas[0] <= betas[-1]
    assert (1 - betas).prod() < 1e-2  # what is left of the image at the end


def test_linear_is_the_papers():
    np.testing.assert_allclose(make_betas("linear", T).numpy(), np.linspace(1e-4, 0.02, T), rtol=1e-14)


@pytest.mark.parametrize(("ours", "theirs"), DIFFUSERS_NAMES.items())
def test_betas_are_those_of_diffusers_where_it_has_them(ours, theirs):
    stock = DDPMScheduler(num_train_timesteps=T, beta_schedule=theirs)
    assert torch.equal(make_betas(theirs, T), make_betas(ours, T))
    torch.testing.assert_close(make_betas(ours, T).float(), stock.betas, rtol=2e-4, atol=1e-7)


def test_the_papers_other_schedules():
    assert torch.equal(make_betas("constant", T), torch.full((T,), 0.02, dtype=torch.float64))
    warm = make_betas("warmup10", T)
    np.testing.assert_allclose(warm[:100].numpy(), np.linspace(1e-4, 0.02, 100), rtol=1e-14)
    assert (warm[100:] == 0.02).all()
    warm = make_betas("warmup50", T)
    np.testing.assert_allclose(warm[:500].numpy(), np.linspace(1e-4, 0.02, 500), rtol=1e-14)
    assert (warm[500:] == 0.02).all()


def test_jsd_is_that_of_the_original():
    """As its get_beta_schedule writes it; the share of the image that is left falls evenly to nothing."""
    np.testing.assert_allclose(make_betas("jsd", T).numpy(), 1.0 / np.linspace(T, 1, T, dtype=np.float64), rtol=1e-15)
    cumulative = build_scheduler("jsd", prediction_type="sample").alphas_cumprod
    np.testing.assert_allclose(cumulative.numpy(), np.arange(T - 1, -1, -1) / T, rtol=1e-9)
    assert cumulative[-1] == 0


@pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
@pytest.mark.parametrize("prediction_type", ["sample", "v_prediction"])
def test_a_stock_scheduler_takes_the_steps_of_jsd(prediction_type, variance_type, tmp_path):
    exact = build_scheduler("jsd", prediction_type=prediction_type, variance_type=variance_type)
    exact.plain().save_pretrained(tmp_path)
    stock = DDPMScheduler.from_pretrained(tmp_path)
    assert stock.config.trained_betas[-1] == 1
    images = random_images(2)
    for t in (999, 998, 500, 1, 0):
        sample = exact.add_noise(images, random_noise(images, t), torch.full((2,), t))
        output = random_noise(images, T + t)
        ours, theirs = (one.step(output, t, sample, generator=generator_for(t)).prev_sample for one in (exact, stock))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    last = torch.full((2,), T - 1)
    assert torch.equal(exact.add_noise(images, random_noise(images), last), random_noise(images))


def test_bins_of_log_snr_reach_the_step_without_signal():
    bins = LogSNRBins(build_scheduler("jsd", prediction_type="sample").alphas_cumprod)
    assert bins.log_snr.isfinite().all()
    assert (bins.log_snr.diff() < 0).all()
    assert bins.log_snr[-1] == pytest.approx(np.log(1 / 999) - (np.log(2 / 998) - np.log(1 / 999)))
    assert bins.counts.sum() == T


def test_only_the_last_beta_may_be_one():
    with pytest.raises(ValueError, match="it needs 3 betas, each above 0 and below 1; of several"):
        ExactDDPMScheduler(num_train_timesteps=3, trained_betas=[0.1, 1.0, 0.5])
    with pytest.raises(ValueError, match="it needs 1 betas"):
        ExactDDPMScheduler(num_train_timesteps=1, trained_betas=[1.0])


@pytest.mark.parametrize("schedule", ["linear", "quadratic", "cosine", "sigmoid", "jsd"])
def test_add_noise_at_every_timestep(schedule):
    scheduler, tables = build_scheduler(schedule), paper_tables(schedule)
    images = random_images(1).expand(T, -1, -1, -1)
    noise = random_noise(images)
    noisy = scheduler.add_noise(images, noise, torch.arange(T))
    signal = np.sqrt(tables["cumulative"])[:, None, None, None]
    spread = np.sqrt(1 - tables["cumulative"])[:, None, None, None]
    exact = signal * images.double().numpy() + spread * noise.double().numpy()
    assert noisy.dtype == torch.float32
    assert np.abs(noisy.double().numpy() - exact).max() < 1e-6


def test_noise_survives_low_precision_images():
    """In bf16 the signal of small t rounds to 1 and the noise to nothing; here it is added in float32."""
    images = random_images().bfloat16()
    noise = random_noise(images)
    noisy = build_scheduler().add_noise(images, noise.bfloat16(), torch.zeros(4, dtype=torch.long))
    assert noisy.dtype == torch.float32
    residual = noisy - images.float() * (1 - 1e-4) ** 0.5
    torch.testing.assert_close(residual, 0.01 * noise.bfloat16().float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction", "mean"])
def test_step_at_every_timestep(variance_type, prediction_type):
    scheduler, tables = build_scheduler(variance_type=variance_type, prediction_type=prediction_type), paper_tables()
    images = random_images(2)
    for t in range(T):
        noise, error = random_noise(images, t), 0.1 * random_noise(images, T + t)
        sample = scheduler.add_noise(images, noise, torch.full((2,), t))
        a_t, a_s = tables["cumulative"][t], tables["previous"][t]
        beta = tables["betas"][t]
        x_t, x_0, eps = (tensor.double().numpy() for tensor in (sample, images, noise))
        if prediction_type == "epsilon":
            output = noise + error
            original = (x_t - np.sqrt(1 - a_t) * output.double().numpy()) / np.sqrt(a_t)
        elif prediction_type == "sample":
            output = images + error
            original = output.double().numpy()
        elif prediction_type == "mean":
            output = (
                torch.from_numpy((x_t - beta / np.sqrt(1 - a_t) * eps) / np.sqrt(1 - beta)).float() + error
            )  # eq. 11
        else:
            output = torch.from_numpy(np.sqrt(a_t) * eps - np.sqrt(1 - a_t) * x_0).float() + error
            original = np.sqrt(a_t) * x_t - np.sqrt(1 - a_t) * output.double().numpy()
        if prediction_type == "mean":
            mean = output.double().numpy()  # as it is
        else:
            original = np.clip(original, -1, 1)  # before the mean
            mean = (beta * np.sqrt(a_s) * original + (1 - a_s) * np.sqrt(1 - beta) * x_t) / (1 - a_t)
        variance = beta if variance_type == "fixed_large" else tables["posterior"][t]
        fresh = torch.randn(sample.shape, generator=generator_for(t))
        exact = mean + (np.sqrt(variance) * fresh.double().numpy() if t > 0 else 0)
        stepped = scheduler.step(output, t, sample, generator=generator_for(t)).prev_sample
        assert np.abs(stepped.double().numpy() - exact).max() < 1e-6, f"t = {t}"


def test_variance_tables_of_the_paper():
    tables = paper_tables()
    for variance_type, expected in (("fixed_large", tables["betas"]), ("fixed_small", tables["posterior"])):
        scheduler = build_scheduler(variance_type=variance_type)
        variances = np.array([scheduler.variance(t, t - 1) for t in range(T)])
        clipped = np.append(tables["posterior"][1], expected[1:])  # the code's log-variance at t = 0
        np.testing.assert_allclose(variances, clipped, rtol=1e-9)


def test_no_noise_at_the_end():
    scheduler = build_scheduler()
    sample = random_images()
    _, deviation = scheduler.posterior(torch.zeros_like(sample), 0, -1, sample)
    assert deviation == 0


@pytest.mark.parametrize("name", ["fixed_large_log", "fixed_small_log"])
def test_variances_that_are_not_exact_are_refused(name):
    with pytest.raises(ValueError, match=name):
        ExactDDPMScheduler(variance_type=name)


@pytest.mark.parametrize("schedule", BETA_SCHEDULES)
def test_what_is_saved_is_a_stock_scheduler(schedule, tmp_path):
    exact = build_scheduler(schedule)
    exact.plain().save_pretrained(tmp_path)
    assert '"_class_name": "DDPMScheduler"' in (tmp_path / "scheduler_config.json").read_text()
    stock = DDPMScheduler.from_pretrained(tmp_path)
    torch.testing.assert_close(stock.betas, exact.betas.float(), rtol=2e-4, atol=1e-7)
    assert stock.config.variance_type == "fixed_large"
    again = ExactDDPMScheduler.from_pretrained(tmp_path)
    assert torch.equal(again.betas, exact.betas)


def test_float64_is_why():
    """The stock float32 tables give betas that are off by hundreds of roundings; ours do not."""
    betas = np.linspace(1e-4, 0.02, T)

    def error(cumulative: torch.Tensor) -> float:
        ratio = cumulative[1:].double() / cumulative[:-1].double()
        return (((1 - ratio).numpy() - betas[1:]) / betas[1:]).__abs__().max()

    assert error(DDPMScheduler().alphas_cumprod) > 1e-4
    assert error(build_scheduler().alphas_cumprod) < 1e-9


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 999, 1000])
def test_linear_subsequence(steps):
    sequence = linear(T, steps)
    assert len(set(sequence)) == steps
    assert sequence == sorted(sequence, reverse=True)
    assert sequence[0] == T - 1
    assert steps == 1 or sequence[-1] == 0
