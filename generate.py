#!/usr/bin/env python
"""Generate images, one for each seed: the same for the same seed, on any number of processes.

python generate.py --ddpm
accelerate launch --num_processes 8 generate.py runs/cifar10 --num_images 50000 --ddim --num_inference_steps 100
"""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from common import interruption
from common.errors import run_script
from generation.generate_options import (
    build_method,
    describe_method,
    parse_generation,
    seeds_of,
)

logger = logging.getLogger("generate")


def main() -> None:
    options = parse_generation(sys.argv[1:])

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.processes import start_processes
    from conditions.guidance import condition_of
    from generation.collection import open_collections
    from generation.engine import Job, Pace, generate
    from generation.pictures import draw_pictures, save_interpolation
    from run_folder.saved_model import find_models, output_folder

    processes = start_processes(options)

    # The models, how noise becomes images, and where they go.
    models = find_models(options.model, options.checkpoints, options.weights) if processes.is_main else None
    jobs, folders = [], []
    for model in processes.broadcast(models):
        condition = condition_of(options, model, processes.device)
        job = Job(model, build_method(options, model), condition=condition)
        logger.info("%s, %s weights: %s", model.source, model.weights, describe_method(job.method))
        folder = output_folder(model, job.method, processes.precision, condition.name)
        if options.output_dir is not None:
            folder = Path(options.output_dir) / (model.name if options.checkpoints else "")
        jobs.append(job)
        folders.append(folder)
    wanted_by_device = processes.device.type == "cuda" and processes.precision != "no"
    channels_last = {"yes": True, "no": False, "auto": wanted_by_device}[options.channels_last]

    if options.interpolate:
        first, last = options.interpolate
        processes.finish()
        if processes.is_main:
            path = folders[0] / f"interpolation-{first}-{last}.png"
            save_interpolation(jobs[0], processes, first, last, path)
            logger.info("%s goes from seed %d to seed %d", path, first, last)
        return

    # From here on, to be stopped means to keep what is whole; the same command continues with what is missing.
    seeds = seeds_of(options)
    how = {
        "precision": processes.precision,
        "allow_tf32": options.allow_tf32,
        "channels_last": channels_last,
        "compile": options.compile,
    }
    with interruption.deferred(), ExitStack() as writers:
        collections, batch_size = open_collections(jobs, folders, seeds, options, how, processes)
        pace = Pace(batch_size, channels_last, options.compile)
        of_job = {id(collection.job): collection for collection in collections}
        for collection in collections:
            writers.enter_context(collection.writer)

        missing = sum(len(collection.missing) for collection in collections)
        logger.info("%d of %d images are missing", missing, len(seeds) * len(jobs))
        for job, batch, images in generate(jobs, processes, pace):
            of_job[id(job)].add(batch, images)
        shown = [collection.finish(processes) for collection in collections]

    # Pictures of the images, which the other processes need not wait for.
    processes.finish()
    if processes.is_main:
        for collection, images in zip(collections, shown, strict=True):
            draw_pictures(options, collection.job, processes, pace, images, collection.layout, collection.folder)
            logger.info("%s holds %d images and grid.png", collection.folder, len(seeds))


if __name__ == "__main__":
    run_script(main)
