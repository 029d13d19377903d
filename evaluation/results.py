"""The results: a table that grows by rows and columns, the best of each metric and method, and the trackers."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, user_errors
from common.files import in_turn, write_atomically
from common.interruption import fault_point
from evaluation.metrics import METRICS, SPREAD, Metric, metric_of
from run_folder.folder import (
    BEST_SCORES,
    FEW_IMAGES,
    METHOD,
    RESULTS,
    RunFolder,
    is_of_few_images,
    is_repeated,
    without_parts,
)
from run_folder.publish import log_evaluation, name_of_curves

if TYPE_CHECKING:
    from run_folder.saved_model import SavedModel

logger = logging.getLogger(__name__)

RESULTS_JSON = "evaluation_results.json"
FOOTNOTE = f"\u2020 of fewer than {FEW_IMAGES:,} images: far higher than of 50,000; compare only with as many images"
Row = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Measured:
    """The subject of a measurement and its method; rows that agree in all of these fields are the same row."""

    step: int | None
    train_seconds: float | None
    weights: str | None  # ema, raw, pipeline, or ema-0.05 for an average of that length
    sampler: str | None
    steps: int | None  # of denoising
    settings: str | None  # what else distinguishes the sampler from others
    num_images: int
    images: str  # the checkpoint's or folder's name
    sha256: str  # of the weights, or of the images where there are no weights
    reference: str
    reference_fingerprint: str
    precision: str


KEYS = tuple(entry.name for entry in fields(Measured))
IDENTITY = tuple(name for name in KEYS if name not in ("images", "train_seconds"))  # a folder may be renamed


def read_results(output_dir: Path) -> list[Row]:
    """Read the table, if there is one."""
    path = output_dir / RESULTS
    if not path.exists():
        return []
    damaged = user_errors(f"{path} cannot be read: move it away", OSError, ValueError, csv.Error)
    with damaged, path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in KEYS if name not in (reader.fieldnames or [])]
        if missing:
            raise UserError(f"{path} is not a table of this program (no column {missing[0]}): move it away")
        rows = list(reader)
        for number, row in enumerate(rows, start=2):
            if None in row or None in row.values():
                raise ValueError(f"line {number} does not have {len(reader.fieldnames)} columns")
        return [{name: _value(name, text) for name, text in row.items()} for row in rows]


def _value(name: str, text: str | None) -> str | int | float | None:
    if not text:
        return None
    if name in ("step", "steps", "num_images"):
        return int(text)
    return float(text) if name == "train_seconds" or "@" in name else text


def check_results(output_dir: Path) -> None:
    """Raise before anything is measured if the tables could not be read or written then."""
    read_results(output_dir)
    for name in (RESULTS, RESULTS_JSON, BEST_SCORES):
        if (output_dir / name).is_dir():
            raise UserError(f"{output_dir / name} is a folder where a table must go: move it away")


def find_row(rows: list[Row], measured: Measured) -> Row | None:
    """Return the row of this measurement, if there is one."""
    wanted = asdict(measured)
    return next((row for row in rows if all(row[name] == wanted[name] for name in IDENTITY)), None)


def add_result(output_dir: Path, measured: Measured, metrics: dict[str, float]) -> None:
    """Put metrics into the row of what was measured, in all files."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with in_turn(output_dir):  # another evaluation may have added rows, or be about to
        rows = read_results(output_dir)
        row = find_row(rows, measured)
        if row is None:
            row = asdict(measured)
            rows.append(row)
        row.update(metrics)
        rows.sort(key=lambda one: (one["step"] is None, one["step"] or 0, one["num_images"], str(one["sampler"])))
        _write(output_dir, rows)


