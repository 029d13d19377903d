"""The race: curves and times to a target against what is known, and a race that is stopped and goes on."""

import json
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from benchmarks import training_tables
from benchmarks.attribution import Mixed, name_of
from benchmarks.corrected import CORRECTIONS, with_colours, with_spectrum
from benchmarks.race import __main__ as race_command
from benchmarks.race import measure, plan, record, report
from benchmarks.race import train as training
from benchmarks.race.analysis import Curve, compare, exponent, falling, interval
from benchmarks.race.plan import Entry, GeometricTimes, points_of, read_race
from common import interruption
from common.errors import RunFailed, UserError
from schedulers.ddpm import build_scheduler


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
    assert (speed.reached, speed.bounds) == (0, 0)


def test_who_runs_longer_is_known_for_longer():
    """A run of two budgets that comes there after one and a half counts as that, not as the budget."""
    longer = power_law(100 * 1.5**0.5, times=(10, 20, 40, 80, 160, 320))
    speed = compare({0: longer}, {0: power_law(100)}, budget=160, share=1.0)
    assert (speed.ratio, speed.reached) == (pytest.approx(1.5), 1)


def test_who_is_there_before_the_first_point_is_said_to_be_bounded():
    early = {0: power_law(10, times=(40, 80, 160))}
    speed = compare(early, {0: power_law(100)}, budget=160, share=0.5)
    assert (speed.ratio, speed.bounds) == (pytest.approx(0.5), 1)


def test_nothing_is_read_off_beyond_the_points():
    short = {0: power_law(100, times=(10, 20, 40))}
    assert compare({0: power_law(50)}, short, budget=160, share=1.0) is None
    assert compare({0: power_law(50)}, short, budget=160, share=0.25) is not None


def test_where_the_baseline_stands_still_it_is_level_with_itself():
    flat = {0: Curve.fit([10, 20, 40, 80], [9.0, 5.0, 4.0, 4.2])}
    assert compare(flat, flat, budget=80, share=1.0).ratio == 1.0


def test_a_method_that_is_slow_in_seconds_only_is_as_fast_in_steps():
    """The same FID after as many steps, of which each takes twice as long."""
    times = (10, 20, 40, 80, 160)
    values = [100 * time**-0.5 for time in times]
    steps = [10 * time for time in times]
    baseline = Curve.fit([*times], values, steps)
    slow = Curve.fit([2 * time for time in times], values, steps)
    speed = compare({0: slow}, {0: baseline}, budget=160, share=0.5)
    assert (speed.ratio, speed.other) == (pytest.approx(2.0), pytest.approx(1.0))


def test_the_interval_holds_the_mean_and_widens_with_the_spread():
    narrow, wide = (interval(np.array([-0.5, 0.0, 0.5]) * spread) for spread in (0.1, 1.0))
    assert narrow[0] < 0 < narrow[1]
    assert wide[1] - wide[0] == pytest.approx(10 * (narrow[1] - narrow[0]))


def test_geometric_times_hold_the_targets():
    fractions = GeometricTimes(0.1, 5).fractions(2.0)
    assert {0.25, 0.5, 1.0, 2.0} <= {*fractions}
    assert fractions[0] == pytest.approx(2 ** (-16 / 5))  # the first from 0.1 on
    assert np.diff(np.log2(fractions)) == pytest.approx(0.2)
    assert GeometricTimes(0.5, 1).fractions(1.5) == [0.5, 1.0, 1.5]


# Races with a stand-in for the judge, and short runs of the real training in this process.


@pytest.fixture
def write_race(tmp_path, monkeypatch, tiny_network, cache_dir) -> Callable[..., Path]:
    """Write a race of two methods and two seeds of a few steps each, in folders of its own."""
    monkeypatch.setattr(plan, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "SUMMARY", tmp_path / "results" / "race_summary.json")
    monkeypatch.setattr(plan.Race, "runs", property(lambda race: tmp_path / "runs"))

    def write(**changes: object) -> Path:
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
                {"sampler": "ddpm", "num_inference_steps": 5, "num_images": 10, "fractions": [0.25, 0.5, 1, 2]},
            ],
            "lengths": {"uniform": 2},
            "methods": {"uniform": None, "stratified": {"stratified": True}},
            **changes,
        }
        path = tmp_path / "race.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return path

    return write


