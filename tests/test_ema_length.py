"""Averages of any length after the training: what is tracked, kept and combined is what EDM2 defines."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from conftest import run_script, run_training
from ema_pytorch.post_hoc_ema import KarrasEMA, sigma_rel_to_gamma, solve_weights
from evaluation_helpers import evaluate, network, read_csv  # noqa: F401
from PIL import Image
from safetensors.torch import load_file

import training.update
from common.errors import UserError
from run_folder.checkpoints import POWER_LENGTHS, checkpoints, power_exponent, snapshot_files
from run_folder.ema_length import ROUNDING_COST, combination, inner_products
from run_folder.saved_model import find_models
from training.update import PowerEMA

STEPS = ["--max_train_steps=60", "--checkpointing_steps=3", "--learning_rate=1e-3", "--save_images_steps=1000"]
TRACKED = (0.03, 0.2)  # besides those that a run keeps


@pytest.fixture(scope="module")
def power_flags(tiny_flags) -> list[str]:
    return [*(flag for flag in tiny_flags if "ema_max_decay" not in flag), "--ema=power", *STEPS]


@pytest.fixture(scope="module")
def tracked_run(power_flags, tmp_path_factory):
    """A run, and what averages of other lengths were in the end that it tracked beside its own."""
    more, build = [], training.update.build_averages

    def build_more(config, unet):
        more[:] = [PowerEMA(unet, length) for length in TRACKED]
        return [*build(config, unet), *more]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.update, "build_averages", build_more)
        run = run_training(tmp_path_factory.mktemp("runs") / "run", power_flags)
    logging.getLogger().handlers.clear()
    return run, {average.length: average.ema_model.state_dict() for average in more}


def profile(tau: np.ndarray, step: float, gamma: float) -> np.ndarray:
    """EDM2, eq. 1."""
    return np.where(tau <= step, (gamma + 1) * tau**gamma / step ** (gamma + 1), 0.0)


# The average.


@pytest.mark.parametrize("length", [0.02, 0.05, 0.1, 0.25])
def test_the_exponent_gives_the_length(length):
    gamma = power_exponent(length)
    assert gamma == pytest.approx(sigma_rel_to_gamma(length), rel=1e-9)
    tau = (np.arange(400_000) + 0.5) / 400_000
    weights = profile(tau, 1.0, gamma) / len(tau)
    mean = (weights * tau).sum()
    assert ((weights * (tau - mean) ** 2).sum()) ** 0.5 == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("length", POWER_LENGTHS)
def test_weights_of_the_steps_have_their_closed_form(length):
    """Step k counts as much as the profile between k - 1 and k."""
    count, gamma = 50, power_exponent(length)
    model = torch.nn.Linear(count, 1, bias=False).double()
    average = PowerEMA(model, length)
    for step in range(count):
        model.weight.data.copy_(torch.eye(count)[step])
        average.update()
    edges = torch.arange(count + 1).double() ** (gamma + 1) / count ** (gamma + 1)
    torch.testing.assert_close(average.ema_model.weight.data[0], edges.diff(), rtol=1e-10, atol=1e-300)


def test_it_is_the_one_of_ema_pytorch():
    model = torch.nn.Linear(3, 2)
    ours, theirs = PowerEMA(model, 0.1), KarrasEMA(model, sigma_rel=0.1, update_every=1)
    theirs.step.fill_(-1)  # it computes beta of one step too far
    for _ in range(100):
        model.weight.data.add_(torch.randn_like(model.weight))
        ours.update()
        theirs.update()
        torch.testing.assert_close(ours.ema_model.weight, theirs.ema_model.weight, rtol=1e-5, atol=1e-6)


# The combination.


def test_inner_products_are_the_integrals():
    steps, exponents = np.array([300.0, 300.0, 700.0, 1000.0]), np.array([16.97, 6.94, 6.94, 1.5])
    tau = (np.arange(1_000_000) + 0.5) / 1000
    profiles = np.stack([profile(tau, *one) for one in zip(steps, exponents, strict=True)])
    expected = profiles @ profiles.T / 1000
    assert inner_products(steps, exponents, steps, exponents) == pytest.approx(expected, rel=1e-4, abs=1e-9)


def snapshots_of(count: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and exponents of the averages that a run keeps."""
    steps = np.repeat(np.arange(1, count + 1) * float(every), len(POWER_LENGTHS))
    return steps, np.tile([power_exponent(kept) for kept in POWER_LENGTHS], count)


