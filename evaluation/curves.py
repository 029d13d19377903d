"""Curves over a run, and several runs against each other. A line never joins different numbers of images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import ScalarFormatter

from common.plots import NOTE, drawing
from evaluation.results import METHOD, scale_of

if TYPE_CHECKING:
    from evaluation.results import Row

FIRST = 25
MANY_TIMES = 5  # a distance that falls so far is drawn on a logarithmic axis
DISTANCES = ("fid", "fd")  # in Inception's features, and in another network's
LABELS = {"fid": "FID", "fd": "Fréchet distance", "is": "Inception Score", "kid": "KID", "as_asked": "share as asked"}

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


def draw_run(output_dir: Path, rows: list[Row], has_score: bool) -> list[Path]:
    """The pictures of a run: over steps, the first of them again, and over seconds of training."""
    rows = [row for row in rows if row["step"] is not None]
    first = sorted({row["step"] for row in rows})[:FIRST]
    early = [row for row in rows if row["step"] in first]
    pictures = {
        "FID_vs_TrainingSteps.png": (rows, "fid", "step"),
        "FID_vs_TrainingSteps_First25.png": (early, "fid", "step"),
        "IS_vs_TrainingSteps.png": (rows, "is", "step"),
        "IS_vs_TrainingSteps_First25.png": (early, "is", "step"),
        "KID_vs_TrainingSteps.png": (rows, "kid", "step"),
        "FID_vs_TrainingSeconds.png": (rows, "fid", "train_seconds"),
        "FD_vs_TrainingSteps.png": (rows, "fd", "step"),
        "FD_vs_TrainingSteps_First25.png": (early, "fd", "step"),
        "FD_vs_TrainingSeconds.png": (rows, "fd", "train_seconds"),
    }
    written = []
    for name, (shown, metric, against) in pictures.items():
        lines = lines_of(shown, metric, against)
        if lines:
            draw(output_dir / name, lines, metric, against, published=published_for(shown, metric))
        elif metric == "is" and not has_score:
            say_that_there_is_none(output_dir / name)
        else:
            continue
        written.append(output_dir / name)
    return written


def draw_guidance(output_dir: Path, rows: list[Row]) -> list[Path]:
    """Distance and share of samples that show what was asked for, against the guidance scale; of the last step."""
    scales = [(scale_of(row), row) for row in rows if scale_of(row) is not None and row["step"] is not None]
    last = max((row["step"] for _, row in scales), default=None)
    points = [
        {**row, "settings": without_scale(row), "guidance_scale": scale} for scale, row in scales if row["step"] == last
    ]
    shown = [metric for metric in (*DISTANCES, "as_asked") if lines_of(points, metric, "guidance_scale")]
    if len({point["guidance_scale"] for point in points}) < 2 or not shown:
        return []
    path = output_dir / f"{shown[0].upper()}_vs_Guidance.png"
    with drawing(path, rows=len(shown), sharex=True) as (_, panels):
        for axes, metric in zip(panels.flat, shown, strict=True):
            for label, line in lines_of(points, metric, "guidance_scale").items():
                axes.plot(*zip(*line, strict=True), marker="o", markersize=4, label=label)
            axes.set_ylabel(LABELS[metric])
            axes.legend(fontsize=8)
        panels[-1, 0].set_xlabel(f"guidance scale (1 is none), step {last}")
    return [path]


def without_scale(row: Row) -> str:
    """The settings of a row's sampler, apart from guidance."""
    return " ".join(part for part in row["settings"].split() if not part.startswith("guidance_scale="))


def lines_of(rows: list[Row], metric: str, against: str) -> dict[str, Line]:
    """A line for every number of images and every method; what distinguishes them is in their labels."""
    groups: dict[tuple, Line] = {}
    for row in rows:
        for name, value in row.items():
            if metric_of(name) == metric and value is not None and row[against] is not None:
                key = (name, *(row[part] for part in METHOD))
                groups.setdefault(key, []).append((row[against], value))
    varying = [position for position in range(1, len(METHOD) + 1) if len({key[position] for key in groups}) > 1]
    return {
        ", ".join([key[0], *(named(METHOD[position - 1], key[position]) for position in varying)]): sorted(line)
        for key, line in groups.items()
    }


def metric_of(name: str) -> str:
    """A column's metric, in whatever mode and by whatever network the images were seen; lines are told apart by the
    whole name."""
    metric = name.partition("@")[0].removesuffix("_clean").removesuffix("_legacy_pytorch")
    return "fd" if metric.startswith("fd_") else metric


def named(part: str, value: object) -> str:
    return f"{value} steps" if part == "steps" else str(value)


def published_for(rows: list[Row], metric: str) -> dict[str, float]:
    """Published numbers, where all that is drawn of these rows was measured on the same data and as many images."""
    drawn = [(name, row) for row in rows for name in row if metric_of(name) == metric and row[name] is not None]
    if all(PUBLISHED_REFERENCE.search(str(row["reference"])) for _, row in drawn):
        for published, levels in PUBLISHED.items():
            number = published.partition("@")[2]
            if all(name.endswith(f"@{number}") for name, _ in drawn) and any(name == published for name, _ in drawn):
                return levels
    return {}


def draw(
    path: Path, lines: dict[str, Line], metric: str, against: str, published: dict[str, float], title: str | None = None
) -> None:
    """Lines over steps or seconds, the best point of each in a ring; published numbers as levels."""
    best = max if metric == "is" else min
    with drawing(path, panel_width=7) as (_, panels):
        axes = panels[0, 0]
        for label, line in lines.items():
            x, y = best(line, key=lambda point: point[1])
            (curve,) = axes.plot(*zip(*line, strict=True), marker="o", markersize=4)
            axes.plot(x, y, "o", markersize=9, markerfacecolor="none", color=curve.get_color())
            curve.set_label(f"{label}: best {y:.4g}")
        for label, value in published.items():
            axes.axhline(value, color=NOTE, linewidth=1, linestyle="--")
            place = {"xy": (0.005, value), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(f"{label}: {value}", **place, xytext=(0, 2), fontsize=7, color=NOTE)
        values = [value for line in lines.values() for _, value in line]
        if metric in DISTANCES and max(values) > MANY_TIMES * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(ScalarFormatter())
            axes.tick_params(axis="y", which="minor", labelsize=7)
            axes.grid(which="minor")
        axes.margins(y=0.1)
        axes.set_xlabel("training step" if against == "step" else "seconds of training")
        axes.set_ylabel(LABELS[metric])
        if title is not None:
            axes.set_title(title, fontsize=8, color=NOTE)
        axes.legend(fontsize=8)


def say_that_there_is_none(path: Path) -> None:
    """The file that somebody looks for, without a number that nobody measured."""
    with drawing(path, panel_width=7) as (_, panels):
        axes = panels[0, 0]
        axes.set_axis_off()
        axes.text(
            0.5, 0.5,
            "Inception Score: not available\n\n"
            "The Inception network found here has no last layer, hence no logits.\n"
            "With inception-2015-12-05.pt (--inception_weights) this picture is drawn.",
            ha="center", va="center", linespacing=1.6,
        )  # fmt: skip
