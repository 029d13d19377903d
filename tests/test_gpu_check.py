"""benchmarks/gpu_check.py: what it says without a GPU, and the page that it writes with one."""

import pytest
import torch
from conftest import run_script

from benchmarks import gpu_check
from common.errors import UserError


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


def test_advice_is_followed(tmp_path, monkeypatch):
    """As the training gives it: this one ran out of memory on a CPU that had none for more than 20 images."""
    from diffusers import UNet2DModel

    forward = UNet2DModel.forward

    def with_limit(self, sample, *arguments, **others):
        if len(sample) > 20:
            raise MemoryError
        return forward(self, sample, *arguments, **others)

    monkeypatch.setattr(UNet2DModel, "forward", with_limit)
    flags = ["--max_train_steps=1", "--train_batch_size=64", "--save_images_steps=100", "--eval_batch_size=1"]
    with pytest.raises(UserError) as raised:
        run_script("train_unconditional", *gpu_check.DIGITS[1:], *flags, f"--output_dir={tmp_path / 'run'}")
    first, second = gpu_check.flags_in(str(raised.value))
    assert first.startswith("--train_batch_size=")
    assert int(first.partition("=")[2]) * int(second.partition("=")[2]) == 64
    assert gpu_check.flags_in("error: something else") == []


def test_what_goes_wrong_in_a_check_is_its_result(capsys):
    def fails(folder):
        raise RuntimeError("first\nthe reason\n")

    assert gpu_check.attempt("training", fails, None) == ("training", False, "RuntimeError: the reason")
    assert capsys.readouterr().out == "! training: RuntimeError: the reason\n"
