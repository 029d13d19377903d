"""Real processes under every launcher: the same run, whatever starts it and however many share it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import preloaded
import pytest
import torch
from conftest import ROOT, losses_of, metrics_of
from PIL import Image
from safetensors.torch import load_file

BIN = Path(sys.executable).parent
FLAGS = ["--max_train_steps=6", "--save_images_steps=3", "--checkpointing_steps=3"]


# The launchers need not import torch either, but what they start does.
TORCHRUN = [BIN / "torchrun", "--standalone", "--nproc_per_node=2"]
ACCELERATE = [BIN / "accelerate", "launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]


def train(flags: list[str]) -> subprocess.CompletedProcess:
    """As a user starts it."""
    command = [sys.executable, "train_unconditional.py", *flags]
    environment = {**os.environ, **preloaded.ENVIRONMENT}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def flags(tiny_flags, network_without_dropout) -> list[str]:
    return [*tiny_flags, *FLAGS, f"--model_config_name_or_path={network_without_dropout}", "--total_batch_size=16"]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    preloaded.run(["train_unconditional.py", *flags, f"--output_dir={run}"])
    return run


@pytest.mark.parametrize(
    "launcher",
    [
        TORCHRUN,
        ACCELERATE,
    ],
    ids=["torchrun", "accelerate-multi"],
)
def test_two_processes_make_the_same_run(launcher, flags, alone, tmp_path):
    run = tmp_path / "run"
    # Under torchrun with accumulation as well.
    per_device = 4 if launcher == TORCHRUN else 8
    flags = [*flags, f"--output_dir={run}", f"--train_batch_size={per_device}"]
    done = preloaded.run([*launcher, "train_unconditional.py", *flags])
    assert "Num processes: 2" in done.stderr
    assert done.stderr.count("***** Running training *****") == 1
    assert losses_of(run) == pytest.approx(losses_of(alone), rel=1e-5)
    lines, lines_alone = metrics_of(run), metrics_of(alone)
    assert [line["lr"] for line in lines] == [line["lr"] for line in lines_alone]
    assert all(0 < line["communication_share"] < 1 for line in lines)
    assert {line["communication_share"] for line in lines_alone} == {0}
    for name in ("grad_norm", "loss_q0", "loss_q3"):
        ours = [line[name] for line in lines if name in line]
        assert ours == pytest.approx([line[name] for line in lines_alone if name in line], rel=1e-4)
    ours, theirs = (np.asarray(Image.open(folder / "samples" / "step-6.png")).astype(int) for folder in (run, alone))
    assert np.abs(ours - theirs).max() <= 1


def test_replicas_are_clipped_alike_on_one_process_and_two(flags, tmp_path):
    """A limit that cuts every gradient; without it the run is another one."""
    runs = []
    for number in (1, 2):
        runs.append(tmp_path / f"{number}")
        limits = ["--clip_per_replica=4", "--max_grad_norm=0.05", f"--output_dir={runs[-1]}"]
        train = [flag for flag in flags if not flag.startswith("--train_batch_size")]
        preloaded.run(["train_unconditional.py", *train, *limits], processes=number)
    one, two = map(metrics_of, runs)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5)
    assert all(line["grad_norm"] <= 0.05 * (1 + 1e-6) for line in one)


def test_accelerate_launch_with_one_process(flags, alone, tmp_path):
    run = tmp_path / "run"
    preloaded.run([BIN / "accelerate", "launch", "train_unconditional.py", *flags, f"--output_dir={run}"])
    assert losses_of(run) == losses_of(alone)


@pytest.mark.parametrize("device", [["--cpu"], []])
def test_accelerate_launch_starts_one_process_on_the_cpu(device, flags, tmp_path):
    """Another batch must not go unnoticed."""
    if torch.accelerator.is_available() and not device:
        pytest.skip("several processes are started on GPUs")
    launcher = [BIN / "accelerate", "launch", *device, "--num_processes", "2"]
    command = [*launcher, "train_unconditional.py", *flags, f"--output_dir={tmp_path / 'run'}"]
    done = preloaded.run(command, succeed=False)
    assert "train_unconditional.py: error: accelerate launch starts one process on the CPU" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_fresh_process_continues_bit_for_bit(flags, alone, tmp_path):
    run = tmp_path / "run"
    preloaded.run(["train_unconditional.py", *flags, f"--output_dir={run}", "--max_train_steps=3"])
    done = train([*flags, f"--output_dir={run}"])
    assert done.returncode == 0, done.stderr
    assert losses_of(run) == losses_of(alone)
    for name in ("unet/diffusion_pytorch_model", "unet_ema/diffusion_pytorch_model", "optimizer"):
        ours, theirs = (load_file(folder / "checkpoint-6" / f"{name}.safetensors") for folder in (run, alone))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert (run / "samples" / "step-6.png").read_bytes() == (alone / "samples" / "step-6.png").read_bytes()


def test_two_processes_repeat_themselves_with_dropout(tiny_flags, tmp_path):
    runs = []
    for number in range(2):
        runs.append(tmp_path / f"run {number}")
        flags = [*tiny_flags, "--train_batch_size=8", "--max_train_steps=3", f"--output_dir={runs[-1]}"]
        preloaded.run(["train_unconditional.py", *flags], processes=2)
    assert losses_of(runs[0]) == losses_of(runs[1])


def test_a_mistake_is_one_line_and_exit_code_2(flags, tmp_path):
    done = train([*flags, "--resoluton=8"])
    assert done.returncode == 2
    assert done.stderr == ("train_unconditional.py: error: unknown flag --resoluton; did you mean --resolution?\n")
    run = ["train_unconditional.py", f"--output_dir={tmp_path / 'run'}"]
    done = preloaded.run([*run, "--dataset_name=/nowhere"], succeed=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("train_unconditional.py: error: ")
    done = preloaded.run([*run, *flags, "--train_batch_size=5"], processes=2, succeed=False)
    assert done.stderr.count("train_unconditional.py: error: --total_batch_size 16 is not 5 per device") == 1
