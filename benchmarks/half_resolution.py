#!/usr/bin/env python
"""How long a step on images of half the size takes, beside one on whole images, with the same network.

    python -m benchmarks.half_resolution

Two runs that differ in --half_resolution_steps alone take turns. Races by steps count small steps as a quarter; this
shows where that is true.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import (
    ROOT,
    Result,
    Row,
    Spread,
    Worker,
    add_data,
    in_turns,
    parser,
    ratios,
    write_images,
    write_result,
)
from benchmarks.training_step import NEVER, STEPPING, Case, flags_of_training
from common.errors import RunFailed, run_script

WHOLE, HALF = "whole", "half"


@dataclass(frozen=True)
class Pair(Case):
    """A network, which a file of configs/networks may describe, on images of both sizes."""

    ways: tuple[str, ...] = (WHOLE, HALF)
    file: str | None = None
    seconds: float = 3.0

    def describe(self, path: Path) -> Path:
        return ROOT / "configs" / "networks" / self.file if self.file else super().describe(path)


PAIRS = [
    Pair("0.7M parameters at 16x16", 16, 64, file="small_16.json"),
    Pair("1.3M parameters at 32x32", 32, 64, file="tiny_32.json"),
    Pair("the paper's network at 32x32", 32, 16, channels=None, seconds=8.0),
]
QUICK = [Pair("3,000 parameters at 8x8", 8, 4, channels=(4, 8), seconds=0.1, rounds=2)]


def start(way: str, pair: Pair, data: Path, folder: Path) -> Worker:
    """Start a run whose images stay small, or one whose images are whole."""
    place = folder / f"{way}-{pair.resolution}-{pair.batch_size}"
    place.mkdir()
    flags = flags_of_training(pair, pair.describe(place / "network.json"), data, place / "run")
    flags += [f"--save_images_steps={NEVER}", f"--cache_dir={folder}", f"--max_train_steps={2 * NEVER}"]
    flags += [f"--half_resolution_steps={NEVER}"] * (way == HALF)
    return Worker(way, STEPPING, [ROOT / "train_unconditional.py", *flags], place / "log.txt")


def measure(pair: Pair, data: Path, folder: Path) -> tuple[Row, dict]:
    """Time the steps of one network on images of both sizes."""
    with ExitStack() as stack:
        workers = {way: stack.enter_context(closing(start(way, pair, data, folder))) for way in pair.ways}
        for worker in workers.values():
            worker.answer()  # the first step
        steps = max(1, round(pair.seconds / workers[WHOLE].order(2)["seconds"] * 2))
        turns = {way: lambda worker=worker: worker.order(steps)["seconds"] / steps for way, worker in workers.items()}
        took = in_turns(turns, pair.rounds)
    half, whole = (f"{Spread.of(took[way]).median:.3g} s" for way in (HALF, WHOLE))
    what = f"a step on images of half the size, {pair.name}, batch {pair.batch_size}"
    row = Row(what, half, f"{WHOLE} images: {whole}", ratios(took[HALF], took[WHOLE]), "of its time")
    return row, {"steps_a_turn": steps, "seconds_a_step": took}


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    options = arguments.parse_args()
    result = Result()
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        data = write_images(options.data, 256 if options.quick else 2_000, folder / "images")
        for pair in QUICK if options.quick else PAIRS:
            try:
                row, result.details[pair.name] = measure(pair, data, folder)
            except RunFailed as error:
                row = Row(f"a step on images of half the size, {pair.name}", skipped=str(error))
            result.rows.append(row)
    write_result("half_resolution", result, options.output_dir)


if __name__ == "__main__":
    run_script(main)
