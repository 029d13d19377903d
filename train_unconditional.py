#!/usr/bin/env python
"""Train a DDPM on images, exactly as in the paper unless told otherwise.

python train_unconditional.py --config configs/digits.yaml
accelerate launch --multi_gpu train_unconditional.py --config configs/cifar10.yaml
"""

import sys

from common.errors import run_script
from common.launch import honour_requested_processes
from common.options import resolve_precision
from run_folder.config import parse_config


def main() -> None:
    config = parse_config(sys.argv[1:])
    honour_requested_processes()

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.processes import start_processes
    from conditions.condition import Unconditional
    from image_data.sources import open_source
    from image_data.store import load_training_images
    from training.setup import build_run, carry_out, check_before_work

    processes = start_processes(resolve_precision(config.mixed_precision), config.allow_tf32)
    check_before_work(config, processes)

    # The images; the network is told nothing of them.
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, Unconditional())

    # Say what this run is, train it or go on with it, and make its folder a pipeline with a card.
    carry_out(run)


if __name__ == "__main__":
    run_script(main)
