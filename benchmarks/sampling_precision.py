#!/usr/bin/env python
"""What bf16 changes in FID: images of a trained model made in float32 and in bf16, from the same seeds.

    python -m benchmarks.sampling_precision runs/cifar10 --data ../cifar10

Both are compiled; Inception is in float32 for both. FID is of --num_images images to as many of the training images.
It takes a model that is worth measuring, and some time, so `make bench` leaves it out.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import Result, Row, Spread, add_data, parser, run_quietly, write_images, write_result
from common.errors import run_script

WAYS = {"float32": [], "bf16": ["--mixed_precision=bf16"]}
METHODS = {"DDPM": ("--ddpm", 250), "DDIM": ("--ddim", 50)}
MOST_CHANGE = 1.0  # per cent


def fid_of(images: Path, real: Path) -> float:
    """Measure a folder of images against another."""
    output = images.parent / "measured"
    run_quietly("evaluate.py", f"--generated={images}", f"--real={real}", f"--output_dir={output}")
    with (output / "evaluation_results.csv").open(newline="") as file:
        *_, row = csv.DictReader(file)
    return next(float(value) for name, value in row.items() if name.startswith("fid@"))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", type=Path, help="a trained run")
    add_data(arguments)
    arguments.add_argument("--num_images", type=int, default=5000, help="of each kind (default: %(default)s)")
    options = arguments.parse_args()
    count = 10 if options.quick else options.num_images
    result = Result()
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        real = write_images(options.data, count, folder / "real")
        for method, (flag, steps) in METHODS.items():
            fids = {}
            for way, flags in WAYS.items():
                images = folder / f"{method}-{way}" / "images"
                run_quietly(
                    *("generate.py", options.run, flag, f"--num_inference_steps={steps}", f"--num_images={count}"),
                    *("--compile", f"--output_dir={images}", *flags),
                )
                fids[way] = fid_of(images, real)
            change = 100 * abs(fids["bf16"] / fids["float32"] - 1)
            what = f"FID of bf16, {method}, {steps} steps, {count:,} images of the same seeds"
            columns = f"{fids['bf16']:.3f}", f"float32: {fids['float32']:.3f}"
            result.rows.append(Row(what, *columns, Spread.of([change]), "%", MOST_CHANGE, "at most"))
            result.details[method] = {"fid": fids, "steps": steps}
    network = json.loads((options.run / "unet" / "config.json").read_text())
    result.details["network"] = {name: network[name] for name in ("sample_size", "block_out_channels")}
    write_result("sampling_precision", result, options.output_dir)


if __name__ == "__main__":
    run_script(main)