class Judge:
    """Stands in for the judge: finds the weights, counts, and gives FID that falls with the steps."""

    measured: list[tuple[str, str, str]] = []
    fails_at = 0

    def __init__(self, race, data):
        assert data.dataset_name == "digits"

    def measure(self, folder, measurement, config):
        assert (folder / "diffusion_pytorch_model.safetensors").exists()
        self.measured.append((folder.parent.name, folder.name, measurement.name))
        if len(self.measured) == self.fails_at:
            raise KeyboardInterrupt
        step = json.loads((folder / "numbers.json").read_text())["step"]
        fid = 100 * step**-0.5 / (1 + config.stratified)
        return {"fid": fid, "kid": 0.1, "precision": 0.5, "recall": 0.5, "seconds": 1.0}


@pytest.fixture
def run(monkeypatch) -> Callable[..., list[str]]:
    """Run a race in this process; return what was trained."""
    monkeypatch.setattr(measure, "Judge", Judge)
    monkeypatch.setattr(Judge, "measured", [])
    monkeypatch.setattr(Judge, "fails_at", 0)

    def run_race(file: Path, *arguments: object) -> list[str]:
        from accelerate.state import AcceleratorState

        trained = []

        def train_here(entry, plan_file, threads):
            trained.append(entry.name)
            AcceleratorState._reset_state(reset_partial_state=True)
            monkeypatch.setattr("sys.argv", ["train", str(plan_file)])
            training.main()

        monkeypatch.setattr(race_command, "train", train_here)
        monkeypatch.setattr("sys.argv", ["race", str(file), *map(str, arguments)])
        race_command.main()
        return trained

    return run_race


def test_a_race_is_read(write_race):
    race = read_race(write_race())
    assert [entry.name for entry in race.entries] == ["uniform-0-x2", "stratified-0", "uniform-1-x2", "stratified-1"]
    assert race.snapshot_times(Entry("uniform", 0, 2.0)) == [2, 4, 8, 16]
    assert race.snapshot_times(Entry("stratified", 0)) == [2, 4, 8]


def test_dense_curves_and_sparse_points_are_one_race(write_race):
    sparse = {"sampler": "ddpm", "num_inference_steps": 9, "num_images": 20, "fractions": [0.3, 1]}
    dense = {"sampler": "ddim", "num_inference_steps": 5, "num_images": 10}
    snapshots = {"from": 0.25, "per_doubling": 2}
    race = read_race(write_race(budget={"seconds": 100}, measurements=[sparse, dense], snapshots=snapshots))
    entry = Entry("stratified", 0)
    assert race.times(race.measurements[0], entry) == [30, 100]
    assert race.times(race.measurements[1], entry) == [25, 35.355, 50, 70.711, 100]
    assert race.snapshot_times(entry) == [25, 30, 35.355, 50, 70.711, 100]
    assert race.times(race.measurements[1], Entry("uniform", 0, 2.0))[-2:] == [141.421, 200]


DDPM = {"sampler": "ddpm", "num_inference_steps": 5, "num_images": 10, "fractions": [1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": {"days": 1}}, "budget: days: must be in seconds or steps"),
        ({"budget": {"steps": 0}}, "budget: steps: 0: must be a number greater than 0"),
        ({"budjet": 1}, "unknown key budjet; did you mean budget"),
        ({"methods": {"a": None}}, "baseline: uniform: must be one of the methods a"),
        ({"ours": "mine"}, "ours: mine: must be one of the methods uniform, stratified"),
        ({"methods": {"uniform": {"stratifed": True}}}, "methods: uniform: unknown key stratifed; did you mean strat"),
        ({"methods": {"uniform": {"timestep_sampler": "x.py:X"}}}, "methods: uniform: --timestep_sampler .* no file"),
        ({"methods": {"uniform": {"learning_rate": -1}}}, "methods: uniform: --learning_rate -1.0: must be greater"),
        ({"methods": {"uniform": {"seed": 1}}}, "methods: uniform: seed is set by the race itself"),
        ({"methods": {"uniform": {"resolution": 16}}}, "resolution must be the same for all methods"),
        ({"training": {"resolution": 8}}, "training: names no data"),
        ({"measurements": [{**DDPM, "sampler": "dpm"}]}, "measurements: sampler: dpm: must be ddpm or ddim"),
        ({"measurements": [{**DDPM, "images": 3}]}, "measurements: unknown key images; did you mean num_images"),
        ({"measurements": [DDPM, DDPM]}, "measurements: DDPM-5@10: must be there once"),
        ({"measurements": [{**DDPM, "fractions": []}]}, "say when those are, with snapshots"),
        ({"measurements": [{**DDPM, "num_inference_steps": 1001}]}, "has more steps than the diffusion"),
        (
            {"methods": {"uniform": {"half_resolution_steps": 32}}, "lengths": {}},
            "uniform: half_resolution_steps: 32",
        ),
    ],
)
def test_what_is_no_race_is_one_line(write_race, run, changes, message):
    file = write_race(**changes)
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}: .*{message}") as refusal:
        run(file)
    assert refusal.value.exit_code == 2
    assert "\n" not in str(refusal.value)


