#!/usr/bin/env python
"""Estimate the hours that the CIFAR-10 recipe takes on a GPU: counted operations over published peak rates.

    python benchmarks/training_cost.py

Nothing is measured here but the operations of the network. The share of the peak that a U-Net of this size reaches is
an assumption, printed with the result; take the hours as an order of magnitude.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from run_folder.config import PAPER_BATCH_SIZE, PAPER_STEPS  # noqa: E402
from training.network import build_unet  # noqa: E402

# Peak dense rates in TFLOP/s from NVIDIA's data sheets: float32 (without TF32), TF32, bf16.
PEAKS = {
    "V100 SXM2": {"float32": 15.7},
    "RTX 4090": {"float32": 82.6, "bf16": 165.2},
    "A100 SXM4": {"float32": 19.5, "TF32": 156.0, "bf16": 312.0},
    "H100 SXM5": {"float32": 66.9, "TF32": 494.7, "bf16": 989.4},
}
# The share of the peak that is reached, between pessimism and optimism: matrix units, which are far faster than
# the memory, stay far from it on feature maps of 32x32 and less.
ASSUMED_UTILISATION = {"float32": (0.2, 0.5), "TF32": (0.1, 0.25), "bf16": (0.1, 0.25)}
BACKWARD = 2  # a backward pass costs about two forward passes


def forward_operations() -> int:
    """Floating-point operations of one forward pass for one image, counted by torch."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    unet = build_unet(32, 3)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        unet(torch.zeros(1, 3, 32, 32), 0)
    return counter.get_total_flops()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    forward = forward_operations()
    training = forward * (1 + BACKWARD) * PAPER_BATCH_SIZE * PAPER_STEPS
    sampling = forward * 1000 * 50_000
    rows = [
        {
            "gpu": gpu,
            "precision": precision,
            "training_hours": [training / (peak * 1e12 * share) / 3600 for share in ASSUMED_UTILISATION[precision]],
            "sampling_hours": [sampling / (peak * 1e12 * share) / 3600 for share in ASSUMED_UTILISATION[precision]],
        }
        for gpu, peaks in PEAKS.items()
        for precision, peak in peaks.items()
    ]
    result = {
        "kind": "estimate, not a measurement",
        "forward_flops_per_image": forward,
        "training_flops": training,
        "sampling_flops": sampling,
        "assumed_utilisation": ASSUMED_UTILISATION,
        "hours_on_one_gpu": rows,
    }
    path = ROOT / "benchmarks" / "results" / "training_cost.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{forward / 1e9:.2f} GFLOP per image and forward pass; {training / 1e18:.2f} EFLOP to train")
    print("| one GPU | precision | 800,000 steps | 50,000 samples, 1000 steps each |\n|---|---|---|---|")
    for row in rows:
        (slow_train, fast_train), (slow_sample, fast_sample) = row["training_hours"], row["sampling_hours"]
        hours = f"{fast_train:.0f} to {slow_train:.0f} h | {fast_sample:.0f} to {slow_sample:.0f} h"
        print(f"| {row['gpu']} | {row['precision']} | {hours} |")


if __name__ == "__main__":
    main()
