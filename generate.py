#!/usr/bin/env python
"""Generate images, one for each seed: the same for the same seed, on any number of processes.

python generate.py runs/cifar10
accelerate launch --num_processes 8 generate.py runs/cifar10 --num_images 50000 --ddim --num_inference_steps 100
"""

import logging
import sys
from pathlib import Path

from common.errors import quick_imports, run_script
from generation.generate_options import parse_generation, seeds_of
from generation.methods import build_method

logger = logging.getLogger("generate")


def main() -> None:
    options = parse_generation(sys.argv[1:])

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    with quick_imports():
        from common.processes import start_processes
        from conditions.guidance import condition_of
        from generation.engine import InferenceSettings, Job, prefers_channels_last
        from generation.pictures import (
            SHOWN,
            find_compared,
            save_between_images,
            save_interpolation,
            save_nearest,
            save_progress,
            save_progressive,
        )
        from generation.sample_folder import SampleFolder, complete_folders, default_folder
        from run_folder.saved_model import find_models

    processes = start_processes(options)

    # The models, how noise becomes images with each, and where they go.
    lengths = [] if options.ema_length is None else [options.ema_length]
    fetches = processes.is_local_main  # every machine fetches what is on the Hub
    models = find_models(options.model, options.checkpoints, options.weights, lengths) if fetches else None
    compared = find_compared(models[0], options) if processes.is_main and options.nearest else None
    folders, seeds = [], seeds_of(options)
    for model in processes.broadcast(models):
        job = Job(model, build_method(options, model), condition_of(options, model, processes.device))
        logger.info("%s, %s weights: %s", model.source, model.weights, job.method.description)
        path = default_folder(job, processes.precision)
        if options.output_dir is not None:
            path = Path(options.output_dir) / (model.name if options.checkpoints else "")
        folders.append(SampleFolder(path, job, seeds, options))

    if options.interpolate or options.interpolate_images:
        processes.finish()
        if processes.is_main:
            save = save_interpolation if options.interpolate else save_between_images
            logger.info("%s is written", save(folders[0].job, options, processes, folders[0].path))
        return

    precision, channels_last = processes.precision, options.channels_last == "yes"
    if options.channels_last == "auto":
        channels_last = prefers_channels_last(processes.device, precision)
    settings = InferenceSettings(precision, options.allow_tf32, channels_last, options.compile, options.batch_size)
    settings = complete_folders(folders, processes, settings)

    # Pictures of the images, which the other processes need not wait for.
    processes.finish()
    for folder in folders if processes.is_main else []:
        if options.progress_gif:
            save_progress(folder.job, seeds[:SHOWN], processes, settings, folder.path / "progress.gif")
        if options.progressive:
            save_progressive(folder.job, seeds[:SHOWN], processes, settings, folder.path / "progressive.png")
        if options.nearest:
            first = folder.layout.seeds[:SHOWN]
            save_nearest(folder.shown[:SHOWN], first, options.nearest, compared, folder.path / "nearest.png")
        logger.info("%s holds %d images and grid.png", folder.path, len(seeds))


if __name__ == "__main__":
    run_script(main)
