"""The variational bound, the predicted mean and learned variances, against closed forms and diffusers."""

import csv
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import losses_of, make_tiny_flags, make_tiny_network, run_script, run_training
from diffusers import DDPMPipeline, DDPMScheduler
from torch.distributions import Normal, kl_divergence

from common.errors import UserError
from common.randomness import standard_normal
from conditions.conditional_pipeline import guide
from evaluation.likelihood import bound_of, measure_batch
from image_data.batches import Batch
from run_folder.config import parse_config
from run_folder.saved_model import find_models
from schedulers.ddpm import LEARNED_VARIANCES, ExactDDPMScheduler, build_scheduler, decoder_nats
from schedulers.denoising import DDIM, DDPM, NOISE_KEY, DiffusersMethod, UnusableScheduler, denoise, network_predict
from schedulers.loss import build_loss
from schedulers.weighting import weighting_table
from training.setup import build_process

T = 1000
BETAS = np.linspace(1e-4, 0.02, T)
A = np.cumprod(1 - BETAS)
BEFORE = np.append(1, A[:-1])
POSTERIOR = BETAS * (1 - BEFORE) / (1 - A)
CLIPPED = np.append(POSTERIOR[1], POSTERIOR[1:])  # as in the code of the paper and its followers
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction", "mean")
SOME = (1, 2, 10, 300, 998, 999)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def posterior_mean(x_0: torch.Tensor, x_t: torch.Tensor, t: int) -> torch.Tensor:
    """Eq. 7."""
    return (BEFORE[t] ** 0.5 * BETAS[t] * x_0 + (1 - BETAS[t]) ** 0.5 * (1 - BEFORE[t]) * x_t) / (1 - A[t])


def answers(x_0: torch.Tensor, x_t: torch.Tensor, t: int) -> dict[str, torch.Tensor]:
    """What a network says that sees this x_0 in x_t."""
    epsilon = (x_t - A[t] ** 0.5 * x_0) / (1 - A[t]) ** 0.5
    v = A[t] ** 0.5 * epsilon - (1 - A[t]) ** 0.5 * x_0
    return {"epsilon": epsilon, "sample": x_0, "v_prediction": v, "mean": posterior_mean(x_0, x_t, t)}


@pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_weighted_error_is_the_divergence(prediction_type, variance_type):
    weights = weighting_table("bound", torch.tensor(A), prediction_type, variance_type=variance_type)
    x_0, seen, epsilon = random(16), random(16, seed=1), random(16, seed=2)
    for t in SOME:
        x_t = A[t] ** 0.5 * x_0 + (1 - A[t]) ** 0.5 * epsilon
        sigma = (BETAS if variance_type == "fixed_large" else POSTERIOR)[t] ** 0.5
        true, told = (posterior_mean(one, x_t, t) for one in (x_0, seen))
        kl = kl_divergence(Normal(true, POSTERIOR[t] ** 0.5), Normal(told, sigma))
        least = kl_divergence(Normal(true, POSTERIOR[t] ** 0.5), Normal(true, sigma))  # with the right mean
        error = (answers(seen, x_t, t)[prediction_type] - answers(x_0, x_t, t)[prediction_type]).square().mean()
        expected = ((kl - least).mean() / np.log(2)).item()
        assert weights[t].item() * error.item() == pytest.approx(expected, rel=1e-5), t


