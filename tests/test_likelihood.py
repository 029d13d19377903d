"""Bits per dimension against closed forms: a Gaussian whose best network, bound and true entropy are known."""

import csv
import functools
import logging
import math
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import ROOT, run_script, run_training

from common.errors import UserError
from evaluation.likelihood import Measurement, bound_of, decoder_bits, measure_batch, prior_bits
from schedulers.ddpm import VARIANCE_TYPES, ExactDDPMScheduler, build_scheduler

MEAN, DEVIATION = 0.1, 0.2  # of a pixel, in [-1, 1]


def gaussian_images(count: int) -> torch.Tensor:
    values = MEAN + DEVIATION * torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return (values * 127.5 + 128).clamp(0, 255).to(torch.uint8)


def best_network(scheduler):
    """E[x_0 | x_t] of Gaussian pixels, as what the scheduler's network is to predict."""
    alphas = np.cumprod(1 - np.linspace(1e-4, 0.02, len(scheduler.betas)))

    def predict(x_t, t):
        a = alphas[int(t)]
        gain = DEVIATION**2 * a**0.5 / (a * DEVIATION**2 + 1 - a)
        x_0 = MEAN + gain * (x_t.double() - a**0.5 * MEAN)
        epsilon = (x_t.double() - a**0.5 * x_0) / (1 - a) ** 0.5
        v = a**0.5 * epsilon - (1 - a) ** 0.5 * x_0
        return {"sample": x_0, "epsilon": epsilon, "v_prediction": v}[scheduler.config.prediction_type].float()

    return predict


def expected_terms(steps: int, variance_type: str) -> np.ndarray:
    """E KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)) of the best network, from the definition of the two Gaussians."""
    betas = np.linspace(1e-4, 0.02, steps)
    alphas = np.cumprod(1 - betas)
    before = np.append(1, alphas[:-1])
    posterior = betas * (1 - before) / (1 - alphas)
    variance = betas if variance_type == "fixed_large" else posterior
    # Var[x_0 | x_t], and what it is worth in the mean of q(x_t-1 | x_t, x_0).
    uncertainty = 1 / (1 / DEVIATION**2 + alphas / (1 - alphas))
    shift = (np.sqrt(before) * betas / (1 - alphas)) ** 2 * uncertainty
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.log(np.sqrt(variance / posterior)) + (posterior + shift) / (2 * variance) - 0.5
    return kl[1:] / math.log(2)


def entropy() -> float:
    """Of a pixel in bits: what no code can do without."""
    edges = (np.arange(257) - 0.5) / 127.5 - 1
    edges[0], edges[-1] = -np.inf, np.inf
    return scipy.stats.entropy(np.diff(scipy.stats.norm.cdf(edges, MEAN, DEVIATION)), base=2)


def cost_of_variances(steps: int, variance_type: str) -> float:
    """Sum of KL(q(x_t-1 | x_t) || p(x_t-1 | x_t)), Gaussians of one mean, the first variance being the true one."""
    betas = np.linspace(1e-4, 0.02, steps)
    alphas = np.cumprod(1 - betas)
    before = np.append(1, alphas[:-1])
    posterior = betas * (1 - before) / (1 - alphas)
    variance = betas.copy() if variance_type == "fixed_large" else posterior.copy()
    variance[0] = posterior[1]
    # Var[x_t-1 | x_t] of two joint Gaussians.
    of_before, of_t = before * DEVIATION**2 + 1 - before, alphas * DEVIATION**2 + 1 - alphas
    ratio = of_before * betas / of_t / variance
    return ((ratio - 1 - np.log(ratio)) / (2 * math.log(2))).sum()


@functools.cache
def measured(prediction_type: str, steps: int):
    scheduler, images = build_scheduler("linear", steps, "fixed_large", prediction_type), gaussian_images(64)
    return measure_batch(best_network(scheduler), scheduler, images, torch.arange(len(images))), scheduler


