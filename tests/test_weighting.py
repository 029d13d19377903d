"""Loss weights against closed forms at every timestep, for what each paper's network predicts."""

import numpy as np
import pytest
import torch

from common.randomness import generator_for
from schedulers.ddpm import build_scheduler
from schedulers.weighting import LOSS_WEIGHTINGS, weighting_table

T = 1000
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction", "mean")
SCHEDULES = ("linear", "cosine")
A = {schedule: build_scheduler(schedule).alphas_cumprod.numpy() for schedule in SCHEDULES}


def closed_forms(a: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    snr, sigma = a / (1 - a), np.sqrt((1 - a) / a)
    rise = np.gradient(1 - a)
    speed = 0.4 + 0.2 * (rise - rise.min()) / (rise.max() - rise.min())
    edm = (sigma**2 + 0.25) / (sigma * 0.5) ** 2  # on x_0
    soft = 1 / (sigma**2 + 1 / 4)  # on x_0
    range_of_t = -np.gradient(np.log(snr))
    range_of_t[[0, -1]] /= 2  # the ends have half a cell
    sigmoid = range_of_t / (1 + snr * np.exp(-2))
    sigmoid /= sigmoid.mean()
    before = np.append(1, a[:-1])
    alphas, betas = a / before, 1 - a / before
    variance = np.append((1 - before[1]) / (1 - a[1]) * betas[1], betas[1:])  # fixed_large, with that of t = 1 at 0
    on_mean = 1 / (2 * np.log(2) * variance)  # Ho et al. 2020, eq. 8
    return {
        ("bound", "mean"): on_mean,
        ("bound", "epsilon"): on_mean * betas**2 / (alphas * (1 - a)),  # eq. 12
        ("bound", "sample"): on_mean * before * (betas / (1 - a)) ** 2,
        ("bound", "v_prediction"): on_mean * before * betas**2 / (1 - a),
        ("min_snr", "mean"): np.minimum(snr, 5) * (1 - a) ** 2 / (before * betas**2),
        ("none", "epsilon"): np.ones(T),
        ("none", "sample"): np.ones(T),
        ("none", "v_prediction"): np.ones(T),
        ("none", "mean"): np.ones(T),
        ("min_snr", "epsilon"): np.minimum(snr, 5) / snr,
        ("min_snr", "v_prediction"): np.minimum(snr, 5) / (snr + 1),
        ("min_snr", "sample"): np.minimum(snr, 5),
        ("soft_min_snr", "epsilon"): soft * sigma**2,
        ("soft_min_snr", "v_prediction"): soft * (1 - a),
        ("soft_min_snr", "sample"): soft,
        ("p2", "epsilon"): 1 - a,
        ("p2", "sample"): a,
        ("p2", "v_prediction"): a * (1 - a),
        ("edm", "epsilon"): edm * sigma**2,
        ("edm", "v_prediction"): edm * (1 - a),
        ("edm", "sample"): edm,
        ("sigmoid", "epsilon"): sigmoid,
        ("sigmoid", "v_prediction"): sigmoid * a,
        ("sigmoid", "sample"): sigmoid * snr,
        ("speed", "epsilon"): np.where(np.arange(T) < 700, speed, 1),
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_forms_at_every_timestep(schedule):
    cumulative = build_scheduler(schedule).alphas_cumprod
    tables = closed_forms(A[schedule])
    assert {name for name, _ in tables} == set(LOSS_WEIGHTINGS)
    for (name, prediction_type), expected in tables.items():
        table = weighting_table(name, cumulative, prediction_type)
        assert table.dtype == torch.float32
        assert (table >= 0).all()
        np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6, err_msg=f"{name}, {prediction_type}")


def test_options():
    a = A["linear"]
    snr = a / (1 - a)
    cumulative = build_scheduler().alphas_cumprod
    np.testing.assert_allclose(
        weighting_table("min_snr", cumulative, "sample", gamma=1.0), np.minimum(snr, 1), rtol=1e-6
    )
    np.testing.assert_allclose(weighting_table("p2", cumulative, "epsilon", gamma=0.5), (1 - a) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(weighting_table("p2", cumulative, "epsilon", k=2.0), 1 / (2 + snr), rtol=1e-6)
    np.testing.assert_allclose(weighting_table("edm", cumulative, "sample", sigma_data=1.0), snr + 1, rtol=1e-6)
    for prediction_type, ratio in {"epsilon": snr, "sample": 1, "v_prediction": snr + 1}.items():
        capped = np.minimum(1 + 4 / snr, 5) * snr / ratio  # at most 5 on epsilon, whatever is predicted
        np.testing.assert_allclose(weighting_table("edm", cumulative, prediction_type, cap=5.0), capped, rtol=1e-6)
    np.testing.assert_allclose(
        weighting_table("soft_min_snr", cumulative, "sample", gamma=5.0), 5 * snr / (snr + 5), rtol=1e-6
    )
    flat = weighting_table("sigmoid", cumulative, "epsilon", k=30.0).numpy() / -np.gradient(np.log(snr))
    np.testing.assert_allclose(flat[1:-1], flat[1], rtol=1e-5)  # the bound itself: each lambda alike
    speed = weighting_table("speed", cumulative, "epsilon", tau=100, lambda_=0.8)
    assert (speed[100:] == 1).all()
    rise = np.gradient(1 - a)
    scaled = (rise - rise.min()) / (rise.max() - rise.min())
    np.testing.assert_allclose(speed[:100], 0.2 + 0.6 * scaled[:100], rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["bound", "min_snr", "soft_min_snr", "p2", "edm", "sigmoid"])
def test_one_weighting_is_one_objective_whatever_is_predicted(name, schedule):
    """A network that sees one x_0 in x_t has the same weighted loss, however it says so."""
    images, noise = (torch.randn(T, 1, 2, 2, generator=generator_for(name), dtype=torch.float64) for name in "ab")
    seen = images + 0.1 * torch.randn(images.shape, generator=generator_for("c"), dtype=torch.float64)
    a = build_scheduler(schedule).alphas_cumprod[:, None, None, None]
    noisy = a.sqrt() * images + (1 - a).sqrt() * noise
    heard = (noisy - a.sqrt() * seen) / (1 - a).sqrt()
    before = torch.cat([torch.ones_like(a[:1]), a[:-1]])
    x_0_coefficient = before.sqrt() * (1 - a / before) / (1 - a)  # eq. 7
    errors = {
        "sample": seen - images,
        "epsilon": heard - noise,
        "v_prediction": (a.sqrt() * heard - (1 - a).sqrt() * seen) - (a.sqrt() * noise - (1 - a).sqrt() * images),
        "mean": x_0_coefficient * (seen - images),
    }
    losses = [
        weighting_table(name, a.flatten(), prediction_type) * error.square().flatten(1).mean(1)
        for prediction_type, error in errors.items()
    ]
    for other in losses[1:]:
        torch.testing.assert_close(losses[0], other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("prediction_type", ["sample", "v_prediction", "mean"])
def test_what_a_paper_does_not_define_is_refused(prediction_type):
    with pytest.raises(ValueError, match=f"only defined for epsilon prediction, not for {prediction_type}"):
        weighting_table("speed", build_scheduler().alphas_cumprod, prediction_type)


@pytest.mark.parametrize("steps", [1, 2])
def test_speed_needs_a_rise(steps):
    with pytest.raises(ValueError, match=f"at least 3 timesteps, not {steps}"):
        weighting_table("speed", build_scheduler(num_train_timesteps=3).alphas_cumprod[:steps], "epsilon")


@pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_divergence_weights_give_the_kl_of_the_step_back(prediction_type, variance_type):
    """The difference of the KL of two predictions, from the posterior's means and variances."""
    scheduler = build_scheduler(prediction_type=prediction_type, variance_type=variance_type)
    scheduler.register_to_config(clip_sample=False)
    weights = scheduler.divergence_weights()
    images, noise = (torch.randn(1, 1, 4, 4, generator=generator_for(name), dtype=torch.float64) for name in "ab")
    for t in (0, 1, 2, 300, 999):
        at = torch.tensor([t])
        signal, spread = scheduler.alphas_cumprod[t].sqrt(), (1 - scheduler.alphas_cumprod[t]).sqrt()
        noisy = signal * images + spread * noise
        target = {"epsilon": noise, "sample": images, "v_prediction": signal * noise - spread * images}
        alpha, a_s = scheduler.alphas[t], scheduler.alphas_cumprod[t - 1] if t else 1
        target["mean"] = (a_s**0.5 * (1 - alpha) * images + alpha.sqrt() * (1 - a_s) * noisy) / spread**2
        target = target[prediction_type]
        true_mean, _ = scheduler.posterior(target, t, t - 1, noisy)
        kl, loss = [], []
        for error in (0.1, 0.3):
            prediction = target + error * torch.randn(1, 1, 4, 4, generator=generator_for(t), dtype=torch.float64)
            mean, _ = scheduler.posterior(prediction, t, t - 1, noisy)
            kl.append(((true_mean - mean) ** 2).mean() / (2 * scheduler.variance(t, t - 1) * np.log(2)))
            loss.append((prediction - target).square().mean())
        torch.testing.assert_close(kl[1] - kl[0], weights[at][0] * (loss[1] - loss[0]), rtol=1e-6, atol=0)
