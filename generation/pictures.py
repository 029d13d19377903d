"""Pictures beside the images: a grid, the way from noise, the way between two seeds, the nearest training images."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from common.errors import UserError, user_errors
from common.files import check_folder, write_atomically, written_aside
from common.processes import Processes
from common.progress import progress_bar
from common.randomness import standard_normal
from conditions.guidance import Layout
from generation.engine import InferenceSettings, Job, RunningNetwork
from generation.generate_options import OutputOptions, seeds_of
from generation.writers import one_line_if_unwritable
from image_data.decode import UndecodableImage, decode_image
from image_data.grid import beside_names, image_grid, side_by_side
from image_data.sources import ImageSource, load_images
from image_data.store import InMemoryImages, StreamedImages, load_training_images
from run_folder.config import TrainingConfig
from run_folder.folder import NEAREST, RunFolder
from run_folder.saved_model import SavedModel
from schedulers.denoising import NOISE_KEY, StepNoise, to_uint8

SHOWN = 16  # images in a GIF or beside their neighbours
FRAMES = 50
ESTIMATES = 12  # of each image in progressive.png
INTERPOLATED = 11
INTERPOLATIONS = ("interpolation-*.png", "between-*.png")  # the files that the two of them write
IMAGES_COMPARED_AT_ONCE = 1024

Compared = tuple[TrainingConfig, ImageSource]  # training images, which have been found and not been decoded


def save(picture: Image.Image, path: Path, **options: object) -> None:
    """Write a picture, whole or not at all."""
    with one_line_if_unwritable(path), written_aside(path) as aside:
        picture.save(aside, format=path.suffix[1:], **options)


def save_grid(images: torch.Tensor, layout: Layout, path: Path) -> None:
    """Draw the images in their places, with the names of the rows if these have any."""
    places = torch.full((len(layout.places), *images.shape[1:]), 255, dtype=torch.uint8)
    places[[place for place, seed in enumerate(layout.places) if seed is not None]] = images
    save(beside_names(image_grid(places, layout.columns), layout.row_names), path)


def save_progress(job: Job, seeds: list[int], processes: Processes, settings: InferenceSettings, path: Path) -> None:
    """Draw the samples of some 50 denoising steps, as a GIF that rests at the end."""
    steps, columns, frames = len(job.method.timesteps), max(1, round(len(seeds) ** 0.5)), []
    shown_at = {round(number * steps / FRAMES) for number in range(1, FRAMES + 1)}
    with progress_bar(total=steps, desc=path.name, leave=False) as bar:

        def on_step(number: int, samples: torch.Tensor) -> None:
            bar.update()
            if number in shown_at:
                frames.append(image_grid(to_uint8(samples).cpu(), columns))

        settings = replace(settings, batch_size=len(seeds), compile=False)
        RunningNetwork(job, processes, settings).generate(seeds, on_step)
    first, *others = frames
    save(first, path, save_all=True, append_images=others, duration=[80] * len(others) + [2000], loop=0)


def save_progressive(job: Job, seeds: list[int], processes: Processes, settings: InferenceSettings, path: Path) -> None:
    """Draw the predicted x_0 on the way from noise, a row for each image (Ho et al. 2020, Figure 6)."""
    method, steps, columns = copy(job.method), len(job.method.timesteps), {}
    shown_at = {1 + round(place * (steps - 1) / (ESTIMATES - 1)) for place in range(ESTIMATES)}
    with progress_bar(total=steps, desc=path.name, leave=False) as bar:

        def step(model_output: torch.Tensor, number: int, sample: torch.Tensor, noise: StepNoise) -> torch.Tensor:
            bar.update()
            if number in shown_at:
                t = method.timesteps[number - 1]
                seen = to_uint8(method.scheduler.predict_original(model_output, t, sample)).cpu()
                columns[f"t = {t}"] = image_grid(seen, columns=1)
            return job.method.step(model_output, number, sample, noise)

        method.step = step
        settings = replace(settings, batch_size=len(seeds), compile=False)
        RunningNetwork(replace(job, method=method), processes, settings).generate(seeds, lambda number, samples: None)
    save(side_by_side(columns), path)


def save_interpolation(job: Job, options: OutputOptions, processes: Processes, folder: Path) -> Path:
    """Draw a row of pictures whose noise lies on the great circle between that of two seeds (Song et al. 2021, D.5)."""
    first, last = options.interpolate
    path = folder / f"interpolation-{first}-{last}.png"
    if job.method.adds_noise:
        raise UserError(f"--interpolate: {job.method.name} adds noise on the way; use --ddim with --eta 0")
    check_folder(folder)
    ends = torch.tensor([first, last], device=processes.device)
    noise = spherical(*standard_normal(NOISE_KEY, ends, 0, job.model.shape), torch.linspace(0, 1, INTERPOLATED))
    running = RunningNetwork(job, processes, InferenceSettings(batch_size=INTERPOLATED))
    with user_errors(f"--output_dir {folder}: cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    seeds = [first] * INTERPOLATED  # they stand for the condition, not for noise
    with progress_bar(total=len(job.method.timesteps), desc=path.name, leave=False) as bar:
        images = running.generate(seeds, lambda number, samples: bar.update(), noise)
    save(image_grid(images, columns=INTERPOLATED), path)
    return path


def save_between_images(job: Job, options: OutputOptions, processes: Processes, folder: Path) -> Path:
    """Draw a row between two images for every t: both noised to x_t, mixed, and denoised (Ho et al. 2020, section 4.4).

    All pictures of the rows share their noise, so that they differ by what is mixed alone.
    """
    path = folder / f"between-{'-'.join(Path(name).stem for name in options.interpolate_images)}.png"
    check_folder(folder)
    channels, height, width = job.model.shape
    if height != width:
        raise UserError("--interpolate_images: the model's images are not square")
    ends = torch.stack([read_image(Path(name), channels, height) for name in options.interpolate_images])
    x_0, scheduler, rows = ends.to(processes.device) / 127.5 - 1, job.model.scheduler, []
    seed = seeds_of(options)[0]
    noise = standard_normal(NOISE_KEY, torch.tensor([seed, seed + 1], device=processes.device), 0, x_0.shape[1:])
    fractions = torch.linspace(0, 1, INTERPOLATED, device=processes.device)[:, None, None, None]
    with user_errors(f"--output_dir {folder}: cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    for steps in sorted(options.interpolate_t, reverse=True):
        method = copy(job.method)
        method.timesteps = [t for t in job.method.timesteps if t < steps]
        if steps > scheduler.config.num_train_timesteps or not method.timesteps:
            raise UserError(f"--interpolate_t {steps}: the sampler visits no timestep below it; choose another")
        t = torch.tensor([method.timesteps[0]] * 2, device=processes.device)
        first, last = scheduler.add_noise(x_0, noise, t)
        running = RunningNetwork(replace(job, method=method), processes, InferenceSettings(batch_size=INTERPOLATED))
        with progress_bar(total=len(method.timesteps), desc=f"t = {steps}", leave=False) as bar:
            mixed = (1 - fractions) * first + fractions * last
            images = running.generate([seed] * INTERPOLATED, lambda number, samples, bar=bar: bar.update(), mixed)
        rows += [ends[:1], images, ends[1:]]
    names = [f"t = {steps}" for steps in sorted(options.interpolate_t, reverse=True)]
    save(beside_names(image_grid(torch.cat(rows), columns=INTERPOLATED + 2), names), path)
    return path


def read_image(path: Path, channels: int, size: int) -> torch.Tensor:
    """Read an image file in the model's size, cropped at the centre."""
    with user_errors(f"--interpolate_images {path}: cannot be read", OSError, UndecodableImage):
        pixels = decode_image(path.read_bytes(), channels, size, center_crop=True)
    return torch.tensor(pixels)


