"""From seeds to images on any number of processes, with the same bits whatever their number."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from common import interruption
from common.errors import UserError, first_line
from common.progress import progress_bar
from conditions.guidance import GenerationCondition
from generation.generate_options import BATCHES_TO_SHARE, SMALLEST_BATCH
from schedulers.denoising_loop import denoise, to_uint8

if TYPE_CHECKING:
    from common.processes import Processes
    from run_folder.saved_model import SavedModel
    from schedulers.denoising import SamplingMethod

logger = logging.getLogger(__name__)

LARGEST_BATCH = 1024
WORTH_IT = 1.05  # a batch twice as large is taken if it is at least this much faster
PATIENCE_FOR_A_PASS = 5.0  # seconds; larger batches are not tried beyond
SECONDS_BETWEEN_REPORTS = 1.0


@dataclass
class Job:
    """Seeds to generate with one model, divided into batches."""

    model: SavedModel
    method: SamplingMethod
    batches: list[list[int]] = field(default_factory=list)
    condition: GenerationCondition = GenerationCondition()  # what the network is told to draw


@dataclass(frozen=True)
class Pace:
    """How networks are run. Each of these can change the last bits of an image."""

    batch_size: int
    channels_last: bool = False
    compile: bool = False


def divide(seeds: Sequence[int], batch_size: int) -> list[list[int]]:
    """Which seeds share a batch: a function of the two alone, so that a restart composes the same batches."""
    return [list(seeds[start : start + batch_size]) for start in range(0, len(seeds), batch_size)]


def generate_images(
    job: Job, seeds: Sequence[int], processes: Processes, pace: Pace
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """This process's share of the images of the seeds: `(seeds, uint8 images on the CPU)`, batch by batch."""
    job = replace(job, batches=divide(seeds, pace.batch_size))
    for _, batch, images in generate([job], processes, pace):
        yield batch, images


def generate(jobs: Sequence[Job], processes: Processes, pace: Pace) -> Iterator[tuple[Job, list[int], torch.Tensor]]:
    """The same for several models, one after the other. All processes must call it with the same jobs and exhaust it.

    Whoever is ready takes the next batch, so that no process idles before the last batches, and none waits for another
    until the end. Inside `interruption.deferred()` a stop is noticed within a denoising step: the batch is given up and
    `Interrupted` is raised in every process; what was yielded before is good.
    """
    items = [(job, batch) for job in jobs for batch in job.batches]
    if not items:
        return
    running = RunningNetwork(items[0][0], processes, pace)
    log_estimate(items, processes, pace, running.warm_up())
    taken = processes.shared_counter()
    stopped, made = False, 0
    with _Bar(processes, items) as bar:
        while not stopped and (number := taken.add(1)) < len(items):
            job, seeds = items[number]
            if running.job is not job:
                running = None  # its memory is needed for the next
                running = RunningNetwork(job, processes, pace)
            bar.images = len(seeds)
            try:
                images = running.generate(seeds, bar.on_step)
            except _Stopped:
                stopped = True
            else:
                yield job, seeds, images
                made += len(seeds)
                interruption.fault_point("generated")
                stopped = interruption.requested() is not None
        if stopped:
            taken.add(len(items))  # the others finish their batch and find no other
        bar.report()
        signals, counts = zip(*processes.all_gather((interruption.requested() if stopped else None, made)), strict=True)
        if processes.is_main:  # it keeps the count, and now knows everybody's
            bar.report()
    if any(signals):
        total = sum(len(seeds) for _, seeds in items)
        raise interruption.Interrupted(
            f"{next(filter(None, signals))}: stopped after {sum(counts):,} of {total:,} images; "
            f"start the same command again to continue"
        )


class _Stopped(Exception):
    """Somebody asked for a stop in the middle of a batch."""


