"""The machine: its cores, its memory, and copies to and from its device that nothing need wait for."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, reason_of

if TYPE_CHECKING:
    import torch

MOST_WORKERS = 4
# What torch, cuDNN and cuBLAS say of a device, and torch of a machine, that has no memory left.
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
LARGEST_MEASURED = 16  # images in the largest batch whose memory is measured; that of larger ones is extrapolated
CALLS_BEFORE_CAPTURE = 3  # of a CUDA graph, in which torch, cuDNN and cuBLAS get ready
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 32 * 2**20  # bytes: the most that glibc takes for M_MMAP_THRESHOLD
USABLE_SHARE = 0.9  # of the memory that is free: some is lost between the blocks in use


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


def is_out_of_memory(error: BaseException, device: torch.device) -> bool:
    """Tell whether the device ran out of memory; a `MemoryError` counts only if the device is the CPU."""
    import torch

    if isinstance(error, MemoryError):
        return device.type == "cpu"
    said = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    return bool(said) or isinstance(error, torch.OutOfMemoryError)


@contextlib.contextmanager
def fits_in_memory(device: torch.device, advice: Callable[[], str]) -> Iterator[None]:
    """End with advice on what to lower if the device runs out of memory inside this context.

    The failed work is freed before `advice` is called, so that it can measure what would fit.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, device):
            raise
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise UserError(advice()) from error


def largest_batch(run: Callable[[int], object], device: torch.device, failed: int, to_come: int = 0) -> int:
    """Estimate how many images, fewer than `failed`, fit in the free memory less the `to_come` bytes needed elsewhere.

    `run` is called with small batches, twice as large each time, to measure their memory. In the smallest, the memory
    of the weights' gradient hides that of the images, so only the two largest are used.
    """
    measured, size = [(0, 0)], 1
    while size < failed and size <= LARGEST_MEASURED:
        try:
            measured.append((size, peak_memory(partial(run, size), device)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error, device):
                raise
            traceback.clear_frames(error.__traceback__)
            return measured[-1][0]
        size *= 2
    if len(measured) < 3:
        return measured[-1][0]
    return min(failed - 1, images_within(USABLE_SHARE * (free_memory(device) - to_come), *measured[-2:]))


def images_within(memory: float, small: tuple[int, int], large: tuple[int, int]) -> int:
    """Return the most images n with fixed + per_image n <= memory, where two batches take (n, bytes)."""
    per_image = max(1, (large[1] - small[1]) / (large[0] - small[0]))
    fixed = small[1] - per_image * small[0]
    return max(0, int((memory - fixed) / per_image))


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still have, on the device or on the machine."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free, (limit, _) = psutil.virtual_memory().available, resource.getrlimit(resource.RLIMIT_AS)
    return free if limit == resource.RLIM_INFINITY else min(free, limit - psutil.Process().memory_info().vms)


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether a GPU or an x86 processor has instructions for bf16; without them it is slower than float32."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return known.get("architecture") != "x86_64" or known["avx512_bf16"] or known["amx_bf16"]


def peak_memory(action: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of an action in bytes, beyond what is in use already."""
    import torch

    if device.type != "cuda":
        return peak_of_tensors(action)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


def peak_of_tensors(action: Callable[[], object]) -> int:
    """Return the peak bytes of the tensors that an action makes, counted here because a CPU has no such counter."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter
    from torch.utils.weak import WeakIdKeyDictionary

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.alive, self.peak = WeakIdKeyDictionary(), 0, 0  # storages; bytes

        def __torch_dispatch__(self, operation, types, arguments=(), others=None):
            for storage in self._storages_in((arguments, others)):
                self.known.setdefault(storage, None)  # was there before, or is counted already
            result = operation(*arguments, **(others or {}))
            for storage in self._storages_in(result):
                if storage not in self.known:
                    self.known[storage] = None
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
            return result

        def _add(self, count: int) -> None:
            self.alive += count
            self.peak = max(self.peak, self.alive)

        @staticmethod
        def _storages_in(values: object) -> list:
            return [value.untyped_storage() for value in tree_iter(values) if hasattr(value, "untyped_storage")]

    with Count() as count:
        action()
    return count.peak


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step: getting cleared pages again takes a tenth of a step on a CPU."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, -1)  # also keeps the other threshold from growing by itself, from 128 kB
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Let Python collect garbage only when told to: when one process collects on its own, all others wait for it.

    Objects that already exist, mostly modules, are left out of later collections.
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
    if tensor.device.type == device.type:
        return tensor
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


class CapturedWork:
    """GPU work that the host starts with a single call, however many operations it contains: a CUDA graph.

    A graph reads its inputs where they were when it was captured, so they are copied there, and what it returns is
    overwritten by the next call. The first calls run without a graph, on the stream that captures, until everything
    that is created only once exists.
    """

    def __init__(self, work: Callable[..., tuple[torch.Tensor, ...]]):
        import torch

        self.work, self.calls, self.graph, self.stream = work, 0, torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import torch

        self.calls += 1
        if self.calls <= CALLS_BEFORE_CAPTURE:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                outputs = self.work(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return outputs
        if self.calls == CALLS_BEFORE_CAPTURE + 1:
            self.inputs = [tensor.clone() for tensor in inputs]
            # Other threads, which write checkpoints for example, may do as they like meanwhile.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.outputs = self.work(*self.inputs)
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.graph.replay()
        return self.outputs


class Stopwatch:
    """Sums the times between `start` and `stop` on a device without waiting for it: on a GPU by recording events."""

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
