#!/usr/bin/env python
"""Train a DDPM on images, exactly as in the paper unless told otherwise.

python train_unconditional.py --config configs/digits.yaml
accelerate launch --multi_gpu train_unconditional.py --config configs/cifar10.yaml
"""

import sys

from common.errors import quick_imports, run_script
from run_folder.config import parse_config


def main() -> None:
    config = parse_config(sys.argv[1:])

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    with quick_imports():
        from common.processes import start_processes
        from conditions.condition import NoCondition
        from image_data.sources import open_source
        from image_data.store import load_training_images
        from training.setup import build_run, check_before_work, execute

    processes = start_processes(config)
    check_before_work(config, processes)

    # Load the images. There is no condition.
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, NoCondition())

    # Log the audit, train or resume, and save the pipeline and its model card.
    execute(run)


if __name__ == "__main__":
    run_script(main)
