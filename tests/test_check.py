"""prepare_data.py --check: what is said of a collection, and what would hurt."""

import io
import json
import logging
import os
import signal
import sys

import numpy as np
import pytest
from conftest import SHARED_DATA
from photo_helpers import encoded, picture, put
from PIL import Image, ImageEnhance
from test_photo_files import BAD, GOOD, attic  # noqa: F401 (a fixture)

import prepare_data
from common.interruption import Interrupted, catch_signals
from image_data.decode import UndecodableImage, decode_image, inspect_image
from preparation import findings as findings_room
from preparation.findings import HASH_DISTANCE, groups_of_near_duplicates, perceptual_hash


@pytest.fixture
def report(monkeypatch, tmp_path, capsys):
    """The script in this process: its exit code, the report, and what it printed."""

    def run(source, *flags):
        arguments = ["--check", str(source), f"--output={tmp_path / 'report'}", "--num_workers=0", *flags]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            prepare_data.main()
        return end.value.code, json.loads((tmp_path / "report/report.json").read_text()), capsys.readouterr().out

    yield run
    logging.getLogger().handlers.clear()


def scene(seed, size=(64, 48)):
    """Something like a photo: blobs of colour, no two seeds alike."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


def classes(root, counts, first=0):
    for label, count in counts.items():
        for number in range(count):
            first += 1
            put(root / label / f"{number:03}.jpg", encoded(scene(first), "JPEG", quality=95))
    return root


def test_a_photo_that_is_much_longer_than_wide_is_reported(report, tmp_path):
    photos = classes(tmp_path / "photos", {"cat": 20, "dog": 20})
    put(photos / "cat/line.png", encoded(Image.new("RGB", (1, 12_000))))
    assert report(photos)[1]["unreadable"] == {}  # at its own size there is nothing wrong with it
    assert "too narrow to be resized: 1x12000" in report(photos, "--resolution=256")[1]["unreadable"]["cat/line.png"]


def test_a_healthy_collection(report, tmp_path):
    code, found, printed = report(classes(tmp_path / "photos", {"cat": 20, "dog": 20}), "--resolution=32")
    assert code == 0
    assert (found["layout"], found["photos"], found["classes"]) == ("class folders", 40, {"cat": 20, "dog": 20})
    assert found["splits"] == {"train": {"cat": 18, "dog": 18}, "test": {"cat": 2, "dog": 2}}
    assert (found["width"], found["height"]) == ([64, 64, 64], [48, 48, 48])
    assert (found["modes"], found["kinds"]) == ({"RGB": 40}, {"JPEG": 40})
    empty = "unreadable too_small identical near_duplicates in_several_classes across_the_split hurts notes".split()
    assert not any(found[name] for name in empty)
    assert found["imbalance"] == 1
    assert "cat      20   train 18  test 2" in printed
    assert "problem" not in printed


def test_duplicates(report, tmp_path):
    root = classes(tmp_path / "photos", {"cat": 6, "dog": 8})
    original = scene(1)  # cat/000.jpg
    put(root / "cat/copy.jpg", (root / "cat/000.jpg").read_bytes())
    put(root / "cat/smaller.png", encoded(original.resize((40, 30))))
    put(root / "cat/darker.jpg", encoded(ImageEnhance.Brightness(original).enhance(0.7), "JPEG", quality=40))
    put(root / "dog/other format.webp", encoded(scene(2), "WEBP", quality=60))  # cat/001.jpg
    code, found, printed = report(root, "--eval_fraction=0")
    assert code == 1
    assert found["identical"] == [["cat/000.jpg", "cat/copy.jpg"]]
    assert sorted(map(sorted, found["near_duplicates"])) == [
        ["cat/000.jpg", "cat/copy.jpg", "cat/darker.jpg", "cat/smaller.png"],
        ["cat/001.jpg", "dog/other format.webp"],
    ]
    assert found["in_several_classes"] == [["cat/001.jpg", "dog/other format.webp"]]
    assert found["across_the_split"] == []
    assert "problem: 1 photo in more than one class, keep one of each: cat/001.jpg = dog/other format.webp" in printed
    (root / "dog/other format.webp").unlink()
    code, found, _ = report(root, "--eval_fraction=0")
    assert code == 0  # the same photo twice in one class is worth knowing, no more
    assert len(found["notes"]) == 2


def test_duplicates_across_the_split(report, tmp_path):
    root = classes(tmp_path / "in/train", {"cat": 4, "dog": 4})
    classes(tmp_path / "in/test", {"cat": 4, "dog": 4}, first=100)
    assert report(tmp_path / "in")[0] == 0
    put(tmp_path / "in/test/cat/leak.jpg", (root / "cat/000.jpg").read_bytes())
    put(tmp_path / "in/test/dog/leak.png", encoded(scene(5)))  # train/dog/000.jpg
    code, found, printed = report(tmp_path / "in")
    assert code == 1
    assert sorted(map(sorted, found["across_the_split"])) == [
        ["test/cat/leak.jpg", "train/cat/000.jpg"],
        ["test/dog/leak.png", "train/dog/000.jpg"],
    ]
    assert "problem: 2 photos in train and test at once" in printed


@pytest.mark.parametrize(("dogs", "code", "line"), [(9, 0, None), (6, 0, "note"), (2, 1, "problem")])
def test_imbalance(report, tmp_path, dogs, code, line):
    ended, found, printed = report(classes(tmp_path / "photos", {"cat": 10, "dog": dogs}))
    assert ended == code
    assert found["imbalance"] == round(10 / dogs, 2)
    said = f"{line}: cat has {10 / dogs:.1f} times as many images as dog: train_conditional.py --balance"
    assert (said in printed) == (line is not None)


def test_images_that_are_too_small(report, tmp_path):
    root = classes(tmp_path / "photos", {"cat": 4, "dog": 4})
    put(root / "cat/tiny.png", encoded(scene(50, (100, 20))))
    assert report(root)[0] == 0
    code, found, printed = report(root, "--resolution=21")
    assert (code, found["too_small"]) == (1, {"cat/tiny.png": "100x20"})
    assert "problem: 1 image with a shorter side below 21 will be enlarged: cat/tiny.png (100x20)" in printed
    put(root / "cat/pixel.png", encoded(picture(0, (1, 1))))
    assert report(root)[1]["too_small"] == {"cat/pixel.png": "1x1"}


def test_files_as_people_have_them_are_named(report, attic):  # noqa: F811
    put(attic / "one/1\n2.png", b"")
    code, found, printed = report(attic, "--eval_fraction=0")
    assert code == 1
    reasons = {f"one/{name}": reason for name, (_, reason) in BAD.items()} | {
        "one/1\n2.png": "the file is empty",
        "one/circle.png": "Too many levels of symbolic links",
        "one/broken.png": "No such file or directory",
        "one/pipe.png": "not a regular file",
    }
    assert set(found["unreadable"]) == set(reasons)
    for name, reason in reasons.items():
        assert reason in found["unreadable"][name]
    assert found["photos"] - len(reasons) == 2 * len(GOOD) + 1 == sum(found["classes"].values())
    assert found["kinds"]["GIF"] == 2
    assert found["modes"]["CMYK"] == 2
    assert {"one/new\nline\ttab.png", "zwei drei/new\nline\ttab.png"} in map(set, found["identical"])
    assert "one/1\\n2.png (the file is empty)" in printed
    assert sum(found["splits"]["train"].values()) == 2 * len(GOOD) + 1
    assert all(line.isprintable() for line in printed.splitlines())


@pytest.mark.parametrize("name", GOOD, ids=str)
def test_inspection_agrees_with_decoding(name):
    data = GOOD[name]
    seen = inspect_image(data, 16)
    pixels = decode_image(data, 1, min(seen.width, seen.height), center_crop=False)
    assert pixels.shape == (1, seen.height, seen.width)


@pytest.mark.parametrize("name", BAD)
def test_inspection_refuses_what_decoding_refuses(name):
    for look in (lambda data: inspect_image(data, 16), lambda data: decode_image(data, 3, 16, True)):
        with pytest.raises(UndecodableImage):
            look(BAD[name][0])


def test_a_jpeg_is_inspected_in_small_but_read_whole():
    image = scene(3, (1600, 1200))
    data = encoded(image, "JPEG", quality=95)
    small = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(inspect_image(data, 32).grey.astype(int) - small).max() <= 6
    with pytest.raises(UndecodableImage, match="truncated"):
        inspect_image(data[:-2000], 32)


# Near duplicates, against all pairs


def all_pairs(hashes, small):
    """The definition, one pair after the other."""
    links = {index: {index} for index in range(len(hashes))}
    for one in range(len(hashes)):
        for other in range(one):
            if (int(hashes[one]) ^ int(hashes[other])).bit_count() <= HASH_DISTANCE:
                a, b = small[one].astype(float), small[other].astype(float)
                deviations = a.std() * b.std()
                alike = ((a - a.mean()) * (b - b.mean())).mean() > findings_room.CORRELATION * deviations
                if alike or np.abs(a - b).mean() < findings_room.GREY_LEVELS:
                    merged = links[one] | links[other]
                    for member in merged:
                        links[member] = merged
    return {frozenset(group) for group in links.values() if len(group) > 1}


@pytest.mark.parametrize("most_pairs", [2**20, 300])
def test_groups_are_those_of_all_pairs(most_pairs, monkeypatch):
    monkeypatch.setattr(findings_room, "MOST_PAIRS", most_pairs)
    generator = np.random.default_rng(0)
    hashes, small = [], []
    for _ in range(40):
        phash, look = int(generator.integers(0, 2**63)) << 1, generator.integers(0, 256, 256)
        for copy in range(generator.integers(1, 5)):
            flipped = generator.choice(np.arange(1, 64), generator.integers(0, 9), replace=False) if copy else []
            if copy == 1:  # the worst case: a difference in every band but one
                bands = generator.choice(7, 6, replace=False)
                flipped = [9 * band + generator.integers(1, 10) for band in bands]
            hashes.append(phash ^ sum(1 << int(bit) for bit in flipped))
            noise = generator.choice([3, 40, 100])  # the last is another picture
            small.append(np.clip(look + generator.normal(0, noise, 256), 0, 255) if copy else look)
    hashes, small = np.array(hashes, np.uint64), np.array(small, np.uint8)
    expected = all_pairs(hashes, small)
    assert 10 < len(expected) < 40
    assert {frozenset(group) for group in groups_of_near_duplicates(hashes, small)} == expected


def test_images_of_one_colour_are_compared_by_it():
    """They have no frequencies, hence equal hashes, and no correlation."""
    small = np.repeat(np.array([[10], [11], [200], [201], [100]], np.uint8), 256, axis=1)
    assert sorted(groups_of_near_duplicates(np.zeros(5, np.uint64), small)) == [[0, 1], [2, 3]]


def test_thousands_of_equal_images_are_one_group():
    hashes, small = np.zeros(20_000, np.uint64), np.full((20_000, 256), 255, np.uint8)
    small[-1] = 0  # black and white have the same frequencies, none
    assert [len(group) for group in groups_of_near_duplicates(hashes, small)] == [19_999]


def test_the_hash_is_of_what_is_shown():
    def hash_of(image, **options):
        file = io.BytesIO()
        image.save(file, **options)
        return perceptual_hash(inspect_image(file.getvalue(), 32).grey)

    scenes = [scene(seed, (200, 150)) for seed in range(30)]
    hashes = [hash_of(image, format="PNG") for image in scenes]
    for image, phash in zip(scenes, hashes, strict=True):
        for changed, options in (
            (image, {"format": "JPEG", "quality": 30}),
            (image.resize((80, 60)), {"format": "PNG"}),
            (ImageEnhance.Contrast(image).enhance(0.6), {"format": "PNG"}),
        ):
            assert (hash_of(changed, **options) ^ phash).bit_count() <= HASH_DISTANCE
    distances = [(one ^ other).bit_count() for n, one in enumerate(hashes) for other in hashes[:n]]
    assert min(distances) > HASH_DISTANCE
    assert hash_of(Image.new("L", (50, 50), 200), format="PNG") == 0


# The sheet, the end


def test_the_contact_sheet_shows_every_class(report, tmp_path):
    root = tmp_path / "photos"
    colours = {"blue": (0, 0, 255), "green": (0, 128, 0), "red": (255, 0, 0)}
    for label, colour in colours.items():
        for number in range(10):
            put(root / label / f"{number}.png", encoded(Image.new("RGB", (40, 30), (*colour[:2], colour[2] - number))))
    put(root / "red/broken.png", b"?")
    report(root, "--eval_fraction=0")
    sheet = Image.open(tmp_path / "report/contact_sheet.png").convert("RGB")
    for row, colour in enumerate(sorted(colours)):
        for column in range(8):
            pixel = sheet.getpixel((findings_room.SHEET_MARGIN + 98 * column + 40, 98 * row + 40))
            assert np.abs(np.subtract(pixel, colours[colour])).max() <= 10


@pytest.mark.parametrize("files", [{}, {"notes.txt": b"x"}, {"broken.png": b"x"}], ids=["empty", "no images", "broken"])
def test_nothing_to_look_at(report, tmp_path, files):
    (tmp_path / "in").mkdir()
    for name, data in files.items():
        put(tmp_path / "in" / name, data)
    code, found, printed = report(tmp_path / "in")
    assert code == 1
    assert "problem: there is no image to train on" in printed


def test_photos_without_classes(report, tmp_path):
    for seed in range(20):
        put(tmp_path / f"in/{seed}.png", encoded(scene(seed)))
    code, found, printed = report(tmp_path / "in")
    assert (code, found["classes"], found["imbalance"]) == (0, {}, None)
    assert "no classes   train 18  test 2" in printed


def test_an_archive_is_checked_and_leaves_nothing(report, tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for seed in range(8):
            file.writestr(f"{'ab'[seed % 2]}/{seed}.png", encoded(scene(seed)))
    code, found, _ = report(tmp_path / "a.zip")
    assert (code, found["classes"]) == (0, {"a": 4, "b": 4})
    assert sorted(os.listdir(tmp_path / "report")) == [".lock", "contact_sheet.png", "report.json"]


def test_workers_see_the_same(report, tmp_path):
    root = classes(tmp_path / "photos", {"cat": 20, "dog": 20})
    alone = report(root)[1]
    assert report(root, "--num_workers=2")[1] == alone


def test_a_signal_stops_the_check(report, tmp_path, monkeypatch):
    root = classes(tmp_path / "photos", {"cat": 20, "dog": 20})
    inspect = findings_room._inspect

    def stopped(resolution, photo):
        if photo.name == "cat/003.jpg":
            os.kill(os.getpid(), signal.SIGINT)
        return inspect(resolution, photo)

    monkeypatch.setattr(findings_room, "_inspect", stopped)
    before = signal.getsignal(signal.SIGINT)
    catch_signals()
    try:
        with pytest.raises(Interrupted, match="SIGINT: stopped at 16 of 40 images"):
            report(root)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason=f"there are no photos in {SHARED_DATA}")
def test_a_photo_in_two_classes_of_sysu_shape(report):
    code, found, _ = report(SHARED_DATA / "sysu-shape-dataset", "--resolution=64")
    assert code == 1
    twice = ["car/images/voc2012_2009_000825.jpg", "motorbike/images/voc2012_2009_000825.jpg"]
    assert found["identical"] == found["in_several_classes"] == [twice]
    assert found["imbalance"] == round(472 / 196, 2)
    assert found["unreadable"] == {}