class TestGaussian:
    @pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
    @pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
    def test_every_term_is_the_closed_form(self, prediction_type, variance_type):
        found, scheduler = measured(prediction_type, 100)
        terms = bound_of(found, scheduler, variance_type).terms[1:].numpy()
        expected = expected_terms(100, variance_type)
        # 16,384 pixels: a squared error is known to 1.1 %, the sum of 99 of them to 0.2 %.
        assert np.abs(terms / expected - 1).max() < 0.05
        assert terms.sum() == pytest.approx(expected.sum(), rel=0.005)

    def test_what_a_pipeline_leaves_to_the_default_is_no_other_prediction(self):
        """diffusers does not hand on what a scheduler_config.json does not say, which older ones do not."""
        found, scheduler = measured("epsilon", 100)
        silent = ExactDDPMScheduler.from_config({"num_train_timesteps": 100, "variance_type": "fixed_large"})
        assert silent.config.prediction_type == "epsilon"
        assert bound_of(found, silent, "fixed_large").nll == pytest.approx(
            bound_of(found, scheduler, "fixed_large").nll
        )

    @pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
    def test_the_whole_is_the_entropy_and_what_the_variance_costs(self, variance_type):
        """-log p of a Gaussian is known: the bound of its best network exceeds it by what the variances are off."""
        found, scheduler = measured("epsilon", 1000)
        bound = bound_of(found, scheduler, variance_type)
        expected = entropy() + cost_of_variances(1000, variance_type)
        assert bound.nll == pytest.approx(expected, abs=3 * bound.standard_error + 0.01)
        assert bound.nll == pytest.approx(bound.rate + bound.distortion)
        assert bound.received()[-1] == pytest.approx(bound.prior)
        assert bound.received()[0] == pytest.approx(bound.rate)


class TestTerms:
    @pytest.mark.parametrize("deviation", [0.003, 0.0074, 0.1, 3.0])
    def test_the_decoder_is_a_distribution(self, deviation):
        """The probabilities of the 256 grey levels are those of scipy, and their sum is one."""
        levels = torch.arange(256, dtype=torch.uint8).reshape(-1, 1, 1, 1)
        mean = torch.full((256, 1, 1, 1), 0.3)
        bits = decoder_bits(levels, mean, deviation).numpy()
        edges = (np.arange(1, 256) - 0.5) / 127.5 - 1
        below = scipy.stats.norm.cdf(edges, mean[0].item(), deviation)
        expected = np.diff(np.concatenate([[0.0], below, [1.0]]))
        assert (2.0**-bits).sum() == pytest.approx(1, rel=1e-12)
        np.testing.assert_allclose(2.0**-bits, expected, rtol=1e-9, atol=1e-15)

    def test_the_decoder_far_from_the_mean(self):
        """Where the distribution function is 1 or 0 in float64 it still has a logarithm, the same on both sides."""
        black = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
        far = decoder_bits(black, torch.ones(1, 1, 1, 1), 0.01)
        expected = -scipy.stats.norm.logcdf((-1 + 0.5 / 127.5 - 1) / 0.01) / math.log(2)
        assert far.item() == pytest.approx(expected, rel=1e-9)
        assert decoder_bits(255 - black, -torch.ones(1, 1, 1, 1), 0.01).item() == pytest.approx(far.item(), rel=1e-9)

    def test_the_prior(self):
        images, scheduler = gaussian_images(2), build_scheduler("linear", 10)
        a = float(np.prod(1 - np.linspace(1e-4, 0.02, 10)))
        x_0 = images.double().numpy() / 127.5 - 1
        expected = 0.5 * (a * x_0**2 + (1 - a) - 1 - np.log(1 - a)).mean(axis=(1, 2, 3)) / np.log(2)
        np.testing.assert_allclose(prior_bits(images, scheduler).numpy(), expected, rtol=1e-12)

    def test_the_true_image_costs_nothing(self):
        """A network that knows x_0 pays for the variance alone: nothing with the posterior's own."""
        images, scheduler = gaussian_images(2), build_scheduler("linear", 50, prediction_type="sample")
        x_0 = images.float() / 127.5 - 1
        found = measure_batch(lambda x_t, t: x_0, scheduler, images, torch.arange(2))
        assert bound_of(found, scheduler, "fixed_small").terms[1:].abs().max() == 0
        assert bound_of(found, scheduler, "fixed_large").terms[1:].min() > 0

    def test_an_image_is_measured_alone(self):
        """Its noise depends on its row, not on its place in the batch: so the number of processes plays no part."""
        images, scheduler = gaussian_images(4), build_scheduler("linear", 20)
        predict = best_network(scheduler)
        together = measure_batch(predict, scheduler, images, torch.arange(4))
        alone = measure_batch(predict, scheduler, images[2:3], torch.tensor([2]))
        for name in Measurement.__dataclass_fields__:
            assert torch.equal(getattr(together, name)[2:3], getattr(alone, name))


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_flags):
    """A run of few diffusion steps."""
    flags = ["--max_train_steps=4", "--save_images_steps=100", "--ddpm_num_steps=50"]
    folder = run_training(tmp_path_factory.mktemp("runs") / "run", [*tiny_flags, *flags])
    logging.getLogger().handlers.clear()
    return folder


