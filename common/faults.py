"""Faults on purpose, for the tests of what survives them.

`EXACT_DDPM_FAULT=point` kills the process, as `kill -9` would, when it comes to that point for the first time;
`point@3` at the third time. Without the variable nothing happens. The points are listed in docs/reliability.md.
"""

import os
import signal
import threading

_visits = 0
_lock = threading.Lock()  # some points are in threads


def point(name: str) -> None:
    """A place where a process may be killed."""
    global _visits
    wanted, _, visit = os.environ.get("EXACT_DDPM_FAULT", "").partition("@")
    if wanted == name:
        with _lock:
            _visits += 1
            if _visits == int(visit or 1):
                os.kill(os.getpid(), signal.SIGKILL)
