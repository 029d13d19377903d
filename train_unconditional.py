#!/usr/bin/env python
"""Train a DDPM on images, exactly as in the paper unless told otherwise.

python train_unconditional.py --config configs/digits.yaml
accelerate launch --multi_gpu train_unconditional.py --config configs/cifar10.yaml
"""

import logging
import sys
from pathlib import Path

from common import interruption
from common.errors import run_script
from common.launch import honour_requested_processes
from common.options import resolve_precision
from training.config import (
    parse_config,
    resolve_batch,
    resolve_steps,
    save_config,
    settings_of,
    with_resolved,
)

logger = logging.getLogger("train_unconditional")


def main() -> None:
    config = parse_config(sys.argv[1:])
    honour_requested_processes()

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.processes import start_processes
    from common.randomness import generator_for
    from image_data.batches import TrainingBatches
    from schedulers.ddpm import build_scheduler
    from training.banner import log_banner, log_end
    from training.checkpoint import CheckpointWriter, load_checkpoint
    from training.images import load_training_images
    from training.loop import TrainingState, Window, is_over, train
    from training.milestones import Milestones
    from training.model import build_training_unet, check_network
    from training.optimizer import build_ema, build_optimizer, learning_rate_schedule
    from training.output import check_disk, check_output_dir, open_run
    from training.publish import check_push, publish
    from training.timesteps import TimestepSampling, build_sampler, build_weighting
    from training.tracking import Tracking

    precision = resolve_precision(config.mixed_precision)
    processes = start_processes(precision, config.allow_tf32)
    batch = resolve_batch(config, processes.count)
    check_output_dir(config)
    check_network(config)
    check_push(config)

    # The diffusion, and what of it a step trains on.
    scheduler = build_scheduler(
        config.ddpm_beta_schedule, config.ddpm_num_steps, config.variance_type, config.prediction_type
    )
    sampler = build_sampler(config, scheduler.alphas_cumprod)
    weight_of = build_weighting(config, scheduler.alphas_cumprod)

    # The images, and which of them make up which step.
    images, channels, num_workers = load_training_images(config, processes)
    batches = TrainingBatches(
        images,
        total_batch_size=batch.total,
        seed=config.seed,
        random_flip=config.random_flip,
        process_index=processes.index,
        num_processes=processes.count,
        gradient_accumulation_steps=batch.accumulation,
        num_workers=num_workers,
    )
    total_steps = resolve_steps(config, batches.steps_per_epoch)
    config = with_resolved(config, batch, total_steps, channels, precision)

    # The network, and all that changes while training.
    unet = build_training_unet(config, channels, generator_for(config.seed, "initialisation")).to(processes.device)
    state = TrainingState(
        unet=unet,
        ema=build_ema(config, unet),
        optimizer=build_optimizer(config, unet),
        timesteps=TimestepSampling(sampler, weight_of, scheduler, batches, processes, channels),
        window=Window.empty(processes.device),
        settings=settings_of(config) | {"images": len(images)},
        scaler=processes.accelerator.scaler,
    )

    # Say what this run is and where it differs from the paper's.
    check_disk(config, unet.num_parameters())
    log_banner(config, processes, state, scheduler, batches, batch, total_steps, precision)
    if config.dry_run:
        return

    # From here on, to be stopped means to save first.
    with interruption.deferred():
        # Make the run's folder, or go on with the run that is in it.
        checkpoint = open_run(config, processes)
        if checkpoint is not None:
            load_checkpoint(state, checkpoint, same_run=config.resume_from_checkpoint == "latest")
        if processes.is_main:
            save_config(config, Path(config.output_dir) / "config.yaml")

        # Train.
        model = processes.accelerator.prepare(unet)
        rate = learning_rate_schedule(config, total_steps)
        writer = CheckpointWriter(config, checkpoint)
        over = is_over(config, processes, state.step, state.train_seconds, total_steps)
        with Tracking(config, processes, state, total_steps, batch.total, over) as tracking, processes.noticing_loss():
            milestones = Milestones(config, processes, scheduler, tracking, writer, batches.steps_per_epoch)
            train(config, processes, model, state, scheduler, batches, rate, total_steps, tracking, milestones, over)
        log_end(config, state, total_steps)

    # The run folder is a pipeline now. A card, and the Hub if asked, which the other processes need not wait for.
    processes.finish()
    if processes.is_main:
        publish(config, state)


if __name__ == "__main__":
    run_script(main)
