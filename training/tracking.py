"""The record of a run: the sums behind a line of metrics, the two files, the progress bar, trackers and clock."""

from __future__ import annotations

import errno
import gc
import json
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
import torch.distributed as dist
from PIL import Image
from tqdm import tqdm

from common.errors import reason_of
from common.files import write_atomically
from common.interruption import fault_point
from common.machine import Stopwatch
from common.processes import Processes
from common.progress import progress_bar
from image_data.batches import Batch
from run_folder.config import trackers_of
from run_folder.folder import QUARTERS, RunFolder, read_lines
from run_folder.publish import TensorBoard, open_trackers
from schedulers.timestep_samplers import LogSNRBins

if TYPE_CHECKING:
    from training.setup import Ending, Run, TrainingState
    from training.update import Update

logger = logging.getLogger(__name__)

DENSITY, DENSITY_BINS = "timestep_density", 100
STEPS_BETWEEN_COLLECTIONS = 100  # of Python's garbage
STEPS_NOT_PROFILED, OPERATIONS_LISTED = 9, 10

Sums = tuple[list[float], list[float], list[float]]


class Window:
    """The steps since the last line of metrics.

    Its sums stay on the device and are saved in checkpoints, so that a stop within the window changes no line.
    """

    def __init__(self, processes: Processes, bins: LogSNRBins, length: int):
        self.processes, self.bins, self.length = processes, bins, length
        self.exchange_timer = Stopwatch(processes.device)  # the time that processes wait for each other's numbers
        self._dtype = torch.float32 if processes.device.type == "mps" else torch.float64
        # Losses are grouped by quarter of the timesteps and by bin: one row per group, true for the timesteps in it.
        steps = len(bins.of_timestep)
        in_quarter = torch.arange(steps) * QUARTERS // steps == torch.arange(QUARTERS)[:, None]
        in_bin = bins.of_timestep == torch.arange(len(bins))[:, None]
        self._groups = torch.cat([in_quarter, in_bin]).to(processes.device)
        # Sums of losses and counts of images per group; then of weights, their squares, objective and gradient norm.
        self.sums = torch.zeros(2 * len(self._groups) + 4, dtype=self._dtype, device=processes.device)
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self.sums.zero_()
        self.steps = 0
        # Timesteps and losses of this process at the latest steps, for reporting a failure.
        self.latest: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_step(
        self, t: torch.Tensor, weights: torch.Tensor, errors: torch.Tensor, update: Update, observed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a step; return whether its numbers are finite everywhere, and the sum of `observed` over processes."""
        in_group = self._groups[:, t]
        errors_of_groups = torch.where(in_group, errors.to(self._dtype), 0).sum(1)
        weights, objective = weights.to(self._dtype), update.objective.to(self._dtype) / self.processes.count
        single = torch.stack([weights.sum(), weights.square().sum(), objective, (~update.is_finite).to(self._dtype)])
        shared = torch.cat([errors_of_groups, in_group.sum(1), single, observed])
        if self.processes.count > 1:
            self.exchange_timer.start()
            dist.all_reduce(shared)  # all in one exchange, on the device
            self.exchange_timer.stop()
        sums, failures, observed = shared.split([len(self.sums) - 1, 1, len(observed)])
        # The gradients were averaged before the norm, which is therefore the same everywhere.
        self.sums += torch.cat([sums, update.gradient_norm.detach().to(self._dtype)[None]])
        return failures[0] == 0, observed

    def note(self, t: torch.Tensor, errors: torch.Tensor) -> None:
        """Count a step, and keep the numbers that a report of its failure would show."""
        self.steps += 1
        self.latest = [*self.latest[1 - self.length :], (t, errors.clone())]

    def fetch(self) -> Sums:
        """Wait for the device and return the sums: of losses and of images by group, and the other four."""
        sums, groups = self.sums.tolist(), len(self._groups)
        return sums[:groups], sums[groups : 2 * groups], sums[2 * groups :]

    def numbers(self) -> dict:
        """Return the sums as JSON holds them in a checkpoint."""
        losses, counts, (*weights, objective, gradient_norm) = self.fetch()
        return {
            "sums": [*losses[:QUARTERS], objective, gradient_norm],
            "counts": [int(count) for count in counts[:QUARTERS]],
            "bins": [losses[QUARTERS:], counts[QUARTERS:]],
            "weights": weights,
            "steps": self.steps,
        }

    def load_numbers(self, numbers: dict) -> None:
        """Restore the sums that `numbers` gave."""
        *losses, objective, gradient_norm = numbers["sums"]
        counts = numbers["counts"]
        # The first files of version 1 lack these two. Weights were 1 then; bins may also be those of another schedule.
        weights = numbers.get("weights", [sum(counts)] * 2)
        of_bins = numbers.get("bins", [[], []])
        bin_losses, bin_counts = (saved if len(saved) == len(self.bins) else [0] * len(self.bins) for saved in of_bins)
        sums = [*losses, *bin_losses, *counts, *bin_counts, *weights, objective, gradient_norm]
        self.sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self.steps = numbers["steps"]


class Clock:
    """Pure training time: it stands still while samples are drawn, checkpoints written and images evaluated."""

    def __init__(self, train_seconds: float):
        self._before = train_seconds
        self._since: float | None = time.perf_counter()
        self.data_seconds = 0.0

    @property
    def train_seconds(self) -> float:
        return self._before + (0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.train_seconds, None
        yield
        self._since = time.perf_counter()


class Tracking:
    """Metrics, bar and curves of a run. Every process computes the lines; the main one writes them."""

    def __init__(self, run: Run):
        config, state = run.config, run.state
        self.processes, self.writes = run.processes, run.processes.is_main
        self.batch_size, self.logging_steps = run.sizes.total, config.logging_steps
        self.folder = RunFolder(config.output_dir)
        self.trackers = []
        if self.writes:
            # Drop the partial line that a run wrote at its end, if it is being extended now.
            last_line = state.step - (1 if state.window.steps and not run.over_at_start else 0)
            self.metrics = LineFile(self.folder.metrics_file, last_line)
            self.timesteps = LineFile(self.folder.timesteps_file, last_line)
            self.trackers = open_trackers(config, trackers_of(config), last_line)
        self.half_resolution_steps, self.total_steps = config.half_resolution_steps, run.total_steps
        self.silent = not run.processes.is_local_main
        self.bar = self._bar_from(state.step)
        self.clock = Clock(state.train_seconds)
        self.profiled_steps = config.profile
        self.profiler = open_profiler(config.profile, self.folder) if config.profile and self.writes else None
        self._last = (state.step, state.train_seconds, 0.0, 0.0, 0.0)  # `_metrics` takes differences from these

    def _bar_from(self, step: int) -> tqdm:
        """Open a bar; the faster steps on small images get their own, so that each bar predicts its end correctly."""
        small = step < self.half_resolution_steps
        total, what = (self.half_resolution_steps, "Steps at half size") if small else (self.total_steps, "Steps")
        return progress_bar(total=total, initial=step, desc=what, disable=self.silent)

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass the batches on and note how long each was waited for."""
        start = time.perf_counter()
        for batch in batches:
            self.clock.data_seconds += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the time spent inside this context out of the training time."""
        self.processes.synchronize_device()
        with self.clock.paused():
            yield

    def log(self, state: TrainingState, ending: Ending) -> None:
        """Advance the bar, and write a line of metrics where one is due or the run is finished."""
        self.bar.update()
        if state.step == self.half_resolution_steps:
            self.bar.close()
            self.bar = self._bar_from(state.step)
        if self.profiler is not None:
            with self.clock.paused():
                self.profiler.step()
                if ending:  # grids and checkpoints, which follow, are no part of a step
                    self._end_profile()
        if state.step % STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect()  # on all processes at once
        line_due = state.step % self.logging_steps == 0
        if not (line_due or ending == "finished"):
            return
        sums = state.window.fetch()
        metrics = self._metrics(state, sums)
        with self.clock.paused():  # inspecting a sampler is not part of its cost
            timesteps = describe_timesteps(state, sums)
        if self.writes:
            self._write(state, metrics, timesteps)
        if line_due:
            state.smoothed_loss = metrics["smoothed_loss"]
            state.window.clear()

    def _metrics(self, state: TrainingState, sums: Sums) -> dict[str, float]:
        """Compute the window's line of metrics, the same on all processes except for times and memory."""
        window, (losses, counts, others) = state.window, sums
        counts = counts[:QUARTERS]
        weight, weight_squared, objective, gradient_norm = others
        loss = objective / window.steps
        # Fetching the sums has waited for the device, so the clock is true.
        state.train_seconds = self.clock.train_seconds
        shares = (self.clock.data_seconds, state.loss.sampler_seconds, window.exchange_timer.seconds())
        now = (state.step, state.train_seconds, *shares)
        steps, seconds, data_seconds, sampler_seconds, exchange_seconds = map(operator.sub, now, self._last)
        self._last = now
        keep = 0.99**window.steps
        smoothed_loss = loss if state.smoothed_loss is None else keep * state.smoothed_loss + (1 - keep) * loss
        metrics = {
            "loss": loss,
            "smoothed_loss": smoothed_loss,
            **{f"loss_q{q}": losses[q] / count for q, count in enumerate(counts) if count},
            # The effective sample size of the weighted losses, as a share of the images (Kong 1992).
            **({"weight_ess": weight**2 / (sum(counts) * weight_squared)} if weight_squared else {}),
            # Under fp16 an overflow now and then is normal; JSON has no infinity.
            **({"grad_norm": gradient_norm / window.steps} if math.isfinite(gradient_norm) else {}),
            "lr": state.update.learning_rate(state.step - 1),
            **({} if state.update.ema is None else {"ema_decay": state.update.ema.get_current_decay()}),
            "images_per_second": steps * self.batch_size / seconds,
            "images_per_second_per_device": steps * self.batch_size / seconds / self.processes.count,
            "data_wait_share": data_seconds / seconds,
            "communication_share": exchange_seconds / seconds,
            # Samplers that do not learn take next to none of the time.
            **({"timestep_sampler_share": sampler_seconds / seconds} if state.loss.sampler.adapts else {}),
            "memory_gb": psutil.Process().memory_info().rss / 2**30,
        }
        if self.processes.device.type == "cuda":
            metrics["device_memory_gb"] = torch.cuda.max_memory_allocated(self.processes.device) / 2**30
        return metrics

    def _write(self, state: TrainingState, metrics: dict[str, float], timesteps: dict) -> None:
        when = {"step": state.step, "train_seconds": round(state.train_seconds, 3)}
        self.metrics.append(when | metrics)
        fault_point("metrics")
        self.timesteps.append(when | timesteps)
        values = {**metrics, "train_seconds": state.train_seconds}
        self._to_trackers(lambda tracker: tracker.log(values, state.step))
        shown = {"loss": f"{metrics['loss']:.4f}", "lr": f"{metrics['lr']:.2e}", "step": state.step}
        if "ema_decay" in metrics:
            shown["ema_decay"] = f"{metrics['ema_decay']:.4f}"
        if "timestep_sampler_share" in metrics:
            shown["timestep_sampler"] = f"{metrics['timestep_sampler_share']:.1%}"
        self.bar.set_postfix(shown, refresh=False)

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._to_trackers(lambda tracker: tracker.log_picture(name, picture, step))

    def log_evaluation(self, values: dict[str, float], step: int) -> None:
        """Log evaluate.py's results for a checkpoint to those trackers that it does not write to itself."""
        if not values:
            return
        self._to_trackers(lambda tracker: None if isinstance(tracker, TensorBoard) else tracker.log(values, step))

    def log_timesteps(self, state: TrainingState) -> None:
        """Log histograms of a sampler: its density over t, and its density, signals and loss over log-SNR."""
        if not self.trackers:
            return
        density, bins = state.loss.sampler.describe(), state.window.bins
        edges = np.linspace(0, len(density), min(DENSITY_BINS, len(density)) + 1).round()
        self._log_histogram(DENSITY, edges, np.add.reduceat(density.numpy(), edges[:-1].astype(int)), state.step)
        by_bin = {"density": rounded(bins.total(density))}
        if self.timesteps.latest is not None:
            by_bin["loss"] = self.timesteps.latest["loss"]
        by_bin |= {
            f"signal_{name}": rounded(bins.average(table)) for name, table in state.loss.sampler.signals().items()
        }
        for name, values in by_bin.items():
            edges, heights = bins.with_gaps(np.nan_to_num(np.array(values, dtype=float)), 0)
            self._log_histogram(f"log_snr/{name}", edges, heights, state.step)

    def _log_histogram(self, name: str, edges: np.ndarray, heights: np.ndarray, step: int) -> None:
        self._to_trackers(lambda tracker: tracker.log_histogram(name, edges, heights, step))

    def _to_trackers(self, action: Callable) -> None:
        """Write to the trackers; one that fails is dropped, because curves matter less than the run."""
        for tracker in [*self.trackers]:
            try:
                action(tracker)
            except tracker.failures as error:
                logger.warning("Curves are no longer logged to %s: %s", tracker.name, reason_of(error))
                self.trackers.remove(tracker)

    def flush(self) -> None:
        """Write, before a checkpoint, what a full disk refused earlier."""
        for lines in (self.metrics, self.timesteps):
            lines.flush()

    def close(self) -> None:
        if self.profiler is not None:
            self._end_profile()
        self.bar.close()
        self._to_trackers(lambda tracker: tracker.finish())

    def _end_profile(self) -> None:
        """Stop the profiler, which then writes its recording, and warn of steps that are missing from it."""
        self.profiler.stop()
        wanted, missing = self.profiled_steps, self.profiled_steps - max(0, steps_recorded(self.profiler))
        if missing > 0:
            logger.warning(
                "--profile %d: the run ended before its steps %d to %d, and %s",
                *(wanted, STEPS_NOT_PROFILED + 2 + wanted - missing, STEPS_NOT_PROFILED + 1 + wanted),
                "there is no profile" if missing == wanted else "they are not in the profile",
            )
        self.profiler = None


def steps_recorded(profiler: torch.profiler.profile) -> int:
    """Return how many steps have finished since the recording began; valid until it is complete."""
    return profiler.step_num - STEPS_NOT_PROFILED - 1


def open_profiler(steps: int, folder: RunFolder) -> torch.profiler.profile:
    """Profile steps of a run after its warm-up: record a trace of every operation, and where the time went."""

    def write(profiler: torch.profiler.profile) -> None:
        recorded = steps_recorded(profiler)
        if recorded == 0:
            return
        text = most_expensive(profiler.key_averages(), recorded)
        try:
            profiler.export_chrome_trace(str(folder.profile_trace))
            write_atomically(folder.profile_table, text)
        except (OSError, RuntimeError) as error:
            logger.warning("%s cannot be written: %s", folder.profile_trace, reason_of(error))
        logger.info("%d steps are in %s, for https://ui.perfetto.dev\n%s", recorded, folder.profile_trace, text)

    plan = torch.profiler.schedule(skip_first=STEPS_NOT_PROFILED, wait=0, warmup=1, active=steps, repeat=1)
    profiler = torch.profiler.profile(schedule=plan, on_trace_ready=write)
    profiler.start()
    return profiler


def most_expensive(averages: Iterable, steps: int) -> str:
    """List the operations that took the most time on the device, or on the processor if there is no other."""
    operations = [entry for entry in averages if not entry.key.startswith("ProfilerStep")]
    device = any(entry.self_device_time_total for entry in operations)
    took = operator.attrgetter("self_device_time_total" if device else "self_cpu_time_total")
    total = sum(map(took, operations))
    lines = [f"{'ms a step':>10}  share  calls a step  operation, on the {'device' if device else 'processor'}"]
    for entry in sorted(operations, key=took, reverse=True)[:OPERATIONS_LISTED]:
        share = took(entry) / total if total else 0
        lines.append(f"{took(entry) / steps / 1000:10.3f}  {share:5.1%}  {entry.count / steps:12.1f}  {entry.key}")
    return "\n".join(lines) + "\n"


def describe_timesteps(state: TrainingState, sums: Sums) -> dict:
    """Summarise the timesteps of a window by bin of log-SNR: their probability, mean unweighted loss, and signals.

    Probabilities and signals are those at the window's end. A bin from which nothing was drawn has no loss.
    """
    bins, sampler = state.window.bins, state.loss.sampler
    losses, counts, _ = sums
    of_bins = zip(losses[QUARTERS:], counts[QUARTERS:], strict=True)
    return {
        "log_snr": rounded(bins.centres),
        "probability": rounded(bins.total(sampler.describe())),
        "loss": rounded(loss / count if count else math.nan for loss, count in of_bins),
        "signals": {name: rounded(bins.average(table)) for name, table in sampler.signals().items()},
    }


def rounded(values: Iterable[float]) -> list[float | None]:
    """Round to six digits; JSON has no numbers that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in map(float, values)]


class LineFile:
    """A file of a run with a line of JSON for each window; lines that a full disk refuses are tried again later."""

    def __init__(self, path: Path, last_step: int):
        """Drop the lines of steps that will be repeated, and a last line that was cut off."""
        self.path, self._unwritten = path, []
        lines = [line for line in read_lines(path) if line.get("step", 0) <= last_step]
        self.latest: dict | None = lines[-1] if lines else None
        if path.exists():
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))

    def append(self, line: dict) -> None:
        """Append a line and those before it that could not be written."""
        self.latest = line
        self._unwritten.append(line)
        if (error := self.flush()) and len(self._unwritten) == 1:  # said once
            logger.warning(f"{self.path} cannot be written yet at step {line['step']}: {error.strerror}")

    def flush(self) -> OSError | None:
        """Write what could not be written before; return the error if that is still so."""
        if not self._unwritten:
            return None
        try:
            append_lines(self.path, self._unwritten)
        except OSError as error:
            return error
        self._unwritten = []
        return None


def append_lines(path: Path, values: list[dict]) -> None:
    """Append all of the lines or, on a full disk, none of them."""
    text = "".join(json.dumps(value) + "\n" for value in values).encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise
