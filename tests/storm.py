"""Kill programs or hang up on them, again and again, and compare what they end with to one that was left alone.

    python tests/storm.py                         # what `make faults` does; writes docs/reliability.json
    python tests/storm.py --kills 2 evaluate.py   # two kills of the scenarios with this word in their names

SIGKILL comes at a random moment or at a named point of the program (`common/interruption.py`), SIGHUP, the end of a
terminal, at a random moment. What a run leaves must be the same to the bit: weights, moving average, optimiser, state,
sample grids, metrics, timesteps and curves; of the other scripts, every file.
"""

import argparse
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import preloaded
import psutil
import records

ROOT = Path(__file__).parent.parent
TIMING = ("train_seconds", "images_per_second", "images_per_second_per_device", "data_wait_share", "memory_gb")
TIMING += ("timestep_sampler_share", "communication_share")
HANG_UP, EXIT_INTERRUPTED = "SIGHUP", 75
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
    points: dict[str, int] = field(default_factory=POINTS.copy)
    seconds: float = 0.0  # that it takes when it is left alone

    def make(self, things: Path, tiny_flags: list[str], run: Callable[[list[str]], None]) -> None:
        """Make what the program starts from; `run` runs another one."""

    def begin(self, place: Path) -> None:
        """Put into a folder what must be there before the program."""

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

    def differences(self, run: Path, reference: Path) -> list[str]:
        return differences(run, reference)


class Generating(Scenario):
    """Images of a run, in batches."""

    def make(self, things: Path, tiny_flags: list[str], run: Callable[[list[str]], None]) -> None:
        flags = ["--max_train_steps=20", "--checkpointing_steps=10", "--save_images_steps=20"]
        run(["train_unconditional.py", *tiny_flags, *flags, f"--output_dir={things / 'run'}"])

    def command(self, output_dir: Path, tiny_flags: list[str]) -> list[str]:
        return [
            "generate.py",
            str(output_dir.parent / "things" / "run"),
            *("--num_images=160", "--batch_size=8", "--ddim", "--num_inference_steps=10"),
            *self.flags,
            f"--output_dir={output_dir}",
        ]

    def differences(self, run: Path, reference: Path) -> list[str]:
        """What is not the same to the bit in two folders, or in one of them only."""
        files = [
            {
                str(path.relative_to(folder)): path.read_bytes().replace(bytes(folder), b"FOLDER")
                for path in folder.rglob("*")
                if path.is_file() and path.name != ".lock" and not path.name.startswith("events.")
            }
            for folder in (run, reference)
        ]
        return sorted(name for name in {**files[0], **files[1]} if files[0].get(name) != files[1].get(name))


class Evaluating(Generating):
    """The tables of a run, and the images that were measured."""

    def make(self, things: Path, tiny_flags: list[str], run: Callable[[list[str]], None]) -> None:
        super().make(things, tiny_flags, run)
        from evaluation_helpers import make_vision_network

        make_vision_network(things / "vision")

    def begin(self, place: Path) -> None:
        shutil.copytree(place.parent / "things" / "run", place)

    def command(self, output_dir: Path, tiny_flags: list[str]) -> list[str]:
        return [
            "evaluate.py",
            f"--run_dir={output_dir}",
            f"--features={output_dir.parent / 'things' / 'vision'}",
            *(flag for flag in tiny_flags if flag.startswith("--cache_dir=")),
            *("--num_images=64", "--batch_size=8", "--ddim", "--num_inference_steps=10", "--num_workers=0"),
            *self.flags,
        ]


class Preparing(Generating):
    """An archive of photos as an image folder."""

    def make(self, things: Path, tiny_flags: list[str], run: Callable[[list[str]], None]) -> None:
        import numpy as np
        from PIL import Image

        generator = np.random.default_rng(0)
        things.mkdir(parents=True)
        with zipfile.ZipFile(things / "photos.zip", "w") as archive:
            for number in range(400):
                file = io.BytesIO()
                pixels = generator.integers(0, 256, (48, 40 + number % 20, 3), np.uint8)
                Image.fromarray(pixels).save(file, "JPEG")
                archive.writestr(f"photos/{'cat' if number % 3 else 'dog'}/{number:03}.jpg", file.getvalue())

    def command(self, output_dir: Path, tiny_flags: list[str]) -> list[str]:
        source = output_dir.parent / "things" / "photos.zip"
        return ["prepare_data.py", str(source), f"--output={output_dir}", "--resolution=32", *self.flags]


