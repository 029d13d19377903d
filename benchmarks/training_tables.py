"""The tables of the documentation that are about trainings: races, ablations, moving averages and loud colours.

`python -m benchmarks.tables` writes them between their marks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.measuring import ROOT
from benchmarks.race.analysis import Speed, compare
from benchmarks.race.plan import Measurement, Race, read_race
from benchmarks.race.report import Table, as_table, cell_of, kid_cell, spread

ABLATIONS = {"digits": "ablations_digits", "CIFAR-10, 16x16": "ablations_16"}
# What each method of these races is, and the FID of the paper's CIFAR-10; a dash where its training was unstable.
NOT_IN_PAPER = "not in the paper"
OBJECTIVES = {
    "mean_L_learned": ("mean", "L, learned variance", "23.69"),
    "mean_L": ("mean", "L, fixed variance", "13.22"),
    "mean_simple": ("mean", "squared error", "-"),
    "epsilon_L_learned": ("epsilon", "L, learned variance", "-"),
    "epsilon_L": ("epsilon", "L, fixed variance", "13.51"),
    "epsilon_simple": ("epsilon", "squared error (L_simple)", "3.17"),
    "epsilon_hybrid": ("epsilon", "L_hybrid, learned range", NOT_IN_PAPER),
    "epsilon_L_resampled": ("epsilon", "L, learned range, resampled", NOT_IN_PAPER),
}
# Each has a table of its own, `race_<name>`.
RACES = ("cifar10_16_screen", "cifar10_16_field", "cifar10_16_ideas", "cifar10_32_screen", "cifar10_32_long")
RACES += ("cifar10_32_small_first", "cifar10_32_small_batches", "animals_32_small_first")
# Of these also the errors by noise level, `errors_<name>`.
ERRORS = ("cifar10_32_screen", "cifar10_32_small_first")
LOOKED_AT = [f"cifar10_32_ddpm_250-{run}" for run in ("uniform-3-2000", "small_first-3-x0.5-1000")]
# Races of our methods against uniform timesteps, and what they are of.
OUR_METHODS = ("log_snr", "saturating_bound", "small_first")
OUR_RACES = {
    "digits": "digits, 8x8",
    "cifar10_16_ideas": "CIFAR-10, 16x16",
    "cifar10_16_screen": "CIFAR-10, 16x16",
    "cifar10_16_long": "CIFAR-10, 16x16",
    "cosine": "CIFAR-10, 16x16, cosine schedule",
    "animals_16": "photos of animals, 16x16",
    "cifar10_32_screen": "CIFAR-10, 32x32",
    "cifar10_32_small_first": "CIFAR-10, 32x32",
    "cifar10_32_small_batches": "CIFAR-10, 32x32, batches of 16",
    "cifar10_32_long": "CIFAR-10, 32x32",
    "animals_32_small_first": "photos of animals, 32x32",
}


def read(results: Path, name: str) -> dict:
    """Read what a benchmark has written, or nothing."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(as_table(head, rows)) + "\n"


# Races.


def tables_of(results: Path, name: str) -> Iterator[tuple[Race, Measurement, Table]]:
    """Yield what a race has measured so far, in each way that it measures."""
    race = read_race(ROOT / "benchmarks" / "races" / f"{name}.yaml")
    found = [run for entry in race.entries if (run := read(results / "race" / name, entry.name))]
    for measurement in race.measurements:
        yield race, measurement, Table.read(race, measurement, found)


