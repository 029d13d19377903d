"""The report of a race: pictures, race.md and its entry in race_summary.json."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from scipy.stats import kendalltau, spearmanr

from benchmarks.race.analysis import SHARES, Curve, Speed, compare, exponent
from benchmarks.race.plan import RESULTS, Entry, Measurement, Race, points_of
from common.files import in_turn, write_atomically
from common.plots import COLOURS, LINES, NOTE, drawing, legend_beside

METRICS = {"fid": "FID", "kid": "KID x 1000", "precision": "precision", "recall": "recall"}
SUMMARY = RESULTS / "race_summary.json"
PRECISION = "precision.json"
TICKS = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)  # of an axis that does not span many decades
FEWEST_SEEDS, FEWEST_METHODS = 2, 3  # for an interval, and for a ranking


@dataclass(frozen=True)
class Table:
    """What has been measured of a race in one way: FID and the rest by method, seed and time."""

    race: Race
    measurement: Measurement
    points: dict[str, dict[int, dict[float, dict]]]

    @classmethod
    def read(cls, race: Race, measurement: Measurement, results: list[dict]) -> Table:
        points: dict[str, dict[int, dict[float, dict]]] = defaultdict(dict)
        for result in results:
            found = {time: point for time, point in points_of(result).items() if measurement.name in point}
            if found:
                points[result["method"]][result["seed"]] = found
        # In the order of the race, whichever run came first.
        return cls(race, measurement, {method: points[method] for method in race.methods if method in points})

    def values(self, method: str, time: float, metric: str = "fid") -> dict[int, float]:
        """Return a number of a method at a time, by seed."""
        own = self.points.get(method, {})
        return {seed: own[seed][time][self.measurement.name][metric] for seed in own if time in own[seed]}

    def mean(self, method: str, time: float) -> float:
        """Return the geometric mean of FID over seeds, as curves are compared by their logarithms."""
        return float(np.exp(np.mean(np.log(list(self.values(method, time).values())))))

    def times(self, method: str) -> list[float]:
        """Return the times that all seeds of a method have come to, so that no mean is of other seeds than the next."""
        return sorted(set.intersection(*(set(points) for points in self.points[method].values())))

    def curves(self, metric: str = "fid") -> dict[str, dict[int, Curve]]:
        """Return the curves of every run that has been measured to its end, by FID or by KID."""
        keys = ("time", "train_seconds") if self.race.unit == "steps" else ("train_seconds", "step")
        curves: dict[str, dict[int, Curve]] = defaultdict(dict)
        for method, by_seed in self.points.items():
            length = self.race.lengths.get(method, 1.0)
            wanted = self.race.times(self.measurement, Entry(method, 0, length))
            for seed, points in by_seed.items():
                # A step so long that several times came in it has the same weights for all of them.
                different = {point["step"]: point for point in points.values()}.values()
                values = [point[self.measurement.name][metric] for point in different]
                # An unbiased KID can be negative, and has no logarithm then.
                if len(different) > 1 and max(points) >= max(wanted, default=0) and min(values) > 0:
                    times, others = ([point[key] for point in different] for key in keys)
                    curves[method][seed] = Curve.fit(times, values, others)
        return curves

    def speeds(self, share: float, seeds: set[int] | None = None, metric: str = "fid") -> dict[str, Speed]:
        """Return how soon methods come to the baseline's FID or KID at a share of the budget, in all seeds or these."""
        curves = self.curves(metric)
        if seeds is not None:
            curves = {method: {seed: own[seed] for seed in seeds & own.keys()} for method, own in curves.items()}
        baseline = curves.get(self.race.baseline, {})
        compared = {method: compare(own, baseline, self.race.budget, share) for method, own in curves.items()}
        return {method: speed for method, speed in compared.items() if speed}


