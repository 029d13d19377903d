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


def test_the_page():
    speeds = [
        {"precision": "bf16", "batch": 16, "images_per_second": 800.0, "ms_per_step": 20.0, "gb": 3.25},
        {"precision": "TF32", "batch": 128, "failed": "out of memory"},
    ]
    text = gpu_check.page({"devices": "1 x H100"}, [("waits", False, "waits in a step: loss.py:3 1.0")], speeds)
    assert "- devices: 1 x H100\n" in text
    assert "| waits | **look at this** | waits in a step: loss.py:3 1.0 |" in text
    assert "| bf16 | 16 | 20.0 | 800 | 3.2 |" in text
    assert "| TF32 | 128 | out of memory |  |  |" in text
    assert "- H100 SXM5, bf16: " in text


def test_what_goes_wrong_in_a_check_is_its_result(capsys):
    def fails(folder):
        raise RuntimeError("first\nthe reason\n")

    assert gpu_check.attempt("training", fails, None) == ("training", False, "RuntimeError: the reason")
    assert capsys.readouterr().out == "! training: RuntimeError: the reason\n"
