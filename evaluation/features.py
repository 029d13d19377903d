"""One pass of one network over each image: everything that the metrics need."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from common.errors import UserError, first_line
from common.machine import PendingCopy, to_device, usable_cores
from common.progress import progress_bar
from evaluation.metrics import Moments

if TYPE_CHECKING:
    from common.processes import Processes
    from evaluation.image_sets import Batch
    from evaluation.networks import FeatureNetwork

logger = logging.getLogger(__name__)

RESIZED_AHEAD = 2  # batches
WORTH_TIMING = 500  # images
WORTH_COMPILING = 10_000  # images, by which the time of compiling is won back (benchmarks/inception_speed.json)


@dataclass
class Features:
    """What one pass gives; whole on the main process, in the order of the images."""

    count: int
    moments: Moments
    spatial: Moments | None
    features: torch.Tensor  # float32 [n, dimensions]
    logits: torch.Tensor | None


def extract(
    networks: list[FeatureNetwork],
    batches: Iterable[Batch],
    count: int,
    batch_size: int,
    processes: Processes,
    description: str | None,
) -> list[Features]:
    """Features of all images in every network, from this process's share of them.

    The share is any part of the `count` images, in batches of at most `batch_size`; together the processes have all.
    Without a description there is no bar: then the images come from something that shows its own.
    """
    passes = [_Pass(network, batch_size, processes.device) for network in networks]
    share = -(-count // processes.count)
    bar = progress_bar(
        total=share, desc=description, unit="images", disable=description is None or not processes.is_local_main
    )
    with bar, torch.inference_mode():
        for indices, *inputs in _resized_ahead(networks, batches, processes):
            for one, pixels in zip(passes, inputs, strict=True):
                one.add(indices, to_device(pixels, processes.device))
            bar.update(len(indices))
        results = [one.finish(processes) for one in passes]
    for features in results:
        if features.count != count:
            raise UserError(f"{features.count} images came where {count} were wanted")
    return results


def compile_networks(
    networks: list[FeatureNetwork], size: tuple[int, int], batch_size: int, count: int, processes: Processes
) -> None:
    """Compile where there are images enough; where that is not possible, go on without. All modes share one network."""
    if count < WORTH_COMPILING:
        return
    as_they_are = [one.network for one in networks]
    compiled = {id(network): torch.compile(network) for network in as_they_are}
    for one, network in zip(networks, as_they_are, strict=True):
        one.network = compiled[id(network)]
    try:
        _seconds_per_batch(networks, size, batch_size, processes)
    except Exception as error:  # no compiler on this machine, for example
        logger.warning("The feature network is not compiled: %s", first_line(error))
        for one, network in zip(networks, as_they_are, strict=True):
            one.network = network


def announce_speed(
    networks: list[FeatureNetwork], size: tuple[int, int], batch_size: int, count: int, processes: Processes
) -> None:
    """Say before the first image how long so many will take."""
    share = -(-count // processes.count)
    if share < WORTH_TIMING:
        return
    seconds = _seconds_per_batch(networks, size, batch_size, processes) * share / batch_size
    logger.info(
        "About %.0f images a second: %d images take about %d min %02d s",
        count / seconds,
        count,
        *divmod(round(seconds), 60),
    )


def _seconds_per_batch(
    networks: list[FeatureNetwork], size: tuple[int, int], batch_size: int, processes: Processes
) -> float:
    """Resizing and computing one image many times over; the first time, which may take long, is not counted."""
    image = numpy.zeros((*size, 3), numpy.uint8)
    start = 0.0
    with torch.inference_mode():
        for _ in range(2):
            start = time.perf_counter()
            for network in networks:
                pixels = torch.from_numpy(image if network.resize is None else network.resize(image))
                network.compute(pixels.permute(2, 0, 1).expand(batch_size, -1, -1, -1).to(processes.device))
            processes.synchronize_device()
    return time.perf_counter() - start


def _resized_ahead(
    networks: list[FeatureNetwork], batches: Iterable[Batch], processes: Processes
) -> Iterator[list[torch.Tensor]]:
    """Each batch's indices and, for every network, its images; resized by threads while earlier ones are computed."""
    threads = max(1, int(usable_cores()) // processes.local_count)

    def resized(network: FeatureNetwork, images: torch.Tensor) -> list | torch.Tensor:
        if network.resize is None:
            return images
        return [pool.submit(network.resize, image) for image in images.permute(0, 2, 3, 1).numpy()]

    def collected(pending: list | torch.Tensor) -> torch.Tensor:
        if isinstance(pending, torch.Tensor):
            return pending
        return torch.stack([torch.from_numpy(one.result()) for one in pending]).permute(0, 3, 1, 2)

    with ThreadPoolExecutor(threads) as pool:
        waiting: collections.deque[list] = collections.deque()
        for indices, images in batches:
            waiting.append([indices, *(resized(network, images) for network in networks)])
            if len(waiting) > RESIZED_AHEAD:
                indices, *pending = waiting.popleft()
                yield [indices, *map(collected, pending)]
        for indices, *pending in waiting:
            yield [indices, *map(collected, pending)]


class _Pass:
    """Sums on the device in float64, and the features themselves on the host."""

    def __init__(self, network: FeatureNetwork, batch_size: int, device: torch.device):
        self.network, self.batch_size = network, batch_size
        self.summing = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self.sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.indices: list[torch.Tensor] = []
        self.kept: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self._last: dict[str, PendingCopy] = {}

    def add(self, indices: torch.Tensor, images: torch.Tensor) -> None:
        padded = _padded(images, self.batch_size)
        outputs = self.network.compute(padded)
        if self.network.precision != torch.float32 and not self.indices:
            self._say_error(padded, outputs["features"])
        outputs = {name: output[: len(images)] for name, output in outputs.items()}
        for name in outputs.keys() & {"features", "spatial"}:
            values = outputs[name].to(self.summing).double()
            width = values.shape[1]
            total, outer = self.sums.setdefault(name, (values.new_zeros(width), values.new_zeros(width, width)))
            total += values.sum(dim=0)
            outer.addmm_(values.T, values)
        # One batch late: by then the copy has arrived, and the device has this batch to compute.
        self._keep()
        self._last = {name: PendingCopy(output) for name, output in outputs.items() if name != "spatial"}
        self.indices.append(indices)

    def _say_error(self, images: torch.Tensor, features: torch.Tensor) -> None:
        with torch.compiler.set_stance("force_eager"):  # not compiled for one batch
            exact = self.network.compute(images, torch.float32)["features"]
        error = (features - exact).norm() / exact.norm()
        logger.info(
            "Features in %s differ from those in float32 by %.2g of their norm (first batch)",
            str(self.network.precision).removeprefix("torch."),
            error,
        )

    def _keep(self) -> None:
        for name, output in self._last.items():
            self.kept[name].append(output.get().clone())  # out of pinned memory, of which there is little
        self._last = {}

    def finish(self, processes: Processes) -> Features:
        """The sums over all processes, and on the main one all the features, in order."""
        self._keep()
        self._allow_for_none(processes)
        indices = torch.cat(self.indices)
        count = int(processes.all_reduce_sum(torch.tensor(len(indices))))
        order = processes.gather_rows(indices).argsort()
        gathered = {name: processes.gather_rows(torch.cat(parts))[order] for name, parts in sorted(self.kept.items())}
        moments = {
            name: Moments.of_sums(count, *(processes.all_reduce_sum(part.cpu()) for part in sums))
            for name, sums in sorted(self.sums.items())
        }
        return Features(
            count, moments["features"], moments.get("spatial"), gathered["features"], gathered.get("logits")
        )

    def _allow_for_none(self, processes: Processes) -> None:
        """A process that got no image, the others having been quicker, takes part with nothing."""
        widths = {name: parts[0].shape[1] for name, parts in self.kept.items()}
        summed = {name: len(total) for name, (total, _) in self.sums.items()}
        for other_widths, other_summed in processes.all_gather((widths, summed)):
            for name, width in other_widths.items():
                self.kept[name] = self.kept[name] or [torch.zeros(0, width)]
            for name, width in other_summed.items():
                nothing = torch.zeros(width, dtype=torch.float64)
                self.sums.setdefault(name, (nothing, torch.outer(nothing, nothing)))
        self.indices = self.indices or [torch.zeros(0, dtype=torch.int64)]


def _padded(images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """A smaller batch filled up to a power of two: a network is compiled, or tuned, for every size that it sees."""
    missing = min(batch_size, 1 << (len(images) - 1).bit_length()) - len(images)
    return images if missing <= 0 else torch.cat([images, images[:1].expand(missing, *images.shape[1:])])
