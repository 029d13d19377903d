"""Race training methods against one another: train, measure, compare, draw.

    python -m benchmarks.race benchmarks/races/toy.yaml

One run at a time, seed by seed. Every run and every number is kept as soon as it is there: start the same command again
to go on with a race that was stopped. What is measured is in benchmarks/results/race, one JSON a run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.race.plan import Entry, Race, points_of, read_race, require
from common.errors import RunFailed, UserError, run_script
from common.files import lock, write_atomically
from common.interruption import EXIT_INTERRUPTED, Interrupted, run_child, stops_deferred

if TYPE_CHECKING:
    from benchmarks.race.measure import Judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the race: methods, seeds, data, budget, measurements")
    parser.add_argument("--methods", nargs="+", help="run only these methods; the report still has all results")
    parser.add_argument("--seeds", nargs="+", type=int, help="run only these seeds")
    parser.add_argument("--report_only", action="store_true", help="only draw and tabulate the results so far")
    parser.add_argument(
        "--check_precision", metavar="MEASUREMENT", help="repeat it for one snapshot, in float32 and not compiled"
    )
    arguments = parser.parse_args()
    race = read_race(arguments.file)
    for name in ("methods", "seeds"):
        for one in getattr(arguments, name) or []:
            require(one in getattr(race, name), f"--{name}", one, f"one of {', '.join(map(str, getattr(race, name)))}")
    if arguments.check_precision:
        check_precision(race, arguments.check_precision)
    elif arguments.report_only:
        if not any(race.result_of(entry) for entry in race.entries):
            raise UserError(f"--report_only: there are no results of {race.name} in {race.results} yet")
    else:
        from benchmarks.race.record import check_options

        check_options(race, arguments.file)
        methods, seeds = arguments.methods or race.methods, arguments.seeds or race.seeds
        run_race(race, [entry for entry in race.entries if entry.method in methods and entry.seed in seeds])
    from benchmarks.race.report import write_report

    write_report(race)


def run_race(race: Race, entries: list[Entry]) -> None:
    """Train and measure what has no result yet."""
    from benchmarks.race import record
    from benchmarks.race.report import write_report

    for entry in entries:  # all of them, before hours of work
        record.check_result(race, entry)
    torch.set_num_threads(race.threads)
    judge = None
    for number, entry in enumerate(entries, start=1):
        if not record.missing(race, entry):
            continue
        print(f"{entry.name} ({number} of {len(entries)})", flush=True)
        folder = record.plan_file(race, entry).parent
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder, "race")
        if not race.result_of(entry):  # else it has been trained
            plan = record.make_plan(race, entry)
            if not record.is_trained(race, entry):
                train(entry, plan, race.threads)
        judge = judge or make_judge(race)
        measure(race, entry, judge)
        write_report(race)


def make_judge(race: Race) -> Judge:
    from benchmarks.race.measure import Judge
    from benchmarks.race.record import config_of

    # Of the data alone, whatever a method's options are.
    return Judge(race, config_of(replace(race, methods={"": {}}), Entry("", race.seeds[0])))


def train(entry: Entry, plan: Path, threads: int) -> None:
    """Train in a process of its own, or go on with a run that was stopped; a stop is the training's to save first."""
    command = [sys.executable, "-m", "benchmarks.race.train", str(plan)]
    with stops_deferred():
        code = run_child(command, {**os.environ, "OMP_NUM_THREADS": str(threads)})
    if code == EXIT_INTERRUPTED:
        raise Interrupted(entry.name, "stopped in its training; start the same command again to continue")
    if code == UserError.exit_code:
        raise UserError(f"{entry.name} cannot be trained: the line above says why")
    if code != 0:
        raise RunFailed(f"{entry.name} ended with {code}; start the same command again to continue")


def measure(race: Race, entry: Entry, judge: Judge) -> None:
    """Make the measurements that a run still lacks, each of which is kept at once."""
    from benchmarks.race import record
    from benchmarks.race.train import snapshots_of

    result = {"method": entry.method, "seed": entry.seed, "length": entry.length, **record.definition(race, entry)}
    result |= {"measured_with": record.measured_with(race), **record.summary_of(race, entry)}
    points = points_of(race.result_of(entry) or {})
    snapshots = {
        round(numbers["time"], 3): (folder, numbers) for folder, numbers in snapshots_of(race.runs / entry.name)
    }
    measurements, config = {one.name: one for one in race.measurements}, record.config_of(race, entry)
    for time, name in record.missing(race, entry):
        folder, numbers = snapshots[time]
        point = points.setdefault(time, dict(numbers))
        point[name] = judge.measure(folder, measurements[name], config)
        print(f"  {time:g} {race.unit}: {name} FID {point[name]['fid']:.2f}", flush=True)
        result["points"] = [points[time] for time in sorted(points)]
        race.results.mkdir(parents=True, exist_ok=True)
        write_atomically(race.result_file(entry), json.dumps(result, indent=1) + "\n")
        record.forget_weights(race, entry)


def check_precision(race: Race, name: str) -> None:
    """Measure the end of a run in float32, not compiled, beside what the race measured of the same weights."""
    from benchmarks.race import record
    from benchmarks.race.report import PRECISION
    from benchmarks.race.train import snapshot_of

    measurements = {one.name: one for one in race.measurements}
    require(name in measurements, "--check_precision", name, f"one of {', '.join(measurements)}")
    for entry in race.entries:
        time = race.time(entry.length)
        point = points_of(race.result_of(entry) or {}).get(time, {})
        folder = snapshot_of(race.runs / entry.name, time)
        if name in point and folder.exists():
            break
    else:
        raise UserError(f"--check_precision {name}: no run has been measured so at its end, or its weights are gone")
    judge = make_judge(replace(race, mixed_precision="no", compile=False))
    exact = judge.measure(folder, measurements[name], record.config_of(race, entry))
    known = {"run": entry.name, "time": time, **record.measured_with(race), "measured": point[name], "float32": exact}
    path = race.results / PRECISION
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_atomically(path, json.dumps({**kept, name: known}, indent=1) + "\n")
    print(f"{entry.name}, {name}: FID {point[name]['fid']:.3f}, in float32 {exact['fid']:.3f}", flush=True)


if __name__ == "__main__":
    sys.argv[0] = "benchmarks.race"  # as usage and errors call it
    run_script(main)
