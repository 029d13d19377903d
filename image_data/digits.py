"""scikit-learn's handwritten digits: a real data set that is there without a network."""

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from datasets import Dataset

BRIGHTEST = 16  # the grey levels of the originals are 0..16


def load_digits() -> "Dataset":
    """The 1,797 images, 8x8 and grey, in a column `image`, with what they show in a column `label`."""
    # Imported here: both take long, and few runs need them.
    import datasets
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    pixels = np.rint(digits.images * (255 / BRIGHTEST)).astype(np.uint8)
    columns = {"image": [{"bytes": _png(image), "path": None} for image in pixels], "label": digits.target}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list("0123456789")))
    # Its fingerprint is the hash of its content, hence the same everywhere.
    return datasets.Dataset.from_dict(columns, features=features, split="train")


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
