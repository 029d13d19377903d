"""The race: curves and times to a target against what is known, and a race that is stopped and goes on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.race import __main__ as race_command
from benchmarks.race import plan, report
from benchmarks.race.analysis import Curve, compare, exponent, falling, interval
from benchmarks.race.plan import Entry, read_race
from common.errors import UserError


def power_law(scale: float, a: float = 0.5, times: tuple[float, ...] = (10, 20, 40, 80, 160)) -> Curve:
    return Curve.fit(list(times), [scale * time**-a for time in times])


def test_a_power_law_is_read_exactly():
    curve = power_law(100)
    assert curve.at(30) == pytest.approx(100 * 30**-0.5)
    assert curve.time_to(100 * 50**-0.5) == pytest.approx(50)
    assert exponent(curve) == pytest.approx(0.5)


def test_what_rises_is_pooled():
    assert falling(np.array([5.0, 3.0, 4.0, 1.0])).tolist() == [5.0, 3.5, 3.5, 1.0]
    assert falling(np.array([1.0, 2.0, 3.0])).tolist() == [2.0, 2.0, 2.0]


def test_a_value_that_is_never_reached_has_no_time():
    curve = power_law(100)
    assert curve.time_to(1.0) == math.inf
    assert curve.time_to(1000.0) == pytest.approx(10)  # from the first point on


def test_twice_as_fast_is_half_of_the_time():
    """A method whose curve is the baseline's at twice the time, with a spread over seeds that both share."""
    scales = {0: 100, 1: 120, 2: 90}
    baseline = {seed: power_law(scale) for seed, scale in scales.items()}
    method = {seed: power_law(scale / 2**0.5) for seed, scale in scales.items()}
    speed = compare(method, baseline, budget=160, share=1.0)
    assert (speed.ratio, speed.low, speed.high) == pytest.approx((0.5, 0.5, 0.5))
    assert (speed.seeds, speed.reached) == (3, 3)
    assert compare(baseline, baseline, budget=160, share=0.5).ratio == pytest.approx(1.0)


def test_who_does_not_get_there_counts_as_the_budget():
    slow = {0: power_law(400)}
    speed = compare(slow, {0: power_law(100)}, budget=160, share=0.5)
    assert speed.ratio == pytest.approx(2.0)
    assert speed.reached == 0


def test_the_interval_holds_the_mean_and_widens_with_the_spread():
    narrow, wide = (interval(np.array([-0.5, 0.0, 0.5]) * spread) for spread in (0.1, 1.0))
    assert narrow[0] < 0 < narrow[1]
    assert wide[1] - wide[0] == pytest.approx(10 * (narrow[1] - narrow[0]))


@pytest.fixture
def race_file(tmp_path, monkeypatch, tiny_network, cache_dir) -> Path:
    """Two methods and two seeds of a few steps each, in folders of its own."""
    monkeypatch.setattr(plan, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "SUMMARY", tmp_path / "results" / "race_summary.json")
    monkeypatch.setattr(plan.Race, "runs", property(lambda race: tmp_path / "runs"))
    values = {
        "budget": {"steps": 8},
        "seeds": [0, 1],
        "threads": 1,
        "training": {
            "dataset_name": "digits",
            "resolution": 8,
            "random_flip": False,
            "model_config_name_or_path": str(tiny_network),
            "cache_dir": str(cache_dir),
            "train_batch_size": 16,
            "logging_steps": 1,
        },
        "measurements": [
            {"sampler": "ddpm", "num_inference_steps": 5, "num_images": 8, "fractions": [0.25, 0.5, 1, 2]},
        ],
        "lengths": {"uniform": 2},
        "methods": {"uniform": None, "stratified": {"stratified": True}},
    }
    path = tmp_path / "race.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_a_race_is_read(race_file):
    race = read_race(race_file)
    assert [entry.name for entry in race.entries()] == ["uniform-0-x2", "stratified-0", "uniform-1-x2", "stratified-1"]
    assert race.snapshots(Entry("uniform", 0, 2.0)) == [2, 4, 8, 16]
    assert race.snapshots(Entry("stratified", 0)) == [2, 4, 8]


def test_what_is_no_race_is_one_line(tmp_path):
    path = tmp_path / "race.yaml"
    path.write_text("budget: {days: 1}\nmethods: {a: }\nseeds: [0]\nmeasurements: []\ntraining: {}\n")
    with pytest.raises(UserError, match="days: must be seconds or steps"):
        read_race(path)
    path.write_text("budget: {steps: 1}\nmethods: {a: }\nseeds: [0]\nmeasurements: []\ntraining: {}\n")
    with pytest.raises(UserError, match="baseline: uniform: is none of the methods a"):
        read_race(path)
    with pytest.raises(UserError, match="is not a race"):
        read_race(tmp_path / "nowhere.yaml")


def test_a_race_that_was_stopped_goes_on(race_file, monkeypatch):
    """Training really runs; images are measured by a stand-in that counts, and fails at first."""
    from benchmarks.race import measure, train

    measured = []

    class Judge:
        def __init__(self, race, config):
            pass

        def measure(self, folder, measurement):
            assert (folder / "diffusion_pytorch_model.safetensors").exists()
            measured.append(folder)
            if len(measured) == 3:
                raise KeyboardInterrupt
            return {"fid": 100 / len(measured), "kid": 0.1, "precision": 0.5, "recall": 0.5}

    trained = []

    def train_here(race, file, entry):
        trained.append(entry.name)
        monkeypatch.setattr("sys.argv", ["train", str(file), entry.method, str(entry.seed)])
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        train.main()

    monkeypatch.setattr(measure, "Judge", Judge)
    monkeypatch.setattr(race_command, "train", train_here)
    monkeypatch.setattr("sys.argv", ["race", str(race_file), "--seeds", "0"])
    with pytest.raises(KeyboardInterrupt):
        race_command.main()
    monkeypatch.setattr("sys.argv", ["race", str(race_file), "--seeds", "0"])
    race_command.main()
    assert trained == ["uniform-0-x2", "stratified-0"]
    assert len(measured) == 8  # seven snapshots, one of them twice

    race = read_race(race_file)
    results = [race.results_of(entry) for entry in race.entries()[:2]]
    assert [[point["step"] for point in result["points"]] for result in results] == [[2, 4, 8, 16], [2, 4, 8]]
    assert results[0]["machine"]["threads"] == 1
    assert (race.results / "race.png").exists()
    assert "| stratified | 0 | 8 |" in (race.results / "race.md").read_text()
    summary = json.loads((race.results.parent.parent / "race_summary.json").read_text())
    assert summary["race"]["method"] == "stratified"
    assert summary["race"]["seeds"] == 1
