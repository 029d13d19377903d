"""The options of evaluate.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from common.errors import UserError
from common.options import (
    NOT_NEGATIVE,
    NUM_WORKERS,
    POSITIVE,
    RESOLUTION,
    ConfigOptions,
    facts_of,
    from_to,
    option,
    parse_options,
    section,
)
from generation.generate_options import MOST_IMAGES, SamplerOptions
from generation.methods import chosen_method
from run_folder.folder import RunFolder

FEWEST_IMAGES = 10  # the Inception Score takes ten splits, and an image needs five neighbours
Mode = Literal["legacy_tensorflow", "clean", "legacy_pytorch"]
# All that --nll asks for.
WITH_NLL = (
    "nll", "run_dir", "num_images", "checkpoints", "weights", "batch_size", "dataset_name", "dataset_config_name",
    "train_data_dir", "split", "image_column", "on_bad_image", "mixed_precision", "output_dir", "cache_dir",
    "num_workers", "allow_tf32", "config",
)  # fmt: skip


@section("what is measured: images, or every checkpoint of a run")
class ImagesOptions:
    run_dir: str | None = option(
        None,
        "A run: its checkpoints are measured, each with images generated for it. May be given as the first word.",
        positional=True,
    )
    generated: str | None = option(None, "Generated images: a folder of image or parquet files, or an .npz.")
    compare: list[str] = option([], "Two or more runs that have been measured: curves in one plot, times to equal FID.")
    num_images: int | None = option(
        None,
        "Images to measure (default: all of --generated; 10000 of a run).",
        from_to(FEWEST_IMAGES, MOST_IMAGES),
    )
    nll: bool = option(
        False,
        "Instead of samples: the bound on the negative log-likelihood of the real images, in bits per dimension, with "
        "rate and distortion; of training and test images, --num_images of each. The first word may be any model.",
        only_with="run_dir",
    )


@section("a run: its checkpoints, and how images of them are generated")
class RunOptions:
    checkpoints: list[str] = option(
        [], "Steps of the run to measure (default: every checkpoint that is there; of --nll the newest)."
    )
    weights: Literal["ema", "raw"] | None = option(
        None, "Weights of the checkpoints (default: ema where there is one)."
    )
    batch_size: int | None = option(
        None, "Images per process and forward pass (default: the largest that pays, measured at the start).", POSITIVE
    )
    guidance_scales: list[float] = option(
        [1.0],
        "Guidance scales to measure, 1 being none, of a conditional run, which gets the real images' captions or "
        "their classes in the same proportions.",
        NOT_NEGATIVE,
    )
    repeats: int = option(
        1,
        "Measure so many disjoint sets of --num_images images (of the seeds 0, 1, ...), and report mean and spread.",
        from_to(1, 100),
    )
    keep_images: bool = option(False, "Keep them in the run's folder, where generate.py would put them.")


@section("what it is measured against (for a run: the images that it was trained on)")
class ReferenceOptions:
    real: str | None = option(None, "Real images: a folder of image or parquet files, or an .npz.")
    dataset_name: str | None = option(None, "Real images: Hub id or local folder of a data set, or 'digits'.")
    dataset_config_name: str | None = option(
        None, "Configuration of the data set, if it has several.", only_with="dataset_name"
    )
    train_data_dir: str | None = option(None, "Real images: folder of images in the layout of training.")
    split: str | None = option(
        None, "Split of the data set (default: train; of --nll train and test).", not_with="real statistics"
    )
    image_column: str | None = option(
        None, "Column with the images; found by itself if there is only one.", only_with="dataset_name train_data_dir"
    )
    resolution: int | None = option(
        None,
        "Size that real images are brought to, shorter side and centre crop (default: that of the generated).",
        RESOLUTION,
        not_with="statistics",
    )
    on_bad_image: Literal["fail", "skip"] = option(
        "fail", "What to do with a real image that cannot be decoded.", not_with="statistics"
    )
    statistics: str | None = option(None, "File of --save_statistics, or an .npz with mu and sigma.")
    statistics_mode: Mode | None = option(
        None, "How the images behind an .npz with mu and sigma were resized.", only_with="statistics"
    )
    save_statistics: str | None = option(None, "Write the real images' statistics to this file (.safetensors).")


@section("features")
class FeatureOptions:
    features: str = option(
        "inception",
        "inception, dinov2, clip, a folder with a vision model of transformers, or a file with VGG16's weights.",
    )
    modes: list[str] = option(
        ["legacy_tensorflow"],
        "How Inception is shown the images, clean-fid's modes: legacy_tensorflow (that of papers), clean, "
        "legacy_pytorch. One or several.",
        only_with="features=inception",
    )
    inception_weights: str | None = option(
        None, "inception-2015-12-05.pt or .pth, if it is not found by itself.", only_with="features=inception"
    )
    feature_batch_size: int = option(32, "Images of a pass of the feature network.", POSITIVE)
    mixed_precision: Literal["no", "bf16"] = option(
        "no", "Precision of all networks; with bf16 the error of the features is logged."
    )
    allow_tf32: bool = option(
        False, "Allow TF32 matrix products on GPUs that have them, of all networks; noted beside the results."
    )
    compile: bool = option(True, "Compile the feature network where there are images enough for it to pay.")


@section("output")
class OutputOptions:
    output_dir: str | None = option(
        None, "Folder of tables and curves (default: the run's; of --compare 'comparison'; images: only printed)."
    )
    cache_dir: str | None = option(None, "Folder for weights, statistics and data (default: ~/.cache/exact-ddpm).")
    num_workers: int | None = option(
        None, "Processes that decode images (default: min(4, usable cores / processes on this machine)).", NUM_WORKERS
    )


@dataclass
class EvaluationOptions(
    ConfigOptions, FeatureOptions, SamplerOptions, RunOptions, OutputOptions, ReferenceOptions, ImagesOptions,
):  # fmt: skip
    """All options of an evaluation."""

    @property
    def precision(self) -> str:
        """Return what is noted beside the results: numbers of one kind are compared."""
        names = [self.mixed_precision] * (self.mixed_precision != "no") + ["TF32"] * self.allow_tf32
        return " with ".join(names) or "no"


def parse_evaluation(arguments: list[str]) -> EvaluationOptions:
    """Return the options of evaluate.py, `validate`d."""
    options = parse_options(
        EvaluationOptions,
        arguments,
        description="FID, KID, Inception Score, precision, recall, density, coverage, from one pass over the images.",
        usage="%(prog)s [RUN] [--flag value ...]",
    )
    validate(options)
    return options


def validate(options: EvaluationOptions) -> None:
    """Raise for what no evaluation can be."""
    chosen_method(options)
    named = [f"--{name}" for name in ("generated", "run_dir", "compare") if getattr(options, name)]
    references = ("real", "dataset_name", "train_data_dir", "statistics")
    references = [f"--{name}" for name in references if getattr(options, name)]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)}: name one thing to measure")
    if len(references) > 1:
        raise UserError(f"{' and '.join(references)}: name one reference")
    if not named and not options.save_statistics:
        raise UserError("nothing to measure: name a run, as in evaluate.py runs/cifar10, or images with --generated")
    if len(options.compare) == 1:
        raise UserError("--compare needs two runs or more")
    if not references and not options.run_dir and not options.compare:
        raise UserError("nothing to measure against: --dataset_name, --real, --train_data_dir or --statistics")
    if not named and options.resolution is None:
        raise UserError("--save_statistics without --generated: say with --resolution what size to bring the images to")
    for name in () if named else ("num_images", "output_dir"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} goes with a run or --generated; --save_statistics alone measures no images")
    if options.save_statistics and (len(options.modes) > 1 or options.statistics):
        raise UserError("--save_statistics holds real images in one of the --modes: name one, and no --statistics")
    if options.save_statistics and Path(options.save_statistics).suffix != ".safetensors":
        raise UserError(f"--save_statistics {options.save_statistics}: the file must be called something.safetensors")
    if options.save_statistics and Path(options.save_statistics).is_dir():
        raise UserError(f"--save_statistics {options.save_statistics}: this is a folder; name a file in it")
    unknown = [mode for mode in options.modes if mode not in get_args(Mode)]
    if unknown:
        raise UserError(f"--modes {' '.join(unknown)}: choose from {', '.join(get_args(Mode))}")
    if len(set(options.modes)) < len(options.modes):
        raise UserError(f"--modes {' '.join(options.modes)}: one of them is named twice")
    for name, facts in {**facts_of(RunOptions), **facts_of(SamplerOptions)}.items():
        if getattr(options, name) != facts.default and not options.run_dir:
            raise UserError(f"--{name} goes with a run, as in evaluate.py runs/cifar10")
    for name, facts in facts_of(EvaluationOptions).items() if options.compare else ():
        if name not in ("compare", "output_dir", "config") and getattr(options, name) != facts.default:
            raise UserError(f"--{name} goes with a run or --generated; --compare reads what has been measured")
    for name, facts in facts_of(EvaluationOptions).items() if options.nll else ():
        if name not in WITH_NLL and getattr(options, name) != facts.default:
            raise UserError(f"--{name} has no effect with --nll, which generates no images: leave one of them out")
    if options.run_dir and options.resolution:
        raise UserError("--resolution: the real images are brought to the resolution of the run")
    # Before networks are loaded, which can take a minute.
    for name in ("generated", "run_dir", "real", "train_data_dir", "statistics", "inception_weights"):
        value = getattr(options, name)
        if options.nll and name == "run_dir":
            continue  # a model, which may be on the Hub
        path = Path(value or "").expanduser()
        if not path.exists():
            raise UserError(f"--{name} {value}: there is no such file or folder ({path.resolve()})")
        if not (path.is_dir() or path.is_file()):
            raise UserError(f"--{name} {value}: is neither a file nor a folder, so it cannot be read")
    for name in ("real", "train_data_dir", "dataset_name"):
        if options.generated and getattr(options, name) and is_same(options.generated, getattr(options, name)):
            raise UserError(
                f"--generated {options.generated} and --{name} {getattr(options, name)} are the same images"
            )
    run_config = RunFolder(Path(options.run_dir or "").expanduser()).config_file
    if options.run_dir and not options.nll and not run_config.is_file():
        raise UserError(
            f"--run_dir {options.run_dir}: no run is there (no {run_config.name}); images are measured with --generated"
        )


def is_same(one: str, other: str) -> bool:
    """Return whether two names are of one file or folder."""
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
