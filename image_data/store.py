"""Decoded images held ready: in memory when they fit, otherwise decoded while training goes on.

What is prepared is kept in a folder of the cache, complete or not at all:

    <cache_dir>/<key>/pixels                 the images one after the other, uint8 [channels, height, width] each
    <cache_dir>/<key>/index.safetensors      which rows they are, their places and sizes, and what was left out

Of a set that does not fit no pixels are kept, only the result of having looked at every image once.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch.utils.data import Dataset

from common.errors import UserError
from common.progress import progress_bar
from image_data.decode import UndecodableImage, aspect_ratio, decode_image
from image_data.sources import ImageSource, spread
from image_data.workers import load_in_workers

FORMAT_VERSION = 1
PIXELS, INDEX = "pixels", "index.safetensors"
MOST_IMAGES_PER_ITEM, MOST_BYTES_PER_ITEM = 32, 4 * 2**20  # what a worker decodes at a time
SAMPLED_HEADERS = 64


def prepare_images(
    source: ImageSource,
    *,
    resolution: int,
    channels: int,
    center_crop: bool,
    memory_limit_bytes: int,
    num_workers: int,
    on_bad_image: Literal["fail", "skip"] = "fail",
    cache_dir: Path,
    work_here: bool,
    wait: Callable[[], None],
) -> "InMemoryImages | StreamedImages":
    """Make the images of `source` ready for training, or find them ready in `cache_dir`.

    Every process calls this with the same arguments, apart from `work_here`, which is true on one process a node: it
    decodes. `wait` is a barrier. The others map the same file into memory, so that a node holds the pixels once.
    """
    kind = _Kind(resolution, channels, center_crop)
    in_memory = _estimate_bytes(source, kind) <= memory_limit_bytes
    folder = Path(cache_dir) / _key(source, kind, in_memory)
    if work_here:
        decoded = _DecodedRows(source, kind, keep_pixels=in_memory)
        index = _find_or_prepare(decoded, folder, num_workers, on_bad_image)
        _refuse_bad_images(index.skipped, on_bad_image)
    wait()
    index = _read_index(folder)
    if index is None:
        raise UserError(
            f"--cache_dir {cache_dir} must be a folder that all processes of a machine share: "
            f"{folder.name} is not in it after one of them has prepared it"
        )
    _refuse_bad_images(index.skipped, on_bad_image)
    return InMemoryImages(index, folder / PIXELS, kind) if in_memory else StreamedImages(index, source, kind)


class InMemoryImages:
    """All images as one block of memory, which is a file that the processes of a node share."""

    def __init__(self, index: "_Index", pixels_file: Path, kind: "_Kind") -> None:
        self.kept, self.skipped = index.kept, index.skipped  # rows of the source; a line for every image left out
        self.resolution, self.channels = kind.resolution, kind.channels
        self._index = index
        # Private, hence opened for reading only; as nobody writes, the pages are those of the file, held once.
        self._pixels = torch.from_file(str(pixels_file), shared=False, size=int(index.offsets[-1]), dtype=torch.uint8)
        self._squares = None
        if (index.heights == kind.resolution).all() and (index.widths == kind.resolution).all():
            self._squares = self._pixels.view(-1, kind.channels, kind.resolution, kind.resolution)

    def __len__(self) -> int:
        return len(self.kept)

    def crops(self, indices: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
        """The images at `indices` as uint8 [n, channels, resolution, resolution].

        A larger image is cropped: `corners`, [n, 2] in [0, 1), is where between top and bottom, left and right.
        """
        if self._squares is not None:
            return self._squares[indices]
        images = [self._image(index) for index in indices.tolist()]
        return _random_crops(images, corners, self.resolution)

    def _image(self, index: int) -> torch.Tensor:
        start, end = self._index.offsets[index : index + 2].tolist()
        return self._pixels[start:end].view(self.channels, int(self._index.heights[index]), -1)


class StreamedImages:
    """Images that are decoded each time they are wanted; otherwise as `InMemoryImages`, to the last bit."""

    def __init__(self, index: "_Index", source: ImageSource, kind: "_Kind") -> None:
        self.kept, self.skipped = index.kept, index.skipped
        self.resolution, self.channels = kind.resolution, kind.channels
        self._source, self._kind = source, kind

    def __len__(self) -> int:
        return len(self.kept)

    def crops(self, indices: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
        """As `InMemoryImages.crops`."""
        images = [self._image(row) for row in self.kept[indices].tolist()]
        return _random_crops(images, corners, self.resolution)

    def _image(self, row: int) -> torch.Tensor:
        try:
            return torch.from_numpy(self._kind.decode(self._source, row))
        except UndecodableImage as error:
            where = self._source.describe(row)
            raise UserError(f"{where} has changed since the images were checked: {error}") from error


def _random_crops(images: list[torch.Tensor], corners: torch.Tensor, size: int) -> torch.Tensor:
    crops = []
    for image, (down, right) in zip(images, corners.tolist(), strict=True):
        _, height, width = image.shape
        top, left = int(down * (height - size + 1)), int(right * (width - size + 1))
        crops.append(image[:, top : top + size, left : left + size])
    return torch.stack(crops)


@dataclass(frozen=True)
class _Kind:
    """What decoding makes of an image file."""

    resolution: int
    channels: int
    center_crop: bool

    @property
    def bytes_of_a_square(self) -> int:
        return self.channels * self.resolution**2

    def decode(self, source: ImageSource, row: int) -> np.ndarray:
        return decode_image(source.read(row), self.channels, self.resolution, self.center_crop)


@dataclass
class _Index:
    """What a prepared folder holds."""

    kept: np.ndarray  # int64: the row in the source of every image
    heights: np.ndarray  # int32, like the widths; both are empty if there are no pixels
    widths: np.ndarray
    offsets: np.ndarray  # int64: where in the pixels every image begins, and where the last one ends
    skipped: list[str]  # a line for every image that was left out

    def to_bytes(self) -> bytes:
        tensors = {name: getattr(self, name) for name in ("kept", "heights", "widths", "offsets")}
        return save(tensors, {"skipped": json.dumps(self.skipped)})


class _DecodedRows(Dataset):
    """For some rows what decoding makes of each: its pixels (or nothing, if they are not kept) or the error."""

    def __init__(self, source: ImageSource, kind: _Kind, keep_pixels: bool) -> None:
        self.source, self.kind, self.keep_pixels = source, kind, keep_pixels

    def __getitem__(self, rows: Iterable[int]) -> list[np.ndarray | None | UndecodableImage]:
        return [self._outcome(row) for row in rows]

    def _outcome(self, row: int) -> np.ndarray | None | UndecodableImage:
        try:
            pixels = self.kind.decode(self.source, row)
        except UndecodableImage as error:
            return error
        return pixels if self.keep_pixels else None


def _estimate_bytes(source: ImageSource, kind: _Kind) -> int:
    ratios = []
    for row in spread(len(source), 0 if kind.center_crop else SAMPLED_HEADERS):
        with contextlib.suppress(UndecodableImage):
            ratios.append(aspect_ratio(source.read(row)))
    mean_ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return int(len(source) * kind.bytes_of_a_square * mean_ratio)


def _key(source: ImageSource, kind: _Kind, in_memory: bool) -> str:
    identity = (FORMAT_VERSION, source.fingerprint, kind.resolution, kind.channels, kind.center_crop, in_memory)
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def _find_or_prepare(decoded: _DecodedRows, folder: Path, num_workers: int, on_bad_image: str) -> _Index:
    index = _read_index(folder)
    if index is not None:
        left_out = np.setdiff1d(np.arange(len(decoded.source)), index.kept)
        if all(isinstance(outcome, UndecodableImage) for outcome in decoded[left_out.tolist()]):
            return index
        # Somebody has put right what made an image unreadable, without changing the file.
        shutil.rmtree(folder, ignore_errors=True)
    return _prepare(decoded, folder, num_workers, on_bad_image)


def _prepare(decoded: _DecodedRows, folder: Path, num_workers: int, on_bad_image: str) -> _Index:
    """Decode every image once, and publish what came of it under the name `folder`."""
    # A name of its own, so that two runs can prepare the same set at the same time.
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        with open(unfinished / PIXELS, "wb") as file:
            index = _write_pixels(decoded, file, num_workers, on_bad_image)
            _to_disk(file)
        with open(unfinished / INDEX, "wb") as file:
            file.write(index.to_bytes())
            _to_disk(file)
        _publish(unfinished, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the prepared images to {folder.parent} ({error.strerror or error}): "
            "make room there, or name another folder with --cache_dir"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return index


def _write_pixels(decoded: _DecodedRows, file: BinaryIO, num_workers: int, on_bad_image: str) -> _Index:
    kept, heights, widths, offsets, skipped = [], [], [], [0], []
    with contextlib.closing(_decode_all(decoded, num_workers)) as outcomes:
        for row, outcome in outcomes:
            if isinstance(outcome, UndecodableImage):
                skipped.append(f"{decoded.source.describe(row)}: {outcome}")
                _refuse_bad_images(skipped, on_bad_image)
                continue
            kept.append(row)
            if outcome is not None:
                file.write(outcome.data)
                heights.append(outcome.shape[1])
                widths.append(outcome.shape[2])
                offsets.append(offsets[-1] + outcome.nbytes)
    if not kept:
        raise UserError(f"none of the {len(decoded.source)} images can be decoded, the first being {skipped[0]}")
    return _Index(
        kept=np.array(kept, np.int64),
        heights=np.array(heights, np.int32),
        widths=np.array(widths, np.int32),
        offsets=np.array(offsets, np.int64),
        skipped=skipped,
    )


def _decode_all(decoded: _DecodedRows, num_workers: int) -> Iterator[tuple[int, np.ndarray | None | UndecodableImage]]:
    count = len(decoded.source)
    size = min(MOST_IMAGES_PER_ITEM, max(1, MOST_BYTES_PER_ITEM // decoded.kind.bytes_of_a_square))
    items = [range(start, min(start + size, count)) for start in range(0, count, size)]
    with (
        contextlib.closing(load_in_workers(decoded, items, num_workers)) as results,
        progress_bar(total=count, desc="Decoding" if decoded.keep_pixels else "Checking images", unit="images") as bar,
    ):
        for rows, outcomes in zip(items, results, strict=True):
            yield from zip(rows, outcomes, strict=True)
            bar.update(len(rows))


def _refuse_bad_images(skipped: list[str], on_bad_image: str) -> None:
    if skipped and on_bad_image == "fail":
        raise UserError(
            f"cannot decode {skipped[0]}; "
            "repair or remove this image, or leave such images out with --on_bad_image skip"
        )


def _to_disk(file: BinaryIO) -> None:
    # Before the rename, or a power cut could leave a complete-looking folder of empty files.
    file.flush()
    os.fsync(file.fileno())


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
    """The index of a folder if it is there, and complete."""
    try:
        with safe_open(folder / INDEX, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
            index = _Index(**tensors, skipped=json.loads(file.metadata()["skipped"]))
        return index if (folder / PIXELS).stat().st_size == index.offsets[-1] else None
    except (OSError, SafetensorError):
        return None
