"""Which images make up which step, as a function of the seed and the step alone."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset

from common.errors import UserError
from common.randomness import generator_for
from image_data.store import InMemoryImages, StreamedImages
from image_data.workers import load_in_workers


@functools.lru_cache(maxsize=2)  # consecutive steps share an epoch, or straddle two
def epoch_order(num_images: int, seed: int, epoch: int) -> torch.Tensor:
    """The order in which an epoch goes through the images."""
    return torch.randperm(num_images, generator=generator_for(seed, "order", epoch))


def normalised(images: torch.Tensor) -> torch.Tensor:
    """uint8 as the network sees it, on [-1, 1]."""
    return images.float() / 127.5 - 1


class BalancedOrder:
    """An endless order in which every class comes equally often, whatever its size.

    It consists of rounds: each shows one image of every class, the classes shuffled. The images of a class come in
    epochs of its own, every one once in each.
    """

    def __init__(self, labels: torch.Tensor, seed: int) -> None:
        self._members = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        self._seed = seed
        self._orders: dict[int, tuple[int, torch.Tensor]] = {}  # of each class the epoch it is in

    def between(self, start: int, end: int) -> torch.Tensor:
        """The images at these places of the order."""
        size = len(self._members)
        first = start // size
        rounds = [self._round(number) for number in range(first, -(-end // size))]
        return torch.cat(rounds)[start - first * size : end - first * size]

    def _round(self, number: int) -> torch.Tensor:
        classes = torch.randperm(len(self._members), generator=generator_for(self._seed, "classes", number))
        return torch.stack([self._image(index, number) for index in classes.tolist()])

    def _image(self, index: int, number: int) -> torch.Tensor:
        """The image of a class that comes after `number` others of it."""
        members = self._members[index]
        epoch, position = divmod(number, len(members))
        if self._orders.get(index, (-1,))[0] != epoch:
            generator = generator_for(self._seed, "order", index, epoch)
            self._orders[index] = epoch, torch.randperm(len(members), generator=generator)
        return members[self._orders[index][1][position]]


class TrainingBatches:
    """The batches of a training run, from any step on, as one process of any number of processes sees them.

    A global batch is cut into micro-batches, and these are dealt to the processes in turn. Order, crops and flips are
    drawn for the global batch, so that they do not depend on how many processes share it, on workers, or on whether
    the run was interrupted. With `balanced_labels`, the class of every image, all classes come equally often.
    """

    def __init__(
        self,
        images: InMemoryImages | StreamedImages,
        *,
        total_batch_size: int,
        seed: int,
        random_flip: bool,
        process_index: int,
        num_processes: int,
        gradient_accumulation_steps: int,
        num_workers: int,
        balanced_labels: torch.Tensor | None = None,
    ) -> None:
        micro_batches = num_processes * gradient_accumulation_steps
        if total_batch_size % micro_batches:
            raise UserError(
                f"a total batch of {total_batch_size} images cannot be shared evenly by {num_processes} processes "
                f"with {gradient_accumulation_steps} gradient accumulation steps"
            )
        if total_batch_size > len(images):
            raise UserError(
                f"a batch of {total_batch_size} images is more than the {len(images)} images there are; "
                "lower --total_batch_size or --train_batch_size"
            )
        self.images, self.total_batch_size, self.seed, self.random_flip = images, total_batch_size, seed, random_flip
        self.steps_per_epoch = len(images) // total_batch_size  # the last, partial batch is dropped
        self._balanced = None if balanced_labels is None else BalancedOrder(balanced_labels, seed)
        # Positions in the global batch of this process's images, [accumulation, per device].
        positions = torch.arange(total_batch_size).view(gradient_accumulation_steps, num_processes, -1)
        self.positions = positions[:, process_index]
        # Images in memory are there at once; only those still to be decoded are worth a process.
        self._num_workers = num_workers if isinstance(images, StreamedImages) else 0

    def indices(self, step: int) -> torch.Tensor:
        """The images of a step's global batch."""
        if self._balanced is not None:
            return self._balanced.between(step * self.total_batch_size, (step + 1) * self.total_batch_size)
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.total_batch_size
        return epoch_order(len(self.images), self.seed, epoch)[start : start + self.total_batch_size]

    def from_step(self, first_step: int) -> Iterator[torch.Tensor]:
        """This process's images of each step without end, uint8 [accumulation, per device, channels, height, width].

        Closing the iterator ends the worker processes.
        """
        for images in load_in_workers(_Steps(self), itertools.count(first_step), self._num_workers):
            if isinstance(images, UserError):
                raise images
            yield torch.from_numpy(images)

    def at_step(self, step: int) -> torch.Tensor:
        """This process's images of one step."""
        mine = self.positions.flatten()
        corners = torch.rand(self.total_batch_size, 2, generator=generator_for(self.seed, "crop", step))[mine]
        images = self.images.crops(self.indices(step)[mine], corners)
        if self.random_flip:
            flips = torch.rand(self.total_batch_size, generator=generator_for(self.seed, "flip", step))[mine] < 0.5
            images[flips] = images[flips].flip(-1)
        return images.unflatten(0, self.positions.shape)


class _Steps(Dataset):
    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches

    def __getitem__(self, step: int) -> np.ndarray | UserError:
        try:
            return self.batches.at_step(step).numpy()
        except UserError as error:
            return error  # raised in a worker, it would arrive wrapped in a traceback
