"""A run from its configuration and images: put together, announced, trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import interruption
from common.options import resolve_precision
from common.randomness import generator_for
from image_data.batches import TrainingBatches
from run_folder.checkpoint_files import CheckpointWriter, load_checkpoint
from run_folder.config import (
    Batch,
    TrainingConfig,
    resolve_batch,
    resolve_steps,
    save_config,
    settings_of,
    with_resolved,
)
from run_folder.folder import check_disk, check_output_dir, open_run
from run_folder.publish import check_push, publish
from schedulers.ddpm import ExactDDPMScheduler, build_scheduler
from training.banner import log_banner, log_end
from training.loop import TrainingState, Window, is_over, train
from training.milestones import Milestones
from training.network import build_training_unet, check_network
from training.timestep_sampling import TimestepSampling, build_sampler, build_weighting
from training.tracking import Tracking
from training.update import build_ema, build_optimizer, learning_rate_schedule

if TYPE_CHECKING:
    import torch

    from common.processes import Processes
    from conditions.condition import Unconditional
    from image_data.store import TrainingImages
    from schedulers.timestep_samplers import TimestepSampler


@dataclass
class Run:
    """What is put together before the first step."""

    config: TrainingConfig  # nothing in it is open any more
    processes: Processes
    condition: Unconditional
    batch: Batch
    batches: TrainingBatches
    scheduler: ExactDDPMScheduler
    state: TrainingState
    total_steps: int


def check_before_work(config: TrainingConfig, processes: Processes) -> None:
    """Raise, before any image is decoded, for what can be known to end badly."""
    resolve_batch(config, processes.count)
    check_output_dir(config)
    check_network(config)
    check_push(config)
    build_diffusion(config)


def build_diffusion(config: TrainingConfig) -> tuple[ExactDDPMScheduler, TimestepSampler, torch.Tensor]:
    """The diffusion, and what of it a step trains on: the timestep sampler and the weight of the loss at every t."""
    scheduler = build_scheduler(
        config.ddpm_beta_schedule, config.ddpm_num_steps, config.variance_type, config.prediction_type
    )
    alphas_cumprod = scheduler.alphas_cumprod
    return scheduler, build_sampler(config, alphas_cumprod), build_weighting(config, alphas_cumprod)


def build_run(config: TrainingConfig, processes: Processes, data: TrainingImages, condition: Unconditional) -> Run:
    """Which images make up which step, the network, the diffusion, and all that changes while training."""
    batch = resolve_batch(config, processes.count)
    batches = TrainingBatches(
        data.images,
        total_batch_size=batch.total,
        seed=config.seed,
        random_flip=config.random_flip,
        process_index=processes.index,
        num_processes=processes.count,
        gradient_accumulation_steps=batch.accumulation,
        num_workers=data.num_workers,
        balanced_labels=condition.balanced_labels,
    )
    total_steps = resolve_steps(config, batches.steps_per_epoch)
    config = with_resolved(config, batch, total_steps, data.channels, resolve_precision(config.mixed_precision))

    initialisation = generator_for(config.seed, "initialisation")
    unet = build_training_unet(config, data.channels, initialisation, condition.network).to(processes.device)
    scheduler, sampler, weight_of = build_diffusion(config)
    state = TrainingState(
        unet=unet,
        ema=build_ema(config, unet),
        optimizer=build_optimizer(config, unet),
        timesteps=TimestepSampling(sampler, weight_of, scheduler, batches, processes, data.channels),
        window=Window.empty(processes.device),
        settings=settings_of(config) | {"images": len(data.images)} | condition.settings,
        condition=condition.description,
        scaler=processes.accelerator.scaler,
    )
    return Run(config, processes, condition, batch, batches, scheduler, state, total_steps)


def carry_out(run: Run) -> None:
    """What follows once a run is put together, whatever the network is told."""
    announce(run)
    if run.config.dry_run:
        return
    train_to_the_end(run)
    # A card, and the Hub if asked, which the other processes need not wait for.
    run.processes.finish()
    if run.processes.is_main:
        publish(run.config, run.state)


def announce(run: Run) -> None:
    """Say what this run is and where it differs from the paper's; raise if its disk is too small."""
    check_disk(run.config, run.state.unet.num_parameters())
    log_banner(
        run.config, run.processes, run.state, run.scheduler, run.batches, run.batch, run.total_steps,
        run.config.mixed_precision,
    )  # fmt: skip


def train_to_the_end(run: Run) -> None:
    """Make the run's folder, or go on with the run that is in it; from here on, to be stopped means to save first."""
    config, processes, state, total_steps = run.config, run.processes, run.state, run.total_steps
    output_dir = Path(config.output_dir)
    with interruption.deferred():
        checkpoint = open_run(config, processes)
        if checkpoint is not None:
            load_checkpoint(state, checkpoint, same_run=config.resume_from_checkpoint == "latest")
        if processes.is_main:
            save_config(config, output_dir / "config.yaml")
            run.condition.write_parts(output_dir)

        model = processes.accelerator.prepare(state.unet)
        rate = learning_rate_schedule(config, total_steps)
        writer = CheckpointWriter(config, checkpoint)
        over = is_over(config, processes, state.step, state.train_seconds, total_steps)
        with (
            Tracking(config, processes, state, total_steps, run.batch.total, over) as tracking,
            processes.reporting_dead_peers(),
        ):
            milestones = Milestones(
                config, processes, run.scheduler, run.condition, tracking, writer, run.batches.steps_per_epoch
            )
            train(
                config, processes, model, state, run.scheduler, run.batches, run.condition, rate, total_steps,
                tracking, milestones, over,
            )  # fmt: skip
        log_end(config, state, total_steps)
