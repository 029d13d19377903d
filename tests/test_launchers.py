"""What launchers say of the processes, in environment variables: srun's tasks, and accelerate's configuration."""

import json
import os
import signal
from types import SimpleNamespace

import preloaded
import pytest
import torch
import torch.distributed as dist
from conftest import losses_of, metrics_of, run_training
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import processes
from common.errors import UserError
from common.processes import adopt_slurm_tasks, check_accelerate

STEP = {  # the third of five tasks, on the second of three nodes, in step 2 of a job
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def test_tasks_of_srun_are_processes():
    environment = dict(STEP)
    adopt_slurm_tasks(environment)
    found = {name: value for name, value in environment.items() if not name.startswith("SLURM")}
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "2", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
    }  # fmt: skip
    another_step = STEP | {"SLURM_STEP_ID": "3"}
    adopt_slurm_tasks(another_step)
    assert 1024 < int(port) < 32768
    assert another_step["MASTER_PORT"] != port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,a2", "a1"),
        ("gpu[12,14-16],big1", "gpu12"),
        ("rack[0-1]node[003-010]", "rack0node003"),
        ("gpu-a[1-2].cluster.org", "gpu-a1.cluster.org"),
    ],
)
def test_the_first_of_the_nodes(nodes, first):
    environment = STEP | {"SLURM_STEP_NODELIST": nodes}
    adopt_slurm_tasks(environment)
    assert environment["MASTER_ADDR"] == first


def test_on_one_node_the_host_name_does_not_matter():
    environment = STEP | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu07"}
    adopt_slurm_tasks(environment)
    assert (environment["MASTER_ADDR"], environment["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "5")


def test_tasks_with_cores_of_their_own_do_not_share_them(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    for of_node, sharing in (("16", "1"), ("8", "2")):
        environment = STEP | {"SLURM_CPUS_ON_NODE": of_node}
        adopt_slurm_tasks(environment)
        assert environment["LOCAL_WORLD_SIZE"] == sharing


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # A batch script: SLURM_NTASKS is what it asked for, not what is running.
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell
        STEP | {"RANK": "5", "WORLD_SIZE": "8"},  # torchrun in a task
    ],
)
def test_what_is_no_task_of_several(environment):
    before = dict(environment)
    adopt_slurm_tasks(environment)
    assert environment == before


def test_what_the_user_has_set_stays():
    environment = STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "5"}
    adopt_slurm_tasks(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_two_tasks_make_one_run_and_stop_together(tiny_flags, network_without_dropout, tmp_path):
    """A signal to one of them is noticed by both a step later."""
    run = tmp_path / "run"
    shape = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    flags = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}", "--total_batch_size=16"]
    flags += ["--train_batch_size=8", "--max_train_steps=100000", "--save_images_steps=100000"]
    command = ["train_unconditional.py", *flags, f"--output_dir={run}"]
    common = {**STEP, **shape, "SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid())}
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    tasks = [
        preloaded.Process(command, log=log, **common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank, log in enumerate(logs)
    ]
    try:
        while not (run / "metrics.jsonl").exists() or len(metrics_of(run)) < 3:
            assert tasks[0].poll() is None, logs[0].read_text()
        os.kill(tasks[1].pid, signal.SIGTERM)
        assert [task.wait(60) for task in tasks] == [75, 75], logs[0].read_text()
    finally:
        for task in tasks:
            task.kill()
    assert "saved at step" in logs[0].read_text()
    saved = [json.loads((path / "state.json").read_text())["step"] for path in run.glob("checkpoint-*")]
    assert saved == [len(metrics_of(run))]
    alone = run_training(tmp_path / "alone", [*flags, "--train_batch_size=16", "--max_train_steps=3"])
    assert losses_of(run)[:3] == pytest.approx(losses_of(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "asks for FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "asks for DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "1"}, "asks for Megatron-LM"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, r"torch dynamo \(inductor\): add --compile"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "--gradient_accumulation_steps 4"),
    ],
)
def test_what_accelerate_would_change_unseen(environment, message):
    with pytest.raises(UserError, match=message):
        check_accelerate(environment)


def test_what_accelerate_sets_without_being_asked():
    check_accelerate(
        {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default"}
    )


def test_precision_of_a_configuration_file(train, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="mixed precision fp8, of accelerate's configuration"):
        train(tmp_path / "run")


@pytest.mark.parametrize("gpus", [["a", "b", "c"], ["a", "b", "a"], ["a", "a", "a"]])
def test_each_process_needs_a_gpu_of_its_own(gpus, monkeypatch):
    """As NVIDIA's driver numbers them, on whatever machine they are."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[0]))
    here = SimpleNamespace(device=torch.device("cuda:0"), count=3, all_gather=lambda uuid: [uuid, *gpus[1:]])
    if len(set(gpus)) == 3:
        processes.check_devices(here)
    else:
        with pytest.raises(UserError, match=f"3 processes were started, but they have {len(set(gpus))} GPU"):
            processes.check_devices(here)
    processes.check_devices(SimpleNamespace(device=torch.device("cpu")))


def test_a_failed_process_leaves_its_group():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    processes.leave_group()
    assert not dist.is_initialized()
    processes.leave_group()  # and once is enough


def test_on_gpus_nothing_is_waited_for(monkeypatch):
    aborted = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append(True))
    processes.leave_group()
    assert aborted


def test_gloo_names_the_lost_one_before_nccl_ends_the_process(monkeypatch):
    for is_available, patience in ((True, 2 * processes.LOST_AFTER), (False, processes.LOST_AFTER)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=is_available: answer)
        assert processes._patience_of_device() == patience
