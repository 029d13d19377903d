"""One pass of a network over each image: everything that the metrics need."""

import collections
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError, reason_of
from common.files import load_safetensors, save_safetensors
from common.interruption import fault_point
from common.machine import PendingCopy, fits_in_memory, largest_batch, to_device, usable_cores
from common.processes import Processes
from common.progress import progress_bar
from evaluation.image_sets import Batch, ImageSet, batches_of
from evaluation.metrics import Moments
from evaluation.networks import FeatureNetwork
from image_data.sources import spread

logger = logging.getLogger(__name__)

BATCHES_RESIZED_AHEAD = 2
WORTH_TIMING = 500  # images
SECONDS_BETWEEN_SAVES = 120.0  # of what an unfinished pass has come to; it costs less than a second
WORTH_COMPILING = 10_000  # images, by which the time of compiling is won back (benchmarks/results/inception_speed.json)


@dataclass
class Features:
    """The result of a pass; whole on the main process, in the order of the images."""

    count: int
    moments: Moments
    spatial: Moments | None
    features: torch.Tensor  # float32 [n, dimensions]
    logits: torch.Tensor | None


class FeatureExtractor:
    """The networks that see the images, and the processes that share the work."""

    def __init__(
        self,
        networks: list[FeatureNetwork],
        batch_size: int,
        num_workers: int,
        processes: Processes,
        may_compile: bool = False,
    ) -> None:
        self.networks, self.batch_size, self.num_workers = networks, batch_size, num_workers
        self.processes, self._may_compile = processes, may_compile
        self.unfinished_dir: Path | None = None  # for what unfinished passes have come to
        self._saved: list[Path] = []
        self._announced: tuple[int, tuple[int, int]] | None = None

    def batches(self, images: ImageSet, chosen: torch.Tensor) -> Iterator[Batch]:
        """Yield this process's share of these images of a set."""
        return batches_of(images, chosen, self.batch_size, self.num_workers, self.processes)

    def extract(
        self,
        batches: Iterable[Batch],
        count: int,
        description: str | None,
        networks: Sequence[FeatureNetwork] = (),
        identity: str | None = None,
        most_kept: int | None = None,
    ) -> list[Features]:
        """Return the features of `count` images in every network, or in these; a process passes its share of them.

        Without a description there is no bar: then the images come from something that shows its own. A pass over
        images of a known identity is saved now and then until `forget`, and goes on from there if it was interrupted.
        Of a large data set, whose mean and covariance are wanted, `most_kept` of images 0, 1, ... are kept, evenly
        spread, and no logits: all of them would not fit in memory.
        """
        path = self._unfinished((identity, count, most_kept), networks or self.networks)
        chosen = None if most_kept is None else torch.zeros(count, dtype=torch.bool)
        if chosen is not None:
            chosen[torch.as_tensor(spread(count, most_kept))] = True
        device = self.processes.device
        passes = [_Pass(network, self.batch_size, device, chosen) for network in networks or self.networks]
        hidden = description is None or not self.processes.is_local_main
        bar = progress_bar(total=-(-count // self.processes.count), desc=description, unit="images", disable=hidden)
        with bar, torch.inference_mode():
            done = _continue(passes, path)
            bar.update(passes[0].count)
            # What is done is only decoded once more, as others may look at the images too.
            left = self._resized_ahead(islice(batches, done, None), [one.network for one in passes])
            saved_at = time.monotonic()
            for number, (indices, *inputs) in enumerate(left, start=done + 1):
                with fits_in_memory(self.processes.device, self.batch_that_fits):
                    for one, pixels in zip(passes, inputs, strict=True):
                        one.add(indices, to_device(pixels, self.processes.device))
                bar.update(len(indices))
                if path is not None and time.monotonic() - saved_at >= SECONDS_BETWEEN_SAVES:
                    _save(passes, number, path)
                    saved_at = time.monotonic()
                    fault_point("features")
            results = [one.finish(self.processes) for one in passes]
        for features in results:
            if features.count != count:
                raise UserError(f"got {features.count} images instead of {count}")
        return results

    def forget(self) -> None:
        """Remove what was saved of passes, whose results are on the disk now."""
        for path in self._saved:
            path.unlink(missing_ok=True)
        self._saved.clear()

    def _unfinished(self, images: tuple, networks: Sequence[FeatureNetwork]) -> Path | None:
        """Return the file for what this process has of a pass; another for whatever gives other numbers."""
        if images[0] is None or self.unfinished_dir is None:
            return None
        kinds = [(network.digest, network.mode, network.precision_name) for network in networks]
        made_of = images, self.batch_size, kinds, self.processes.index, self.processes.count
        name = hashlib.blake2b(repr(made_of).encode(), digest_size=16).hexdigest()
        self._saved.append(self.unfinished_dir / f"{name}.safetensors")
        return self._saved[-1]

    def prepare(self, count: int, size: tuple[int, int], later: int = 0) -> None:
        """Compile where that pays for `count` images and others later, and log how long the `count` will take."""
        if self._may_compile and count + later >= WORTH_COMPILING:
            self._compile(size)
        self._may_compile = False
        share = -(-count // self.processes.count)
        if share >= WORTH_TIMING and self._announced != (count, size):
            self._announced = count, size
            with fits_in_memory(self.processes.device, self.batch_that_fits):
                seconds = self._seconds_per_batch(size) * share / self.batch_size
            numbers = count / seconds, count, *divmod(round(seconds), 60)
            logger.info("About %.0f images a second: %d images take about %d min %02d s", *numbers)

    def _compile(self, size: tuple[int, int]) -> None:
        """Compile the networks for images of this size; if that is not possible, go on without."""
        original = self.networks[0].network  # all modes share one
        compiled = torch.compile(original)
        for one in self.networks:
            one.network = compiled
        try:
            self._seconds_per_batch(size)
        except Exception as error:  # no compiler on this machine, for example
            logger.warning("The feature network is not compiled: %s", reason_of(error))
            for one in self.networks:
                one.network = original

    def _seconds_per_batch(self, size: tuple[int, int]) -> float:
        """Time one image many times over; the first pass, which may take long, is not counted."""
        for _ in range(2):
            start = time.perf_counter()
            self._pass_of_zeros(self.batch_size, size)
            self.processes.synchronize_device()
        return time.perf_counter() - start

    def _pass_of_zeros(self, count: int, size: tuple[int, int] = (32, 32)) -> None:
        """Compute the features of `count` black images in every network."""
        image = np.zeros((*size, 3), np.uint8)
        with torch.inference_mode():
            for network in self.networks:
                batch = network.resized(image).expand(count, -1, -1, -1)
                network.compute(batch.to(self.processes.device))

    def batch_that_fits(self) -> str:
        """Say, after a batch that did not fit in memory, which one would."""
        with torch.compiler.set_stance("force_eager"):  # not compiled for every size
            fitting = largest_batch(self._pass_of_zeros, self.processes.device, failed=self.batch_size)
        what = f"--feature_batch_size {self.batch_size}: the features of this many images do not fit in the memory of "
        what += f"{self.processes.device}"
        return f"{what}; those of about {fitting} would" if fitting else f"{what}, nor do those of a single one"

    def _resized_ahead(self, batches: Iterable[Batch], networks: list[FeatureNetwork]) -> Iterator[list[torch.Tensor]]:
        """Yield each batch's indices and its images for every network, resized by threads while others are computed."""
        threads = max(1, int(usable_cores()) // self.processes.local_count)
        waiting: collections.deque[list] = collections.deque()
        with ThreadPoolExecutor(threads) as pool:
            for indices, images in batches:
                pixels = images.permute(0, 2, 3, 1).numpy()
                inputs = [pool.map(one.resized, pixels) if one.resize else images for one in networks]
                waiting.append([indices, *inputs])
                if len(waiting) > BATCHES_RESIZED_AHEAD:
                    yield _finished(waiting.popleft())
            yield from map(_finished, waiting)


def _finished(batch: list[torch.Tensor | Iterator[torch.Tensor]]) -> list[torch.Tensor]:
    return [part if isinstance(part, torch.Tensor) else torch.stack([*part]) for part in batch]


def _save(passes: Sequence["_Pass"], number: int, path: Path) -> None:
    """Save what passes have come to after some batches; without it one that is killed begins anew."""
    tensors = {f"{place}/{name}": tensor for place, one in enumerate(passes) for name, tensor in one.state().items()}
    try:
        save_safetensors(tensors, path, {"batches": str(number)})
    except OSError as error:
        logger.warning("%s, the features so far, cannot be written: %s", path, reason_of(error))


def _continue(passes: Sequence["_Pass"], path: Path | None) -> int:
    """Give passes what they had come to when it was saved, and return after how many batches that was."""
    if path is None or not os.path.lexists(path):
        return 0
    try:
        tensors, metadata = load_safetensors(path)
        number = int(metadata["batches"])
    except (OSError, KeyError, ValueError) as error:
        logger.warning("%s is not used: %s", path, reason_of(error))
        return 0
    for place, one in enumerate(passes):
        parts = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{place}/")}
        one.load_state(parts)
    logger.info("%s images have been through the network already", f"{passes[0].count:,}")
    return number


class _Pass:
    """The pass of one network: sums on the device in float64, and the features themselves on the host.

    With `chosen`, which is True for some of all images, only the features of these are kept, without logits.
    """

    def __init__(
        self, network: FeatureNetwork, batch_size: int, device: torch.device, chosen: torch.Tensor | None = None
    ):
        self.network, self.batch_size, self.chosen = network, batch_size, chosen
        self.sum_device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self.sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.indices: list[torch.Tensor] = []
        self.kept: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self._last: dict[str, PendingCopy] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self.indices))

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that there is so far, as tensors on the host."""
        self._keep_last()
        kept = {f"kept/{name}": torch.cat(parts) for name, parts in self.kept.items()}
        totals = {f"total/{name}": total.cpu() for name, (total, _) in self.sums.items()}
        outers = {f"outer/{name}": outer.cpu() for name, (_, outer) in self.sums.items()}
        return {"indices": torch.cat(self.indices), **kept, **totals, **outers}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state`."""
        self.indices = [state["indices"]]
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if kind == "kept":
                self.kept[name] = [tensor]
            elif kind == "total":
                self.sums[name] = tensor.to(self.sum_device), state[f"outer/{name}"].to(self.sum_device)

    def add(self, indices: torch.Tensor, images: torch.Tensor) -> None:
        """Compute a batch and add it to the sums."""
        padded = _padded(images, self.batch_size)
        outputs = self.network.compute(padded)
        if self.network.precision != torch.float32 and not self.indices:
            self._log_error(padded, outputs["features"])
        outputs = {name: output[: len(indices)] for name, output in outputs.items()}
        for name in outputs.keys() & {"features", "spatial"}:
            values = outputs[name].to(self.sum_device).double()
            width = values.shape[1]
            total, outer = self.sums.setdefault(name, (values.new_zeros(width), values.new_zeros(width, width)))
            total += values.sum(dim=0)
            outer.addmm_(values.T, values)
        # One batch late: by then the copy has arrived, and the device has this batch to compute.
        self._keep_last()
        outputs.pop("spatial", None)
        if self.chosen is not None:
            rows = to_device(self.chosen[indices].nonzero().flatten(), images.device)
            outputs = {"features": outputs["features"][rows]}
        self._last = {name: PendingCopy(output) for name, output in outputs.items()}
        self.indices.append(indices)

    def _log_error(self, images: torch.Tensor, features: torch.Tensor) -> None:
        with torch.compiler.set_stance("force_eager"):  # not compiled for one batch
            exact = self.network.compute(images, torch.float32)["features"]
        error = (features - exact).norm() / exact.norm()
        precision = self.network.precision_name
        logger.info("Features in %s differ from those in float32 by %.2g of their norm (first batch)", precision, error)

    def _keep_last(self) -> None:
        for name, output in self._last.items():
            self.kept[name].append(output.get().clone())  # out of pinned memory, of which there is little
        self._last = {}

    def finish(self, processes: Processes) -> Features:
        """Sum over all processes, and gather all the features in order on the main one."""
        if not self.indices:  # the others were quicker: take part with none
            blank = self.network.resized(np.zeros((32, 32, 3), np.uint8))[None]
            self.add(torch.zeros(0, dtype=torch.int64), blank.to(processes.device))
        self._keep_last()
        indices = torch.cat(self.indices)
        count = int(processes.all_reduce_sum(torch.tensor(len(indices))))
        if self.chosen is not None:
            indices = indices[self.chosen[indices]]
        order = processes.gather_rows(indices).argsort()
        kept = {name: processes.gather_rows(torch.cat(parts))[order] for name, parts in sorted(self.kept.items())}
        moments = {
            name: Moments.of_sums(count, *(processes.all_reduce_sum(part.cpu()) for part in sums))
            for name, sums in sorted(self.sums.items())
        }
        return Features(count, moments["features"], moments.get("spatial"), kept["features"], kept.get("logits"))


def _padded(images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Fill a smaller batch up to a power of two: a network is compiled, or tuned, for every size that it sees."""
    missing = min(batch_size, 1 << (len(images) - 1).bit_length()) - len(images)
    return images if missing <= 0 else torch.cat([images, images[:1].expand(missing, *images.shape[1:])])
