"""Build a run from its configuration and images, announce it, train it and publish it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common.errors import UserError, reason_of, user_errors
from common.files import write_atomically
from common.interruption import stop_requested, stops_deferred
from common.machine import CapturedWork, can_be_compiled, fits_in_memory, garbage_kept, largest_batch, to_device
from common.processes import Processes
from common.randomness import compile_words, generator_for
from conditions.condition import Condition
from image_data.batches import Batch, TrainingBatches
from image_data.store import TrainingImages
from reporting.run_page import write_report
from run_folder.checkpoints import CheckpointWriter, is_own, load_checkpoint
from run_folder.config import (
    BatchSizes,
    TrainingConfig,
    as_yaml,
    resolve_batch_sizes,
    resolve_steps,
    scheduler_of,
    settings_of,
    with_resolved,
)
from run_folder.folder import (
    RunFolder,
    check_disk,
    check_output_dir,
    completed_step,
    go_on_from,
    open_run,
    total_batch_of_run,
    without_repeating,
)
from run_folder.publish import check_push, publish
from schedulers.ddpm import ExactDDPMScheduler
from schedulers.loss import DiffusionLoss, build_loss
from schedulers.timestep_samplers import LogSNRBins
from training.audit import announce, audit, log_end
from training.loop import learn, train
from training.milestones import Milestones
from training.network import build_training_unet, check_network
from training.tracking import Tracking, Window
from training.update import Update

logger = logging.getLogger(__name__)

Ending = Literal["finished", "stopped"] | None


@dataclass
class TrainingState:
    """All that changes during a run: what a checkpoint holds."""

    unet: torch.nn.Module
    update: Update
    loss: DiffusionLoss
    window: Window
    settings: dict[str, object]
    condition: dict[str, object] | None = None  # what image generation needs to know about it
    step: int = 0
    train_seconds: float = 0.0
    smoothed_loss: float | None = None

    def numbers(self) -> dict:
        """Return the state that is not saved as tensors, ready for JSON."""
        ema, scaler = self.update.ema, self.update.scaler
        return {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "smoothed_loss": self.smoothed_loss,
            "ema_updates": None if ema is None else ema.step.item(),
            "gradient_scaler": None if scaler is None else scaler.state_dict(),
            "window": self.window.numbers(),
            "settings": self.settings,
        }

    def load_numbers(self, numbers: dict) -> None:
        """Restore the values that `numbers` returned."""
        self.step, self.train_seconds = numbers["step"], numbers["train_seconds"]
        self.smoothed_loss = numbers["smoothed_loss"]
        for average in self.update.averages:
            average.step.fill_(numbers["ema_updates"])
            average.initted.fill_(numbers["ema_updates"] > 0)
        self.window.load_numbers(numbers["window"])
        if self.update.scaler is not None and numbers["gradient_scaler"]:
            self.update.scaler.load_state_dict(numbers["gradient_scaler"])

    @property
    def sampling_weights(self) -> dict[str, torch.nn.Module]:
        """Return the networks to draw grids with: the moving average, and the raw weights while that still lags."""
        ema = self.update.ema
        networks = {} if ema is None else {"ema": ema.ema_model}
        return networks | ({"raw": self.unet} if ema is None or self.step < 5 * ema.memory else {})


@dataclass
class Run:
    """Everything that a training needs; `opened` fills in the last five fields."""

    config: TrainingConfig  # with all defaults resolved
    processes: Processes
    condition: Condition
    sizes: BatchSizes
    batches: TrainingBatches
    state: TrainingState
    total_steps: int
    over_at_start: bool = False  # there was nothing left to train when it began
    network: torch.nn.Module | None = None  # `state.unet` as accelerate wrapped it
    tracking: Tracking | None = None
    milestones: Milestones | None = None
    learn: Callable[[Batch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    def is_over(self) -> bool:
        """Tell whether the steps are done, or the time is up."""
        return self.state.step >= self.total_steps or self.processes.all_reduce_any(self._time_is_up)

    @property
    def _time_is_up(self) -> bool:
        """Tell by the clock of the main process, which is saved; others also wait while it draws and writes."""
        limit = self.config.max_train_seconds
        seconds = self.state.train_seconds if self.tracking is None else self.tracking.clock.train_seconds
        return self.processes.is_main and limit is not None and seconds >= limit

    def ending(self) -> Ending:
        """Return how the run ends after this step, on all processes alike; None if it goes on."""
        if self.state.step >= self.total_steps:
            return "finished"
        time_is_up, stop = self.processes.any_a_step_ago(self._time_is_up, stop_requested() is not None)
        return "finished" if time_is_up else "stopped" if stop else None

    @contextmanager
    def gradient_exchange(self, enabled: bool) -> Iterator[None]:
        """Exchange gradients with the other processes during the pass made inside this context, if enabled.

        Most of the exchange overlaps with the backward pass; only the part after the last gradient is timed.
        """
        if self.config.clip_per_replica:
            enabled = False  # each process clips its own gradients first; `Update.clip` exchanges the clipped ones
        with nullcontext() if enabled else self.processes.accelerator.no_sync(self.network):
            yield
        if enabled and self.processes.count > 1:
            self.state.window.exchange_timer.stop()

    def check_health(self, ending: Ending) -> None:
        """Raise if loss or gradient is not finite; a GPU is queried only at steps that fetch its results anyway."""
        step, on_cpu = self.state.step, self.processes.device.type == "cpu"
        if on_cpu or ending or step % self.config.logging_steps == 0 or self.milestones.due(step):
            self.state.update.check(step, self.state.window, lambda: self.milestones.last_checkpoint)

    def batch_that_fits(self) -> str:
        """Say, after a step ran out of memory, which batch would fit and which flags keep the global batch the same."""
        failed, share, update = self.sizes.per_device, self.sizes.total // self.processes.count, self.state.update
        update.optimizer.zero_grad()
        moments = 0 if update.optimizer.state else 2 * sum(weights.nbytes for weights in self.state.unet.parameters())
        fitting = largest_batch(self.pass_of_zeros, self.processes.device, failed, to_come=moments)
        what = f"--train_batch_size {failed}: a step with this many images does not fit in the memory of "
        what += f"{self.processes.device}"
        if not fitting:
            return f"{what}, nor with a single one: choose a smaller network or --resolution, or a larger device"
        divisor = max(size for size in range(1, fitting + 1) if share % size == 0)
        use = f"--train_batch_size {divisor} --gradient_accumulation_steps {share // divisor}"
        keeps = f"which keeps the batch of {self.sizes.total}"
        if self.config.clip_per_replica:  # the number of replicas must equal the passes of all processes
            use += f" --clip_per_replica {self.sizes.total // divisor}"
            keeps += " but clips smaller parts of it"
            if not self.config.gradient_checkpointing:
                keeps += "; --gradient_checkpointing takes less memory and changes nothing"
        return f"{what}; about {fitting} would fit: use {use}, {keeps}"

    def check_whole_images_fit(self) -> None:
        """Run out of memory now if the first step on full-size images, perhaps hours away, would do so."""
        if self.state.step >= self.config.half_resolution_steps or self.config.compile:
            return  # a compiled network needs less memory than this pass, which could fail though training would fit
        # Adam's moments, which do not exist before its first step.
        to_come = 0 if self.state.update.optimizer.state else 2
        moments = [torch.empty_like(weight) for weight in self.state.unet.parameters() for _ in range(to_come)]
        self.pass_of_zeros(self.sizes.per_device)
        del moments

    def pass_of_zeros(self, count: int) -> None:
        """Make a forward and a backward pass over full-size black images, to measure or try out the memory it needs."""
        zeros, unet = torch.zeros(count, dtype=torch.int64), self.state.unet
        shape = (unet.config.in_channels, self.config.resolution, self.config.resolution)
        images = torch.zeros(count, *shape, dtype=torch.uint8)
        batch = Batch(self.config.half_resolution_steps, images, zeros, zeros, zeros)
        with self.processes.accelerator.autocast():
            error = self.state.loss(unet, batch, to_device(zeros, self.processes.device))
        torch.autograd.grad(error.mean(), [*unet.parameters()])


def check_before_work(config: TrainingConfig, processes: Processes) -> None:
    """Raise, before any image is decoded, for every mistake that can already be recognised."""
    # The main process tells whether this is a restart: on another machine the job may have another name.
    check_output_dir(processes.broadcast(without_repeating(config) if processes.is_main else None))
    resolve_batch_sizes(with_total_of_run(config, processes), processes.count)
    if config.train_data_dir is not None:
        check_images_are_no_samples(config)
    check_network(config)
    if processes.is_main:
        check_push(config)
    loss = build_loss(vars(config), build_process(config))
    if config.cuda_graph:
        check_cuda_graph(config, loss, processes)


def check_images_are_no_samples(config: TrainingConfig) -> None:
    """Raise if the folder to train on is itself a run, or if this run's samples would be written into it."""
    named, data = config.train_data_dir, Path(config.train_data_dir).expanduser().resolve()
    if RunFolder(data).is_run:
        raise UserError(
            f"--train_data_dir {named}: is a run, not a folder of photos; to continue it, use "
            f"--config {Path(named) / 'config.yaml'} --output_dir {named}"
        )
    if data in Path(config.output_dir).expanduser().resolve().parents:
        raise UserError(
            f"--output_dir {config.output_dir}: is inside --train_data_dir {named}, where the run's samples would be "
            f"taken for images to train on; choose a folder elsewhere"
        )


