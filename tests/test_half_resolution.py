"""--half_resolution_steps: first images of half the size, then whole ones, as if nothing had happened in between."""

import shutil

import numpy as np
import pytest
import torch
from conftest import losses_of, make_tiny_network
from PIL import Image
from test_adaptive import lines_but_for_times, saturating
from test_loss import HERE, batch_of, network

import schedulers.adaptive_samplers
import training.milestones
import training.tracking
from common.errors import UserError
from common.progress import progress_bar
from common.randomness import derive_seed, standard_normal
from run_folder.folder import RunFolder
from schedulers.ddpm import build_scheduler
from schedulers.denoising import denoise
from schedulers.loss import DiffusionLoss
from schedulers.timestep_samplers import Uniform
from training.milestones import Milestones
from training.setup import Run


class Listener(Uniform):
    """Remembers what it is told about the size of images, and those that it draws for."""

    def start(self, shape, device):
        self.shapes = [shape]

    def resize(self, shape):
        self.shapes.append(shape)


def loss_with(kind: type[Uniform], steps: int) -> DiffusionLoss:
    process = build_scheduler()
    loss = DiffusionLoss(process, kind(process.alphas_cumprod), torch.ones(1000))
    loss.half_resolution_steps = steps
    loss.start(seed=3, batch_size=4, shape=(1, 2, 2), inputs=lambda rows: {}, processes=HERE)
    return loss


def test_the_first_steps_see_the_mean_of_every_square_of_pixels():
    loss, seen = loss_with(Uniform, 6), []

    def remember(samples: torch.Tensor, t: torch.Tensor):
        seen.append(samples)
        return network(samples, t)

    t = torch.tensor([0, 10, 500, 999])
    for step in (5, 6):
        errors = loss(remember, batch_of(step=step), t)
        assert errors.shape == (4,)
    a_t = loss.process.alphas_cumprod[t][:, None, None, None]
    for x_t, step, size in zip(seen, (5, 6), (1, 2), strict=True):
        x_0 = batch_of().images.double() / 127.5 - 1
        x_0 = x_0.mean((2, 3), keepdim=True) if step == 5 else x_0
        epsilon = standard_normal(derive_seed(3, "noise"), torch.arange(4), step, (1, size, size)).double()
        expected = a_t.sqrt() * x_0 + (1 - a_t).sqrt() * epsilon
        torch.testing.assert_close(x_t.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "shapes"),
    [(0, [(1, 2, 2), (1, 1, 1), (1, 2, 2)]), (4, [(1, 2, 2), (1, 1, 1), (1, 2, 2)]), (6, [(1, 2, 2)])],
)
def test_a_sampler_is_told_the_size_when_it_changes_and_after_a_resume(first, shapes):
    loss = loss_with(Listener, 6)
    for step in range(first, 8):
        loss.draw(batch_of(step=step))
    assert loss.sampler.shapes == shapes


def test_a_sampler_that_looks_at_images_gets_those_of_the_network():
    class Looks(Uniform):
        def sample_for(self, images, positions, batch_size, generator):
            sizes.append(tuple(images.shape[1:]))
            return self.draw(batch_size, generator)[positions], torch.ones(len(positions))

    sizes = []
    loss = loss_with(Looks, 6)
    for step in (5, 6):
        loss.draw(batch_of(step=step))
    assert sizes == [(1, 1, 1), (1, 2, 2)]


def test_an_error_counts_by_the_values_of_the_image_that_it_is_of():
    sampler, small = saturating((3, 32, 32)), saturating((3, 16, 16))
    assert not torch.equal(sampler._corrections, small._corrections)
    sampler.resize((3, 16, 16))
    assert torch.equal(sampler._corrections, small._corrections)


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_resumed_run_grows_when_the_uninterrupted_one_does(step, train, tmp_path, monkeypatch):
    """From a checkpoint before the images grow, between the two sizes, and after it."""
    monkeypatch.setattr(schedulers.adaptive_samplers, "WORTH_A_LOOK", 1)
    flags = ["--half_resolution_steps=5", "--timestep_sampler=saturating_bound", "--ddpm_num_steps=20"]
    flags += ["--saturating_bound_low=-20", "--saturating_bound_high=20"]
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=14")
    parts = train(tmp_path / "parts", *flags, "--max_train_steps=8", f"--checkpointing_steps={step}")
    for later in range(step + 1, 9):
        shutil.rmtree(parts / f"checkpoint-{later}", ignore_errors=True)
    train(tmp_path / "parts", *flags, "--max_train_steps=14")
    for file in ("metrics.jsonl", "timesteps.jsonl"):
        assert lines_but_for_times(whole / file) == lines_but_for_times(parts / file), file
    for path in (whole / "checkpoint-14").rglob("*.safetensors"):
        assert path.read_bytes() == (parts / path.relative_to(whole)).read_bytes(), path.name
    assert losses_of(whole) != losses_of(train(tmp_path / "plain", *flags[1:], "--max_train_steps=14"))


