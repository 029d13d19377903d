"""Tasks that the real srun starts, on a cluster of one machine that lives as long as these tests.

apt-get install slurmctld slurmd slurm-client munge     # as root; without them these tests skip
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from conftest import ROOT, losses_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "srun", "sbatch", "scancel")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="a SLURM of its own takes root"),
]
MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
SETTINGS = """
ClusterName=one
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
NodeName=localhost CPUs=2
PartitionName=main Nodes=localhost Default=YES State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start munge and the two daemons of SLURM; yield a way of calling its programs."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as one, socket.socket() as other:
        ports = [free.bind(("localhost", 0)) or free.getsockname()[1] for free in (one, other)]
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, ports=ports))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    own = [f"--{name}={folder}/munge.{ending}" for name, ending in MUNGE.items()]
    daemons = [
        subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        for command in (
            ["munged", "--foreground", "--force", *own],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "localhost"],
        )
        for log in [(folder / f"{command[0]}.log").open("w")]
    ]

    def call(*command: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            list(map(str, command)), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
        )

    wait_until(lambda: "idle" in call("sinfo", "--noheader", "--format=%t").stdout)
    yield call
    for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait()


def wait_until(there: Callable[[], bool]) -> None:
    """Return when something is there; without it the test's own time limit ends this."""
    while not there():
        time.sleep(0.2)


def training(tiny_flags: list[str], output_dir: object, steps: int) -> list[str]:
    length = [f"--max_train_steps={steps}", "--checkpointing_steps=100000", "--save_images_steps=100000"]
    return [sys.executable, "train_unconditional.py", *tiny_flags, *length, f"--output_dir={output_dir}"]


def test_tasks_are_the_processes_of_one_run(cluster, tiny_flags, tmp_path):
    done = cluster("srun", "-n", 2, *training(tiny_flags, tmp_path / "run", 4))
    assert done.returncode == 0, done.stderr
    assert "Num processes: 2" in done.stderr
    assert done.stderr.count("The run is complete: step 4 of 4") == 1
    assert len(losses_of(tmp_path / "run")) == 4


def test_a_cancelled_job_is_saved_and_goes_on(cluster, tiny_flags, tmp_path):
    command = training(tiny_flags, tmp_path / "run", 1_000_000)
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    script.write_text(f"#!/bin/bash\ncd {ROOT}\nsrun -n 2 {' '.join(command)}\n")
    job = cluster("sbatch", "--parsable", "-n", 2, f"--output={log}", script).stdout.strip()
    wait_until((tmp_path / "run" / "metrics.jsonl").exists)
    cluster("scancel", job)
    wait_until(lambda: list((tmp_path / "run").glob("checkpoint-*")) and "SIGTERM: saved at step" in log.read_text())
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(checkpoint.name.partition("-")[2])
    done = cluster("srun", "-n", 2, *training(tiny_flags, tmp_path / "run", step + 2))
    assert done.returncode == 0, done.stderr
    assert f"step {step + 2} of {step + 2}" in done.stderr
