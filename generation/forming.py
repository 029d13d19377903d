"""Images while they form, for somebody who watches: what is asked for as flags of generate.py, and the steps to it."""

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace

import torch

from common.errors import UserError
from common.interruption import stop_requested
from common.processes import Processes
from conditions.guidance import ALL, condition_of
from generation.engine import BatchAbandoned, InferenceSettings, Job, RunningNetwork, prefers_channels_last
from generation.generate_options import SMALLEST_BATCH, parse_generation, seeds_of
from generation.methods import build_method
from run_folder.saved_model import SavedModel
from schedulers.ddpm import ExactDDPMScheduler
from schedulers.denoising import ExactMethod, StepNoise, to_uint8

MOST_IMAGES = SMALLEST_BATCH  # generate.py makes so many in one batch, so they are the same to the bit
MOST_FRAMES = 50


@dataclass(frozen=True)
class Wish:
    """A request for images; None stands for the default of generate.py."""

    seed: int | None = 0
    num_images: int | None = 1
    steps: int | None = None
    ddim: bool = False
    class_label: str | None = None
    prompt: str | None = None
    guidance_scale: float | None = None

    def flags(self) -> list[str]:
        """Return the flags with which generate.py makes the same images."""
        if self.seed is None or self.seed < 0:
            raise UserError(f"seed {'' if self.seed is None else self.seed}: must be a whole number from 0 on")
        if self.num_images is None or not 1 <= self.num_images <= MOST_IMAGES:
            raise UserError(f"{self.num_images} images: must be from 1 to {MOST_IMAGES}; generate.py makes more")
        last = self.seed + self.num_images - 1
        flags = ["--ddim" if self.ddim else "--ddpm"]
        flags.append(f"--seeds={self.seed}-{last}" if last > self.seed else f"--seeds={last}")
        flags += [] if self.steps is None else [f"--num_inference_steps={self.steps}"]
        flags += [] if self.class_label in (None, ALL) else [f"--class_labels={self.class_label}"]
        flags += [] if self.prompt is None else [f"--prompt={self.prompt}"]
        return flags + ([] if self.guidance_scale in (None, 1) else [f"--guidance_scale={self.guidance_scale:g}"])


@dataclass(frozen=True, eq=False)
class Frame:
    """The images after some of the steps."""

    number: int
    steps: int
    images: torch.Tensor  # uint8, on the CPU
    captions: Sequence[str]


class Studio:
    """One network in memory, that makes the images somebody wishes for while they watch."""

    def __init__(self, processes: Processes):
        self.processes, self.running = processes, None

    def form(
        self, model: SavedModel, wish: Wish, estimates: bool, stopped: threading.Event | None = None
    ) -> Iterator[Frame]:
        """Yield some 50 frames, the last with the images that generate.py makes; no more once `stopped` is set.

        A frame shows x_t, or with `estimates` the x_0 predicted from it.
        """
        options = parse_generation(wish.flags())
        seeds = seeds_of(options)
        job = Job(model, build_method(options, model), condition_of(options, model, self.processes.device))
        choices = job.condition.choices
        captions = [", ".join(filter(None, [f"seed {seed}", choices[seed % len(choices)]])) for seed in seeds]
        running, steps = self._running(job, len(seeds)), len(job.method.timesteps)
        for number, images in _watched(running, seeds, estimates, stopped or threading.Event()):
            yield Frame(number, steps, images, captions)

    def _running(self, job: Job, batch_size: int) -> RunningNetwork:
        """Return the network for a job, loaded if it is another one than before."""
        precision = self.processes.precision
        channels_last = prefers_channels_last(self.processes.device, precision)
        settings = InferenceSettings(precision, channels_last=channels_last, batch_size=batch_size)
        if self.running is None or self.running.job.model.sha256 != job.model.sha256:
            self.running = None  # its memory is needed for the next
            self.running = RunningNetwork(job, self.processes, settings)
        running = copy(self.running)
        running.job, running.settings = job, settings
        return running


def _watched(
    running: RunningNetwork, seeds: list[int], estimates: bool, stopped: threading.Event
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield numbers of steps and what there is after them.

    A thread of its own takes the steps: torch's modes belong to the thread that entered them, and whoever iterates may
    come from another one each time.
    """
    job, frames = running.job, queue.SimpleQueue()
    method = WatchedMethod(job.method)
    running.job, steps = replace(job, method=method), len(method.timesteps)
    shown_at = {round(number * steps / MOST_FRAMES) for number in range(1, MOST_FRAMES + 1)}

    def on_step(number: int, samples: torch.Tensor) -> None:
        if stopped.is_set() or stop_requested():
            raise BatchAbandoned
        if number in shown_at and number < steps:
            frames.put((number, to_uint8(method.estimate if estimates else samples).cpu()))

    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(running.generate, seeds, on_step)
        making.add_done_callback(lambda _: frames.put(None))
        try:
            while (frame := frames.get()) is not None:
                yield frame
            yield steps, making.result()
        except BatchAbandoned:
            return
        finally:
            stopped.set()  # whoever watched may have gone


class WatchedMethod:
    """A denoising method that also keeps what the network took x_0 for at the latest step."""

    def __init__(self, method: ExactMethod):
        self.method, self.timesteps, self.noise_scale = method, method.timesteps, method.noise_scale
        self.begin, self.network_input = method.begin, method.network_input
        self.scheduler: ExactDDPMScheduler = method.scheduler
        self.estimate: torch.Tensor | None = None

    def step(self, model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
        self.estimate = self.scheduler.predict_original(model_output, self.timesteps[number - 1], sample)
        return self.method.step(model_output, number, sample, noise)
