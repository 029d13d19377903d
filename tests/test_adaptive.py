"""Samplers that learn: what they learn, and that processes and resumed runs learn the same."""

import json
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
from storm import TIMING

import training.setup
from common.errors import UserError
from common.randomness import generator_for
from run_folder.checkpoints import copy_out
from schedulers.adaptive_samplers import TRIES, AdaptiveTimestepSampling, LossSecondMoment, beta_draws, most_telling
from schedulers.ddpm import build_scheduler
from schedulers.loss import DiffusionLoss
from schedulers.timestep_samplers import UpdateProbe
from training.update import Update

T = 20
CUMULATIVE = build_scheduler(num_train_timesteps=T).alphas_cumprod


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
        else:
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
    sampler.start(1, torch.device("cpu"))
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


def test_the_policy_learns_what_lowers_the_loss():
    """Updates help an image the more, the later its timestep: later ones become likely, and are described."""
    sampler, images = make_ats(), torch.randn(64, 1, 8, 8, generator=generator_for("images"))
    updated = False

    def kl(rows: torch.Tensor, timesteps: torch.Tensor, noise_rows: torch.Tensor) -> torch.Tensor:
        return -sampler._actions[rows] if updated else torch.zeros(len(rows))

    average = [(sampler.describe() @ torch.arange(T, dtype=torch.float64)).item()]
    for step in range(20):
        sampler.sample_for(images, torch.arange(64), 64, generator_for("draw", step))
        update = UpdateProbe(step, 64, torch.arange(64), kl, lambda tensor: tensor)
        updated = False
        sampler.before_update(update)
        updated = True
        sampler.after_update(update)
        average.append((sampler.describe() @ torch.arange(T, dtype=torch.float64)).item())
    assert average[0] == pytest.approx((T - 1) / 2)
    assert average[-1] > 13
    drawn, _ = sampler.sample(1000, generator_for("draw"))
    assert drawn.float().mean().item() == pytest.approx(average[-1], abs=0.5)


def test_entropy_keeps_the_policy_from_a_corner():
    """Without any reward the entropy alone draws it back to uniform."""
    sampler, images = make_ats(entropy=1.0), torch.randn(16, 1, 8, 8, generator=generator_for("images"))
    torch.nn.init.constant_(sampler.policy.head[-1].bias, 3.0)
    for step in range(100):
        sampler.sample_for(images, torch.arange(16), 16, generator_for("draw", step))
        update = UpdateProbe(
            step, 16, torch.arange(16), lambda rows, t, noise: torch.zeros(len(rows)), lambda tensor: tensor
        )
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
    "ats": ["--timestep_sampler=ats", "--ats_interval=2", "--ats_grid=10", "--ats_queue=4"],
}
FLAGS = [f"--ddpm_num_steps={T}", "--ddpm_num_inference_steps=2", "--logging_steps=3", "--save_images_steps=100"]


@pytest.mark.parametrize("name", LEARNING)
def test_resumed_equals_uninterrupted(name, train, tmp_path):
    """Stopped within a window of metrics, with losses still on their way."""
    flags = [*FLAGS, *LEARNING[name], "--timestep_sampler=" + name]
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=22")
    for steps in (7, 8, 19, 22):
        parts = train(tmp_path / "parts", *flags, f"--max_train_steps={steps}", f"--checkpointing_steps={steps}")
    lines = [
        [{key: value for key, value in line.items() if key not in TIMING} for line in metrics_of(run)]
        for run in (whole, parts)
    ]
    assert lines[0] == lines[1]
    assert all("timestep_sampler_share" in line for line in metrics_of(parts))
    for path in (whole / "checkpoint-22").rglob("*.safetensors"):
        assert path.read_bytes() == (parts / path.relative_to(whole)).read_bytes(), path.name
    state = load_file(whole / "checkpoint-22" / "sampler.safetensors")
    if name == "ats":
        assert state["queued"] == 11
        assert state["shapes"].std() > 0
    else:
        assert {key for key in state if key.startswith("on_their_way")} >= {"on_their_way.20.losses"}
        assert (state["counts"] >= 2).all()
        assert metrics_of(whole)[-1]["weight_ess"] < 1


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
        patch.setattr(DiffusionLoss, "draw", noting_draw)
        patch.setattr(training.setup, "train", noting_loop)
        run()


def noted(name: Path, index: int) -> tuple[dict[str, torch.Tensor], list[dict[str, int]]]:
    return load_file(f"{name} {index}.safetensors"), json.loads(Path(f"{name} {index}.json").read_text())


# Few steps of ATS: Adam makes of gradients that round differently updates that differ.
STEPS = {"loss_second_moment": 16, "ats": 4}


def flags_of(name: str, base: list[str]) -> list[str]:
    return [*base, *FLAGS, *LEARNING[name], "--total_batch_size=16", f"--max_train_steps={STEPS[name]}"]


@pytest.fixture(scope="module")
def two_processes(tiny_flags, network_without_dropout, tmp_path_factory) -> Path:
    """Both samplers with two processes and accumulation."""
    folder = tmp_path_factory.mktemp("two")
    base = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}", "--train_batch_size=4"]
    for name in LEARNING:
        preloaded.run([__file__, folder / name, folder / f"run of {name}", *flags_of(name, base)], processes=2)
    return folder


@pytest.mark.parametrize("name", LEARNING)
def test_two_processes_learn_and_draw_what_one_does(name, two_processes, tiny_flags, network_without_dropout, tmp_path):
    base = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}"]
    note(tmp_path / "alone", lambda: run_training(tmp_path / "run", flags_of(name, base)))
    alone, together = noted(tmp_path / "alone", 0)
    (first, drawn_by_first), (second, drawn_by_second) = (noted(two_processes / name, index) for index in range(2))
    assert first.keys() == second.keys() == alone.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key
    for key in ("losses", "counts", "queue", "shapes", "selected"):
        if key in alone:
            torch.testing.assert_close(first[key], alone[key], rtol=1e-3, atol=1e-6, msg=key)
    assert len(together) == STEPS[name]
    for whole, *parts in zip(together, drawn_by_first, drawn_by_second, strict=True):
        assert parts[0] | parts[1] == whole
        assert len(parts[0]) == len(parts[1]) == 8


if __name__ == "__main__":
    name, output_dir, *flags = sys.argv[1:]
    note(Path(name), partial(run_training, Path(output_dir), flags))