def write_report(race: Race) -> None:
    """Draw and tabulate what has been measured so far."""
    results = [result for entry in race.entries if (result := race.result_of(entry))]
    tables = [Table.read(race, measurement, results) for measurement in race.measurements]
    tables = [table for table in tables if table.points]
    if not tables:
        return
    of_ddpm = [table for table in tables if table.measurement.sampler == "ddpm"] or tables
    densest = max(of_ddpm, key=lambda table: max(len(table.times(method)) for method in table.points))
    for table in tables:
        draw(table, race.results / ("race.png" if table is densest else f"{table.measurement.name}.png"))
    if all("draws" in result for result in results):
        draw_draws(race, densest, results)
    write_atomically(race.results / "race.md", page(race, tables, results))
    if entry := summary_of(of_ddpm[0]):
        with in_turn(SUMMARY.parent):
            summary = json.loads(SUMMARY.read_text(encoding="utf-8")) if SUMMARY.exists() else {}
            write_atomically(SUMMARY, json.dumps(summary | {race.name: entry}, indent=1) + "\n")


def summary_of(table: Table) -> dict | None:
    """Return how soon our method, or the fastest, comes to the baseline's FID at the whole budget, and the best other.

    Methods with one seed are left out; the others are compared over the seeds that all of them have finished.
    """
    race = table.race
    curves = {method: own for method, own in table.curves().items() if len(own) >= FEWEST_SEEDS}
    seeds = set.intersection(*(set(own) for own in curves.values())) if curves else set()
    if len(seeds) < FEWEST_SEEDS or race.baseline not in curves:
        return None
    speeds = table.speeds(1.0, seeds)
    others = sorted(curves.keys() & speeds.keys() - {race.baseline}, key=lambda method: speeds[method].ratio)
    ours = race.ours or next(iter(others), None)
    if ours not in others:
        return None
    best_other = next((method for method in others if method != ours), race.baseline)
    speed = speeds[ours]
    return {
        "method": ours, "time_ratio": speed.ratio, "low": speed.low, "high": speed.high, "seeds": speed.seeds,
        "best_other": best_other, "time_ratio_best_other": speeds[best_other].ratio, "reached": speed.reached,
        "bounds": speed.bounds, "unit": race.unit, "budget": race.budget, "measurement": table.measurement.name,
    }  # fmt: skip


# The picture.


