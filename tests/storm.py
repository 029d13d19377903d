"""Kill runs with SIGKILL, again and again, and compare what they end with to a run that was left alone.

    python tests/storm.py --kills 10      # what `make faults` does; writes docs/reliability.json

A kill comes at a random moment or at a named point of the program (`common/interruption.py`). What a run leaves must
be the same to the bit: weights, moving average, optimiser, state, sample grids, metrics, curves.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
TIMING = ("train_seconds", "images_per_second", "data_wait_share", "memory_gb", "timestep_sampler_share")
POINTS = {  # and how often a run comes past, at most
    "update": 120,
    "metrics": 17,
    "grid": 4,
    "save-file": 36,
    "save-manifest": 6,
    "save-renamed": 6,
    "prune": 3,
    "pipeline": 2,
}


@dataclass
class Scenario:
    """A run, in pieces of 120 steps' length: mid-epoch, with windows and checkpoints that do not coincide."""

    name: str
    processes: int = 1
    flags: list[str] = field(default_factory=list)
    budget: float | None = None  # of seconds: a first part of the run ends by itself

    def command(self, output_dir: Path, tiny_flags: list[str]) -> list[str]:
        return [
            "train_unconditional.py",
            *tiny_flags,
            "--max_train_steps=120",
            "--checkpointing_steps=20",
            "--save_images_steps=40",
            "--logging_steps=7",
            "--logger=tensorboard",
            f"--train_batch_size={16 // self.processes}",
            *self.flags,
            f"--output_dir={output_dir}",
        ]


SCENARIOS = [
    Scenario("one process"),
    Scenario("two processes", processes=2),
    Scenario("gradient accumulation", flags=["--train_batch_size=4", "--total_batch_size=16"]),
    Scenario("streamed images, data workers", flags=["--in_memory_limit_gb=0", "--dataloader_num_workers=2"]),
    Scenario("a budget of training time", budget=0.5),
]


class Program(subprocess.Popen):
    """Python, or as many as torchrun starts."""

    def __init__(self, command: list[str], processes: int = 1, fault: str = ""):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        super().__init__(
            [sys.executable, *(torchrun if processes > 1 else []), *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "EXACT_DDPM_FAULT": fault},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self) -> None:
        """SIGKILL for a launcher and all that it started."""
        family = [self.pid]
        with suppress(psutil.NoSuchProcess):
            family += [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def run_to_the_end(process: Program) -> None:
    outputs = process.communicate()
    assert process.returncode == 0, outputs[0][-3000:]


def killed_once(process: Program, fault: str, seconds: float) -> str:
    """Kill what was started, unless the named point does so, after so many seconds. What happened, for the record."""
    try:
        process.communicate(timeout=300 if fault else seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"killed after {seconds:.1f} s"
    return f"killed at {fault}" if process.returncode != 0 else "finished before the kill"


def differences(run: Path, reference: Path) -> list[str]:
    """What is not the same to the bit in two runs."""
    found = []
    checkpoints = [
        max(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])) for folder in (run, reference)
    ]
    if checkpoints[0].name != checkpoints[1].name:
        return [f"{checkpoints[0].name} instead of {checkpoints[1].name}"]
    for path in sorted(checkpoints[1].rglob("*.safetensors")):
        name = path.relative_to(checkpoints[1])
        if (checkpoints[0] / name).read_bytes() != path.read_bytes():
            found.append(str(name))
    for name in ("unet", "samples"):
        paths = sorted((reference / name).iterdir())
        found += [f"{name}/{path.name}" for path in paths if (run / name / path.name).read_bytes() != path.read_bytes()]
    states = [json.loads((folder / "state.json").read_text()) for folder in checkpoints]
    if {**states[0], "train_seconds": 0} != {**states[1], "train_seconds": 0}:
        found.append("state.json")
    lines = [
        [
            {name: value for name, value in json.loads(line).items() if name not in TIMING}
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in (run, reference)
    ]
    if lines[0] != lines[1]:
        found.append("metrics.jsonl")
    if curve(run) != curve(reference):
        found.append("TensorBoard")
    left = [path.name for path in run.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    return found + [f"left behind: {name}" for name in left]


def curve(run: Path) -> list[tuple[int, float]]:
    """The loss as TensorBoard shows it, which drops what a later writer purges."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"), purge_orphaned_data=True).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def storm(
    scenario: Scenario,
    kills: list[tuple[str, float]],
    tiny_flags: list[str],
    folder: Path,
    program: Callable[[list[str], int, str], Program] = Program,
) -> dict:
    """One scenario: a reference, runs killed again and again, and what differs in the end.

    A run that comes to its end before its next kill is compared, and another one takes its place.
    """

    def start(output_dir: Path, *flags: str, fault: str = "") -> Program:
        return program([*scenario.command(output_dir, tiny_flags), *flags], scenario.processes, fault)

    reference, run = folder / "reference", folder / "run 0"
    run_to_the_end(start(reference))
    if scenario.budget is not None:
        run_to_the_end(start(run, f"--max_train_seconds={scenario.budget}"))
    events, found, runs = [], [], 1
    for fault, seconds in kills:
        events.append(killed_once(start(run, fault=fault), fault, seconds))
        if not events[-1].startswith("killed"):
            found += differences(run, reference)
            run, runs = folder / f"run {runs}", runs + 1
    run_to_the_end(start(run))
    return {
        "scenario": scenario.name,
        "runs": runs,
        "kills": sum(event.startswith("killed") for event in events),
        "events": events,
        "differences": found + differences(run, reference),
    }


def random_kills(count: int, generator: random.Random, longest: float) -> list[tuple[str, float]]:
    """Half at named points, half at moments from the start-up of the program to its end."""
    kills = []
    for number in range(count):
        point = generator.choice(list(POINTS))
        at_point = f"{point}@{generator.randint(1, max(1, POINTS[point] // 3))}"
        kills.append((at_point, 0.0) if number % 2 else ("", generator.uniform(0.5, longest)))
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kills of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    sys.path.insert(0, str(ROOT))
    from conftest import make_tiny_flags, make_tiny_network

    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_flags = make_tiny_flags(make_tiny_network(folder / "network"), folder / "cache")
        for scenario in SCENARIOS:
            place = folder / scenario.name
            begin = time.monotonic()
            run_to_the_end(Program(scenario.command(place / "first", tiny_flags), scenario.processes))
            longest = 1.2 * (time.monotonic() - begin)
            results.append(storm(scenario, random_kills(arguments.kills, generator, longest), tiny_flags, place))
            shown = results[-1]["differences"] or "none"
            record = {"seed": arguments.seed, "cores": os.cpu_count(), "points": list(POINTS), "scenarios": results}
            (ROOT / "docs" / "reliability.json").write_text(json.dumps(record, indent=1) + "\n")
            print(f"{scenario.name}: {results[-1]['kills']} kills, differences: {shown}", flush=True)
    sys.exit(1 if any(result["differences"] for result in results) else 0)


if __name__ == "__main__":
    main()
