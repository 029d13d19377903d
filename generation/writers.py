"""Images on their way to the disk: encoded and written by threads, each file whole or not there.

    images/000123.png, or images/000000/000123.png in sub-folders of 1,000     png
    samples.npz     arr_0 [n, height, width, channels] and seeds               npz
    data/train-00000-of-00001.parquet                                          parquet

The last two are put together at the end from the files of parts/, one for each batch.
"""

from __future__ import annotations

import io
import os
import shutil
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common import interruption
from common.errors import RunFailed
from common.files import replace_folder
from common.machine import MOST_WORKERS

WRITTEN = ("images", "samples.npz", "data", ".data.tmp", ".data.old", "parts")  # by any of the formats
MOST_WAITING = 64  # pieces of work: the threads hold the generation up rather than fill the memory
IMAGES_PER_FOLDER = 1000
ROWS_PER_SHARD = 10_000


class ImageWriter:
    """Hands images to threads. What goes wrong there is raised here, as one line."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._threads = ThreadPoolExecutor(MOST_WORKERS, thread_name_prefix="writer")
        self._waiting: deque[Future] = deque()

    def existing(self) -> set[int]:
        """The seeds whose images are there."""
        raise NotImplementedError

    def write(self, seeds: list[int], images: torch.Tensor) -> None:
        """Begin to write uint8 images [n, channels, height, width]."""
        raise NotImplementedError

    def read(self, seeds: list[int]) -> torch.Tensor:
        """Images that are there."""
        raise NotImplementedError

    def finish(self) -> None:
        """All images are there: make of them what the format promises. The main process does this."""

    def wait(self) -> None:
        """Return when all that was begun is on the disk."""
        while self._waiting:
            self._result(self._waiting.popleft())

    def _begin(self, action: Callable, *arguments: object) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._result(self._waiting.popleft())
        self._waiting.append(self._threads.submit(action, *arguments))

    def _result(self, future: Future) -> None:
        with said_in_one_line(self.folder):
            future.result()

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(self, kind: type | None, *failure) -> None:
        """Also when something stopped the generation: what has been handed over is still written."""
        try:
            if kind is None or not issubclass(kind, RunFailed):
                self.wait()
        finally:
            self._threads.shutdown(cancel_futures=True)


class said_in_one_line:  # noqa: N801, it reads as a statement
    """A full disk, or one that is gone, is not a traceback."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise RunFailed(
                f"{self.folder}: cannot be written ({error.strerror or error}); the images that are there are whole, "
                f"and the same command continues with the missing ones"
            ) from error


