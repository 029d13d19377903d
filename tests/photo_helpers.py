"""What the tests of prepare_data.py have in common: pictures, and collections of them."""

import io
import json
import logging
import sys

import numpy as np
import pytest
from PIL import Image

import prepare_data


def picture(seed, size=(12, 10), mode="RGB"):
    bands = {"RGB": 3, "L": 1, "RGBA": 4, "CMYK": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), np.uint8)
    return Image.fromarray(pixels if bands > 1 else pixels[..., 0], mode)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def put(path, data=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(path.name.encode()[0])) if data is None else data)
    return path


def collection(root, names):
    for seed, name in enumerate(names):
        put(root / name, encoded(picture(seed)))
    return root


@pytest.fixture
def run(monkeypatch):
    """The script in this process."""

    def run(source, output, *flags):
        arguments = [str(source), f"--output={output}", "--num_workers=0", *map(str, flags)]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
        prepare_data.main()

    yield run
    logging.getLogger().handlers.clear()


def table(folder):
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def manifest_of(output):
    return json.loads((output / "prepared.json").read_text())


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# From end to end


@pytest.fixture
def pets(tmp_path):
    """Twelve photos of each of two classes, of all kinds that `decode_image` knows."""
    root = tmp_path / "pets"
    for label in ("cat", "dog"):
        for number in range(12):
            size = (20 + number, 30 - number)
            kind, mode = "PNG RGB,JPEG RGB,PNG L,JPEG CMYK,PNG RGBA,WEBP RGB".split(",")[number % 6].split()
            put(root / label / f"{number:02}.{kind.lower()}", encoded(picture(number, size, mode), kind))
    return root


# Again, and interrupted


def contents(folder):
    return {name: (folder / name).read_bytes() for name in names_in(folder)}
