"""Stops that a person (SIGINT), a scheduler (SIGTERM) or the loss of a terminal (SIGHUP) asks for.

Before there is anything to save, the process ends at once. Inside `stops_deferred()` the first signal only leaves a
note, which the program looks at where it can stop cleanly; a second SIGINT ends the process at once.
"""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: start the same command again
EXIT_KILLED_BY_PERSON = 130
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# A launcher in the foreground gets a terminal's SIGINT and passes it on, so that one key press arrives twice.
SAME_KEY_PRESS_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent has died
SECONDS_BETWEEN_LOOKS = 0.2  # at a process that another one waits for

_deferred = False
_requested: str | None = None
_requested_at = 0.0
_visits = itertools.count(1)  # of the fault point; safe from threads


class Interrupted(BaseException):
    """The end that a signal asked for, and what became of the work. Not an Exception: no library may swallow it."""

    def __init__(self, signal_name: str, outcome: str):
        super().__init__(signal_name, outcome)
        self.signal_name, self.outcome = signal_name, outcome

    def __str__(self) -> str:
        return f"{self.signal_name}: {self.outcome}"


def catch_signals() -> None:
    """Take over the signals; a SIGHUP that is ignored, as under nohup, stays so."""
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def release_signals() -> None:
    """Give the signals back: they end the process as they do any other."""
    for number in STOPS:
        if signal.getsignal(number) == _handle:
            signal.signal(number, signal.SIG_DFL)


def stop_requested() -> str | None:
    """Return the name of the signal that asks for a stop, if one has come."""
    return _requested


def stop_if_requested(state: str) -> None:
    """Stop here if a signal asks for it; `state` says what is left and what to do."""
    if _requested is not None:
        raise Interrupted(_requested, state)


@contextmanager
def stops_deferred() -> Iterator[None]:
    """Let a signal in here be no more than a note for `stop_requested`."""
    global _deferred, _requested
    _deferred, _requested = True, None
    try:
        yield
    finally:
        _deferred = False


def run_child(command: Sequence[str], environment: Mapping[str, str], patience: float | None = None) -> int:
    """Run a command to its end in `stops_deferred`, and return its exit code.

    It is in a group of its own, where no key press reaches it: a stop is passed on, and after so many seconds of
    `patience` it is killed. If this process dies, however, the kernel stops the other too.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it; looked up before the fork
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        preexec_fn=prctl and (lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)),
    )
    while process.poll() is None:
        try:
            process.wait(SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            if stop_requested():
                process.terminate()
                try:
                    process.wait(patience)
                except subprocess.TimeoutExpired:
                    process.kill()
    return process.wait()


def _handle(number: int, frame: FrameType | None) -> None:
    global _requested, _requested_at
    name = signal.Signals(number).name
    if sys.is_finalizing():
        return
    if not _deferred:
        raise Interrupted(name, "stopped; start the same command again to continue")
    if _requested is None:
        _requested, _requested_at = name, time.monotonic()
    elif number == signal.SIGINT and time.monotonic() - _requested_at > SAME_KEY_PRESS_SECONDS:
        os._exit(EXIT_KILLED_BY_PERSON)


def fault_point(name: str) -> None:
    """Kill the process here as `kill -9` would, if a test of what survives that asks for it.

    `EXACT_DDPM_FAULT=point` does so at the first visit, `point@3` at the third. docs/reliability.md lists the points.
    """
    wanted, _, visit = os.environ.get("EXACT_DDPM_FAULT", "").partition("@")
    if name == wanted and next(_visits) == int(visit or 1):
        os.kill(os.getpid(), signal.SIGKILL)