def test_the_mean_of_a_step_is_what_the_paper_says_of_epsilon():
    """Eq. 11, and back."""
    scheduler, plain = build_scheduler(prediction_type="mean"), build_scheduler()
    plain.register_to_config(clip_sample=False)
    images, noise = random(2, 1, 4, 4).float(), random(2, 1, 4, 4, seed=1).float()
    for t in (0, *SOME):
        timesteps = torch.full((2,), t)
        x_t = scheduler.add_noise(images, noise, timesteps)
        target = scheduler.target(images, noise, timesteps)
        expected = (x_t - BETAS[t] / (1 - A[t]) ** 0.5 * noise) / (1 - BETAS[t]) ** 0.5
        torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-5)
        ours = scheduler.predict_original(target.double(), t, x_t.double())
        rounding = 1e-6 / scheduler._level_at(t).x_0_coefficient  # of the target, in x_0
        torch.testing.assert_close(ours, images.double(), rtol=0, atol=rounding)
        output = (x_t - BETAS[t] / (1 - A[t]) ** 0.5 * (noise + 0.1)) / (1 - BETAS[t]) ** 0.5
        for previous in (t - 1, t // 2):
            if previous < t:
                mean, _ = scheduler.posterior(output, t, previous, x_t)
                other, _ = plain.posterior(noise + 0.1, t, previous, x_t)
                torch.testing.assert_close(mean, other, rtol=1e-4, atol=2e-3 if previous < t - 1 else 1e-5)


@pytest.mark.parametrize("variance_type", LEARNED_VARIANCES)
def test_learned_variances_are_those_of_diffusers(variance_type):
    """The learned range to the rounding of float32; `learned` there is the variance whose logarithm it is here."""
    scheduler, stock = build_scheduler(variance_type=variance_type), DDPMScheduler(variance_type=variance_type)
    sample, output = random(2, 3, 4, 4).float(), random(2, 3, 4, 4, seed=1).float()
    values = random(2, 3, 4, 4, seed=2).float() - (4 if variance_type == "learned" else 0)
    for t in SOME:
        log_variance = scheduler.log_variance(values, torch.full((2,), t))
        of_stock = stock._get_variance(t, predicted_variance=values.exp() if variance_type == "learned" else values)
        of_stock = of_stock.log() if variance_type == "learned" else of_stock
        torch.testing.assert_close(log_variance, of_stock, rtol=1e-4, atol=2e-3)  # its beta_t is off by 5e-4
        told = values.exp() if variance_type == "learned" else values
        theirs = stock.step(torch.cat([output, told], dim=1), t, sample, generator=torch.Generator().manual_seed(5))
        ours = scheduler.step(torch.cat([output, values], dim=1), t, sample, torch.Generator().manual_seed(5))
        torch.testing.assert_close(ours.prev_sample, theirs.prev_sample, rtol=1e-3, atol=1e-3)


def test_the_range_is_from_the_posterior_s_variance_to_beta():
    scheduler = build_scheduler(variance_type="learned_range")
    everywhere, ones = torch.arange(T), torch.ones(T, 1, 1, 1)
    for value, expected in ((-1, CLIPPED), (1, BETAS), (0, np.sqrt(CLIPPED * BETAS))):
        found = scheduler.log_variance(value * ones, everywhere).exp().flatten()
        np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6)
        for t, previous in ((999, 899), (500, 499), (10, 0)):
            sample, output = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, value]).reshape(1, 2, 1, 1)
            beta = 1 - A[t] / A[previous]  # of the longer step
            small = beta * (1 - A[previous]) / (1 - A[t])
            deviation = scheduler.posterior(output, t, previous, sample)[1].item()
            assert deviation**2 == pytest.approx({-1: small, 1: beta, 0: (small * beta) ** 0.5}[value], rel=1e-5)