class RunningNetwork:
    """A network on this process's device, that only ever sees full batches.

    The output of a U-Net for an image changes in its last bits with the number of images beside it (measured on a CPU:
    up to 5e-6), but neither with its place among them nor with what the others are.
    """

    def __init__(self, job: Job, processes: Processes, pace: Pace):
        self.job, self.processes, self.pace = job, processes, pace
        self.network = job.model.load(processes.device)
        if pace.channels_last:
            self.network.to(memory_format=torch.channels_last)
        if pace.compile:
            self.network.compile()

    def generate(
        self,
        seeds: list[int],
        on_step: Callable[[int, torch.Tensor], None] = lambda number, samples: None,
        initial_noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The images of at most a batch of seeds, uint8, on the CPU."""
        padded = self._pad(seeds)
        try:
            with self.processes.accelerator.autocast():
                samples = denoise(
                    self.job.condition.predict_for(self.network, padded),
                    self.job.method,
                    torch.tensor(padded, device=self.processes.device),
                    self.job.model.shape,
                    on_step,
                    initial_noise,
                )
        except torch.OutOfMemoryError as error:
            raise too_large(self.pace.batch_size, self.processes) from error
        return to_uint8(samples[: len(seeds)]).cpu()

    def warm_up(self) -> float:
        """The seconds of a pass, after one that may take long; raise if there is none."""
        try:
            return self.seconds_per_pass(self.pace.batch_size)
        except torch.OutOfMemoryError as error:
            raise too_large(self.pace.batch_size, self.processes) from error
        except Exception as error:
            if self.pace.compile:  # whatever is missing on this machine for it
                raise UserError(f"--compile: not possible here ({first_line(error)})") from error
            raise

    def seconds_per_pass(self, size: int) -> float:
        """How long one call of the network takes for a batch of this size, after one to warm up."""
        seeds = [0] * size
        samples = torch.zeros(size, *self.job.model.shape, device=self.processes.device)
        t = torch.zeros((), dtype=torch.long, device=self.processes.device)
        with torch.inference_mode(), self.processes.accelerator.autocast():
            predict = self.job.condition.predict_for(self.network, seeds)
            for _ in range(2):
                self.processes.synchronize_device()
                start = time.perf_counter()
                predict(samples, t)
                self.processes.synchronize_device()
        return time.perf_counter() - start

    def _pad(self, seeds: list[int]) -> list[int]:
        return seeds + [seeds[-1]] * (self.pace.batch_size - len(seeds))


def log_estimate(items: list[tuple[Job, list[int]]], processes: Processes, pace: Pace, seconds: float) -> None:
    """How long all of it will take, by a pass of the first network on every process."""
    passes = sum(len(job.method.timesteps) for job, _ in items)
    passes_per_second = sum(1 / other for other in processes.all_gather(seconds))
    logger.info(
        "%s images to generate in batches of %d on %d process(es): about %s",
        f"{sum(len(seeds) for _, seeds in items):,}",
        pace.batch_size,
        processes.count,
        timedelta(seconds=round(passes / passes_per_second)),
    )


def choose_batch_size(job: Job, processes: Processes, num_images: int, channels_last: bool) -> int:
    """The largest batch that pays: doubled as long as that makes the network faster by 5 % and fits.

    It leaves enough batches to share among the processes, or is small; their number plays no part, so that the same
    command on more of them makes the same files. All processes must ask.
    """
    largest = min(LARGEST_BATCH, num_images // BATCHES_TO_SHARE)
    if largest < 2 * SMALLEST_BATCH:
        return min(num_images, SMALLEST_BATCH)
    running = RunningNetwork(job, processes, Pace(SMALLEST_BATCH, channels_last))
    size, candidate, best_rate = SMALLEST_BATCH, SMALLEST_BATCH, 0.0
    while candidate <= largest:
        try:
            seconds = running.seconds_per_pass(candidate)
        except torch.OutOfMemoryError:
            break
        if candidate / seconds < WORTH_IT * best_rate:
            break
        size, best_rate = candidate, candidate / seconds
        if seconds > PATIENCE_FOR_A_PASS:
            break
        candidate *= 2
    del running
    gc.collect()
    return min(processes.all_gather(size))


def too_large(batch_size: int, processes: Processes) -> UserError:
    return UserError(
        f"--batch_size {batch_size}: does not fit in the memory of {processes.device}; choose a smaller one"
    )


class _Bar:
    """Images of all processes together, counted by denoising steps: a single batch can take minutes."""

    def __init__(self, processes: Processes, items: list[tuple[Job, list[int]]]):
        self.done = processes.shared_counter()
        self.images, self.unreported, self.last_report = 0, 0, 0.0
        steps = len(items[0][0].method.timesteps) if items else 1
        self.bar = progress_bar(
            total=sum(len(seeds) * len(job.method.timesteps) for job, seeds in items),
            desc="Generating",
            unit="images",
            unit_scale=1 / steps,
            bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
            disable=not (processes.is_main and items),
        )

    def on_step(self, number: int, samples: torch.Tensor) -> None:
        """One step of `images` images; also where a stop is noticed."""
        self.unreported += self.images
        if time.monotonic() - self.last_report > SECONDS_BETWEEN_REPORTS:
            self.report()
        if interruption.requested():
            raise _Stopped

    def report(self) -> None:
        total = self.done.add(self.unreported) + self.unreported
        self.unreported, self.last_report = 0, time.monotonic()
        self.bar.update(total - self.bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *failure) -> None:
        self.bar.close()
