"""What the benchmarks share: ways measured in turns, ratios with their spread, the machine, and the files of results.

A result is a JSON file in benchmarks/results: the machine, the versions, what was measured, and rows of a table, each
with the figure that was to be reached. `python -m benchmarks.tables` writes them into the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from common.errors import RunFailed
from common.files import write_atomically
from common.machine import usable_cores

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    *("torch", "torchvision", "diffusers", "accelerate", "datasets", "numpy", "scipy", "pillow"),
    *("clean-fid", "torch-fidelity"),
)
EXAMPLE = "DIFFUSERS_EXAMPLE"  # environment variable with the path of train_unconditional.py of diffusers' examples
NO_EXAMPLE = f"the diffusers example script is not here: {EXAMPLE} is to name its path (docs/speed.md)"


# Rows of a table.


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, with the smallest and the largest."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return it for these values."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios of what was measured in the same turn, so that a slow turn slows both."""
    return Spread.of(a / b for a, b in zip(numerators, denominators, strict=True))


@dataclass(frozen=True)
class Row:
    """A line of a table: what was measured, here and there, and what was to be reached; or why it was not measured."""

    what: str
    here: str = ""
    peer: str = ""
    measured: Spread | None = None
    unit: str = "x"
    to_reach: float | None = None
    direction: Literal["at least", "at most"] = "at least"
    skipped: str = ""

    @property
    def reached(self) -> bool | None:
        """Tell whether the median is where it should be, or None if nothing was asked or measured."""
        if self.measured is None or self.to_reach is None:
            return None
        value = self.measured.median
        return bool(value >= self.to_reach if self.direction == "at least" else value <= self.to_reach)


def read_rows(result: dict) -> list[Row]:
    """Return the rows of a result as they were written."""
    rows = []
    for row in result["rows"]:
        values = {name: value for name, value in row.items() if name != "reached"}
        if values.get("measured"):
            values["measured"] = Spread(**values["measured"])
        rows.append(Row(**values))
    return rows


@dataclass
class Result:
    """What a benchmark found: rows, and the numbers behind them."""

    rows: list[Row] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)


# Measuring.


