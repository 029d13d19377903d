#!/usr/bin/env python
"""Make a pipeline of the weights of another DDPM project, for generate.py, evaluate.py and diffusers.

python import_weights.py ema_diffusion_cifar10_model/model-790000.ckpt --output_dir models/ho_cifar10
python import_weights.py cifar10_uncond_50M_500K.pt --output_dir models/improved --ddpm_num_steps 4000 \
--ddpm_beta_schedule cosine
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import UserError, run_script
from common.files import check_folder, follow_umask, replace_folder, sha256, write_atomically
from common.options import NUM_STEPS, POSITIVE, RESOLUTION, ConfigOptions, option, parse_options, section

logger = logging.getLogger("import_weights")


@section("weights")
class ImportOptions:
    weights_file: str | None = option(
        None,
        "File of weights: .pt, .ckpt, .safetensors, or .npz with TensorFlow's names; may be given as the first word.",
        positional=True,
    )
    output_dir: str | None = option(None, "Folder for the pipeline; new or empty.")
    weights: Literal["ema", "raw"] | None = option(None, "The weights to take if the file holds both (default: ema).")
    resolution: int | None = option(
        None,
        "Size of the images (default: follows from the level that has attention, of 16x16; 32 for CIFAR-10).",
        RESOLUTION,
    )
    num_heads: int = option(
        4, "Number of attention heads, for weights of improved-diffusion; other projects use one.", POSITIVE
    )
    ddpm_num_steps: int = option(1000, "T, the number of diffusion steps.", NUM_STEPS)
    ddpm_beta_schedule: Literal["linear", "cosine"] = option("linear", "Beta schedule of the training.")
    variance_type: Literal["fixed_large", "fixed_small"] | None = option(
        None,
        "Variance that the pipeline names (default: as in the paper, fixed_large up to 32 pixels, else fixed_small).",
    )


@dataclass
class Options(ConfigOptions, ImportOptions):
    """All options of this script."""


def parse(arguments: list[str]) -> Options:
    """Return the options; raise for what cannot be read, or written."""
    description = "Convert the weights of another DDPM project to a pipeline of diffusers."
    usage = "%(prog)s FILE --output_dir FOLDER [--flag value ...]"
    options = parse_options(Options, arguments, description=description, usage=usage)
    if options.weights_file is None or options.output_dir is None:
        raise UserError("name a file of weights and a folder: import_weights.py FILE --output_dir FOLDER")
    path, folder = paths_of(options)
    # A checkpoint of TensorFlow is named by the beginning that its files have in common.
    if path.with_name(f"{path.name}.index").exists() or path.suffix in (".index", ".meta") or ".data-" in path.name:
        raise UserError(f"{path} is a TensorFlow checkpoint: turn it into an .npz first, as docs/pretrained.md shows")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if folder.name in ("", "..") or (check_folder(folder) and any(folder.iterdir())):
        raise UserError(f"--output_dir {folder}: must be a new or empty folder, and not the current one")
    return options


def paths_of(options: Options) -> tuple[Path, Path]:
    return Path(options.weights_file), Path(options.output_dir)


def main() -> None:
    options = parse(sys.argv[1:])
    path, folder = paths_of(options)

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from diffusers import DDPMPipeline

    from common.progress import set_up_logging
    from run_folder.folder import PIPELINE_STEP, add_to_index
    from run_folder.imported_weights import (
        IMPROVED,
        LARGEST_FIXED_LARGE,
        convert,
        project_of,
        read_weights,
        scheduler_for,
    )

    set_up_logging(is_main=True)
    weights = read_weights(path, options.weights)
    project = project_of(weights)
    network = convert(weights, project, options.resolution, options.num_heads)
    size = network.config.sample_size
    variance_type = options.variance_type or ("fixed_large" if size <= LARGEST_FIXED_LARGE else "fixed_small")
    scheduler = scheduler_for(project, options.ddpm_beta_schedule, options.ddpm_num_steps, variance_type)
    settings = f"{options.ddpm_beta_schedule}, T={options.ddpm_num_steps}, variance {variance_type}"
    if project.arithmetic is IMPROVED:  # nothing in the file says so
        settings += f", {options.num_heads} head(s)"
    logger.info("%s: weights of %s, %sx%s, %s", path, project.name, size, size, settings)

    # Whole or not at all.
    aside = folder.with_name(f".{folder.name}.tmp")
    DDPMPipeline(network, scheduler.plain()).save_pretrained(aside)
    follow_umask(aside)
    add_to_index(aside, {PIPELINE_STEP: None})
    card = f"""---
library_name: diffusers
tags: [diffusers, unconditional-image-generation]
---

# {folder.name}

Weights of a DDPM, converted from `{path.name}` (sha256 `{sha256(path)}`), a file of {project.name};
{network.num_parameters():,} parameters, {size}x{size} images, {settings}. The licence is that of the original weights.
"""
    write_atomically(aside / "README.md", card)
    replace_folder(aside, folder)
    logger.info("%s holds the pipeline: python generate.py %s", folder, folder)


if __name__ == "__main__":
    run_script(main)