def test_methods_and_seeds_that_are_not_in_the_race_are_refused(write_race, run):
    for flag, value in (("--methods", "mine"), ("--seeds", 7), ("--check_precision", "DDIM-50@9")):
        with pytest.raises(UserError, match=f"^{flag}: {value}: must be one of"):
            run(write_race(), flag, value)


def test_every_race_that_is_here_is_one():
    for file in sorted((plan.ROOT / "benchmarks" / "races").glob("*.yaml")):
        record.check_options(read_race(file), file)


def test_a_race_whose_measurement_was_stopped_goes_on(write_race, run, monkeypatch):
    file = write_race()
    monkeypatch.setattr(Judge, "fails_at", 3)
    with pytest.raises(KeyboardInterrupt):
        run(file, "--seeds", 0)
    assert run(file, "--seeds", 0) == ["stratified-0"]
    assert len(Judge.measured) == 8  # seven snapshots, one of them twice
    assert run(file) == ["uniform-1-x2", "stratified-1"]
    assert run(file) == []

    race = read_race(file)
    results = [race.result_of(entry) for entry in race.entries[:2]]
    assert [[point["step"] for point in result["points"]] for result in results] == [[2, 4, 8, 16], [2, 4, 8]]
    assert results[0]["machine"]["threads"] == 1
    # Weights are kept until they have been measured, and the last for good.
    for entry, last in zip(race.entries, (16, 8, 16, 8), strict=True):
        kept = [path.parent.name for path in (race.runs / entry.name).glob("snapshot-*/*.safetensors")]
        assert kept == [f"snapshot-{last}"]

    assert (race.results / "race.png").exists()
    assert (race.results / "draws.png").exists()
    draws = race.result_of(race.entries[0])["draws"]
    assert draws["log_snr"] == sorted(draws["log_snr"])
    assert sum(draws["probability"]) == pytest.approx(1, abs=1e-3)
    assert all(loss is None or loss > 0 for loss in draws["loss"])
    assert len(draws["loss"]) == len(draws["log_snr"])
    page = (race.results / "race.md").read_text()
    assert "| stratified | 2 | at most 1.00 (1.00 to 1.00) | at most 0.50 (0.50 to 0.50) | at most 0.25" in page
    summary = json.loads((race.results.parent.parent / "race_summary.json").read_text())["race"]
    # A quarter of the steps, where the first point is: half of the FID is a quarter of the time.
    assert [summary[name] for name in ("method", "seeds", "best_other")] == ["stratified", 2, "uniform"]
    assert [summary[name] for name in ("time_ratio", "low", "high")] == pytest.approx([0.25] * 3)
    assert summary["time_ratio_best_other"] == pytest.approx(1.0)


def test_a_step_counts_by_the_size_of_its_images_and_of_its_batch(write_race, run):
    own = {"small_first": {"half_resolution_steps": 4}, "small_batches": {"train_batch_size": 4}}
    file = write_race(methods={"uniform": None, **own}, lengths={}, seeds=[0])
    run(file)
    race = read_race(file)
    points = points_of(race.result_of(Entry("small_first", 0)))
    assert {time: point["step"] for time, point in points.items()} == {2: 5, 4: 7, 8: 11}
    points = points_of(race.result_of(Entry("small_batches", 0)))
    assert {time: point["step"] for time, point in points.items()} == {2: 8, 4: 16, 8: 32}
    assert {time: point["step"] for time, point in points_of(race.result_of(Entry("uniform", 0))).items()} == {
        time: time for time in (2, 4, 8)
    }
    table = report.Table.read(race, race.measurements[0], [race.result_of(entry) for entry in race.entries])
    assert np.exp(table.curves()["small_first"][0].log_times).tolist() == pytest.approx([2, 4, 8])


