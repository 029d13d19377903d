"""What the tests of images have in common: small images, and image folders of them."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from image_data.data_options import DataOptions
from image_data.sources import load_images
from image_data.store import load_training_images

ROOT = Path(__file__).parent.parent


GIGABYTE = 2**30


def png(seed, width=8, height=8, mode="RGB"):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def image_folder(path, count=12, **options):
    for index in range(count):
        write(path / f"class{index % 2}" / f"{index:03}.png", png(index, **options))
    return path


@pytest.fixture
def load(tmp_path):
    def load(*args, split="train", **options):
        return load_images(DataOptions(*args, **{"cache_dir": str(tmp_path / "datasets"), **options}), split)

    return load


@pytest.fixture
def prepare(tmp_path):
    def prepare(
        source,
        memory_limit_bytes=GIGABYTE,
        num_workers=0,
        work_here=True,
        wait=lambda: None,
        all_gather=lambda found: [found],
        **changes,
    ):
        processes = SimpleNamespace(is_local_main=work_here, barrier=wait, all_gather=all_gather)
        changes = {"cache_dir": tmp_path / "prepared", **changes}
        options = image_options(memory_limit_bytes=memory_limit_bytes, num_workers=num_workers, **changes)
        return load_training_images(options, source, processes).images

    return prepare


def image_options(cache_dir, memory_limit_bytes=GIGABYTE, num_workers=0, **changes):
    options = {
        "resolution": 8,
        "channels": "3",
        "center_crop": False,
        "in_memory_limit_gb": memory_limit_bytes / GIGABYTE,
        "num_workers": num_workers,
        "on_bad_image": "fail",
        "cache_dir": str(cache_dir),
    }
    return DataOptions(**(options | changes))


@pytest.fixture
def photos(tmp_path, load):
    """Twelve images of different shapes, and three of them upright."""
    for index in range(12):
        size = (8 + index, 8) if index % 4 else (8, 15)
        write(tmp_path / "photos" / f"{index:03}.png", png(index, *size))
    return load(train_data_dir=str(tmp_path / "photos"))


# Prepared images


def everything(images):
    return images.crops(torch.arange(len(images)), torch.zeros(len(images), 2))
