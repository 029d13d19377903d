"""The processes of a run: how they start, agree and take turns."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from training.config import TrainingConfig

logger = logging.getLogger(__name__)

# Long enough for one process per machine to decode a large data set while the others wait.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


class Processes:
    """What a run needs to know of its processes beyond accelerate: a control channel and turns.

    The control channel is a gloo group on the CPU: agreeing on a flag at every step then never waits for a GPU.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.index: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.is_local_main: bool = accelerator.is_local_main_process
        self.control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if self.count > 1 else None

    @property
    def local_count(self) -> int:
        """Processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all must ask."""
        if self.control is None:
            return flag
        shared = torch.tensor([flag], dtype=torch.int8)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.control)
        return bool(shared.item())

    def collect(self, item: object) -> list:
        """What every process has, on every process; for rare and small things."""
        if self.control is None:
            return [item]
        items = [None] * self.count
        dist.all_gather_object(items, item, group=self.control)
        return items

    def wait(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    @contextmanager
    def main_first(self, local: bool = True) -> Iterator[None]:
        """The main process (of each machine) goes first; if it fails, it says so before anyone waits for it."""
        first = self.is_local_main if local else self.is_main
        if not first:
            self.wait()
        yield
        if first:
            self.wait()

    def finish(self) -> None:
        """Leave the group in good order."""
        if self.control is not None:
            dist.destroy_process_group()

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next is true."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def start_processes(config: TrainingConfig, precision: str) -> Processes:
    """Join the other processes, under plain python, torchrun or accelerate launch."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedDataParallelKwargs

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    try:
        accelerator = Accelerator(
            # Where there is no GPU, accelerate joins the others only when told to use the CPU; otherwise each
            # process would believe itself alone and all would write the same run.
            cpu=world_size > 1 and not torch.accelerator.is_available(),
            mixed_precision=precision,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
                # The buckets that are exchanged double as gradients, which saves a copy of them.
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
    except ValueError as error:  # fp16 or bf16 where the device has none, for example
        raise UserError(f"--mixed_precision {precision}: {error}") from error
    if accelerator.num_processes != world_size:
        raise UserError(
            f"{world_size} processes were started (WORLD_SIZE), but {accelerator.num_processes} found each other: "
            f"start them with torchrun or accelerate launch"
        )
    processes = Processes(accelerator)
    set_up_logging(processes.is_main)
    logger.info(accelerator.state)
    if processes.device.type == "cpu":
        _set_threads(processes)
    if config.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cudnn.allow_tf32 = False  # torch allows it for convolutions by default
    return processes


def _set_threads(processes: Processes) -> None:
    """Share the cores among the processes of this machine.

    Launchers set one thread per process whatever the machine; a number the user chose is left alone.
    """
    launched = "LOCAL_WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is None or (launched and chosen == "1"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes.local_count))


def set_up_logging(is_main: bool) -> None:
    """The format of the diffusers examples; INFO on the main process only, warnings of all."""
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        level=logging.INFO if is_main else logging.WARNING,
        force=True,
    )
    for noisy in ("httpx", "httpx2", "datasets", "PIL", "fsspec", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
