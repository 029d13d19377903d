"""benchmarks/gpu_check.py: what it says without a GPU, and the page that it writes with one."""

from types import SimpleNamespace

import pytest
import torch
from conftest import run_script

from benchmarks import gpu_check
from common.errors import UserError
from run_folder.config import BatchSizes
from training import setup
from training.setup import Run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no NVIDIA GPU") as raised:
        run_script("benchmarks.gpu_check", f"--output_dir={tmp_path}")
    assert raised.value.exit_code == 2
    assert not list(tmp_path.iterdir())


SPEEDS = [
    {"precision": "bf16", "batch": 16, "images_per_second": 800.0, "ms_per_step": 20.0, "gb": 3.25},
    {"precision": "bf16, CUDA graph", "batch": 16, "images_per_second": 1600.0, "ms_per_step": 10.0, "gb": 3.25},
    {"precision": "TF32", "batch": 128, "failed": "out of memory"},
]


def test_the_page():
    """Of a GPU with estimates: 800,000 steps of 128 images in 4.3 to 10.7 hours are 2,650 to 6,626 images a second."""
    found = [("waits", False, "waits in a step: loss.py:3 1.0")]
    text = gpu_check.page({"devices": "2 x NVIDIA H100 80GB HBM3"}, found, SPEEDS)
    assert "- devices: 2 x NVIDIA H100 80GB HBM3\n" in text
    assert "| waits | **look at this** | waits in a step: loss.py:3 1.0 |" in text
    assert "| bf16 | 16 | 20.0 | 800 | 2650 to 6626 | 3.2 |" in text
    assert "| bf16, CUDA graph | 16 | 10.0 | 1600 | 2650 to 6626 | 3.2 |" in text
    assert "| TF32 | 128 | out of memory |  | 1325 to 3313 |  |" in text
    assert "other GPUs" not in text


def test_the_page_of_a_gpu_without_estimates():
    text = gpu_check.page({"devices": "1 x NVIDIA T4"}, [], SPEEDS)
    assert "| bf16 | 16 | 20.0 | 800 |  | 3.2 |" in text
    assert "- H100 SXM5, bf16: 2650 to 6626" in text


def test_curves_are_compared():
    assert gpu_check.largest_difference([1.0, 0.5, 2.0], [1.0, 0.55, 1.9]) == pytest.approx(0.1)


def test_advice_is_followed(monkeypatch):
    """In the words that the training has for it."""
    monkeypatch.setattr(setup, "largest_batch", lambda *arguments, **others: 20)
    optimizer = SimpleNamespace(zero_grad=lambda: None, state={0: "moments"})
    run = SimpleNamespace(
        config=SimpleNamespace(clip_per_replica=None),
        sizes=BatchSizes(per_device=64, accumulation=1, total=128),
        processes=SimpleNamespace(count=2, device="cuda:0"),
        state=SimpleNamespace(update=SimpleNamespace(optimizer=optimizer)),
        pass_of_zeros=None,
    )
    advice = Run.batch_that_fits(run)
    assert "about 20 would fit" in advice
    assert gpu_check.flags_in(advice) == ["--train_batch_size=16", "--gradient_accumulation_steps=4"]
    assert gpu_check.flags_in("error: something else") == []


def test_what_goes_wrong_in_a_check_is_its_result(capsys):
    def fails(folder):
        raise RuntimeError("first\nthe reason\n")

    assert gpu_check.attempt("training", fails, None) == ("training", False, "RuntimeError: the reason")
    assert capsys.readouterr().out == "! training: RuntimeError: the reason\n"
