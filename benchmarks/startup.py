#!/usr/bin/env python
"""How long the scripts take to say --help, to the first batch of CIFAR-10, and to the end of the first step.

    python -m benchmarks.startup

Beside the example of diffusers, which reads the same parquet file. Cold: neither has prepared the images before;
cached: both have. Files are in the system's cache in both cases.

The first batch is timed from the call that asks for the data to the first pass of the network. The two do not do the
same in that time: the example decodes the images of one batch; here all of them are decoded, or found decoded and
whole, and the network is built as well, which the example has done before. The first step is timed from the start of
the process, and holds all that both do. Its processor time is that of the process alone, and
hardly changes when others are at work on the machine.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import (
    NO_EXAMPLE,
    ROOT,
    Result,
    Row,
    Spread,
    Worker,
    add_data,
    add_example,
    describe_network,
    in_turns,
    parser,
    ratios,
    seconds,
    write_images,
    write_result,
)
from benchmarks.training_step import EXAMPLE_SCRIPT, HERE, STEPPING, Case, flags_of_training
from common.errors import run_script

ROUNDS, HELP_ROUNDS = 2, 5
SECONDS_OF_HELP, COLD, CACHED, SHARE_OF_START = 0.6, 1.0, 5.0, 0.5
# What neither script can do without, and no part of the project: the least that a start takes.
LIBRARIES = "transformers.hf_argparser, torch._dynamo, diffusers.models, datasets"
IMPORTS = f"import gc, os; gc.disable(); import {LIBRARIES}; os._exit(0)"
SMALLEST = Case("the smallest network", 32, 8, (), (4, 8))


def start_once(way: str, case: Case, data: Path, cache: Path, example: Path | None) -> dict[str, float]:
    """Run a script to the end of its first step; return the seconds of its first batch, in all, of the processor."""
    number = len(list(cache.parent.glob("start-*")))
    place = cache.parent / f"start-{number}"
    place.mkdir()
    network = describe_network(place / "network.json", case.resolution, case.channels)
    script = ROOT / "train_unconditional.py" if way == HERE else example
    flags = [*flags_of_training(case, network, data, place / "run"), f"--cache_dir={cache}"]
    # `datasets` keeps its tables where it is told to; the project lets it keep them where it always does.
    environment = {"HF_DATASETS_CACHE": str(cache / "datasets")}
    with closing(Worker(way, STEPPING, [script, *flags], place / "log.txt", **environment)) as worker:
        times = worker.answer()
        return {
            "first batch": times["first_batch"] - times["data_asked_for"],
            "first step": times["first_step"] - worker.started,
            "processor": times["processor_seconds"],
        }


def say_help(script: str) -> float:
    """Return the seconds that --help takes."""
    command = [sys.executable, script, "--help"]
    return seconds(lambda: subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL))


def import_libraries() -> float:
    """Return the seconds that the imports of the libraries take, and nothing else."""
    return seconds(lambda: subprocess.run([sys.executable, "-c", IMPORTS], check=True))


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    add_example(arguments)
    arguments.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of cold and cached starts (default: %(default)s)"
    )
    options = arguments.parse_args()
    rounds = 1 if options.quick else options.rounds
    scripts = ("train_unconditional.py", "generate.py", "evaluate.py")
    helps = in_turns({script: lambda script=script: say_help(script) for script in scripts}, HELP_ROUNDS)
    result = Result(details={"help": helps})
    for script, took in helps.items():
        values = Spread.of(took)
        result.rows.append(
            Row(f"`{script} --help`", f"{values.median:.2f} s", "", values, "s", SECONDS_OF_HELP, "at most")
        )

    found: dict[str, dict[str, list[float]]] = {}
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        data = write_images(options.data, 256 if options.quick else None, folder / "images")
        ways = (HERE, EXAMPLE_SCRIPT) if options.example else (HERE,)
        for turn in range(rounds):
            for state in ("cold", "cached"):
                for way in ways:
                    cache = folder / f"cache-{ways.index(way)}-{turn}"
                    cache.mkdir(exist_ok=True)
                    for what, spent in start_once(way, SMALLEST, data, cache, options.example).items():
                        found.setdefault(f"{what}, {state}", {}).setdefault(way, []).append(spent)
            found.setdefault("imports", {}).setdefault(HERE, []).append(import_libraries())
    if options.example:
        found["imports"][EXAMPLE_SCRIPT] = found["first step, cached"][EXAMPLE_SCRIPT]
    result.details["seconds"] = found
    wanted = [
        ("first batch, cold", "first batch of CIFAR-10, cold", COLD, "at least"),
        ("first batch, cached", "first batch of CIFAR-10, cached", CACHED, "at least"),
        ("first step, cold", "start to the end of the first step, cold", None, "at most"),
        ("first step, cached", "start to the end of the first step, cached", SHARE_OF_START, "at most"),
        ("imports", "of which importing the libraries takes, and nothing else", None, "at most"),
        ("processor, cached", "processor time to the end of the first step, cached", None, "at most"),
    ]
    for key, what, to_reach, direction in wanted:
        times = found[key]
        if EXAMPLE_SCRIPT not in times:
            result.rows.append(Row(what, skipped=NO_EXAMPLE))
            continue
        pair = (EXAMPLE_SCRIPT, HERE) if direction == "at least" else (HERE, EXAMPLE_SCRIPT)
        here, there = (Spread.of(times[way]).median for way in (HERE, EXAMPLE_SCRIPT))
        columns = f"{here:.1f} s", f"{EXAMPLE_SCRIPT}: {there:.1f} s"
        values = ratios(*(times[way] for way in pair))
        unit = "x" if direction == "at least" else "of its time"
        result.rows.append(Row(what, *columns, values, unit, to_reach, direction))
    write_result("startup", result, options.output_dir)


if __name__ == "__main__":
    run_script(main)
