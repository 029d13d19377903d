"""Being stopped: by signals, by another run, by a full disk, by the loss of a process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import preloaded
import psutil
import pytest
from conftest import ROOT, metrics_of
from test_processes import ACCELERATE, TORCHRUN

from common.interruption import EXIT_INTERRUPTED, EXIT_KILLED_BY_PERSON, SAME_KEY_PRESS_SECONDS
from run_folder.checkpoints import checkpoints, verify

STEPS = 4000  # more than any of these runs gets to make
LONG = [f"--max_train_steps={STEPS}", "--checkpointing_steps=100000", "--save_images_steps=100000"]


PLAIN = [sys.executable]  # as a user starts it


class Run:
    """The training script in a process of its own, with its output in a file to look into while it runs."""

    process: subprocess.Popen | preloaded.Process

    def __init__(
        self,
        flags: list[str],
        output_dir: Path,
        launcher: Sequence[object] = (),
        processes: int = 1,
        **environment: str,
    ):
        self.output_dir = output_dir
        self.log = output_dir.with_name(f"{output_dir.name}.{time.monotonic_ns()}.log")
        command = [*launcher, "train_unconditional.py", *flags, f"--output_dir={output_dir}"]
        if launcher == PLAIN:
            variables = {**os.environ, **preloaded.ENVIRONMENT}
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
        else:
            # In a session of its own: a signal to its group reaches all of it and nothing of the tests.
            self.process = preloaded.Process(command, processes, log=self.log, **environment)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition, patience: float = 120) -> None:
        end = time.monotonic() + patience
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output[-3000:]}"
            assert time.monotonic() < end, f"nothing came:\n{self.output[-3000:]}"
            time.sleep(0.02)

    def wait_for_steps(self, steps: int) -> None:
        metrics = self.output_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= steps)

    def end(self, patience: float = 120) -> int:
        return self.process.wait(patience)


def assert_saved(run: Run) -> int:
    """The newest checkpoint is whole and is of the last line of metrics."""
    newest = checkpoints(run.output_dir)[-1]
    verify(newest)
    step = int(newest.name.removeprefix("checkpoint-"))
    assert metrics_of(run.output_dir)[-1]["step"] == step
    return step


@pytest.mark.parametrize(("number", "launcher"), [(signal.SIGTERM, []), (signal.SIGINT, PLAIN)])
def test_a_signal_saves_and_the_same_command_continues(number, launcher, tiny_flags, tmp_path):
    flags = [*tiny_flags, *LONG]
    run = Run(flags, tmp_path / "run", launcher)
    run.wait_for_steps(3)
    run.process.send_signal(number)
    assert run.end() == EXIT_INTERRUPTED
    step = assert_saved(run)
    assert f"{number.name}: saved at step {step}" in run.output
    assert "Traceback" not in run.output
    again = Run([*flags, f"--max_train_steps={step + 2}"], tmp_path / "run")
    assert again.end() == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == list(range(1, step + 3))


def test_data_workers_do_not_stand_in_the_way(tiny_flags, tmp_path):
    """The signal goes to the whole group, as torchrun and schedulers send it."""
    run = Run([*tiny_flags, *LONG, "--in_memory_limit_gb=0", "--num_workers=2"], tmp_path / "run")
    run.wait_for_steps(3)
    workers = psutil.Process(run.process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.end() == EXIT_INTERRUPTED
    assert_saved(run)
    psutil.wait_procs(workers, timeout=30)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_under_a_launcher_all_processes_stop_at_the_same_step(launcher, tiny_flags, tmp_path):
    run = Run([*tiny_flags, *LONG, "--train_batch_size=8"], tmp_path / "run", launcher)
    run.wait_for_steps(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() != 0  # the launcher's own code for having been signalled
    step = assert_saved(run)
    assert f"SIGTERM: saved at step {step}" in run.output


def test_one_process_of_two_is_signalled(tiny_flags, tmp_path):
    """As when a scheduler signals one machine: the others hear of it."""
    run = Run([*tiny_flags, *LONG, "--train_batch_size=8"], tmp_path / "run", processes=2)
    run.wait_for_steps(3)
    os.kill(run.process.pids[1], signal.SIGTERM)
    run.end()
    step = assert_saved(run)
    assert f"saved at step {step}" in run.output


def test_stopped_while_sampling_the_grid_comes_later(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--max_train_steps=3", "--save_images_steps=2"]
    run = Run([*flags, "--eval_batch_size=64", "--ddpm_num_inference_steps=1000"], tmp_path / "run")
    run.wait_for(lambda: "Sampling" in run.output)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == EXIT_INTERRUPTED
    assert assert_saved(run) == 2
    assert not (tmp_path / "run" / "samples" / "step-2.png").exists()
    assert Run(flags, tmp_path / "run").end() == 0
    assert (tmp_path / "run" / "samples" / "step-2.png").exists()


def test_stopped_while_starting_there_is_nothing_to_save(tiny_flags, tmp_path):
    run = Run([*tiny_flags, *LONG], tmp_path / "run")
    run.wait_for(lambda: "Distributed environment" in run.output)
    run.process.send_signal(signal.SIGTERM)
    code = run.end()
    assert code == EXIT_INTERRUPTED
    assert "Traceback" not in run.output
    assert "SIGTERM" in run.output


def test_a_second_interrupt_stops_at_once(tiny_flags, tmp_path):
    """The first one waits for the grid to be left; the step is made never to end."""
    program = (
        "import sys, time, torch, train_unconditional, schedulers.loss\n"
        "def forever(*args):\n    print('in the step', flush=True)\n    while True:\n        time.sleep(0.05)\n"
        "schedulers.loss.DiffusionLoss.__call__ = forever\n"
        "from common.errors import run_script\nrun_script(train_unconditional.main)\n"
    )
    script = tmp_path / "endless.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}")
    command = [script, *tiny_flags, *LONG, f"--output_dir={tmp_path / 'run'}"]
    process = preloaded.Process(command, log=tmp_path / "log")
    end = time.monotonic() + 120
    while b"in the step" not in (tmp_path / "log").read_bytes():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # the same key press, passed on by a launcher
    time.sleep(SAME_KEY_PRESS_SECONDS + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == EXIT_KILLED_BY_PERSON


def test_two_runs_in_one_folder(tiny_flags, tmp_path):
    first = Run([*tiny_flags, *LONG], tmp_path / "run")
    first.wait_for_steps(1)
    second = Run([*tiny_flags, *LONG], tmp_path / "run")
    assert second.end() == 2
    assert "another run is writing there" in second.output
    first.process.kill()
    first.end()
    third = Run([*tiny_flags, *LONG, "--max_train_steps=2"], tmp_path / "run")  # the lock died with its process
    assert third.end() == 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_lost_process_is_named(tiny_flags, tmp_path):
    """Two processes without a launcher that would end the other one, as on two machines."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    flags = [*tiny_flags, *LONG, "--train_batch_size=8"]
    runs = [
        Run(flags, tmp_path / name, RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **rendezvous)
        for rank, name in enumerate(("run", "other"))
    ]
    runs[0].wait_for_steps(3)
    runs[1].process.kill()
    assert runs[0].end() == 1
    assert "process 1 of 2 no longer answers" in runs[0].output


@pytest.fixture
def small_disk(tmp_path):
    """Six megabytes, which take some checkpoints of the tiny network and not many; logs are beside it."""
    disk = tmp_path / "run"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs the right to do so")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_does_not_lose_the_run(tiny_flags, small_disk):
    """Filled while the run goes on; emptied again; the next save succeeds and the run ends well."""
    flags = [*tiny_flags, *LONG, "--checkpointing_steps=20", "--checkpoints_total_limit=1"]
    run = Run(flags, small_disk)  # its output is beside it, where there is room
    run.wait_for(lambda: "checkpoint-20" in run.output)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError:
            pass
    run.wait_for(lambda: "could not be saved" in run.output)
    assert "No space left on device" in run.output
    good = checkpoints(run.output_dir)
    assert good
    verify(good[-1])
    filler.unlink()
    run.wait_for(lambda: checkpoints(run.output_dir)[-1] != good[-1])
    assert "the next save tries again" in run.output
    run.process.terminate()
    assert run.end() == EXIT_INTERRUPTED
    step = assert_saved(run)
    assert Run([*flags, f"--max_train_steps={step + 2}"], small_disk).end() == 0
    assert metrics_of(run.output_dir)[-1]["step"] == step + 2