class PngFolder(ImageWriter):
    def __init__(self, folder: Path, in_subfolders: bool):
        super().__init__(folder)
        self.in_subfolders = in_subfolders

    def path(self, seed: int) -> Path:
        folder = self.folder / "images"
        if self.in_subfolders:
            folder /= f"{seed - seed % IMAGES_PER_FOLDER:06d}"
        return folder / f"{seed:06d}.png"

    def existing(self) -> set[int]:
        root = self.folder / "images"
        folders = sorted(root.glob("[0-9]*/")) if self.in_subfolders else [root]
        return {
            int(entry.name.removesuffix(".png"))
            for folder in folders
            if folder.is_dir()
            for entry in os.scandir(folder)
            if entry.name.removesuffix(".png").isdecimal() and entry.stat().st_size > 0
        }

    def write(self, seeds: list[int], images: torch.Tensor) -> None:
        share = -(-len(seeds) // MOST_WORKERS)
        for start in range(0, len(seeds), share):
            self._begin(self._write, seeds[start : start + share], images[start : start + share])

    def _write(self, seeds: list[int], images: torch.Tensor) -> None:
        for seed, image in zip(seeds, images, strict=True):
            path = self.path(seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as aside:
                aside.write_bytes(as_png(image))
                interruption.fault_point("image")

    def read(self, seeds: list[int]) -> torch.Tensor:
        pixels = [np.atleast_3d(np.asarray(Image.open(self.path(seed)))) for seed in seeds]
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


class written_aside:  # noqa: N801
    """A file appears under its name when it is whole."""

    def __init__(self, path: Path):
        self.path, self.aside = path, path.with_name(f".{path.name}.tmp")

    def __enter__(self) -> Path:
        return self.aside

    def __exit__(self, kind: type | None, *failure) -> None:
        if kind is None:
            self.aside.replace(self.path)
        else:
            self.aside.unlink(missing_ok=True)


def as_png(image: torch.Tensor) -> bytes:
    """A uint8 image [channels, height, width], of 1, 3 or 4 channels."""
    pixels = image.permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(buffer, format="png")
    return buffer.getvalue()


class _Parts(ImageWriter):
    """A file for each batch, put together at the end."""

    suffix: str

    def existing(self) -> set[int]:
        return {seed for path in self._files() for seed in self._read_seeds(path)}

    def write(self, seeds: list[int], images: torch.Tensor) -> None:
        self._begin(self._write, seeds, images)

    def _write(self, seeds: list[int], images: torch.Tensor) -> None:
        folder = self.folder / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        digest = zlib.crc32(np.array(seeds).tobytes())
        with written_aside(folder / f"{seeds[0]:06d}-{seeds[-1]:06d}-{digest:08x}{self.suffix}") as aside:
            self._write_part(aside, seeds, images)
            interruption.fault_point("image")

    def read(self, seeds: list[int]) -> torch.Tensor:
        wanted, found = set(seeds), {}
        for path in self._files():
            held = self._read_seeds(path)
            if wanted.intersection(held):
                images = self._read_images(path)
                found.update({seed: images[place] for place, seed in enumerate(held) if seed in wanted})
        return torch.stack([found[seed] for seed in seeds])

    def finish(self) -> None:
        """Put the parts together, unless that has been done."""
        if (self.folder / "parts").is_dir():
            self._assemble()
            interruption.fault_point("assembled")
            shutil.rmtree(self.folder / "parts")

    def _files(self) -> list[Path]:
        """Where images are: the finished files and those of the parts."""
        return [*self._finished(), *sorted((self.folder / "parts").glob(f"[0-9]*{self.suffix}"))]

    def _in_order(self) -> Iterator[tuple[Path, list[int]]]:
        """Every seed once, ascending, as runs of places in one file after the other."""
        where = {}
        for path in self._files():
            for place, seed in enumerate(self._read_seeds(path)):
                where.setdefault(seed, (path, place))
        current, places = None, []
        for seed in sorted(where):
            path, place = where[seed]
            if path != current and places:
                yield current, places
                places = []
            current = path
            places.append(place)
        yield current, places

    def _finished(self) -> Iterable[Path]:
        raise NotImplementedError

    def _read_seeds(self, path: Path) -> list[int]:
        raise NotImplementedError

    def _read_images(self, path: Path) -> torch.Tensor:
        raise NotImplementedError

    def _write_part(self, path: Path, seeds: list[int], images: torch.Tensor) -> None:
        raise NotImplementedError

    def _assemble(self) -> None:
        raise NotImplementedError


class NpzFile(_Parts):
    suffix = ".npz"

    def _finished(self) -> list[Path]:
        path = self.folder / "samples.npz"
        return [path] if path.exists() else []

    def _read_seeds(self, path: Path) -> list[int]:
        with np.load(path) as file:
            return file["seeds"].tolist()

    def _read_images(self, path: Path) -> torch.Tensor:
        with np.load(path) as file:
            return torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2)

    def _write_part(self, path: Path, seeds: list[int], images: torch.Tensor) -> None:
        with path.open("wb") as file:
            np.savez(file, arr_0=images.permute(0, 2, 3, 1).numpy(), seeds=np.array(seeds))

    def _assemble(self) -> None:
        """Written as it is read, so that the whole need not fit in memory."""
        seeds = sorted(self.existing())
        with written_aside(self.folder / "samples.npz") as aside, zipfile.ZipFile(aside, "w") as archive:
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                header_written = False
                for path, places in self._in_order():
                    with np.load(path) as part:
                        images = part["arr_0"][places]
                    if not header_written:
                        header = {"descr": "|u1", "fortran_order": False, "shape": (len(seeds), *images.shape[1:])}
                        np.lib.format.write_array_header_1_0(file, header)
                        header_written = True
                    file.write(images.tobytes())
            with archive.open("seeds.npy", "w") as file:
                np.lib.format.write_array(file, np.array(seeds))


class ParquetFolder(_Parts):
    suffix = ".parquet"

    def _finished(self) -> list[Path]:
        return sorted((self.folder / "data").glob("train-*.parquet"))

    def _read_seeds(self, path: Path) -> list[int]:
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path, columns=["seed"])["seed"].to_pylist()

    def _read_images(self, path: Path) -> torch.Tensor:
        import pyarrow.parquet

        files = pyarrow.parquet.read_table(path, columns=["image"])["image"].to_pylist()
        pixels = [np.atleast_3d(np.asarray(Image.open(io.BytesIO(file["bytes"])))) for file in files]
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)

    def _write_part(self, path: Path, seeds: list[int], images: torch.Tensor) -> None:
        import pyarrow
        import pyarrow.parquet

        files = [{"bytes": as_png(image), "path": f"{seed:06d}.png"} for seed, image in zip(seeds, images, strict=True)]
        table = pyarrow.Table.from_pydict({"image": files, "seed": seeds}, schema=_schema())
        pyarrow.parquet.write_table(table, path)

    def _assemble(self) -> None:
        import pyarrow.parquet

        total = len(self.existing())
        shards = -(-total // ROWS_PER_SHARD)
        aside = self.folder / ".data.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        waiting, waiting_rows, number = [], 0, 0
        for path, places in self._in_order():
            table = pyarrow.parquet.read_table(path).take(places)
            waiting.append(table)
            waiting_rows += len(places)
            while waiting_rows >= ROWS_PER_SHARD or (number * ROWS_PER_SHARD + waiting_rows == total and waiting_rows):
                rows = pyarrow.concat_tables(waiting)
                name = f"train-{number:05d}-of-{shards:05d}.parquet"
                pyarrow.parquet.write_table(rows.slice(0, ROWS_PER_SHARD), aside / name)
                waiting, number = [rows.slice(ROWS_PER_SHARD)], number + 1
                waiting_rows = len(waiting[0])
        replace_folder(aside, self.folder / "data")


def _schema():
    """With what `datasets` needs to know that the bytes are images."""
    from datasets import Features, Value
    from datasets import Image as ImageFeature

    return Features({"image": ImageFeature(), "seed": Value("int64")}).arrow_schema


def open_writer(folder: Path, image_format: str, in_subfolders: bool) -> ImageWriter:
    if image_format == "png":
        return PngFolder(folder, in_subfolders)
    return {"npz": NpzFile, "parquet": ParquetFolder}[image_format](folder)
