"""Processes that run the scripts without importing torch, diffusers and accelerate anew, which takes seconds each.

A server imports them once and forks for every command. What it forks is a process like any other: its own arguments,
environment and output, and it ends as an interpreter does. Launchers still start theirs from nothing.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# One thread each: two processes with two threads on two cores stand in each other's way.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Process:
    """A command that the server runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        command: Sequence[object],
        environment: dict[str, str] | None = None,
        cwd: Path = ROOT,
        log: Path | None = None,
    ):
        """Start `python *command` in a session of its own; its output goes to the log, or where `communicate` finds it."""
        self.returncode: int | None = None
        self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()] if log is None else [log.open("ab+")]
        variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
        request = {"command": [str(part) for part in command], "environment": variables, "cwd": str(cwd)}
        self._reports, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        descriptors = [theirs.fileno(), self._outputs[0].fileno(), self._outputs[-1].fileno()]
        with theirs:
            socket.send_fds(server(), [json.dumps(request).encode()], descriptors)
        self.pid = int(self._reports.recv(32))

    def poll(self) -> int | None:
        return self._wait_for(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait_for(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def _wait_for(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._reports.settimeout(timeout)
            try:
                self.returncode = int(self._reports.recv(32))
            except (TimeoutError, BlockingIOError):
                return None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what was written to stdout and stderr."""
        self.wait(timeout)
        for output in self._outputs:
            output.seek(0)
        return tuple(output.read().decode(errors="replace") for output in self._outputs)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(command: Sequence[object], timeout: float = 300, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run `python *command` to its end."""
    process = Process(command, **settings)
    outputs = process.communicate(timeout)
    return subprocess.CompletedProcess(command, process.returncode, *outputs)


@cache
def server() -> socket.socket:
    """Start the server of this process, which ends with it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, pass_fds=[theirs.fileno()])
    return ours


def serve(control: socket.socket) -> list[str]:
    """Fork for every request; return in what was forked, with the command that is its own."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import diffusers.models.unets.unet_2d  # noqa: F401
    import torch._dynamo  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for the processes
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 1 << 20, 3)
        if not request:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            reports = socket.socket(fileno=descriptors[0])
            if (pid := os.fork()) == 0:
                reports.close()
                control.close()
                return become(json.loads(request), *descriptors[1:])
            reports.send(str(pid).encode())
            reports.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(request: dict, stdout: int, stderr: int) -> list[str]:
    """Take on the request's session, folder, environment and output."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    return request["command"]


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
