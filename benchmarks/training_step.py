#!/usr/bin/env python
"""Images a second of the training, beside the example script of diffusers and a bare loop, with the same network.

    python -m benchmarks.training_step

Each script runs in a process of its own, as it is, and holds its breath after its optimiser's step while another has
its turn. What is timed are whole steps within an epoch, of everything that the scripts do there: loading, augmenting,
the update, the moving average, logging.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
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
    describe_paper_network,
    in_turns,
    parser,
    ratios,
    write_images,
    write_result,
)
from common.errors import RunFailed, run_script

STEPPING = "benchmarks.stepping"
NEVER = 10**9
HERE, COMPILED, BF16 = "train_unconditional.py", "train_unconditional.py --compile", "the same in bf16"
EXAMPLE_SCRIPT, BARE = "diffusers' example", "a bare loop"
LOGGING_STEPS = 10
FASTER, FASTER_COMPILED, FASTER_BF16 = 1.08, 1.2, 1.2
MOST_OVERHEAD, MOST_HOST_MS, MOST_LOSS_CHANGE = 2.0, 5.0, 1.0  # per cent, milliseconds, per cent


@dataclass(frozen=True)
class Case:
    """A network, and who trains it; `seconds` is how long a turn may take."""

    name: str
    resolution: int
    batch_size: int
    ways: tuple[str, ...]
    channels: tuple[int, ...] | None = (32, 64, 64)  # None: the paper's network
    seconds: float = 2.5
    rounds: int = 5

    def describe(self, path: Path) -> Path:
        """Write the configuration of the network and return its path."""
        if self.channels is None:
            return describe_paper_network(path)
        return describe_network(path, self.resolution, self.channels)


CASES = [
    Case("1.1M parameters at 16x16, batch 64", 16, 64, (BARE, HERE, COMPILED, BF16, EXAMPLE_SCRIPT)),
    Case("1.1M parameters at 32x32, batch 64", 32, 64, (HERE, COMPILED, EXAMPLE_SCRIPT)),
    Case("the paper's network, batch 16", 32, 16, (HERE, COMPILED, EXAMPLE_SCRIPT), None, 4.0, 4),
    Case("3,000 parameters at 8x8, batch 4", 8, 4, (BARE, HERE), (4, 8), 1.0, 7),
]
QUICK = [Case("3,000 parameters at 8x8, batch 4", 8, 4, (BARE, HERE, EXAMPLE_SCRIPT), (4, 8), 0.1, 2)]


def flags_of_training(case: Case, network: Path, data: Path, output: Path) -> list[str]:
    """Return what the project's script and the example both take."""
    return [
        *(f"--dataset_name={data}", f"--resolution={case.resolution}", f"--model_config_name_or_path={network}"),
        *("--random_flip", f"--train_batch_size={case.batch_size}", "--use_ema", "--learning_rate=1e-3"),
        *("--lr_scheduler=constant_with_warmup", "--lr_warmup_steps=50", f"--output_dir={output}"),
        f"--checkpointing_steps={NEVER}",
    ]


def start(way: str, case: Case, network: Path, data: Path, example: Path | None) -> Worker:
    """Start a way of training a network."""
    place = network.parent / f"{way} {case.name}".replace(" ", "-").replace("'", "")
    place.mkdir()
    log = place / "log.txt"
    if way == BARE:
        return Worker(way, STEPPING, [ROOT / "benchmarks" / "bare_loop.py", network, case.batch_size], log)
    flags = flags_of_training(case, network, data, place / "run")
    if way == EXAMPLE_SCRIPT:
        return Worker(way, STEPPING, [example, *flags, f"--cache_dir={network.parent / 'datasets'}"], log)
    flags += [f"--logging_steps={LOGGING_STEPS}", f"--save_images_steps={NEVER}", f"--cache_dir={network.parent}"]
    flags += ["--compile"] * (way in (COMPILED, BF16)) + ["--mixed_precision=bf16"] * (way == BF16)
    return Worker(way, STEPPING, [ROOT / "train_unconditional.py", *flags], log)


