"""The contents of a collection of photos, and the problems that a training would have with them."""

import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from scipy.cluster.hierarchy import DisjointSet

from common.files import printable
from image_data.decode import UndecodableImage, decode_image, inspect_image, read_image_file
from image_data.sources import spread
from image_data.workers import process_files
from preparation.layouts import Collection, Photo

SMALLEST_IMAGE = 8  # for which networks are defined

# Near duplicates: hashes that differ in at most so many of 63 bits, and small grey copies that are alike.
HASH_DISTANCE, CORRELATION, GREY_LEVELS = 6, 0.97, 2.0
HASHED_SIDE, COMPARED_SIDE, FREQUENCIES = 32, 16, 8
MOST_PAIRS = 2**20  # looked at together, which bounds the memory

UNEVEN, VERY_UNEVEN = 1.5, 5.0  # the largest class over the smallest: worth knowing, and worth doing something
LISTED = 5

SHEET_THUMBNAIL, SHEET_COLUMNS, SHEET_CLASSES, SHEET_GROUPS, SHEET_MARGIN = 96, 8, 60, 6, 150


class PhotoProperties(NamedTuple):
    """The properties of one photo. The sizes are those of the upright image."""

    width: int
    height: int
    mode: str
    kind: str
    digest: bytes  # of the file
    perceptual_hash: int  # of what it shows
    small: np.ndarray  # uint8 [256], grey


@dataclass
class Findings:
    """Everything about a collection that the report says; names are those of `Photo`."""

    layout: str
    photos: int
    classes: dict[str, int]
    splits: dict[str, dict[str, int]]
    width: list[int]  # smallest, median, largest
    height: list[int]
    modes: dict[str, int]
    kinds: dict[str, int]
    unreadable: dict[str, str]
    too_small: dict[str, str]
    identical: list[list[str]]
    near_duplicates: list[list[str]]
    in_several_classes: list[list[str]]
    across_the_split: list[list[str]]
    imbalance: float | None
    hurts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _inspect(resolution: int | None, photo: Photo) -> PhotoProperties | str:
    """Return the properties of a photo, or the reason why it cannot be read."""
    try:
        data = read_image_file(photo.path)
        image = inspect_image(data, HASHED_SIDE, resolution)
    except UndecodableImage as error:
        return str(error)
    except MemoryError:
        return "too large for the memory of this machine"
    times = HASHED_SIDE // COMPARED_SIDE
    small = image.grey.reshape(COMPARED_SIDE, times, COMPARED_SIDE, times).mean((1, 3)).astype(np.uint8).ravel()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return PhotoProperties(*image[:4], digest, perceptual_hash(image.grey), small)


def perceptual_hash(grey: np.ndarray) -> int:
    """Return 63 bits: which low frequencies of the cosine transform, but the mean (exposure), exceed their median."""
    position = np.arange(HASHED_SIDE)
    cosines = np.cos(np.pi / HASHED_SIDE * (position + 0.5) * np.arange(FREQUENCIES)[:, None])
    # Rounded, so that an image of one colour has zeros and not the signs of rounding errors.
    spectrum = np.round(cosines @ grey.astype(np.float64) @ cosines.T, 3).ravel()[1:]
    return int.from_bytes(np.packbits(spectrum > np.median(spectrum)).tobytes(), "big")


def groups_of_near_duplicates(hashes: np.ndarray, small: np.ndarray) -> list[list[int]]:
    """Return groups of photos, two or more each, that are linked by pairs of near duplicates.

    Hashes that differ in at most d bits agree in one of d + 1 bands of bits at least, so that only photos which
    share a band are compared, a bounded number of pairs at a time.
    """
    # Those that agree in everything go together at once, be they as many as they like.
    rows = np.column_stack([hashes.view(np.uint8).reshape(-1, 8), small])
    distinct, row_of = np.unique(rows, axis=0, return_inverse=True)
    unique_hashes = np.ascontiguousarray(distinct[:, :8]).view(np.uint64).ravel()
    linked = DisjointSet(range(len(distinct)))
    bits = 63 // (HASH_DISTANCE + 1)
    for band in range(HASH_DISTANCE + 1):
        bands = (unique_hashes >> np.uint64(band * bits + 1)) & np.uint64(2**bits - 1)
        order = np.argsort(bands, kind="stable")
        for bucket in np.split(order, np.nonzero(np.diff(bands[order]))[0] + 1):
            for first, second in _close_pairs(bucket, unique_hashes, distinct[:, 8:]):
                linked.merge(first, second)
    groups = defaultdict(list)
    for photo, row in enumerate(row_of.ravel().tolist()):
        groups[linked[row]].append(photo)
    return [group for group in groups.values() if len(group) > 1]


