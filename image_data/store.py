"""Decoded images held ready: in memory when they fit, otherwise decoded while training goes on.

What is prepared is kept in a folder of the cache, complete or not at all:

    <cache_dir>/<key>/pixels                 the images one after the other, uint8 [channels, height, width] each
    <cache_dir>/<key>/index.safetensors      which rows they are, their places and sizes, and what was left out

Of a set that does not fit no pixels are kept, only the result of having looked at every image once.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from common.errors import UserError
from common.files import default_cache_dir, file_checksum, load_safetensors, save_safetensors, sync
from common.machine import default_num_workers
from common.processes import Processes
from image_data.data_options import INTERPOLATION, DataOptions
from image_data.decode import UndecodableImage, check_image, decode_image, stored_size
from image_data.sources import ImageSource, spread
from image_data.workers import map_in_chunks

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
PIXELS, INDEX = "pixels", "index.safetensors"
MOST_IMAGES_PER_CHUNK, MOST_BYTES_PER_CHUNK = 32, 4 * 2**20  # what a worker decodes at a time
SAMPLED_HEADERS = 64
MOST_LISTED = 20


@dataclass(frozen=True)
class TrainingImages:
    """The images of a run, and the processes that decode them if they do not fit into memory."""

    images: "InMemoryImages | StreamedImages"
    channels: int
    num_workers: int
    random_flip: bool = False  # horizontally


def load_training_images(
    options: DataOptions, source: ImageSource, processes: Processes | None = None
) -> TrainingImages:
    """Decode the images of a data set as the options want them, or find them decoded in the cache.

    All processes call this. One per machine decodes; the others map the same file, so that the pixels are held once.
    """
    channels = source.detect_channels() if options.channels == "auto" else int(options.channels)
    decoder = ImageDecoder(source, channels, options.resolution, options.center_crop, options.interpolation)
    num_workers = options.num_workers
    if num_workers is None:
        num_workers = default_num_workers(processes.local_count if processes else 1)
    in_memory = _estimate_bytes(decoder) <= options.in_memory_limit_gb * 2**30
    cache_dir = Path(options.cache_dir or default_cache_dir()).expanduser()
    folder = cache_dir / _key(decoder, in_memory)
    if processes is None or processes.is_local_main:
        index = _find(decoder, folder) or _prepare(decoder, folder, in_memory, num_workers, options.on_bad_image)
        _refuse_bad_images(index.skipped, options.on_bad_image)
    if processes is not None:
        processes.barrier()
    index = _read_index(folder)
    if index is None:
        raise UserError(
            f"--cache_dir {cache_dir} must be a folder that all processes of a machine share: "
            f"{folder.name} is not in it after one of them has prepared it"
        )
    if processes is not None:
        check_same_everywhere(source, index, processes)
    images = InMemoryImages(index, decoder, folder / PIXELS) if in_memory else StreamedImages(index, decoder)
    logger.info("%s: %d images, %d channel(s), %d data worker(s)", source, len(images), channels, num_workers)
    if images.skipped:
        listed = "\n".join(f"  {name}" for name in images.skipped[:MOST_LISTED])
        more = f"\n  and {len(images.skipped) - MOST_LISTED} more" if len(images.skipped) > MOST_LISTED else ""
        logger.warning("%d image(s) could not be decoded and are left out:\n%s%s", len(images.skipped), listed, more)
    return TrainingImages(images, channels, num_workers, options.random_flip)


class Decoded(NamedTuple):
    """A decoded image: its pixels, if they are wanted, and the height and width of the stored image."""

    pixels: np.ndarray | None
    size: tuple[int, int]


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes the images of a source to one size and number of channels, in worker processes too."""

    source: ImageSource
    channels: int
    resolution: int
    center_crop: bool
    interpolation: str = INTERPOLATION

    def decode(self, row: int) -> np.ndarray:
        return self._decode(self.source.read(row))

    def _decode(self, data: bytes) -> np.ndarray:
        return decode_image(data, self.channels, self.resolution, self.center_crop, self.interpolation)

    def attempt(self, row: int, keep_pixels: bool = False) -> Decoded | UndecodableImage:
        """Return the pixels of a row, if they are wanted, and its size; or return the error of decoding it."""
        try:
            data = self.source.read(row)
            if not keep_pixels:
                return Decoded(None, check_image(data, self.channels, self.resolution))
            return Decoded(self._decode(data), stored_size(data))
        except UndecodableImage as error:
            return error


