"""The benchmarks: their arithmetic against closed forms, their tables from a made-up result, and that they start."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
import scipy.linalg
import torch
from conftest import ROOT

from benchmarks import __main__ as suite
from benchmarks import scaling, tables
from benchmarks.frechet import by_scipy
from benchmarks.measuring import Result, Row, Spread, Worker, in_turns, ratios, read_rows, write_result
from benchmarks.optimum import least_error
from benchmarks.profile_steps import NOTHING, kind_of, own_times, summarise
from common.errors import RunFailed
from evaluation.metrics import Moments

BESIDE_THE_SUITE = ("sampling_precision",)  # which needs a trained run
MODULES = [f"benchmarks.{name}" for name in ("__main__", "tables", *suite.BENCHMARKS, *BESIDE_THE_SUITE)]


# Ratios.


def test_a_ratio_is_that_of_one_turn():
    """A machine that slows down by a factor of ten halfway changes no ratio."""
    here, there = [1.0, 2.0, 10.0, 20.0], [2.0, 5.0, 20.0, 50.0]
    assert ratios(there, here) == Spread(2.25, 2.0, 2.5, 4)
    with pytest.raises(ValueError, match="longer|shorter"):
        ratios([1.0], [1.0, 2.0])


def test_ways_take_turns_and_warm_up():
    order = []
    ways = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ABC"}
    assert in_turns(ways, rounds=2, warm_up=1) == {"A": [4.0, 7.0], "B": [5.0, 8.0], "C": [6.0, 9.0]}
    assert "".join(order) == "ABCABCABC"


@pytest.mark.parametrize(
    ("value", "to_reach", "direction", "reached"),
    [(1.08, 1.08, "at least", True), (1.07, 1.08, "at least", False), (0.6, 0.6, "at most", True),
     (0.61, 0.6, "at most", False), (5.0, None, "at least", None)],
)  # fmt: skip
def test_what_is_reached(value, to_reach, direction, reached):
    spread = Spread.of([0.0, value, 100.0])
    assert Row("a", measured=spread, to_reach=to_reach, direction=direction).reached is reached
    assert Row("a", to_reach=to_reach, direction=direction, skipped="no").reached is None


def test_scipy_s_distance_is_that_of_commuting_gaussians():
    """Of diagonal covariances it is |m - m'|^2 + sum (s - s')^2."""
    first, second = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 1.0, 16.0]).double()
    means = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([2.0, 0.0, 3.0]).double()
    distance = by_scipy(Moments(means[0], torch.diag(first)), Moments(means[1], torch.diag(second)))
    assert distance == pytest.approx(5 + 1 + 1 + 1)
    assert scipy.linalg.sqrtm(np.diag([4.0, 9.0])) == pytest.approx(np.diag([2.0, 3.0]))


# The model of many GPUs.


def bare(bandwidth: float, **settings: float) -> scaling.Interconnect:
    given = {"gpus_a_node": 8, "within_node": bandwidth, "between_nodes": bandwidth}
    return scaling.Interconnect(
        "", **{**given, "hop_within": 0.0, "hop_between": 0.0, "base": 0.0, **settings}, source=""
    )


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_a_ring_sends_what_the_model_says(count):
    """A ring that is gone through: reduce-scatter, then all-gather, in chunks of 1 / n."""
    values = np.random.default_rng(0).integers(0, 100, (count, count)).astype(float)
    chunks, sent, hops = values.copy(), 0.0, 0
    for phase in ("reduce", "gather"):
        for step in range(count - 1):
            new = chunks.copy()
            for rank in range(count):
                chunk = (rank - step + (phase == "gather")) % count
                neighbour = (rank + 1) % count
                received = chunks[rank, chunk]
                new[neighbour, chunk] = new[neighbour, chunk] + received if phase == "reduce" else received
            chunks, sent, hops = new, sent + 1 / count, hops + 1
    assert np.array_equal(chunks, np.tile(values.sum(0), (count, 1)))
    wires = bare(10.0)
    assert wires.all_reduce_seconds(100.0, count) == pytest.approx(sent * 100 / 10)
    slow = bare(10.0, hop_within=0.5, hop_between=0.5, base=3.0)
    assert slow.all_reduce_seconds(0.0, count) == pytest.approx(3 + 0.5 * hops)


def test_of_many_gpus_each_sends_the_gradient_twice():
    assert bare(10.0).all_reduce_seconds(100.0, 10**6) == pytest.approx(20.0, rel=1e-5)
    assert bare(10.0).all_reduce_seconds(100.0, 1) == 0
    assert bare(10.0, between_nodes=5.0).all_reduce_seconds(80.0, 8) == pytest.approx(14.0)  # one node
    assert bare(10.0, between_nodes=5.0).all_reduce_seconds(80.0, 16) == pytest.approx(30.0)  # two


@pytest.mark.parametrize(
    ("exchange", "buckets", "backward"), [(1.0, 4, 10.0), (10.0, 4, 1.0), (3.0, 1, 2.0), (4.0, 4, 4.0)]
)
def test_buckets_queue_behind_the_backward_pass(exchange, buckets, backward):
    """Event by event."""
    free = 0.0
    for number in range(1, buckets + 1):
        free = max(free, backward * number / buckets) + exchange / buckets
    assert scaling.exposed_seconds(exchange, buckets, backward) == pytest.approx(free - backward)


def test_the_model_of_one_gpu_is_its_step():
    row = scaling.model(0.1, 16, 1, 143e6, scaling.H100_NODES)
    assert row["step_ms"] == pytest.approx(100)
    assert (row["communication_share"], row["efficiency"]) == (0, 1)
    row = scaling.model(0.1, 16, 64, 143e6, scaling.H100_NODES)
    assert row["images_per_second"] == pytest.approx(64 * 16 / 0.1 * row["efficiency"])
    assert row["efficiency"] == pytest.approx(1 - row["communication_share"])


def test_measurements_of_one_kind_replace_each_other():
    def found(processes: int, rate: float, device: str = "H100") -> dict:
        return {
            "processes": processes, "device": device, "threads": 1, "network": "paper", "batch": 16,
            "precision": "float32", "parameters": 10, "images_per_second": [rate],
        }  # fmt: skip

    known = scaling.merged([found(1, 10), found(8, 70)], [found(8, 76), found(1, 2, "CPU")])
    assert [(one["device"], one["processes"], *one["images_per_second"]) for one in known] == [
        ("CPU", 1, 2), ("H100", 1, 10), ("H100", 8, 76),
    ]  # fmt: skip
    (row,) = scaling.rows_of(known)
    assert row.measured.median == pytest.approx(7.6)
    assert row.reached


# Traces.


def test_own_times_are_without_those_of_called_operations():
    def operation(name: str, start: float, duration: float, thread: int = 1) -> dict:
        return {"name": name, "cat": "cpu_op", "ts": start, "dur": duration, "tid": thread}

    events = [
        operation("aten::conv2d", 0, 100), operation("aten::convolution", 10, 80), operation("aten::copy_", 10, 30),
        operation("aten::mm", 50, 20), operation("aten::mm", 100, 7), operation("aten::silu", 5, 50, thread=2),
    ]  # fmt: skip
    assert own_times(events) == {
        "aten::conv2d": 20, "aten::convolution": 30, "aten::copy_": 30, "aten::mm": 27, "aten::silu": 50,
    }  # fmt: skip
    kernels = [{"name": "sgemm", "cat": "kernel", "ts": 0, "dur": 5, "tid": 7}]
    assert own_times(events + kernels) == {"sgemm": 5}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("aten::convolution_backward", "convolutions, backward"), ("aten::mkldnn_convolution", "convolutions, forward"),
     ("aten::addmm", "matrix products and attention"), ("aten::native_group_norm_backward", "group norm"),
     ("aten::_fused_adamw_", "Adam, clipping and moving average"), ("aten::add_", "copies and sums"),
     ("aten::_foreach_lerp_", "Adam, clipping and moving average"), ("aten::empty", "everything else")],
)  # fmt: skip
def test_kinds_of_operations(name, kind):
    assert kind_of(name) == kind


def test_what_is_left_of_a_step_is_python(tmp_path):
    step = {"name": "ProfilerStep#10", "cat": "user_annotation", "ts": 0, "dur": 4000, "tid": 1}
    work = {"name": "aten::mm", "cat": "cpu_op", "ts": 100, "dur": 3000, "tid": 1}
    (tmp_path / "profile.json").write_text(json.dumps({"traceEvents": [step, work]}))
    summary = summarise(tmp_path / "profile.json")
    assert summary["ms_per_step"] == 4
    assert summary["ms_by_kind"] == {"matrix products and attention": 3, NOTHING: 1}


# Tables.


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    rows = [
        Row("a step", "120 images/s", "example: 100 images/s", Spread(1.2, 1.1, 1.3, 7), to_reach=1.08),
        Row("a slow thing", "9 s", "", Spread.of([9.0]), "s", 5.0, "at most"),
        Row("a thing without its peer", skipped="it is not here"),
    ]
    write_result("training_step", Result(rows), folder)
    measured = [
        {"processes": count, "device": "CPU", "threads": 1, "network": "small", "parameters": 1000, "batch": 64,
         "precision": "float32", "images_per_second": [300.0 * count * 0.95 ** (count - 1)],
         "communication_share": [0.04 * (count - 1)], "all_reduce_ms": [2.0] * (count - 1)}
        for count in (1, 2)
    ]  # fmt: skip
    scaling.write(measured, folder)
    write_result(
        "profile_steps",
        Result(details={"net": {"ms_per_step": 10.0, "ms_by_kind": {"SiLU": 9.0, NOTHING: 1.0}}}),
        folder,
    )
    return folder


def test_rows_come_back_as_they_were_written(results):
    content = json.loads((results / "training_step.json").read_text())
    assert [row.reached for row in read_rows(content)] == [True, False, None]
    assert [row["reached"] for row in content["rows"]] == [True, False, None]
    assert content["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert content["machine"]["cores"] > 0
    assert str(ROOT) not in json.dumps(content)


def test_tables_stand_between_their_marks(results):
    names = ["training_step", *tables.OWN]
    page = "before\n" + "".join(f"<!-- benchmarks: {name} -->\nold\n<!-- end -->\n" for name in names) + "after\n"
    text = tables.filled(page, results)
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert tables.filled(text, results) == text
    assert "| a step | 120 images/s | example: 100 images/s | 1.20 x (1.10 to 1.30) | at least 1.08 x | yes |" in text
    assert "| a slow thing | 9 s |  | 9.00 s | at most 5.00 s | **no** |" in text
    assert "| a thing without its peer | not measured: it is not here | | | | |" in text
    assert (
        "2 of the 3 targets that we set ourselves are met; 1 could not be measured." in text
    )  # 1.9 x of two processes is the third
    assert "| 2 | CPU, 1 thread(s) each | 570 | 285 | 95% | 4.0% |" in text
    assert "| SiLU | 9.00 | 90.0% |" in text


def test_the_summary_has_a_row_of_each_of_its_benchmarks():
    text = tables.summary(tables.RESULTS)
    assert [row.split(" | ")[0].removeprefix("| ") for row in text.splitlines()[2:-2]] == [*tables.HEADLINES.values()]


def test_a_benchmark_that_failed_leaves_its_reason(results):
    write_result("scaling", Result([Row("scaling", skipped="it failed: no room")]), results)
    page = "<!-- benchmarks: scaling_model -->\n<!-- end -->"
    assert "| scaling | not measured: it failed: no room |" in tables.filled(page, results)
    (results / "scaling.json").unlink()
    assert "`python -m benchmarks.scaling` has not been run" in tables.filled(page, results)
    scaling.write([], results)  # and the next one begins anew
    assert json.loads((results / "scaling.json").read_text())["details"]["measured"] == []


def test_the_tables_of_the_documentation_are_those_of_the_results():
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.filled(text, tables.RESULTS) == text, f"{page}: python -m benchmarks.tables"


def test_pictures(results, tmp_path):
    tables.draw_profile(results, tmp_path / "profile.png")
    tables.draw_scaling(results, tmp_path / "scaling.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("profile.png", "scaling.png"))


def test_every_table_of_the_pages_has_a_source():
    for page in tables.PAGES:
        marks = [match[2] for match in tables.MARKED.finditer((ROOT / page).read_text())]
        assert set(marks) <= {*tables.OWN, *suite.BENCHMARKS, *BESIDE_THE_SUITE}
        assert len(marks) == len(set(marks))
        if page == "docs/speed.md":
            assert set(suite.BENCHMARKS) - {"profile_steps"} <= set(marks)


# The least error.


def test_the_least_error_is_that_of_the_posterior_mean():
    """Of Gaussian images: a value of variance v has snr v / (1 + snr v) of its noise left."""
    deviations = torch.tensor([1.0, 0.5, 0.1])
    images = deviations * torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    found = least_error(images, images[:2000].view(-1, 3, 1, 1), log_snr=-1.0)
    left = deviations.square() * np.exp(-1)
    assert found["error"] == pytest.approx((left / (1 + left)).mean().item(), abs=4 * found["standard_error"])
    assert found["standard_error"] < 0.01
    assert least_error(images[:50], images[:10].view(-1, 3, 1, 1), log_snr=-1.0) is None  # too few to average over


# That they start.


@pytest.mark.parametrize("module", MODULES)
def test_help(module):
    assert importlib.import_module(module).__doc__


def test_the_smallest_benchmark_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.frechet", "--quick", f"--output_dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = read_rows(json.loads((tmp_path / "frechet.json").read_text()))
    assert rows[1].reached  # the two distances are equal


def test_a_worker_that_ends_says_why(tmp_path):
    worker = Worker("the example", "benchmarks.stepping", [tmp_path / "none.py"], tmp_path / "log.txt")
    with pytest.raises(RunFailed, match="the example: FileNotFoundError"):
        worker.answer()


SCRIPT = """
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
while True:
    (-weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(int(weight), flush=True)
"""


def test_a_script_takes_the_steps_that_were_ordered(tmp_path):
    """And none more: it holds still after the last one, before it can print."""
    (tmp_path / "script.py").write_text(SCRIPT)
    worker = Worker("script", "benchmarks.stepping", [tmp_path / "script.py"], tmp_path / "log.txt")
    assert "first_step" in worker.answer()
    assert worker.order(3)["seconds"] > 0
    assert worker.order(2)["seconds"] > 0
    worker.close()
    assert (tmp_path / "log.txt").read_text().split() == ["1", "2", "3", "4", "5"]  # the sixth step is held