def check_cuda_graph(config: TrainingConfig, loss: DiffusionLoss, processes: Processes) -> None:
    """Raise if a training step cannot be captured as one CUDA graph."""
    reasons = {
        f"needs an NVIDIA GPU, and this run is on {processes.device}": processes.device.type != "cuda",
        f"is for one process, and there are {processes.count}": processes.count > 1,
        "the scaling of fp16 asks the host at every step": processes.precision == "fp16",
        "--gradient_checkpointing asks the host for the state of dropout": config.gradient_checkpointing,
        "--half_resolution_steps changes the size of the images": config.half_resolution_steps > 0,
        "captions come from the host, and differ in length": getattr(config, "condition", None) == "text",
        f"{config.timestep_sampler} looks at the network within a step": loss.sampler.looks_at_updates,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"--cuda_graph: {reason}; leave it out")


def build_process(config: TrainingConfig) -> ExactDDPMScheduler:
    """Build the diffusion that the configuration names."""
    named = f"--ddpm_beta_schedule {config.ddpm_beta_schedule} with --beta_end {config.beta_end:g}"
    with user_errors(f"{named}: choose other betas", ValueError):
        return scheduler_of(vars(config))


def with_total_of_run(config: TrainingConfig, processes: Processes) -> TrainingConfig:
    """Return the configuration with the total batch of the run that goes on, if only the images per device are given.

    Otherwise another number of processes would make another batch, and so another run.
    """
    if config.train_batch_size is None or config.total_batch_size is not None:
        return config
    total = processes.broadcast(total_batch_of_run(config) if processes.is_main else None)
    images = config.train_batch_size * processes.count * (config.gradient_accumulation_steps or 1)
    if total is None or total == images:
        return config
    if config.gradient_accumulation_steps is not None or total % images:
        raise UserError(
            f"--train_batch_size {config.train_batch_size}: on {processes.count} process(es) these are {images} "
            f"images a step, but a step of the run in {config.output_dir} has {total}: choose a number that divides it "
            "and leave out --gradient_accumulation_steps, or make it another run from here on with --total_batch_size "
            f"{images}"
        )
    return replace(config, total_batch_size=total)