@dataclass
class _Index:
    """The contents of a prepared folder."""

    kept: np.ndarray  # int64: the row in the source of every image
    heights: np.ndarray  # int32, like the widths; both are empty if there are no pixels
    widths: np.ndarray
    offsets: np.ndarray  # int64: where in the pixels every image begins, and where the last one ends
    skipped: list[str]  # a line for every image that was left out
    pixels: str = ""  # their checksum


def check_same_everywhere(source: ImageSource, index: _Index, processes: Processes) -> None:
    """Raise unless all machines have as many images and left out the same: each process orders its own."""
    left_out = hashlib.blake2b(index.kept.tobytes(), digest_size=8).hexdigest()
    found = processes.all_gather((len(source), len(index.kept), left_out))
    if others := [number for number, each in enumerate(found) if each != found[0]]:
        (total, usable, _), (total_there, usable_there, _) = found[0], found[others[0]]
        raise UserError(
            f"{source}: process {', '.join(map(str, others))} can use {usable_there:,} of its {total_there:,} images, "
            f"process 0 {usable:,} of {total:,}, and not the same ones: copy the same images to every machine"
        )


class _Images:
    """Images of one format; `kept` are their rows in the source, `skipped` has a line for every image left out."""

    def __init__(self, index: _Index, decoder: ImageDecoder) -> None:
        self.kept, self.skipped = index.kept, index.skipped
        self._index, self._decoder = index, decoder

    def __len__(self) -> int:
        return len(self.kept)

    def crops(self, indices: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
        """Return the images at `indices` as uint8 [n, channels, resolution, resolution].

        A larger image is cropped: `corners`, [n, 2] in [0, 1), is where between top and bottom, left and right.
        """
        size = self._decoder.resolution
        crops = np.empty((len(indices), self._decoder.channels, size, size), np.uint8)
        for crop, index, (down, right) in zip(crops, indices.tolist(), corners.tolist(), strict=True):
            image = self._image(index)
            _, height, width = image.shape
            top, left = int(down * (height - size + 1)), int(right * (width - size + 1))
            crop[:] = image[:, top : top + size, left : left + size]
        return torch.from_numpy(crops)


class InMemoryImages(_Images):
    """All images as one block of memory, which is a file that the processes of a machine share."""

    def __init__(self, index: _Index, decoder: ImageDecoder, pixels_file: Path) -> None:
        super().__init__(index, decoder)
        # Private, hence opened for reading only; as nobody writes, the pages are those of the file, held once.
        self._pixels = torch.from_file(str(pixels_file), shared=False, size=int(index.offsets[-1]), dtype=torch.uint8)
        self._all_square = (index.heights == index.widths).all()

    def crops(self, indices: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
        if not self._all_square:
            return super().crops(indices, corners)
        return self._pixels.view(len(self), self._decoder.channels, self._decoder.resolution, -1)[indices]

    def _image(self, index: int) -> np.ndarray:
        start, end = self._index.offsets[index : index + 2].tolist()
        return self._pixels[start:end].numpy().reshape(self._decoder.channels, self._index.heights[index], -1)


class StreamedImages(_Images):
    """Images that are decoded each time they are wanted; otherwise as `InMemoryImages`, to the last bit."""

    def _image(self, index: int) -> np.ndarray:
        row = int(self.kept[index])
        try:
            return self._decoder.decode(row)
        except UndecodableImage as error:
            where = self._decoder.source.describe(row)
            raise UserError(f"{where} has changed since the images were checked: {error}") from error


def _estimate_bytes(decoder: ImageDecoder) -> int:
    source, ratios = decoder.source, []
    for row in spread(len(source), 0 if decoder.center_crop else SAMPLED_HEADERS):
        with contextlib.suppress(UndecodableImage):
            size = stored_size(source.read(row))
            ratios.append(max(size) / min(size))
    mean_ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return int(len(source) * decoder.channels * decoder.resolution**2 * mean_ratio)


def _key(decoder: ImageDecoder, in_memory: bool) -> str:
    image_format = (decoder.resolution, decoder.channels, decoder.center_crop)
    identity = (FORMAT_VERSION, decoder.source.fingerprint, *image_format, in_memory)
    identity += () if decoder.interpolation == INTERPOLATION else (decoder.interpolation,)
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def _find(decoder: ImageDecoder, folder: Path) -> _Index | None:
    """Return the index of the folder, unless it is damaged or an image that it leaves out can be decoded by now.

    To read all pixels for their checksum is no loss of time: the training does it next.
    """
    if not folder.exists():
        return None
    index, is_whole = _read_index(folder), False
    with contextlib.suppress(OSError):
        is_whole = index is not None and file_checksum(folder / PIXELS) == index.pixels
    if is_whole:
        left_out = np.setdiff1d(np.arange(len(decoder.source)), index.kept, assume_unique=True)
        if all(isinstance(decoder.attempt(row), UndecodableImage) for row in left_out.tolist()):
            return index
    else:
        logger.warning("%s: the decoded images are not what was written there, and are made again", folder)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _prepare(decoder: ImageDecoder, folder: Path, keep_pixels: bool, num_workers: int, on_bad_image: str) -> _Index:
    """Decode every image once, and publish what came of it under the name `folder`."""
    # A name of its own, so that two runs can prepare the same set at the same time.
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        with open(unfinished / PIXELS, "wb") as file:
            index = _write_pixels(decoder, file if keep_pixels else None, num_workers, on_bad_image)
        # Before the rename, or a power cut could leave a complete-looking folder of empty files.
        sync(unfinished / PIXELS)
        index.pixels = file_checksum(unfinished / PIXELS)
        arrays = {name: value for name, value in vars(index).items() if isinstance(value, np.ndarray)}
        metadata = {"skipped": json.dumps(index.skipped), "pixels": index.pixels}
        save_safetensors(
            {name: torch.from_numpy(value) for name, value in arrays.items()}, unfinished / INDEX, metadata
        )
        _publish(unfinished, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the prepared images to {folder.parent} ({error.strerror or error}): "
            "make room there, or name another folder with --cache_dir"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return index


def _write_pixels(decoder: ImageDecoder, file: BinaryIO | None, num_workers: int, on_bad_image: str) -> _Index:
    """Decode every image once, and write the pixels if there is a file for them."""
    shapes, skipped, enlarged = [], [], []
    bytes_of_a_square = decoder.channels * decoder.resolution**2
    size = min(MOST_IMAGES_PER_CHUNK, max(1, MOST_BYTES_PER_CHUNK // bytes_of_a_square))
    rows, description = range(len(decoder.source)), "Checking images" if file is None else "Decoding"
    kept = np.ones(len(rows), bool)
    attempt = functools.partial(decoder.attempt, keep_pixels=file is not None)
    with contextlib.closing(map_in_chunks(attempt, rows, size, num_workers, description)) as chunks:
        for row, outcome in enumerate(itertools.chain.from_iterable(chunks)):
            if isinstance(outcome, UndecodableImage):
                kept[row] = False
                skipped.append(f"{decoder.source.describe(row)}: {outcome}")
                _refuse_bad_images(skipped, on_bad_image)
                continue
            if min(outcome.size) < decoder.resolution:
                enlarged.append((min(outcome.size), row))
            if outcome.pixels is not None:
                file.write(outcome.pixels.data)
                shapes.append(outcome.pixels.shape)
    if not kept.any():
        raise UserError(f"none of the {len(rows)} images can be decoded, the first being {skipped[0]}")
    if enlarged:
        side, row = min(enlarged)
        message = "%d of %d images are enlarged, as a side is below %d pixels; that of %s is %d"
        logger.warning(message, len(enlarged), kept.sum(), decoder.resolution, decoder.source.describe(row), side)
    shapes = np.array(shapes, np.int64).reshape(-1, 3)
    return _Index(
        kept=np.flatnonzero(kept),
        heights=shapes[:, 1].astype(np.int32),
        widths=shapes[:, 2].astype(np.int32),
        offsets=np.concatenate([[0], shapes.prod(axis=1).cumsum()]),
        skipped=skipped,
    )


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if _read_index(folder) is not None:
            return  # another run was first, with the same result
        # Otherwise what is in the way is damaged, or the error is a real one and comes again.
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _read_index(folder: Path) -> _Index | None:
    """Return the index of a folder if it is there, and complete."""
    try:
        tensors, metadata = load_safetensors(folder / INDEX)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        index = _Index(**arrays, skipped=json.loads(metadata["skipped"]), pixels=metadata["pixels"])
        return index if (folder / PIXELS).stat().st_size == index.offsets[-1] else None
    except (OSError, KeyError, TypeError, ValueError):  # damaged, or of another version
        return None


def _refuse_bad_images(skipped: list[str], on_bad_image: str) -> None:
    if skipped and on_bad_image == "fail":
        advice = "repair or remove this image, or leave such images out with --on_bad_image skip"
        raise UserError(f"cannot decode {skipped[0]}; {advice}")
