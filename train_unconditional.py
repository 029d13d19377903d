#!/usr/bin/env python
"""Train a DDPM on images, exactly as in the paper unless told otherwise.

python train_unconditional.py --config configs/digits.yaml
accelerate launch --multi_gpu train_unconditional.py --config configs/cifar10.yaml
"""

import sys

from common.errors import run_script
from common.launch import honour_requested_processes
from common.options import resolve_precision
from training.config import parse_config


def main() -> None:
    config = parse_config(sys.argv[1:])
    honour_requested_processes()

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.processes import start_processes
    from training.conditioning import Unconditional
    from training.images import load_training_images
    from training.publish import publish
    from training.run import announce, build_run, check_before_work, train_to_the_end

    processes = start_processes(resolve_precision(config.mixed_precision), config.allow_tf32)
    check_before_work(config, processes)

    # The images; the network is told nothing of them.
    images = load_training_images(config, processes)
    run = build_run(config, processes, images, Unconditional())

    # Say what this run is and where it differs from the paper's.
    announce(run)
    if config.dry_run:
        return

    # Train, or go on with the run that is in the output folder.
    train_to_the_end(run)

    # The run folder is a pipeline now. A card, and the Hub if asked, which the other processes need not wait for.
    processes.finish()
    if processes.is_main:
        publish(run.config, run.state)


if __name__ == "__main__":
    run_script(main)
