#!/usr/bin/env python
"""How much of a photo is left at 32x32 when it is made smaller by one filter or another, all of them antialiased.

    python benchmarks/resizing.py PHOTOS [PHOTOS ...]      # writes benchmarks/results/resizing.json

Of each folder an even sample, as squares. psnr: of the photo against its 32x32 version, enlarged again.
feature_distance: between Inception's features of the photo and of its 32x32 version, over the length of the first. Both
compare a photo with itself, so that few photos are enough; bicubic_is_nearer: the share whose features it keeps better.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from common.errors import UserError, run_script  # noqa: E402
from common.files import default_cache_dir, write_atomically  # noqa: E402
from evaluation.evaluate_options import EvaluationOptions  # noqa: E402
from evaluation.image_sets import FolderFiles  # noqa: E402
from evaluation.networks import inception_networks  # noqa: E402
from image_data.decode import decode_image  # noqa: E402
from image_data.sources import spread  # noqa: E402

FILTERS = {name: Image.Resampling[name.upper()] for name in ("bilinear", "bicubic")}
SMALLEST, SMALL, BATCH_SIZE = 96, 32, 20


def photos_of(folder: Path, count: int) -> list[Image.Image]:
    """Return an even sample of the photos that are at least three times as large, as squares cut from their middle."""
    files = FolderFiles(folder, on_bad_image="skip")
    squares = [decode_image(files.read(row), 3, None, center_crop=True) for row in spread(len(files), count)]
    return [Image.fromarray(square.transpose(1, 2, 0)) for square in squares if square.shape[1] >= SMALLEST]


def batched(images: list[Image.Image], size: int) -> list[list[Image.Image]]:
    """Split a list into parts of so many."""
    return [images[start : start + size] for start in range(0, len(images), size)]


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*image.size[::-1], 3).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of photos")
    parser.add_argument("--count", type=int, default=50, help="photos of each")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
    (network,) = inception_networks(EvaluationOptions(), default_cache_dir(), torch.device("cpu"))

    def features_of(images: list[Image.Image]) -> torch.Tensor:
        with torch.inference_mode():
            parts = (torch.stack([as_tensor(image) for image in part]) for part in batched(images, BATCH_SIZE))
            return torch.cat([network.compute(part)["features"] for part in parts])

    result = {}
    for folder in arguments.folders:
        photos = photos_of(folder, arguments.count)
        features = features_of(photos)
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, resampling in FILTERS.items():
            small = [photo.resize((SMALL, SMALL), resampling) for photo in photos]
            pairs = list(zip(small, photos, strict=True))
            enlarged = [image.resize(photo.size, Image.Resampling.BICUBIC) for image, photo in pairs]
            differences = [as_tensor(a).double() - as_tensor(b) for a, b in zip(enlarged, photos, strict=True)]
            errors = torch.stack([difference.square().mean() for difference in differences])
            distances = (features_of(small) - features).norm(dim=1) / features.norm(dim=1)
            found[name] = 10 * torch.log10(255**2 / errors), distances
        numbers = {
            name: {"psnr": psnr.mean().item(), "feature_distance": distances.mean().item()}
            for name, (psnr, distances) in found.items()
        }
        nearer = (found["bicubic"][1] < found["bilinear"][1]).double().mean().item()
        result[folder.name] = {"photos": len(photos), **numbers, "bicubic_is_nearer": nearer}
        print(folder.name, result[folder.name], flush=True)
    write_atomically(ROOT / "benchmarks" / "results" / "resizing.json", json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