@pytest.mark.parametrize("variance_type", LEARNED_VARIANCES)
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_a_term_of_the_bound_is_the_divergence(prediction_type, variance_type):
    scheduler = build_scheduler(variance_type=variance_type, prediction_type=prediction_type)
    x_0, seen, epsilon = random(1, 1, 4, 4), random(1, 1, 4, 4, seed=1), random(1, 1, 4, 4, seed=2)
    for t in SOME:
        x_t = A[t] ** 0.5 * x_0 + (1 - A[t]) ** 0.5 * epsilon
        values = 0.5 * random(1, 1, 4, 4, seed=3) + (np.log(BETAS[t]) if variance_type == "learned" else 0)
        fraction = (values + 1) / 2
        within = fraction * np.log(BETAS[t]) + (1 - fraction) * np.log(CLIPPED[t])
        sigma = torch.exp((values if variance_type == "learned" else within) / 2)
        told = Normal(posterior_mean(seen, x_t, t), sigma)
        kl = kl_divergence(Normal(posterior_mean(x_0, x_t, t), POSTERIOR[t] ** 0.5), told).mean().item() / np.log(2)
        output = torch.cat([answers(seen, x_t, t)[prediction_type], values], dim=1)
        found = scheduler.bound(output, x_0, x_t, torch.tensor([t]))
        assert found.item() == pytest.approx(kl, rel=2e-4, abs=1e-6), t


def test_the_decoder_integrates_over_a_grey_level():
    levels = np.array([0, 1, 100, 128, 254, 255])
    x_0 = levels / 127.5 - 1
    for deviation in (0.0073, 0.1):
        mean = x_0 + np.array([0.5, -0.5, 0.2, 1.0, -1.0, 0.3]) * deviation
        edges = scipy.stats.norm.cdf([x_0 - 1 / 255, x_0 + 1 / 255], mean, deviation)
        edges[0, 0], edges[1, -1] = 0, 1
        log_variance = torch.full((6,), 2 * np.log(deviation))
        found = decoder_nats(torch.tensor(x_0), torch.tensor(mean), log_variance)
        np.testing.assert_allclose(found.numpy(), -np.log(edges[1] - edges[0]), atol=0.01)  # of the tanh


# The objective.


def loss_with(*flags: str):
    options = parse_config(["--dataset_name=digits", "--resolution=8", *flags])
    return build_loss(vars(options), build_process(options))


