#!/usr/bin/env python
"""Four epochs of a streamed image folder, beside torchvision's ImageFolder and torch's DataLoader.

    python -m benchmarks.streaming

Photos of random smooth shapes are written as JPEG. Both decode them anew at every epoch by Pillow, with as many
workers: resize the shorter side to 64 pixels, antialiased and bicubic, crop at random, mirror at random, as floats in
[-1, 1]. Listing the files counts, and so does the project's look at every photo before the first epoch; imports do not.
The main process of both has one thread: it hardly works, and OpenMP's others would wait on the workers' cores.

A third way reads, decodes and resizes the photos by Pillow and does nothing else with them: what is left to be won.

Memory is that of the process and its workers (PSS: what they share counts once), at its peak, over one epoch of ten
names for each photo and over ten epochs of the photos, so that as many batches are made.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from benchmarks.measuring import Orders, Result, Row, Spread, Worker, in_turns, parser, ratios, write_result
from common.errors import run_script
from common.machine import default_num_workers

EPOCHS, BATCH_SIZE, RESOLUTION, PHOTO = 4, 64, 64, (160, 120)
WARM_UP = BATCH_SIZE  # photos, which only have everything imported
SECONDS_BETWEEN_LOOKS = 0.5  # at the memory, which takes some milliseconds
HERE, PEER, PILLOW = "here", "DataLoader and ImageFolder", "Pillow"
FASTER, MOST_BYTES_AN_IMAGE = 1.2, 1024
ROUNDS = 2
NAMES = 10  # of each photo, where memory is measured


def write_photos(folder: Path, count: int) -> None:
    """Write photos with little detail, in one class."""
    random = np.random.default_rng(0)
    (folder / "photos").mkdir(parents=True)
    for number in range(count):
        small = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        photo = small.resize(PHOTO, Image.Resampling.BICUBIC)
        photo.save(folder / "photos" / f"{number:06d}.jpg", quality=90)


def link_photos(photos: Path, folder: Path) -> None:
    """Give the photos so many names, in one class."""
    (folder / "photos").mkdir(parents=True)
    for photo in photos.rglob("*.jpg"):
        for number in range(NAMES):
            os.link(photo, folder / "photos" / f"{photo.stem}-{number}.jpg")


def here(folder: Path, epochs: int, workers: int, cache: Path) -> int:
    """Take epochs of batches as the training does, and return the number of images."""
    import torch

    from common.processes import start_processes
    from conditions.condition import NoCondition
    from image_data.batches import TrainingBatches
    from image_data.sources import open_source
    from image_data.store import load_training_images
    from run_folder.config import parse_config
    from schedulers.loss import normalise

    flags = [str(folder), f"--resolution={RESOLUTION}", f"--num_workers={workers}", f"--cache_dir={cache}"]
    config = parse_config([*flags, "--interpolation=bicubic", "--in_memory_limit_gb=0"])
    processes = start_processes(config)
    torch.set_num_threads(1)
    data = load_training_images(config, open_source(config, processes), processes)
    batches = TrainingBatches(data, NoCondition(), 0, BATCH_SIZE, 1, processes)
    count, iterator = 0, batches.from_step(0)
    for _ in range(epochs * batches.steps_per_epoch):
        count += len(normalise(next(iterator).images))
    iterator.close()
    return count


def there(folder: Path, epochs: int, workers: int, _: Path) -> int:
    """Do the same as most training scripts do."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    torch.set_num_threads(1)
    steps = [transforms.Resize(RESOLUTION, transforms.InterpolationMode.BICUBIC), transforms.RandomCrop(RESOLUTION)]
    steps += [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])]
    images = ImageFolder(str(folder), transforms.Compose(steps))
    loader = DataLoader(images, BATCH_SIZE, shuffle=True, num_workers=workers, drop_last=True)
    return sum(len(batch) for _ in range(epochs) for batch, _ in loader)


def resized(path: Path) -> None:
    """Take of Pillow what both ways take of it."""
    with Image.open(path) as image:
        photo = image.convert("RGB")
    scale = RESOLUTION / min(photo.size)
    photo.resize([round(side * scale) for side in photo.size], Image.Resampling.BICUBIC)


