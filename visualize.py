#!/usr/bin/env python
"""Draw what a diffusion does to images, which timesteps it trains on, and the course of a run.

python visualize.py --schedules linear cosine
python visualize.py --timestep_sampler my_sampler.py:MySampler
python visualize.py runs/cifar10
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args, get_type_hints

from common.errors import UserError, run_script
from common.files import check_folder, make_folder
from common.options import LARGEST_INT, RESOLUTION, ConfigOptions, from_to, names_flag, option, parse_options, section
from run_folder.config import DiffusionOptions, TrainingConfig, check_timestep_sampler, is_own_sampler
from run_folder.folder import FIGURES


@section("pictures")
class PictureOptions:
    schedules: list[str] = option(
        ["linear", "cosine"], "Noise schedules to compare, with the names of --ddpm_beta_schedule.", not_with="run_dir"
    )
    ddpm_num_steps: int = option(1000, "Number of diffusion steps, T.", from_to(2, 1_000_000), not_with="run_dir")
    run_dir: str | None = option(
        None,
        "Draw a run instead: its timesteps, its losses, and its samples over the steps. Usually given as the first "
        "word, without the flag.",
        positional=True,
    )
    timestep_sampler: str | None = option(
        None,
        "Also draw your own sampler, my_file.py:MySampler. For a run that was trained with one, name it here too.",
    )
    output_dir: str | None = option(
        None,
        "Folder for the pictures (default: figures, in the folder of the run or, without one, in the current folder).",
    )
    cache_dir: str | None = option(None, "Folder for downloaded data (default: the cache of datasets).")
    seed: int = option(0, "Random seed of the noise.", from_to(0, LARGEST_INT), not_with="run_dir")


@section("images that the dissolving GIF shows", not_with="run_dir")
class DissolvingOptions:
    dataset_name: str | None = option(
        None, "Data set: a Hub id, a local folder, or 'digits' (default: digits, if you name no data)."
    )
    dataset_config_name: str | None = option(None, "Which configuration of the data set to use, if it has several.")
    train_data_dir: str | None = option(None, "Folder of images, instead of --dataset_name.")
    image_column: str | None = option(None, "Column with the images (default: the only one there is).")
    num_images: int = option(4, "Number of images, evenly spread over the data set.", from_to(1, 1024))
    resolution: int = option(
        32, "Size in pixels; images of other sizes are resized and cropped at the centre.", RESOLUTION
    )
    on_bad_image: ClassVar[str] = "skip"

    @property
    def max_train_samples(self) -> int:
        """Return the number of images under the name that `load_images` knows."""
        return self.num_images


@dataclass
class Options(ConfigOptions, DissolvingOptions, PictureOptions):
    """All options of this script."""


def parse(arguments: list[str]) -> Options:
    """Return the options; raise for a schedule that is not known."""
    description = "Draw noise schedules, timestep samplers and loss weights, or the course of a run."
    usage = "%(prog)s [RUN] [--flag value ...]"
    options = parse_options(Options, arguments, description=description, usage=usage)
    if options.timestep_sampler is not None and not names_flag(arguments, "timestep_sampler"):
        raise UserError(
            f"--config {options.config}: names code, {options.timestep_sampler}, which is only run if you name it: if "
            f"you trust that file, add --timestep_sampler {options.timestep_sampler}"
        )
    known = get_args(get_type_hints(DiffusionOptions)["ddpm_beta_schedule"])
    for name in options.schedules:
        if name not in known:
            raise UserError(f"--schedules {name}: there is no such schedule; there are {', '.join(known)}")
    if len(set(options.schedules)) < len(options.schedules):
        raise UserError(f"--schedules {' '.join(options.schedules)}: one of them is named twice")
    if options.timestep_sampler is not None and options.run_dir is None:
        if not is_own_sampler(options.timestep_sampler):
            raise UserError(
                f"--timestep_sampler {options.timestep_sampler}: is not a sampler of your own, as my_file.py:MySampler "
                f"is; all others are drawn without being named"
            )
        check_timestep_sampler(TrainingConfig(timestep_sampler=options.timestep_sampler))
    return options


def make_output_dir(options: Options) -> Path:
    """Make the folder of the pictures; raise if it cannot be written."""
    path = Path(options.output_dir or Path(options.run_dir or "", FIGURES))
    check_folder(path)
    make_folder(path)
    return path


def main() -> None:
    options = parse(sys.argv[1:])
    pictures = draw_run(options) if options.run_dir is not None else draw_diffusion(options)
    for picture in pictures:
        print(picture)


def draw_diffusion(options: Options) -> Iterator[Path]:
    """Draw the schedules on images and as curves, every timestep sampler, and every loss weighting."""
    from image_data.sources import DIGITS, load_images
    from schedulers.ddpm import build_scheduler
    from visualization import diffusion, dissolving

    if options.dataset_name is None and options.train_data_dir is None:
        options.dataset_name = DIGITS
    images = dissolving.decode_images(load_images(options), options.resolution)
    schedulers = {name: build_scheduler(name, options.ddpm_num_steps) for name in options.schedules}
    samplers = diffusion.build_samplers(schedulers, options.timestep_sampler)
    folder = make_output_dir(options)
    frames = dissolving.dissolving_frames(images, schedulers, options.seed)
    yield dissolving.save_animation(frames, folder / "dissolving.gif")
    yield diffusion.draw_betas(schedulers, folder / "beta.png")
    yield diffusion.draw_snr(schedulers, folder / "snr.png")
    yield diffusion.draw_samplers(samplers, options.seed, folder / "timestep_samplers.png")
    yield diffusion.draw_weightings(schedulers, folder / "loss_weights.png")


def draw_run(options: Options) -> Iterator[Path]:
    """Draw which timesteps a run trained on, how it fared on them and on mean colours, and how its samples changed."""
    from visualization import dissolving, mean_colour, run_curves

    run = Path(options.run_dir)
    config, metrics = run_curves.read_run(run, options.timestep_sampler)
    config.cache_dir = options.cache_dir
    densities, (timesteps, bins) = run_curves.read_densities(run, config), run_curves.read_timesteps(run, config)
    frames, parts = run_curves.read_samples(run), mean_colour.read_parts(run, config)
    folder = make_output_dir(options)
    yield run_curves.draw_losses_by_quarter(metrics, config.ddpm_num_steps, folder / "loss_by_quarter.png")
    if timesteps:
        file = folder / "timesteps_over_log_snr.png"
        yield run_curves.draw_over_log_snr(timesteps, bins, config.timestep_sampler, file)
    if densities:
        yield run_curves.draw_densities(densities, config.timestep_sampler, folder / "timestep_density.png")
    if any(run_curves.EFFECTIVE_SAMPLE_SIZE in line for line in metrics):
        yield run_curves.draw_effective_sample_size(metrics, folder / "effective_sample_size.png")
    if len(frames) > 1:
        yield dissolving.save_animation(frames, folder / "samples_over_steps.gif", run_curves.MILLISECONDS)
    if parts is not None:  # last, because it runs the network
        yield mean_colour.draw_mean_colour(*parts, folder / "mean_colour.png")


if __name__ == "__main__":
    run_script(main)