def test_images_that_will_not_fit_are_refused_before_the_first_step(train, tmp_path, monkeypatch):
    """The pass that finds out is over whole images, as many as a step has."""
    seen = []

    def runs_out(self, count: int):
        self.state.unet.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
        passes_of_zeros(self, count)
        raise torch.OutOfMemoryError("out of memory")

    passes_of_zeros = Run.pass_of_zeros
    monkeypatch.setattr(Run, "pass_of_zeros", runs_out)
    monkeypatch.setattr(Run, "batch_that_fits", lambda self: "does not fit")
    flags = ["--half_resolution_steps=2", "--max_train_steps=4", "--train_batch_size=3"]
    with pytest.raises(UserError, match="does not fit"):
        train(tmp_path / "run", *flags)
    assert seen == [(3, 1, 8, 8)]
    assert not RunFolder(tmp_path / "run").read_metrics()
    train(tmp_path / "whole", "--max_train_steps=1")  # images of one size are not tried


def test_samples_are_small_until_the_images_grow(train, tmp_path, monkeypatch):
    """Grids of half the size are shown twice as large, so that all of a run's are alike."""
    shapes = []

    def remember(predict, method, seeds, shape, on_step):
        shapes.append(shape)
        return denoise(predict, method, seeds, shape, on_step)

    monkeypatch.setattr(training.milestones, "denoise", remember)
    flags = ["--half_resolution_steps=2", "--max_train_steps=3", "--save_images_steps=1", "--ddpm_num_steps=20"]
    run = RunFolder(train(tmp_path / "run", *flags, "--ddpm_num_inference_steps=2"))
    weights = 2  # the moving average and what it is of
    assert shapes == [(1, 4, 4)] * 2 * weights + [(1, 8, 8)] * weights
    small, whole = (np.array(Image.open(run.grid_file(step))) for step in (2, 3))
    assert small.shape == whole.shape


def test_a_run_that_is_over_before_the_images_grow_says_so(train, tmp_path, capsys):
    train(tmp_path / "run", "--half_resolution_steps=1000000", "--max_train_steps=2000000", "--max_train_seconds=0.2")
    assert "has not been trained on whole images yet; that begins after step 1000000" in capsys.readouterr().err
    train(tmp_path / "grown", "--half_resolution_steps=1", "--max_train_steps=2")
    assert "on whole images" not in capsys.readouterr().err


def test_checkpoints_are_not_measured_before_the_images_grow(train, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(Milestones, "evaluate", lambda self, step, at_start=False: measured.append(step) or True)
    flags = ["--half_resolution_steps=4", "--max_train_steps=8", "--checkpointing_steps=2", "--evaluate_every=2"]
    train(tmp_path / "run", *flags)
    assert measured == [None, 6, 8]  # at first, whether it could


def test_each_size_has_a_bar_of_its_own(train, tmp_path, monkeypatch):
    bars = []

    def bar(**options):
        bars.append(progress_bar(**options))
        return bars[-1]

    monkeypatch.setattr(training.tracking, "progress_bar", bar)
    train(tmp_path / "run", "--half_resolution_steps=2", "--max_train_steps=5")
    assert [(one.desc, one.initial, one.n, one.total) for one in bars if one.desc.startswith("Steps")] == [
        ("Steps at half size", 0, 2, 2),
        ("Steps", 2, 5, 5),
    ]


def test_the_audit_says_so(train, tmp_path, capsys):
    train(tmp_path / "run", "--half_resolution_steps=2", "--max_train_steps=3")
    assert "images, at half their size for 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "size", "message"),
    [
        (["--half_resolution_steps=4"], 8, "--half_resolution_steps 4: the run is over after 4 steps and never"),
        (["--half_resolution_steps=1", "--resolution=6"], 6, "steps 1: the network halves images 1 times, and those"),
        (
            ["--half_resolution_steps=1", "--timestep_sampler=marginal_return"],
            8,
            "marginal_return would mistake",
        ),
        (["--half_resolution_steps=-1"], 8, "--half_resolution_steps -1: must be"),
    ],
)
def test_what_cannot_be_is_one_line(flags, size, message, train, tmp_path):
    network = make_tiny_network(tmp_path / "network", sample_size=size)
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", *flags, f"--model_config_name_or_path={network}", "--max_train_steps=4")