@pytest.fixture
def evaluate(cache_dir):
    """evaluate.py --nll in this process."""

    def call(*flags: str) -> None:
        try:
            run_script("evaluate", "--nll", f"--cache_dir={cache_dir}", "--num_workers=0", *flags)
        finally:
            logging.getLogger().handlers.clear()

    return call


def test_every_variance_has_a_look_of_its_own(tmp_path, monkeypatch):
    """And every split a colour."""
    from evaluation import likelihood

    lines, drawing = [], likelihood.drawing

    @contextmanager
    def noted(path, **settings):
        with drawing(path, **settings) as (figure, panels):
            yield figure, panels
            lines.extend(line for axes in panels.flat for line in axes.get_lines())

    monkeypatch.setattr(likelihood, "drawing", noted)
    bound, rmse = likelihood.Bound(3.0, 0.1, 0.5, torch.linspace(1, 0.1, 20)), torch.linspace(1, 100, 20)
    names = [f"{split}, {variance}" for split in ("train", "test") for variance in VARIANCE_TYPES]
    likelihood.draw(tmp_path / "picture.png", dict.fromkeys(names, (bound, rmse)))
    looks = [(line.get_color(), line.get_linestyle(), line.get_linewidth(), line.get_alpha()) for line in lines]
    assert len(looks) == 2 * len(names)
    assert len(set(looks)) == len(names)
    assert len({look[1:] for look in looks}) == len(VARIANCE_TYPES)
    assert len({look[1] for look in looks}) == len(VARIANCE_TYPES)  # seen in one colour, and without the widths