def spherical(first: torch.Tensor, last: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """Interpolate noise on the sphere where noise lies: a straight line would leave it by a third."""
    device, first, last = first.device, first.cpu().double(), last.cpu().double()  # not every device has float64
    angle = torch.acos((first * last).sum() / (first.norm() * last.norm()))
    fractions = fractions.double()[:, None, None, None]
    between = (((1 - fractions) * angle).sin() * first + (fractions * angle).sin() * last) / angle.sin()
    return between.float().to(device)


def save_nearest(images: torch.Tensor, seeds: list[int], count: int, compared: Compared, path: Path) -> None:
    """Draw each image, and after a gap the training images that are nearest to it in pixels; note how near they are."""
    training_images = load_training_images(*compared).images
    indices, distances = nearest(images, training_images, min(count, len(training_images)))
    neighbours = at_centre(training_images, indices.flatten())
    neighbours = image_grid(neighbours, columns=indices.shape[1])
    pictures = {"generated": image_grid(images, columns=1), "nearest training images, nearest first": neighbours}
    save(side_by_side(pictures), path)
    record = {"seeds": seeds, "distances": [[round(each, 2) for each in row] for row in distances.tolist()]}
    with one_line_if_unwritable(path):
        write_atomically(path.with_name(NEAREST), json.dumps(record) + "\n")


def nearest(
    images: torch.Tensor, training_images: InMemoryImages | StreamedImages, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices [n, count] of the nearest training images, and their distances: the root mean square of the
    differences of the pixels, in grey levels. A part of them is compared at a time.
    """
    flat = images.flatten(1).float()
    best = torch.full((len(images), count), torch.inf)
    indices = torch.zeros((len(images), count), dtype=torch.long)
    parts = torch.arange(len(training_images)).split(IMAGES_COMPARED_AT_ONCE)
    for part in progress_bar(iterable=parts, desc="Nearest training images", leave=False):
        others = at_centre(training_images, part).flatten(1).float()
        # The difference itself: |a|^2 - 2ab + |b|^2 loses what tells near images apart.
        distances = torch.stack([(others - image).square().sum(1) for image in flat])
        best, order = torch.cat([best, distances], dim=1).topk(count, largest=False)
        indices = torch.cat([indices, part.expand(len(images), -1)], dim=1).gather(1, order)
    return indices, (best / flat.shape[1]).sqrt()


def at_centre(training_images: InMemoryImages | StreamedImages, indices: torch.Tensor) -> torch.Tensor:
    """Return training images cropped at the centre, where they are larger than the model's."""
    return training_images.crops(indices, torch.full((len(indices), 2), 0.5))


def find_compared(model: SavedModel, options: OutputOptions) -> Compared:
    """Find the images that the model was trained on, or those that are named, to be read in the model's size."""
    channels, height, width = model.shape
    run = RunFolder(model.home)
    if options.dataset_name or options.train_data_dir:
        named = {"dataset_name": options.dataset_name, "train_data_dir": options.train_data_dir}
        config = TrainingConfig(**named, center_crop=True, on_bad_image="skip")
    elif run.config_file.exists():
        config = run.read_config()
    else:
        raise UserError("--nearest: the model is not of a run; name its images with --dataset_name or --train_data_dir")
    if height != width:
        raise UserError("--nearest: compares square images only")
    config = replace(config, resolution=height, channels=str(channels), num_workers=None)
    return config, load_images(config)