def _close_pairs(bucket: np.ndarray, hashes: np.ndarray, small: np.ndarray) -> Iterator[tuple[int, int]]:
    rows = max(1, MOST_PAIRS // len(bucket))
    for start in range(0, len(bucket) - 1, rows):
        block = bucket[start : start + rows]
        distances = np.bitwise_count(hashes[block, None] ^ hashes[bucket])
        first, second = np.nonzero(np.triu(distances <= HASH_DISTANCE, k=start + 1))
        for part in range(0, len(first), MOST_PAIRS // COMPARED_SIDE**2):
            pairs = slice(part, part + MOST_PAIRS // COMPARED_SIDE**2)
            ones, others = block[first[pairs]], bucket[second[pairs]]
            alike = _alike(small[ones].astype(np.float32), small[others].astype(np.float32))
            yield from zip(ones[alike].tolist(), others[alike].tolist(), strict=True)


def _alike(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which small grey copies show the same, perhaps in another light; one colour has no correlation."""
    difference = np.abs(ones - others).mean(1)
    ones, others = ones - ones.mean(1, keepdims=True), others - others.mean(1, keepdims=True)
    scale = np.sqrt((ones**2).sum(1) * (others**2).sum(1))
    return ((ones * others).sum(1) > CORRELATION * scale) | (difference < GREY_LEVELS)


def gather_findings(
    collection: Collection, splits: dict[str, list[Photo]], resolution: int | None, num_workers: int
) -> Findings:
    """Look at every photo, and return everything that there is to say about them."""
    inspect, advice = partial(_inspect, resolution), "the same command begins anew"
    inspected = process_files(inspect, collection.photos, num_workers, "Checking", advice)
    outcomes = {photo.name: outcome for photo, outcome in zip(collection.photos, inspected, strict=True)}
    unreadable = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    readable = {name: outcome for name, outcome in outcomes.items() if name not in unreadable}
    label_of = {photo.name: photo.label for photo in collection.photos if photo.name in readable}
    split_of = {photo.name: split for split, members in splits.items() for photo in members}
    images, wanted = list(readable.values()), resolution or SMALLEST_IMAGE

    same_file = defaultdict(list)
    for name, image in readable.items():
        same_file[image.digest].append(name)
    hashes = np.array([image.perceptual_hash for image in images], np.uint64)
    small, names = np.array([image.small for image in images], np.uint8), list(readable)
    groups = [[names[index] for index in group] for group in groups_of_near_duplicates(hashes, small)] if images else []
    classes = _counts(label for label in label_of.values() if label is not None)
    findings = Findings(
        layout=collection.layout,
        photos=len(collection.photos),
        classes=classes,
        splits={
            split: _counts(photo.label or "" for photo in members if photo.name in readable)
            for split, members in splits.items()
        },
        width=_range([image.width for image in images]),
        height=_range([image.height for image in images]),
        modes=dict(Counter(image.mode for image in images).most_common()),
        kinds=dict(Counter(image.kind for image in images).most_common()),
        unreadable=collection.left_out | unreadable,
        too_small={
            name: f"{image.width}x{image.height}" for name, image in readable.items() if min(image[:2]) < wanted
        },
        identical=[names for names in same_file.values() if len(names) > 1],
        near_duplicates=[group for group in groups if len({readable[name].digest for name in group}) > 1],
        in_several_classes=[group for group in groups if len({label_of[name] for name in group}) > 1],
        across_the_split=[group for group in groups if len({split_of[name] for name in group}) > 1],
        imbalance=round(max(classes.values()) / min(classes.values()), 2) if classes else None,
    )
    _judge(findings, wanted)
    return findings


def _judge(findings: Findings, wanted: int) -> None:
    """Add the problems, and what is worth knowing; each says what to do."""
    hurts, notes = findings.hurts, findings.notes
    if not findings.kinds:
        hurts.append("there is no image to train on")
    if bad := findings.unreadable:
        hurts.append(f"{_number_of(bad, 'file')} cannot be used and will be left out: {_with_reasons(bad)}")
    if small := findings.too_small:
        how_many = _number_of(small, "image")
        hurts.append(f"{how_many} with a shorter side below {wanted} will be enlarged: {_with_reasons(small)}")
    if twice := findings.in_several_classes:
        hurts.append(f"{_number_of(twice, 'photo')} in more than one class, keep one of each: {_equal(twice)}")
    if twice := findings.across_the_split:
        where = f"in {' and '.join(findings.splits)} at once"
        hurts.append(f"{_number_of(twice, 'photo')} {where}, keep one of each: {_equal(twice)}")
    if twice := findings.identical:
        notes.append(f"{_number_of(twice, 'file')} there more than once: {_equal(twice)}")
    if twice := findings.near_duplicates:
        notes.append(f"{_number_of(twice, 'group')} of near duplicates, to be looked at: {_equal(twice)}")
    if findings.imbalance is not None and findings.imbalance >= UNEVEN:
        sizes = findings.classes
        largest, smallest = printable(max(sizes, key=sizes.get)), printable(min(sizes, key=sizes.get))
        (hurts if findings.imbalance >= VERY_UNEVEN else notes).append(
            f"{largest} has {findings.imbalance:.1f} times as many images as {smallest}: "
            "train_conditional.py --balance draws the classes evenly"
        )


def summary(findings: Findings) -> str:
    """Return the report for a terminal."""
    lines = [f"{findings.layout}: {findings.photos:,} images"]
    width = max((len(printable(name)) for name in findings.classes), default=0)
    for name, count in findings.classes.items():
        parts = [f"{split} {counts.get(name, 0):,}" for split, counts in findings.splits.items()]
        lines.append(f"  {printable(name):{width}}  {count:6,}   {'  '.join(parts)}")
    if not findings.classes:
        parts = [f"{split} {sum(counts.values()):,}" for split, counts in findings.splits.items()]
        lines.append(f"  no classes   {'  '.join(parts)}")
    if findings.kinds:
        for name, (smallest, median, largest) in (("width", findings.width), ("height", findings.height)):
            lines.append(f"{name}: {smallest} to {largest}, median {median}")
        kinds, modes = (
            ", ".join(f"{name} {count:,}" for name, count in counts.items())
            for counts in (findings.kinds, findings.modes)
        )
        lines.append(f"stored as: {kinds}; modes: {modes}")
    lines += [f"problem: {line}" for line in findings.hurts] + [f"note: {line}" for line in findings.notes]
    return "\n".join(lines)


def draw_contact_sheet(collection: Collection, findings: Findings, path: Path) -> None:
    """Draw a row of photos from each class, and below them the groups of duplicates."""
    by_name = {photo.name: photo for photo in collection.photos if photo.name not in findings.unreadable}
    classes = defaultdict(list)
    for photo in by_name.values():
        classes[photo.label or ""].append(photo)
    if "" in classes:  # no classes: as many rows of everything
        members = classes.pop("")
        classes |= {f"{row + 1}": members[row::SHEET_COLUMNS] for row in range(min(SHEET_COLUMNS, len(members)))}
    chosen = [sorted(classes)[index] for index in spread(len(classes), SHEET_CLASSES)]
    rows = [(name, [classes[name][index] for index in spread(len(classes[name]), SHEET_COLUMNS)]) for name in chosen]
    shown = []
    for title, groups in (
        ("in several classes", findings.in_several_classes),
        ("across the split", findings.across_the_split),
        ("near duplicates", findings.near_duplicates),
    ):
        new = [group for group in groups if group not in shown][:SHEET_GROUPS]
        rows += [(title, [by_name[name] for name in group]) for group in new]
        shown += new

    # matplotlib's font has the letters of most languages, Pillow's those of English.
    step, font = SHEET_THUMBNAIL + 2, ImageFont.truetype(get_data_path() + "/fonts/ttf/DejaVuSans.ttf", 13)
    sheet = Image.new("RGB", (SHEET_MARGIN + SHEET_COLUMNS * step, max(1, len(rows)) * step), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (title, members) in enumerate(rows):
        draw.text((6, row * step + step // 2 - 8), printable(title)[:20], "black", font)
        for column, photo in enumerate(members[:SHEET_COLUMNS]):
            with contextlib.suppress(UndecodableImage):  # one that is hundreds of times as long as it is wide
                pixels = decode_image(read_image_file(photo.path), 3, SHEET_THUMBNAIL, center_crop=True)
                sheet.paste(Image.fromarray(pixels.transpose(1, 2, 0)), (SHEET_MARGIN + column * step, row * step))
    sheet.save(path)


def _counts(labels: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(labels).items()))


def _range(values: list[int]) -> list[int]:
    return [min(values), int(np.median(values)), max(values)] if values else []


def _number_of(things: dict | list, name: str) -> str:
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"


def _with_reasons(reasons: dict[str, str]) -> str:
    return _first_few([f"{printable(name)} ({reason})" for name, reason in reasons.items()], ", ")


def _equal(groups: list[list[str]]) -> str:
    return _first_few([" = ".join(printable(name) for name in group[:LISTED]) for group in groups], "; ")


def _first_few(texts: list[str], separator: str) -> str:
    return separator.join(texts[:LISTED]) + (" and others" if len(texts) > LISTED else "")