def race_table(results: Path, name: str) -> str:
    """Return FID over time, KID, recall, and the time to the baseline's FID and KID at the end; the best FID first."""
    race, measurement, table = next(tables_of(results, name))
    end, speeds, by_kid = race.time(1.0), table.speeds(1.0), table.speeds(1.0, metric="kid")
    times = [time for time in table.times(race.baseline) if time <= end] if race.baseline in table.points else []
    finished = [method for method in table.points if table.values(method, end)]
    rows = []
    for method in sorted(finished, key=lambda one: table.mean(one, end)):
        fids = [list(table.values(method, time).values()) for time in times]
        kid, recalls = (list(table.values(method, end, metric).values()) for metric in ("kid", "recall"))
        shares = ["1", "1"] if method == race.baseline else shares_of(method, speeds, by_kid)
        cells = [spread(one) if one else "" for one in (*fids, [1000 * value for value in kid])]
        rows.append([f"`{method}`", str(len(recalls)), *cells, f"{fmean(recalls):.2f}", *shares])
    columns = [f"{fid_of(measurement)} after {time:,.0f}" if time == times[0] else f"{time:,.0f}" for time in times]
    share = f"share of the budget of {race.baseline} to its last FID"
    return lines(["method", "seeds", *columns, "KID x 1000", "recall", share, "to its last KID"], rows)


def shares_of(method: str, speeds: dict[str, Speed], by_kid: dict[str, Speed]) -> list[str]:
    """Return how soon a method comes to the baseline's last FID and KID."""
    if method not in speeds:
        return ["", ""]
    return [cell_of(speeds[method]), kid_cell(by_kid, method, speeds[method].seeds)]


def fid_of(measurement: Measurement) -> str:
    return f"FID@{measurement.num_images}"


def races(results: Path) -> str:
    """Return how soon our methods come to uniform's last FID and KID, and both at equal time, on all data."""
    rows, measured = [], set()
    for name, images in OUR_RACES.items():
        race, measurement, table = next(tables_of(results, name))
        end, speeds, by_kid = race.time(1.0), table.speeds(1.0), table.speeds(1.0, metric="kid")
        measured.add(fid_of(measurement))
        for method in OUR_METHODS:
            if method in speeds:
                seeds = sorted(table.values(method, end).keys() & table.values(race.baseline, end).keys())
                row = [images, f"{end:,.0f}", f"`{method}`", str(len(seeds))]
                shares = shares_of(method, speeds, by_kid)
                for metric, scale, share in zip(("fid", "kid"), (1, 1000), shares, strict=True):
                    both = [table.values(one, end, metric) for one in (race.baseline, method)]
                    row += [spread([scale * values[seed] for seed in seeds]) for values in both] + [share]
                if row not in rows:  # a run may be in several races
                    rows.append(row)
    (fid,) = measured  # FIDs of other numbers of images cannot stand in one table
    columns = [f"{fid} of `uniform`", "of the method", "share of the budget to the FID of `uniform`"]
    columns += ["KID x 1000 of `uniform`", "of the method", "share of the budget to the KID of `uniform`"]
    return lines(["images", "steps", "method", "seeds", *columns], rows)


def more_images(results: Path) -> str:
    """Return what each method of the race comes to at its own end, by few images and few steps and by more of both."""
    rows = []
    for race, measurement, table in tables_of(results, "cifar10_32_ddpm_250"):
        for method in table.points:
            length = race.lengths.get(method, 1.0)
            end = race.time(length)
            values = {metric: spread([*table.values(method, end, metric).values()]) for metric in ("fid", "recall")}
            kid = spread([1000 * value for value in table.values(method, end, "kid").values()])
            sampling = f"{measurement.num_images:,}, {measurement.num_inference_steps}"
            rows.append([sampling, f"`{method}`", f"{length:.0%}", values["fid"], kid, values["recall"]])
    return lines(["images, DDPM steps", "method", "of the budget", "FID", "KID x 1000", "recall"], rows)


def corrected(results: Path) -> str:
    """Return what FID and KID become once one flaw of the images of a run is corrected."""
    rows = []
    for name in LOOKED_AT:
        one = read(results, f"corrected/{name}")
        for correction, numbers in one.get("corrected", {}).items():
            loudness = numbers["variance of mean colours"] / one["training images"]["variance of mean colours"]
            run = f"`{one['method']}` after {one['steps']:,} steps"
            values = (f"{numbers['fid']:.1f}", f"{1000 * numbers['kid']:.1f}", f"{numbers['recall']:.2f}")
            rows.append([run, correction, *values, f"{loudness:.2f}"])
    head = ["images of", "corrected", "FID", "KID x 1000", "recall", "variance of mean colours, of that of the data"]
    return lines(head, rows)


