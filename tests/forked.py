"""A script in a fork of this process, which has imported everything: a command takes milliseconds, not seconds.

What is forked has its own folder, environment and output. It ends without taking the interpreter apart, which would
take longer than most commands; threads, exit functions and buffers are seen to, as an interpreter would.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import logging
import multiprocessing.util
import os
import pkgutil
import runpy
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
ROOMS = "common image_data schedulers conditions run_folder training generation evaluation preparation visualization"
LATE_IMPORTS = """
    datasets.packaged_modules.imagefolder.imagefolder datasets.packaged_modules.parquet.parquet diffusers
    matplotlib.pyplot pandas sklearn.datasets torch._dynamo torch.utils.tensorboard torchvision.models
    transformers.models.bert transformers.models.dinov2
"""


@dataclass(frozen=True)
class Ended:
    """What a command left behind on its outputs; the code is negative for a signal, None for a command that hangs."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def import_everything() -> None:
    """Import what the scripts do, and put it where forks do not copy it."""
    for room in ROOMS.split():
        for module in pkgutil.iter_modules([str(ROOT / room)]):
            importlib.import_module(f"{room}.{module.name}")
    for name in LATE_IMPORTS.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries count what is left


def run(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str] | None = None,
    stdout: str = "",
    timeout: float = 60,
) -> Ended:
    """Run `script.py arguments...` in the folder; stdout may be `closed`, a `pipe` that nobody reads, or `full`."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            _become(command, folder, environment or {}, (output, errors, stdout))
        descriptor = os.pidfd_open(pid)
        hangs = not select.select([descriptor], [], [], timeout)[0]
        os.close(descriptor)
        if hangs:
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ProcessLookupError):  # workers of a process that was killed
            os.killpg(pid, signal.SIGKILL)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(None if hangs else code, *texts, time.monotonic() - begin)


def _become(command: Sequence[str], folder: Path, environment: dict[str, str], outputs: tuple[IO, IO, str]) -> None:
    """Be the process of this command until it ends."""
    code = 1
    try:
        atexit._clear()  # what this process has to clean up is not for others to remove
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)
        os.setsid()
        os.chdir(folder)
        os.environ.update(environment)
        output, errors, kind = outputs
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(errors.fileno(), 2)
        os.dup2(_descriptor(kind, output), 1)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True, errors="backslashreplace")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")))
        if kind == "closed":  # as an interpreter begins that finds it closed
            os.close(1)
            sys.stdout = None
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        sys.argv = list(command)
        code = _run_script(ROOT / command[0])
    finally:
        os._exit(code)


def _descriptor(kind: str, output: IO) -> int:
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return output.fileno()


def _run_script(script: Path) -> int:
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        code = 120  # an interpreter's
    return code
