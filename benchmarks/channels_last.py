#!/usr/bin/env python
"""Measure whether networks are faster with the channels of their images last in memory: in training and in sampling.

    python -m benchmarks.channels_last      # writes benchmarks/results/channels_last.json

The layouts take turns, and processor time is compared, so that other work on the machine counts little.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import UNet2DModel

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "channels_last.json"
NETWORKS = {"small_16": 32, "tiny_32": 16}  # in configs/networks, with the images of a batch
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 7


def prepare(network: str, layout: str, precision: str, training: bool) -> Callable[[], object]:
    """Return a function that makes a pass: forward, and backward if it is for training."""
    torch.manual_seed(0)
    unet = UNet2DModel.from_config(UNet2DModel.load_config(ROOT / "configs" / "networks" / f"{network}.json"))
    unet.train(training).to(memory_format=LAYOUTS[layout])
    size = unet.config.sample_size
    images = torch.randn(NETWORKS[network], unet.config.in_channels, size, size).to(memory_format=LAYOUTS[layout])
    t = torch.arange(len(images))

    def make_pass() -> torch.Tensor:
        enabled = PRECISIONS[precision] != torch.float32
        with torch.set_grad_enabled(training), torch.autocast("cpu", PRECISIONS[precision], enabled=enabled):
            output = unet(images, t).sample.float()
        if training:
            unet.zero_grad()
            output.square().mean().backward()
        return output.detach()

    return make_pass


def compare(network: str, precision: str, training: bool) -> dict[str, object]:
    """Time both layouts in turn; a ratio above 1 says that channels last is faster."""
    passes = {layout: prepare(network, layout, precision, training) for layout in LAYOUTS}
    if not training:
        first, last = (make_pass() for make_pass in passes.values())
        same = torch.equal(first, last)
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for number in range(ROUNDS + 1):
        for layout, make_pass in passes.items():
            start = time.process_time()
            make_pass()
            if number:  # the first pass warms up
                seconds[layout].append(time.process_time() - start)
    medians = {layout: statistics.median(times) for layout, times in seconds.items()}
    ratios = [first / last for first, last in zip(*seconds.values(), strict=True)]
    return {
        "network": network,
        "batch": NETWORKS[network],
        "precision": precision,
        "what": "training" if training else "sampling",
        "ratio_of_medians": round(medians["channels first"] / medians["channels last"], 3),
        "ratios_of_rounds": [round(min(ratios), 3), round(max(ratios), 3)],
        "milliseconds": {layout: round(1000 * median, 1) for layout, median in medians.items()},
        **({} if training else {"same_bits": same}),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for network in NETWORKS:
        for precision in PRECISIONS:
            for training in (True, False):
                rows.append(compare(network, precision, training))
                print(rows[-1], flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    machine |= {"torch": torch.__version__, "python": sys.version.split()[0]}
    RESULTS.write_text(json.dumps({"machine": machine, "rounds": ROUNDS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
