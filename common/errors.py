"""Mistakes of the user: one line on the terminal and an exit code, never a traceback."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.interruption import EXIT_INTERRUPTED, Interrupted, catch_signals, release_signals

# Seconds by which a process may meet a mistake before the one that says it; starting up takes long on a busy machine.
LONGEST_HEAD_START = 10


class UserError(Exception):
    """Something the user can put right: what is wrong, with the name and the value, and what to do."""

    exit_code = 2


class RunFailed(UserError):
    """A run that started well and cannot go on: what happened, and what is left of it."""

    exit_code = 1


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
    """Run a script's `main`; a `UserError` becomes one line and an exit code."""
    catch_signals()
    is_local_main = os.environ.get("LOCAL_RANK", "0") == "0"  # one process of each machine is
    try:
        main()
    except UserError as error:
        if not is_local_main:
            # Most mistakes are every process's, and the launcher ends the others when the first has said it. One
            # that only this process has met must be said too.
            release_signals()
            time.sleep(LONGEST_HEAD_START)
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except Interrupted as stop:
        if is_local_main:
            say(str(stop))
        sys.exit(EXIT_INTERRUPTED)


def say(message: str) -> None:
    """Print a line on the terminal under the name of the script."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def first_cause(error: BaseException) -> BaseException:
    """Return the error that began it."""
    return error if error.__cause__ is None else first_cause(error.__cause__)


def reason_of(error: BaseException) -> str:
    """Return what the system or a library has to say, in a line, for the end of one of our own."""
    return getattr(error, "strerror", None) or next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason_of_hub(error: BaseException) -> str:
    """Return why something could not be had from the Hub; that it was not asked, or not reached, says no library."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "the Hub was not asked, as HF_HUB_OFFLINE is set, and no copy of it is on this machine"
    cause = first_cause(error)
    if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror) or "Connect" in type(cause).__name__:
        return f"the Hub cannot be reached from here, and no copy of it is on this machine: {reason_of(cause)}"
    return f"{type(cause).__name__}: {reason_of(cause)}"