def test_a_method_that_wins_by_fid_alone_is_not_said_to_win_by_kid(write_race):
    race = read_race(write_race(lengths={}, seeds=[0]))
    name, kids = race.measurements[0].name, {"uniform": (0.2, 0.1, 0.05), "stratified": (0.2, 0.1, 0.1)}
    results = [
        {"method": method, "seed": 0, "points": [
            {"time": time, "step": time, "train_seconds": time, name: {"fid": fid / factor, "kid": kid}}
            for time, fid, kid in zip((2, 4, 8), (80, 40, 20), kids[method], strict=True)
        ]}
        for method, factor in (("uniform", 1), ("stratified", 2))
    ]  # fmt: skip
    table = report.Table.read(race, race.measurements[0], results)
    assert table.speeds(1.0)["stratified"].ratio == pytest.approx(0.5)
    assert table.speeds(1.0, metric="kid")["stratified"].reached == 0
    heading, _, *rows = [line.split(" | ") for line in report.target_lines(table)[2:]]
    by_kid = {row[0].strip("| "): row[heading.index("100%, by KID")] for row in rows}
    assert by_kid == {"stratified": "not reached", "uniform": "1.00"}

    results[1]["points"][2][name]["kid"] = -0.001  # as an unbiased estimate may be; its curve has no logarithm
    table = report.Table.read(race, race.measurements[0], results)
    assert table.speeds(1.0, metric="kid").keys() == {"uniform"}
    assert table.speeds(1.0).keys() == {"uniform", "stratified"}
    (row,) = [line for line in report.target_lines(table) if line.startswith("| stratified")]
    assert "| a KID is below 0 |" in row