def remove_replaced(output_dir: Path, models: Iterable[SavedModel]) -> None:
    """Remove the rows of models whose weights have another hash by now: two runs are not one line.

    The row of a folder of images, which may be of the same step, has the hash of the images, and stays.
    """
    is_current = judge_of_rows(models)
    if all(map(is_current, read_results(output_dir))):
        return
    with in_turn(output_dir):
        rows = read_results(output_dir)
        kept = list(filter(is_current, rows))
        logger.warning("%d rows of %s belong to earlier weights and are removed", len(rows) - len(kept), RESULTS)
        _write(output_dir, kept)


def check_same_run(output_dir: Path, models: Iterable[SavedModel]) -> None:
    """Raise if the table of another folder has rows of other weights under the names of these models."""
    if RunFolder(output_dir).is_run:
        raise UserError(
            f"--output_dir {output_dir}: is another run, whose table and card are its own; name a new folder"
        )
    if not all(map(judge_of_rows(models), read_results(output_dir))):
        raise UserError(f"--output_dir {output_dir}: its {RESULTS} is of another run; name another folder, or move it")


def judge_of_rows(models: Iterable[SavedModel]) -> Callable[[Row], bool]:
    """Return what tells whether a row is of the weights that a model of its name has now."""
    hashes = {(model.name, model.step, model.weights): model.sha256 for model in models}
    return lambda row: hashes.get((row["images"], row["step"], row["weights"]), row["sha256"]) == row["sha256"]


def _write(output_dir: Path, rows: list[Row]) -> None:
    without_blanks = [{name: value for name, value in row.items() if value is not None} for row in rows]
    write_atomically(output_dir / RESULTS_JSON, json.dumps(without_blanks, indent=2) + "\n")
    fault_point("table")
    write_atomically(output_dir / BEST_SCORES, as_csv(["metric", "best", *KEYS], best_scores(rows)))
    # Last: what is in here is not measured again.
    write_atomically(output_dir / RESULTS, as_csv([*KEYS, *metric_columns(rows)], rows))


def metric_columns(rows: list[Row]) -> list[str]:
    """Return the table's columns of metrics, those of one number of images together."""
    names = dict.fromkeys(name for row in rows for name in row if "@" in name)
    return sorted(names, key=lambda name: int(name.partition("@")[2]))


def comparable_rows(
    rows: list[Row], metrics: Collection[Metric], method: Sequence[str] = METHOD
) -> dict[tuple, list[Row]]:
    """Group the rows that have a number of one of the metrics and were measured alike, by `(column, *method)`."""
    columns = [name for name in metric_columns(rows) if metric_of(name) in metrics and SPREAD not in name]
    groups: dict[tuple, list[Row]] = {}
    for row in without_parts(rows):
        for column in columns:
            if row.get(column) is not None:
                groups.setdefault((column, *(row[part] for part in method)), []).append(row)
    return groups


def repeated(measured: Measured, times: int) -> Measured:
    """Describe the mean over `times` sets of images, given the description of the first set."""
    return replace(measured, settings=" ".join(filter(None, [measured.settings, f"repeats={times}"])))


def mean_and_spread(parts: list[Row]) -> dict[str, float]:
    """Return mean and standard deviation of every metric over rows of disjoint sets of images."""
    numbers: dict[str, float] = {}
    for column in metric_columns(parts):
        values = [row.get(column) for row in parts]
        if SPREAD not in column and None not in values:
            numbers[column] = statistics.fmean(values)
            if metric_of(column).of_samples:
                numbers[column.replace("@", SPREAD)] = statistics.stdev(values)
    return numbers


def best_scores(rows: list[Row]) -> list[Row]:
    """Return for every metric and method its best row. What is not of the samples has no best."""
    best, columns = [], metric_columns(rows)
    groups = comparable_rows(rows, [metric for metric in METRICS if metric.of_samples])
    for (column, *_), scored in sorted(groups.items(), key=lambda group: columns.index(group[0][0])):
        choose = min if metric_of(column).lower_is_better else max
        winner = choose(scored, key=lambda row, column=column: row[column])
        best.append({"metric": column, "best": winner[column], **{key: winner[key] for key in KEYS}})
    return best