@pytest.mark.parametrize("length", [0.02, 0.07, 0.2, 0.287])
def test_the_coefficients_are_the_least_squares_of_the_profiles(length):
    """With a sum of 1, and a price for their squares; the paper's, without either, are the limit of what is met."""
    steps, exponents = snapshots_of(20, 25)
    gamma = power_exponent(length)
    coefficients, unmet = combination(steps, exponents, 500, gamma)
    tau = (np.arange(200_000) + 0.5) / 400
    wanted = profile(tau, 500, gamma)
    scale = np.linalg.norm(wanted)
    basis = np.stack([profile(tau, *one) for one in zip(steps, exponents, strict=True)], axis=1) / scale
    assert np.linalg.norm(basis @ coefficients - wanted / scale) == pytest.approx(unmet, rel=1e-2)
    # The last coefficient is what the others leave of 1.
    rows = np.concatenate([basis, ROUNDING_COST**0.5 * np.eye(40)])
    aims = np.append(wanted / scale, np.zeros(40)) - rows[:, -1]
    others, *_ = np.linalg.lstsq(rows[:, :-1] - rows[:, -1:], aims, rcond=None)
    assert coefficients == pytest.approx([*others, 1 - others.sum()], rel=1e-3, abs=1e-3)

    given = (torch.tensor(values, dtype=torch.float64) for values in (steps, exponents, [500.0], [gamma]))
    of_the_paper = solve_weights(*given)[:, 0].numpy()
    least = np.linalg.norm(basis @ of_the_paper - wanted / scale)
    assert least - 1e-3 < unmet < 1.1 * least + 1e-3


@pytest.mark.parametrize("length", [0.012, 0.05, 0.07, 0.287])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_weight_that_never_changes_stays_as_it_is(length, count):
    coefficients, _ = combination(*snapshots_of(count, 10), 10 * count, power_exponent(length))
    assert coefficients.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("length", "most"), [(0.01, 0.1), (0.0125, 0.07), (0.02, 0.035), (0.05, 0.005), (0.2, 0.002)])
def test_many_snapshots_do_not_multiply_their_rounding(length, most):
    """Of weights of about 0.05 that each step changes by about 0.0002; distances as a share of that to the raw ones.

    160 snapshots are those of 800,000 steps. Without a price of large coefficients 0.01 is off by 0.8.
    """
    count, every = 160, 50
    random = np.random.default_rng(0)
    weights = 0.05 * random.standard_normal(500)
    exponents = np.array([power_exponent(one) for one in (*POWER_LENGTHS, length)])[:, None]
    averages, kept = np.tile(weights, (3, 1)), []
    for step in range(1, count * every + 1):
        weights += 0.0002 * random.standard_normal(500)
        averages += (1 - (1 - 1 / step) ** (exponents + 1)) * (weights - averages)
        if step % every == 0:
            kept += [*averages[:2].astype(np.float16)]
    coefficients, _ = combination(*snapshots_of(count, every), count * every, power_exponent(length))
    error = np.linalg.norm(coefficients @ np.array(kept, dtype=np.float64) - averages[2])
    assert error < most * np.linalg.norm(averages[2] - weights)


@pytest.mark.parametrize("count", [3, 160])
@pytest.mark.parametrize(("length", "place"), [(0.05, -2), (0.1, -1)])
def test_a_length_that_is_kept_is_itself(count, length, place):
    coefficients, unmet = combination(*snapshots_of(count, 10), 10 * count, power_exponent(length))
    expected = np.zeros(2 * count)
    expected[place] = 1
    assert coefficients.tolist() == expected.tolist()
    assert unmet == 0


