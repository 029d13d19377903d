#!/usr/bin/env python
"""How long a checkpoint of the paper's network keeps the training waiting, beside the bare copy of its tensors.

    python benchmarks/save_stall.py      # writes benchmarks/save_stall.json

A save copies the tensors out and leaves the writing, syncing and hashing to a thread. Measured in turns: the copy
alone, the call of `save`, the whole until the checkpoint is on the disk, and training steps with and without a write
going on beside them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from common.processes import start_processes  # noqa: E402
from conditions.condition import NoCondition  # noqa: E402
from image_data.sources import open_source  # noqa: E402
from image_data.store import load_training_images  # noqa: E402
from run_folder.checkpoints import CheckpointWriter, checkpoint_files  # noqa: E402
from run_folder.config import parse_config  # noqa: E402
from training.setup import build_run  # noqa: E402

ROUNDS = 7


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # The paper's network; the images do not matter.
    config = parse_config(["--dataset_name=digits", "--resolution=32", "--channels=3", "--train_batch_size=1"])
    processes = start_processes(config)
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, NoCondition())
    device, state, unet = processes.device, run.state, run.state.unet
    images = torch.randn(1, 3, 32, 32, device=device)

    def train_step() -> None:
        unet(images, 500).sample.square().mean().backward()
        state.update.optimizer.step()
        state.update.optimizer.zero_grad()
        state.update.ema.update()
        processes.synchronize_device()

    measured: dict[str, list[float]] = {name: [] for name in ("copy", "save", "written", "step", "step_beside_write")}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config.output_dir = folder
        writer = CheckpointWriter(config, None)
        for _ in range(3):
            train_step()
        for number in range(ROUNDS):
            measured["copy"].append(seconds(lambda: checkpoint_files(state)))
            measured["step"].append(statistics.median(seconds(train_step) for _ in range(3)))
            state.step = number
            start = time.perf_counter()
            measured["save"].append(seconds(lambda: writer.save(state, with_snapshot=False)))
            while writer.thread.is_alive():
                took = seconds(train_step)
                if writer.thread.is_alive():
                    measured["step_beside_write"].append(took)
            writer.wait()
            measured["written"].append(time.perf_counter() - start)
        size = sum(
            path.stat().st_size for path in Path(folder, f"checkpoint-{ROUNDS - 1}").rglob("*") if path.is_file()
        )

    medians = {f"{name}_seconds": round(statistics.median(values), 4) for name, values in measured.items()}
    ratio = statistics.median(save / copy for save, copy in zip(measured["save"], measured["copy"], strict=True))
    result = {
        "machine": {"device": str(device), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "checkpoint_megabytes": round(size / 2**20),
        "rounds": ROUNDS,
        **medians,
        "save_over_copy": round(ratio, 3),
    }
    (ROOT / "benchmarks" / "save_stall.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
