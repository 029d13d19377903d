"""The report of a race: race.png, race.md and its entry in race_summary.json."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np

from benchmarks.race.analysis import SHARES, Curve, Speed, compare, exponent
from benchmarks.race.plan import RESULTS, Measurement, Race
from common.files import write_atomically
from common.plots import single_panel

METRICS = {"fid": "FID", "kid": "KID x 1000", "precision": "precision", "recall": "recall"}
SUMMARY = RESULTS / "race_summary.json"


def write_report(race: Race) -> None:
    """Draw and tabulate what has been measured so far."""
    results = [result for entry in race.entries() if (result := race.results_of(entry))]
    if not results:
        return
    first = race.measurements[0]
    draw(race, results, first)
    write_atomically(race.results / "race.md", tables(race, results))
    summary = json.loads(SUMMARY.read_text(encoding="utf-8")) if SUMMARY.exists() else {}
    if entry := summary_of(race, results, first):
        summary[race.name] = entry
        write_atomically(SUMMARY, json.dumps(summary, indent=1) + "\n")


def curves_of(race: Race, results: list[dict], measurement: Measurement) -> dict[str, dict[int, Curve]]:
    """Return every method's curve of every seed, over the time that the race is run in."""
    curves: dict[str, dict[int, Curve]] = defaultdict(dict)
    for result in results:
        points = [point for point in result["points"] if measurement.name in point]
        if len(points) > 1:
            times = [time_of(race, point) for point in points]
            curves[result["method"]][result["seed"]] = Curve.fit(times, [p[measurement.name]["fid"] for p in points])
    return curves


def time_of(race: Race, point: dict) -> float:
    return point["step"] if race.unit == "steps" else point["train_seconds"]


def summary_of(race: Race, results: list[dict], measurement: Measurement) -> dict | None:
    """Return the fastest method and the best of the others, by time to the baseline's FID at the whole budget."""
    speeds = speeds_of(race, results, measurement, 1.0)
    ranking = sorted((speed.ratio, method) for method, speed in speeds.items() if method != race.baseline)
    if not ranking:
        return None
    winner = ranking[0][1]
    speed = speeds[winner]
    other = ranking[1] if len(ranking) > 1 else (1.0, race.baseline)
    return {
        "method": winner, "time_ratio": speed.ratio, "low": speed.low, "high": speed.high, "seeds": speed.seeds,
        "best_other": other[1], "time_ratio_best_other": other[0], "unit": race.unit, "budget": race.budget,
        "measurement": measurement.name,
    }  # fmt: skip


def speeds_of(race: Race, results: list[dict], measurement: Measurement, share: float) -> dict[str, Speed]:
    curves = curves_of(race, results, measurement)
    compared = {method: compare(own, curves[race.baseline], race.budget, share) for method, own in curves.items()}
    return {method: speed for method, speed in compared.items() if speed}


def draw(race: Race, results: list[dict], measurement: Measurement) -> None:
    """Draw FID over time: the mean of the seeds, and their spread."""
    by_method: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for point in result["points"]:
            if measurement.name in point:
                by_method[result["method"]][point["time"]].append(point[measurement.name]["fid"])
    labels = f"{race.name}: {measurement.name}", f"{race.unit} of training", "FID", "method"
    with single_panel(race.results / "race.png", *labels, xscale="log", yscale="log") as axes:
        for method, points in by_method.items():
            times = sorted(points)
            (line,) = axes.plot(times, [np.exp(np.mean(np.log(points[time]))) for time in times], label=method)
            lows, highs = zip(*((min(points[time]), max(points[time])) for time in times), strict=True)
            axes.fill_between(times, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)


def tables(race: Race, results: list[dict]) -> str:
    """Write the tables: times to the targets, and every metric at equal time."""
    lines = [f"# {race.name}", "", f"Budget: {race.budget:g} {race.unit}; written by `python -m benchmarks.race`.", ""]
    for measurement in race.measurements:
        lines += [f"## {measurement.name}", "", *target_table(race, results, measurement), ""]
        lines += [*metric_table(race, results, measurement), ""]
    lines += ["## Cost", "", "| method | seed | steps | seconds | images/s | sampler's share |", f"|{'---|' * 6}"]
    for result in results:
        share = f"{result['timestep_sampler_share']:.2%}"
        numbers = f"{result['steps']} | {result['train_seconds']:.0f} | {result['images_per_second']:.0f} | {share}"
        lines.append(f"| {result['method']} | {result['seed']} | {numbers} |")
    return "\n".join(lines) + "\n"


def target_table(race: Race, results: list[dict], measurement: Measurement) -> list[str]:
    columns = [f"{share:.0%} of the budget" for share in SHARES]
    lines = [f"Share of the time of {race.baseline} to its own FID at:", ""]
    lines += [f"| method | {' | '.join(columns)} | FID ~ time^-a |", f"|{'---|' * (len(columns) + 2)}"]
    curves = curves_of(race, results, measurement)
    for method, own in curves.items():
        cells = []
        for share in SHARES:
            speed = compare(own, curves[race.baseline], race.budget, share)
            cells.append("" if speed is None else cell_of(speed))
        slopes = np.mean([exponent(curve) for curve in own.values()])
        lines.append(f"| {method} | {' | '.join(cells)} | {slopes:.2f} |")
    return lines


def cell_of(speed: Speed) -> str:
    bounds = f" ({speed.low:.2f} to {speed.high:.2f})" if speed.seeds > 1 else ""
    short = "" if speed.reached == speed.seeds else f", reached by {speed.reached} of {speed.seeds}"
    return f"{speed.ratio:.2f}{bounds}{short}"


def metric_table(race: Race, results: list[dict], measurement: Measurement) -> list[str]:
    lines = [f"| method | {race.unit} | seeds | {' | '.join(METRICS.values())} |", f"|{'---|' * (len(METRICS) + 3)}"]
    for method in race.methods:
        own = [result for result in results if result["method"] == method]
        for time in sorted({point["time"] for result in own for point in result["points"]}):
            points = [point for result in own for point in result["points"] if point["time"] == time]
            found = [point[measurement.name] for point in points if measurement.name in point]
            if found:
                cells = [spread([one[name] * (1000 if name == "kid" else 1) for one in found]) for name in METRICS]
                lines.append(f"| {method} | {time:g} | {len(found)} | {' | '.join(cells)} |")
    return lines


def spread(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{deviation}"
