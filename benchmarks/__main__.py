"""Run the benchmarks one after the other and write what they found into the documentation.

    python -m benchmarks --data ../cifar10        # about 40 minutes on two cores
    python -m benchmarks --only frechet startup   # some of them
    python -m benchmarks --quick                  # the smallest sizes, and nothing is written into the documentation

Each runs in a process of its own. One that fails is noted with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import (
    RESULTS,
    ROOT,
    Result,
    Row,
    add_data,
    add_example,
    last_line,
    write_result,
)
from common.errors import RunFailed, run_script

# In order, with what each takes: "data" for images, "example" for the peer that no package brings.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "frechet": (),
    "startup": ("data", "example"),
    "save_stall": (),
    "memory": ("data", "example"),
    "streaming": (),
    "scaling": (),
    "sampling": ("data",),
    "evaluation_speed": ("data",),
    "profile_steps": ("data",),
    "training_step": ("data", "example"),
    "half_resolution": ("data",),
}
LONGEST = 1800  # seconds, of one benchmark


def command_of(name: str, options: argparse.Namespace, output_dir: Path) -> list[str]:
    """Return the command of a benchmark."""
    command = [sys.executable, "-m", f"benchmarks.{name}", f"--output_dir={output_dir}"]
    if "data" in BENCHMARKS[name]:
        command.append(f"--data={options.data}")
    if "example" in BENCHMARKS[name] and options.example:
        command.append(f"--example={options.example}")
    return command + ["--quick"] * options.quick


def run(name: str, options: argparse.Namespace, output_dir: Path) -> str:
    """Run a benchmark; return why it failed, or nothing. What it prints is shown if it does not."""
    try:
        done = subprocess.run(
            command_of(name, options, output_dir), cwd=ROOT, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {LONGEST} seconds"
    print(done.stdout, end="", flush=True)
    return last_line(done.stderr) if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data(parser)
    add_example(parser)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes; results are thrown away")
    options = parser.parse_args()
    failed = []
    with TemporaryDirectory() as temporary:
        output_dir = Path(temporary) if options.quick else RESULTS
        for name in options.only or BENCHMARKS:
            print(f"== {name}, {time.strftime('%H:%M:%S')}", flush=True)
            start = time.perf_counter()
            if reason := run(name, options, output_dir):
                failed.append(name)
                write_result(name, Result([Row(name, skipped=f"it failed: {reason}")]), output_dir)
            print(f"   {time.perf_counter() - start:.0f} s\n", flush=True)
        if not options.quick:  # figures of the smallest sizes belong on no page
            subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, check=True)
    if failed:
        raise RunFailed(f"{', '.join(failed)} failed; the others went on")


if __name__ == "__main__":
    run_script(main)