# A run.


def distance(some: dict, others: dict) -> float:
    return sum((some[name].double() - others[name].double()).square().sum().item() for name in others) ** 0.5


@pytest.mark.parametrize(("length", "most"), [(0.03, 0.4), (0.2, 0.1), (0.05, 0.05), (0.1, 0.025)])
def test_reconstructed_averages_are_those_that_were_tracked(tracked_run, length, most):
    """Up to a share of how far they are from the raw weights: float16, and what 20 snapshots leave unmet.

    In 60 steps the weights hardly move, so that float16 shows; how much it is with many snapshots is tested above.
    """
    run, tracked = tracked_run
    (model,) = find_models(str(run), [], None, [length])
    found = model.load(torch.device("cpu")).state_dict()
    folders = {0.05: "unet_ema", 0.1: "unet_ema_longer", "raw": "unet"}
    saved = {
        name: load_file(run / "checkpoint-60" / folder / "diffusion_pytorch_model.safetensors")
        for name, folder in folders.items()
    }
    wanted = tracked.get(length) or saved[length]
    assert distance(found, wanted) < most * distance(saved["raw"], wanted)
    assert model.weights == f"ema-{length:g}"
    assert model.label == f"step-60-ema-{length:g}"


def test_every_length_and_step_has_its_own_name(tracked_run):
    run, _ = tracked_run
    models = find_models(str(run), ["57", "60"], None, [0.05, 0.06])
    assert len({model.sha256 for model in models}) == 4
    (again,) = find_models(str(run), [], None, [0.06])
    assert again.sha256 == models[-1].sha256


def test_snapshots_outlive_checkpoints_and_a_pipeline_finds_them(tracked_run, tmp_path):
    run, _ = tracked_run
    assert [*snapshot_files(run)] == [*range(3, 61, 3)]
    assert len(checkpoints(run)) == 3
    assert {load_file(path)["0.1.conv_in.weight"].dtype for path in snapshot_files(run).values()} == {torch.float16}
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    found = (find_models(str(path), [], None, [0.07])[0].load(torch.device("cpu")) for path in (run, tmp_path / "run"))
    one, other = (model.state_dict() for model in found)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_run_s_own_weights_are_of_the_first_length(tracked_run):
    run, _ = tracked_run
    pipeline = load_file(run / "unet" / "diffusion_pytorch_model.safetensors")
    own = load_file(run / "checkpoint-60" / "unet_ema" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(pipeline[name], own[name]) for name in own)
    (row,) = [row for row in json.loads((run / "audit.json").read_text()) if row[0] == "EMA"]
    assert row[2] == "power function of length 0.05; kept for others: 0.05, 0.1"


def test_an_interrupted_run_keeps_the_same_snapshots(tracked_run, power_flags, tmp_path, monkeypatch):
    """Stopped at a step that is no checkpoint's, and killed after a snapshot whose checkpoint is not there."""
    whole, _ = tracked_run
    run = tmp_path / "run"
    visits = []

    def stop_once() -> str | None:
        visits.append(1)
        return "SIGTERM" if 20 <= len(visits) <= 40 else None

    from common.interruption import Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("training.setup.stop_requested", stop_once)
        patch.setattr("training.milestones.stop_requested", stop_once)
        with pytest.raises(Interrupted):
            run_training(run, power_flags)
    stopped = int(max(checkpoints(run), key=lambda path: path.stat().st_mtime).name.removeprefix("checkpoint-"))
    assert stopped % 3 != 0
    assert stopped not in snapshot_files(run)
    with pytest.raises(UserError, match=f"no snapshot of step {stopped}, nearest is that of {stopped // 3 * 3}"):
        find_models(str(run), [], None, [0.05])
    for left in ("step-48.safetensors", ".step-51.safetensors.1.tmp"):
        (run / "ema_snapshots" / left).write_bytes(b"of a process that was killed")
    run_training(run, power_flags)
    logging.getLogger().handlers.clear()
    assert sorted(path.name for path in (run / "ema_snapshots").iterdir()) == sorted(
        path.name for path in (whole / "ema_snapshots").iterdir()
    )
    for step, path in snapshot_files(run).items():
        ours, theirs = load_file(path), load_file(snapshot_files(whole)[step])
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_branch_and_another_run_begin_with_no_later_snapshots(tracked_run, power_flags, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tracked_run[0], run)
    run_training(run, [*power_flags, "--resume_from_checkpoint=checkpoint-54", "--max_train_steps=55"])
    assert [*snapshot_files(run)][-2:] == [54, 55]
    run_training(run, [*power_flags, "--overwrite", "--max_train_steps=2"])
    assert [*snapshot_files(run)] == [2]
    logging.getLogger().handlers.clear()


