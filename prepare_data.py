#!/usr/bin/env python
"""Make a split image folder out of a clone, an archive or a folder of photos, or check what is in one.

python prepare_data.py sysu-shape-dataset --output_dir data/sysu --resolution 64
python prepare_data.py --check animals10.zip --resolution 64
"""

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, run_script
from common.files import LOCK_FILE, lock, make_folder, printable, unlock, write_atomically
from common.interruption import stops_deferred
from common.options import values_of
from preparation.prepare_options import PrepareOptions, folders_of, parse_prepare_options
from run_folder.config import PAPER_BATCH_SIZE

if TYPE_CHECKING:
    from preparation.layouts import Collection, Photo

logger = logging.getLogger("prepare_data")

DEFAULT_EVAL_FRACTION = 0.1
SYSU_FOLDERS = {"train": "train_data", "validation": "eval_data", "test": "eval_data"}
SYSU_SQUARES = "normalized_eval_data"


def main() -> None:
    options = parse_prepare_options(sys.argv[1:])
    source, output = folders_of(options)

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.progress import set_up_logging

    set_up_logging(is_main=True)
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may have letters that the terminal has not
    try:
        with stops_deferred(), held(output):
            healthy = (check if options.check else prepare)(options, source, output)
    except OSError as error:  # a full or failing disk is not this program's mistake
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"--output_dir {output}: {error.strerror or error}{where}; the same command continues"
        ) from error
    if options.check:
        sys.exit(0 if healthy else 1)


@contextmanager
def held(output: Path) -> Iterator[None]:
    """Hold the output folder; a call that fails before its first image leaves it as it was, for the next one."""
    from preparation.image_folder import OWN_NAME

    was_there, was_locked = output.is_dir(), (output / LOCK_FILE).exists()
    make_folder(output)
    lock(output, "--output_dir")
    before = {entry.name for entry in output.iterdir()}
    try:
        yield
    except BaseException:
        if not any(OWN_NAME.search(name) for _, _, names in os.walk(output) for name in names):
            for entry in output.iterdir():
                if entry.name not in before:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            if not was_locked:
                unlock(output)
            if not was_there:
                output.rmdir()
        raise


def prepare(options: PrepareOptions, source: Path, output: Path) -> None:
    """Write what is missing of the image folder."""
    from preparation.archives import identity_of, unpacked
    from preparation.image_folder import OutputFormat, PreparedFolder, plan, with_captions

    archive = identity_of(source)
    settings = {"source": str(source.resolve()), "archive": archive, **values_of(options, lambda facts: facts.saved)}
    prepared = PreparedFolder(output, settings)
    if archive is not None and prepared.is_complete():
        print(f"{output}: nothing to do, {len(prepared.manifest['images']):,} images are there")
        return
    folders, squares = (SYSU_FOLDERS, SYSU_SQUARES) if options.sysu_folders else ({}, None)
    channels = None if options.channels == "auto" else int(options.channels)
    with unpacked(source, output) as folder:
        collection, splits = find_photos(options, folder, output)
        splits = {split: with_captions(photos, options.captions) for split, photos in splits.items()}
        output_format = OutputFormat(options.resolution, options.center_crop, channels, options.interpolation)
        targets = plan(splits, output_format, folders, squares)
        outcomes = prepared.write_images(targets, options.num_workers)
    left_out = prepared.finish(collection, targets, outcomes)

    for name, reason in left_out.items():
        logger.warning("left out: %s (%s)", printable(name), reason)
    made = sum(outcome.made for outcome in outcomes)
    there = sum(outcome.suffix is not None for outcome in outcomes) - made
    print(f"{output}: {made:,} images written, {there:,} already there; files left out: {len(left_out):,}")
    folder = output / SYSU_FOLDERS["train"] if options.sysu_folders else output
    words = ["python", "train_unconditional.py", str(folder), f"--output_dir=runs/{output.resolve().name}"]
    words += [f"--resolution={options.resolution}"] if options.resolution else []
    words += ["--max_train_steps=20000", "--lr_warmup_steps=100", "--ema_max_decay=0.995"]
    in_training = len(splits.get("train", ()))
    words += [f"--total_batch_size={min(16, in_training)}"] if in_training < PAPER_BATCH_SIZE else []
    print(f"next: {shlex.join(words)}")


def check(options: PrepareOptions, source: Path, output: Path) -> bool:
    """Report on the photos; return whether there are no problems."""
    from preparation.archives import unpacked
    from preparation.findings import draw_contact_sheet, gather_findings, summary

    with unpacked(source, output) as folder:
        collection, splits = find_photos(options, folder, output)
        findings = gather_findings(collection, splits, options.resolution, options.num_workers)
        write_atomically(output / "report.json", json.dumps(asdict(findings), indent=1))
        draw_contact_sheet(collection, findings, output / "contact_sheet.png")
    print(summary(findings))
    print(f"report: {output / 'report.json'}, {output / 'contact_sheet.png'}")
    return not findings.hurts


def find_photos(options: PrepareOptions, folder: Path, output: Path) -> "tuple[Collection, dict[str, list[Photo]]]":
    """Return the photos of a folder, and which of them are for training and which for evaluation."""
    from preparation.image_folder import own_split, split_photos
    from preparation.layouts import recognise

    collection = recognise(folder, leave_out=output).only_classes(options.classes)
    logger.info("%s: %s, %s images", options.source, collection.layout, f"{len(collection.photos):,}")
    if options.eval_fraction is None and collection.has_split:
        return collection, own_split(collection.photos)
    fraction = DEFAULT_EVAL_FRACTION if options.eval_fraction is None else options.eval_fraction
    return collection, split_photos(collection.photos, fraction, options.eval_split, options.seed)


if __name__ == "__main__":
    run_script(main)
