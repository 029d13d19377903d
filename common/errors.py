"""How a script starts and ends: whatever goes wrong is one line on the terminal and an exit code, not a traceback."""

import atexit
import errno
import gc
import importlib.util
import io
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType

from common.interruption import EXIT_INTERRUPTED, Interrupted, catch_signals, release_signals

# Seconds that a process may be ahead of the one that reports a mistake; a busy machine is slow to start processes.
LONGEST_HEAD_START = 10

ROOT = Path(__file__).resolve().parent.parent
TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")  # of the Hub
# Packages that import all their modules, and with those scipy, torchvision and much of transformers.
TOO_LARGE = ("diffusers.models.transformers", "diffusers.models.unets")


class UserError(Exception):
    """Something the user can put right: what is wrong, with the name and the value, and what to do."""

    exit_code = 2


class RunFailed(UserError):
    """A run that started well and cannot go on: what happened, and what is left of it."""

    exit_code = 1


def end_for_missing_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a script that cannot even be imported, which is what happens outside the project's environment."""
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    say(f"error: {missing_package(error)}")
    sys.exit(UserError.exit_code)


# Every script imports this module first.
sys.excepthook = end_for_missing_package


def missing_package(error: ModuleNotFoundError) -> UserError:
    """Say which Python has no package of this name; usually it is not that of the project's environment."""
    return UserError(
        f"{sys.executable} has no package {error.name}: activate the project's environment (source .venv/bin/activate),"
        f" or install it with pip install -r requirements.lock"
    )


@contextmanager
def user_errors(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds into a `UserError` of this message, followed by the reason in parentheses."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{message} ({reason_of(error)})") from error


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; what goes wrong becomes one line and an exit code, and a traceback if that is asked for.

    EXACT_DDPM_DEBUG=1 in the environment asks for it.
    """
    open_streams()
    catch_signals()
    threading.excepthook = lambda failure: say(f"a thread has ended: {describe(failure.exc_value)}")
    is_local_main = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"  # one on each machine
    try:
        main()
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # whoever met it first
            error = UserError(f"{error.filename}: this name is too long for a file or folder")
        if isinstance(error, ModuleNotFoundError):
            error = missing_package(error)
        if isinstance(error, PermissionError) and error.filename:
            error = UserError(f"{error.filename}: no permission to use this file or folder")
        if os.environ.get("EXACT_DDPM_DEBUG") == "1":
            print(TOKEN.sub("hf_***", traceback.format_exc()), file=sys.stderr)
        if not is_local_main:
            # Most mistakes are every process's, and the launcher ends the others when the first has said it. One
            # that only this process has met must be said too.
            release_signals()
            time.sleep(LONGEST_HEAD_START)
        say(f"error: {describe(error)}")
        sys.exit(getattr(error, "exit_code", RunFailed.exit_code))
    except Interrupted as stop:
        if is_local_main:
            say(str(stop))
        sys.exit(EXIT_INTERRUPTED)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import slow packages with the garbage collector off, and only the parts of diffusers that are used.

    What has been imported then is left out of later collections.
    """
    gc.disable()
    try:
        for name in TOO_LARGE:
            if name not in sys.modules and (spec := importlib.util.find_spec(name)):
                sys.modules[name] = importlib.util.module_from_spec(spec)
                sys.modules[name].__class__ = PackageInParts
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries count what is left in the end
        gc.enable()


class PackageInParts(ModuleType):
    """A package of which single modules can be imported; it imports all of them when asked for anything else."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def say(message: str) -> None:
    """Print a line on the terminal under the name of the script."""
    message = TOKEN.sub("hf_***", " ".join(message.split()))
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)


def describe(error: BaseException | None) -> str:
    """Say what went wrong; for an unexpected error also its type, and where in this project it occurred."""
    if error is None or isinstance(error, UserError):
        return str(error)
    files = [frame for frame in traceback.extract_tb(error.__traceback__) if ROOT in Path(frame.filename).parents]
    ours = [frame for frame in files if ".venv" not in frame.filename]
    place = f" in {Path(ours[-1].filename).relative_to(ROOT)}, line {ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{place}: {reason_of(error)} (EXACT_DDPM_DEBUG=1 shows the traceback)"


def first_cause(error: BaseException) -> BaseException:
    """Return the error at the start of the chain of causes."""
    return error if error.__cause__ is None else first_cause(error.__cause__)


def reason_of(error: BaseException) -> str:
    """Return the system's or a library's message as one line, to be quoted at the end of another."""
    return getattr(error, "strerror", None) or next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason_of_hub(error: BaseException) -> str:
    """Return why something could not be had from the Hub; libraries do not say that it was not asked or not reached."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, and there is no copy of it on this machine"
    cause = first_cause(error)
    if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror) or "Connect" in type(cause).__name__:
        return f"the Hub cannot be reached, and there is no copy of it on this machine: {reason_of(cause)}"
    return f"{type(cause).__name__}: {reason_of(cause)}"


class Stream(io.FileIO):
    """Standard output or error that survives the loss of its target: a closed pipe, a full disk, a vanished terminal.

    After a pipe is closed, output is discarded. Standard output that a full disk refuses goes to standard error.
    """

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 1 and error.errno != errno.EPIPE and not _same_file(1, 2):
                os.dup2(2, 1)
                say(f"standard output cannot be written ({error.strerror}); the rest of it follows here")
            elif error.errno in (errno.ENOSPC, errno.EDQUOT):
                return len(data)  # is lost; there may be room for what comes later
            else:
                _lead_nowhere(self.fileno())
            return self.write(data)


def open_streams() -> None:
    """Make standard output and error streams whose writes never fail, and open them if they are closed."""
    if sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__:
        return  # somebody listens, as tests do
    for number in (0, 2, 1):
        try:
            os.fstat(number)
        except OSError:  # otherwise the next file opened would get this number, and all that is printed
            if number == 1:
                os.dup2(2, 1)
            else:
                _lead_nowhere(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        encoding = before.encoding if before else "utf-8"
        by_line = before is None or before.line_buffering or before.write_through
        buffer = io.BufferedWriter(Stream(number, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=by_line))


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def _same_file(first: int, second: int) -> bool:
    return os.path.sameopenfile(first, second)