def test_a_run_with_a_constant_decay_keeps_none(train, tmp_path):
    run = train(tmp_path / "run", "--max_train_steps=2", "--checkpointing_steps=1")
    assert not (run / "ema_snapshots").exists()
    assert not (run / "checkpoint-2" / "unet_ema_longer").exists()


# Generating and measuring.


def test_generate_and_evaluate_take_lengths(tracked_run, evaluate):  # noqa: F811
    run, _ = tracked_run
    sampled = ["--ddim", "--num_inference_steps=2", "--batch_size=6"]
    run_script("generate", run, "--ema_length=0.07", *sampled, "--num_images=6")
    record = json.loads((run / "generated" / "step-60-ema-0.07-ddim-2" / "samples.json").read_text())
    assert (record["weights"], record["step"]) == ("ema-0.07", 60)
    evaluate(f"--run_dir={run}", "--ema_length", "0.03", "0.07", "0.2", *sampled, "--num_images=12")
    rows = read_csv(run / "evaluation_results.csv")
    assert [(row["step"], row["weights"]) for row in rows] == [("60", f"ema-{one}") for one in ("0.03", "0.07", "0.2")]
    assert len({row["fd_tiny_vision@12"] for row in rows}) == 3
    Image.open(run / "FD_vs_EMALength.png").verify()
    assert not (run / "FD_vs_TrainingSteps.png").exists()


def test_the_picture_has_a_point_for_each_length(tmp_path, monkeypatch):
    from evaluation import curves
    from evaluation.results import Measured

    drawn = []
    monkeypatch.setattr(curves, "plot", lambda axes, line: drawn.append(line) or axes.plot([0], [0])[0])
    blank = dict.fromkeys(Measured.__dataclass_fields__)
    rows = [
        {**blank, "step": step, "weights": weights, "num_images": 10, "fid@10": fid}
        for step, weights, fid in [(5, "ema-0.1", 9.0), (9, "ema-0.2", 3.0), (9, "ema-0.05", 2.0), (9, "ema", 1.0)]
    ]
    assert curves.draw_lengths(tmp_path, rows) == [tmp_path / "FID_vs_EMALength.png"]
    assert drawn == [[(0.05, 2.0), (0.2, 3.0)]]
    assert curves.draw_lengths(tmp_path, rows[:2]) == []


# Mistakes.


def test_what_cannot_be_made_is_said(tracked_run, train, tmp_path):
    run, _ = tracked_run
    with pytest.raises(UserError, match="the 20 snapshots up to step 60 come no nearer .* lengths of 0.012 to 0.287"):
        find_models(str(run), [], None, [0.005])
    plain = train(tmp_path / "plain", "--max_train_steps=1")
    with pytest.raises(UserError, match="checkpoint-1 has no ema_snapshots; only a run"):
        find_models(str(plain), [], None, [0.05])


@pytest.mark.parametrize("damage", ["truncate", "flip", "other"])
def test_a_damaged_snapshot_is_named(tracked_run, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(tracked_run[0], run)
    path = snapshot_files(run)[30]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes({"truncate": content[:100], "flip": content, "other": b"{}"}[damage])
    with pytest.raises(UserError, match=r"step-30\.safetensors"):
        find_models(str(run), [], None, [0.07])[0].load(torch.device("cpu"))
