"""Several runs in one plot, and how long each took to the same FID, or the same distance in other features."""

import logging
import math
from itertools import pairwise
from pathlib import Path

from common.errors import UserError
from common.files import make_folder, write_atomically
from evaluation.curves import Line, describe_setting, draw, in_words, line_of
from evaluation.metrics import FD, FID, SECONDS, STEPS, metric_of
from evaluation.results import RESULTS, Row, as_csv, as_text, comparable_rows, read_results
from run_folder.folder import METHOD

logger = logging.getLogger(__name__)

LEVELS = 5
# Data have other fingerprints on other machines: that is a warning, not an error.
COMPARED = tuple(part for part in METHOD if part != "reference_fingerprint")


def compare_runs(runs: list[str], output_dir: Path) -> None:
    """Draw the runs' distances together and print the time to each of some levels that all of them reach."""
    key, rows_of_runs = find_common_rows(read_tables(runs))
    column, metric = key[0], metric_of(key[0])
    if len({row["reference_fingerprint"] for rows in rows_of_runs.values() for row in rows}) > 1:
        logger.warning("The runs were measured against data that are called the same, but are other files or copies")
    by_seconds = {name: line_of(rows, column, "train_seconds") for name, rows in rows_of_runs.items()}
    by_step = {name: line_of(rows, column, "step") for name, rows in rows_of_runs.items()}
    make_folder(output_dir)
    method = [pair for pair in zip(COMPARED, key[1:], strict=True) if pair[1] not in (None, "no")]
    title = ", ".join([in_words(column), *(describe_setting(*pair) for pair in method)])
    for lines, against, curve in ((by_seconds, "train_seconds", SECONDS), (by_step, "step", STEPS)):
        path = output_dir / f"{metric.name.upper()}_vs_{curve}.png"
        draw(path, lines, metric, against, published={}, title=title)
        print(path)
    table = times_to_levels(by_seconds, metric.name)
    write_atomically(output_dir / f"time_to_{metric.name}.csv", as_csv(list(table[0]), table))
    lines = [list(table[0]), *([f"{value:.5g}" for value in row.values()] for row in table)]
    print(f"\n{title}\n\n{as_text(lines)}\n\nSeconds of training until the line between two checkpoints first crosses.")


def read_tables(runs: list[str]) -> dict[str, list[Row]]:
    """Read what was measured of the runs' checkpoints, by the names of their folders, or the paths of namesakes."""
    folders = {run: Path(run).expanduser().resolve() for run in runs}
    if len(set(folders.values())) < len(runs):
        raise UserError(f"--compare {' '.join(runs)}: one run is named twice")
    tables: dict[str, list[Row]] = {}
    for run, folder in folders.items():
        rows = [row for row in read_results(folder) if row["step"] is not None]
        if not rows:
            raise UserError(f"--compare {run}: there are no measured checkpoints ({RESULTS}); measure it first")
        tables[folder.name if folder.name not in tables else str(folder)] = rows
    return tables


def find_common_rows(tables: dict[str, list[Row]]) -> tuple[tuple, dict[str, list[Row]]]:
    """Find a distance that all runs were measured with in the same way: `(column, *method)`, and the rows of each."""
    groups = {}
    for run, rows in tables.items():
        found = comparable_rows(rows, (FID, FD), COMPARED).items()
        groups[run] = {key: some for key, some in found if line_of(some, key[0], "train_seconds")}
    shared = set.intersection(*map(set, groups.values()))
    if not shared:
        measured = []
        for run, keys in groups.items():
            names = sorted(" ".join(str(part) for part in key if part is not None) for key in keys)
            measured.append(f"{run}: {' and '.join(names) or 'no FID and time of training'}")
        failure = "--compare: no number of images, sampler and reference that all runs were measured with"
        raise UserError(f"{failure} ({'; '.join(measured)})")

    def preference(key: tuple) -> tuple:  # the most images, then FID before its other modes and other features
        column, _, count = key[0].partition("@")
        return int(count), (metric_of(key[0]) == FID) + (column == "fid"), str(key)

    key = max(shared, key=preference)
    return key, {run: found[key] for run, found in groups.items()}


def times_to_levels(lines: dict[str, Line], distance: str) -> list[dict[str, float]]:
    """Return the seconds of each run to some levels, and how many times as fast it is as the first run."""
    reached = max(min(value for _, value in line) for line in lines.values())  # by all
    begun = min(line[0][1] for line in lines.values())  # by the last
    levels = [reached]
    if begun > reached > 0:
        step = math.log(begun / reached) / LEVELS
        levels = [reached * math.exp(step * number) for number in range(LEVELS - 1, -1, -1)]
    table = []
    for level in levels:
        seconds = {name: time_to(line, level) for name, line in lines.items()}
        first, *others = seconds
        row = {distance: level} | {f"{name} seconds": value for name, value in seconds.items()}
        table.append(row | {f"{name} speed-up": seconds[first] / seconds[name] for name in others if seconds[name]})
    return table


def time_to(line: Line, level: float) -> float:
    """Return where a line first comes down to a level that it reaches, straight between its points."""
    if line[0][1] <= level:
        return line[0][0]
    (start, before), (end, after) = next(ends for ends in pairwise(line) if ends[1][1] <= level)
    return start + (before - level) / (before - after) * (end - start)
