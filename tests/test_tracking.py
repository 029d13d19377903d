"""The clock counts training only, and metrics.jsonl never has a step twice."""

import json

from run_folder.folder import RunFolder
from training.tracking import Clock, keep_lines_up_to


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


def test_lines_of_repeated_steps_and_a_torn_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 8)]
    path.write_text("".join(lines) + '{"step": 8, "lo')
    keep_lines_up_to(RunFolder(tmp_path), 100)
    assert path.read_text() == "".join(lines)
    keep_lines_up_to(RunFolder(tmp_path), 5)
    assert path.read_text() == "".join(lines[:5])
    keep_lines_up_to(RunFolder(tmp_path), 0)
    assert path.read_text() == ""
    keep_lines_up_to(RunFolder(tmp_path / "none"), 5)
    assert not (tmp_path / "none").exists()
