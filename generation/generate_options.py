"""The options of generation, and the seeds and the sampling method that they stand for."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from common.errors import UserError
from common.options import (
    LARGEST_INT,
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_ONE,
    ConfigOptions,
    from_to,
    option,
    parse_options,
    section,
)
from generation.methods import SHORT_SAMPLING, chosen_method

DEFAULT_IMAGES = 64
LARGEST_GATHERED_GRID = 4096
MOST_IMAGES = 2_000_000  # of one call, whose seeds are all in memory
# Of a batch size that nobody gave: the smallest, and how many batches are left to share among the processes.
SMALLEST_BATCH, BATCHES_TO_SHARE = 16, 32


@section("model")
class ModelOptions:
    model: str | None = option(
        None,
        "A run's folder (its newest checkpoint), a checkpoint's, a DDPMPipeline's, or a Hub id; may be given as "
        "the first word (default: the run under runs/ that wrote metrics last).",
        positional=True,
    )
    checkpoints: list[str] = option([], "Steps of checkpoints of the run, or 'all': images of each, in its own folder.")
    weights: Literal["ema", "raw"] | None = option(
        None, "Moving average or raw weights (default: the moving average where there is one)."
    )


@section("sampler")
class SamplerOptions:
    default_sampler: ClassVar[str] = "ddpm"

    ddpm: bool = option(False, "Ancestral sampling as in the paper; the default.")
    ddim: bool = option(False, "DDIM.")
    scheduler: str | None = option(None, "A scheduler of diffusers by its name, e.g. DPMSolverMultistepScheduler.")
    num_inference_steps: int | None = option(
        None,
        f"S, the denoising steps (default: all of the model's for --ddpm, {SHORT_SAMPLING} otherwise).",
        POSITIVE,
    )
    skip_schedule: Literal["linear", "quadratic"] = option(
        "linear", "Which S timesteps: spread evenly from first to last, or linspace(0, sqrt(0.8 T), S)^2."
    )
    variance_type: Literal["fixed_large", "fixed_small"] | None = option(
        None, "Variance of --ddpm (default: fixed_large over all timesteps, fixed_small over a sub-sequence)."
    )
    eta: float | None = option(
        None, "Noise of --ddim: 0 for none (the default), 1 for as much as DDPM's fixed_small.", UP_TO_ONE
    )


@section("images")
class ImageOptions:
    seeds: str | None = option(None, f"One image for each, e.g. 0-49999 or 0,5,7-9; at most {MOST_IMAGES:,}.")
    num_images: int | None = option(
        None,
        f"The seeds 0, 1, ... up to so many images (default: {DEFAULT_IMAGES}).",
        from_to(1, MOST_IMAGES),
    )


@section("condition, of models that were trained with one")
class ConditionOptions:
    class_labels: list[str] = option(
        [], "Classes to draw by name or number, or 'all' (the default); seeds take turns.", repeatable=True
    )
    prompt: list[str] = option(
        [],
        "What should appear; seeds take turns with several (default: the prompts of the run's grids).",
        repeatable=True,
    )
    prompts_file: str | None = option(None, "File with a prompt on each line, instead.", not_with="prompt")
    negative_prompt: str | None = option(
        None, "What guidance leads away from (default: an empty prompt).", may_be_empty=True
    )
    guidance_scale: float = option(
        1.0, "Guidance u + scale (c - u) from the prediction without condition; 1 is none.", NOT_NEGATIVE
    )
    guidance_rescale: float = option(
        0.0,
        "Share of a guided prediction that gets its deviation from the unguided one, 0 to 1, against glare.",
        UP_TO_ONE,
    )
    guidance_interval: list[int] = option([], "First and last timestep with guidance (default: all), e.g. 100 800.")


@section("output")
class OutputOptions:
    output_dir: str | None = option(
        None, "Folder for the images (default: one in <run>/generated named after step, weights, sampler and steps)."
    )
    overwrite: bool = option(
        False,
        "Delete the images that are in the folder, whatever made them, and start anew.",
        not_with="interpolate interpolate_images",
    )
    format: Literal["png", "npz", "parquet"] = option(
        "png",
        "PNG files, one samples.npz (arr_0, seeds), or a folder for datasets.load_dataset.",
        not_with="interpolate interpolate_images",
    )
    gather_grid: bool = option(
        False,
        f"All images in grid.png, collected from all processes, instead of the first {DEFAULT_IMAGES}.",
        not_with="interpolate interpolate_images",
    )
    progress_gif: bool = option(
        False,
        "Also the first 16 images from noise to picture, as progress.gif.",
        not_with="interpolate interpolate_images",
    )
    progressive: bool = option(
        False,
        "Also the x_0 that the network sees at 12 moments of the first 16 images, as progressive.png; not x_t.",
        not_with="interpolate interpolate_images",
    )
    interpolate: list[int] = option([], "Two seeds: only a row of pictures between them; --ddim unless told otherwise.")
    interpolate_images: list[str] = option(
        [],
        "Two image files: only a picture of the way between them, noised, mixed and denoised.",
        not_with="interpolate",
    )
    interpolate_t: list[int] = option(
        [500],
        "Steps of noise for --interpolate_images, a row for each: many for coarse changes, few for fine ones.",
        POSITIVE,
        only_with="interpolate_images",
    )
    nearest: int | None = option(
        None,
        "Also so many nearest training images beside each of the first 16.",
        POSITIVE,
        not_with="interpolate interpolate_images",
    )
    dataset_name: str | None = option(
        None, "Training images for --nearest (default: those of the run).", only_with="nearest"
    )
    train_data_dir: str | None = option(
        None, "Folder of training images for --nearest, instead of dataset_name.", only_with="nearest"
    )


@section("speed")
class SpeedOptions:
    batch_size: int | None = option(
        None,
        "Images per process and forward pass (default: the largest that pays, measured at the start; "
        f"{SMALLEST_BATCH} for less than {2 * SMALLEST_BATCH * BATCHES_TO_SHARE} images).",
        POSITIVE,
        not_with="interpolate interpolate_images",
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None, "Precision of the network (default: what `accelerate launch` says, else no); noise stays float32."
    )
    allow_tf32: bool = option(False, "Allow TF32 matrix products on GPUs that have them.")
    compile: bool = option(
        False, "Compile the network first, which takes up to minutes.", not_with="interpolate interpolate_images"
    )
    channels_last: Literal["auto", "yes", "no"] = option(
        "auto",
        "Keep channels last in memory; auto: on GPUs in mixed precision, whose matrix units want it.",
        not_with="interpolate interpolate_images",
    )


@dataclass
class GenerationOptions(
    ConfigOptions, SpeedOptions, OutputOptions, ConditionOptions, SamplerOptions, ImageOptions, ModelOptions,
):  # fmt: skip
    """All options of generate.py."""

    @property
    def default_sampler(self) -> str:
        """Return DDIM between two seeds: one can only go where the noise is all in the start."""
        return "ddim" if self.interpolate else "ddpm"


def parse_generation(arguments: list[str]) -> GenerationOptions:
    """Return the options of generate.py; raise for values that make no sense whatever the model is."""
    description = "One image for each seed: the same for the same seed, on any number of processes."
    usage = "%(prog)s [MODEL] [--flag value ...]"
    options = parse_options(GenerationOptions, arguments, description=description, usage=usage)
    chosen_method(options)
    seeds, interval = seeds_of(options), options.guidance_interval
    if interval and (len(interval) != 2 or not 0 <= interval[0] <= interval[1]):
        words = " ".join(map(str, interval))
        raise UserError(f"--guidance_interval {words}: needs two timesteps, the smaller one first")
    for name in ("negative_prompt", "guidance_rescale", "guidance_interval"):
        if getattr(options, name) and options.guidance_scale == 1:
            raise UserError(f"--{name} changes guidance, and there is none: add --guidance_scale, e.g. 2")
    if options.interpolate and (len(set(options.interpolate)) != 2 or min(options.interpolate) < 0):
        raise UserError(f"--interpolate {' '.join(map(str, options.interpolate))}: needs two different seeds")
    if options.interpolate and (options.seeds or options.num_images or options.checkpoints):
        raise UserError("--interpolate draws one row with one model: leave out --seeds, --num_images and --checkpoints")
    if options.interpolate_images and (options.num_images or options.checkpoints):
        raise UserError(
            "--interpolate_images draws one picture with one model: leave out --num_images and --checkpoints"
        )
    if options.interpolate_images and (
        len(options.interpolate_images) != 2 or len(seeds_of(options)) > 1 and options.seeds
    ):
        raise UserError("--interpolate_images needs two image files, and at most one of --seeds")
    for name in ("interpolate_images", "progressive"):
        if getattr(options, name) and options.scheduler:
            raise UserError(
                f"--{name} goes with --ddpm and --ddim, which say what x_0 they see, not {options.scheduler}"
            )
    if options.gather_grid and len(seeds) > LARGEST_GATHERED_GRID:
        raise UserError(f"--gather_grid: a grid has at most {LARGEST_GATHERED_GRID} images")
    if options.dataset_name and options.train_data_dir:
        raise UserError("name the training images with either --dataset_name or --train_data_dir, and not with both")
    return options


def seeds_of(options: ImageOptions) -> list[int]:
    """Return the seeds, each once, in ascending order."""
    if options.seeds is None:
        return list(range(options.num_images or DEFAULT_IMAGES))
    ranges: list[tuple[int, int]] = []
    for part in options.seeds.split(","):
        given = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if given is None:
            raise UserError(f"--seeds {options.seeds}: '{part.strip()}' is neither a number nor a range such as 0-63")
        first, last = int(given[1]), int(given[2] or given[1])
        if last < first:
            raise UserError(f"--seeds {options.seeds}: {part.strip()} runs backwards; write {last}-{first}")
        if last > LARGEST_INT:
            raise UserError(f"--seeds {options.seeds}: {last} is too large; the largest seed is {LARGEST_INT}")
        ranges.append((first, last))
    if (count := sum(last - first + 1 for first, last in ranges)) > MOST_IMAGES:
        raise UserError(f"--seeds {options.seeds}: are {count:,}; one call makes at most {MOST_IMAGES:,} images")
    seeds = {seed for first, last in ranges for seed in range(first, last + 1)}
    if options.num_images not in (None, len(seeds)):
        raise UserError(
            f"--num_images {options.num_images}: --seeds {options.seeds} are {len(seeds)}; give one of both"
        )
    return sorted(seeds)


def as_ranges(seeds: list[int]) -> str:
    """Return ascending seeds as --seeds takes them."""
    known = set(seeds)
    firsts, lasts = ([seed for seed in seeds if seed + step not in known] for step in (-1, 1))
    ranges = zip(firsts, lasts, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