def pillow(folder: Path, epochs: int, workers: int, _: Path) -> int:
    """Decode and resize epochs of photos, of which nothing is kept."""
    photos = sorted(folder.rglob("*.jpg")) * epochs
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return sum(1 for _ in pool.imap(resized, photos, chunksize=BATCH_SIZE))


WAYS = {HERE: here, PEER: there, PILLOW: pillow}


def work(way: str, workers: int) -> None:
    """Serve a `Worker`: an order is a folder of photos and one for caches."""
    import psutil

    orders = Orders()
    orders.answer()
    peak = 0

    def watch() -> None:
        nonlocal peak
        process = psutil.Process(os.getpid())
        while True:
            family, held = [process, *process.children(recursive=True)], 0
            for member in family:
                try:
                    held += member.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            peak = max(peak, held)
            time.sleep(SECONDS_BETWEEN_LOOKS)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        folder, cache, epochs = orders.next().split("\t")
        peak = 0
        start = time.perf_counter()
        count = WAYS[way](Path(folder), int(epochs), workers, Path(cache))
        orders.answer(seconds=time.perf_counter() - start, images=count, peak=peak)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--images", type=int, default=10_000, help="photos (default: %(default)s)")
    arguments.add_argument("--worker", nargs=2, help="used by the benchmark itself")
    options = arguments.parse_args()
    if options.worker:
        work(options.worker[0], int(options.worker[1]))
    count, rounds = (256, 1) if options.quick else (options.images, ROUNDS)
    workers = default_num_workers(1)
    answers: dict[str, list[dict]] = {way: [] for way in WAYS}
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        few, many, first = folder / "few", folder / "many", folder / "first"
        write_photos(few, count)
        write_photos(first, WARM_UP)
        link_photos(few, many)

        def once(way: str, photos: Path, epochs: int) -> dict:
            """Start a process for it, whose memory is of nothing else, and let it import what it needs."""
            name = f"{way}-{len(answers[way])}".replace(" ", "-")
            with closing(
                Worker(way, "benchmarks.streaming", ["--worker", way, workers], folder / f"{name}.log")
            ) as one:
                one.answer()
                one.order(f"{first}\t{folder / name}\t1")
                answer = one.order(f"{photos}\t{folder / name}\t{epochs}")
            answers[way].append({**answer, "photos": photos.name, "epochs": epochs})
            return answer

        def rate(way: str) -> float:
            answer = once(way, few, EPOCHS)
            return answer["images"] / answer["seconds"]

        rates = in_turns({way: lambda way=way: rate(way) for way in WAYS}, rounds, warm_up=0)
        growth = {
            way: (once(way, many, 1)["peak"] - once(way, few, NAMES)["peak"]) / (count * (NAMES - 1))
            for way in (HERE, PEER)
        }
    columns = f"{Spread.of(rates[HERE]).median:,.0f} images/s", f"{PEER}: {Spread.of(rates[PEER]).median:,.0f} images/s"
    rows = [
        Row(
            f"a streamed image folder, {count:,} photos, {EPOCHS} epochs, {workers} worker(s)",
            *columns,
            ratios(rates[HERE], rates[PEER]),
            to_reach=FASTER,
        ),
        Row(
            "of which Pillow's reading, decoding and resizing take, and nothing else",
            f"{Spread.of(rates[PILLOW]).median:,.0f} images/s",
            columns[1],
            ratios(rates[PILLOW], rates[PEER]),
        ),
        Row(
            f"memory per additional photo, up to {count * NAMES:,}",
            f"{growth[HERE]:,.0f} bytes",
            f"{PEER}: {growth[PEER]:,.0f} bytes",
            Spread.of([growth[HERE]]),
            "bytes",
            MOST_BYTES_AN_IMAGE,
            "at most",
        ),
    ]
    write_result("streaming", Result(rows, {"runs": answers}), options.output_dir)


if __name__ == "__main__":
    run_script(main)