def test_a_training_that_was_killed_begins_again(write_race, run, monkeypatch, capsys):
    """What it left by then, metrics and a snapshot of which nothing says that the new run would make it, is removed."""
    keep = training.Snapshots.keep

    def killed(self, state, time):
        keep(self, state, time)
        if time == 4:
            raise KeyboardInterrupt

    file = write_race()
    race = read_race(file)
    folder = race.runs / "uniform-0-x2"
    with monkeypatch.context() as context:
        context.setattr(training.Snapshots, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            run(file, "--methods", "uniform")
    for number in (2, 4):
        (folder / f"snapshot-{number}" / "old").touch()
    assert (folder / "metrics.jsonl").exists()
    run(file, "--methods", "uniform", "--seeds", 0)
    assert "was stopped without a checkpoint and begins again" in capsys.readouterr().out
    assert not [*folder.glob("*/old")]
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == [*range(1, 17)]


def test_a_training_that_was_stopped_goes_on_with_its_snapshots(write_race, run, monkeypatch):
    """Those after its checkpoint are of a process that was killed later, and are made again."""
    keep = training.Snapshots.keep

    def stopped(self, state, time):
        keep(self, state, time)
        interruption._requested = "SIGTERM" if time == 4 else None

    file = write_race()
    folder = read_race(file).runs / "uniform-0-x2"
    with monkeypatch.context() as context:
        context.setattr(training.Snapshots, "keep", stopped)
        with pytest.raises(interruption.Interrupted):
            run(file, "--methods", "uniform")
    assert (folder / "checkpoint-5").exists()  # the step is finished first
    (folder / "snapshot-8").mkdir()
    (folder / "snapshot-8" / "numbers.json").write_text(json.dumps({"time": 8, "step": 8}))
    (folder / "snapshot-2" / "old").touch()
    run(file, "--methods", "uniform", "--seeds", 0)
    assert (folder / "snapshot-2" / "old").exists()
    assert [path[1] for path in Judge.measured] == ["snapshot-2", "snapshot-4", "snapshot-8", "snapshot-16"]


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("exit 2", UserError, "stratified-0 cannot be trained: the line above says why"),
        ("exit 1", RunFailed, "stratified-0 ended with 1; start the same command again"),
        ("kill -9 $$", RunFailed, "stratified-0 ended with -9; start the same command again"),
        ("trap 'exit 75' TERM; sleep 5 & wait", interruption.Interrupted, "stratified-0: stopped in its training"),
    ],
)
def test_how_a_training_ended_is_passed_on(tmp_path, monkeypatch, program, error, message):
    """A stop that the race is asked for is the training's to save first; it is waited for."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setattr(interruption, "_requested", None)
    timer = threading.Timer(0.2, setattr, (interruption, "_requested", "SIGTERM"))
    timer.start()
    with pytest.raises(error, match=re.escape(message)):
        race_command.train(Entry("stratified", 0), tmp_path / "plan.json", 1)
    timer.cancel()


def test_results_of_another_definition_are_not_reused(write_race, run):
    file = write_race(methods={"uniform": None})
    run(file, "--seeds", 0)
    result = read_race(file).result_file(Entry("uniform", 0, 2.0))
    for changes, message in (
        ({"methods": {"uniform": {"learning_rate": 0.1}}}, "learning_rate 0.0002 -> 0.1"),
        ({"budget": {"steps": 9}}, "budget {'steps': 8} -> {'steps': 9}"),
        ({"threads": 2}, "threads 1 -> 2"),
        ({"reference_images": 5}, "reference_images 10000 -> 5"),
        (
            {"measurements": [{**DDPM, "fractions": [0.5, 0.75]}]},
            "DDPM-5@10 is missing at 6 steps",
        ),
    ):
        with pytest.raises(UserError, match=rf"{re.escape(message)}.*remove {re.escape(str(result))}"):
            run(write_race(**{"methods": {"uniform": None}, **changes}), "--seeds", 0)
    # A measurement more is made of what is there; a default that is spelt out is none.
    more = [DDPM, {**DDPM, "num_images": 12, "fractions": [2]}]
    spelt = {"uniform": {"learning_rate": 2e-4}}
    assert run(write_race(measurements=more, methods=spelt), "--seeds", 0) == []
    assert Judge.measured[-1] == ("uniform-0-x2", "snapshot-16", "DDPM-5@12")


def test_a_run_of_another_definition_that_was_not_measured_begins_again(write_race, run, monkeypatch, capsys):
    monkeypatch.setattr(Judge, "fails_at", 1)
    with pytest.raises(KeyboardInterrupt):
        run(write_race(), "--methods", "stratified")
    changed = write_race(methods={"uniform": None, "stratified": {"stratified": True, "learning_rate": 0.1}})
    assert run(changed, "--methods", "stratified", "--seeds", 0) == ["stratified-0"]
    assert (
        "stratified-0 begins again, its definition has changed: learning_rate 0.0002 -> 0.1" in capsys.readouterr().out
    )


def test_code_of_a_sampler_in_a_file_is_a_part_of_the_definition(tmp_path):
    code = """
from schedulers.timestep_samplers import TimestepSampler
SCALE = {}
def helper():
    return {}
class Mine(TimestepSampler):
    "{}"
    width = {}  # {}
class Other(TimestepSampler):
    width = {}
