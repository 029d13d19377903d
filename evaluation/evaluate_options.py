"""The options of evaluate.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from common.errors import UserError
from common.options import (
    EMA_LENGTH,
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


@section("what to measure: images, or the checkpoints of a run")
class ImagesOptions:
    run_dir: str | None = option(
        None,
        "Measure the checkpoints of this run, with images generated for each. Usually given as the first word.",
        positional=True,
    )
    generated: str | None = option(None, "Measure these images: a folder of image or parquet files, or an .npz.")
    compare: list[str] = option(
        [], "Compare two or more measured runs: their curves in one plot, and how long each takes to reach equal FID."
    )
    num_images: int | None = option(
        None,
        "Number of images to measure (default: all images of --generated, or 10000 for each checkpoint of a run).",
        from_to(FEWEST_IMAGES, MOST_IMAGES),
    )
    nll: bool = option(
        False,
        "Generate nothing; compute the variational bound on the negative log-likelihood (bits per dimension, rate and "
        "distortion) of --num_images training and as many test images. For any model, not only runs.",
        only_with="run_dir",
    )


@section("for a run: its checkpoints, and how to generate their images")
class RunOptions:
    checkpoints: list[str] = option(
        [],
        "Steps of the checkpoints to measure (default: all that exist; with --nll or --ema_length the newest). 'none' "
        "only loads the feature network and prepares the statistics of the real images.",
        not_with="watch",
    )
    watch: bool = option(
        False,
        "Measure a run while it is trained: wait for its checkpoints and measure each once as it appears, until the "
        "run is complete.",
    )
    keep_best: Literal[
        "fid", "sfid", "kid", "is", "fd", "kd", "precision", "recall", "density", "coverage", "condition_accuracy"
    ] | None = option(
        None,
        "Keep the best checkpoint by this metric in the folder best of the run, where it is never pruned; fd and kd "
        "are the distances with --features other than inception.",
    )  # fmt: skip
    weights: Literal["ema", "raw"] | None = option(
        None, "Use the moving average of the weights, or the raw weights (default: ema, if there is one)."
    )
    ema_length: list[float] = option(
        [],
        "For a run with --ema power: measure moving averages of these lengths instead, sigma_rel of EDM2, such as 0.02 "
        "0.05 0.1, and draw the metrics over the length.",
        EMA_LENGTH,
        not_with="weights=raw watch keep_best",  # a length of the average is no checkpoint that could be kept
    )
    batch_size: int | None = option(
        None,
        "Images per process in one forward pass (default: the fastest size, measured at the start). Lower it if "
        "memory runs out.",
        POSITIVE,
    )
    guidance_scales: list[float] = option(
        [1.0],
        "For a conditional run: measure it at these guidance scales; 1 means no guidance. Samples are generated for "
        "the captions of the real images, or for their classes in the same proportions.",
        NOT_NEGATIVE,
    )
    repeats: int = option(
        1,
        "Measure this many disjoint sets of --num_images images (of the seeds 0, 1, ...); report mean and spread.",
        from_to(1, 100),
    )
    keep_images: bool = option(False, "Keep the generated images in the run's folder, where generate.py puts them.")


@section("what to compare with (default for a run: the images it was trained on)")
class ReferenceOptions:
    real: str | None = option(None, "Real images: a folder of image or parquet files, or an .npz.")
    dataset_name: str | None = option(None, "Real images: a data set from the Hub, from a local folder, or 'digits'.")
    dataset_config_name: str | None = option(
        None, "Which configuration of the data set to use, if it has several.", only_with="dataset_name"
    )
    train_data_dir: str | None = option(None, "Real images: a folder that train_unconditional.py can train on.")
    split: list[str] = option(
        [],
        "Split of the data set to use, or several: images are generated once and measured against each (default: "
        "train; with --nll train and test).",
        not_with="real statistics",
    )
    image_column: str | None = option(
        None, "Column with the images (default: the only one there is).", only_with="dataset_name train_data_dir"
    )
    resolution: int | None = option(
        None,
        "Resize real images to this size, with a centre crop (default: the size of the generated images).",
        RESOLUTION,
        not_with="statistics",
    )
    on_bad_image: Literal["fail", "skip"] = option(
        "fail", "What to do with an image that cannot be read: stop, or leave it out."
    )
    statistics: str | None = option(
        None, "Statistics instead of real images: a file from --save_statistics, or an .npz with mu and sigma."
    )
    statistics_mode: Mode | None = option(
        None, "For an .npz with mu and sigma: how its images were resized, as in --modes.", only_with="statistics"
    )
    save_statistics: str | None = option(
        None, "Save the statistics of the real images to this .safetensors file, for --statistics."
    )


@section("features")
class FeatureOptions:
    features: str = option(
        "inception",
        "Network to compare images with: inception (as in papers), dinov2, clip, a folder with a transformers vision "
        "model, or a file with the weights of VGG16.",
    )
    modes: list[str] = option(
        ["legacy_tensorflow"],
        "How images are resized for Inception, with the names of clean-fid: legacy_tensorflow (as in papers), clean, "
        "legacy_pytorch. Several can be given.",
        only_with="features=inception",
    )
    inception_weights: str | None = option(
        None,
        "File inception-2015-12-05.pt or .pth, if it is not found automatically.",
        only_with="features=inception",
    )
    feature_batch_size: int = option(32, "Images in one forward pass of the feature network.", POSITIVE)
    mixed_precision: Literal["no", "bf16"] = option(
        "no", "Precision of all networks. bf16 is faster; the error it causes in the features is logged."
    )
    allow_tf32: bool = option(
        False, "Use TF32 for matrix products on GPUs that have it: faster, slightly less exact. Noted with the results."
    )
    compile: bool = option(True, "Compile the feature network if there are enough images for that to save time.")


@section("output")
class OutputOptions:
    output_dir: str | None = option(
        None,
        "Folder for tables and curves (default: the run's folder, or 'comparison' with --compare; with --generated "
        "results are only printed).",
    )
    cache_dir: str | None = option(
        None, "Folder for cached weights, statistics and data (default: ~/.cache/exact-ddpm)."
    )
    num_workers: int | None = option(
        None,
        "Processes that decode images (default: usable cores divided by the processes here, at most 4).",
        NUM_WORKERS,
    )


@dataclass
class EvaluationOptions(
    ConfigOptions, FeatureOptions, SamplerOptions, RunOptions, OutputOptions, ReferenceOptions, ImagesOptions,
):  # fmt: skip
    """All options of an evaluation."""

    @property
    def precision(self) -> str:
        """Return the precision as noted beside the results; only results with the same one are compared."""
        names = [self.mixed_precision] * (self.mixed_precision != "no") + ["TF32"] * self.allow_tf32
        return " with ".join(names) or "no"


def parse_evaluation(arguments: list[str]) -> EvaluationOptions:
    """Return the options of evaluate.py, `validate`d."""
    options = parse_options(
        EvaluationOptions,
        arguments,
        description="Measure images: FID, sFID, KID, Inception Score, precision, recall, density and coverage.",
        usage="%(prog)s [RUN] [--flag value ...]",
    )
    validate(options)
    return options


def validate(options: EvaluationOptions) -> None:
    """Raise for options with which no evaluation is possible."""
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
            raise UserError(f"--{name} needs a run or --generated; --save_statistics alone measures no images")
    if options.save_statistics and (len(options.modes) > 1 or options.statistics):
        raise UserError("--save_statistics saves the statistics of one of the --modes: name one, and no --statistics")
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
            raise UserError(f"--{name} needs a run, as in evaluate.py runs/cifar10")
    for name, facts in facts_of(EvaluationOptions).items() if options.compare else ():
        if name not in ("compare", "output_dir", "config") and getattr(options, name) != facts.default:
            raise UserError(f"--{name} needs a run or --generated; --compare reads what has been measured")
    for name, facts in facts_of(EvaluationOptions).items() if options.nll else ():
        if name not in WITH_NLL and getattr(options, name) != facts.default:
            raise UserError(f"--{name} has no effect with --nll, which generates no images: leave one of them out")
    if len(set(options.split)) < len(options.split):
        raise UserError(f"--split {' '.join(options.split)}: one of them is named twice")
    if options.save_statistics and len(options.split) > 1:
        raise UserError(f"--save_statistics saves the statistics of one --split, not of {' and '.join(options.split)}")
    others = {"fid": "fd", "sfid": "fd", "kid": "kd", "is": "fd"}
    others = {"fd": "fid", "kd": "kid"} if options.features == "inception" else others
    if other := others.get(options.keep_best):
        measured = f"is not measured with --features {options.features}; choose {other}"
        raise UserError(f"--keep_best {options.keep_best}: {measured}")
    if options.keep_best and len(options.guidance_scales) > 1:
        scales = " ".join(f"{scale:g}" for scale in options.guidance_scales)
        raise UserError(f"--keep_best needs one guidance scale to judge by, not --guidance_scales {scales}")
    if len(set(options.ema_length)) < len(options.ema_length):
        raise UserError(f"--ema_length {' '.join(map(str, options.ema_length))}: one of them is named twice")
    if options.run_dir and options.resolution:
        raise UserError("--resolution: for a run, real images are always resized to the resolution of the run")
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
            f"--run_dir {options.run_dir}: there is no run (no {run_config.name}); to measure images use --generated"
        )


def is_same(one: str, other: str) -> bool:
    """Return whether two names are of one file or folder."""
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
