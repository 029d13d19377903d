"""Processes that run the scripts without importing torch, diffusers and accelerate anew, which takes seconds each.

A server imports them once and forks for every command. What it forks is a process like any other: its own arguments,
environment, session and output; it ends as an interpreter does, and dies of a signal as any does. Tests of the start
itself, by an interpreter or a launcher, need the real thing.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# One thread each: two processes with two threads on two cores stand in each other's way.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Process:
    """A command that the server runs, with the methods of `subprocess.Popen` that tests use.

    Several `processes` are what torchrun would have started: they find each other, and the failure of one ends all.
    """

    def __init__(
        self,
        command: Sequence[object],
        processes: int = 1,
        cwd: Path = ROOT,
        log: Path | None = None,
        **environment: str,
    ):
        """Start `python *command`; its output goes to the log, or where `communicate` finds it."""
        self.returncode: int | None = None
        self._outputs = [log.open("ab+") if log else tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._running: dict[int, socket.socket] = {}  # and where the end of each is reported
        for meeting in self._meetings(processes):
            variables = {**os.environ, **ENVIRONMENT, **meeting, **environment}
            request = {"command": [str(part) for part in command], "environment": variables, "cwd": str(cwd)}
            report, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            descriptors = [theirs.fileno(), *(output.fileno() for output in self._outputs)]
            with theirs:
                socket.send_fds(server(), [json.dumps(request).encode()], descriptors)
            self._running[int(report.recv(32))] = report
        self.pids = list(self._running)

    def _meetings(self, processes: int) -> Iterator[dict[str, str]]:
        """What torchrun tells each process of where the others are; it keeps the store in which they meet."""
        if processes == 1:
            yield {}
            return
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "GROUP_WORLD_SIZE": "1",
        }
        for rank in map(str, range(processes)):
            yield {**shared, "RANK": rank, "LOCAL_RANK": rank}

    @property
    def pid(self) -> int:
        return self.pids[0]

    def poll(self) -> int | None:
        return self._wait_for(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait_for(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def _wait_for(self, timeout: float | None) -> int | None:
        """Wait for the end of all; return the exit code of the first that failed, or 0."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._running:
            left = None if end is None else max(0.0, end - time.monotonic())
            ended = select.select(self._running.values(), [], [], left)[0]
            if not ended:
                return None
            for pid in [pid for pid, report in self._running.items() if report in ended]:
                with self._running.pop(pid) as report:
                    code = int(report.recv(32))
                if not self.returncode:
                    self.returncode = code
                if code != 0:
                    self.terminate()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what was written to stdout and stderr."""
        self.wait(timeout)
        for output in self._outputs:
            output.seek(0)
        return tuple(output.read().decode(errors="replace") for output in self._outputs)

    def send_signal(self, number: int) -> None:
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, for the data workers as well."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def run(command: Sequence[object], processes: int = 1, succeed: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `python *command` to its end, which must be as expected."""
    process = Process(command, processes)
    outputs = process.communicate(timeout=300)
    assert (process.returncode == 0) is succeed, outputs[1]
    return subprocess.CompletedProcess(command, process.returncode, *outputs)


@cache
def server() -> socket.socket:
    """Start the server of this process, which ends with it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    # Without the last one a look at how many GPUs there are, while importing, would bar what is forked from using them.
    environment = {**os.environ, **ENVIRONMENT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests, which then let go of it
        )
    atexit.register(process.wait, 60)
    atexit.register(ours.close)  # first
    return ours


def serve(control: socket.socket) -> list[str]:
    """Fork for every request; return in what was forked, with the command that is its own."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import diffusers.pipelines.ddpm.pipeline_ddpm  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    while True:
        request, descriptors, *_ = socket.recv_fds(control, 1 << 20, 3)
        if not request:
            sys.exit()
        if os.fork() == 0:
            reports = socket.socket(fileno=descriptors[0])
            if (pid := os.fork()) == 0:
                reports.close()
                control.close()
                return become(json.loads(request), *descriptors[1:])
            control.close()
            reports.send(str(pid).encode())
            reports.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def become(request: dict, stdout: int, stderr: int) -> list[str]:
    """Take on the request's session, folder, environment and output, and chance, which a fork inherits otherwise."""
    import numpy as np

    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, taken in ((1, stdout), (2, stderr)):
        os.dup2(taken, descriptor)
        os.close(taken)
    np.random.seed()
    return request["command"]


if __name__ == "__main__":
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    script = Path(sys.argv[0]).absolute()
    sys.path[:1] = [str(script.parent), str(ROOT)]
    runpy.run_path(str(script), run_name="__main__")
