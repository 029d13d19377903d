#!/usr/bin/env python
"""Images a second of the Inception network, beside the TorchScript file that its weights come from.

    python benchmarks/inception_speed.py      # writes benchmarks/results/inception_speed.json

Measured in turns on the same batch, already resized: the published TorchScript as it is loaded, and the network of
evaluate.py as it is, compiled, and in bf16. The ratios are medians over the rounds; the features of all are compared.
A product of large matrices shows how many operations a second the machine can do at best.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from common.files import default_cache_dir, sha256, write_atomically  # noqa: E402
from common.machine import usable_cores  # noqa: E402
from evaluation.inception import SIZE, TORCH_FIDELITY, build, converted, find_source  # noqa: E402

BATCH_SIZE = 50
ROUNDS = 9
WARM_UP = 2
SIDE = 4096  # of the matrices


def operations_of(compute: Callable[[], torch.Tensor]) -> int:
    """Count the multiplications and additions of what is computed."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    source = find_source(default_cache_dir())
    digest = sha256(source)
    if digest == TORCH_FIDELITY:
        sys.exit(f"{source} is no TorchScript: there is nothing to compare with")
    script = torch.jit.load(source, map_location="cpu").eval()
    state = converted(source, digest, default_cache_dir())
    network, compiled = (build(state).to(memory_format=torch.channels_last) for _ in range(2))
    compiled.compile()
    images = torch.rand(BATCH_SIZE, 3, SIZE, SIZE) * 2 - 1
    channels_last = images.contiguous(memory_format=torch.channels_last)

    def in_bf16() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return network(channels_last)["features"]

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "TorchScript": lambda: script(images),
        "evaluate.py": lambda: network(channels_last)["features"],
        "evaluate.py, compiled": lambda: compiled(channels_last)["features"],
        "evaluate.py, bf16": in_bf16,
    }
    matrix = torch.rand(SIDE, SIDE)
    ways["matrix product"] = lambda: matrix @ matrix
    operations = {way: operations_of(ways[way]) for way in ("evaluate.py", "matrix product")}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    features, first = {}, {}
    with torch.inference_mode():
        for turn in range(WARM_UP + ROUNDS):
            for way, compute in ways.items():
                start = time.perf_counter()
                features[way] = compute()
                spent = time.perf_counter() - start
                first.setdefault(way, spent)
                if turn >= WARM_UP:
                    seconds[way].append(spent)
    rates = {way: count / statistics.median(seconds[way]) / 1e9 for way, count in operations.items()}
    del seconds["matrix product"], features["matrix product"], first["matrix product"]
    exact = features["TorchScript"]
    result = {
        "batch_size": BATCH_SIZE,
        "images_per_second": {way: BATCH_SIZE / statistics.median(spent) for way, spent in seconds.items()},
        "times_torchscript": {
            way: statistics.median(script / own for script, own in zip(seconds["TorchScript"], spent, strict=True))
            for way, spent in seconds.items()
        },
        "billion_operations_per_second": rates,
        "seconds_of_the_first_batch": first,
        "difference_of_features": {
            way: ((values - exact).norm() / exact.norm()).item() for way, values in features.items()
        },
        "machine": {"cores": usable_cores(), "threads": torch.get_num_threads(), "torch": torch.__version__},
    }
    write_atomically(ROOT / "benchmarks" / "results" / "inception_speed.json", json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
