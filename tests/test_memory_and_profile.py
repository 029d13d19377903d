"""--gradient_checkpointing, --profile, and memory that is kept: what they leave as it is, and what they are for."""

import json
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from conftest import ROOT, losses_of, run_training
from diffusers import UNet2DModel

from run_folder.config import parse_config
from training.network import build_training_unet

LENGTH = ["--max_train_steps=4", "--checkpointing_steps=100", "--save_images_steps=100"]


@pytest.fixture(scope="module")
def plain(tiny_flags, tmp_path_factory):
    return run_training(tmp_path_factory.mktemp("plain") / "run", [*tiny_flags, *LENGTH])


def test_checkpointing_changes_no_loss(plain, train, tmp_path):
    """Dropout, too, is drawn again as it was."""
    run = train(tmp_path / "run", *LENGTH, "--gradient_checkpointing")
    assert losses_of(run) == pytest.approx(losses_of(plain), rel=1e-6)


def test_checkpointing_can_be_compiled(plain, train, tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run = train(tmp_path / "run", *LENGTH, "--gradient_checkpointing", "--compile")
    assert losses_of(run) == pytest.approx(losses_of(plain), rel=1e-5)
    assert not counters["graph_break"]


def bytes_kept(unet: UNet2DModel, monkeypatch) -> int:
    """Count what a forward pass keeps for the gradient, each tensor once, without the weights."""
    weights, kept = {parameter.untyped_storage().data_ptr() for parameter in unet.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def checkpoint(function, *arguments, **options):
        for argument in filter(torch.is_tensor, arguments):
            keep(argument)
        return torch_checkpoint(function, *arguments, **options)

    torch_checkpoint = torch.utils.checkpoint.checkpoint
    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
        output = unet(torch.randn(1, 3, 32, 32), torch.tensor([999])).sample  # while it is there, so is what it keeps
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_checkpointing_keeps_a_third_of_the_activations(monkeypatch):
    """Of the paper's network."""
    counts = []
    for flags in ([], ["--gradient_checkpointing"]):
        config = parse_config(["--dataset_name=digits", "--resolution=32", *flags])
        unet = build_training_unet(config, 3, torch.Generator().manual_seed(0))
        counts.append(bytes_kept(unet, monkeypatch))
    assert counts[1] < counts[0] / 3


def test_attention_to_words_has_the_same_gradient(text_network):
    gradients = []
    for flags in ([], ["--gradient_checkpointing"]):
        described = [f"--model_config_name_or_path={text_network}", "--resolution=8"]
        config = parse_config(["--dataset_name=digits", *described, *flags])
        unet = build_training_unet(config, 1, torch.Generator().manual_seed(0), {"cross_attention_dim": 16})
        torch.manual_seed(0)
        words = {"encoder_hidden_states": torch.randn(2, 5, 16), "encoder_attention_mask": torch.ones(2, 5)}
        unet(torch.randn(2, 1, 8, 8), torch.tensor([0, 999]), **words).sample.square().sum().backward()
        gradients.append([parameter.grad for parameter in unet.parameters()])
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_profile(train, tmp_path):
    run = train(tmp_path / "run", "--max_train_steps=14", *LENGTH[1:], "--profile=2")
    events = json.loads((run / "profile.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#10", "ProfilerStep#11"}
    heading, *lines = (run / "profile.txt").read_text().splitlines()
    assert heading.split()[:2] == ["ms", "a"]
    assert len(lines) == 10
    assert any("convolution" in line for line in lines)
    shares = [float(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100
    assert "profile" not in (run / "config.yaml").read_text()


@pytest.mark.parametrize("steps", [3, 10])
def test_a_run_that_is_too_short_for_a_profile(train, tmp_path, capfd, steps):
    run = train(tmp_path / "run", f"--max_train_steps={steps}", *LENGTH[1:], "--profile=2")
    assert not (run / "profile.json").exists()
    warning = "--profile 2: the run ended before its steps 11 to 12, and there is no profile"
    assert warning in capfd.readouterr().err


def calls_of(run: Path) -> dict[str, float]:
    """How often a step calls the convolutions, which only steps do, and all steps alike."""
    _, *lines = (run / "profile.txt").read_text().splitlines()
    calls = {name: float(calls) for _, _, calls, name in (line.split(maxsplit=3) for line in lines)}
    return {name: calls[name] for name in calls if "convolution" in name}


def test_a_run_that_ends_within_its_profile(train, tmp_path, capfd):
    """What is in it is divided by the steps that it has."""
    whole = train(tmp_path / "whole", "--max_train_steps=14", *LENGTH[1:], "--profile=2")
    capfd.readouterr()
    part = train(tmp_path / "part", "--max_train_steps=13", *LENGTH[1:], "--profile=6")
    said = capfd.readouterr().err
    assert "--profile 6: the run ended before its steps 14 to 16, and they are not in the profile" in said
    assert "3 steps are in" in said
    both = calls_of(whole).keys() & calls_of(part).keys()
    assert "aten::convolution_backward" in both
    assert {name: calls_of(part)[name] for name in both} == {name: calls_of(whole)[name] for name in both}


PAGES = """
import resource, sys, torch
from common.machine import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
step = lambda: [torch.ones(5_000_000) for _ in range(8)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides for itself what it keeps")
def test_what_a_step_frees_is_there_for_the_next():
    """Counted in pages that the system had to clean: 160 MB a step are 40,000 of 4 kB.

    From which size on glibc gives memory back grows by what is freed, so that it sometimes keeps these blocks itself;
    a size that is given from outside stays.
    """
    command = [sys.executable, "-c", PAGES]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    run = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "env": environment}
    counts = [int(subprocess.run([*command, how], **run).stdout) for how in ("kept", "as it is")]
    assert counts[0] < 100 < 1000 < counts[1]
