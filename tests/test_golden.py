"""Fifty losses on the digits guard every later change.

They are the recipe's, on the network for 8x8 images, batch 32. A change that is meant to alter them writes them anew:

    python tests/test_golden.py
"""

import json
import sys
from pathlib import Path

import pytest
from conftest import losses_of

GOLDEN = Path(__file__).parent / "golden" / "digits_losses.json"
FLAGS = [
    "--dataset_name=digits",
    "--resolution=8",
    "--no_random_flip",
    "--train_batch_size=32",
    "--lr_warmup_steps=10",
    "--max_train_steps=50",
    "--logging_steps=1",
    "--logger=none",
    "--eval_batch_size=1",
    "--ddpm_num_inference_steps=1",
]


def test_fifty_losses_do_not_change(train, tmp_path, cache_dir):
    run = train(tmp_path / "run", f"--cache_dir={cache_dir}", base=FLAGS)
    golden = json.loads(GOLDEN.read_text())
    # Other processors and thread counts round differently; a change of the recipe shows in the first digits.
    assert losses_of(run) == pytest.approx(golden, rel=1e-5)


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(Path(__file__).parent.parent))
    import train_unconditional

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train_unconditional.py", *FLAGS, f"--output_dir={folder}/run"]
        train_unconditional.main()
        GOLDEN.write_text(json.dumps(losses_of(Path(folder) / "run"), indent=1) + "\n")
    print(f"wrote {GOLDEN}")