def draw(table: Table, path: Path) -> None:
    """Draw FID over time: the mean of the seeds and their spread, and the targets."""
    race, budget = table.race, table.race.time(1.0)
    times = {method: table.times(method) for method in table.points if table.times(method)}
    if not times:
        return
    # The legend is read from the top as the curves are where most of them end.
    shared = {method: max((time for time in own if time <= budget), default=own[-1]) for method, own in times.items()}
    order = sorted(times, key=lambda method: -table.mean(method, shared[method]))
    with drawing(path, panel_width=7.5) as (_, panels):
        axes = panels.item()
        axes.set(title=f"{race.name}: {table.measurement.name}", xscale="log", yscale="log")
        axes.set(xlabel=f"{race.unit} of training", ylabel="FID, mean and range of the seeds")
        for method in order:
            means = [table.mean(method, time) for time in times[method]]
            spreads = [table.values(method, time).values() for time in times[method]]
            style = style_of(race, method)
            label = f"{method} ({len(table.points[method])})"
            axes.plot(times[method], means, marker="o", markersize=2.5, label=label, **style)
            lows, highs = [min(one) for one in spreads], [max(one) for one in spreads]
            axes.fill_between(times[method], lows, highs, color=style["color"], alpha=0.15, linewidth=0)
        for share in SHARES:
            if race.time(share) in times.get(race.baseline, []):
                target = table.mean(race.baseline, race.time(share))
                axes.axhline(target, color=NOTE, linewidth=0.8, linestyle=(0, (1, 3)))
                place = {"xy": (1, target), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
                text = f"{race.baseline} at {share:.0%} of the budget"
                # Below the line, from which curves that fall have gone at the right.
                axes.annotate(text, **place, xytext=(0, -2), ha="right", va="top", fontsize=7, color=NOTE)
        axes.xaxis.set_major_locator(FixedLocator([race.budget * 2.0**power for power in range(-6, 6)]))
        low, high = axes.get_ylim()
        if high / low < 2:  # few round numbers of a logarithmic axis are in between
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        else:
            axes.yaxis.set_major_locator(LogLocator(subs=TICKS if high / low < 20 else (1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        legend_beside(panels, "method (seeds)")


def draw_draws(race: Race, table: Table, results: list[dict]) -> None:
    """Draw where each method's draws went in the end, and the FID that it came to: the best is named first."""
    by_method = {result["method"]: result["draws"] for result in results if result["method"] in table.points}
    end = {method: table.mean(method, table.times(method)[-1]) for method in by_method if table.times(method)}
    with drawing(race.results / "draws.png", panel_width=7.5) as (_, panels):
        axes = panels.item()
        axes.set(title=f"{race.name}: draws at the end", xlabel="log SNR", ylabel="share of the draws, in equal bins")
        for method in sorted(end, key=end.get):
            draws, label = by_method[method], f"{method}: FID {end[method]:.1f}"
            axes.plot(draws["log_snr"], draws["probability"], label=label, **style_of(race, method))
        legend_beside(panels, "method")


def style_of(race: Race, method: str) -> dict[str, object]:
    """Give a method the same looks in all pictures of a race: the baseline is black, and ours is bold."""
    *colours, black = COLOURS
    if method == race.baseline:
        return {"color": black, "linestyle": "-", "linewidth": 2.2}
    others = [name for name in race.methods if name != race.baseline]
    line, colour = divmod(others.index(method), len(colours))
    width = 2.6 if method == race.ours else 1.4
    return {"color": colours[colour], "linestyle": LINES[line % len(LINES)], "linewidth": width}


# The tables.


def page(race: Race, tables: list[Table], results: list[dict]) -> str:
    """Write race.md."""
    lines = [f"# {race.name}", "", f"Budget: {race.budget:g} {race.unit}; written by `python -m benchmarks.race`.", ""]
    for table in tables:
        lines += [f"## {table.measurement.name}", "", *target_lines(table), "", *equal_time_lines(table), ""]
    lines += ["## Cost", "", *cost_lines(race, results), ""]
    lines += agreement_lines(tables) + precision_lines(race)
    return "\n".join(lines).rstrip() + "\n"


def as_table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def target_lines(table: Table) -> list[str]:
    race, curves = table.race, table.curves()
    if len(race.times(table.measurement, Entry(race.baseline, race.seeds[0]))) == 1:
        return ["Made once in a run: a single point has no time to a target."]
    speeds, by_kid = [table.speeds(share) for share in SHARES], table.speeds(1.0, metric="kid")
    if not speeds[-1]:
        return [f"No run of {race.baseline} has been measured to its end yet."]
    other = "seconds" if race.unit == "steps" else "steps"
    rows = []
    end = table.race.time(1.0)
    for method in sorted(speeds[-1], key=lambda method: (speeds[-1][method].ratio, table.mean(method, end))):
        cells = [cell_of(of_share[method]) if method in of_share else "" for of_share in speeds]
        slope = np.mean([exponent(curve) for curve in curves[method].values()])
        last = speeds[-1][method]
        rows.append(
            [method, str(last.seeds), *cells, kid_cell(by_kid, method, last.seeds), f"{last.other:.2f}", f"{slope:.2f}"]
        )
    columns = [f"{share:.0%} of the budget" for share in SHARES]
    head = ["method", "seeds", *columns, "100%, by KID", f"100%, in {other}", "FID ~ time^-a"]
    return [f"Share of the budget of {race.baseline} to its own FID at:", "", *as_table(head, rows)]


def cell_of(speed: Speed) -> str:
    """Write a ratio with its interval; what a run did not show, sooner or later, is said."""
    if not speed.reached:
        return "not reached"
    bounds = f" ({speed.low:.2f} to {speed.high:.2f})" if speed.seeds >= FEWEST_SEEDS else ""
    short = "" if speed.reached == speed.seeds else f", reached by {speed.reached} of {speed.seeds}"
    word = "at least " if short else "at most " if speed.bounds else ""
    return f"{word}{speed.ratio:.2f}{bounds}{short}"


def kid_cell(speeds: dict[str, Speed], method: str, seeds: int) -> str:
    """Write the ratio by KID, and of how many seeds it is if some have a KID below 0."""
    if method not in speeds:
        return "a KID is below 0"
    fewer = f", {speeds[method].seeds} of {seeds} seeds" if speeds[method].seeds < seeds else ""
    return cell_of(speeds[method]) + fewer


def equal_time_lines(table: Table) -> list[str]:
    """Compare all metrics at the targets' times and at the ends of runs, the best FID first."""
    race, name = table.race, table.measurement.name
    rows = []
    for time in sorted({race.time(share) for share in {*SHARES, *race.lengths.values()}}):
        found = [method for method in table.points if table.values(method, time)]
        for method in sorted(found, key=lambda method: table.mean(method, time)):
            by_metric = {metric: list(table.values(method, time, metric).values()) for metric in METRICS}
            by_metric["kid"] = [1000 * value for value in by_metric["kid"]]
            rows.append([f"{time:g}", method, str(len(by_metric["fid"])), *map(spread, by_metric.values())])
    return [f"{name} at equal time, mean and deviation over seeds:", ""] + as_table(
        [race.unit, "method", "seeds", *METRICS.values()], rows
    )


def spread(values: list[float]) -> str:
    """Write a mean and a deviation, to a place that the deviation justifies."""
    if len(values) < FEWEST_SEEDS:
        return f"{values[0]:.4g}"
    deviation = np.std(values, ddof=1)
    places = max(0, 1 - math.floor(math.log10(deviation))) if deviation > 0 else 2
    return f"{np.mean(values):.{places}f} ± {deviation:.{places}f}"


def cost_lines(race: Race, results: list[dict]) -> list[str]:
    """Tell what methods did with their time, as means over seeds."""
    keys = ("steps", "train_seconds", "images_per_second", "timestep_sampler_share")
    by_method = {method: [one for one in results if one["method"] == method] for method in race.methods}
    means = {
        method: {key: np.mean([one[key] for one in own]) for key in keys} for method, own in by_method.items() if own
    }
    baseline, rows = means.get(race.baseline), []
    for method, mean in means.items():
        relative = f"{mean['images_per_second'] / baseline['images_per_second']:.3f}" if baseline else ""
        length, share = f"{race.lengths.get(method, 1.0):g}", f"{mean['timestep_sampler_share']:.2%}"
        speeds = f"{mean['images_per_second']:.0f}", relative
        rows.append([method, length, f"{mean['steps']:.0f}", f"{mean['train_seconds']:.0f}", *speeds, share])
    head = ["method", "budgets", "steps", "seconds", "images/s", f"of {race.baseline}'s", "timestep sampler's share"]
    return as_table(head, rows)


def agreement_lines(tables: list[Table]) -> list[str]:
    """Tell whether two measurements rank the methods alike by their FID at equal time, over the runs that have both."""
    rows = []
    for one, other in combinations(tables, 2):
        for share in SHARES:
            time, means = one.race.time(share), []
            for method in one.points.keys() & other.points.keys():
                first, second = one.values(method, time), other.values(method, time)
                if seeds := first.keys() & second.keys():
                    means.append([np.mean([np.log(by_seed[seed]) for seed in seeds]) for by_seed in (first, second)])
            if len(means) >= FEWEST_METHODS:
                kendall, spearman = (rank(*np.transpose(means)).statistic for rank in (kendalltau, spearmanr))
                names = one.measurement.name, other.measurement.name
                rows.append([*names, f"{time:g}", str(len(means)), f"{kendall:.2f}", f"{spearman:.2f}"])
    if not rows:
        return []
    unit = tables[0].race.unit
    head = ["one", "other", unit, "methods", "Kendall's tau", "Spearman's rho"]
    return ["## Do the measurements agree?", "", "Rank correlation of the methods' FID:", "", *as_table(head, rows), ""]


def precision_lines(race: Race) -> list[str]:
    """State what the precision of sampling and features, and compiling them, change in FID."""
    path = race.results / PRECISION
    if not path.exists():
        return []
    rows = []
    for name, known in json.loads(path.read_text(encoding="utf-8")).items():
        fids = known["measured"]["fid"], known["float32"]["fid"]
        settings = known["mixed_precision"] + (", compiled" if known["compile"] else "")
        rows.append([known["run"], name, settings, *(f"{fid:.3f}" for fid in fids), f"{fids[0] / fids[1] - 1:+.2%}"])
    head = ["run", "measurement", "measured in", "FID", "FID in float32", "error"]
    return ["## Precision", "", "The same weights and seeds, measured both ways:", "", *as_table(head, rows), ""]
