#!/usr/bin/env python
"""Measure moving averages of many lengths of one run, made afterwards, beside constant decays that it tracked.

    python -m benchmarks.ema_length digits
    python -m benchmarks.ema_length cifar10_16 --steps 3000

All averages are of the same training: the constant decays, and power functions of the same lengths to compare the
reconstructed ones with, are tracked beside those that --ema power keeps. The numbers go to
benchmarks/results/ema_length.json, the picture of all in there to docs/ema_length.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.short_runs import DATA, QUIET, ShortRunJudge, method_of, train_short
from common.files import sha256, write_atomically
from common.plots import COLOURS, drawing
from run_folder.checkpoints import POWER_LENGTHS, WEIGHTS, power_exponent, snapshot_files
from run_folder.ema_length import combination, profiles_of
from run_folder.folder import RunFolder
from run_folder.saved_model import SavedModel, find_models
from training.setup import Run
from training.update import ExactEMA, PowerEMA, tensors_of

ROOT = Path(__file__).parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "ema_length.json", ROOT / "docs" / "ema_length.png"
DECAYS = (0.99, 0.995, 0.999, 0.9999)
LENGTHS = (0.015, 0.03, 0.05, 0.1, 0.15, 0.25)
SNAPSHOTS = 40
TRAINED = "trained.json"  # in the run's folder, once it is trained


def track_more(run: Run) -> list[ExactEMA]:
    """Track constant decays and power functions beside the run's own averages, which alone are saved."""
    unet, averages = run.state.unet, run.state.update.averages
    constant = [ExactEMA(unet, beta=decay, min_value=decay) for decay in DECAYS]
    power = [PowerEMA(unet, length) for length in LENGTHS if length not in POWER_LENGTHS]
    averages += constant + power
    return averages


def distance(some: torch.nn.Module, others: torch.nn.Module) -> float:
    """Return the norm of the difference of all weights."""
    pairs = zip(tensors_of(some), tensors_of(others), strict=True)
    return sum((one.double() - other.double()).square().sum().item() for one, other in pairs) ** 0.5


def kept_beside(model: SavedModel, folder: Path) -> SavedModel:
    """Return a network that is kept in a folder of its own as a model like another of the same run."""
    return replace(model, weights=folder.name, network_folder=folder, sha256=sha256(folder / WEIGHTS))


def errors_of(run: Run, models: dict[float, SavedModel]) -> list[dict[str, float]]:
    """Compare the reconstructed averages with those that were tracked."""
    tracked = {one.length: one.ema_model for one in run.state.update.averages if isinstance(one, PowerEMA)}
    files, step, found = snapshot_files(Path(run.config.output_dir)), run.state.step, []
    for length, model in models.items():
        error = distance(model.load(torch.device("cpu")), tracked[length])
        unmet = combination(*profiles_of(files), step, power_exponent(length))[1]
        scale = distance(run.state.unet, tracked[length])
        found.append({"length": length, "profile_unmet": unmet, "error_over_distance_to_raw": error / scale})
    return found


def train(name: str, steps: int, folder: Path) -> dict[str, object]:
    """Train the run, keep the constant decays beside it, and return what there is to say of it."""
    length = [f"--max_train_steps={steps}", f"--checkpointing_steps={steps // SNAPSHOTS}", "--ema=power"]
    run = train_short([*DATA[name], *length, *QUIET, f"--output_dir={folder}"], track_more)
    for decay, average in zip(DECAYS, run.state.update.averages[len(POWER_LENGTHS) :], strict=False):
        average.ema_model.save_pretrained(folder / f"constant-{decay}", safe_serialization=True)
    models = dict(zip(LENGTHS, find_models(str(folder), [], None, LENGTHS), strict=True))
    files = snapshot_files(folder).values()
    return {
        "steps": steps, "batch": run.sizes.total, "train_seconds": round(run.state.train_seconds, 1),
        "snapshots": len(files), "parameters": run.state.unet.num_parameters(),
        "megabytes_of_snapshots": round(sum(path.stat().st_size for path in files) / 1e6, 1),
        "reconstruction": errors_of(run, models),
    }  # fmt: skip


def measure(name: str, steps: int, how: dict[str, object], rows: list[dict]) -> Iterator[dict[str, object]]:
    """Measure all averages of one run that are not among the rows; yield what is known after each."""
    folder = Path("runs") / "ema_length" / name
    trained = folder / TRAINED
    if not trained.exists():
        write_atomically(trained, json.dumps(train(name, steps, folder)))
    found = {**json.loads(trained.read_text()), **how, "rows": rows}
    (newest,), (raw,) = find_models(str(folder), [], None), find_models(str(folder), [], "raw")
    models = {("raw", None): raw}
    models |= {("power", one): model for one, model in
               zip(LENGTHS, find_models(str(folder), [], None, LENGTHS), strict=True)}  # fmt: skip
    models |= {("constant", decay): kept_beside(newest, folder / f"constant-{decay}") for decay in DECAYS}
    known = {(row["average"], row["value"]) for row in rows}
    judge = ShortRunJudge(RunFolder(folder).read_config(), distances=True)
    for (kind, value), model in models.items():
        if (kind, value) not in known:
            measured = judge.measure(model, method_of(how["sampler"], model), how["images"])
            rows.append({"average": kind, "value": value, **measured})
            yield found


def draw(results: dict[str, dict]) -> None:
    """Draw FID and KID over the length, with the constant decays as levels."""
    with drawing(PICTURE, rows=len(results), columns=2, panel_width=5) as (_, panels):
        for (name, found), row in zip(results.items(), panels, strict=True):
            for axes, metric in zip(row, ("fid", "kid"), strict=True):
                points = [(one["value"], one[metric]) for one in found["rows"] if one["average"] == "power"]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label="reconstructed")
                highest = 2.5 * min(value for _, value in points)
                others = [one for one in found["rows"] if one["average"] != "power"]
                for one, colour in zip(others, COLOURS[1:], strict=False):
                    if one[metric] <= highest:
                        label = "raw weights" if one["average"] == "raw" else f"constant {one['value']}"
                        axes.axhline(one[metric], color=colour, linewidth=1, linestyle="--", label=label)
                axes.set(xscale="log", xlabel=r"length $\sigma_{rel}$", ylabel=metric.upper())
                axes.set_xticks(LENGTHS, [f"{length:g}" for length in LENGTHS])
                axes.minorticks_off()
                axes.legend(fontsize=7, frameon=True, framealpha=1)
                axes.set_title(f"{name}, {found['steps']:,} steps, {found['images']:,} images, {found['sampler']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sampler", default="DDIM-50", help="DDIM-50 or DDPM-100, for example")
    parser.add_argument("--images", type=int, default=1000)
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    how, before = {"sampler": arguments.sampler, "images": arguments.images}, results.get(arguments.data, {})
    rows = before["rows"] if before.items() >= how.items() else []
    for found in measure(arguments.data, arguments.steps, how, rows):
        results[arguments.data] = found
        write_atomically(RESULTS, json.dumps(results, indent=1) + "\n")
        print(found["rows"][-1], flush=True)
    draw(results)


if __name__ == "__main__":
    main()
