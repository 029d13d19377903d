#!/usr/bin/env python
"""How long a save of the paper's network keeps the training waiting, beside accelerate's `save_state`.

    python -m benchmarks.save_stall

A save copies the tensors out and leaves the writing, syncing and hashing to a thread. Measured in turns: the copy
alone, the call of `save`, the whole until the checkpoint is on the disk, training steps with and without a write going
on beside them, and `accelerator.save_state` of the same weights, moving average and optimiser.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measuring import Result, Row, Spread, parser, ratios, seconds, write_result
from common.errors import run_script
from common.processes import start_processes
from conditions.condition import NoCondition
from image_data.sources import open_source
from image_data.store import load_training_images
from run_folder.checkpoints import CheckpointWriter, checkpoint_files
from run_folder.config import parse_config
from training.setup import build_run

ROUNDS, QUICK_ROUNDS = 7, 2
SHARE_OF_STALL = 0.1


def main() -> None:
    options = parser(__doc__).parse_args()
    # The paper's network; the images do not matter.
    size = ["--resolution=8"] if options.quick else ["--resolution=32", "--channels=3"]
    config = parse_config(["--dataset_name=digits", "--train_batch_size=1", *size])
    processes = start_processes(config)
    images = load_training_images(config, open_source(config, processes), processes)
    run = build_run(config, processes, images, NoCondition())
    device, state, unet = processes.device, run.state, run.state.unet
    images = torch.randn(1, unet.config.in_channels, config.resolution, config.resolution, device=device)
    accelerator = processes.accelerator
    accelerator.prepare(unet, state.update.ema.ema_model, state.update.optimizer)

    def train_step() -> None:
        unet(images, 500).sample.square().mean().backward()
        state.update.optimizer.step()
        state.update.optimizer.zero_grad()
        state.update.ema.update()
        processes.synchronize_device()

    names = ("copy", "save", "written", "save_state", "step", "step_beside_write")
    measured: dict[str, list[float]] = {name: [] for name in names}
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config.output_dir = folder
        writer = CheckpointWriter(config, None)
        for _ in range(3):
            train_step()
        for number in range(rounds):
            measured["copy"].append(seconds(lambda: checkpoint_files(state)))
            measured["step"].append(Spread.of(seconds(train_step) for _ in range(3)).median)
            measured["save_state"].append(seconds(lambda: accelerator.save_state(f"{folder}/state")))
            state.step = number
            start = time.perf_counter()
            measured["save"].append(seconds(lambda: writer.save(state, with_snapshot=False)))
            while writer.thread.is_alive():
                took = seconds(train_step)
                if writer.thread.is_alive():
                    measured["step_beside_write"].append(took)
            writer.wait()
            measured["written"].append(time.perf_counter() - start)
        files = [path for path in Path(folder, f"checkpoint-{rounds - 1}").rglob("*") if path.is_file()]
        megabytes = sum(path.stat().st_size for path in files) / 1e6

    medians = {name: round(Spread.of(values).median, 4) for name, values in measured.items() if values}
    rows = [
        Row(
            f"a save of {megabytes:.0f} MB: the training waits",
            f"{1000 * medians['save']:.0f} ms",
            f"accelerator.save_state: {1000 * medians['save_state']:.0f} ms",
            ratios(measured["save"], measured["save_state"]),
            "of its time",
            SHARE_OF_STALL,
            "at most",
        )
    ]
    details = {
        "device": str(device),
        "checkpoint_megabytes": round(megabytes),
        "medians_in_seconds": medians,
        "seconds": measured,
        "save_over_copy": round(ratios(measured["save"], measured["copy"]).median, 3),
    }
    write_result("save_stall", Result(rows, details), options.output_dir)


if __name__ == "__main__":
    run_script(main)
