"""What is in a collection of photos, and what of it would hurt a training."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import Dataset

from image_data.decode import UndecodableImage, decode_image, inspect_image
from image_data.sources import spread
from image_data.workers import process_files
from preparation.layouts import Collection, Photo
from preparation.photo_files import printable, read_file

SMALLEST_IMAGE = 8  # for which networks are defined

# Near duplicates: hashes that differ in at most so many of 63 bits, and small grey copies that are alike.
HASH_DISTANCE, CORRELATION, GREY_LEVELS = 6, 0.97, 2.0
HASHED_SIDE, COMPARED_SIDE, FREQUENCIES = 32, 16, 8
MOST_PAIRS = 2**20  # looked at together, which bounds the memory

UNEVEN, VERY_UNEVEN = 1.5, 5.0  # the largest class over the smallest: worth knowing, and worth doing something
LISTED = 5

SHEET_THUMBNAIL, SHEET_COLUMNS, SHEET_CLASSES, SHEET_GROUPS, SHEET_MARGIN = 96, 8, 60, 6, 150


class Seen(NamedTuple):
    """What was seen of one photo. The sizes are those of the upright image."""

    width: int
    height: int
    mode: str
    kind: str
    digest: bytes  # of the file
    phash: int  # of what it shows
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


def inspect_photos(photos: list[Photo], num_workers: int) -> list[Seen | str]:
    """What is seen of every photo, or why nothing is."""
    return process_files(_Inspector(), photos, num_workers, "Checking", "the same command begins anew")


class _Inspector(Dataset):
    """Looks at several photos at a time, in a worker process."""

    def __getitem__(self, photos: list[Photo]) -> list[Seen | str]:
        return [self._look(photo) for photo in photos]

    def _look(self, photo: Photo) -> Seen | str:
        try:
            data = read_file(photo.path)
            image = inspect_image(data, HASHED_SIDE)
        except UndecodableImage as error:
            return str(error)
        except MemoryError:
            return "too large for the memory of this machine"
        times = HASHED_SIDE // COMPARED_SIDE
        small = image.grey.reshape(COMPARED_SIDE, times, COMPARED_SIDE, times).mean((1, 3)).astype(np.uint8).ravel()
        digest = hashlib.blake2b(data, digest_size=16).digest()
        return Seen(image.width, image.height, image.mode, image.kind, digest, perceptual_hash(image.grey), small)


def perceptual_hash(grey: np.ndarray) -> int:
    """63 bits: which of the lowest frequencies of the cosine transform are above their median.

    The mean, which is a matter of exposure, is not among them.
    """
    position = np.arange(HASHED_SIDE)
    cosines = np.cos(np.pi / HASHED_SIDE * (position + 0.5) * np.arange(FREQUENCIES)[:, None])
    # Rounded, so that an image of one colour has zeros and not the signs of rounding errors.
    spectrum = np.round(cosines @ grey.astype(np.float64) @ cosines.T, 3).ravel()[1:]
    return int.from_bytes(np.packbits(spectrum > np.median(spectrum)).tobytes(), "big")


def groups_of_near_duplicates(hashes: np.ndarray, small: np.ndarray) -> list[list[int]]:
    """Groups of photos, two or more each, that are linked by pairs of near duplicates.

    Hashes that differ in at most d bits agree in one of d + 1 bands of bits at least, so that only photos which
    share a band are compared, a bounded number of pairs at a time.
    """
    # Those that agree in everything go together at once, be they as many as they like.
    looks, member_of = np.unique(
        np.column_stack([hashes.view(np.uint8).reshape(-1, 8), small]), axis=0, return_inverse=True
    )
    unique_hashes = np.ascontiguousarray(looks[:, :8]).view(np.uint64).ravel()
    linked = _Linked(len(looks))
    bits = 63 // (HASH_DISTANCE + 1)
    for band in range(HASH_DISTANCE + 1):
        bands = (unique_hashes >> np.uint64(band * bits + 1)) & np.uint64(2**bits - 1)
        order = np.argsort(bands, kind="stable")
        for bucket in np.split(order, np.nonzero(np.diff(bands[order]))[0] + 1):
            for first, second in _close_pairs(bucket, unique_hashes, looks[:, 8:]):
                linked.join(first, second)
    groups = defaultdict(list)
    for photo, look in enumerate(member_of.ravel().tolist()):
        groups[linked.root(look)].append(photo)
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
    """Whether small grey copies show the same, perhaps in another light; images of one colour have no correlation."""
    difference = np.abs(ones - others).mean(1)
    ones, others = ones - ones.mean(1, keepdims=True), others - others.mean(1, keepdims=True)
    scale = np.sqrt((ones**2).sum(1) * (others**2).sum(1))
    return ((ones * others).sum(1) > CORRELATION * scale) | (difference < GREY_LEVELS)


class _Linked:
    """Which things are linked, directly or by others."""

    def __init__(self, count: int) -> None:
        self.parents = list(range(count))

    def root(self, one: int) -> int:
        while self.parents[one] != one:
            self.parents[one] = self.parents[self.parents[one]]
            one = self.parents[one]
        return one

    def join(self, one: int, other: int) -> None:
        self.parents[self.root(other)] = self.root(one)


def find(
    collection: Collection, splits: dict[str, list[Photo]], seen: list[Seen | str], resolution: int | None
) -> Findings:
    """Everything that there is to say about the photos, of which `seen` is what was seen."""
    readable = [(photo, look) for photo, look in zip(collection.photos, seen, strict=True) if isinstance(look, Seen)]
    photos, looks = [photo for photo, _ in readable], [look for _, look in readable]
    wanted = resolution or SMALLEST_IMAGE
    split_of = {photo.name: split for split, members in splits.items() for photo in members}
    label_of = {photo.name: photo.label for photo in photos}

    files = defaultdict(list)
    for photo, look in readable:
        files[look.digest].append(photo.name)
    identical = [names for names in files.values() if len(names) > 1]
    groups = []
    if looks:
        hashes, small = np.array([look.phash for look in looks], np.uint64), np.stack([look.small for look in looks])
        groups = [[photos[index].name for index in group] for group in groups_of_near_duplicates(hashes, small)]
    same_file = {name: digest for digest, names in files.items() for name in names}
    counts = Counter(photo.label for photo in photos if photo.label is not None)
    found = Findings(
        layout=collection.layout,
        photos=len(collection.photos),
        classes=dict(sorted(counts.items())),
        splits={
            split: _counts(photo for photo in members if photo.name in label_of) for split, members in splits.items()
        },
        width=_range([look.width for look in looks]),
        height=_range([look.height for look in looks]),
        modes=dict(Counter(look.mode for look in looks).most_common()),
        kinds=dict(Counter(look.kind for look in looks).most_common()),
        unreadable={
            **collection.left_out,
            **{
                photo.name: look
                for photo, look in zip(collection.photos, seen, strict=True)
                if not isinstance(look, Seen)
            },
        },
        too_small={
            photo.name: f"{look.width}x{look.height}"
            for photo, look in readable
            if min(look.width, look.height) < wanted
        },
        identical=identical,
        near_duplicates=[group for group in groups if len({same_file[name] for name in group}) > 1],
        in_several_classes=[group for group in groups if len({label_of[name] for name in group}) > 1],
        across_the_split=[group for group in groups if len({split_of[name] for name in group}) > 1],
        imbalance=round(max(counts.values()) / min(counts.values()), 2) if counts else None,
    )
    found.hurts, found.notes = _judge(found, wanted)
    return found


def _judge(found: Findings, wanted: int) -> tuple[list[str], list[str]]:
    """What would hurt, and what is worth knowing; each says what to do."""
    hurts, notes = [], []
    if not found.kinds:
        hurts.append("there is no image to train on")
    if found.unreadable:
        hurts.append(
            f"{_count(found.unreadable, 'file')} cannot be used and will be left out: {_some(found.unreadable)}"
        )
    if found.too_small:
        hurts.append(
            f"{_count(found.too_small, 'image')} with a shorter side below {wanted} will be enlarged: "
            f"{_some(found.too_small)}"
        )
    if found.in_several_classes:
        hurts.append(
            f"{_count(found.in_several_classes, 'photo')} in more than one class, keep one of each: "
            f"{_some_groups(found.in_several_classes)}"
        )
    if found.across_the_split:
        hurts.append(
            f"{_count(found.across_the_split, 'photo')} in {' and '.join(found.splits)} at once, keep one of each: "
            f"{_some_groups(found.across_the_split)}"
        )
    if found.identical:
        notes.append(f"{_count(found.identical, 'file')} there more than once: {_some_groups(found.identical)}")
    if found.near_duplicates:
        notes.append(
            f"{_count(found.near_duplicates, 'group')} of near duplicates, to be looked at: "
            f"{_some_groups(found.near_duplicates)}"
        )
    if found.imbalance is not None and found.imbalance >= UNEVEN:
        largest, smallest = max(found.classes, key=found.classes.get), min(found.classes, key=found.classes.get)
        (hurts if found.imbalance >= VERY_UNEVEN else notes).append(
            f"{printable(largest)} has {found.imbalance:.1f} times as many images as {printable(smallest)}: "
            "train_conditional.py --balance draws the classes evenly"
        )
    return hurts, notes


def summary(found: Findings) -> str:
    """The report for a terminal."""
    lines = [f"{found.layout}: {found.photos:,} images"]
    width = max((len(printable(name)) for name in found.classes), default=0)
    for name, count in found.classes.items():
        parts = [f"{split} {counts.get(name, 0):,}" for split, counts in found.splits.items()]
        lines.append(f"  {printable(name):{width}}  {count:6,}   {'  '.join(parts)}")
    if not found.classes:
        parts = [f"{split} {sum(counts.values()):,}" for split, counts in found.splits.items()]
        lines.append(f"  no classes   {'  '.join(parts)}")
    if found.kinds:
        for name, (smallest, median, largest) in (("width", found.width), ("height", found.height)):
            lines.append(f"{name}: {smallest} to {largest}, median {median}")
        lines.append(f"stored as: {_listed(found.kinds)}; modes: {_listed(found.modes)}")
    lines += [f"hurts: {line}" for line in found.hurts] + [f"note: {line}" for line in found.notes]
    return "\n".join(lines)


def draw_contact_sheet(collection: Collection, found: Findings, path: Path) -> None:
    """A row of photos from each class, and below them the groups of duplicates."""
    by_name = {photo.name: photo for photo in collection.photos if photo.name not in found.unreadable}
    classes = defaultdict(list)
    for photo in by_name.values():
        classes[photo.label or ""].append(photo)
    if "" in classes:  # no classes: as many rows of everything
        members = classes.pop("")
        classes |= {f"{row + 1}": members[row::SHEET_COLUMNS] for row in range(min(SHEET_COLUMNS, len(members)))}
    chosen = [sorted(classes)[index] for index in spread(len(classes), SHEET_CLASSES)]
    rows = [(name, _sample(classes[name])) for name in chosen]
    shown = []
    for title, groups in (
        ("in several classes", found.in_several_classes),
        ("across the split", found.across_the_split),
        ("near duplicates", found.near_duplicates),
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
            pixels = decode_image(read_file(photo.path), 3, SHEET_THUMBNAIL, center_crop=True)
            sheet.paste(Image.fromarray(pixels.transpose(1, 2, 0)), (SHEET_MARGIN + column * step, row * step))
    sheet.save(path)


def _sample(photos: list[Photo]) -> list[Photo]:
    return [photos[index] for index in spread(len(photos), SHEET_COLUMNS)]


def _counts(photos: Iterable[Photo]) -> dict[str, int]:
    return dict(sorted(Counter(photo.label or "" for photo in photos).items()))


def _range(values: list[int]) -> list[int]:
    return [min(values), int(np.median(values)), max(values)] if values else []


def _count(things: dict | list, name: str) -> str:
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _some(reasons: dict[str, str]) -> str:
    listed = ", ".join(f"{printable(name)} ({reason})" for name, reason in list(reasons.items())[:LISTED])
    return listed + (" and others" if len(reasons) > LISTED else "")


def _some_groups(groups: list[list[str]]) -> str:
    listed = "; ".join(" = ".join(printable(name) for name in group[:LISTED]) for group in groups[:LISTED])
    return listed + (" and others" if len(groups) > LISTED else "")
