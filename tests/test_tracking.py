"""The clock counts training only, and metrics.jsonl never has a step twice."""

import json

from training.tracking import Clock, LineFile


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
    assert LineFile(path, 100).latest == {"step": 7, "loss": 1 / 7}
    assert path.read_text() == "".join(lines)
    LineFile(path, 5)
    assert path.read_text() == "".join(lines[:5])
    assert LineFile(path, 0).latest is None
    assert path.read_text() == ""
    LineFile(tmp_path / "none" / "metrics.jsonl", 5)
    assert not (tmp_path / "none").exists()
