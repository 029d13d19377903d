"""The machine: its cores, and copies to and from its device that nothing need wait for."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, reason_of

if TYPE_CHECKING:
    import torch

MOST_WORKERS = 4
# What torch, cuDNN and cuBLAS say of a device, and torch of a machine, that has no memory left.
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


def default_num_workers(local_processes: int) -> int:
    """Return the data workers for each process of this machine: a few, and never more than there are cores."""
    return min(MOST_WORKERS, int(usable_cores()) // local_processes)


def usable_cores() -> float:
    """Return how many cores this process may use, as far as it is told; a container may grant half a one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_cgroup_quotas()])


def _cgroup_quotas(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Return the cores that a container or a job scheduler grants, at every level that sets a limit."""
    quotas = []
    for line in membership.read_text().splitlines() if membership.exists() else []:  # Linux only
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, files = cgroups, ["cpu.max"]
        elif "cpu" in controllers.split(","):  # version 1
            root, files = cgroups / controllers, ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = root / path.lstrip("/")
        # A container may see its own group at the root, under whatever path the host knows it.
        for level in {group, *group.parents, root}:
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((level / file).read_text() for file in files).split()
                if int(quota) > 0:
                    quotas.append(int(quota) / int(period))
    return quotas


@contextlib.contextmanager
def fits_in_memory(advice: str) -> Iterator[None]:
    """End with advice on what to lower where the memory of the device, or of the machine, does not suffice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise UserError(f"{advice} ({reason_of(error)})") from error


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Let Python collect garbage only when told to: while it does, at a moment of its own, all processes wait.

    What is there already, modules for the most part, is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def can_be_compiled(advice: str) -> Iterator[None]:
    """End with one line where torch.compile fails: for want of a C++ compiler, for example."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise UserError(f"{advice} ({reason_of(getattr(error, 'inner_exception', error))})") from error


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device; from pinned memory a copy to a GPU does not wait for the work before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PendingCopy:
    """A tensor on its way to the host: `get` waits for its own copy and for nothing queued after it."""

    def __init__(self, tensor: torch.Tensor):
        import torch

        self._arrived: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._on_host = tensor.clone()
        else:
            self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            self._on_host.copy_(tensor, non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record()

    def get(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host


class Stopwatch:
    """The sum of the times between `start` and `stop` on a device, which nobody waits for: on a GPU as events."""

    def __init__(self, device: torch.device):
        self._device, self._total = device, 0.0
        self._spans: list[tuple] = []  # those not in the total yet

    def start(self, *_: object) -> None:
        """Begin a span, or begin it anew; takes whatever a hook is given."""
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def seconds(self) -> float:
        """Return the sum; to be called when the device has come to the end of the last span."""
        on_cpu = self._device.type == "cpu"
        spans = (end - begin if on_cpu else begin.elapsed_time(end) / 1000 for begin, end in self._spans)
        self._total += sum(spans)
        self._spans.clear()
        return self._total

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        import torch

        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
