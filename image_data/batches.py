"""Batches of a training run: which images make up which step, as a function of the seed and the step alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import UserError
from common.processes import Processes
from common.randomness import generator_for
from image_data.store import StreamedImages, TrainingImages
from image_data.workers import map_in_workers

if TYPE_CHECKING:
    from conditions.condition import Condition


@functools.lru_cache(maxsize=2)  # consecutive steps share an epoch, or straddle two
def epoch_order(num_images: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which an epoch goes through the images."""
    return torch.randperm(num_images, generator=generator_for(seed, "order", epoch))


class BalancedOrder:
    """An endless order in which every class comes equally often, whatever its size.

    Each of its rounds shows one image of every class, the classes shuffled; every class has epochs of its own.
    """

    def __init__(self, labels: torch.Tensor, seed: int) -> None:
        self._members = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        self._seed = seed
        self._orders: dict[int, tuple[int, torch.Tensor]] = {}  # of each class the epoch it is in

    def between(self, start: int, end: int) -> torch.Tensor:
        """Return the images at these places of the order."""
        size = len(self._members)
        first = start // size
        rounds = [self._round(number) for number in range(first, -(-end // size))]
        return torch.cat(rounds)[start - first * size : end - first * size]

    def _round(self, number: int) -> torch.Tensor:
        classes = torch.randperm(len(self._members), generator=generator_for(self._seed, "classes", number))
        return torch.stack([self._image(index, number) for index in classes.tolist()])

    def _image(self, index: int, number: int) -> torch.Tensor:
        """Return the image of a class that comes after `number` others of it."""
        members = self._members[index]
        epoch, position = divmod(number, len(members))
        if self._orders.get(index, (-1,))[0] != epoch:
            generator = generator_for(self._seed, "order", index, epoch)
            self._orders[index] = epoch, torch.randperm(len(members), generator=generator)
        return members[self._orders[index][1][position]]


@dataclass(frozen=True)
class Batch:
    """This process's share of a step's global batch: x_0, and what belongs to it."""

    step: int
    images: torch.Tensor  # uint8 [n, channels, height, width]
    indices: torch.Tensor  # [n] in the data set
    positions: torch.Tensor  # [n] in the global batch
    condition: torch.Tensor  # [n] rows of the table of conditions
    passes: int = 1  # forward passes that the step takes

    def __getitem__(self, chosen: torch.Tensor | slice) -> Batch:
        """Return these images of the batch, as a batch of one pass."""
        parts = (part[chosen] for part in (self.images, self.indices, self.positions, self.condition))
        return Batch(self.step, *parts)

    def in_passes(self, *others: torch.Tensor) -> Iterator[tuple]:
        """Split the batch, and tensors that go with it, into its forward passes."""
        size = len(self.images) // self.passes
        for start in range(0, len(self.images), size):
            chosen = slice(start, start + size)
            yield self[chosen], *(other[chosen] for other in others)


class TrainingBatches:
    """The batches of a training run, from any step on, as one process of any number of processes sees them.

    A global batch is cut into forward passes, dealt to the processes in turn. Order, crops, flips and conditions are
    drawn for the global batch: they depend on neither the number of processes, nor workers, nor interruptions.
    """

    def __init__(
        self,
        data: TrainingImages,
        condition: Condition,
        seed: int,
        total_batch_size: int,
        passes: int,
        processes: Processes,
    ) -> None:
        self.images, self.condition, self.seed = data.images, condition, seed
        self.total_batch_size, self.passes, self.random_flip = total_batch_size, passes, data.random_flip
        if total_batch_size % (processes.count * passes):
            raise UserError(
                f"a total batch of {total_batch_size} images cannot be shared evenly by {processes.count} processes "
                f"with {passes} gradient accumulation steps"
            )
        if total_batch_size > len(self.images):
            raise UserError(
                f"a batch of {total_batch_size} images is more than the {len(self.images)} images there are; "
                "lower --total_batch_size or --train_batch_size"
            )
        self.steps_per_epoch = len(self.images) // total_batch_size  # the last, partial batch is dropped
        labels = condition.balanced_labels
        self._balanced = None if labels is None else BalancedOrder(labels, self.seed)
        self.positions = torch.arange(total_batch_size).view(passes, processes.count, -1)[:, processes.index].flatten()
        # Images in memory are there at once; only those still to be decoded are worth a process.
        self._num_workers = data.num_workers if isinstance(self.images, StreamedImages) else 0

    def __getstate__(self) -> dict[str, object]:
        """Leave out the condition, which workers do not need: it may hold a text encoder."""
        return {**self.__dict__, "condition": None}

    def indices(self, step: int) -> torch.Tensor:
        """Return the images of a step's global batch."""
        if self._balanced is not None:
            return self._balanced.between(step * self.total_batch_size, (step + 1) * self.total_batch_size)
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.total_batch_size
        return epoch_order(len(self.images), self.seed, epoch)[start : start + self.total_batch_size]

    def from_step(self, first_step: int) -> Iterator[Batch]:
        """Yield this process's share of each step without end. Closing the iterator ends the worker processes."""
        loading = map_in_workers(self._load, itertools.count(first_step), self._num_workers)
        for step, loaded in enumerate(loading, start=first_step):
            images, indices = map(torch.from_numpy, loaded)
            mine = self.positions
            rows = self.condition.draw(indices, step)[mine]
            yield Batch(step, images, indices[mine], mine, rows, self.passes)

    def _load(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        indices = self.indices(step)
        return self.crops(step, indices).numpy(), indices.numpy()

    def crops(self, step: int, indices: torch.Tensor) -> torch.Tensor:
        """Crop and flip this process's images of a step, of whose global batch these are the indices."""
        mine = self.positions
        corners = torch.rand(self.total_batch_size, 2, generator=generator_for(self.seed, "crop", step))[mine]
        images = self.images.crops(indices[mine], corners)
        if self.random_flip:
            flips = torch.rand(self.total_batch_size, generator=generator_for(self.seed, "flip", step))[mine] < 0.5
            pixels, mirrored = images.numpy(), flips.numpy()  # whose indexing is several times as fast as torch's
            pixels[mirrored] = pixels[mirrored, ..., ::-1]
        return images
