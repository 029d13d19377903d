"""Images on their way to the disk: encoded and written by threads, each file whole or not there.

    images/000123.png, or images/000000/000123.png in sub-folders of 1,000     png
    samples.npz     arr_0 [n, height, width, channels] and seeds               npz
    data/train-00000-of-00001.parquet                                          parquet

The last two are put together at the end from the files of parts/, one for each batch.
"""

import io
import itertools
import shutil
import zipfile
import zlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet

from common.errors import RunFailed
from common.files import replace_folder, written_aside
from common.interruption import fault_point
from common.machine import MOST_WORKERS

WRITTEN = ("images", "samples.npz", "data", ".data.tmp", ".data.old", "parts")  # by any of the formats
MOST_PENDING = 64  # pieces of work: the threads hold the generation up rather than fill the memory
IMAGES_PER_FOLDER = 1000
ROWS_PER_SHARD = 10_000

Row = tuple[Path, int]  # a file with several images, and the place of one of them in it


@contextmanager
def one_line_if_unwritable(folder: Path) -> Iterator[None]:
    """Raise `RunFailed` instead of a traceback where a disk is full or gone."""
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{folder}: cannot be written ({error.strerror or error}); the images that are there are whole, "
            f"and the same command continues with the missing ones"
        ) from error


class ImageWriter(AbstractContextManager):
    """Hands images to threads. What goes wrong there is raised here, as one line."""

    def __init__(self, folder: Path, in_subfolders: bool):
        self.folder, self.in_subfolders = folder, in_subfolders
        self._threads = ThreadPoolExecutor(MOST_WORKERS, thread_name_prefix="writer")
        self._pending: deque[Future] = deque()

    @abstractmethod
    def existing(self) -> set[int]:
        """Return the seeds whose images are there."""

    @abstractmethod
    def write(self, seeds: list[int], images: torch.Tensor) -> None:
        """Begin to write uint8 images [n, channels, height, width]."""

    @abstractmethod
    def read(self, seeds: list[int]) -> torch.Tensor:
        """Read images that are there."""

    def finish(self) -> None:  # noqa: B027, a format need not
        """Make what the format promises of the images, which are all there; for the main process."""

    def wait(self, most_pending: int = 0) -> None:
        """Wait until at most so many pieces of what was begun are not on the disk yet."""
        while self._pending and (len(self._pending) > most_pending or self._pending[0].done()):
            with one_line_if_unwritable(self.folder):
                self._pending.popleft().result()

    def _begin(self, action: Callable, *arguments: object) -> None:
        self.wait(MOST_PENDING - 1)
        self._pending.append(self._threads.submit(action, *arguments))

    def __exit__(self, kind: type | None, *failure) -> None:
        """Write what has been handed over, also when something stopped the generation."""
        try:
            if kind is None or not issubclass(kind, RunFailed):
                self.wait()
        finally:
            self._threads.shutdown(cancel_futures=True)


