"""Pictures beside the images: a grid, the way from noise, the way between two seeds, the nearest training images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from PIL import Image

from common.errors import UserError
from common.options import names_of
from common.progress import progress_bar
from common.randomness import standard_normal
from generation.engine import Job, Pace, RunningNetwork
from generation.generate_options import seeds_of
from generation.writers import said_in_one_line, written_aside
from image_data.grid import beside_names, image_grid, side_by_side
from image_data.sources import load_images
from image_data.store import load_training_images
from run_folder.config import TrainingConfig
from run_folder.saved_model import CONFIG
from schedulers.denoising_loop import NOISE_KEY, to_uint8

if TYPE_CHECKING:
    from common.processes import Processes
    from conditions.guidance import Layout
    from generation.generate_options import GenerationOptions
    from image_data.store import InMemoryImages, StreamedImages

SHOWN = 16  # images in a GIF or beside their neighbours
FRAMES = 50
INTERPOLATED = 11
IMAGES_COMPARED_AT_ONCE = 1024


def save(picture: Image.Image, path: Path, **how: object) -> None:
    with said_in_one_line(path), written_aside(path) as aside:
        picture.save(aside, format=path.suffix[1:], **how)


def draw_pictures(
    options: GenerationOptions,
    job: Job,
    processes: Processes,
    pace: Pace,
    shown: torch.Tensor,
    layout: Layout,
    folder: Path,
) -> None:
    """The grid, and what was asked for besides."""
    save(laid_out(shown, layout), folder / "grid.png")
    if options.progress_gif:
        save_progress(job, processes, pace, seeds_of(options)[:SHOWN], folder / "progress.gif")
    if options.nearest:
        training_images = load_images_of_run(
            job.model.home, job.model.shape, options.dataset_name, options.train_data_dir
        )
        count = min(options.nearest, len(training_images))
        save_nearest(shown[:SHOWN], training_images, count, folder / "nearest.png")


def laid_out(images: torch.Tensor, layout: Layout) -> Image.Image:
    """The images in their places, with the names of the rows if these have any."""
    places = torch.full((len(layout.places), *images.shape[1:]), 255, dtype=torch.uint8)
    places[[place for place, seed in enumerate(layout.places) if seed is not None]] = images
    return beside_names(image_grid(places, layout.columns), layout.row_names)


def save_progress(job: Job, processes: Processes, pace: Pace, seeds: list[int], path: Path) -> None:
    """The samples of some 50 denoising steps, as a GIF that rests at the end."""
    frames = []
    steps = len(job.method.timesteps)
    shown_at = {round(number * steps / FRAMES) for number in range(1, FRAMES + 1)}
    with progress_bar(total=steps, desc=path.name, leave=False) as bar:

        def on_step(number: int, samples: torch.Tensor) -> None:
            bar.update()
            if number in shown_at:
                frames.append(to_uint8(samples).cpu())

        RunningNetwork(job, processes, Pace(len(seeds), pace.channels_last)).generate(seeds, on_step)
    columns = max(1, round(len(seeds) ** 0.5))
    pictures = [image_grid(frame, columns) for frame in frames]
    save(
        pictures[0],
        path,
        save_all=True,
        append_images=pictures[1:],
        duration=[80] * (len(pictures) - 1) + [2000],
        loop=0,
    )


def save_interpolation(job: Job, processes: Processes, first: int, last: int, path: Path) -> None:
    """A row of pictures whose noise lies on the great circle between that of two seeds (Song et al. 2021, D.5)."""
    if job.method.adds_noise:
        raise UserError(f"--interpolate: {job.method.name} adds noise on the way; use --ddim with --eta 0")
    seeds = [first] * INTERPOLATED  # they stand for no noise here
    ends = torch.tensor([first, last], device=processes.device)
    noise = spherical(*standard_normal(NOISE_KEY, ends, 0, job.model.shape), torch.linspace(0, 1, INTERPOLATED))
    running = RunningNetwork(job, processes, Pace(INTERPOLATED))
    with progress_bar(total=len(job.method.timesteps), desc=path.name, leave=False) as bar:
        images = running.generate(seeds, lambda number, samples: bar.update(), noise)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(image_grid(images, columns=INTERPOLATED), path)


def spherical(first: torch.Tensor, last: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """From one noise to another, on the sphere where noise lies: a straight line would leave it by a third."""
    device, first, last = first.device, first.cpu().double(), last.cpu().double()  # not every device has float64
    angle = torch.acos((first * last).sum() / (first.norm() * last.norm()))
    fractions = fractions.double()[:, None, None, None]
    between = (((1 - fractions) * angle).sin() * first + (fractions * angle).sin() * last) / angle.sin()
    return between.float().to(device)


def save_nearest(
    images: torch.Tensor, training_images: InMemoryImages | StreamedImages, count: int, path: Path
) -> None:
    """Each image, and after a gap the training images that are nearest to it in pixels."""
    indices = nearest(images, training_images, count)
    neighbours = _whole(training_images, indices.flatten()).unflatten(0, indices.shape)
    rows = torch.cat([images[:, None], neighbours], dim=1)
    save(
        side_by_side(
            {
                "generated": image_grid(rows[:, 0], columns=1),
                "nearest training images, nearest first": image_grid(rows[:, 1:].flatten(0, 1), columns=count),
            }
        ),
        path,
    )


def nearest(images: torch.Tensor, training_images: InMemoryImages | StreamedImages, count: int) -> torch.Tensor:
    """Indices [n, count] of the training images at the least distance, a part of them at a time."""
    flat = images.flatten(1).float()
    best = torch.full((len(images), count), torch.inf)
    indices = torch.zeros((len(images), count), dtype=torch.long)
    parts = torch.arange(len(training_images)).split(IMAGES_COMPARED_AT_ONCE)
    for part in progress_bar(iterable=parts, desc="Nearest training images", leave=False):
        others = _whole(training_images, part).flatten(1).float()
        # The difference itself: |a|^2 - 2ab + |b|^2 loses what tells near images apart.
        distances = torch.stack([(others - image).square().sum(1) for image in flat])
        best, order = torch.cat([best, distances], dim=1).topk(count, largest=False)
        indices = torch.cat([indices, part.expand(len(images), -1)], dim=1).gather(1, order)
    return indices


def _whole(training_images: InMemoryImages | StreamedImages, indices: torch.Tensor) -> torch.Tensor:
    return training_images.crops(indices, torch.full((len(indices), 2), 0.5))


def load_images_of_run(
    run: Path, shape: tuple[int, int, int], dataset_name: str | None, train_data_dir: str | None
) -> InMemoryImages | StreamedImages:
    """Return the images that a run was trained on, or those that are named, in the model's size."""
    config = TrainingConfig(
        dataset_name=dataset_name, train_data_dir=train_data_dir, center_crop=True, on_bad_image="skip"
    )
    if not (dataset_name or train_data_dir):
        if not (run / CONFIG).exists():
            raise UserError(
                "--nearest: the model is not of a run; name its images with --dataset_name or --train_data_dir"
            )
        values = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        names = names_of([TrainingConfig])
        config = TrainingConfig(**{name: value for name, value in values.items() if name in names})
    source = load_images(config)
    channels, height, width = shape
    if height != width:
        raise UserError("--nearest: compares square images only")
    config = replace(config, resolution=height, channels=str(channels), dataloader_num_workers=None)
    return load_training_images(config, source).images