def build_run(config: TrainingConfig, processes: Processes, data: TrainingImages, condition: Condition) -> Run:
    """Build batches, network, objective and all that changes while training; raise if the disk has no room for it."""
    config = with_total_of_run(config, processes)
    sizes = resolve_batch_sizes(config, processes.count)
    batches = TrainingBatches(data, condition, config.seed, sizes.total, sizes.accumulation, processes)
    total_steps = resolve_steps(config, batches.steps_per_epoch)
    if total_steps <= config.half_resolution_steps:
        raise UserError(
            f"--half_resolution_steps {config.half_resolution_steps}: the run is over after {total_steps} steps and "
            "never sees an image in its own size; make it longer (--max_train_steps)"
        )
    config = with_resolved(config, sizes, total_steps, data.channels, processes.precision)

    initialisation = generator_for(config.seed, "initialisation")
    too_large = (
        f"the network and its moving average do not fit in the memory of {processes.device}: choose a smaller one"
    )
    with fits_in_memory(processes.device, lambda: too_large):
        unet = build_training_unet(config, data.channels, initialisation, condition.network).to(processes.device)
        check_disk(config, unet.num_parameters())
        loss = build_loss(vars(config), build_process(config))
        shape = (data.channels, config.resolution, config.resolution)
        loss.start(config.seed, sizes.total, shape, condition.inputs, processes)
        state = TrainingState(
            unet=unet,
            update=Update(config, unet, total_steps, processes),
            loss=loss,
            window=Window(processes, LogSNRBins(loss.process.alphas_cumprod), config.logging_steps),
            settings=settings_of(config) | {"images": len(data.images)} | condition.settings,
            condition=condition.description,
        )
    return Run(config, processes, condition, sizes, batches, state, total_steps)


def execute(run: Run) -> None:
    """Log the audit of a run, train or resume it, and save the pipeline and its model card."""
    announce(run)
    if run.config.dry_run:
        return
    if not was_completed(run):
        with stops_deferred(), opened(run):  # from here on, a stop saves a checkpoint first
            train(run)

    # The report, the model card and, if asked, the push to the Hub; the other processes need not wait for them.
    run.processes.finish()
    if run.processes.is_main:
        report(run.config)
        publish(run.config, run.state)


