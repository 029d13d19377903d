"""Race training methods against one another: train, measure, compare, draw.

    python -m benchmarks.race benchmarks/races/digits.yaml

One run at a time, seed by seed. Every run and every number is kept as soon as it is there: start the same command again
to go on with a race that was stopped. What is measured is in benchmarks/results/race, one JSON a run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.race.plan import ROOT, Entry, Race, read_race
from common.errors import RunFailed, run_script
from common.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the race: methods, seeds, data, budget, measurements")
    parser.add_argument("--methods", nargs="+", help="run only these; the report is of all that is there")
    parser.add_argument("--seeds", nargs="+", type=int, help="run only these")
    parser.add_argument("--report_only", action="store_true", help="draw and tabulate what is there")
    arguments = parser.parse_args()
    race = read_race(arguments.file)
    if not arguments.report_only:
        chosen = [
            entry
            for entry in race.entries()
            if (arguments.methods is None or entry.method in arguments.methods)
            and (arguments.seeds is None or entry.seed in arguments.seeds)
        ]
        run_race(race, arguments.file, chosen)
    from benchmarks.race.report import write_report

    write_report(race)


def run_race(race: Race, file: Path, entries: list[Entry]) -> None:
    """Train and measure what has no result yet."""
    torch.set_num_threads(race.threads)
    judge = None
    for number, entry in enumerate(entries, start=1):
        result = race.results_of(entry) or {}
        if is_complete(race, entry, result):
            continue
        print(f"{entry.name} ({number} of {len(entries)})", flush=True)
        if not (race.runs / entry.name / "finished.json").exists():
            train(race, file, entry)
        from benchmarks.race.measure import Judge, snapshots_of
        from benchmarks.race.train import config_of

        judge = judge or Judge(race, config_of(race, entry))
        result = {"method": entry.method, "seed": entry.seed, "options": race.methods[entry.method], **result}
        result |= {"training": race.training, "machine": machine(race), **summary_of(race.runs / entry.name)}
        points = {point["time"]: point for point in result.get("points", [])}
        for folder, numbers in snapshots_of(race.runs / entry.name):
            point = points.setdefault(numbers["time"], dict(numbers))
            for measurement in race.measurements:
                wanted = any(abs(numbers["time"] - part * race.budget) < 1e-6 for part in measurement.fractions)
                if wanted and measurement.name not in point:
                    point[measurement.name] = judge.measure(folder, measurement)
                    fid = point[measurement.name]["fid"]
                    print(f"  {numbers['time']:g} {race.unit}: {measurement.name} FID {fid:.2f}", flush=True)
                    result["points"] = [points[time] for time in sorted(points)]
                    race.results.mkdir(parents=True, exist_ok=True)
                    write_atomically(race.result_file(entry), json.dumps(result, indent=1) + "\n")


def is_complete(race: Race, entry: Entry, result: dict) -> bool:
    """Tell whether every measurement of a run has been made."""
    points = {point["time"]: point for point in result.get("points", [])}
    return all(
        measurement.name in points.get(part * race.budget, {})
        for measurement in race.measurements
        for part in measurement.fractions
        if part <= entry.length
    )


def train(race: Race, file: Path, entry: Entry) -> None:
    """Train in a process of its own, or go on with a run that was stopped."""
    command = [sys.executable, "-m", "benchmarks.race.train", str(file), entry.method, str(entry.seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(race.threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode != 0:
        raise RunFailed(f"{entry.name} ended with {done.returncode}; start the same command again to go on")


def summary_of(run: Path) -> dict[str, object]:
    """Return a finished run's length, its speed and the share of its time that the timestep sampler took."""
    numbers = json.loads((run / "finished.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(line["images_per_second"] for line in lines)
    shares = sorted(line.get("timestep_sampler_share", 0.0) for line in lines)
    return {
        "steps": numbers["step"],
        "train_seconds": round(numbers["train_seconds"], 3),
        "images_per_second": speeds[len(speeds) // 2],
        "timestep_sampler_share": sum(shares) / len(shares),
    }


def machine(race: Race) -> dict[str, object]:
    packages = ("torch", "diffusers", "accelerate")
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": race.threads,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


if __name__ == "__main__":
    run_script(main)