def seconds(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(ways: dict[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Measure A B C A B C ..., as many rounds as asked for; `warm_up` rounds come first and do not count."""
    measured: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(warm_up + rounds):
        for way, measure in ways.items():
            value = measure()
            if turn >= warm_up:
                measured[way].append(value)
    return measured


class Worker:
    """A process that works when it is its turn: it gets an order, a line, and answers with a line of JSON.

    So what is compared warms up once, keeps its compiled network, and does nothing while another is measured.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[object], log: Path, **environment: str):
        self.name, self.log = name, log
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            env={**os.environ, "TQDM_DISABLE": "1", **environment}, start_new_session=True,
        )  # fmt: skip

    def answer(self) -> dict:
        """Wait for the next answer; raise with the last line that the process has written if it has ended."""
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RunFailed(f"{self.name}: {last_line(self.log.read_text(errors='replace'))}")
        return json.loads(line)

    def order(self, order: object) -> dict:
        """Give an order and return the answer."""
        try:
            self.process.stdin.write(f"{order}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says why
        return self.answer()

    def peak_memory_gb(self) -> float:
        """Return the most memory that the process has held at one time; Linux only."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak) / 2**20

    def close(self) -> None:
        """End the process and those that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                continue


class Orders:
    """The other end of a `Worker`: standard input and output are its, and what anybody prints goes to the log."""

    def __init__(self) -> None:
        self._orders, self._answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def answer(self, **values: object) -> None:
        """Send an answer."""
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()

    def next(self) -> str:
        """Wait for an order; where nobody is left to give one, the process ends."""
        line = self._orders.readline()
        if not line:
            os._exit(0)
        return line.strip()


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it ended without a word")


def run_quietly(*command: object) -> None:
    """Run a script of the project to its end; raise with its last line if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TQDM_DISABLE": "1"},
    )  # fmt: skip
    if done.returncode != 0:
        raise RunFailed(f"{command[0]}: {last_line(done.stderr)}")


# The networks and images of the benchmarks.


def describe_network(path: Path, resolution: int, channels: Sequence[int] = (32, 64, 64)) -> Path:
    """Write the configuration of a network with the paper's arithmetic and one residual block a level.

    With the default channels it has 1.1 million parameters.
    """
    from training.network import PAPER_ARITHMETIC

    attention = ["AttnDownBlock2D" if level == 1 else "DownBlock2D" for level in range(len(channels))]
    settings = {
        "_class_name": "UNet2DModel",
        **PAPER_ARITHMETIC,
        "layers_per_block": 1,
        "norm_num_groups": min(32, *channels),
        "sample_size": resolution,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": list(channels),
        "down_block_types": attention,
        "up_block_types": [block.replace("Down", "Up") for block in reversed(attention)],
        "dropout": 0.0,
    }
    path.write_text(json.dumps(settings, indent=1))
    return path


def describe_paper_network(path: Path) -> Path:
    """Write the configuration of the paper's network for CIFAR-10."""
    from training.network import PAPER_CIFAR10

    path.write_text(json.dumps({"_class_name": "UNet2DModel", **PAPER_CIFAR10}, indent=1))
    return path


def write_images(data: str, count: int | None, folder: Path) -> Path:
    """Write the first training images of a data set as one parquet file with a column `image`, as the peers want it."""
    import datasets

    from image_data.data_options import DataOptions
    from image_data.sources import load_images

    datasets.disable_progress_bars()
    source = load_images(DataOptions(data))
    count = min(count or len(source), len(source))
    encoded = [{"bytes": source.read(row), "path": None} for row in range(count)]
    features = datasets.Features({"image": datasets.Image()})
    folder.mkdir(parents=True)
    datasets.Dataset.from_dict({"image": encoded}, features=features).to_parquet(folder / "train.parquet")
    return folder


# The machine and the file.


def machine() -> dict[str, object]:
    """Describe what is measured on."""
    import psutil
    import torch

    model = [line for line in _lines_of("/proc/cpuinfo") if line.startswith("model name")]
    gpus = torch.cuda.device_count()
    return {
        "processor": model[0].partition(":")[2].strip() if model else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),  # of its last minute, itself among it
    }


def versions() -> dict[str, str]:
    """Name the versions of Python, of this project, and of the peers that are installed."""
    found = {"python": platform.python_version(), "commit": commit()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """Return the commit that is measured, as far as git knows it, and whether code has been changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (", changed" if changed else "")


def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def parser(description: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, with what all of them take."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="the smallest sizes: to see that it runs, not how fast")
    made.add_argument("--output_dir", type=Path, default=RESULTS, help="where the JSON goes (default: %(default)s)")
    return made


def add_data(made: argparse.ArgumentParser) -> None:
    """Add the option that names CIFAR-10."""

    def wherever_from(name: str) -> str:
        return str(Path(name).resolve()) if Path(name).exists() else name

    help_text = "CIFAR-10: a Hub id or a folder (default: %(default)s)"
    made.add_argument("--data", type=wherever_from, default="uoft-cs/cifar10", help=help_text)


def add_example(made: argparse.ArgumentParser) -> None:
    """Add the option that names the peer that no package brings."""

    def existing(name: str) -> Path:
        if not Path(name).is_file():
            raise argparse.ArgumentTypeError(f"{name}: there is no such file")
        return Path(name).resolve()

    help_text = f"train_unconditional.py of the diffusers examples (default: the environment's {EXAMPLE})"
    made.add_argument("--example", type=existing, default=os.environ.get(EXAMPLE) or None, help=help_text)


def write_result(name: str, result: Result, output_dir: Path) -> Path:
    """Write a result with machine and versions, and print its rows."""
    rows = [{**asdict(row), "reached": row.reached} for row in result.rows]
    content = {
        "benchmark": name,
        "measured": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.{name}",
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "details": result.details,
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / f"{name}.json"
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    for row in result.rows:
        found = f"skipped: {row.skipped}" if row.measured is None else f"{row.measured.median:.4g} {row.unit}"
        print(f"{row.what}: {found}", flush=True)
    return path
