"""The options of prepare_data.py."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import UserError
from common.machine import default_num_workers
from common.options import (
    BELOW_ONE,
    LARGEST_INT,
    NUM_WORKERS,
    RESOLUTION,
    ConfigOptions,
    from_to,
    option,
    parse_options,
    section,
)
from image_data.data_options import INTERPOLATION


@section("photos to prepare, and what to make of them")
class PreparationOptions:
    source: str | None = option(
        None,
        "Folder or archive (zip, tar) with photos: SYSU-Shape, Animals-10, DTD, class folders, train/ and test/, "
        "metadata.jsonl or CSV with captions, or just images. Usually given as the first word, without the flag.",
        saved=False,
        positional=True,
    )
    output_dir: str | None = option(
        None, "Folder to create, or the folder for the report with --check (default: runs/check-<source>).", saved=False
    )
    check: bool = option(
        False,
        "Only report what is in the source and what would cause trouble in training; exit code 1 if there is trouble.",
        saved=False,
    )
    resolution: int | None = option(
        None, "Resize the shorter side to this many pixels (default: photos keep their sizes).", RESOLUTION
    )
    center_crop: bool = option(
        False, "Crop photos to squares now; otherwise training crops them, at random places.", not_with="check"
    )
    interpolation: Literal["bicubic", "bilinear"] = option(
        INTERPOLATION, "Filter for resizing, with antialiasing; the diffusers example uses bilinear.", not_with="check"
    )
    channels: Literal["auto", "1", "3", "4"] = option(
        "auto",
        "Colour channels: 1 grey, 3 RGB, 4 RGBA. auto keeps grey photos grey and makes all others RGB.",
        not_with="check",
    )
    classes: list[str] = option([], "Use only these classes.")
    captions: str | None = option(
        None, "Template for the captions of photos without one, such as 'a photo of a {class}'.", not_with="check"
    )
    eval_fraction: float | None = option(
        None, "Share of each class to set aside for evaluation (default: the source's own split, or 0.1).", BELOW_ONE
    )
    eval_split: Literal["test", "validation"] = option(
        "test", "Name of the split that is set aside for evaluation.", not_with="eval_fraction=0.0"
    )
    seed: int = option(
        0, "Seed that decides, with their names, which photos are set aside for evaluation.", from_to(0, LARGEST_INT)
    )
    sysu_folders: bool = option(
        False,
        "Name the folders train_data and eval_data, and add normalized_eval_data: eval_data cropped to squares.",
        not_with="check",
    )
    num_workers: int = option(default_num_workers(1), "Processes that read and write images.", NUM_WORKERS, saved=False)


@dataclass
class PrepareOptions(ConfigOptions, PreparationOptions):
    """All options of prepare_data.py."""


def parse_prepare_options(arguments: list[str]) -> PrepareOptions:
    """Return the options of prepare_data.py; raise for values with which no preparation is possible."""
    options = parse_options(
        PrepareOptions,
        sorted(arguments, key=lambda argument: argument == "--check"),  # last, so that the source may follow it
        description="Turn a collection of photos into a split and resized image folder, or report on it (--check).",
        usage="%(prog)s [--check] SOURCE [--output_dir FOLDER] [--flag value ...]",
    )
    if options.captions is not None and "{class}" not in options.captions:
        raise UserError(f"--captions '{options.captions}': must say where the class goes, as 'a photo of a {{class}}'")
    for name in ("center_crop", "sysu_folders"):
        if getattr(options, name) and options.resolution is None:
            raise UserError(f"--{name} needs --resolution: the size of the squares")
    return options


def folders_of(options: PrepareOptions) -> tuple[Path, Path]:
    """Return where the photos are, and where the result goes."""
    if not options.source:
        raise UserError("name the photos: prepare_data.py SOURCE --output_dir FOLDER, or --check SOURCE")
    source = Path(options.source).expanduser()
    real_source = Path(os.path.realpath(source))
    if not os.path.exists(source):
        raise UserError(f"{source}: there is no such folder or archive that can be read ({real_source})")
    if not os.path.isdir(source) and not os.path.isfile(source):
        raise UserError(f"{source}: is neither a folder nor a file, so it cannot be read")  # a pipe, a device
    if not options.output_dir and not options.check:
        raise UserError("--output_dir: name the folder to make, or use --check to look at the photos only")
    output = Path(options.output_dir or f"runs/check-{real_source.stem}").expanduser()
    real_output = Path(os.path.realpath(output))
    if real_output == real_source or real_output in real_source.parents:
        raise UserError(f"--output_dir {output}: must not be the folder of the photos itself, or one around it")
    return source, output
