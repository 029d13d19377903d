"""Sets of images that a user can name: a folder, an npz file, a data set. Each image is uint8 RGB."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from common.errors import UserError, user_errors
from common.files import sha256
from common.processes import Processes
from image_data.data_options import INTERPOLATION, DataOptions
from image_data.decode import UndecodableImage, decode_image, is_grey, read_image_file, upright_size
from image_data.sources import ImageSource, folders_with_images, load_images, spread
from image_data.workers import map_in_workers
from run_folder.folder import RECORD

logger = logging.getLogger(__name__)

SAMPLED_FOR_COLOUR = 64
DECODED_AT_A_TIME = 64

Batch = tuple[torch.Tensor, torch.Tensor]  # which images of the set, and the images, uint8 [n, 3, height, width]


class FolderFiles:
    """The image files in a folder and its sub-folders, in the order of their names."""

    split = None

    def __init__(self, folder: Path, on_bad_image: str = "fail"):
        found = folders_with_images(str(folder), on_bad_image)
        self.paths = sorted(Path(each.path, name) for each in found for name in each.images)
        self.name = folder.resolve().name
        digest = hashlib.sha256()
        for path in self.paths:
            state = path.stat()
            described = f"{path.relative_to(folder)} {state.st_size} {state.st_mtime_ns}\n"
            digest.update(os.fsencode(described))  # names need not be UTF-8
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return read_image_file(self.paths[index])

    def describe(self, index: int) -> str:
        """Return where the user finds a file."""
        return str(self.paths[index])


class EncodedImages:
    """Image files as pixels: of the size they have, which must be one, or resized and cropped at the centre."""

    def __init__(
        self,
        files: FolderFiles | ImageSource,
        resolution: int | None = None,
        channels: int = 3,
        interpolation: str = INTERPOLATION,
    ):
        self.files = files
        self.rows: Sequence[int] = range(len(files))  # those of the files that are images
        self.name, self.split, self.fingerprint = files.name, files.split, files.fingerprint
        self.resolution, self.interpolation = resolution, interpolation
        self.channels = 1 if channels == 1 else 3  # transparency is laid over white
        changes = [interpolation] * (interpolation != INTERPOLATION) + ["grey"] * (channels == 1 and self._has_colour())
        if changes:  # other pixels, so other statistics and other rows of the tables
            self.fingerprint = hashlib.sha256(" ".join([files.fingerprint, *changes]).encode()).hexdigest()
        self.size = (resolution, resolution) if resolution else self._read(0, upright_size)

    def __len__(self) -> int:
        return len(self.rows)

    def without_bad(self, num_workers: int) -> Self:
        """Leave out what cannot be decoded, which takes decoding everything once."""
        parts = torch.arange(len(self.files)).split(DECODED_AT_A_TIME)
        self.rows = [row for rows in map_in_workers(self._decodable, parts, num_workers) for row in rows]
        if not self.rows:
            raise UserError(f"none of the {len(self.files)} images of {self.name} can be decoded")
        for row in sorted(set(range(len(self.files))).difference(self.rows)):
            logger.warning("%s cannot be decoded and is left out", self.files.describe(row))
        return self

    def pixels(self, index: int) -> np.ndarray:
        """Return an image as uint8 [3, height, width]."""
        row = self.rows[index]
        image = self._read(row, self._decode)
        if image.shape[1:] != self.size:
            raise UserError(
                f"{self.files.describe(row)} has {image.shape[2]}x{image.shape[1]} pixels, the first image "
                f"{self.size[1]}x{self.size[0]}: all images must have one size"
            )
        return np.broadcast_to(image, (3, *self.size))

    def is_grey(self) -> bool:
        """Return whether the images are without colour, judged by an even sample."""
        return self.channels == 1 or not self._has_colour()

    def _has_colour(self) -> bool:
        return not all(map(self._is_grey, spread(len(self.files), SAMPLED_FOR_COLOUR)))

    def _is_grey(self, row: int) -> bool:
        with contextlib.suppress(UndecodableImage):
            return is_grey(self.files.read(row))
        return True  # whether that is an error is decided when it is decoded

    def _decode(self, data: bytes) -> np.ndarray:
        crop = self.resolution is not None
        return decode_image(data, self.channels, self.resolution, crop, self.interpolation)

    def _decodable(self, rows: torch.Tensor) -> list[int]:
        found = []
        for row in rows.tolist():
            with contextlib.suppress(UndecodableImage):
                self._decode(self.files.read(row))
                found.append(row)
        return found

    def _read(self, row: int, function: Callable[[bytes], Any]) -> Any:
        try:
            return function(self.files.read(row))
        except UndecodableImage as error:
            where = self.files.describe(row)
            raise UserError(f"cannot decode {where}: {error}; repair or remove this image") from error


class ArrayImages:
    """The images of an npz file: `arr_0` or `images`, uint8 [n, height, width, 1 or 3 or 4]."""

    split = None
    resolution = None
    channels = 3

    def __init__(self, path: Path):
        self.name, self.fingerprint = path.name, sha256(path)
        broken = user_errors(f"{path} cannot be read as an npz file", Exception)  # of whatever kind the damage causes
        with broken, np.load(path, allow_pickle=False) as arrays:
            names = [name for name in ("arr_0", "images") if name in arrays.files]
            if not names:
                raise UserError(f"{path} holds no arr_0 and no images, only: {', '.join(arrays.files) or 'nothing'}")
            images = arrays[names[0]]
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
            found = f"{names[0]} is {images.dtype} {list(images.shape)}"
            raise UserError(f"{path}: {found}; uint8 [n, height, width, channels] is needed")
        images = images[..., None] if images.ndim == 3 else images
        if images.shape[3] not in (1, 3, 4) and images.shape[1] in (1, 3, 4):
            images = images.transpose(0, 2, 3, 1)
        if images.shape[3] not in (1, 3, 4):
            raise UserError(f"{path}: {names[0]} has {images.shape[3]} channels; 1, 3 or 4 are understood")
        self.images, self.size = images, images.shape[1:3]

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, index: int) -> np.ndarray:
        """Return an image as uint8 [3, height, width]."""
        return as_rgb(torch.from_numpy(self.images[index].transpose(2, 0, 1))[None])[0].numpy()

    def is_grey(self) -> bool:
        """Return whether the images are without colour."""
        return self.images.shape[3] == 1


ImageSet = EncodedImages | ArrayImages


def open_images(
    path: str,
    flag: str,
    resolution: int | None = None,
    on_bad_image: str = "fail",
    interpolation: str = INTERPOLATION,
) -> ImageSet:
    """Open an npz file, a folder of image files or of parquet files; a reference is brought to the `resolution`."""
    found = Path(path).expanduser()
    if found.is_file():
        if found.suffix != ".npz":
            raise UserError(f"{flag} {path}: a file must be an .npz with the images; otherwise name a folder")
        images = ArrayImages(found)
        if resolution is not None and images.size != (resolution, resolution):
            sizes = f"{images.size[1]}x{images.size[0]} pixels where {resolution}x{resolution} are needed"
            raise UserError(f"{flag} {path} holds images of {sizes}; an npz file is taken as it is")
        return images
    if (found / RECORD).is_file():
        # generate.py's folder also holds grids, which are pictures but no samples.
        parts = [found / name for name in ("images", "samples.npz", "data") if (found / name).exists()]
        if not parts:
            raise UserError(f"{flag} {path}: there are no images in this folder yet; generate.py makes them")
        return open_images(str(parts[0]), flag, resolution, on_bad_image, interpolation)
    if any(found.rglob("*.parquet")) or (found / "dataset_info.json").exists() or (found / "state.json").exists():
        return EncodedImages(load_images(DataOptions(str(found))), resolution, interpolation=interpolation)
    files = FolderFiles(found, on_bad_image)
    if len(files) == 0:
        raise UserError(f"{flag} {path}: there are no images in this folder ({found.resolve()})")
    return EncodedImages(files, resolution, interpolation=interpolation)


def as_rgb(images: torch.Tensor) -> torch.Tensor:
    """Turn uint8 images of 1, 3 or 4 channels into RGB: grey three times, transparency over white."""
    if images.shape[1] == 1:
        return images.repeat(1, 3, 1, 1)  # not a view: memory whose channels are one cannot be pinned
    if images.shape[1] == 4:
        alpha = images[:, 3:].float() / 255
        return (images[:, :3] * alpha + 255 * (1 - alpha)).round().to(torch.uint8)
    return images


def batches_of(
    images: ImageSet, indices: torch.Tensor, batch_size: int, num_workers: int, processes: Processes | None = None
) -> Iterator[Batch]:
    """Yield these images of a set, or a process's share of them, decoded ahead by workers."""
    parts = indices.split(batch_size)
    if processes is not None:
        # Whole batches, since what a network makes of an image depends in its last bits on the others beside it.
        parts = parts[processes.index :: processes.count]
    num_workers = num_workers if isinstance(images, EncodedImages) else 0
    decoded = map_in_workers(partial(_pixels_of, images), parts, num_workers)
    yield from zip(parts, map(torch.from_numpy, decoded), strict=True)


def _pixels_of(images: ImageSet, part: torch.Tensor) -> np.ndarray:
    return np.stack([images.pixels(index) for index in part.tolist()])
