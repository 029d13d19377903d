"""--compile in training: one graph for the whole run, and the same run as without it but for the last bits.

The graphs are what dynamo makes of the network; what the C++ compiler makes of them takes minutes and is torch's.
"""

from functools import partial

import pytest
import torch
from conftest import losses_of, run_training
from safetensors.torch import load_file

from common.errors import UserError

LENGTH = ["--max_train_steps=6", "--checkpointing_steps=3", "--save_images_steps=3", "--compile"]


@pytest.fixture
def dynamo(monkeypatch):
    """torch.compile without its compiler, and what it counted."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    return counters


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_graph_for_a_run_with_grids_and_saves(precision, dynamo, tiny_flags, tmp_path):
    flags = [*tiny_flags, f"--mixed_precision={precision}", *LENGTH]
    compiled = run_training(tmp_path / "compiled", flags)
    assert not dynamo["graph_break"]
    assert dynamo["stats"]["unique_graphs"] == 1
    plain = run_training(tmp_path / "plain", flags[:-1])
    assert losses_of(compiled) == pytest.approx(losses_of(plain), rel=1e-5 if precision == "no" else 1e-2)
    weights = "checkpoint-6/unet/diffusion_pytorch_model.safetensors"
    assert load_file(compiled / weights).keys() == load_file(plain / weights).keys()


def test_a_compiled_run_resumes(dynamo, tiny_flags, tmp_path):
    whole = run_training(tmp_path / "whole", [*tiny_flags, *LENGTH])
    parts = run_training(tmp_path / "parts", [*tiny_flags, *LENGTH, "--max_train_steps=3"])
    run_training(parts, [*tiny_flags, *LENGTH])
    assert losses_of(parts) == losses_of(whole)


def test_accumulation_compiles_once(dynamo, tiny_flags, tmp_path):
    run_training(tmp_path / "run", [*tiny_flags, *LENGTH, "--gradient_accumulation_steps=2"])
    assert dynamo["stats"]["unique_graphs"] == 1


def test_each_size_of_images_is_a_graph(dynamo, tiny_flags, tmp_path):
    run_training(tmp_path / "run", [*tiny_flags, *LENGTH, "--half_resolution_steps=2"])
    assert dynamo["stats"]["unique_graphs"] == 2


def test_without_a_compiler(monkeypatch, tiny_flags, tmp_path):
    torch._dynamo.reset()

    def no_compiler(graph, inputs):
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=no_compiler))
    with pytest.raises(UserError, match=r"--compile: this machine cannot compile.*no C\+\+ compiler found"):
        run_training(tmp_path / "run", [*tiny_flags, *LENGTH])