def frequencies(results: Path) -> str:
    """Return the error of epsilon at the lowest frequencies and above, by noise level, beside the Wiener filter's."""
    rows, shown = [], (-8, -6, -4, -2, 0)
    for name in LOOKED_AT:
        one = read(results, f"frequencies/{name}")
        levels = {level["log_snr"]: level for level in one.get("levels", [])}
        for frequency, what in ((0, "the mean"), (1, "one cycle"), (4, "four cycles")) if levels else ():
            run, filters = f"`{one['method']}` after {one['steps']:,} steps", "the Wiener filter"
            errors = [f"{levels[level]['error'][frequency]:.2g}" for level in shown]
            rows.append([what, run, *errors])
            if name == LOOKED_AT[-1]:
                rows.append([what, filters, *(f"{levels[level]['wiener'][frequency]:.2g}" for level in shown)])
    rows.sort(key=lambda row: ("the mean", "one cycle", "four cycles").index(row[0]))
    return lines(["error of epsilon in", "by", *(f"log SNR {level}" for level in shown)], rows)


def learning_rates(results: Path) -> str:
    """Return the FID at the end of the race over learning rates, and how soon log_snr is at the best of uniform."""
    race, _, table = next(tables_of(results, "cifar10_16_learning_rates"))
    end, found = race.time(1.0), {}
    for method in table.points:
        own = race.training | race.methods[method]
        found[own.get("timestep_sampler", "uniform"), own["learning_rate"]] = method
    rates = sorted({rate for _, rate in found})
    rows = []
    for sampler in ("uniform", "log_snr"):
        methods = [found.get((sampler, rate)) for rate in rates]
        cells = [spread(list(table.values(method, end).values())) if method else "" for method in methods]
        rows.append([f"`{sampler}`", *cells])
    table_lines = lines(["sampler", *(f"learning rate {rate:g}" for rate in rates)], rows)
    of_uniform = [
        (table.mean(method, end), method, rate) for (name, rate), method in found.items() if name != race.ours
    ]
    if not of_uniform:
        return table_lines
    fid, method, rate = min(of_uniform)
    curves = table.curves()
    share = cell_of(compare(curves[race.ours], curves[method], end, 1.0))
    said = f"With the learning rate of the other races `log_snr` comes to the best FID of `uniform`, {fid:.1f} with a "
    return table_lines + f"\n{said}learning rate of {rate:g}, after {share} of the steps.\n"


def errors_by_level(results: Path, name: str) -> str:
    """Return the mean error of epsilon at every second noise level, over the second half of a race's runs."""
    race = read_race(ROOT / "benchmarks" / "races" / f"{name}.yaml")
    found = {
        entry.method: draws
        for entry in race.entries
        if (draws := read(results, f"race/{race.name}/{entry.name}").get("draws"))
    }
    levels = next(iter(found.values()), {"log_snr": []})["log_snr"]
    shown = range(1, len(levels) - 1, 2)
    rows = []
    for method, draws in found.items():
        # (epsilon error)^2 = SNR / (SNR + 1) (v error)^2
        predicts_v = race.methods[method].get("prediction_type") == "v_prediction"
        ratios = [1 / (1 + math.exp(-levels[level])) if predicts_v else 1 for level in shown]
        measured = [draws["loss"][level] for level in shown]
        losses = [None if loss is None else ratio * loss for loss, ratio in zip(measured, ratios, strict=True)]
        rows.append([f"`{method}`", *("" if loss is None else f"{1000 * loss:.3g}" for loss in losses)])
    least = {one["log_snr"]: one["error"] for one in read(results, f"optimum/{race.name}").get("levels", [])}
    if least:
        known = (least.get(levels[level]) for level in shown)
        rows.append(["the least possible", *("" if error is None else f"{1000 * error:.2g}" for error in known)])
    return lines(["1000 x error at a log SNR of", *(f"{levels[level]:.1f}" for level in shown)], rows)


