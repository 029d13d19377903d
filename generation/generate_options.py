"""The options of generation, and the seeds and the sampling method that they stand for."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from common.errors import UserError
from common.options import (
    EMA_LENGTH,
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
        "Model to use: a run (its newest checkpoint), a checkpoint, the folder of a saved DDPMPipeline, or a Hub id. "
        "Usually given as the first word, without the flag (default: the run under runs/ that was trained last).",
        positional=True,
    )
    checkpoints: list[str] = option(
        [],
        "Several checkpoints of the run: their steps, or 'all'. generate.py gives each a folder, app.py a menu entry.",
    )
    weights: Literal["ema", "raw"] | None = option(
        None, "Use the moving average of the weights, or the raw weights (default: ema, if there is one)."
    )
    ema_length: float | None = option(
        None,
        "Use a moving average of this length instead, sigma_rel of EDM2, such as 0.03; for a run with --ema power.",
        EMA_LENGTH,
        not_with="weights=raw",
    )


@section("sampler")
class SamplerOptions:
    default_sampler: ClassVar[str] = "ddpm"

    ddpm: bool = option(False, "Sample with DDPM, as in the paper. This is the default.")
    ddim: bool = option(False, "Sample with DDIM, which needs fewer steps.")
    scheduler: str | None = option(None, "Sample with a diffusers scheduler, such as DPMSolverMultistepScheduler.")
    num_inference_steps: int | None = option(
        None,
        f"Number of denoising steps, S (default: all steps of the model for DDPM, otherwise {SHORT_SAMPLING}).",
        POSITIVE,
    )
    skip_schedule: Literal["linear", "quadratic"] = option(
        "linear",
        "How the S timesteps are chosen: linear spaces them evenly; quadratic, linspace(0, sqrt(0.8 T), S)^2, puts "
        "more of them at low noise.",
    )
    variance_type: Literal["fixed_large", "fixed_small"] | None = option(
        None,
        "Variance of the DDPM steps (default: the learned one, if the network predicts one; otherwise fixed_small if "
        "timesteps are skipped; otherwise the run's own, or fixed_large for pipelines of other projects).",
    )
    eta: float | None = option(
        None, "Noise in the DDIM steps, from 0 (none, the default) to 1 (as much as DDPM with fixed_small).", UP_TO_ONE
    )


@section("images")
class ImageOptions:
    seeds: str | None = option(
        None, f"Seeds to generate, one image each, such as 0-49999 or 0,5,7-9; at most {MOST_IMAGES:,}."
    )
    num_images: int | None = option(
        None,
        f"Number of images, instead of --seeds: their seeds are 0, 1, 2, ... (default: {DEFAULT_IMAGES}).",
        from_to(1, MOST_IMAGES),
    )


@section("classes, prompts and guidance, for models trained with train_conditional.py")
class ConditionOptions:
    class_labels: list[str] = option(
        [],
        "Classes to generate, by name or number, or 'all' (the default). Several take turns over the seeds.",
        repeatable=True,
    )
    prompt: list[str] = option(
        [],
        "Text to generate images of. Several take turns over the seeds (default: the prompts of the run's grids).",
        repeatable=True,
    )
    prompts_file: str | None = option(
        None, "Text file with one prompt on each line, instead of --prompt.", not_with="prompt"
    )
    negative_prompt: str | None = option(
        None, "Text that guidance steers away from (default: an empty prompt).", may_be_empty=True
    )
    guidance_scale: float = option(
        1.0,
        "Strength of classifier-free guidance, the scale in u + scale (c - u); 1 means no guidance. Larger values "
        "follow the class or prompt more closely, with less variety.",
        NOT_NEGATIVE,
    )
    guidance_rescale: float = option(
        0.0,
        "Reduce the harsh contrast of strong guidance, from 0 (off) to 1: how far guided predictions are rescaled to "
        "the standard deviation of unguided ones.",
        UP_TO_ONE,
    )
    guidance_interval: list[int] = option(
        [], "Use guidance only between these two timesteps, such as 100 800 (default: at all of them)."
    )


@section("output")
class OutputOptions:
    output_dir: str | None = option(
        None,
        "Folder for the images (default: a folder in <run>/generated, named after step, weights, sampler and steps).",
    )
    overwrite: bool = option(
        False,
        "Delete the images that are already in the folder, even if they were made with other settings, and start over.",
        not_with="interpolate interpolate_images",
    )
    format: Literal["png", "npz", "parquet"] = option(
        "png",
        "png: one file per image; npz: a single samples.npz (arr_0, seeds); parquet: a folder for "
        "datasets.load_dataset.",
        not_with="interpolate interpolate_images",
    )
    gather_grid: bool = option(
        False,
        f"Show all images in grid.png, from all processes, instead of only the first {DEFAULT_IMAGES}.",
        not_with="interpolate interpolate_images",
    )
    progress_gif: bool = option(
        False,
        "Also write progress.gif, which shows the first 16 images forming out of noise.",
        not_with="interpolate interpolate_images",
    )
    progressive: bool = option(
        False,
        "Also write progressive.png: for the first 16 images, the x_0 that the network predicts at 12 moments.",
        not_with="interpolate interpolate_images",
    )
    interpolate: list[int] = option(
        [], "Only draw a row of images between two seeds, such as 3 9, with DDIM if you choose no sampler."
    )
    interpolate_images: list[str] = option(
        [],
        "Only draw a row of images between two image files, which are noised, mixed and denoised.",
        not_with="interpolate",
    )
    interpolate_t: list[int] = option(
        [500],
        "Steps of noise for --interpolate_images, with a row for each: many change much, few change details.",
        POSITIVE,
        only_with="interpolate_images",
    )
    nearest: int | None = option(
        None,
        "Also show the N nearest training images beside each of the first 16 samples, to see whether the model has "
        "memorised them.",
        POSITIVE,
        not_with="interpolate interpolate_images",
    )
    dataset_name: str | None = option(
        None, "Data set with the training images for --nearest (default: the one of the run).", only_with="nearest"
    )
    train_data_dir: str | None = option(
        None, "Folder with the training images for --nearest, instead of --dataset_name.", only_with="nearest"
    )


@section("speed")
class SpeedOptions:
    batch_size: int | None = option(
        None,
        "Images per process in one forward pass (default: the fastest size, measured at the start; "
        f"{SMALLEST_BATCH} for fewer than {2 * SMALLEST_BATCH * BATCHES_TO_SHARE} images). Lower it to save memory.",
        POSITIVE,
        not_with="interpolate interpolate_images",
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None,
        "Precision of the network; bf16 is faster on most GPUs, noise stays float32 (default: the setting of "
        "`accelerate launch`, or no).",
    )
    allow_tf32: bool = option(False, "Use TF32 for matrix products on GPUs that have it: faster, slightly less exact.")
    compile: bool = option(
        False,
        "Compile the network for speed. Compiling can take minutes, so it pays for many images.",
        not_with="interpolate interpolate_images",
    )
    channels_last: Literal["auto", "yes", "no"] = option(
        "auto",
        "Store images in channels-last order, which is faster on GPUs in mixed precision; auto uses it there.",
        not_with="interpolate interpolate_images",
    )


@dataclass
class GenerationOptions(
    ConfigOptions, SpeedOptions, OutputOptions, ConditionOptions, SamplerOptions, ImageOptions, ModelOptions,
):  # fmt: skip
    """All options of generate.py."""

    @property
    def default_sampler(self) -> str:
        """Return DDIM to interpolate between seeds, which only works if all noise is at the start; otherwise DDPM."""
        return "ddim" if self.interpolate else "ddpm"


def parse_generation(arguments: list[str]) -> GenerationOptions:
    """Return the options of generate.py; raise for values that make no sense whatever the model is."""
    description = "Generate images from a model. Each seed gives one image, the same on any number of processes."
    usage = "%(prog)s [MODEL] [--flag value ...]"
    options = parse_options(GenerationOptions, arguments, description=description, usage=usage)
    chosen_method(options)
    seeds, interval = seeds_of(options), options.guidance_interval
    if interval and (len(interval) != 2 or not 0 <= interval[0] <= interval[1]):
        words = " ".join(map(str, interval))
        raise UserError(f"--guidance_interval {words}: needs two timesteps, the smaller one first")
    for name in ("negative_prompt", "guidance_rescale", "guidance_interval"):
        if getattr(options, name) and options.guidance_scale == 1:
            raise UserError(f"--{name} has no effect without guidance: add --guidance_scale, e.g. 2")
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
                f"--{name} needs the estimate of x_0, which {options.scheduler} does not provide; use --ddpm or --ddim"
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
        raise UserError(
            f"--seeds {options.seeds}: that is {count:,} seeds; one call makes at most {MOST_IMAGES:,} images"
        )
    seeds = {seed for first, last in ranges for seed in range(first, last + 1)}
    if options.num_images not in (None, len(seeds)):
        raise UserError(
            f"--num_images {options.num_images}: --seeds {options.seeds} has {len(seeds)} seeds; give one of the two"
        )
    return sorted(seeds)


def as_ranges(seeds: list[int]) -> str:
    """Return ascending seeds as --seeds takes them."""
    known = set(seeds)
    firsts, lasts = ([seed for seed in seeds if seed + step not in known] for step in (-1, 1))
    ranges = zip(firsts, lasts, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
