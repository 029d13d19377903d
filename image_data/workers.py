"""Worker processes: torch's DataLoader, made fit for what happens to a training job."""

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from common.errors import RunFailed, UserError
from common.interruption import STOPS, stop_if_requested
from common.progress import progress_bar

logger = logging.getLogger(__name__)

FILES_PER_CHUNK = 16
SECONDS_BETWEEN_LOOKS = 1.0


def map_in_workers(function: Callable[[Any], Any], items: Iterable, num_workers: int) -> Iterator[Any]:
    """Yield `function(item)` for each of `items`, in their order, computed ahead by worker processes.

    With zero workers it is computed here. Closing the iterator ends the workers. The function must be picklable.
    """
    try:
        results = iter(_loader(function, items, num_workers))
    except OSError as error:
        if num_workers == 0:
            raise
        logger.warning(f"{num_workers} data workers could not be started ({error}); decoding in the main process")
        results = iter(_loader(function, items, 0))
    try:
        for result in results:
            if isinstance(result, UserError):
                raise result
            yield result
    finally:
        del results  # which ends the workers; a traceback would keep it, and them


def map_in_chunks(
    function: Callable[[Any], Any], items: Sequence, size: int, num_workers: int, description: str
) -> Iterator[list]:
    """Yield `function(item)` for all items, a list for every `size` of them, under a progress bar."""
    chunks = [items[start : start + size] for start in range(0, len(items), size)]
    with (
        contextlib.closing(map_in_workers(functools.partial(_call_for_each, function), chunks, num_workers)) as results,
        progress_bar(total=len(items), desc=description, unit="images") as bar,
    ):
        for result in results:
            yield result
            bar.update(len(result))


def process_files(
    function: Callable[[Any], Any], files: Sequence, num_workers: int, description: str, advice: str
) -> list:
    """Return `function(file)` for all files; when stopped on the way, say how far it came and give this advice."""
    done = []
    with contextlib.closing(map_in_chunks(function, files, FILES_PER_CHUNK, num_workers, description)) as results:
        try:
            for result in results:
                done += result
                stop_if_requested(f"stopped at {len(done)} of {len(files)} images; {advice}")
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise RunFailed(
                f"a worker process was ended from outside at about {len(done)} of {len(files)} images, probably for "
                f"lack of memory; {advice}, with --num_workers 1 if need be"
            ) from error
    return done


def call_in_child(function: Callable[[], Any]) -> Any:
    """Return `function()`, computed in a process that then ends, and takes along what memory that has needed.

    It is computed here if there can be no such process, or if that is ended from outside.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=_send_result, args=(function, writer), daemon=True)
    with reader, writer:
        try:
            child.start()
        except OSError:
            return function()
        writer.close()
        try:
            result = reader.recv()
        except EOFError:
            return function()
        finally:
            child.kill()
            child.join()
    if isinstance(result, UserError):
        raise result
    return result


def _send_result(function: Callable[[], Any], writer: Connection) -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    _end_with_parent()
    gc.freeze()  # to look for garbage among the main process's objects would copy them all
    try:
        writer.send(function())
    except UserError as error:
        writer.send(error)


class _Calls(Dataset):
    """The results of a function. A `UserError` is one: raised in a worker, it would arrive wrapped in a traceback."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.function(item)
        except UserError as error:
            return error


def _call_for_each(function: Callable[[Any], Any], items: Sequence) -> list:
    return [function(item) for item in items]


def _loader(function: Callable[[Any], Any], items: Iterable, num_workers: int) -> DataLoader:
    return DataLoader(
        _Calls(function),
        sampler=items,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_start_worker,
        # Its own generator, or else starting the workers would draw from the global one, which may feed the dropout.
        generator=torch.Generator(),
    )


def _unchanged(result: Any) -> Any:
    # Arrays stay arrays, which come back through a pipe. Tensors would come back through /dev/shm, which is 64 MB in
    # a container, and to overrun it kills the run.
    return result


def _start_worker(worker_id: int) -> None:
    gc.enable()  # which a training has switched off for itself
    # torchrun, Ctrl-C and a terminal that is closed signal the whole process group. The main process decides when to
    # stop, and it has a checkpoint to write first, during which its workers must not die.
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    # torch's own watch over the main process fails where a worker waits for somebody to read its results: the other
    # workers, which were forked from the same process, hold that pipe open for ever.
    _end_with_parent()


def _end_with_parent() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this worker when its main process is gone, even if that was killed and could tell nobody."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