def measure(case: Case, data: Path, folder: Path, example: Path | None) -> tuple[list[Row], dict]:
    """Time the steps of one network in all ways."""
    network = case.describe(folder / f"network-{case.batch_size}-{case.resolution}.json")
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        starting, workers = {}, {}
        for way in case.ways:
            if way == EXAMPLE_SCRIPT and example is None:
                failures[way] = NO_EXAMPLE
            else:
                starting[way] = stack.enter_context(closing(start(way, case, network, data, example)))
        for way, worker in starting.items():
            try:
                worker.answer()  # the first step
                worker.order(2)
                workers[way] = worker
            except RunFailed as error:
                failures[way] = str(error)
        if HERE not in workers:
            raise RunFailed(failures[HERE])
        # As many steps a turn for each as are about as long as a turn should be.
        steps = max(1, round(case.seconds / workers[HERE].order(2)["seconds"] * 2))
        turns = {way: lambda worker=worker: worker.order(steps)["seconds"] for way, worker in workers.items()}
        times = in_turns(turns, case.rounds)
        memory = {way: worker.peak_memory_gb() for way, worker in workers.items()}
    losses = {way: losses_of(network.parent, way, case) for way in workers if way in (COMPILED, BF16)}
    images = {way: [steps * case.batch_size / spent for spent in took] for way, took in times.items()}
    per_step = {way: [spent / steps for spent in took] for way, took in times.items()}
    details = {
        "steps_a_turn": steps,
        "images_per_second": images,
        "peak_memory_gb": memory,
        "failures": failures,
        "losses": losses,
    }
    return list(rows_of(case, images, per_step, failures, losses)), details


def losses_of(folder: Path, way: str, case: Case) -> list[float]:
    """Return the losses of the lines of metrics that a run has written."""
    place = folder / f"{way} {case.name}".replace(" ", "-").replace("'", "") / "run" / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in place.read_text().splitlines()] if place.exists() else []


def rows_of(case: Case, images: dict[str, list[float]], per_step: dict[str, list[float]], failures: dict, losses: dict):
    """Yield the rows that a network gives."""

    def speed(way: str) -> str:
        return f"{Spread.of(images[way]).median:,.0f} images/s" if way in images else failures.get(way, "")

    def compared(what: str, way: str, peer: str, to_reach: float) -> Row:
        missing = [failures[name] for name in (way, peer) if name in failures]
        if missing:
            return Row(what, skipped=missing[0])
        found = ratios(images[way], images[peer])
        return Row(what, speed(way), f"{peer}: {speed(peer)}", found, to_reach=to_reach)

    if EXAMPLE_SCRIPT in case.ways:
        yield compared(f"training step, {case.name}", HERE, EXAMPLE_SCRIPT, FASTER)
    if COMPILED in case.ways:
        yield compared(f"the same, `--compile`, {case.name}", COMPILED, EXAMPLE_SCRIPT, FASTER_COMPILED)
    if BF16 in case.ways:
        yield compared(f"bf16 and `--compile`, {case.name}", BF16, COMPILED, FASTER_BF16)
        if not failures.keys() & {BF16, COMPILED} and all(losses.values()):
            pairs = zip(losses[BF16], losses[COMPILED], strict=False)
            changes = [100 * abs(one / other - 1) for one, other in pairs]
            steps = LOGGING_STEPS * len(changes)
            exact, rounded = (mean(losses[way][: len(changes)]) for way in (COMPILED, BF16))
            values = Spread(mean(changes), min(changes), max(changes), len(changes))
            what = f"loss of bf16 against float32, mean over lines of the first {steps} steps"
            here, peer = f"{rounded:.4f}", f"float32: {exact:.4f}"
            yield Row(what, here, peer, values, "%", MOST_LOSS_CHANGE, "at most")
    if BARE in case.ways and BARE in images:
        over = zip(per_step[HERE], per_step[BARE], strict=True)
        if case.channels == (32, 64, 64):
            values = Spread.of(100 * (ours / bare - 1) for ours, bare in over)
            what = f"the loop's own overhead, {case.name}"
            yield Row(what, speed(HERE), f"{BARE}: {speed(BARE)}", values, "%", MOST_OVERHEAD, "at most")
        else:
            values = Spread.of(1000 * (ours - bare) for ours, bare in over)
            here, peer = (f"{1000 * Spread.of(per_step[way]).median:.2f} ms a step" for way in (HERE, BARE))
            what = f"host time beyond the network's, {case.name}"
            yield Row(what, here, f"{BARE}: {peer}", values, "ms", MOST_HOST_MS, "at most")


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    add_example(arguments)
    arguments.add_argument("--images", type=int, default=20_000, help="of the data set (default: %(default)s)")
    options = arguments.parse_args()
    result = Result()
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        data = write_images(options.data, 256 if options.quick else options.images, folder / "images")
        for case in QUICK if options.quick else CASES:
            try:
                rows, result.details[case.name] = measure(case, data, folder, options.example)
                result.rows += rows
            except RunFailed as error:
                result.rows.append(Row(f"training step, {case.name}", skipped=str(error)))
    write_result("training_step", result, options.output_dir)


if __name__ == "__main__":
    run_script(main)
