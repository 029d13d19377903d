"""The clock counts training only; the lines of a run tell each step once and are whole."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import metrics_of

from common.progress import progress_bar
from common.randomness import generator_for
from schedulers.adaptive_samplers import LossSecondMoment
from schedulers.ddpm import build_scheduler
from schedulers.timestep_samplers import LogSNRBins
from training import tracking
from training.tracking import Clock, LineFile, Window, describe_timesteps

T = 40
CUMULATIVE = build_scheduler("cosine", T).alphas_cumprod


def test_clock_stands_still_while_paused(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("training.tracking.time.perf_counter", lambda: now[0])
    clock = Clock(7.0)
    now[0] += 3
    assert clock.train_seconds == 10
    with clock.paused():
        now[0] += 50
        assert clock.train_seconds == 10
        now[0] += 50
    assert clock.train_seconds == 10
    now[0] += 2
    assert clock.train_seconds == 12


def test_a_bar_in_a_file_is_made_of_lines(capsys):
    with progress_bar(total=2, desc="Steps", mininterval=0, miniters=1) as bar:
        bar.update()
        bar.update()
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert [line[:11] for line in shown.splitlines()][:3] == ["Steps:   0%", "Steps:  50%", "Steps: 100%"]


def test_lines_of_repeated_steps_and_a_torn_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 8)]
    path.write_text("".join(lines) + '{"step": 8, "lo')
    assert LineFile(path, 100).latest == {"step": 7, "loss": 1 / 7}
    assert path.read_text() == "".join(lines)
    assert LineFile(path, 5).latest == {"step": 5, "loss": 1 / 5}
    assert path.read_text() == "".join(lines[:5])
    assert LineFile(path, 0).latest is None
    assert path.read_text() == ""
    LineFile(tmp_path / "none" / "metrics.jsonl", 5)
    assert not (tmp_path / "none").exists()


def test_a_line_that_a_full_disk_refuses_comes_with_the_next(tmp_path, monkeypatch, caplog):
    append = tracking.append_lines
    file = LineFile(tmp_path / "timesteps.jsonl", 0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(tracking, "append_lines", lambda path, lines: append(path.parent / "none" / path.name, lines))
        file.append({"step": 1})
        file.append({"step": 2})
    assert len(caplog.messages) == 1
    assert "timesteps.jsonl cannot be written yet at step 1: No such file or directory" in caplog.text
    file.append({"step": 3})
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_checkpoint_does_not_come_before_a_line_that_was_refused(train, tmp_path, monkeypatch):
    append, refused = tracking.append_lines, []

    def once(path: Path, lines: list[dict]) -> None:
        if path.name == "metrics.jsonl" and not refused:
            refused.append(lines)
            raise OSError(28, "No space left on device")
        append(path, lines)

    monkeypatch.setattr(tracking, "append_lines", once)
    run = train(tmp_path / "run", "--max_train_steps=1")
    assert refused
    assert [line["step"] for line in metrics_of(run)] == [1]


# What the timesteps did.


def new_window() -> Window:
    return Window(SimpleNamespace(count=1, device=torch.device("cpu")), LogSNRBins(CUMULATIVE), length=4)


def add_steps(window: Window, t: torch.Tensor, errors: torch.Tensor) -> None:
    update = SimpleNamespace(objective=torch.ones(()), gradient_norm=torch.ones(()), is_finite=torch.tensor(True))
    for some_t, some_errors in zip(t, errors, strict=True):
        window.add_step(some_t, torch.ones(len(some_t)), some_errors, update, some_errors[:0])


def test_timesteps_are_described_by_bin_of_log_snr():
    """Also if the window is stopped in the middle and goes on from a checkpoint."""
    t = torch.randint(10, T, (6, 16), generator=generator_for("timesteps"))
    errors = torch.rand(6, 16, generator=generator_for("errors"))
    whole, part, resumed = new_window(), new_window(), new_window()
    add_steps(whole, t, errors)
    add_steps(part, t[:4], errors[:4])
    resumed.load_numbers(json.loads(json.dumps(part.numbers())))
    add_steps(resumed, t[4:], errors[4:])
    sampler = LossSecondMoment(CUMULATIVE, history=1)
    state = SimpleNamespace(window=whole, loss=SimpleNamespace(sampler=sampler))
    assert describe_timesteps(state, whole.fetch())["signals"] == {}
    sampler.observe(0, torch.arange(T), torch.arange(T) + 1.0)
    line = describe_timesteps(state, whole.fetch())
    assert line == describe_timesteps(state, resumed.fetch())

    assert [len(line[name]) for name in ("log_snr", "probability", "loss")] == [len(whole.bins)] * 3
    assert line["loss"][-1] is None
    log_snr = (CUMULATIVE / (1 - CUMULATIVE)).log()
    half_width = (log_snr[0] - log_snr[-1]) / 32
    for number, centre in enumerate(line["log_snr"]):
        inside = (log_snr - centre).abs() < half_width + 1e-4
        drawn = inside[t]
        mean = pytest.approx(errors[drawn].double().mean().item(), rel=1e-5) if drawn.any() else None
        assert line["loss"][number] == mean
        assert line["probability"][number] == pytest.approx(sampler.describe()[inside].sum().item(), rel=1e-5)
        known = line["signals"]["root_mean_square_loss"][number]
        assert known == pytest.approx((inside.nonzero() + 1.0).mean().item(), rel=1e-5)


def test_sums_that_are_not_of_these_bins_are_left_out():
    """A checkpoint from before there were bins, and one of another schedule."""
    window = new_window()
    add_steps(window, torch.arange(16)[None], torch.ones(1, 16))
    numbers = window.numbers()
    for bins in ({}, {"bins": [[1.0] * 16, [1.0] * 16]}):
        resumed = new_window()
        resumed.load_numbers({name: value for name, value in numbers.items() if name != "bins"} | bins)
        (losses, counts, others), expected = resumed.fetch(), window.fetch()
        assert others == expected[2]
        for sums, whole in ((losses, expected[0]), (counts, expected[1])):
            assert sums[: tracking.QUARTERS] == whole[: tracking.QUARTERS]
            assert not any(sums[tracking.QUARTERS :])


def test_losses_for_the_report_of_a_failure_are_kept():
    """Of as many steps as the window has, and as they were: a CUDA graph writes those of the next step over them."""
    window, t = new_window(), torch.arange(3)
    errors = torch.zeros(3)
    for number in range(6):
        window.note(t, errors.fill_(number))
    assert [kept.tolist() for _, kept in window.latest] == [[number] * 3 for number in (2, 3, 4, 5)]


def test_json_has_no_infinity():
    assert tracking.rounded(torch.tensor([1 / 3, torch.inf, torch.nan])) == [0.333333, None, None]
