#!/usr/bin/env python
"""Train a DDPM conditioned on classes or captions, otherwise exactly as in the paper.

python train_conditional.py --config configs/digits_class.yaml
accelerate launch --multi_gpu train_conditional.py --config configs/cifar10_class.yaml
python train_conditional.py --condition text --train_data_dir photos --text_encoder all-MiniLM-L6-v2
"""

import sys

from common.errors import quick_imports, run_script
from run_folder.config import parse_conditional_config


def main() -> None:
    config = parse_conditional_config(sys.argv[1:])

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    with quick_imports():
        from common.processes import start_processes
        from conditions.training_condition import check_condition, find_annotations, load_condition
        from image_data.sources import open_source
        from image_data.store import load_training_images
        from training.setup import build_run, check_before_work, execute

    processes = start_processes(config)
    check_before_work(config, processes)
    check_condition(config)

    # The images, and what the network is told of each: its class, or a caption as a frozen encoder sees it.
    source = open_source(config, processes)
    annotations = find_annotations(config, source)
    images = load_training_images(config, source, processes)
    condition = load_condition(config, annotations, images, processes)
    run = build_run(config, processes, images, condition)

    # Log the audit, train or resume, and save the pipeline and its model card.
    execute(run)


if __name__ == "__main__":
    run_script(main)
