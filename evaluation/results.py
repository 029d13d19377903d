"""What was measured: a table that grows by rows and columns, the best of each, TensorBoard, and the model card."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from common.errors import UserError
from common.files import write_atomically

logger = logging.getLogger(__name__)

RESULTS, BEST, AS_JSON = "evaluation_results.csv", "best_scores.csv", "evaluation_results.json"
LOWER_IS_BETTER = ("fid", "sfid", "kid", "fd", "kd")
METRIC = re.compile(r"[a-z]\w*@\d+")

Row = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Measured:
    """What was measured and how; two rows that agree in all of it are one."""

    step: int | None
    train_seconds: float | None
    weights: str | None  # ema, raw or pipeline
    sampler: str | None
    steps: int | None  # of denoising
    settings: str | None  # what else makes the sampler another one
    num_images: int
    images: str  # the checkpoint's or folder's name
    sha256: str  # of the weights, or of the images where there are no weights
    reference: str
    reference_fingerprint: str
    precision: str


KEYS = tuple(entry.name for entry in fields(Measured))
# What makes two rows points of one line, besides the number of images.
METHOD = ("weights", "sampler", "steps", "settings", "reference", "reference_fingerprint", "precision")


def read_results(output_dir: Path) -> list[Row]:
    path = output_dir / RESULTS
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in KEYS if name not in (reader.fieldnames or [])]
        if missing:
            raise UserError(f"{path} is not a table of this program (no column {missing[0]}): move it away")
        return [{name: _value(name, text) for name, text in row.items()} for row in reader]


def find_row(rows: list[Row], measured: Measured) -> Row | None:
    """The row of this measurement, if there is one; the folder's name may have changed since."""
    key = _key(asdict(measured))
    return next((row for row in rows if _key(row) == key), None)


def add_result(output_dir: Path, measured: Measured, metrics: dict[str, float]) -> list[Row]:
    """Put metrics into the row of what was measured, in all files; all rows are returned."""
    rows = read_results(output_dir)
    row = find_row(rows, measured)
    if row is None:
        row = asdict(measured)
        rows.append(row)
    row.update(metrics)
    rows.sort(key=lambda one: (one["step"] is None, one["step"] or 0, one["num_images"], str(one["sampler"])))
    output_dir.mkdir(parents=True, exist_ok=True)
    _write(output_dir, rows)
    return rows


def forget_replaced(output_dir: Path, weights: dict[tuple[int | None, str], str]) -> None:
    """Drop what was measured of a step whose weights, of this hash, are others by now: two runs are not one line."""
    rows = read_results(output_dir)
    kept = [row for row in rows if weights.get((row["step"], row["weights"]), row["sha256"]) == row["sha256"]]
    if len(kept) < len(rows):
        logger.warning("%d rows of %s are of earlier weights and are removed", len(rows) - len(kept), RESULTS)
        _write(output_dir, kept)


def _write(output_dir: Path, rows: list[Row]) -> None:
    columns = [*KEYS, *metric_columns(rows)]
    write_atomically(output_dir / RESULTS, as_csv(columns, rows))
    write_atomically(output_dir / AS_JSON, json.dumps([_without_blanks(one) for one in rows], indent=2) + "\n")
    write_atomically(output_dir / BEST, as_csv(["metric", "best", *KEYS], best_scores(rows)))


def metric_columns(rows: list[Row]) -> list[str]:
    """Every metric of the table, those of one number of images together."""
    names = dict.fromkeys(name for row in rows for name in row if name not in KEYS)
    return sorted(names, key=lambda name: int(name.partition("@")[2]))


def best_scores(rows: list[Row]) -> list[Row]:
    """For every metric and method its best row. A spread has no best, nor has what is not of the samples."""
    best = []
    for name in metric_columns(rows):
        if name.partition("@")[0].endswith("_std") or name.startswith("classifier_accuracy@"):
            continue
        methods: dict[tuple, list[Row]] = {}
        for row in rows:
            if row.get(name) is not None:
                methods.setdefault(method_of(row), []).append(row)
        choose = min if is_lower_better(name) else max
        winners = [choose(scored, key=lambda row: row[name]) for scored in methods.values()]
        best += [{"metric": name, "best": winner[name], **{key: winner[key] for key in KEYS}} for winner in winners]
    return best


def method_of(row: Row) -> tuple:
    """How a row was measured: only what agrees in this can be compared."""
    return tuple(row[part] for part in METHOD)


def is_lower_better(name: str) -> bool:
    return re.split("[_@]", name)[0] in LOWER_IS_BETTER


def log_to_tensorboard(logs: Path, measured: Measured, metrics: dict[str, float]) -> None:
    """Scalars beside the training's curves: a folder for every method, since a curve must not join two of them."""
    from torch.utils.tensorboard import SummaryWriter

    parts = [str(part) for part in method_of(asdict(measured)) if part not in (None, "no")]
    with SummaryWriter(logs / "evaluation" / re.sub(r"[^\w.=]+", "-", " ".join(parts))) as writer:
        for name, value in metrics.items():
            writer.add_scalar(name, value, measured.step)


def describe_result(measured: Measured, metrics: dict[str, float]) -> str:
    """One measurement for a person: what it is of, and a line for every metric."""
    what = [measured.images]
    if measured.sampler is not None:
        method = " ".join(filter(None, [measured.sampler, f"{measured.steps} steps", measured.settings]))
        what += [f"weights={measured.weights}", method]
    lines = [", ".join([*what, f"{measured.num_images} images"]), f"against {measured.reference}"]
    width = max(map(len, metrics))
    for name, value in metrics.items():
        if "_std@" in name:
            continue
        spread = metrics.get(name.replace("@", "_std@"))
        text = f"{value:.5g}" + ("" if spread is None else f" +- {spread:.3g}")
        lines.append(
            f"  {name.ljust(width)}  {text.ljust(20)} {'lower' if is_lower_better(name) else 'higher'} is better"
        )
    return "\n".join(lines)


def describe_rows(rows: list[Row], count: int) -> str:
    """The headline numbers of every row with this many images, as a table."""
    names = [
        name
        for name in metric_columns(rows)
        if (name.endswith(f"@{count}") and "_std@" not in name) or name.startswith("classifier_accuracy@")
    ]
    shown = [row for row in rows if row["num_images"] == count]
    scales = {id(row): scale_of(row) for row in shown}
    guided = ["guidance"] if any(scale is not None for scale in scales.values()) else []
    header = ["step", "train_seconds", "weights", "sampler", "steps", *guided, *names]
    lines = [header, *([_cell({**row, "guidance": scales[id(row)]}.get(name)) for name in header] for row in shown)]
    return as_text(lines)


def scale_of(row: Row) -> float | None:
    """The guidance scale of a row of a conditional run, which is among the settings of its sampler."""
    settings = dict(part.partition("=")[::2] for part in (row["settings"] or "").split())
    return float(settings["guidance_scale"]) if "guidance_scale" in settings else None


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _key(row: Row) -> tuple:
    return tuple(row[name] for name in KEYS if name not in ("images", "train_seconds"))


def _value(name: str, text: str | None) -> str | int | float | None:
    if not text:
        return None
    if name in ("step", "steps", "num_images"):
        return int(text)
    return float(text) if name == "train_seconds" or METRIC.fullmatch(name) else text


def as_text(lines: list[list[str]]) -> str:
    """Cells in columns, for a person."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def as_csv(columns: Sequence[str], rows: list[dict[str, object]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _without_blanks(row: Row) -> Row:
    return {name: value for name, value in row.items() if value is not None}
