"""The learning rate and the moving average do what the paper's do, step by step."""

from types import SimpleNamespace

import pytest
import torch

from common.machine import Stopwatch
from run_folder.config import parse_config
from training.update import Update, build_averages, build_ema, build_optimizer, learning_rate_schedule


def config(*flags: str):
    return parse_config(["--dataset_name=digits", *flags])


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (1, 4e-8), (2500, 1e-4), (5000, 2e-4), (799_999, 2e-4)])
def test_learning_rate_of_the_paper(step, rate):
    assert learning_rate_schedule(config(), 800_000)(step) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_learning_rates_of_diffusers(name):
    from diffusers.optimization import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-4)
    warmup = [] if name == "constant" else ["--lr_warmup_steps=10"]
    stock = get_scheduler(name, optimizer, num_warmup_steps=10, num_training_steps=50)
    ours = learning_rate_schedule(config(f"--lr_scheduler={name}", *warmup), 50)
    for step in range(50):
        # Polynomial ends at 1e-7 of the rate it knows, which for our pure function is 1.
        assert ours(step) == pytest.approx(stock.get_last_lr()[0], rel=1e-6, abs=1e-7)
        optimizer.step()
        stock.step()


def weights_over_time(ema, model, updates: int) -> list[float]:
    values = []
    for update in range(updates):
        model.weight.data.fill_(float(update + 1))
        ema.update()
        values.append(ema.ema_model.weight.item())
    return values


def test_moving_average_is_a_copy_and_then_constant():
    model = torch.nn.Linear(1, 1, bias=False).double()
    values = weights_over_time(build_ema(config("--ema_max_decay=0.9999"), model), model, 200)
    expected = [1.0]
    for update in range(1, 200):
        expected.append(0.9999 * expected[-1] + 0.0001 * (update + 1))
    assert values == pytest.approx(expected, rel=1e-13)


def test_ramp_is_an_option():
    model = torch.nn.Linear(1, 1, bias=False).double()
    ema = build_ema(config("--ema_warmup", "--ema_inv_gamma=1", "--ema_power=0.75"), model)
    values = weights_over_time(ema, model, 50)
    expected = [1.0]
    for update in range(1, 50):
        decay = min(0.9999, 1 - (1 + update) ** -0.75)
        expected.append(decay * expected[-1] + (1 - decay) * (update + 1))
    assert values == pytest.approx(expected, rel=1e-13)


def test_no_moving_average():
    assert build_averages(config("--no_use_ema"), torch.nn.Linear(1, 1)) == []


def test_gradients_of_replicas_are_clipped_as_the_original_does():
    """Its TPU code, written out for 8 replicas: each has loss / 8, and clips its gradient at 1 / 8; Adam gets the sum.

    CrossShardOptimizer scales the loss and sums, make_optimizer clips in between, with grad_clip / num_replicas
    (diffusion_tf/tpu_utils/tpu_utils.py, diffusion_tf/utils.py).
    """
    torch.manual_seed(0)
    network = torch.nn.Linear(5, 3).double()
    # The parts differ in the length of their gradient: some are clipped, some are not.
    inputs = torch.randn(8, 16, 5).double() * torch.logspace(-2, 1, 8)[:, None, None]
    losses = [network(part).square().mean() for part in inputs]
    total, norms = [torch.zeros_like(weight) for weight in network.parameters()], []
    for loss in losses:
        gradients = torch.autograd.grad(loss / 8, [*network.parameters()], retain_graph=True)
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * (1 / 8) / torch.maximum(norms[-1], torch.tensor(1 / 8))  # tf.clip_by_global_norm
    assert 2 < sum(norm > 1 / 8 for norm in norms) < 7

    accelerator = SimpleNamespace(scaler=None)
    processes = SimpleNamespace(device=torch.device("cpu"), count=1, index=0, accelerator=accelerator)
    update = Update(config("--clip_per_replica=8", "--no_use_ema"), network, 100, processes)
    for _ in range(2):  # what one step leaves does not reach the next
        update.begin(0)
        update.objective = torch.zeros(())
        for part in inputs:
            update.backward(network(part).square().mean() / 8)
        update.clip(Stopwatch(processes.device))
        for weight, expected in zip(network.parameters(), total, strict=True):
            torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=0)
        assert update.gradient_norm.item() == pytest.approx(torch.cat([part.flatten() for part in total]).norm().item())
        update.optimizer.zero_grad()
    # Clipped as a whole it would be another gradient.
    torch.stack(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    assert (network.weight.grad - total[0]).norm() > 0.1 * total[0].norm()


def test_optimizer_is_adam():
    """AdamW without decay, fused: the update of Adam as Kingma & Ba wrote it, in float64."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    optimizer = build_optimizer(config(), model)
    weight = model.weight.detach().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 20):
        model.weight.grad = torch.randn_like(weight)
        model.bias.grad = torch.zeros_like(model.bias)
        first = 0.9 * first + 0.1 * model.weight.grad
        second = 0.999 * second + 0.001 * model.weight.grad**2
        weight -= 2e-4 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-12, atol=1e-14)