# Of samplers that learn, with so few timesteps that they have something to learn from.
LEARNING = ["--ddpm_num_steps=40", "--ddpm_num_inference_steps=5"]
GENERATED = {"image": 160, "generated": 20}
SCENARIOS = [
    Scenario("one process"),
    Scenario("two processes", processes=2),
    Scenario("gradient accumulation", flags=["--train_batch_size=4", "--total_batch_size=16"]),
    Scenario("streamed images, data workers", flags=["--in_memory_limit_gb=0", "--num_workers=2"]),
    Scenario("a budget of training time", budget=0.5),
    Scenario(
        "a sampler that learns from losses",
        flags=[*LEARNING, "--timestep_sampler=loss_second_moment", "--loss_second_moment_history=3"],
    ),
    Scenario(
        "a sampler that learns from updates",
        flags=[*LEARNING, "--timestep_sampler=ats", "--ats_interval=7", "--ats_grid=10"],
    ),
    Generating("generate.py", points=GENERATED),
    Generating("generate.py, one file", flags=["--format=npz"], points={"image": 20, "generated": 20, "assembled": 1}),
    Evaluating("evaluate.py", flags=["--keep_images"], points={"image": 128, "generated": 16, "table": 2}),
    Preparing("prepare_data.py", flags=["--num_workers=0"], points={"prepare-image": 400}),
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
    assert process.returncode == 0, "".join(filter(None, outputs))[-3000:]


def killed_once(process: Program, fault: str, seconds: float) -> str:
    """Kill what was started, unless the named point does so, after so many seconds. What happened, for the record."""
    try:
        outputs = process.communicate(timeout=300 if "@" in fault else seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGHUP) if fault == HANG_UP else process.kill()
        outputs = process.communicate(timeout=300)
        # Before the program has taken over the signals it ends by the signal, and by itself if that came too late.
        assert fault != HANG_UP or process.returncode in (0, 1, EXIT_INTERRUPTED, -signal.SIGHUP), outputs[0][-3000:]
        if process.returncode != 0:
            return f"killed {f'by {fault} ' if fault else ''}after {seconds:.1f} s"
    assert process.returncode != 2, "".join(filter(None, outputs))[-3000:]  # which nobody killed
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
    for name in ("metrics.jsonl", "timesteps.jsonl"):
        if lines_but_for_times(run / name) != lines_but_for_times(reference / name):
            found.append(name)
    if curve(run) != curve(reference):
        found.append("TensorBoard")
    left, expected = ({path.name for path in folder.glob(".*")} for folder in (run, reference))
    return found + [f"left behind: {name}" for name in sorted(left - expected)]


def lines_but_for_times(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


def curve(run: Path) -> list[tuple[int, float]]:
    """The loss as TensorBoard shows it, which drops what a later writer purges."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"), purge_orphaned_data=True).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def storm(
    scenario: Scenario,
    kills: Iterable[tuple[str, float]],
    tiny_flags: list[str],
    folder: Path,
    program: Callable[[list[str], int, str], Program] = Program,
    wanted: int | None = None,
) -> dict:
    """One scenario: a reference, runs killed again and again, and what differs in the end.

    A run that comes to its end before its next kill is compared, and another one takes its place. So many kills are
    wanted, or all of them.
    """

    def start(output_dir: Path, *flags: str, fault: str = "") -> Program:
        return program([*scenario.command(output_dir, tiny_flags), *flags], scenario.processes, fault)

    def another(name: str) -> Path:
        scenario.begin(folder / name)
        return folder / name

    if not (folder / "things").exists():
        scenario.make(folder / "things", tiny_flags, lambda command: run_to_the_end(program(command, 1, "")))
    reference, run = another("reference"), another("run 0")
    begin = time.monotonic()
    run_to_the_end(start(reference))
    scenario.seconds = time.monotonic() - begin
    if scenario.budget is not None:
        run_to_the_end(start(run, f"--max_train_seconds={scenario.budget}"))
    events, found, runs = [], [], 1
    for fault, seconds in kills:
        if wanted is not None and sum(event.startswith("killed") for event in events) >= wanted:
            break
        events.append(killed_once(start(run, fault=fault), fault, seconds))
        if not events[-1].startswith("killed"):
            found += scenario.differences(run, reference)
            run, runs = another(f"run {runs}"), runs + 1
    run_to_the_end(start(run))
    return {
        "scenario": scenario.name,
        "runs": runs,
        "kills": sum(event.startswith("killed") for event in events),
        "events": events,
        "differences": found + scenario.differences(run, reference),
    }


def random_kills(scenario: Scenario, generator: random.Random) -> Iterator[tuple[str, float]]:
    """Kills and hang-ups from the start-up of the program to a little after its end, and kills at named points."""
    for number in itertools.count():
        yield HANG_UP if number % 2 else "", generator.uniform(0.1, 1.1) * scenario.seconds
        point = generator.choice(list(scenario.points))
        yield f"{point}@{generator.randint(1, max(1, scenario.points[point] // 3))}", 0.0


def preloaded_if_alone(command: list[str], processes: int, fault: str) -> Program | preloaded.Process:
    """A process that has imported everything; under a launcher, which knows nothing of those, real ones."""
    if processes > 1:
        return Program(command, processes, fault)
    return preloaded.Process(command, EXACT_DDPM_FAULT=fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="only those with one of these words in their names")
    parser.add_argument("--kills", type=int, default=10, help="kills of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from conftest import make_tiny_flags, make_tiny_network

    results, begin = [], time.monotonic()
    chosen = [each for each in SCENARIOS if not arguments.scenarios or any(w in each.name for w in arguments.scenarios)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_flags = make_tiny_flags(make_tiny_network(folder / "network"), folder / "cache")
        for scenario in chosen:
            kills = random_kills(scenario, random.Random(f"{arguments.seed} {scenario.name}"))
            place = folder / scenario.name
            results.append(storm(scenario, kills, tiny_flags, place, preloaded_if_alone, arguments.kills))
            shown = results[-1]["differences"] or "none"
            print(f"{scenario.name}: {results[-1]['kills']} kills, differences: {shown}", flush=True)
    record = {
        "seed": arguments.seed,
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - begin),
        "kills": sum(result["kills"] for result in results),
        "points": sorted({point for scenario in chosen for point in scenario.points}),
        "scenarios": results,
    }
    if not arguments.scenarios:
        records.write("reliability", record)
    print(f"{record['kills']} kills in {record['seconds']} s")
    sys.exit(1 if any(result["differences"] for result in results) else 0)


if __name__ == "__main__":
    main()
