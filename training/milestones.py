"""The work between steps: draw sample grids, save checkpoints, and make the run folder a pipeline."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils.memory import clear_device_cache
from PIL import Image

from common.errors import RunFailed, UserError, reason_of
from common.files import written_aside
from common.interruption import Interrupted, fault_point, stop_requested
from common.machine import fits_in_memory, largest_batch
from common.progress import progress_bar
from image_data.grid import image_grid, side_by_side
from run_folder.checkpoints import CheckpointWriter, goes_back, last_good, named_folder, networks_of, newest, step_of
from run_folder.folder import RunFolder
from run_folder.publish import IN_TRAINING, curves_at
from schedulers.denoising import DDPM, denoise, network_predict, to_uint8

if TYPE_CHECKING:
    from run_folder.config import TrainingConfig
    from training.setup import Ending, Run, TrainingState

logger = logging.getLogger(__name__)


class StoppedWhileSampling(Exception):
    """Raised if a stop is requested while a grid is being drawn."""


class Milestones:
    """Sample grids, checkpoints and the pipeline, each due at its steps. Time spent here is not training time."""

    def __init__(self, run: Run, writer: CheckpointWriter):
        config, epoch = run.config, run.batches.steps_per_epoch
        self.run, self.config, self.processes, self.writer = run, config, run.processes, writer
        self.folder = RunFolder(config.output_dir)
        images, models = config.save_images_epochs, config.save_model_epochs
        self.image_steps = images * epoch if images else config.save_images_steps
        self.model_steps = models * epoch if models else None
        full_length = config.ddpm_num_inference_steps == config.ddpm_num_steps
        variance_type = config.variance_type if full_length else None
        self.sampling = DDPM(run.state.loss.process, config.ddpm_num_inference_steps, variance_type)
        network = run.state.unet.config
        self.shape = (network.in_channels, network.sample_size, network.sample_size)
        # A row for each class or prompt, or nearly a square.
        rows = len(run.condition.rows_of_grid)
        self.columns = config.eval_batch_size // rows if rows else max(1, round(config.eval_batch_size**0.5))
        self.num_samples = self.columns * rows if rows else config.eval_batch_size

    @property
    def last_checkpoint(self) -> Path | None:
        self.writer.wait()
        return newest(self.folder.path)

    def due(self, step: int) -> bool:
        """Tell whether there is something to do after this step, even if the run goes on."""
        cadences = (self.image_steps, self.model_steps, self.config.checkpointing_steps)
        return any(cadence and step % cadence == 0 for cadence in cadences)

    def after_step(self, state: TrainingState, ending: Ending) -> None:
        """Do everything that is due after a step, the checkpoint first so that nothing later can lose the step.

        Whoever asks for a stop wants it soon, so then only the checkpoint is saved.
        """
        step, finished = state.step, ending == "finished"
        if not (ending or self.due(step)):
            return
        with self.run.tracking.paused():
            state.train_seconds = self.run.tracking.clock.train_seconds
            self.run.tracking.log_timesteps(state)
            regular = finished or step % self.config.checkpointing_steps == 0  # a stop adds irregular ones
            save = ending or regular
            if save:
                self._save(state, regular)
            stopped = ending == "stopped" or not self._draw_publish_and_evaluate(state, finished)
            if stopped and not save:  # stopped during the grid, which all processes gave up together
                self._save(state, regular)
            if finished or stopped:
                if self.processes.is_main:
                    self.writer.finish(state)
                self.processes.barrier()
        if stopped:
            raise Interrupted(
                stop_requested() or "a stop of another process",
                f"saved at step {step} in {self.folder.path}; {how_to_continue(self.config)}",
            )

    def _draw_publish_and_evaluate(self, state: TrainingState, finished: bool) -> bool:
        """Do what is due beside the checkpoint; return False if a stop was requested meanwhile."""
        step = state.step
        with fits_in_memory(self.processes.device, self._grid_that_fits):
            wanted = step % self.image_steps == 0 or (finished and self._worth_a_grid(state))
            if wanted and not self.draw_samples(state):
                return False
        if finished or (self.model_steps and step % self.model_steps == 0):
            self.save_pipeline(state)
        return not self._evaluation_is_due(step, finished) or self.evaluate(step)

    def catch_up(self, state: TrainingState) -> None:
        """Catch up on whatever a stopped or killed process still had to do after its last checkpoint."""
        due, over = state.step > 0 and state.step % self.image_steps == 0, self.run.over_at_start
        with self.run.tracking.paused():
            if state.step == 0:
                self.run.tracking.log_timesteps(state)
            exists = self.folder.grid_file(state.step).exists()
            missing = self.processes.all_reduce_any(self.processes.is_main and not exists)
            with fits_in_memory(self.processes.device, self._grid_that_fits):
                if missing and (due or (over and self._worth_a_grid(state))):
                    self.draw_samples(state)
            if over:
                self.save_pipeline(state)
                self.processes.barrier()
            if self.config.evaluate_every:
                self.evaluate(state.step if self._evaluation_is_due(state.step, over) else None, at_start=True)

    def _save(self, state: TrainingState, regular: bool) -> None:
        """Save a checkpoint if all processes agree; all must call this. Regular ones get an --ema power snapshot."""
        self.check_replicas(state)
        if self.processes.is_main:
            self.run.tracking.flush()
            self.writer.save(state, with_snapshot=regular)
        self.processes.barrier()  # the main process may have had to finish the previous checkpoint first

    def check_replicas(self, state: TrainingState) -> None:
        """Raise unless every process has the same weights and moving average, to the bit."""
        if self.processes.count == 1:
            return
        digests = self.processes.all_gather(digest_of(state))
        others = [str(index) for index, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RunFailed(
                f"step {state.step}: the weights of process {', '.join(others)} are no longer those of process 0, so "
                f"nothing is saved; {last_good(self.last_checkpoint)}. All devices must be of the same model"
            )

    def _worth_a_grid(self, state: TrainingState) -> bool:
        """Tell whether the grid at the end takes at most a minute, or at most as long as the training did."""
        seeds, inputs = self._my_samples()
        with torch.no_grad(), self.processes.accelerator.autocast():
            probe = torch.zeros(len(seeds), *self.shape, device=self.processes.device)
            for _ in range(2):  # the first pass warms up, the second counts
                start = time.perf_counter()
                state.unet(probe, 0, **inputs)
                self.processes.synchronize_device()
                seconds = time.perf_counter() - start
        estimate = seconds * self.config.ddpm_num_inference_steps * len(state.sampling_weights)
        too_long = self.processes.all_reduce_any(estimate > max(60, state.train_seconds))
        if too_long:
            logger.info(
                f"No sample grid at the end: drawing it would take about {estimate:.0f} s after "
                f"{state.train_seconds:.0f} s of training; fewer --ddpm_num_inference_steps or a smaller "
                f"--eval_batch_size make it cheaper"
            )
        return not too_long

    def _grid_that_fits(self) -> str:
        """Say, after a grid ran out of memory, how many images would fit."""
        seeds, inputs = self._my_samples()

        def predict(count: int) -> None:
            samples = torch.zeros(count, *self.shape, device=self.processes.device)
            with torch.no_grad(), self.processes.accelerator.autocast():
                self.run.state.unet(samples, 0, **{name: value[:count] for name, value in inputs.items()})

        fitting = self.processes.count * largest_batch(predict, self.processes.device, failed=len(seeds))
        would = f"about {fitting} would fit" if fitting else "nor would a single one"
        return (
            f"--eval_batch_size {self.config.eval_batch_size}: such a sample grid does not fit in the memory of "
            f"{self.processes.device}; {would}"
        )

    def _my_samples(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this process's share of the seeds 0, 1, ..., and the network's inputs for their rows of the grid."""
        # Every process gets equally many; if need be, some seeds are drawn twice.
        per_process, device = -(-self.num_samples // self.processes.count), self.processes.device
        seeds = (torch.arange(per_process) * self.processes.count + self.processes.index) % self.num_samples
        inputs = self.run.condition.inputs(seeds // self.columns, of_grid=True)
        return seeds.to(device), {name: value.to(device) for name, value in inputs.items()}

    def draw_samples(self, state: TrainingState) -> bool:
        """Draw images from the same seeds as always, a grid for each kind of weights; every process draws its share.

        A network that has only seen half-size images draws half-size images, which the grid shows at twice the size.
        Return False if a stop was requested meanwhile: the grid is then drawn when the run continues.
        """
        pictures, networks = {}, state.sampling_weights
        seeds, inputs = self._my_samples()
        enlarged = 2 if 0 < state.step <= self.config.half_resolution_steps else 1
        channels, height, width = self.shape
        shape = (channels, height // enlarged, width // enlarged)
        bar = progress_bar(
            total=self.config.ddpm_num_inference_steps * len(networks),
            desc=f"Sampling ({', '.join(networks)})",
            leave=False,
            disable=not self.processes.is_local_main,
        )

        def on_step(number: int, samples: torch.Tensor) -> None:
            bar.update()
            if self.processes.all_reduce_any(stop_requested() is not None):
                raise StoppedWhileSampling

        try:
            for weights, unet in networks.items():
                unet.eval()
                with self.processes.accelerator.autocast():
                    predict = network_predict(partial(unet, **inputs))
                    samples = denoise(predict, self.sampling, seeds, shape, on_step)
                samples = samples.repeat_interleave(enlarged, dim=2).repeat_interleave(enlarged, dim=3)
                images = self.processes.accelerator.gather(to_uint8(samples)).cpu()
                # Process r drew the seeds r, r + n, r + 2n, ...
                images = images.unflatten(0, (self.processes.count, -1)).transpose(0, 1).flatten(0, 1)
                pictures[f"{weights}, step {state.step}"] = image_grid(images[: self.num_samples], self.columns)
        except StoppedWhileSampling:
            return False
        finally:
            state.unet.train()
            bar.close()
        if self.processes.is_main:
            self._write_grid(side_by_side(pictures, self.run.condition.rows_of_grid), state.step)
        return True

    def _write_grid(self, picture: Image.Image, step: int) -> None:
        path = self.folder.grid_file(step)
        try:
            path.parent.mkdir(exist_ok=True)
            with written_aside(path, durable=False) as aside:
                picture.save(aside, format="png")
                fault_point("grid")
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error.strerror)
        self.run.tracking.log_picture("test_samples", picture, step)

    def _evaluation_is_due(self, step: int, over: bool) -> bool:
        every = self.config.evaluate_every
        # During the half-size steps there is nothing to measure: the network has not seen full-size images yet.
        return every is not None and step > self.config.half_resolution_steps and (over or step % every == 0)

    def evaluate(self, step: int | None, at_start: bool = False) -> bool:
        """Have evaluate.py measure a step's checkpoint on all devices; return False if a stop was requested meanwhile.

        It measures nothing twice, and continues where it was interrupted. If it fails at the start of a process, that
        is an error, since a run must be able to measure; later a failure is only a warning.
        """
        config, processes = self.config, self.processes
        saved = processes.broadcast(self.last_checkpoint if processes.is_main else None)
        if step is not None and (saved is None or step_of(saved) != step):
            return True  # saving it failed, which has been logged already
        clear_device_cache()  # leave nothing but the training's own tensors on the device
        before = {} if step is None else curves_at(self.folder, step)
        names = ("cache_dir", "num_workers", *(("mixed_precision",) if config.mixed_precision != "fp16" else ()))
        flags = [f"--{name}={getattr(config, name)}" for name in names if getattr(config, name) is not None]
        flags += ["--allow_tf32"] * config.allow_tf32 + [f"--{entry}" for entry in config.evaluate_options]
        flags += [f"--run_dir={self.folder.path}", f"--checkpoints={'none' if step is None else step}"]
        codes = processes.run_script("evaluate.py", flags, **{IN_TRAINING: "1"})
        if processes.all_reduce_any(stop_requested() is not None):
            return False
        if code := next(filter(None, codes), None):
            failed = f"evaluate.py ended with exit code {code}; a line above says why"
            if at_start:
                raise UserError(f"--evaluate_every {config.evaluate_every}: {failed}")
            logger.warning("checkpoint-%d is not measured: %s", step, failed)
        elif step is not None:
            new = {name: value for name, value in curves_at(self.folder, step).items() if before.get(name) != value}
            self.run.tracking.log_evaluation(new, step)
        return True

    def save_pipeline(self, state: TrainingState) -> None:
        """Make the run's folder a pipeline with the averaged weights; without a condition it is a stock pipeline."""
        if not self.processes.is_main:
            return
        from diffusers import DDPMPipeline

        unet = state.unet if state.update.ema is None else state.update.ema.ema_model
        pipeline = DDPMPipeline(unet=unet, scheduler=state.loss.process.plain())
        try:
            self.folder.write_pipeline(pipeline, state.step, self.run.condition.pipeline_entries)
        except Exception as error:  # safetensors reports a full disk in its own way; the checkpoint comes next
            logger.warning("The pipeline in %s could not be written: %s", self.folder.path, reason_of(error))


def digest_of(state: TrainingState) -> list[int]:
    """Return a checksum of every tensor of the weights and moving averages: the sum of its words times their places.

    It is computed on the device: copying the weights out to hash them would delay the training as long as a save.
    """
    sums = []
    for network in networks_of(state).values():
        for tensor in network.state_dict().values():
            words = tensor.flatten().view(torch.int32).long()
            sums.append((words * torch.arange(1, len(words) + 1, device=words.device)).sum())  # modulo 2^64
    return torch.stack(sums).tolist()


def how_to_continue(config: TrainingConfig) -> str:
    """Say how to continue after a stop: by the same command, without flags that would start over or go back again."""
    # A named checkpoint of another run only starts this run, once; with one of its own the run would go back again.
    begins_elsewhere = named_folder(config) is not None and not goes_back(config)
    goes_elsewhere = config.resume_from_checkpoint != "latest" and not begins_elsewhere
    without = ["--overwrite"] * config.overwrite + ["--resume_from_checkpoint"] * goes_elsewhere
    return f"start the same command again{' without ' * bool(without)}{' and '.join(without)} to continue"
