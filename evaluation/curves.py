"""Curves over a run. A line never joins different numbers of images."""

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter

from common.plots import NOTE, drawing
from evaluation.metrics import CONDITION_ACCURACY, FD, FID, FIRST_STEPS, KID, METRICS, SECONDS, SPREAD, Metric
from evaluation.results import Row, comparable_rows, ema_length_of, guidance_scale_of
from run_folder.folder import METHOD, is_of_few_images, is_repeated

FIRST = 25
LOGARITHMIC_RATIO = 5  # a distance that falls by so much is drawn on a logarithmic axis

# CIFAR-10, 50,000 samples against the training set: Ho et al. 2020, and others' runs of the same.
PUBLISHED = {
    "fid@50000": {
        "Ho et al. 2020": 3.17,
        "Ho et al., raw weights (pesser)": 12.14,
        "diffusers' script, 250K steps, DDIM-128": 17.0,
        "EDM": 1.97,
    },
    "is@50000": {"Ho et al. 2020": 9.46},
}
PUBLISHED_REFERENCE = re.compile(r"cifar[-_]?10(?!\d).*\b50000 images of 32x32", re.IGNORECASE)

Line = list[tuple[float, float]]


class Mean(float):
    """A value that is the mean over several sets of images, with their standard deviation."""

    spread: float


def draw_run(output_dir: Path, rows: list[Row]) -> list[Path]:
    """Draw the plots of a run: over steps, over seconds of training, and the first steps again if there are many."""
    rows = [row for row in rows if row["step"] is not None and ema_length_of(row) is None]
    steps = sorted({row["step"] for row in rows})
    drawn = []
    for metric in METRICS:
        for curve in metric.curves:
            path = output_dir / f"{metric.name.upper()}_vs_{curve}.png"
            if curve == FIRST_STEPS and len(steps) <= FIRST:
                continue
            shown = [row for row in rows if row["step"] in steps[:FIRST]] if curve == FIRST_STEPS else rows
            against = "train_seconds" if curve == SECONDS else "step"
            lines = lines_of(shown, metric, against)
            if lines:
                draw(path, lines, metric, against, published_for(shown, metric))
                drawn.append(path)
    return drawn


def draw_guidance(output_dir: Path, rows: list[Row]) -> list[Path]:
    """Draw distance and share of samples that show what was asked for against the guidance scale, at the last step."""
    rows = [row for row in rows if guidance_scale_of(row) is not None and row["step"] is not None]
    last = max((row["step"] for row in rows), default=None)
    points = [{**row, "guidance_scale": guidance_scale_of(row)} for row in rows if row["step"] == last]
    for point in points:  # of one line, whatever their guidance scale
        point["settings"] = re.sub(r" ?guidance_scale=\S+", "", point["settings"])
    shown = [metric for metric in (FID, FD, CONDITION_ACCURACY) if lines_of(points, metric, "guidance_scale")]
    if len({point["guidance_scale"] for point in points}) < 2 or not shown:
        return []
    path = output_dir / f"{shown[0].name.upper()}_vs_Guidance.png"
    draw_panels(path, points, shown, "guidance_scale", f"guidance scale (1 is none), step {last}")
    return [path]


def draw_lengths(output_dir: Path, rows: list[Row]) -> list[Path]:
    """Draw the distances against the length of the moving average, at the last step of which several were measured."""
    rows = [row for row in rows if ema_length_of(row) is not None and row["step"] is not None]
    last = max((row["step"] for row in rows), default=None)
    # Of one line, whatever their length.
    points = [{**row, "ema_length": ema_length_of(row), "weights": "ema"} for row in rows if row["step"] == last]
    shown = [metric for metric in (FID, FD, KID) if lines_of(points, metric, "ema_length")]
    if len({point["ema_length"] for point in points}) < 2 or not shown:
        return []
    path = output_dir / f"{shown[0].name.upper()}_vs_EMALength.png"
    draw_panels(path, points, shown, "ema_length", f"length of the moving average, as a share of the {last} steps")
    return [path]


