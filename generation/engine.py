"""From seeds to images on any number of processes, with the same bits whatever their number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch

from common.errors import RunFailed
from common.interruption import Interrupted, fault_point, stop_requested
from common.machine import can_be_compiled, fits_in_memory, is_out_of_memory, largest_batch
from common.processes import Processes
from common.progress import progress_bar
from common.randomness import compile_words
from conditions.guidance import GenerationCondition
from generation.generate_options import BATCHES_TO_SHARE, SMALLEST_BATCH, as_ranges
from run_folder.saved_model import SavedModel
from schedulers.denoising import DenoisingMethod, denoise, to_uint8

logger = logging.getLogger(__name__)

LARGEST_BATCH = 1024
SPEEDUP_WORTH_DOUBLING = 1.05
MOST_IDLE = 0.1  # share of the processes' time; beyond it smaller batches are suggested
LONGEST_PASS = 5.0  # seconds; larger batches are not tried beyond
SECONDS_BETWEEN_REPORTS = 1.0


@dataclass(frozen=True, eq=False)
class Job:
    """A model, and how noise becomes images with it."""

    model: SavedModel
    method: DenoisingMethod
    condition: GenerationCondition = GenerationCondition()  # what the network is told to draw


Batch = tuple[Job, list[int]]  # with the seeds whose images are made together


@dataclass(frozen=True)
class InferenceSettings:
    """How networks are run. Each of these can change the last bits of an image."""

    precision: str = "no"
    allow_tf32: bool = False
    channels_last: bool = False
    compile: bool = False
    batch_size: int | None = None  # None as long as it has not been chosen


def prefers_channels_last(device: torch.device, precision: str) -> bool:
    """Return whether networks run faster with their channels last: on GPUs in mixed precision, for the matrix units."""
    return device.type == "cuda" and precision != "no"


def idle_share(batches: int, processes: int) -> float:
    """Return the share of the processes' time in which the last batches are waited for, if all take equally long."""
    rounds = -(-batches // processes)
    return 1 - batches / (rounds * processes)


def divide(seeds: Sequence[int], batch_size: int) -> list[list[int]]:
    """Divide seeds into batches by nothing but the two, so that a restart composes the same batches."""
    return [list(seeds[start : start + batch_size]) for start in range(0, len(seeds), batch_size)]


def generate_images(
    job: Job, seeds: Sequence[int], processes: Processes, settings: InferenceSettings
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield this process's share of the images of the seeds: `(seeds, uint8 images on the CPU)`, batch by batch."""
    batch_size = settings.batch_size or choose_batch_size(job, len(seeds), processes, settings)
    batches = [(job, batch) for batch in divide(seeds, batch_size)]
    for _, batch, images in generate(batches, processes, replace(settings, batch_size=batch_size)):
        yield batch, images


def generate(
    batches: Sequence[Batch], processes: Processes, settings: InferenceSettings
) -> Iterator[tuple[Job, list[int], torch.Tensor]]:
    """Return `(job, seeds, images)` of this process's share of the batches, of which each is a job and its seeds.

    The first network is loaded and tried at once, so that one which cannot be used fails here; the images are made as
    they are asked for. All processes must call it with the same batches and exhaust it; whoever is ready takes the
    next one. Inside `stops_deferred()` a stop is noticed within a denoising step: the batch is given up and
    `Interrupted` is raised in every process; what was yielded before is good.
    """
    if not batches:
        return iter(())
    running = RunningNetwork(batches[0][0], processes, settings)
    running.warm_up(batches)
    return _generate(running, batches, processes, settings)


def _generate(
    running: RunningNetwork, batches: Sequence[Batch], processes: Processes, settings: InferenceSettings
) -> Iterator[tuple[Job, list[int], torch.Tensor]]:
    take_batches, progress = processes.shared_counter(), SharedProgress(batches, processes)
    stopped, made = False, 0
    with progress.bar:
        while not stopped and (number := take_batches(1)) < len(batches):
            job, seeds = batches[number]
            if running.job is not job:
                del running  # its memory is needed for the next
                running = RunningNetwork(job, processes, settings)
            try:
                images = running.generate(seeds, partial(progress.add_step, len(seeds)))
            except BatchAbandoned:
                stopped = True
            else:
                yield job, seeds, images
                made += len(seeds)
                fault_point("generated")
                stopped = stop_requested() is not None
        if stopped:
            take_batches(len(batches))  # the others finish their batch and find no other
        progress.report()
        signals, counts = zip(*processes.all_gather((stop_requested() if stopped else None, made)), strict=True)
        if processes.is_main:  # it keeps the shared count, and now sees what all have done
            progress.report()
    if any(signals):
        total = sum(len(seeds) for _, seeds in batches)
        outcome = f"stopped after {sum(counts):,} of {total:,} images; start the same command again to continue"
        raise Interrupted(next(filter(None, signals)), outcome)


class BatchAbandoned(Exception):
    """A stop was requested in the middle of a batch."""


class RunningNetwork:
    """A network on this process's device, that only ever sees full batches.

    The output of a U-Net for an image changes in its last bits with the number of images beside it (measured on a CPU:
    up to 5e-6), but neither with its place among them nor with what the others are.
    """

    def __init__(self, job: Job, processes: Processes, settings: InferenceSettings):
        self.job, self.processes, self.settings = job, processes, settings
        self.network = job.model.load(processes.device)
        if settings.channels_last:
            self.network.to(memory_format=torch.channels_last)
        if settings.compile:
            compile_words(processes.device)
            self.network.compile()

    def generate(
        self, seeds: list[int], on_step: Callable[[int, torch.Tensor], None], initial_noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the images of at most a batch of seeds, uint8, on the CPU."""
        job, device = self.job, self.processes.device
        padded = seeds + [seeds[-1]] * (self.settings.batch_size - len(seeds))
        with fits_in_memory(self.processes.device, self.batch_that_fits), self.processes.accelerator.autocast():
            predict = job.condition.predict_for(self.network, padded)
            on_device = torch.tensor(padded, device=device)
            samples = denoise(predict, job.method, on_device, job.model.shape, on_step, initial_noise)[: len(seeds)]
        finite = samples.isfinite().flatten(1).all(1).tolist()
        if not all(finite):
            failed = as_ranges([seed for seed, is_finite in zip(seeds, finite, strict=True) if not is_finite])
            fp16 = self.settings.precision == "fp16"
            advice = "try --mixed_precision bf16 or no" if fp16 else "are the weights damaged? try another checkpoint"
            raise RunFailed(f"{job.model.name}: the images of seeds {failed} are not finite; {advice}")
        return to_uint8(samples).cpu()

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Run the network, which may take long at first, and log how long such passes will take for the batches."""
        batch_size = self.settings.batch_size
        not_here = "--compile: this machine cannot compile the network; generate without it"
        with can_be_compiled(not_here), fits_in_memory(self.processes.device, self.batch_that_fits):
            seconds = self.seconds_per_pass(batch_size)
        passes_per_second = sum(1 / of_one for of_one in self.processes.all_gather(seconds))
        passes, images = sum(len(job.method.timesteps) for job, _ in batches), sum(len(seeds) for _, seeds in batches)
        duration = timedelta(seconds=round(passes / passes_per_second))
        message = "%s images to generate in batches of %d on %d process(es): about %s"
        logger.info(message, f"{images:,}", batch_size, self.processes.count, duration)
        smaller = batch_size
        while smaller > SMALLEST_BATCH and idle_share(-(-images // smaller), self.processes.count) > MOST_IDLE:
            smaller //= 2
        if smaller < batch_size:
            idle = idle_share(len(batches), self.processes.count)
            message = "The processes will be idle for %.0f %% of that, at the end; --batch_size %d divides it better"
            logger.info(message, 100 * idle, smaller)

    def seconds_per_pass(self, size: int) -> float:
        """Measure one call of the network for a batch of this size, guided if any is, after one to warm up."""
        for _ in range(2):
            self.processes.synchronize_device()
            start = time.perf_counter()
            self.pass_of_zeros(size)
            self.processes.synchronize_device()
        return time.perf_counter() - start

    def pass_of_zeros(self, size: int) -> None:
        """Call the network for a batch of this size."""
        samples = torch.zeros(size, *self.job.model.shape, device=self.processes.device)
        t = torch.tensor(self.job.condition.guidance.first_timestep, device=self.processes.device)
        with torch.no_grad(), self.processes.accelerator.autocast():
            self.job.condition.predict_for(self.network, [0] * size)(samples, t)

    def batch_that_fits(self) -> str:
        """Say, after a batch that did not fit in memory, which one would."""
        failed, (_, height, width) = self.settings.batch_size, self.job.model.shape
        with torch.compiler.set_stance("force_eager"):  # not compiled for every size
            fitting = largest_batch(self.pass_of_zeros, self.processes.device, failed)
        what = f"--batch_size {failed}: {failed} images of {width}x{height} by {self.job.model.name} do not fit in the "
        what += f"memory of {self.processes.device}"
        if not fitting:
            return f"{what}, nor does a single one: it needs a larger device"
        return f"{what}; about {fitting} would fit: choose --batch_size {1 << (fitting.bit_length() - 1)}"


def largest_worth_measuring(num_images: int) -> int:
    """Return the largest batch of which enough are left to share, or the smallest that is ever chosen."""
    largest = min(LARGEST_BATCH, num_images // BATCHES_TO_SHARE)
    return largest if largest >= 2 * SMALLEST_BATCH else SMALLEST_BATCH


def choose_batch_size(job: Job, num_images: int, processes: Processes, settings: InferenceSettings) -> int:
    """Return the largest batch that pays: doubled as long as that makes the network faster by 5 % and fits.

    It leaves enough batches to share among the processes, or is small; their number plays no part, so that the same
    command on more of them makes the same files. All processes must call it.
    """
    largest = largest_worth_measuring(num_images)
    if largest == SMALLEST_BATCH:
        return min(num_images, SMALLEST_BATCH)
    running = RunningNetwork(job, processes, replace(settings, compile=False))
    size, candidate, best_rate, seconds = SMALLEST_BATCH, SMALLEST_BATCH, 0.0, 0.0
    while candidate <= largest and seconds <= LONGEST_PASS:
        try:
            seconds = running.seconds_per_pass(candidate)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error, processes.device):
                break  # if it was the smallest, the first batch will fail with it, and say what fits
            raise
        if candidate / seconds < SPEEDUP_WORTH_DOUBLING * best_rate:
            break
        size, best_rate = candidate, candidate / seconds
        candidate *= 2
    return min(processes.all_gather(size))


class SharedProgress:
    """A bar of the images of all processes, counted by denoising steps: a single batch can take minutes."""

    def __init__(self, batches: Sequence[Batch], processes: Processes):
        self.add_done = processes.shared_counter()
        self.unreported, self.last_report = 0, 0.0
        self.bar = progress_bar(
            total=sum(len(seeds) * len(job.method.timesteps) for job, seeds in batches),
            desc="Generating",
            unit="images",
            unit_scale=1 / len(batches[0][0].method.timesteps),
            bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
            disable=not processes.is_main,
        )

    def add_step(self, images: int, number: int, samples: torch.Tensor) -> None:
        """Count a step of so many images; raise `BatchAbandoned` if a stop was requested."""
        self.unreported += images
        if time.monotonic() - self.last_report > SECONDS_BETWEEN_REPORTS:
            self.report()
        if stop_requested():
            raise BatchAbandoned

    def report(self) -> None:
        """Add what this process has done to the shared count, and show it."""
        total = self.add_done(self.unreported) + self.unreported
        self.unreported, self.last_report = 0, time.monotonic()
        self.bar.update(total - self.bar.n)