def output_and_loss(loss, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a fixed output for a batch, with the output as a leaf."""
    here = SimpleNamespace(device=torch.device("cpu"), count=1, accelerator=SimpleNamespace(autocast=nullcontext))
    loss.start(seed=3, batch_size=len(t), shape=(1, 8, 8), inputs=lambda rows: {}, processes=here)
    images = (torch.arange(len(t) * 16) * 3 % 256).to(torch.uint8).reshape(len(t), 1, 4, 4)
    rows = torch.arange(len(t))
    output = (0.3 * random(len(t), 2, 4, 4)).float().requires_grad_()
    seen = {}

    def network(samples, timesteps):
        seen["x_t"] = samples
        return SimpleNamespace(sample=output)

    errors = loss(network, Batch(5, images, rows, rows, rows), t)
    return output, errors, {**seen, "x_0": images.float() / 127.5 - 1}


@pytest.mark.parametrize("variance_type", LEARNED_VARIANCES)
def test_the_bound_within_the_hybrid_loss_does_not_train_the_mean(variance_type):
    t = torch.tensor([0, 1, 10, 500, 999])
    loss = loss_with(f"--variance_type={variance_type}")
    output, errors, seen = output_and_loss(loss, t)
    (gradient,) = torch.autograd.grad(errors.sum(), output)
    mean = output.detach()[:, :1]
    epsilon = (seen["x_t"] - loss.process._level(t).signal * seen["x_0"]) / loss.process._level(t).spread
    simple = (mean - epsilon).square().flatten(1).mean(1)
    of_simple = 2 * (mean - epsilon) / 16
    torch.testing.assert_close(gradient[:, :1], of_simple, rtol=1e-3, atol=1e-4)
    assert (gradient[:, 1:].abs().amax((1, 2, 3)) > 0).all()
    terms = loss.process.bound(output, seen["x_0"], seen["x_t"], t)
    torch.testing.assert_close(errors, simple + 0.001 * T * terms, rtol=1e-4, atol=1e-4)

    loss = loss_with(f"--variance_type={variance_type}", "--loss_weighting=bound")
    output, errors, seen = output_and_loss(loss, t)
    assert (loss.weights == 1).all()
    torch.testing.assert_close(errors, loss.process.bound(output, seen["x_0"], seen["x_t"], t))
    (gradient,) = torch.autograd.grad(errors[2:].sum(), output)
    assert (gradient[2:].abs().amax((2, 3)) > 0).all()  # here it trains both


@pytest.mark.parametrize("weighting", ["none", "bound"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_bound_of_perturbed_images_is_least_at_the_target(prediction_type, weighting):
    """The target is that of the noise without the perturbation, and the bound's part of the loss agrees."""
    t = torch.tensor([10, 500, 999])
    flags = ["--variance_type=learned_range", f"--loss_weighting={weighting}", f"--prediction_type={prediction_type}"]
    loss, plain = loss_with(*flags, "--input_perturbation=0.5"), loss_with(*flags)
    output, errors, seen = output_and_loss(loss, t)
    same_output, same_errors, clean = output_and_loss(plain, t)
    assert not torch.allclose(seen["x_t"], clean["x_t"])
    torch.testing.assert_close(errors, same_errors)
    gradients = (torch.autograd.grad(one.sum(), of)[0] for one, of in ((errors, output), (same_errors, same_output)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss_weighting=bound --loss=l1", "--loss l1: --loss_weighting bound counts squared errors"),
        ("--variance_type=learned --loss_weighting=min_snr", "--loss_weighting min_snr: with --variance_type learned"),
        ("--variance_type=learned_range --timestep_sampler=infonoise", "--timestep_sampler infonoise: learns from"),
        ("--variance_type=learned_range --timestep_sampler=ats", "--timestep_sampler ats: learns from"),
        (
            "--loss_weighting=bound --ddpm_num_steps=1 --ddpm_num_inference_steps=1",
            "--loss_weighting bound: needs at least two timesteps",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        loss_with(*flags.split())


# A run, and what is saved of it.

LEARNED = ["--variance_type=learned_range", "--timestep_sampler=loss_second_moment", "--loss_second_moment_history=2"]
STOCK = """
import sys
import numpy as np, torch
from diffusers import DDPMPipeline
pipeline = DDPMPipeline.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(7)
np.save(sys.argv[2], pipeline(batch_size=4, num_inference_steps=1000, generator=generator, output_type="np").images)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache_dir):
    """The least network, with variances that differ from pixel to pixel."""
    folder = tmp_path_factory.mktemp("learned")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    flags = make_tiny_flags(make_tiny_network(folder / "network", **blocks), cache_dir)
    more = ["--max_train_steps=100", "--learning_rate=2e-3", "--logging_steps=100", "--ddpm_num_inference_steps=1000"]
    return run_training(folder / "run", [*flags, "--variance_type=learned_range", *more])


def test_stock_diffusers_draws_the_same_images(run, tmp_path):
    subprocess.run([sys.executable, "-c", STOCK, str(run), str(tmp_path / "stock.npy")], cwd=tmp_path, check=True)
    stock = np.load(tmp_path / "stock.npy")
    pipeline = DDPMPipeline.from_pretrained(run)
    assert (pipeline.unet.config.out_channels, pipeline.scheduler.config.variance_type) == (2, "learned_range")
    exact = DDPMPipeline(pipeline.unet, ExactDDPMScheduler.from_config(pipeline.scheduler.config))
    exact.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    ours = exact(batch_size=4, num_inference_steps=1000, generator=generator, output_type="np").images
    assert ours.std() > 0.1
    assert np.abs(ours - stock).max() * 255 < 0.05  # its tables are float32


def test_the_denoising_loop_is_that_of_the_stock_scheduler(run, monkeypatch):
    pipeline, (model,) = DDPMPipeline.from_pretrained(run), find_models(str(run), [], None)
    seeds = torch.arange(4)
    for steps in (1000, 50):
        method = DDPM(model.scheduler, steps)
        assert method.settings["variance_type"] == "learned_range"
        pipeline.scheduler.set_timesteps(timesteps=method.timesteps)
        ours = denoise(network_predict(pipeline.unet), method, seeds, (1, 8, 8))
        samples, spreads = standard_normal(NOISE_KEY, seeds, 0, (1, 8, 8)), []
        for number, t in enumerate(method.timesteps, start=1):
            noise = standard_normal(NOISE_KEY, seeds, number, (1, 8, 8))
            monkeypatch.setattr(
                "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *args, noise=noise, **_: noise
            )
            with torch.no_grad():
                output = pipeline.unet(samples, t).sample
            spreads.append(output[:, 1:].std())
            samples = pipeline.scheduler.step(output, t, samples).prev_sample
        assert (ours - samples).abs().max() < 4e-4
        assert max(spreads) > 0.01  # the variance is that of each pixel
    fixed = denoise(network_predict(pipeline.unet), DDPM(model.scheduler, 50, "fixed_small"), seeds, (1, 8, 8))
    assert (fixed - samples).abs().max() > 1e-3


def test_ddim_and_other_schedulers_ignore_the_variance(run):
    (model,) = find_models(str(run), [], None)
    network = model.load(torch.device("cpu"))

    def mean_alone(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return network(samples, t).sample[:, :1]

    fixed = ExactDDPMScheduler.from_config(model.scheduler.config, variance_type="fixed_large")
    for make in (
        lambda scheduler: DDIM(scheduler, 10),
        lambda scheduler: DiffusersMethod(scheduler, "DPMSolverMultistepScheduler", 10),
        lambda scheduler: DiffusersMethod(scheduler, "EulerDiscreteScheduler", 10),
    ):
        ours = denoise(network_predict(network), make(model.scheduler), torch.arange(2), (1, 8, 8))
        assert torch.equal(ours, denoise(mean_alone, make(fixed), torch.arange(2), (1, 8, 8)))


@pytest.mark.parametrize("flags", [LEARNED, ["--variance_type=learned", "--loss_weighting=bound"]], ids=" ".join)
def test_resumed_equals_uninterrupted(flags, train, tmp_path):
    flags = [*flags, "--ddpm_num_steps=20", "--logging_steps=3"]
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=8")
    for steps in (4, 8):
        parts = train(tmp_path / "parts", *flags, f"--max_train_steps={steps}", f"--checkpointing_steps={steps}")
    assert losses_of(whole) == losses_of(parts)
    tensors = list((whole / "checkpoint-8").rglob("*.safetensors"))
    assert len(tensors) == 4
    for path in tensors:
        assert path.read_bytes() == (parts / path.relative_to(whole)).read_bytes(), path.name
    with pytest.raises(UserError, match=f"variance_type {flags[0][16:]} -> fixed_large"):
        train(tmp_path / "parts", "--ddpm_num_steps=20", "--max_train_steps=9")


@pytest.mark.parametrize("flags", [["--prediction_type=mean"], ["--variance_type=learned"]], ids=" ".join)
def test_diffusers_says_what_it_cannot_sample(flags, train, tmp_path, capsys):
    run = train(tmp_path / "run", *flags, "--max_train_steps=2", "--ddpm_num_inference_steps=2")
    pipeline = DDPMPipeline.from_pretrained(run)
    pipeline.set_progress_bar_config(disable=True)
    with pytest.raises(ValueError, match="prediction_type given as (mean|epsilon and log variance) must be one of"):
        pipeline(num_inference_steps=2)
    if "--variance_type=learned" in flags:  # without the name that it refuses
        stock, output = DDPMScheduler(variance_type="learned"), torch.full((1, 2, 4, 4), -5.0)
        assert stock.step(output, 500, torch.zeros(1, 1, 4, 4)).prev_sample.isnan().all()
    assert "generate.py" in (run / "README.md").read_text()
    assert "from diffusers" not in (run / "README.md").read_text()
    # Read back it is what was trained, from the checkpoint and from the pipeline alone.
    shutil.copytree(run, tmp_path / "alone", ignore=shutil.ignore_patterns("checkpoint-*", "config.yaml"))
    schedulers = [find_models(str(folder), [], None)[0].scheduler for folder in (run, tmp_path / "alone")]
    assert schedulers[0].config.prediction_type == schedulers[1].config.prediction_type
    assert schedulers[0].config.variance_type == schedulers[1].config.variance_type
    methods = [DDPM(scheduler, 1000) for scheduler in schedulers]
    learned = "--variance_type=learned" in flags
    assert [method.settings["variance_type"] for method in methods] == ["learned" if learned else "fixed_large"] * 2
    assert DDPM(schedulers[0], 999).settings["variance_type"] == "fixed_small"
    if not learned:
        with pytest.raises(UnusableScheduler, match="no prediction of the mean"):
            DiffusersMethod(schedulers[0], "DPMSolverMultistepScheduler", 10)


def test_a_variance_that_is_not_a_logarithm_is_refused(run, tmp_path):
    pipeline = DDPMPipeline.from_pretrained(run)
    for variance_type, message in (("learned", "not its logarithm"), ("fixed_small", "variance_type is fixed_small")):
        pipeline.scheduler.register_to_config(variance_type=variance_type)
        pipeline.save_pretrained(tmp_path / variance_type)
        with pytest.raises(UserError, match=message):
            find_models(str(tmp_path / variance_type), [], None)


# What looks at its images.


def test_the_likelihood_with_a_learned_variance(run, tmp_path):
    """With the variance at an end of its range it is that of the fixed one; of a run it is a row of the table."""
    images = torch.randint(0, 256, (3, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scheduler = build_scheduler("linear", 50, "learned_range")
    for value, variance_type in ((-1.0, "fixed_small"), (1.0, "fixed_large")):

        def predict(x_t, t, value=value):
            return torch.cat([0.9 * x_t, torch.full_like(x_t, value)], dim=1)

        found = measure_batch(predict, scheduler, images, torch.arange(3))
        learned, fixed = (bound_of(found, scheduler, name) for name in ("learned_range", variance_type))
        torch.testing.assert_close(learned.terms[1:], fixed.terms[1:], rtol=1e-4, atol=1e-5)
        if value < 0:
            assert learned.nll == pytest.approx(fixed.nll, rel=1e-4)
    run_script("evaluate", run, "--nll", "--num_images=10", "--split=train", f"--output_dir={tmp_path}")
    rows = list(csv.DictReader((tmp_path / "likelihood.csv").open()))
    assert [row["variance_type"] for row in rows] == ["fixed_large", "fixed_small", "learned_range"]
    assert len({row["nll"] for row in rows}) == 3
    assert all(0 < float(row["nll"]) < 100 for row in rows)


def test_guidance_leaves_the_variance_as_it_is():
    conditional, unconditional = random(2, 6, 4, 4), random(2, 6, 4, 4, seed=1)
    guided = guide(conditional, unconditional, 3.0, 0.5, channels=3)
    assert torch.equal(guided[:, :3], guide(conditional[:, :3], unconditional[:, :3], 3.0, 0.5))
    assert torch.equal(guided[:, 3:], conditional[:, 3:])


def test_guided_images_with_a_learned_variance(train_conditional, tmp_path):
    run = train_conditional(tmp_path / "run", "--variance_type=learned_range", "--max_train_steps=2")
    run_script("generate", run, "--num_images=2", "--ddpm", "--num_inference_steps=3", "--guidance_scale=2",
               f"--output_dir={tmp_path / 'images'}")  # fmt: skip
    (record,) = tmp_path.glob("images/**/samples.json")
    assert "learned_range" in record.read_text()
