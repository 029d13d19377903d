"""Several runs in one plot, and how long each took to the same FID, or the same distance in other features."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from common.errors import UserError
from common.files import make_folder, write_atomically
from evaluation.curves import DISTANCES, Line, draw, metric_of, named
from evaluation.results import METHOD, RESULTS, Row, as_csv, as_text, read_results

logger = logging.getLogger(__name__)

LEVELS = 5
# Data have other fingerprints on other machines: that is said, not refused.
COMPARED = tuple(part for part in METHOD if part != "reference_fingerprint")


def compare_runs(runs: list[str], output_dir: Path) -> None:
    """Draw the runs' distances together and print the time to each of some levels that all of them reach."""
    folders = {run: Path(run).expanduser().resolve() for run in runs}
    if len(set(folders.values())) < len(runs):
        raise UserError(f"--compare {' '.join(runs)}: one run is named twice")
    tables = {}
    for run, folder in folders.items():
        rows = [row for row in read_results(folder) if row["step"] is not None]
        if not rows:
            raise UserError(f"--compare {run}: there are no measured checkpoints ({RESULTS}); measure it first")
        tables[folder.name if folder.name not in tables else str(folder)] = rows
    key = common_key(tables)
    metric, distance = key[0], metric_of(key[0])
    used = {row["reference_fingerprint"] for rows in tables.values() for row in rows if is_of(row, key)}
    if len(used) > 1:
        logger.warning("The runs were measured against data that are called the same, but are other files or copies")
    by_seconds = {name: line_of(rows, key, "train_seconds") for name, rows in tables.items()}
    by_step = {name: line_of(rows, key, "step") for name, rows in tables.items()}
    make_folder(output_dir)
    method = zip(COMPARED, key[1:], strict=True)
    title = ", ".join([metric, *(named(part, value) for part, value in method if value not in (None, "no"))])
    for lines, against, name in (
        (by_seconds, "train_seconds", f"{distance.upper()}_vs_TrainingSeconds.png"),
        (by_step, "step", f"{distance.upper()}_vs_TrainingSteps.png"),
    ):
        draw(output_dir / name, lines, distance, against, published={}, title=title)
        print(output_dir / name)
    table = times_to_levels(by_seconds, distance)
    write_atomically(output_dir / f"time_to_{distance}.csv", as_csv(list(table[0]), table))
    lines = [list(table[0]), *([f"{value:.5g}" for value in row.values()] for row in table)]
    print(f"\n{title}\n\n{as_text(lines)}\n\nSeconds of training until the line between two checkpoints first crosses.")


def common_key(tables: dict[str, list[Row]]) -> tuple:
    """A distance with the number of images and the method that all runs were measured with; of several, the one of
    the most images, and FID before its other modes and other features."""
    keys = [
        {
            (name, *(row[part] for part in COMPARED))
            for row in rows
            for name, value in row.items()
            if metric_of(name) in DISTANCES and value is not None and row["train_seconds"] is not None
        }
        for rows in tables.values()
    ]
    shared = set.intersection(*keys)
    if not shared:
        had = "; ".join(
            f"{run}: {' and '.join(sorted(_describe(key) for key in found)) or 'no FID and time of training'}"
            for run, found in zip(tables, keys, strict=True)
        )
        raise UserError(
            f"--compare: no number of images, sampler and reference that all runs were measured with ({had})"
        )
    return max(shared, key=lambda key: (int(key[0].partition("@")[2]), _rank(key[0]), str(key)))


def _rank(name: str) -> int:
    return 2 if name.startswith("fid@") else int(metric_of(name) == "fid")


def _describe(key: tuple) -> str:
    return " ".join(str(part) for part in key if part is not None)


def line_of(rows: list[Row], key: tuple, against: str) -> Line:
    metric = key[0]
    return sorted((row[against], row[metric]) for row in rows if is_of(row, key) and row[against] is not None)


def is_of(row: Row, key: tuple) -> bool:
    return row.get(key[0]) is not None and tuple(row[part] for part in COMPARED) == key[1:]


def times_to_levels(lines: dict[str, Line], distance: str) -> list[dict[str, float]]:
    """For levels from where the last run begins to what all of them reach: the seconds of each, and how many times
    as fast it is as the first run."""
    reached = max(min(value for _, value in line) for line in lines.values())
    begun = min(line[0][1] for line in lines.values())
    levels = [reached]
    if begun > reached > 0:
        step = math.log(begun / reached) / LEVELS
        levels = [reached * math.exp(step * number) for number in range(LEVELS - 1, -1, -1)]
    table = []
    for level in levels:
        seconds = {name: time_to(line, level) for name, line in lines.items()}
        first = next(iter(seconds.values()))
        row = {distance: level} | {f"{name} seconds": value for name, value in seconds.items()}
        rest = list(seconds)[1:]
        table.append(row | {f"{name} speed-up": first / seconds[name] for name in rest if seconds[name]})
    return table


def time_to(line: Line, level: float) -> float:
    """Where a line first comes down to a level, straight between its points."""
    before: tuple[float, float] | None = None
    for seconds, value in line:
        if value <= level:
            if before is None or value == before[1]:
                return seconds
            share = (before[1] - level) / (before[1] - value)
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    raise ValueError(f"the line does not come down to {level}")