class TestScript:
    def test_a_run(self, run, evaluate, capsys):
        arguments = f"--run_dir={run}", "--num_images=10", "--batch_size=8"
        evaluate(*arguments)
        rows = read(run / "likelihood.csv")
        assert [(row["images"], row["num_images"], row["variance_type"]) for row in rows] == [
            ("digits[train]", "10", "fixed_large"), ("digits[train]", "10", "fixed_small"),
        ]  # fmt: skip
        for row in rows:
            assert float(row["nll"]) == pytest.approx(float(row["rate"]) + float(row["distortion"]))
        lines = read(run / "likelihood" / "step-4-ema-train.csv")
        assert [line["t"] for line in lines] == [str(t) for t in range(50)]
        total = sum(float(line["bits_fixed_small"]) for line in lines) + float(rows[1]["prior"])
        assert total == pytest.approx(float(rows[1]["nll"]))
        assert (run / "likelihood" / "step-4-ema.png").exists()
        assert rows[1]["nll"][:4] in capsys.readouterr().out
        # Ten images in batches of eight: the second one is filled up, and nothing of that is counted.
        before = (run / "likelihood.csv").read_bytes()
        evaluate(*arguments)
        assert (run / "likelihood.csv").read_bytes() == before

    def test_a_pipeline_with_named_images(self, run, evaluate, tmp_path):
        from diffusers import DDPMPipeline

        DDPMPipeline.from_pretrained(run).save_pretrained(tmp_path / "pipeline")
        arguments = f"--run_dir={tmp_path / 'pipeline'}", "--num_images=10", "--batch_size=10"
        with pytest.raises(UserError, match="is not a run; name its images with --dataset_name"):
            evaluate(*arguments)
        evaluate(*arguments, "--dataset_name=digits", f"--output_dir={tmp_path / 'out'}")
        (large, small) = read(tmp_path / "out" / "likelihood.csv")
        assert float(large["nll"]) != float(small["nll"])

    @pytest.mark.parametrize("kind", ["class", "text"])
    def test_given_the_class_or_the_caption_of_each_image(
        self, kind, tiny_flags, text_flags, text_encoder, evaluate, tmp_path
    ):
        """The bits are those of the network with sklearn's own labels, and not those with another order of them."""
        from diffusers import UNet2DConditionModel, UNet2DModel
        from sklearn.datasets import load_digits

        from conditions.text_encoder import TextEncoder
        from image_data.sources import spread

        flags = ["--max_train_steps=30", "--save_images_steps=100", "--ddpm_num_steps=20", "--learning_rate=0.01"]
        flags += ["--lr_scheduler=constant", "--lr_warmup_steps=0", "--no_use_ema"]
        base = [flag for flag in (text_flags if kind == "text" else tiny_flags) if not flag.startswith("--ema")]
        run = run_training(tmp_path / "run", [*base, *flags], script="train_conditional")
        logging.getLogger().handlers.clear()
        # In so few steps little is learnt of the condition, so it is made to matter in the pipeline.
        shutil.rmtree(run / "checkpoint-30")
        network = (UNet2DConditionModel if kind == "text" else UNet2DModel).from_pretrained(run / "unet")
        with torch.no_grad():
            for name, weights in network.named_parameters():
                weights.mul_(10 if "class_embedding" in name or "attn2.to" in name else 1)
        network.save_pretrained(run / "unet")
        evaluate(f"--run_dir={run}", "--num_images=12", "--batch_size=8")
        found = {row["variance_type"]: float(row["nll"]) for row in read(run / "likelihood.csv")}

        digits = load_digits()
        rows = torch.tensor(spread(1797, 12))
        images = torch.from_numpy((digits.images[rows] / 16 * 255).round().astype(np.uint8))[:, None]
        labels, scheduler = torch.from_numpy(digits.target[rows]), build_scheduler("linear", 20)
        words = "zero one two three four five six seven eight nine".split()

        def nll(labels: torch.Tensor, variance_type: str) -> float:
            inputs = {"class_labels": labels}
            if kind == "text":
                captions = [f"a handwritten {words[label]}" for label in labels]
                states, mask = TextEncoder(str(text_encoder), torch.device("cpu")).encode(captions)
                inputs = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
            found = measure_batch(lambda x_t, t: network(x_t, t, **inputs).sample, scheduler, images, rows)
            return bound_of(found, scheduler, variance_type).nll

        for variance_type, bits in found.items():
            assert bits == pytest.approx(nll(labels, variance_type), rel=5e-6)
            # Two hundred times as much as what is allowed above.
            assert max(abs(bits - nll(labels.roll(places), variance_type)) for places in range(1, 6)) > 1e-3 * bits

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--ddim"], "--ddim has no effect with --nll"),
            (["--features=clip"], "--features has no effect with --nll"),
            (["--split=test"], "has no split 'test'; it has: train"),
            (["--output_dir=README.md/here"], "README.md is a file, not a folder"),
        ],
    )
    def test_mistakes(self, run, evaluate, flags, message, monkeypatch):
        measured = "evaluation.likelihood.Likelihood._measure_images"
        monkeypatch.setattr(measured, lambda *_: pytest.fail("before it is known whether it will work"))
        monkeypatch.chdir(ROOT)
        with pytest.raises(UserError, match=message):
            evaluate(f"--run_dir={run}", *flags)
