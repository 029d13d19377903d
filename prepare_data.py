#!/usr/bin/env python
"""Make a split image folder out of a clone, an archive or a folder of photos, or check what is in one.

python prepare_data.py sysu-shape-dataset --output data/sysu --resolution 64
python prepare_data.py --check animals10.zip --resolution 64
"""

import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from common import interruption
from common.errors import UserError, run_script
from common.files import make_folder, write_atomically
from common.options import values_of
from preparation.prepare_options import PrepareOptions, folders_of, parse_prepare_options

if TYPE_CHECKING:
    from preparation.layouts import Collection, Photo

logger = logging.getLogger("prepare_data")

DEFAULT_EVAL_FRACTION = 0.1
SYSU_FOLDERS = {"train": "train_data", "validation": "eval_data", "test": "eval_data"}
SYSU_NORMALISED = "normalized_eval_data"


def main() -> None:
    options = parse_prepare_options(sys.argv[1:])
    source, output = folders_of(options)

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.files import lock
    from common.progress import set_up_logging
    from preparation.archives import opened

    set_up_logging(is_main=True)
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may have letters that the terminal has not
    with interruption.deferred(), one_line_for_disk_errors(output):
        make_folder(output)
        lock(output, "--output")
        if not options.check:
            prepare(options, source, output)
            return
        with opened(source, output) as folder:
            healthy = check(options, folder, output)
    sys.exit(0 if healthy else 1)


def prepare(options: PrepareOptions, source: Path, output: Path) -> None:
    """Write what is missing of the image folder."""
    from preparation.archives import identity_of, opened
    from preparation.image_folder import Look, finish, is_complete, open_output, plan, with_captions, write_images
    from preparation.photo_files import printable

    settings = values_of(options, lambda facts: facts.saved)
    settings = {"source": str(source.resolve()), "archive": identity_of(source), **settings}
    manifest = open_output(output, settings)
    if settings["archive"] is not None and is_complete(output, manifest):
        print(f"{output}: nothing to do, {len(manifest['images']):,} images are there")
        return
    with opened(source, output) as folder:
        collection, splits = photos_of(options, folder, output)
        splits = {split: with_captions(photos, options.captions) for split, photos in splits.items()}
        channels = None if options.channels == "auto" else int(options.channels)
        targets = plan(
            splits,
            Look(options.resolution, options.center_crop, channels),
            folders=SYSU_FOLDERS if options.sysu_folders else {},
            normalised=SYSU_NORMALISED if options.sysu_folders else None,
        )
        outcomes = write_images(targets, output, options.num_workers)
    left_out = finish(collection, targets, outcomes, manifest, output)

    for name, reason in left_out.items():
        logger.warning("left out: %s (%s)", printable(name), reason)
    made = sum(outcome.made for outcome in outcomes)
    there = sum(outcome.suffix is not None for outcome in outcomes) - made
    print(f"{output}: {made:,} images written, {there:,} already there; files left out: {len(left_out):,}")
    folder = output / SYSU_FOLDERS["train"] if options.sysu_folders else output
    size = f" --resolution {options.resolution}" if options.resolution else ""
    print(f"next: python train_unconditional.py --train_data_dir {shlex.quote(str(folder))}{size}")


def check(options: PrepareOptions, folder: Path, output: Path) -> bool:
    """Report on the photos; whether nothing in them would hurt."""
    from preparation.report import draw_contact_sheet, find, inspect_photos, summary

    collection, splits = photos_of(options, folder, output)
    seen = inspect_photos(collection.photos, options.num_workers)
    found = find(collection, splits, seen, options.resolution)
    draw_contact_sheet(collection, found, output / "contact_sheet.png")
    write_atomically(output / "report.json", json.dumps(asdict(found), indent=1))
    print(summary(found))
    print(f"report: {output / 'report.json'}, {output / 'contact_sheet.png'}")
    return not found.hurts


def photos_of(options: PrepareOptions, folder: Path, output: Path) -> "tuple[Collection, dict[str, list[Photo]]]":
    """Which photos there are, and which of them are for training and which for evaluation."""
    from preparation.image_folder import own_split, split_photos
    from preparation.layouts import only_classes, recognise

    collection = only_classes(recognise(folder, leave_out=output), options.classes)
    logger.info("%s: %s, %s images", options.source, collection.layout, f"{len(collection.photos):,}")
    if options.eval_fraction is None and collection.has_split:
        return collection, own_split(collection.photos)
    fraction = DEFAULT_EVAL_FRACTION if options.eval_fraction is None else options.eval_fraction
    return collection, split_photos(collection.photos, fraction, options.eval_split, options.seed)


@contextmanager
def one_line_for_disk_errors(output: Path) -> Iterator[None]:
    """A full or failing disk is not this program's mistake."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"--output {output}: {error.strerror or error}{where}; the same command continues") from error


if __name__ == "__main__":
    run_script(main)
