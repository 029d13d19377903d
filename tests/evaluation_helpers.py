"""What the tests of evaluate.py have in common: a network small enough for it, and images."""

import csv
import logging
from pathlib import Path

import pytest
import torch
from conftest import run_script, run_training


def make_vision_network(folder: Path) -> Path:
    """A vision model of transformers that sees 28x28 pixels."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**shape)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    return make_vision_network(tmp_path_factory.mktemp("networks") / "tiny-vision")


@pytest.fixture(scope="module")
def evaluate(network, cache_dir):
    """evaluate.py in this process, with the tiny network unless told otherwise."""

    def run(*flags: str, features: str | None = None) -> None:
        common = [f"--features={features or network}", f"--cache_dir={cache_dir}", "--num_workers=0"]
        try:
            run_script("evaluate", *common, *flags)
        finally:
            logging.getLogger().handlers.clear()

    return run


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def metrics_in(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if "@" in name and value}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_flags) -> Path:
    """A run with two checkpoints."""
    flags = ["--max_train_steps=4", "--checkpointing_steps=2", "--save_images_steps=100", "--logger=tensorboard"]
    folder = run_training(tmp_path_factory.mktemp("runs") / "run", [*tiny_flags, *flags])
    logging.getLogger().handlers.clear()
    return folder
