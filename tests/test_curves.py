"""Tables, curves and comparisons of runs."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import help_of
from evaluation_helpers import evaluate, metrics_in, network, read_csv, run  # noqa: F401
from PIL import Image

from common.errors import UserError


def test_curves_carry_the_names_people_look_for(tmp_path):
    from evaluation.curves import draw_run

    rows = [row_of(step, {"fid@5000": 100 / step, "kid@5000": 0.1 / step, "is@5000": step}) for step in range(1, 41)]
    drawn = {path.name for path in draw_run(tmp_path, rows)}
    wanted = {"FID_vs_TrainingSteps.png", "IS_vs_TrainingSteps.png", "FID_vs_TrainingSteps_First25.png",
              "IS_vs_TrainingSteps_First25.png", "FID_vs_TrainingSeconds.png", "KID_vs_TrainingSteps.png"}  # fmt: skip
    assert drawn == wanted
    for name in wanted:
        assert min(Image.open(tmp_path / name).size) > 500


def test_a_picture_that_would_show_nothing_new_is_not_drawn(tmp_path):
    from evaluation.curves import FIRST, draw_run

    rows = [row_of(step, {"fid@5000": 100 / step}) for step in range(1, FIRST + 1)]
    assert {path.name for path in draw_run(tmp_path, rows)} == {
        "FID_vs_TrainingSteps.png",
        "FID_vs_TrainingSeconds.png",
    }
    more = draw_run(tmp_path, [*rows, row_of(FIRST + 1, {"fid@5000": 1.0})])
    assert "FID_vs_TrainingSteps_First25.png" in {path.name for path in more}


def row_of(step: int, metrics: dict[str, float], **changes: object) -> dict:
    row = {
        "step": step,
        "train_seconds": 10.0 * step,
        "weights": "ema",
        "sampler": "ddpm",
        "steps": 1000,
        "settings": None,
        "images": f"checkpoint-{step}",
        "num_images": int(next(iter(metrics)).partition("@")[2]),
        "sha256": str(step),
        "reference": "cifar10[train], 50000 images of 32x32, cropped at the centre",
        "reference_fingerprint": "0123abcd",
        "precision": "no",
    }
    return {**row, **changes, **metrics}


def add_to_table(folder: Path, number: int) -> None:
    from evaluation.results import Measured, add_result

    row = row_of(number, {"fid@5000": 1.0})
    add_result(folder, Measured(**{name: value for name, value in row.items() if "@" not in name}), {"fid@5000": 1.0})


def add_to_classes(folder: Path, number: int) -> None:
    from evaluation.condition_accuracy import add_classes
    from evaluation.results import Measured

    row = row_of(number, {"fid@5000": 1.0})
    measured = Measured(**{name: value for name, value in row.items() if "@" not in name})
    others = ("metric", "value", "samples", "real_images", "condition_accuracy")
    add_classes(folder, measured, [{"class": "cat", **dict.fromkeys(others, 0)}])


def add_to_likelihood(folder: Path, number: int) -> None:
    from evaluation.likelihood import COLUMNS, add_rows
    from run_folder.folder import LIKELIHOOD_TABLE

    add_rows(folder / LIKELIHOOD_TABLE, [dict.fromkeys(COLUMNS, number)])


@pytest.mark.parametrize(
    ("add", "module", "table"),
    [
        (add_to_table, "results", "evaluation_results.csv"),
        (add_to_classes, "condition_accuracy", "evaluation_per_class.csv"),
        (add_to_likelihood, "likelihood", "likelihood.csv"),
    ],
)
def test_two_evaluations_lose_no_row_of_each_other(add, module, table, tmp_path, monkeypatch):
    """One adds its row when the other has read the table and not written it yet: it has to wait."""
    import importlib

    module = importlib.import_module(f"evaluation.{module}")
    write, others = module.write_atomically, []

    def start_another(*given: object) -> None:
        monkeypatch.setattr(module, "write_atomically", write)
        others.append(multiprocessing.get_context("fork").Process(target=add, args=(tmp_path, 2)))
        others[0].start()
        others[0].join(1)
        write(*given)

    monkeypatch.setattr(module, "write_atomically", start_another)
    add(tmp_path, 1)
    others[0].join(60)
    assert others[0].exitcode == 0
    assert sorted(row["step"] for row in read_csv(tmp_path / table)) == ["1", "2"]
    assert not list(tmp_path.glob(".*"))


def test_many_evaluations_lose_no_row(tmp_path):
    """Whoever leaves removes the file that the others wait for."""

    def add_many(first: int) -> None:
        for number in range(first, first + 50):
            add_to_likelihood(tmp_path, number)

    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=add_many, args=(first,)) for first in (0, 50, 100)]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert sorted(int(row["step"]) for row in read_csv(tmp_path / "likelihood.csv")) == list(range(150))
    assert not list(tmp_path.glob(".*"))


def test_a_line_joins_points_of_one_number_of_images_and_one_method():
    from evaluation.curves import lines_of
    from evaluation.metrics import FID

    rows = [
        row_of(1, {"fid@5000": 30.0}),
        row_of(2, {"fid@5000": 20.0}),
        row_of(2, {"fid@50000": 15.0}),
        row_of(2, {"fid@5000": 18.0, "fid_clean@5000": 17.0}, sampler="ddim", steps=50),
    ]
    assert lines_of(rows, FID, "step") == {
        "fid@5000 (few images), ddpm, 1000 steps": [(1, 30.0), (2, 20.0)],
        "fid@50000, ddpm, 1000 steps": [(2, 15.0)],
        "fid@5000 (few images), ddim, 50 steps": [(2, 18.0)],
        "fid_clean@5000 (few images), ddim, 50 steps": [(2, 17.0)],
    }


def test_the_best_is_among_rows_that_were_measured_alike(tmp_path):
    rows = [
        row_of(1, {"fid@5000": 30.0}),
        row_of(2, {"fid@5000": 20.0}),
        row_of(3, {"fid@5000": 25.0}),
        row_of(1, {"fid@5000": 12.0}, settings="guidance_scale=3.0"),
        row_of(2, {"fid@5000": 15.0}, reference_fingerprint="ffff0000"),
    ]
    write_table(tmp_path, rows)
    best = [(row["metric"], row["best"], row["step"]) for row in read_csv(tmp_path / "best_scores.csv")]
    assert sorted(best) == [("fid@5000", "12.0", "1"), ("fid@5000", "15.0", "2"), ("fid@5000", "20.0", "2")]


def test_rows_of_weights_that_were_replaced_are_dropped(tmp_path):
    from evaluation.results import remove_replaced

    rows = [row_of(step, {"fid@5000": 1.0 * step}) for step in (1, 2, 3)]
    # Images of generate.py, of the same step: their hash is not that of weights.
    rows.append(row_of(2, {"fid@5000": 4.0}, images="step-2-ddpm", sha256="of the images"))
    write_table(tmp_path, rows)
    now = [(1, "ema", "1"), (2, "ema", "other weights"), (2, "raw", "2")]
    remove_replaced(
        tmp_path,
        [
            SimpleNamespace(name=f"checkpoint-{step}", step=step, weights=weights, sha256=digest)
            for step, weights, digest in now
        ],
    )
    assert [row["step"] for row in read_csv(tmp_path / "evaluation_results.csv")] == ["1", "2", "3"]
    assert [row["best"] for row in read_csv(tmp_path / "best_scores.csv")] == ["1.0"]


def test_published_numbers_are_drawn_where_data_and_number_match():
    from evaluation.curves import published_for
    from evaluation.metrics import FID

    assert published_for([row_of(1, {"fid@50000": 5.0})], FID)["Ho et al. 2020"] == 3.17
    assert published_for([row_of(1, {"fid@10000": 5.0})], FID) == {}
    assert published_for([row_of(1, {"fid@50000": 5.0}), row_of(2, {"fid@50000": 4.0, "kid@10000": 0.1})], FID)
    assert published_for([row_of(1, {"fid@50000": 5.0}), row_of(2, {"fid@10000": 4.0})], FID) == {}


@pytest.mark.parametrize(
    ("reference", "same"),
    [
        ("CIFAR-10[train], 50000 images of 32x32", True),
        ("uoft-cs/cifar10[train], 50000 images of 32x32, cropped at the centre", True),
        ("cifar10[test], 10000 images of 32x32, cropped at the centre", False),
        ("cifar10[train], 50000 images of 64x64, cropped at the centre", False),
        ("cifar100[train], 50000 images of 32x32, cropped at the centre", False),
        ("uoft-cs/cifar-100[train], 50000 images of 32x32", False),
    ],
)
def test_published_numbers_are_of_cifar10_and_no_other(reference, same):
    from evaluation.curves import published_for
    from evaluation.metrics import FID

    assert bool(published_for([row_of(1, {"fid@50000": 5.0}, reference=reference)], FID)) == same


def test_distances_in_other_features_are_drawn_under_their_own_name(tmp_path):
    from evaluation.curves import draw_guidance, draw_run, lines_of
    from evaluation.metrics import FD

    rows = [
        row_of(
            step, {"fd_dinov2@1000": 500.0 / step * scale, "kd_dinov2@1000": 1.0}, settings=f"guidance_scale={scale}"
        )
        for step in range(1, 4)
        for scale in (1.0, 3.0)
    ]
    assert lines_of(rows[::2], FD, "step") == {
        "fd_dinov2@1000 (few images)": [(1, 500), (2, 250), (3, pytest.approx(500 / 3))]
    }
    assert {path.name for path in draw_run(tmp_path, rows)} == {
        "FD_vs_TrainingSteps.png",
        "FD_vs_TrainingSeconds.png",
    }
    assert [path.name for path in draw_guidance(tmp_path, rows)] == ["FD_vs_Guidance.png"]
    unknown = [{name: value for name, value in row.items() if not name.startswith("fd_")} for row in rows]
    assert draw_guidance(tmp_path, unknown) == []


def write_table(folder: Path, rows: list[dict]) -> Path:
    from evaluation.results import Measured, add_result

    for row in rows:
        add_result(
            folder,
            Measured(**{name: value for name, value in row.items() if "@" not in name}),
            {name: value for name, value in row.items() if "@" in name},
        )
    return folder


def test_the_table_grows_by_columns_and_rows(tmp_path):
    from evaluation.results import read_results

    write_table(tmp_path, [row_of(2, {"fid@100": 9.0}), row_of(1, {"fid@100": 12.0, "kid@100": 0.5})])
    write_table(tmp_path, [row_of(2, {"fid_clean@100": 8.0}), row_of(2, {"fid@50": 30.0})])
    rows = read_results(tmp_path)
    assert [(row["step"], row["num_images"]) for row in rows] == [(1, 100), (2, 50), (2, 100)]
    assert (rows[2]["fid@100"], rows[2]["fid_clean@100"], rows[2]["fid@50"]) == (9.0, 8.0, None)
    best = {row["metric"]: (row["best"], row["step"]) for row in read_csv(tmp_path / "best_scores.csv")}
    assert best["fid@100"] == ("9.0", "2")
    assert best["kid@100"] == ("0.5", "1")


def test_runs_are_compared_by_the_time_to_equal_fid(tmp_path, capsys, caplog):
    from evaluation.comparison import compare_runs

    slow = write_table(tmp_path / "slow", [row_of(step, {"fid@100": 80.0 - 10 * step}) for step in range(1, 6)])
    fast = write_table(tmp_path / "fast", [row_of(step, {"fid@100": 80.0 - 20 * step}) for step in range(1, 4)])
    compare_runs([str(slow), str(fast)], tmp_path / "out")
    last = read_csv(tmp_path / "out" / "time_to_fid.csv")[-1]
    assert float(last["fid"]) == pytest.approx(30)
    assert float(last["slow seconds"]) == pytest.approx(50)
    assert float(last["fast seconds"]) == pytest.approx(25)  # half-way between 40 at 20 s and 20 at 30 s
    assert float(last["fast speed-up"]) == pytest.approx(2)
    assert (tmp_path / "out" / "FID_vs_TrainingSeconds.png").exists()
    assert "fast speed-up" in capsys.readouterr().out
    assert not caplog.records
    copied = [row_of(step, {"fid@100": 90.0 - 10 * step}, reference_fingerprint="89abcdef") for step in range(1, 6)]
    compare_runs([str(slow), str(write_table(tmp_path / "copied", copied))], tmp_path / "out")
    assert "data that are called the same, but are other files or copies" in caplog.text


def test_runs_measured_otherwise_are_not_compared(tmp_path):
    from evaluation.comparison import compare_runs

    one = write_table(tmp_path / "one", [row_of(1, {"fid@100": 80.0})])
    other = write_table(tmp_path / "other", [row_of(1, {"fid@200": 80.0})])
    with pytest.raises(UserError, match="no number of images, sampler and reference that all runs"):
        compare_runs([str(one), str(other)], tmp_path / "out")


def test_runs_are_compared_in_other_features_too(tmp_path):
    from evaluation.comparison import compare_runs

    tables = [
        write_table(tmp_path / name, [row_of(step, {"fd_dinov2@100": 500 / step}) for step in range(first, 4)])
        for name, first in (("slow", 1), ("fast", 2))
    ]
    compare_runs([str(table) for table in tables], tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "FD_vs_TrainingSeconds.png",
        "FD_vs_TrainingSteps.png",
        "time_to_fd.csv",
    }
    assert float(read_csv(tmp_path / "out" / "time_to_fd.csv")[-1]["fd"]) == pytest.approx(500 / 3)


def test_fid_is_compared_in_the_mode_of_published_numbers_first(tmp_path):
    from evaluation.comparison import find_common_rows

    metrics = {"fid@100": 9.0, "fid_clean@100": 8.0, "fd_dinov2@100": 300.0}
    assert find_common_rows({"run": [row_of(1, metrics)]})[0][0] == "fid@100"
    del metrics["fid@100"]
    assert find_common_rows({"run": [row_of(1, metrics)]})[0][0] == "fid_clean@100"
    assert find_common_rows({"run": [row_of(1, {**metrics, "fd_dinov2@200": 300.0})]})[0][0] == "fd_dinov2@200"


def test_checkpoints_of_which_no_time_is_known_are_compared_by_step_alone(tmp_path):
    from evaluation.comparison import compare_runs, line_of

    rows = [row_of(1, {"fid@100": 80.0}), row_of(2, {"fid@100": 40.0}, train_seconds=None)]
    runs = [str(write_table(tmp_path / name, rows)) for name in ("one", "other")]
    compare_runs(runs, tmp_path / "out")
    assert line_of(rows, "fid@100", "train_seconds") == [(10.0, 80.0)]
    assert line_of(rows, "fid@100", "step") == [(1, 80.0), (2, 40.0)]


def test_runs_of_one_name_are_told_apart(tmp_path, monkeypatch):
    from evaluation.comparison import compare_runs

    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "run"):
        write_table(tmp_path / name, [row_of(1, {"fid@100": 80.0})])
    compare_runs(["a/run", "run"], Path("out"))
    (row,) = read_csv(tmp_path / "out" / "time_to_fid.csv")
    assert {"run seconds", f"{tmp_path}/run seconds"} < row.keys()


def test_runs_that_cannot_be_compared_are_said(tmp_path, monkeypatch):
    from evaluation.comparison import compare_runs

    write_table(tmp_path / "one", [row_of(1, {"fid@100": 80.0})])
    write_table(tmp_path / "other", [row_of(1, {"kid@100": 0.1})])
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for runs, out, message in (
        (["one", f"{tmp_path}/one"], "out", f"--compare one {tmp_path}/one: one run is named twice"),
        (["one", "~/other"], "out", "other: no FID and time of training"),
        (["one", "nowhere"], "out", "--compare nowhere: there are no measured checkpoints"),
    ):
        with pytest.raises(UserError, match=message):
            compare_runs(runs, Path(out))
    write_table(tmp_path / "other", [row_of(1, {"fid@100": 80.0})])
    with pytest.raises(UserError, match="file: this folder cannot be made"):
        compare_runs(["one", "other"], Path("file"))


def test_help_needs_no_heavy_import():
    assert "--run_dir" in help_of("evaluate.py")


def test_several_sets_of_images_are_one_line_with_bars(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    from evaluation.curves import draw_run, lines_of
    from evaluation.metrics import FID

    def of_sets(step: int) -> list[dict]:
        sets = [
            row_of(step, {"fid@500": 10.0 * step + place}, settings=name)
            for place, name in enumerate(("", "seeds=500-999"))
        ]
        return [*sets, row_of(step, {"fid@500": 10.0 * step + 0.5, "fid_std@500": 0.7}, settings="repeats=2")]

    rows = [*of_sets(1), *of_sets(2), row_of(3, {"fid@500": 5.0}, settings="")]
    lines = lines_of(rows, FID, "step")
    assert lines == {
        "fid@500 (few images), repeats=2": [(1, 10.5), (2, 20.5)],
        "fid@500 (few images), ": [(3, 5.0)],
    }
    bars, errorbar = [], Axes.errorbar
    monkeypatch.setattr(
        Axes, "errorbar", lambda *given, yerr, **named: bars.append(yerr) or errorbar(*given, yerr=yerr, **named)
    )
    draw_run(tmp_path, rows)
    assert bars == [[0.7, 0.7], [0.7, 0.7]]  # over steps, over seconds
    rows = [{**row, "fid_std@500": 1.0} for row in rows if "repeats" not in row["settings"]]
    bars.clear()
    draw_run(tmp_path, rows)
    assert bars == []
