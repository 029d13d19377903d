"""The loss: each kind against its closed form, what it returns for a batch, and what a new one takes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import losses_of, metrics_of

from common.errors import UserError
from common.randomness import derive_seed, standard_normal
from image_data.batches import Batch
from schedulers.ddpm import PREDICTIONS, Prediction, build_scheduler, prediction_of, signal_to_noise
from schedulers.loss import LOSSES, DiffusionLoss, build_loss
from schedulers.timestep_samplers import Uniform

HERE = SimpleNamespace(
    device=torch.device("cpu"),
    count=1,
    synchronize_device=lambda: None,
    accelerator=SimpleNamespace(autocast=nullcontext),
)
CLOSED_FORMS = {
    "l2": lambda error: error**2,
    "l1": abs,
    "huber": lambda error: error**2 / 2 if abs(error) <= 1 else abs(error) - 1 / 2,
}


def network(samples: torch.Tensor, t: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(sample=samples * 0.3 + t[:, None, None, None] / 1000)


class Affine(torch.nn.Module):
    def forward(self, samples: torch.Tensor, t: torch.Tensor) -> SimpleNamespace:
        return network(samples, t)


def batch_of(count: int = 4, step: int = 5) -> Batch:
    images = torch.arange(count * 4, dtype=torch.uint8).view(count, 1, 2, 2) * 10
    return Batch(step, images, torch.arange(count), torch.arange(count), torch.zeros(count, dtype=torch.int64))


def loss_of(prediction_type: str = "epsilon", error: str = "l2", perturbation: float = 0.0) -> DiffusionLoss:
    process = build_scheduler(prediction_type=prediction_type)
    loss = DiffusionLoss(process, Uniform(process.alphas_cumprod), torch.ones(1000), LOSSES[error], perturbation)
    loss.start(seed=3, batch_size=4, shape=(1, 8, 8), inputs=lambda rows: {}, processes=HERE)
    return loss


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_its_closed_form(name):
    errors = torch.linspace(-3, 3, 61)
    expected = torch.tensor([CLOSED_FORMS[name](error) for error in errors.tolist()])
    torch.testing.assert_close(LOSSES[name](errors, torch.zeros_like(errors)), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_the_error_of_an_image_is_that_of_algorithm_1(name):
    loss, batch = loss_of(error=name), batch_of()
    t = torch.tensor([0, 10, 500, 999])
    x_0 = batch.images.double() / 127.5 - 1
    epsilon = standard_normal(derive_seed(3, "noise"), batch.positions, 5, (1, 2, 2)).double()
    a_t = loss.process.alphas_cumprod[t][:, None, None, None]
    output = network(a_t.sqrt() * x_0 + (1 - a_t).sqrt() * epsilon, t).sample
    expected = [sum(CLOSED_FORMS[name](e) for e in image) / 4 for image in (output - epsilon).flatten(1).tolist()]
    torch.testing.assert_close(loss(network, batch, t).double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_input_perturbation_noises_the_image_more_and_keeps_the_target(prediction_type):
    loss, batch, seen = loss_of(prediction_type, perturbation=0.1), batch_of(), []

    def remember(samples: torch.Tensor, t: torch.Tensor) -> SimpleNamespace:
        seen.append(samples)
        return network(samples, t)

    t = torch.tensor([0, 10, 500, 999])
    error = loss(remember, batch, t)
    x_0 = batch.images.double() / 127.5 - 1
    epsilon, other = (
        standard_normal(derive_seed(3, key), batch.positions, 5, (1, 2, 2)).double()
        for key in ("noise", "input perturbation")
    )
    a_t = loss.process.alphas_cumprod[t][:, None, None, None]
    x_t = a_t.sqrt() * x_0 + (1 - a_t).sqrt() * (epsilon + 0.1 * other)
    target = epsilon if prediction_type == "epsilon" else a_t.sqrt() * epsilon - (1 - a_t).sqrt() * x_0
    torch.testing.assert_close(seen[0].double(), x_t, rtol=1e-5, atol=1e-6)
    expected = (network(x_t, t).sample - target).square().flatten(1).mean(1)
    torch.testing.assert_close(error.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_a_sampler_compares_around_an_update_is_not_perturbed():
    batch, t = batch_of(), torch.tensor([1, 10, 500, 999])
    rows, net = torch.arange(4), Affine()
    plain, perturbed = (loss_of(perturbation=gamma)._divergences(net, batch, rows, t, rows) for gamma in (0.0, 0.1))
    assert torch.equal(plain, perturbed)


def test_a_run_with_input_perturbation_says_so(train, tmp_path, capsys):
    run = train(tmp_path / "run", "--input_perturbation=0.1", "--max_train_steps=2")
    shown = capsys.readouterr().err
    assert "! loss          | l2                                           | l2, input perturbed by 0.1" in shown
    train(tmp_path / "run", "--max_train_steps=3")
    assert "input_perturbation 0.1 -> 0.0. From step 2 on" in capsys.readouterr().err
    assert losses_of(run) != losses_of(train(tmp_path / "plain", "--max_train_steps=3"))


def test_a_batch_in_passes_has_the_errors_of_the_whole():
    loss, batch = loss_of(), batch_of()
    t, weights = loss.draw(batch)
    whole = loss(network, batch, t)
    parts = Batch(*(getattr(batch, name) for name in ("step", "images", "indices", "positions", "condition")), passes=2)
    in_passes = [loss(network, part, t_of_part) for part, t_of_part, _ in parts.in_passes(t, weights)]
    assert torch.equal(torch.cat(in_passes), whole)


@pytest.mark.parametrize("name", ["l1", "huber"])
def test_a_run_trains_on_it_and_says_so(name, train, tmp_path, capsys):
    run = train(tmp_path / "run", f"--loss={name}", "--max_train_steps=3")
    assert f"! loss          | l2                                           | {name}" in capsys.readouterr().err
    assert losses_of(run) != losses_of(train(tmp_path / "l2", "--max_train_steps=3"))
    assert all(line["loss"] < 1 for line in metrics_of(run))


def test_a_new_loss_is_one_entry(monkeypatch, train, tmp_path):
    monkeypatch.setitem(LOSSES, "l1", lambda output, target: (output - target).pow(4))
    fourth = train(tmp_path / "fourth", "--loss=l1", "--max_train_steps=1")
    squared = train(tmp_path / "squared", "--max_train_steps=1")
    assert losses_of(fourth)[0] == pytest.approx(3, rel=0.2)  # E epsilon^4, of a network that predicts nearly nothing
    assert losses_of(squared)[0] == pytest.approx(1, rel=0.1)


def test_a_new_prediction_type_is_one_entry(monkeypatch):
    """Minus epsilon: the same errors of a network that says the opposite."""
    opposite = Prediction(
        "$-\\epsilon$",
        target=lambda x_0, epsilon, at: -epsilon,
        x_0=lambda output, x_t, at: (x_t + at.spread * output) / at.signal,
        error_ratio=signal_to_noise,
    )
    monkeypatch.setitem(PREDICTIONS, "minus_epsilon", opposite)
    t = torch.tensor([0, 10, 500, 999])
    batch = batch_of()

    def negative(samples: torch.Tensor, t: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=-network(samples, t).sample)

    assert torch.equal(loss_of("minus_epsilon")(negative, batch, t), loss_of()(network, batch, t))
    process, sample = build_scheduler(prediction_type="minus_epsilon"), torch.randn(2, 1, 2, 2)
    ours = process.posterior(-sample, 500, 499, sample)[0]
    assert torch.equal(ours, build_scheduler().posterior(sample, 500, 499, sample)[0])


def test_an_unknown_prediction_type_is_an_error():
    with pytest.raises(ValueError, match="prediction_type 'nu': must be one of epsilon, v_prediction, sample"):
        prediction_of("nu")
    with pytest.raises(ValueError, match="'nu'"):
        build_scheduler(prediction_type="nu").posterior(torch.zeros(1), 5, 4, torch.zeros(1))


def test_the_options_of_a_run_name_it():
    from run_folder.config import parse_config

    config = parse_config(["--loss=huber", "--timestep_sampler=edm", "--loss_weighting=min_snr"])
    loss = build_loss(vars(config), build_scheduler())
    assert loss.error is LOSSES["huber"]
    assert loss.weights.min() < 1
    with pytest.raises(UserError, match="--loss"):
        parse_config(["--loss=l3"])
