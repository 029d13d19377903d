"""The error of the mean colour: what is drawn is what a Gaussian leaves, and what a network makes of it."""

import sys

import pytest
import torch
from PIL import Image

import visualize
from common.randomness import standard_normal
from schedulers.ddpm import ExactDDPMScheduler, build_scheduler
from visualization import mean_colour
from visualization.mean_colour import NOISE_KEY, MeanColours, colour_errors, colours_of

SCHEDULER = build_scheduler()
TIMESTEPS = torch.tensor([0, 300, 600, 800, 950, 999])


@pytest.fixture(scope="module")
def flat_images() -> torch.Tensor:
    """Images of one colour each, 4x4, with correlated channels, small enough that clipping changes little."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[0.2, 0.0, 0.0], [0.1, 0.1, 0.0], [0.05, 0.0, 0.05]])
    colours = torch.randn(20_000, 3, generator=generator) @ mixing.T + torch.tensor([0.1, 0.0, -0.1])
    return colours[:, :, None, None].expand(-1, -1, 4, 4).contiguous()


def best_network(known: MeanColours, prediction_type: str):
    """The posterior mean of a flat image, as the network would say it, by Bayes' rule for Gaussians."""

    def predict(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a_t = SCHEDULER.alphas_cumprod[t].item()
        noise = (1 - a_t) / known.pixels * torch.eye(3, dtype=torch.float64)
        gain = a_t**0.5 * known.covariance @ torch.linalg.inv(a_t * known.covariance + noise)
        colours = known.mean + (colours_of(x_t) - a_t**0.5 * known.mean) @ gain.T
        x_0 = colours[:, :, None, None].expand_as(x_t)
        epsilon = (x_t.double() - a_t**0.5 * x_0) / (1 - a_t) ** 0.5
        return {"sample": x_0, "epsilon": epsilon}[prediction_type].double()

    return predict


@pytest.mark.parametrize("prediction_type", ["sample", "epsilon"])
def test_the_ideal_is_what_bayes_leaves(flat_images, prediction_type):
    known, scheduler = MeanColours.of_images(flat_images), build_scheduler(prediction_type=prediction_type)
    found = colour_errors(best_network(known, prediction_type), scheduler, flat_images, TIMESTEPS)
    ideal = known.ideal_error(SCHEDULER.alphas_cumprod[TIMESTEPS])
    torch.testing.assert_close(found["predicted"], ideal, rtol=0.05, atol=1e-9)
    assert ideal[0] < 1e-4
    assert ideal[-1] == pytest.approx(known.covariance.trace().item(), rel=0.05)  # nothing is known of the image


def test_clipping_is_left_out_also_where_a_pipeline_does_not_mention_it(flat_images):
    scheduler = ExactDDPMScheduler.from_config({"prediction_type": "sample", "num_train_timesteps": 1000})
    found = colour_errors(lambda x_t, t: torch.full_like(x_t, 3.0), scheduler, flat_images, TIMESTEPS)
    assert (found["predicted"] > 2 * found["clipped"]).all()


def test_to_say_the_mean_of_all_images_is_an_error_of_the_variance(flat_images):
    known, scheduler = MeanColours.of_images(flat_images), build_scheduler(prediction_type="sample")
    constant = known.mean[:, None, None]
    found = colour_errors(lambda x_t, t: constant.expand(x_t.shape), scheduler, flat_images, TIMESTEPS)
    assert found["predicted"] / known.covariance.trace() == pytest.approx([1.0] * len(TIMESTEPS), rel=1e-3)


def test_a_small_error_of_the_noise_is_a_large_one_of_the_colour(flat_images, monkeypatch):
    """At the end x_0 is what is left of x_t over sqrt(a_t): 0.01 too little noise is 1.6 in every channel."""
    monkeypatch.setattr(mean_colour, "MEASURED_AT_ONCE", len(flat_images))
    noise = {
        t: standard_normal(NOISE_KEY, torch.arange(len(flat_images)), t, (3, 4, 4)).double() for t in TIMESTEPS.tolist()
    }
    found = colour_errors(lambda x_t, t: noise[t.item()] - 0.01, SCHEDULER, flat_images, TIMESTEPS)
    a_t = SCHEDULER.alphas_cumprod[TIMESTEPS]
    torch.testing.assert_close(found["predicted"], 3 * 1e-4 * (1 - a_t) / a_t, rtol=1e-2, atol=1e-9)
    assert found["clipped"][-1] < found["predicted"][-1] / 2


def test_few_images_pass_through_the_network_at_once(flat_images):
    seen = []
    colour_errors(lambda x_t, t: seen.append(len(x_t)) or x_t, SCHEDULER, flat_images[:64], TIMESTEPS[:1])
    assert seen == [8] * 8


def test_a_run_is_drawn(train, tmp_path, monkeypatch, capsys):
    folder = train(tmp_path / "run", "--max_train_steps=2", "--ddpm_num_steps=10")
    monkeypatch.setattr(sys, "argv", ["visualize.py", str(folder)])
    visualize.main()
    assert str(folder / "figures" / "mean_colour.png") in capsys.readouterr().out.split()
    Image.open(folder / "figures" / "mean_colour.png").verify()
    models = mean_colour.read_models(folder)
    assert [model.weights for model in models] == ["ema", "raw"]


@pytest.mark.parametrize("missing", ["weights", "data"])
def test_without_weights_or_data_the_rest_is_drawn(missing, train, tmp_path, monkeypatch, capsys):
    folder = train(tmp_path / "run", "--max_train_steps=1")
    if missing == "weights":
        (folder / "model_index.json").unlink()
        (folder / "checkpoint-1" / "manifest.json").unlink()
    else:
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("dataset_name: digits", "dataset_name: ./gone"))
    if missing == "data":
        monkeypatch.setattr(sys, "argv", ["visualize.py", str(folder)])
        visualize.main()
        assert not (folder / "figures" / "mean_colour.png").exists()
    else:
        assert mean_colour.read_parts(folder, None) is None
    assert "note: the error of the mean colour is not drawn: " in capsys.readouterr().err
