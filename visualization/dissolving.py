"""Images dissolving into noise under several beta schedules, side by side, as an animation."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

from common.errors import user_errors
from common.files import written_aside
from common.randomness import derive_seed, standard_normal
from image_data.decode import UndecodableImage, decode_image
from image_data.grid import image_grid, side_by_side
from image_data.sources import ImageSource
from schedulers.ddpm import ExactDDPMScheduler
from schedulers.denoising import to_uint8

FRAMES = 33
MILLISECONDS = 100
PAUSE_MILLISECONDS = 1200  # on the images, and on the noise, before the animation begins again
COLOURS = 128  # noise does not compress: what more colours cost, they cost for every pixel
NEARLY_WHITE = 244  # nearer to it, Pillow would take one for the other, and the paper would not be white
NARROWEST = 192  # pixels for the images of a schedule, so that its name has room above them
HEADER_HEIGHT = 28


def decode_images(source: ImageSource, resolution: int, channels: int | None = None) -> torch.Tensor:
    """Decode all images of the source, in [-1, 1], [n, channels, resolution, resolution]."""
    channels, decoded = channels or source.detect_channels(), []
    for index in range(len(source)):
        with user_errors(f"cannot decode {source.describe(index)}; repair or remove this image", UndecodableImage):
            decoded.append(torch.tensor(decode_image(source.read(index), channels, resolution, center_crop=True)))
    return torch.stack(decoded).float() / 127.5 - 1


def dissolving_frames(images: torch.Tensor, schedulers: dict[str, ExactDDPMScheduler], seed: int) -> list[Image.Image]:
    """Draw x_t under every schedule, from the first timestep to the last (eq. 4, with one epsilon for all)."""
    steps = next(iter(schedulers.values())).config.num_train_timesteps
    noise = standard_normal(derive_seed(seed, "dissolving"), torch.arange(len(images)), 0, images.shape[1:])
    columns = -(-len(images) // max(1, int(len(images) ** 0.5)))
    frames = []
    for t in torch.linspace(0, steps - 1, min(FRAMES, steps)).round().long().tolist():
        at_t = torch.full((len(images),), t)
        grids = {
            name: image_grid(to_uint8(scheduler.add_noise(images, noise, at_t)), columns, NARROWEST // columns)
            for name, scheduler in schedulers.items()
        }
        frame = ImageOps.expand(side_by_side(grids), border=(0, HEADER_HEIGHT, 0, 0), fill="white")
        ImageDraw.Draw(frame).text((2, 2), f"t = {t}", fill="black", font=ImageFont.load_default(18))
        frames.append(frame)
    return frames


def save_animation(frames: list[Image.Image], path: Path, milliseconds: int = MILLISECONDS) -> Path:
    """Write an endless GIF that rests on its first and last frame."""
    # One palette for all frames, so that colours do not flicker, with a true white for the paper.
    some = [np.asarray(frame) for frame in (frames[0], frames[len(frames) // 4], frames[-1])]
    palette = Image.fromarray(np.concatenate(some)).quantize(COLOURS)
    colours = np.array(palette.getpalette()).reshape(-1, 3)
    colours[colours.min(1) >= NEARLY_WHITE] = 255
    palette.putpalette(colours.flatten().tolist())
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [PAUSE_MILLISECONDS, *[milliseconds] * (len(frames) - 2), PAUSE_MILLISECONDS]
    with written_aside(path) as aside:
        first.save(aside, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return path