def draw_panels(path: Path, points: list[Row], metrics: list[Metric], against: str, xlabel: str) -> None:
    """Draw a panel for each metric over what the points differ in."""
    with drawing(path, rows=len(metrics), sharex=True) as (_, panels):
        for axes, metric in zip(panels.flat, metrics, strict=True):
            for label, line in lines_of(points, metric, against).items():
                plot(axes, line).set_label(label)
            axes.set_ylabel(metric.label)
            axes.legend(fontsize=8)
        panels[-1, 0].set_xlabel(xlabel)


def lines_of(rows: list[Row], metric: Metric, against: str) -> dict[str, Line]:
    """Return a line for every number of images and every method; their labels say what distinguishes them."""
    groups = comparable_rows(rows, [metric]).items()
    lines = {key: line for key, some in groups if (line := line_of(some, key[0], against))}
    varying = [(name, place) for place, name in enumerate(METHOD, start=1) if len({key[place] for key in lines}) > 1]
    return {
        ", ".join([in_words(key[0]), *(describe_setting(name, key[place]) for name, place in varying)]): line
        for key, line in lines.items()
    }


def line_of(rows: list[Row], column: str, against: str) -> Line:
    """Return the points of rows that were measured alike, in order."""
    return sorted((row[against], value_of(row, column)) for row in rows if row[against] is not None)


def value_of(row: Row, column: str) -> float:
    """Return a metric of a row, with its spread if it was measured on several sets of images."""
    spread = row.get(column.replace("@", SPREAD)) if is_repeated(row) else None
    if spread is None:
        return row[column]
    mean = Mean(row[column])
    mean.spread = spread
    return mean


def in_words(column: str) -> str:
    """Return a column as pictures name it: a distance of few images is marked."""
    return f"{column} (few images)" if is_of_few_images(column) else column


def describe_setting(name: str, value: object) -> str:
    """Return a part of a method as it is read without its name."""
    return f"{value} steps" if name == "steps" else str(value)


def published_for(rows: list[Row], metric: Metric) -> dict[str, float]:
    """Return published numbers if all that is drawn of these rows was measured on the same data and as many images."""
    drawn = comparable_rows(rows, [metric], ["reference"])
    if all(PUBLISHED_REFERENCE.search(str(reference)) for _, reference in drawn):
        columns = {column for column, _ in drawn}
        for published, levels in PUBLISHED.items():
            count = published.partition("@")[2]
            if published in columns and all(column.endswith(f"@{count}") for column in columns):
                return levels
    return {}


def draw(
    path: Path, lines: dict[str, Line], metric: Metric, against: str, published: dict[str, float], title: str = ""
) -> None:
    """Draw lines over steps or seconds, the best point of each in a ring; published numbers as levels."""
    best = min if metric.lower_is_better else max
    with drawing(path, panel_width=7) as (_, panels):
        axes = panels[0, 0]
        for label, line in lines.items():
            x, y = best(line, key=lambda point: point[1])
            curve = plot(axes, line)
            axes.plot(x, y, "o", markersize=9, markerfacecolor="none", color=curve.get_color())
            curve.set_label(f"{label}: best {y:.4g}")
        for label, value in published.items():
            axes.axhline(value, color=NOTE, linewidth=1, linestyle="--")
            place = {"xy": (0.005, value), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(f"{label}: {value}", **place, xytext=(0, 2), fontsize=7, color=NOTE)
        values = [value for line in lines.values() for _, value in line]
        if metric in (FID, FD) and max(values) > LOGARITHMIC_RATIO * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(ScalarFormatter())
            axes.tick_params(axis="y", which="minor", labelsize=7)
            axes.grid(which="minor")
        axes.margins(y=0.1)
        axes.set(xlabel="training step" if against == "step" else "seconds of training", ylabel=metric.label)
        axes.set_title(title, fontsize=8, color=NOTE)
        axes.legend(fontsize=8)


def plot(axes: Axes, line: Line) -> Line2D:
    """Plot a line, with bars of one standard deviation where several sets of images were measured."""
    (curve,) = axes.plot(*zip(*line, strict=True), marker="o", markersize=4)
    if means := [(x, value) for x, value in line if isinstance(value, Mean)]:
        bars = [value.spread for _, value in means]
        axes.errorbar(*zip(*means, strict=True), yerr=bars, fmt="none", ecolor=curve.get_color(), capsize=3)
    return curve