class PngFolder(ImageWriter):
    """A file for each image."""

    def path(self, seed: int) -> Path:
        subfolder = f"{seed - seed % IMAGES_PER_FOLDER:06d}" if self.in_subfolders else ""
        return self.folder / "images" / subfolder / f"{seed:06d}.png"

    def existing(self) -> set[int]:
        files = (self.folder / "images").glob("*/*.png" if self.in_subfolders else "*.png")
        return {int(path.stem) for path in files if path.stem.isdecimal() and path.stat().st_size > 0}

    def write(self, seeds: list[int], images: torch.Tensor) -> None:
        share = -(-len(seeds) // MOST_WORKERS)
        for start in range(0, len(seeds), share):
            self._begin(self._write, seeds[start : start + share], images[start : start + share])

    def _write(self, seeds: list[int], images: torch.Tensor) -> None:
        for seed, image in zip(seeds, images, strict=True):
            path = self.path(seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(path, durable=False) as aside:
                aside.write_bytes(as_png(image))
                fault_point("image")

    def read(self, seeds: list[int]) -> torch.Tensor:
        return decode(self.path(seed) for seed in seeds)


def as_png(image: torch.Tensor) -> bytes:
    """Encode a uint8 image [channels, height, width], of 1, 3 or 4 channels."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(buffer, format="png")
    return buffer.getvalue()


def decode(files: Iterable[Path | io.BytesIO]) -> torch.Tensor:
    """Decode images of one size, [n, channels, height, width]."""
    pixels = [np.atleast_3d(np.asarray(Image.open(file))) for file in files]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


class PartsWriter(ImageWriter):
    """A file for each batch, put together at the end. A format reads and writes such a part, and assembles all."""

    suffix: str
    finished: str  # what matches the files at the end

    def existing(self) -> set[int]:
        return set(self._rows())

    def write(self, seeds: list[int], images: torch.Tensor) -> None:
        self._begin(self._write, seeds, images)

    def _write(self, seeds: list[int], images: torch.Tensor) -> None:
        folder = self.folder / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        digest = zlib.crc32(np.array(seeds).tobytes())
        path = folder / f"{seeds[0]:06d}-{seeds[-1]:06d}-{digest:08x}{self.suffix}"
        with written_aside(path, durable=False) as aside:
            self._write_part(aside, seeds, images)
            fault_point("image")

    def read(self, seeds: list[int]) -> torch.Tensor:
        ascending, rows = sorted(seeds), self._rows()
        images = torch.cat([self._read_images(*run) for run in runs(rows[seed] for seed in ascending)])
        return images[np.searchsorted(ascending, seeds)]

    def finish(self) -> None:
        """Put the parts together, unless that has been done."""
        if (self.folder / "parts").is_dir():
            self._assemble(self._rows())
            fault_point("assembled")
            shutil.rmtree(self.folder / "parts")

    def _rows(self) -> dict[int, Row]:
        """Return where the image of each seed is, in the finished files or in the parts; ascending."""
        rows: dict[int, Row] = {}
        parts = sorted((self.folder / "parts").glob(f"[0-9]*{self.suffix}"))
        for path in [*sorted(self.folder.glob(self.finished)), *parts]:
            for place, seed in enumerate(self._read_seeds(path)):
                rows.setdefault(seed, (path, place))
        return dict(sorted(rows.items()))


def runs(rows: Iterable[Row]) -> Iterator[tuple[Path, list[int]]]:
    """Group rows that follow one another in one file."""
    for path, run in itertools.groupby(rows, key=lambda row: row[0]):
        yield path, [place for _, place in run]


class NpzFile(PartsWriter):
    suffix, finished = ".npz", "samples.npz"

    def _read_seeds(self, path: Path) -> list[int]:
        with np.load(path) as file:
            return file["seeds"].tolist()

    def _read_images(self, path: Path, places: list[int]) -> torch.Tensor:
        with np.load(path) as file:
            return torch.from_numpy(file["arr_0"][places]).permute(0, 3, 1, 2)

    def _write_part(self, path: Path, seeds: list[int], images: torch.Tensor) -> None:
        with path.open("wb") as file:
            np.savez(file, arr_0=images.permute(0, 2, 3, 1).numpy(), seeds=np.array(seeds))

    def _assemble(self, rows: dict[int, Row]) -> None:
        """Write as it is read, so that the whole need not fit in memory."""
        with written_aside(self.folder / "samples.npz") as aside, zipfile.ZipFile(aside, "w") as archive:
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                for number, (path, places) in enumerate(runs(rows.values())):
                    images = self._read_images(path, places).permute(0, 2, 3, 1).numpy()
                    if number == 0:
                        header = {"descr": "|u1", "fortran_order": False, "shape": (len(rows), *images.shape[1:])}
                        np.lib.format.write_array_header_1_0(file, header)
                    file.write(images.tobytes())
            with archive.open("seeds.npy", "w") as file:
                np.lib.format.write_array(file, np.array(list(rows)))


class ParquetFolder(PartsWriter):
    suffix, finished = ".parquet", "data/train-*.parquet"

    def _read_seeds(self, path: Path) -> list[int]:
        return parquet.read_table(path, columns=["seed"])["seed"].to_pylist()

    def _read_images(self, path: Path, places: list[int]) -> torch.Tensor:
        files = parquet.read_table(path, columns=["image"]).take(places)["image"].to_pylist()
        return decode(io.BytesIO(file["bytes"]) for file in files)

    def _write_part(self, path: Path, seeds: list[int], images: torch.Tensor) -> None:
        import datasets

        # With what `datasets` needs to know that the bytes are images.
        schema = datasets.Features({"image": datasets.Image(), "seed": datasets.Value("int64")}).arrow_schema
        files = [{"bytes": as_png(image), "path": f"{seed:06d}.png"} for seed, image in zip(seeds, images, strict=True)]
        parquet.write_table(pyarrow.Table.from_pydict({"image": files, "seed": seeds}, schema=schema), path)

    def _assemble(self, rows: dict[int, Row]) -> None:
        aside = self.folder / ".data.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        in_order, count = list(rows.values()), -(-len(rows) // ROWS_PER_SHARD)
        for number in range(count):
            shard = runs(in_order[number * ROWS_PER_SHARD : (number + 1) * ROWS_PER_SHARD])
            table = pyarrow.concat_tables([parquet.read_table(path).take(places) for path, places in shard])
            parquet.write_table(table, aside / f"train-{number:05d}-of-{count:05d}.parquet")
        replace_folder(aside, self.folder / "data")


WRITERS: dict[str, type[ImageWriter]] = {"png": PngFolder, "npz": NpzFile, "parquet": ParquetFolder}