def attribution(results: Path) -> str:
    """Return FID at 32x32 of images by the network of log_snr, with that of uniform in one band of log SNR."""
    rows = []
    for band, one in read(results, "attribution/cifar10_32_screen-log_snr-uniform-0").get("bands", {}).items():
        where = {"none": "nowhere", "all": "everywhere"}.get(band, f"where log SNR is {band}")
        rows.append([f"`uniform` {where}", f"{one['fid']:.1f}", f"{one['precision']:.2f}"])
    return lines(["images by `log_snr`, but by", "FID", "precision"], rows)


def ablations(results: Path) -> str:
    """Return the FID at the end of the races over Table 2 of Ho et al. 2020, beside the paper's."""
    tables = {
        f"{data}, {measurement.name}": (race.time(1.0), table)
        for data, name in ABLATIONS.items()
        for race, measurement, table in tables_of(results, name)
    }
    rows = []
    for method, known in OBJECTIVES.items():
        fids = [table.mean(method, end) if table.values(method, end) else None for end, table in tables.values()]
        rows.append([*known, *("" if fid is None else f"{fid:.1f}" for fid in fids)])
    return lines(["predicted", "objective", "Ho et al., CIFAR-10", *tables], rows)


# Short runs.


def ema_reconstruction(results: Path) -> str:
    """Return how far reconstructed averages are from those that were tracked."""
    found = read(results, "ema_length")
    by_length: dict[float, list[str]] = {}
    for run in found.values():
        for one in run["reconstruction"]:
            unmet, error = one["profile_unmet"], one["error_over_distance_to_raw"]
            by_length.setdefault(one["length"], []).extend([f"{unmet:.1%}", f"{error:.1%}"])
    head = ["length", *(f"{data}: {what}" for data in found for what in ("profile unmet", "distance"))]
    return lines(head, [[f"{length:g}", *cells] for length, cells in sorted(by_length.items())])


def ema_averages(results: Path) -> str:
    """Return FID, KID and how loud the colours are with every average of the weights, for each run."""
    metrics = {"FID": _fid, "KID x 1000": _kid, "variance of colours": _variance}
    return _rows_by_run(read(results, "ema_length"), ("average", "value"), metrics)


def loud_colours(results: Path) -> str:
    """Return how much the mean colours of generated images vary, over how much the data's do."""
    return _rows_by_run(read(results, "loud_colours"), ("what", "option", "sampler"), {"": _variance})


def _fid(row: dict) -> str:
    return f"{row['fid']:.1f}"


def _kid(row: dict) -> str:
    return f"{1000 * row['kid']:.1f}"


def _variance(row: dict) -> str:
    return f"{row['colour_variance']:.2f}"


def _rows_by_run(found: dict, names: tuple[str, ...], metrics: dict[str, Callable[[dict], str]]) -> str:
    """Return a table with a row for what has the same names in all runs, and the columns of each run beside it."""
    cells: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for run, of_run in found.items():
        for row in of_run["rows"]:
            key = tuple("" if row[name] is None else str(row[name]) for name in names)
            cells.setdefault(key, {})[run] = [write(row) for write in metrics.values()]
    head = [*names, *(f"{run}: {metric}".removesuffix(": ") for run in found for metric in metrics)]
    rows = [
        [*key, *(cell for run in found for cell in by_run.get(run, [""] * len(metrics)))]
        for key, by_run in cells.items()
    ]
    return lines(head, rows)


TABLES: dict[str, Callable[[Path], str]] = {
    **{f"race_{name}": partial(race_table, name=name) for name in RACES},
    "races": races,
    "learning_rates": learning_rates,
    "attribution": attribution,
    **{f"errors_{name}": partial(errors_by_level, name=name) for name in ERRORS},
    "ablations": ablations,
    "ema_reconstruction": ema_reconstruction,
    "more_images": more_images,
    "corrected": corrected,
    "frequencies": frequencies,
    "ema_averages": ema_averages,
    "loud_colours": loud_colours,
}