def report(config: TrainingConfig) -> None:
    """Write the run's report.html; if that is not possible, only warn, so that a finished run does not fail."""
    folder = RunFolder(config.output_dir)
    try:
        write_report([folder.path], folder.report_file)
        logger.info("Look at %s in a browser", folder.report_file)
    except Exception as error:
        logger.warning("%s could not be written: %s", folder.report_file, reason_of(error))


def was_completed(run: Run) -> bool:
    """Tell whether the folder's run is complete though its checkpoints have been deleted; log it if so."""
    step = run.processes.broadcast(completed_step(run.config) if run.processes.is_main else None)
    if step is not None:
        run.state.step = step
        log_end(run)
    return step is not None


def graph_of(run: Run) -> Callable[[Batch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return `learn` as a CUDA graph that takes everything that varies between steps as tensors on the device."""
    device, static = run.processes.device, ("images", "positions", "condition")

    def work(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *parts, step, t, weights = inputs
        batch = Batch(step, indices=parts[1], passes=run.sizes.accumulation, **dict(zip(static, parts, strict=True)))
        return learn(run, batch, t, weights)

    captured = CapturedWork(work)

    def replay(batch: Batch, t: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [to_device(getattr(batch, name), device) for name in static]
        return captured(*parts, torch.full((), batch.step, device=device), t, weights)

    return replay


@contextmanager
def opened(run: Run) -> Iterator[None]:
    """Make the run's folder, or continue the run that is in it, and hold open everything that training needs."""
    config, processes = run.config, run.processes
    checkpoint = open_run(config, processes)
    rows = audit(run)  # of the network as initialised, so before a checkpoint is loaded
    if checkpoint is not None:
        resume(run, checkpoint)
    if processes.is_main:
        go_on_from(checkpoint, config)
        folder = RunFolder(config.output_dir)
        write_atomically(folder.config_file, as_yaml(config))
        write_atomically(folder.audit_file, json.dumps([astuple(row) for row in rows], indent=1) + "\n")
        folder.write_condition(run.condition)
    processes.barrier()  # a text encoder may take long to write, and later exchanges are less patient
    run.over_at_start = run.is_over()
    prepare_network(run)
    not_here = "--compile: this machine cannot compile the network; train without it"
    with fits_in_memory(processes.device, run.batch_that_fits):
        run.check_whole_images_fit()
    with (
        closing(Tracking(run)) as run.tracking,
        processes.reporting_dead_peers(),
        fits_in_memory(processes.device, run.batch_that_fits),
        can_be_compiled(not_here),
        garbage_kept(),
    ):
        torch.backends.cudnn.benchmark = True  # convolutions have one shape, or two: try out what is fastest
        run.milestones = Milestones(run, CheckpointWriter(config, checkpoint))
        yield
    log_end(run)


def resume(run: Run, checkpoint: Path) -> None:
    """Load a checkpoint; if its settings differ from the run's, warn, or raise if its run is already complete."""
    config, state = run.config, run.state
    is_named = checkpoint.name == Path(config.resume_from_checkpoint).name
    changed = load_checkpoint(state, checkpoint, same_run=not is_named)
    if changed and is_own(checkpoint, config) and run.is_over():
        limit = "--max_train_steps" if state.step >= run.total_steps else "--max_train_seconds"
        raise UserError(
            f"--output_dir {config.output_dir} holds a run that is complete, with other settings "
            f"({'; '.join(changed)}): choose another --output_dir, start over with --overwrite, or go on with a "
            f"larger {limit}"
        )
    if changed:
        logger.warning(
            f"Settings differ from those of {checkpoint}: {'; '.join(changed)}. "
            f"From step {state.step} on this is a different run"
        )


def prepare_network(run: Run) -> None:
    """Compile the network if asked, wrap it for the exchange of gradients, and choose how a step is executed."""
    config, processes, unet = run.config, run.processes, run.state.unet
    network = unet  # `unet` itself stays unwrapped, and draws the grids
    if config.compile:
        compile_words(processes.device)
        # Two image sizes compile to two static graphs, each as fast as the only graph of other runs.
        network = torch.compile(unet, dynamic=False if config.half_resolution_steps else None)
    run.network = processes.accelerator.prepare(network)
    run.learn = graph_of(run) if config.cuda_graph else partial(learn, run)
    if processes.count > 1:
        for module in (unet.conv_in, unet.time_embedding):  # whose gradients come last
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(run.state.window.exchange_timer.start)