def log_results(
    run: RunFolder, output_dir: Path, measured: Measured, metrics: dict[str, float], to_trackers: bool = True
) -> None:
    """Log scalars beside the training's curves, and in the run's other trackers."""
    from torch.utils.tensorboard import SummaryWriter

    name = name_of_curves(asdict(measured))
    with SummaryWriter(output_dir / run.read_config().logging_dir / name) as writer:
        for column, value in metrics.items():
            writer.add_scalar(column, value, measured.step)
    if to_trackers:
        log_evaluation(run, {f"{name}/{column}": value for column, value in metrics.items()}, measured.step)


def describe_result(measured: Measured, metrics: dict[str, float]) -> str:
    """Describe one measurement for a person: what it is of, and a line for every metric."""
    what = [measured.images]
    if measured.sampler is not None:
        method = " ".join(filter(None, [measured.sampler, f"{measured.steps} steps", measured.settings]))
        what += [f"weights={measured.weights}", method]
    lines = [", ".join([*what, f"{measured.num_images} images"]), f"against {measured.reference}"]
    few = [column for column in metrics if is_of_few_images(column)]
    width = max(map(len, metrics)) + bool(few)
    for column, value in metrics.items():
        if SPREAD not in column:
            spread = metrics.get(column.replace("@", SPREAD))
            text = f"{value:.5g}" + ("" if spread is None else f" +- {spread:.3g}")
            direction = "lower" if metric_of(column).lower_is_better else "higher"
            lines.append(f"  {marked(column).ljust(width)}  {text.ljust(20)} {direction} is better")
    return "\n".join([*lines, *([f"  {FOOTNOTE}"] if few else [])])


def marked(column: str) -> str:
    """Return a column for people, with a dagger if it is a distance of few images."""
    return f"{column}\u2020" if is_of_few_images(column) else column


def describe_rows(rows: list[Row], count: int) -> str:
    """Return a table of the metrics of every row with this many images."""
    columns = [
        column
        for column in metric_columns(rows)
        if (column.endswith(f"@{count}") and SPREAD not in column) or not metric_of(column).of_samples
    ]
    rows = [row for row in without_parts(rows) if row["num_images"] == count]
    shown = [
        {**row, "guidance": guidance_scale_of(row), "reference": row["reference"].partition(",")[0]} for row in rows
    ]
    for row in filter(is_repeated, shown):
        for column in columns:
            if (spread := row.get(column.replace("@", SPREAD))) is not None:
                row[column] = f"{row[column]:.5g} +- {spread:.2g}"
    guidance = ["guidance"] if any(row["guidance"] is not None for row in shown) else []
    reference = ["reference"] if len({row["reference"] for row in rows}) > 1 else []
    header = ["step", "train_seconds", "weights", "sampler", "steps", *guidance, *reference, *columns]
    table = as_text([[*map(marked, header)], *([_cell(row.get(name)) for name in header] for row in shown)])
    return f"{table}\n{FOOTNOTE}" if any(map(is_of_few_images, columns)) else table


def guidance_scale_of(row: Row) -> float | None:
    """Return the guidance scale of a row of a conditional run, which is among the settings of its sampler."""
    settings = dict(part.partition("=")[::2] for part in (row["settings"] or "").split())
    return float(settings["guidance_scale"]) if "guidance_scale" in settings else None


def ema_length_of(row: Row) -> float | None:
    """Return the length of a row's moving average, if that was made of a run's snapshots."""
    of_length = re.fullmatch(r"ema-([\d.]+)", str(row["weights"]))
    return float(of_length[1]) if of_length else None


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def as_text(lines: list[list[str]]) -> str:
    """Return cells in columns, for a person."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def as_csv(columns: Sequence[str], rows: list[dict[str, object]]) -> str:
    """Return a table as CSV, with nothing where a row has no value."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
