#!/usr/bin/env python
"""The memory of a training of the paper's network, beside the example script of diffusers.

    python -m benchmarks.memory

The peak of a process over a few steps, as Linux counts it; on a GPU the device's memory is in a run's metrics. What
activations take is found from two batch sizes: everything else does not depend on the batch. They are also counted by
the bytes of tensors, which is what a GPU would hold: a process has its allocator's gaps and its kernels' buffers too.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
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
    describe_paper_network,
    parser,
    write_images,
    write_result,
)
from benchmarks.training_step import EXAMPLE_SCRIPT, HERE, NEVER, STEPPING, Case, flags_of_training
from common.errors import run_script

LARGE, SMALL = 16, 4  # images a step
COUNTED = (32, 16)  # images in a pass whose tensors are counted, so many that activations are more than gradients
STEPS = 2
CHECKPOINTED = "--gradient_checkpointing"


def peak_gb(way: str, batch_size: int, network: Path, data: Path, example: Path | None) -> float:
    """Train a few steps in a process of its own and return the most memory that it held."""
    place = network.parent / f"{way}-{batch_size}".replace(" ", "-").replace("'", "")
    place.mkdir()
    flags = flags_of_training(Case("", 32, batch_size, ()), network, data, place / "run")
    script, more = example, [f"--cache_dir={network.parent / 'datasets'}"]
    if way != EXAMPLE_SCRIPT:
        script, more = ROOT / "train_unconditional.py", [f"--cache_dir={data.parent}", f"--save_images_steps={NEVER}"]
        more += [CHECKPOINTED] * (way == CHECKPOINTED)
    with closing(Worker(way, STEPPING, [script, *flags, *more], place / "log.txt")) as worker:
        worker.answer()
        worker.order(STEPS)
        return worker.peak_memory_gb()


def counted_mb_an_image(network: Path, *flags: str) -> float:
    """Return by how many megabytes of tensors a forward and a backward pass grow with each image."""
    import torch

    from common.machine import peak_of_tensors
    from run_folder.config import parse_config
    from training.network import build_training_unet

    described = [f"--model_config_name_or_path={network}", "--resolution=32"]
    config = parse_config(["--dataset_name=digits", *described, *flags])
    unet = build_training_unet(config, 3, torch.Generator().manual_seed(0))

    def step(count: int) -> None:
        unet.zero_grad()
        unet(torch.zeros(count, 3, 32, 32), torch.zeros(count, dtype=torch.int64)).sample.sum().backward()

    large, small = (peak_of_tensors(partial(step, count)) for count in COUNTED)
    return (large - small) / (COUNTED[0] - COUNTED[1]) / 1e6


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    add_example(arguments)
    options = arguments.parse_args()
    found: dict[str, dict[int, float]] = {}
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        data = write_images(options.data, 256, folder / "images")
        network = folder / "network.json"
        if options.quick:
            describe_network(network, 32, (4, 8))
        else:
            describe_paper_network(network)
        for way in (HERE, CHECKPOINTED, EXAMPLE_SCRIPT):
            for batch_size in (LARGE, SMALL) if way != EXAMPLE_SCRIPT else (LARGE,):
                if way != EXAMPLE_SCRIPT or options.example:
                    peak = peak_gb(way, batch_size, network, data, options.example)
                    found.setdefault(way, {})[batch_size] = peak
        counted = {CHECKPOINTED: counted_mb_an_image(network, CHECKPOINTED), HERE: counted_mb_an_image(network)}
    what = f"memory of a training of the paper's network, batch {LARGE}"
    ours = found[HERE][LARGE]
    if EXAMPLE_SCRIPT in found:
        theirs = found[EXAMPLE_SCRIPT][LARGE]
        columns = f"{ours:.2f} GB", f"{EXAMPLE_SCRIPT}: {theirs:.2f} GB"
        rows = [Row(what, *columns, Spread.of([ours / theirs]), "of its memory", 1.0, "at most")]
    else:
        rows = [Row(what, skipped=NO_EXAMPLE)]
    an_image = {way: (of[LARGE] - of[SMALL]) / (LARGE - SMALL) for way, of in found.items() if way != EXAMPLE_SCRIPT}
    an_image = {way: 1000 * took for way, took in an_image.items()}
    for how, took in (("process", an_image), ("bytes of tensors", counted)):
        here, without = (f"{took[way]:.0f} MB an image" for way in (CHECKPOINTED, HERE))
        what, share = f"activations with `{CHECKPOINTED}`, {how}", Spread.of([took[CHECKPOINTED] / took[HERE]])
        rows.append(Row(what, here, f"without: {without}", share, "of them", 1 / 3, "at most"))
    write_result("memory", Result(rows, {"peak_gb": found, "counted_mb_an_image": counted}), options.output_dir)


if __name__ == "__main__":
    run_script(main)