"""
    digests = []
    for parts in (
        (1, 1, "a", 1, "b", 1), (1, 1, "c", 1, "d", 2),  # a comment, a docstring and another class
        (1, 1, "a", 2, "b", 1), (2, 1, "a", 1, "b", 1), (1, 2, "a", 1, "b", 1),
    ):  # fmt: skip
        path = tmp_path / f"{len(digests)}.py"
        path.write_text(code.format(*parts))
        digests.append(record.source_of(f"{path}:Mine"))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert record.source_of("uniform") is None


def test_the_error_of_bf16_is_stated(write_race, run):
    file = write_race(mixed_precision="bf16", methods={"uniform": None})
    run(file, "--seeds", 0)
    run(file, "--check_precision", "DDPM-5@10")
    page = (read_race(file).results / "race.md").read_text()
    assert "| uniform-0-x2 | DDPM-5@10 | bf16 | 25.000 | 25.000 | +0.00% |" in page


def test_the_page_s_own_race_runs(write_race, run, tmp_path, monkeypatch):
    """Its class and its file as they stand there, for a few steps."""
    page = (plan.ROOT / "docs" / "race.md").read_text(encoding="utf-8")
    code, race = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL).group(1) for kind in ("python", "yaml"))
    (tmp_path / "my_sampler.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    tiny = yaml.safe_load(write_race().read_text())["training"]
    values = yaml.safe_load(race)
    values |= {"budget": {"steps": 8}, "threads": 1, "training": {**values["training"], **tiny}}
    (tmp_path / "my_race.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    trained = run(Path("my_race.yaml"), "--seeds", 0)
    assert trained == ["uniform-0", "stratified-0", "low_noise-0", "low_noise_slower-0"]
    density = json.loads((tmp_path / "runs" / "low_noise-0" / "snapshot-8" / "density.json").read_text())
    assert density[0] / density[99] == pytest.approx(10)  # (1 + t)^-0.5, as the race's file has it


def test_the_table_of_the_ablations_has_what_was_measured(tmp_path, monkeypatch):
    for name in training_tables.ABLATIONS.values():
        race = read_race(plan.ROOT / "benchmarks" / "races" / f"{name}.yaml")
        assert race.methods.keys() == training_tables.OBJECTIVES.keys()
    monkeypatch.setattr(plan, "RESULTS", tmp_path)
    race = read_race(plan.ROOT / "benchmarks" / "races" / "ablations_16.yaml")
    name = race.measurements[0].name
    points = [{"time": time, name: {"fid": fid}} for time, fid in ((1000, 5.0), (2000, 123.45))]
    race.results.mkdir(parents=True)
    race.result_file(Entry("mean_L", 0)).write_text(json.dumps({"method": "mean_L", "seed": 0, "points": points}))
    shown = training_tables.ablations(tmp_path)
    assert shown.count("123.5") == 1  # at the end
    assert "| mean | L, fixed variance | 13.22 |" in shown.partition("123.5")[0].splitlines()[-1]


# Which noise levels one network is better at.


class Says(torch.nn.Module):
    def __init__(self, number: float):
        super().__init__()
        self.number = number

    def forward(self, sample: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.full_like(sample, self.number)


def test_another_network_takes_over_in_its_band_alone():
    log_snr = build_scheduler().alphas_cumprod.logit()
    inside = (log_snr >= 0) & (log_snr < 2)
    mixed = Mixed(Says(1.0), Says(2.0), inside)
    said = torch.cat([mixed(torch.zeros(1), torch.full((3,), t)) for t in range(len(log_snr))])
    assert torch.equal(said == 2, inside)
    assert 50 < inside.sum() < 200


def test_bands_are_named_by_their_edges():
    infinity = float("inf")
    bands = [(-infinity, -infinity), (-infinity, infinity), (-infinity, -3.5), (0.0, 2.0), (4.0, infinity)]
    assert [name_of(band) for band in bands] == ["none", "all", "below -3.5", "0 to 2", "from 4"]


# Which flaws do metrics see?


@pytest.fixture(scope="module")
def loud_and_right() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(200, 3, 16, 16, generator=generator)
    smooth = torch.nn.functional.avg_pool2d(images, 3, 1, 1) + torch.randn(200, 3, 1, 1, generator=generator)
    return smooth + 0.5, images + 0.3 * torch.randn(200, 3, 1, 1, generator=generator)


def test_colours_are_corrected_and_nothing_else(loud_and_right):
    images, reference = loud_and_right
    found = with_colours(images, reference)
    colours, wanted = found.mean((2, 3)), reference.mean((2, 3))
    torch.testing.assert_close(colours.mean(0), wanted.mean(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(colours.T.cov(), wanted.T.cov(), atol=1e-5, rtol=0)
    inside = [some - some.mean((2, 3), keepdim=True) for some in (found, images)]
    torch.testing.assert_close(*inside, atol=1e-5, rtol=0)


def test_the_spectrum_is_corrected_and_no_mean(loud_and_right):
    images, reference = loud_and_right
    found = with_spectrum(images, reference)
    torch.testing.assert_close(found.mean((2, 3)), images.mean((2, 3)), atol=1e-5, rtol=0)
    power, wanted = (torch.fft.fft2(some).abs().square().mean((0, 1)) for some in (found, reference))
    assert power[8, 8] == pytest.approx(wanted[8, 8].item(), rel=0.3)
    assert torch.fft.fft2(images).abs().square().mean((0, 1))[8, 8] < wanted[8, 8] / 10
    assert torch.equal(CORRECTIONS["as they are"](images, reference), images)
