"""Worker processes: torch's DataLoader, made fit for what happens to a training job."""

import contextlib
import logging
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from common import interruption
from common.errors import RunFailed, UserError
from common.progress import progress_bar

logger = logging.getLogger(__name__)

FILES_PER_CHUNK = 16


def load_in_workers(dataset: Dataset, items: Iterable, num_workers: int) -> Iterator[Any]:
    """Yield `dataset[item]` for each of `items`, in their order, computed ahead by worker processes.

    With zero workers it is computed here. Closing the iterator ends the workers.
    """
    try:
        results = iter(_loader(dataset, items, num_workers))
    except OSError as error:
        if num_workers == 0:
            raise
        logger.warning(f"{num_workers} data workers could not be started ({error}); decoding in the main process")
        results = iter(_loader(dataset, items, 0))
    yield from results


def load_in_chunks(
    dataset: Dataset, items: Sequence, size: int, num_workers: int, description: str
) -> Iterator[list | UserError]:
    """Yield `dataset[chunk]`, a list for a list, for chunks of `size` items; with a bar that counts the items."""
    chunks = [items[start : start + size] for start in range(0, len(items), size)]
    with (
        contextlib.closing(load_in_workers(dataset, chunks, num_workers)) as results,
        progress_bar(total=len(items), desc=description, unit="images") as bar,
    ):
        for chunk, result in zip(chunks, results, strict=True):
            yield result
            bar.update(len(chunk))


def process_files(dataset: Dataset, files: Sequence, num_workers: int, description: str, advice: str) -> list:
    """Return what `dataset[files]` makes of all files, a few at a time; can be stopped, and then gives this advice."""
    done = []
    with contextlib.closing(load_in_chunks(dataset, files, FILES_PER_CHUNK, num_workers, description)) as results:
        try:
            for result in results:
                if isinstance(result, UserError):
                    raise result
                done += result
                interruption.stop_if_requested(f"stopped at {len(done)} of {len(files)} images; {advice}")
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise RunFailed(
                f"a worker process was ended from outside at about {len(done)} of {len(files)} images, probably for "
                f"lack of memory; {advice}, with --num_workers 1 if need be"
            ) from error
    return done


def _loader(dataset: Dataset, items: Iterable, num_workers: int) -> DataLoader:
    return DataLoader(
        dataset,
        sampler=items,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_ignore_signals,
        # Its own generator, or else starting the workers would draw from the global one, which may feed the dropout.
        generator=torch.Generator(),
    )


def _unchanged(result: Any) -> Any:
    # Arrays stay arrays, which come back through a pipe. Tensors would come back through /dev/shm, which is 64 MB in
    # a container, and to overrun it kills the run.
    return result


def _ignore_signals(worker_id: int) -> None:
    # torchrun and Ctrl-C signal the whole process group. The main process decides when to stop, and it has a
    # checkpoint to write first, during which its workers must not die.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
