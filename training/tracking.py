"""What a run tells while it goes: the bar, metrics.jsonl, TensorBoard or wandb, and the clock behind them."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import UserError
from common.files import write_atomically
from common.progress import progress_bar

if TYPE_CHECKING:
    from PIL import Image

    from training.config import TrainingConfig
    from training.loop import TrainingState, Window
    from training.processes import Processes

QUARTERS = 4
SMOOTHING = 0.99  # per step
METRICS_FILE = "metrics.jsonl"


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
    """The main process writes; the others only take part in the sums."""

    def __init__(
        self,
        config: TrainingConfig,
        processes: Processes,
        state: TrainingState,
        total_steps: int,
        batch_size: int,
    ):
        self.processes = processes
        self.batch_size = batch_size
        self.num_train_timesteps = config.ddpm_num_steps
        self.metrics: dict[str, float] = {}
        self.writes = processes.is_main
        output_dir = Path(config.output_dir)
        if self.writes:
            keep_lines_up_to(output_dir / METRICS_FILE, state.step)
            self.file = (output_dir / METRICS_FILE).open("a", encoding="utf-8")
        self.tracker = open_tracker(config, output_dir, state.step) if self.writes else None
        self.bar = progress_bar(
            total=total_steps,
            initial=state.step,
            desc="Steps",
            disable=not processes.is_local_main,
        )
        self.clock = Clock(state.train_seconds)
        self._last_step, self._last_seconds, self._last_data = state.step, state.train_seconds, 0.0

    def timed(self, batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Pass the batches on and note how long each was waited for."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator)
            self.clock.data_seconds += time.perf_counter() - start
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not training time."""
        self.processes.synchronize()
        with self.clock.paused():
            yield

    def advance(self) -> None:
        self.bar.update()

    def log(self, state: TrainingState, window: Window) -> None:
        """One line of metrics for the steps of the window, the same on all processes."""
        metrics = self._averages(window)
        # Fetching the averages has waited for the device, so the clock is true.
        state.train_seconds = self.clock.train_seconds
        steps, seconds = state.step - self._last_step, state.train_seconds - self._last_seconds
        keep = SMOOTHING**steps
        if state.smoothed_loss is None:
            state.smoothed_loss = metrics["loss"]
        state.smoothed_loss = keep * state.smoothed_loss + (1 - keep) * metrics["loss"]
        self.metrics = {
            "loss": metrics.pop("loss"),
            "smoothed_loss": state.smoothed_loss,
            **metrics,
            "lr": window.learning_rate,
            **({} if state.ema is None else {"ema_decay": state.ema.get_current_decay()}),
            "images_per_second": steps * self.batch_size / seconds,
            "data_wait_share": (self.clock.data_seconds - self._last_data) / seconds,
            **self._memory(),
        }
        self._last_step, self._last_seconds = state.step, state.train_seconds
        self._last_data = self.clock.data_seconds
        if not self.writes:
            return
        line = {"step": state.step, "train_seconds": round(state.train_seconds, 3), **self.metrics}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.tracker is not None:
            self.tracker.log({**self.metrics, "train_seconds": state.train_seconds}, step=state.step)
        shown = {"loss": f"{self.metrics['loss']:.4f}", "lr": f"{window.learning_rate:.2e}", "step": state.step}
        if state.ema is not None:
            shown["ema_decay"] = f"{self.metrics['ema_decay']:.4f}"
        self.bar.set_postfix(shown, refresh=False)

    def _averages(self, window: Window) -> dict[str, float]:
        """Loss, loss by quarter of t, and gradient norm over the window and all processes: one fetch."""
        losses = torch.stack(window.losses).double() if self._has_float64 else torch.stack(window.losses)
        timesteps = torch.stack(window.timesteps)[:, window.positions]
        quarter = (timesteps * QUARTERS // self.num_train_timesteps).to(losses.device)
        in_quarter = [quarter == number for number in range(QUARTERS)]
        sums = torch.stack(
            [
                *(torch.where(mask, losses, 0).sum() for mask in in_quarter),
                *(mask.sum().to(losses.dtype) for mask in in_quarter),
                torch.stack(window.objectives).to(losses.dtype).sum(),
            ]
        )
        if self.processes.count > 1:
            dist.all_reduce(sums)
        norm = torch.stack(window.gradient_norms).to(losses.dtype).mean()
        *values, norm = torch.cat([sums, norm[None]]).tolist()
        totals, counts, objective = values[:QUARTERS], values[QUARTERS:-1], values[-1]
        by_quarter = {f"loss_q{q}": totals[q] / counts[q] for q in range(QUARTERS) if counts[q]}
        loss = objective / len(window.objectives) / self.processes.count
        return {"loss": loss, **by_quarter, "grad_norm": norm}

    @property
    def _has_float64(self) -> bool:
        return self.processes.device.type != "mps"

    def _memory(self) -> dict[str, float]:
        """Peak memory of this process and of its device, in gigabytes."""
        peak = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if self.processes.device.type == "cuda":
            peak["device_memory_gb"] = torch.cuda.max_memory_allocated(self.processes.device) / 2**30
        return peak

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        if self.tracker is None:
            return
        if self.tracker.name == "tensorboard":
            import numpy

            self.tracker.writer.add_image(name, numpy.asarray(picture), step, dataformats="HWC")
        else:
            self.tracker.log_images({name: [picture]}, step=step)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *failure) -> None:
        self.bar.close()
        if self.tracker is not None:
            self.tracker.finish()
        if self.writes:
            self.file.close()


def open_tracker(config: TrainingConfig, output_dir: Path, step: int):
    """accelerate's tracker for TensorBoard or wandb. Curves of steps that will be repeated are dropped."""
    if config.logger == "none":
        return None
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    logging_dir = output_dir / config.logging_dir
    if config.logger == "tensorboard":
        tracker = TensorBoardTracker("", logging_dir, purge_step=step + 1)
    else:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise UserError("--logger wandb: wandb is not installed; `pip install wandb` or use tensorboard") from error
        tracker = WandBTracker(config.tracker_project_name, name=output_dir.name, dir=str(output_dir))
    tracker.start()
    # As text: TensorBoard takes no lists or missing values as hyper-parameters.
    tracker.log({"configuration": (output_dir / "config.yaml").read_text(encoding="utf-8")}, step=step)
    return tracker


def keep_lines_up_to(path: Path, step: int) -> None:
    """Drop the lines of steps that will be repeated, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] > step:
                break
        except ValueError:
            break
        kept.append(line + "\n")
    write_atomically(path, "".join(kept))
