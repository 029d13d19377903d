"""prepare_data.py: from what people have to an image folder that trains."""

import io
import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tarfile
import time
import unicodedata
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import ROOT, SHARED_DATA
from PIL import Image

import prepare_data
from common.errors import UserError
from common.interruption import EXIT_INTERRUPTED, Interrupted, catch_signals
from image_data.annotations import ANIMALS10
from image_data.data_options import DataOptions
from image_data.decode import decode_image
from image_data.sources import load_images
from preparation import archives, image_folder, photo_files
from preparation.image_folder import split_photos
from preparation.layouts import Photo, recognise
from preparation.prepare_options import parse_prepare_options


def picture(seed, size=(12, 10), mode="RGB"):
    bands = {"RGB": 3, "L": 1, "RGBA": 4, "CMYK": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), np.uint8)
    return Image.fromarray(pixels if bands > 1 else pixels[..., 0], mode)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def put(path, data=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(path.name.encode()[0])) if data is None else data)
    return path


def collection(root, names):
    for seed, name in enumerate(names):
        put(root / name, encoded(picture(seed)))
    return root


@pytest.fixture
def run(monkeypatch):
    """The script in this process."""

    def run(source, output, *flags):
        arguments = [str(source), f"--output={output}", "--num_workers=0", *map(str, flags)]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
        prepare_data.main()

    yield run
    logging.getLogger().handlers.clear()


def table(folder):
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def manifest_of(output):
    return json.loads((output / "prepared.json").read_text())


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Layouts


def facts(source):
    return [(photo.name, photo.label) for photo in recognise(source).photos]


def test_sysu_shape(tmp_path):
    root = collection(
        tmp_path / "sysu-shape-dataset-master",
        ["boat/images/a.jpg", "boat/contours/a.png", "car/images/b.jpg", "car/annotations/b.png"],
    )
    (root / "README.md").write_text("a clone")
    for source in (root, tmp_path):  # the clone, and the folder that an archive puts around it
        assert facts(source) == [("boat/images/a.jpg", "boat"), ("car/images/b.jpg", "car")]
        assert recognise(source).layout == "SYSU-Shape"


def test_animals10(tmp_path):
    root = collection(tmp_path, [f"raw-img/{name}/1.jpeg" for name in ANIMALS10])
    (root / "translate.py").write_text("")
    assert recognise(root).layout == recognise(root / "raw-img").layout == "Animals-10"
    assert facts(root) == facts(root / "raw-img")
    assert [label for _, label in facts(root)] == [ANIMALS10[name] for name in sorted(ANIMALS10)]


def test_dtd(tmp_path):
    root = collection(
        tmp_path / "dtd",
        [f"images/{name}/{name}_000{n}.jpg" for name in ("banded", "bumpy") for n in range(4)],
    )
    assert recognise(root).layout == recognise(tmp_path).layout == "DTD"
    assert not recognise(root).has_split
    for number, name in enumerate(("train1", "val1", "test1")):
        put(root / f"labels/{name}.txt", f"banded/banded_000{number}.jpg\nbumpy/bumpy_000{number}.jpg\n".encode())
    found = recognise(root)
    assert [(photo.name, photo.split) for photo in found.photos[:3]] == [
        ("banded/banded_0000.jpg", "train"),
        ("banded/banded_0001.jpg", "validation"),
        ("banded/banded_0002.jpg", "test"),
    ]
    assert set(found.left_out) == {"banded/banded_0003.jpg", "bumpy/bumpy_0003.jpg"}


def test_class_folders(tmp_path):
    collection(
        tmp_path, ["cats/1.png", "cats/deep/er/2.png", "dogs/3.png", "loose.png", ".hidden/4.png", "dogs/._3.png"]
    )
    found = recognise(tmp_path)
    assert facts(tmp_path) == [("cats/1.png", "cats"), ("cats/deep/er/2.png", "cats"), ("dogs/3.png", "dogs")]
    assert list(found.left_out) == ["loose.png"]


@pytest.mark.parametrize("names", ["1.png 2.png sub/3.png", "one/folder/1.png", "1.png 2.png 3.png a/4.png b/5.png"])
def test_flat_folders(tmp_path, names):
    found = recognise(collection(tmp_path, names.split()))
    assert len(found.photos) == len(names.split())
    assert all(photo.label is None for photo in found.photos)
    assert found.left_out == {}


def test_split_folders(tmp_path):
    names = "train/cats/1 train/dogs/2 valid/cats/3 valid/dogs/4 Test/cats/5 Test/dogs/6".split()
    collection(tmp_path, [f"{name}.png" for name in names])
    found = recognise(tmp_path)
    assert {photo.name: (photo.label, photo.split) for photo in found.photos} == {
        "train/cats/1.png": ("cats", "train"),
        "train/dogs/2.png": ("dogs", "train"),
        "valid/cats/3.png": ("cats", "validation"),
        "valid/dogs/4.png": ("dogs", "validation"),
        "Test/cats/5.png": ("cats", "test"),
        "Test/dogs/6.png": ("dogs", "test"),
    }


def test_a_table_of_captions(tmp_path):
    collection(tmp_path, ["1.png", "2.png", "not listed.png"])
    lines = [
        {"file_name": "1.png", "text": 'one, "two"\nthree'},
        {"file_name": "./2.png", "text": "é 🐈"},
        {"file_name": "../secret.png"},
        {"file_name": "/etc/passwd"},
        {"text": "nothing"},
        {"file_name": "1.png", "text": "again"},
        {"file_name": "gone.png"},
        {"file_name": "nul\0.png"},
        {"file_name": "\ud800.png"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = recognise(tmp_path)
    assert [(photo.name, photo.caption) for photo in found.photos][:2] == [
        ("1.png", 'one, "two"\nthree'),
        ("2.png", "é 🐈"),
    ]
    assert len(found.photos) == 4  # what is not there is found out when it is read
    assert found.left_out == {
        "../secret.png": "metadata.jsonl line 3 leads out of the folder",
        "/etc/passwd": "metadata.jsonl line 4 leads out of the folder",
        "metadata.jsonl line 5": "file_name is not the name of a file",
        "metadata.jsonl line 8": "file_name is not the name of a file",
        "1.png (again)": "there is another of this name",
        "not listed.png": "not in metadata.jsonl",
    }


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_of_captions(tmp_path, separator):
    collection(tmp_path, ["a/1.png", "a/2.png"])
    rows = ["\ufefffile caption label".split(), ["a/1.png", '"first; one,\tof them"', "x"], ["a/2.png", "second", "y"]]
    (tmp_path / "my captions.csv").write_text("\r\n".join(separator.join(row) for row in rows), encoding="utf-8")
    assert [(photo.name, photo.caption, photo.label) for photo in recognise(tmp_path).photos] == [
        ("a/1.png", "first; one,\tof them", "x"),
        ("a/2.png", "second", "y"),
    ]


def test_a_csv_of_something_else_is_not_a_table_of_images(tmp_path):
    collection(tmp_path, ["cats/1.png", "dogs/2.png"])
    (tmp_path / "prices.csv").write_text("image,price\nsomething,3\n")
    assert recognise(tmp_path).layout == "class folders"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"file_name": "1.png"}\n{"file', "metadata.jsonl line 2: is not JSON"),
        ("[1]", "metadata.jsonl line 1: must be an object"),
        ('{"name": "1.png"}', "metadata.jsonl: no column with file names"),
        (b"\xff\xfe", "metadata.jsonl: is not UTF-8 text"),
    ],
)
def test_a_damaged_table(tmp_path, text, message):
    collection(tmp_path, ["1.png"])
    put(tmp_path / "metadata.jsonl", text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        recognise(tmp_path)


def test_accents_are_the_same_on_every_machine(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café/né.png") for form in ("NFC", "NFD"))
    splits = []
    for name in (composed, decomposed):
        root = collection(tmp_path / str(len(splits)), [name, "other/1.png"])
        splits.append(facts(root))
    assert splits[0] == splits[1] == [("café/né.png", "café"), ("other/1.png", "other")]


# The split


def photos(count=100, labels=("a", "b", "c"), **options):
    return [Photo(f"/x/{n}", f"{label}/{n}.png", label, **options) for label in labels for n in range(count)]


def test_the_split_is_stratified_and_the_same_in_any_order():
    splits = split_photos(photos(), 0.1, "test", 0)
    assert {label: sum(photo.label == label for photo in splits["test"]) for label in "abc"} == dict.fromkeys("abc", 10)
    assert len(splits["train"]) == 270
    assert {*splits["train"]} | {*splits["test"]} == {*photos()}
    shuffled = random.Random(0).sample(photos(), 300)
    assert split_photos(shuffled, 0.1, "test", 0) == splits
    assert split_photos(photos(), 0.1, "test", 1) != splits
    # What this machine computes, every other must.
    assert [photo.name for photo in split_photos(photos(5), 0.4, "test", 0)["test"]] == GOLDEN_SPLIT


GOLDEN_SPLIT = ["a/3.png", "a/4.png", "b/2.png", "b/4.png", "c/3.png", "c/4.png"]


@pytest.mark.parametrize(
    ("count", "fraction", "kept"), [(1, 0.1, 0), (2, 0.1, 1), (4, 0.1, 1), (15, 0.1, 2), (10, 0, 0), (3, 0.99, 2)]
)
def test_small_classes_are_in_both_if_they_can_be(count, fraction, kept):
    splits = split_photos(photos(count, labels=("a",)), fraction, "validation", 0)
    assert len(splits.get("validation", [])) == kept
    assert len(splits["train"]) == count - kept


# From end to end


@pytest.fixture
def pets(tmp_path):
    """Twelve photos of each of two classes, of all kinds that `decode_image` knows."""
    root = tmp_path / "pets"
    for label in ("cat", "dog"):
        for number in range(12):
            size = (20 + number, 30 - number)
            kind, mode = "PNG RGB,JPEG RGB,PNG L,JPEG CMYK,PNG RGBA,WEBP RGB".split(",")[number % 6].split()
            put(root / label / f"{number:02}.{kind.lower()}", encoded(picture(number, size, mode), kind))
    return root


def test_what_is_prepared_trains_as_the_originals_would(pets, run, tmp_path):
    """Prepared images are the very pixels that training would have made of the originals."""
    run(pets, tmp_path / "out", "--resolution=8", "--captions=a photo of a {class}")
    out = tmp_path / "out"
    source_of = {image["file"]: pets / image["source"] for image in manifest_of(out)["images"]}
    assert len(source_of) == 24
    for split, count in (("train", 22), ("test", 2)):
        source = load_images(DataOptions(train_data_dir=str(out), cache_dir=str(tmp_path / "cache")), split)
        assert len(source) == count
        for row in range(count):
            original = source_of[str(Path(source.describe(row)).relative_to(out))].read_bytes()
            for crop in (False, True):
                expected = decode_image(original, 3, 8, crop)
                np.testing.assert_array_equal(decode_image(source.read(row), 3, 8, crop), expected)


def test_datasets_loads_labels_and_captions(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8", "--captions=a photo of a {class}", "--eval_fraction=0.25")
    loaded = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 18, "test": 6}
    for rows in loaded.values():
        assert rows.column_names == ["image", "label", "caption"]
        for row in rows:
            assert Path(row["image"].filename).parent.name == row["label"]
            assert row["caption"] == f"a photo of a {row['label']}"
            assert min(row["image"].size) == 8
            assert row["image"].mode in ("L", "RGB")


def test_squares_and_channels(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8", "--center_crop", "--channels=3", "--eval_fraction=0")
    assert names_in(tmp_path / "out")[0] == ".lock"
    images = [Image.open(path) for path in (tmp_path / "out").rglob("*.png")]
    assert {(image.size, image.mode) for image in images} == {((8, 8), "RGB")}
    assert len(images) == 24
    assert not (tmp_path / "out" / "test").exists()


def test_without_a_resolution_plain_files_are_copied(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--eval_fraction=0")
    for image in manifest_of(tmp_path / "out")["images"]:
        original, copy = pets / image["source"], tmp_path / "out" / image["file"]
        mode = Image.open(original).mode
        if mode in ("CMYK", "RGBA"):
            assert copy.suffix == ".png"
            assert Image.open(copy).mode == "RGB"
            size = min(Image.open(original).size)
            expected = decode_image(original.read_bytes(), 3, size, False)
            np.testing.assert_array_equal(decode_image(copy.read_bytes(), 3, size, False), expected)
        else:
            assert copy.read_bytes() == original.read_bytes()


def test_the_three_folders_of_sysu(run, tmp_path):
    names = [f"{label}/images/{n}.jpg" for label in ("boat", "car") for n in range(10)]
    source = tmp_path / "clone"
    for seed, name in enumerate(names):
        put(source / name, encoded(picture(seed, (40, 24), "L" if seed % 2 else "RGB"), "JPEG"))
    run(source, tmp_path / "out", "--resolution=16", "--sysu_folders", "--eval_fraction=0.2")
    assert len(table(tmp_path / "out/train_data")) == 16
    assert len(table(tmp_path / "out/eval_data")) == 4
    for row, other in zip(table(tmp_path / "out/eval_data"), table(tmp_path / "out/normalized_eval_data"), strict=True):
        assert row == other
        photo = Image.open(tmp_path / "out/eval_data" / row["file_name"])
        square = Image.open(tmp_path / "out/normalized_eval_data" / row["file_name"])
        assert (photo.size, square.size, square.mode) == ((27, 16), (16, 16), "RGB")
        np.testing.assert_array_equal(np.asarray(photo.convert("RGB"))[:, 5:21], np.asarray(square))
    again = recognise(tmp_path / "out")
    assert len(again.photos) == 20
    assert {photo.split for photo in again.photos} == {"train", "test"}


def test_only_some_classes(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--classes", "cat")
    assert {row["label"] for row in table(tmp_path / "out/train")} == {"cat"}
    with pytest.raises(UserError, match="--classes cow: there is no such class; there are: cat, dog"):
        run(pets, tmp_path / "other", "--classes", "cat", "cow")


def test_the_split_of_the_source_is_kept_unless_another_is_asked_for(run, tmp_path):
    folders = ("train/a", "train/b", "val/a", "val/b")
    source = collection(tmp_path / "in", [f"{folder}/{n}.png" for folder in folders for n in range(5)])
    run(source, tmp_path / "out")
    assert {len(table(tmp_path / "out" / split)) for split in ("train", "validation")} == {10}
    run(source, tmp_path / "other", "--eval_fraction=0.2")
    assert (len(table(tmp_path / "other/train")), len(table(tmp_path / "other/test"))) == (16, 4)


def test_captions_of_a_table_come_before_the_template(run, tmp_path):
    source = collection(tmp_path / "in", ["1.png", "2.png", "3.png"])
    rows = [{"file_name": f"{n}.png", "label": "fire_truck", "caption": "mine" if n == 1 else None} for n in (1, 2, 3)]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(source, tmp_path / "out", "--captions={class}!", "--eval_fraction=0")
    assert [row["caption"] for row in table(tmp_path / "out/train")] == ["mine", "fire truck!", "fire truck!"]
    run(source, tmp_path / "other", "--eval_fraction=0")
    assert [row["caption"] for row in table(tmp_path / "other/train")] == ["mine", "", ""]


def test_several_captions_of_an_image(run, tmp_path):
    source = collection(tmp_path / "in", ["1.png", "2.png", "3.png"])
    captions = [["one", "uno"], "two", None]
    rows = [{"file_name": f"{n}.png", "caption": caption} for n, caption in enumerate(captions, start=1)]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(source, tmp_path / "out", "--eval_fraction=0")
    loaded = load_images(DataOptions(train_data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))).dataset
    assert loaded["caption"][:] == [["one", "uno"], ["two"], [""]]


# Again, and interrupted


def contents(folder):
    return {name: (folder / name).read_bytes() for name in names_in(folder)}


def test_a_second_call_does_only_what_is_missing(pets, run, tmp_path, capsys):
    out = tmp_path / "out"
    run(pets, out, "--resolution=8", "--eval_fraction=0")
    assert "24 images written, 0 already there" in capsys.readouterr().out
    before, times = contents(out), {path: path.stat().st_ino for path in out.rglob("*.png")}
    run(pets, out, "--resolution=8", "--eval_fraction=0")
    assert "0 images written, 24 already there" in capsys.readouterr().out
    assert contents(out) == before
    assert {path: path.stat().st_ino for path in out.rglob("*.png")} == times

    lost = next((out / "train/dog").glob("11*.png"))
    lost.unlink()
    changed = pets / "cat/00.png"
    changed.write_bytes(encoded(picture(77)))
    os.utime(changed, (1e9, 1e9))
    (pets / "dog/00.png").unlink()
    put(pets / "dog/new.png")
    run(pets, out, "--resolution=8", "--eval_fraction=0")
    assert "3 images written, 21 already there" in capsys.readouterr().out
    assert len(list(out.rglob("*.png"))) == 24
    rows = [image for image in manifest_of(out)["images"] if image["source"] == "cat/00.png"]
    np.testing.assert_array_equal(
        decode_image((out / rows[0]["file"]).read_bytes(), 3, 8, False), decode_image(changed.read_bytes(), 3, 8, False)
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resolution=16"], "was prepared with resolution 8 and not 16"),
        (["--resolution=8", "--seed=1"], "was prepared with seed 0 and not 1"),
        (["--resolution=8", "--center_crop"], "was prepared with center_crop False and not True"),
    ],
)
def test_settings_are_never_mixed(pets, run, tmp_path, flags, message):
    run(pets, tmp_path / "out", "--resolution=8")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        run(pets, tmp_path / "out", *flags)
    assert contents(tmp_path / "out") == before


def test_other_photos_are_never_mixed_in(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8")
    with pytest.raises(UserError, match="was prepared with source .*pets and not .*others"):
        run(collection(tmp_path / "others", ["1.png"]), tmp_path / "out", "--resolution=8")
    put(tmp_path / "full/photo.png")
    with pytest.raises(UserError, match="is not empty .photo.png. and was not made by this script"):
        run(pets, tmp_path / "full")


def test_an_interruption_leaves_nothing_half_written(pets, run, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run(pets, whole, "--resolution=8")
    out, written = tmp_path / "out", []

    def interrupted(*arguments):
        written.append(arguments)
        if len(written) == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(image_folder, "fault_point", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    catch_signals()
    try:
        with pytest.raises(Interrupted, match="SIGTERM: stopped at 16 of 24 images; the same command goes on"):
            run(pets, out, "--resolution=8")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(list(out.rglob("*.png"))) == 16
    assert not list(out.rglob("*.tmp"))
    monkeypatch.undo()
    run(pets, out, "--resolution=8")
    assert {name: data for name, data in contents(out).items() if "prepared" not in name} == {
        name: data for name, data in contents(whole).items() if "prepared" not in name
    }


def command(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "prepare_data.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_kill_and_signal_a_real_process_with_workers(run, tmp_path):
    source = tmp_path / "in"
    data = encoded(picture(0, (300, 300)), "JPEG")
    for number in range(600):
        put(source / f"{'ab'[number % 2]}/{number:03}.jpg", data)
    out, flags = tmp_path / "out", [source, "--output", tmp_path / "out", "--resolution", "64"]
    killed = command(*flags, "--num_workers", "0", EXACT_DDPM_FAULT="prepare-image@40")
    assert killed.wait(120) == -signal.SIGKILL
    assert len(list(out.rglob("*.png"))) == 40
    assert not list(out.rglob("metadata.jsonl"))

    process = command(*flags, "--num_workers", "2")
    end = time.monotonic() + 120
    while len(list(out.rglob("*.png"))) < 150:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "SIGINT: stopped at" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not list(out.rglob("*.tmp"))
    for path in out.rglob("*.png"):
        Image.open(path).load()

    run(source, out, "--resolution=64")
    assert len(list(out.rglob("*.png"))) == len(manifest_of(out)["images"]) == 600


def test_what_a_killed_process_left_is_cleared_away(pets, run, tmp_path):
    put(tmp_path / "out/train/cat/.00-12345678.png.4711.tmp", b"half")
    (tmp_path / "out/prepared.json").write_text(json.dumps({"settings": {}, "images": []}))
    with pytest.raises(UserError, match="was prepared with"):
        run(pets, tmp_path / "out", "--resolution=8")
    (tmp_path / "out/prepared.json").unlink()
    (tmp_path / "out/train").rename(tmp_path / "aside")
    run(pets, tmp_path / "out", "--resolution=8")
    put(tmp_path / "out/train/cat/.00-12345678.png.4711.tmp", b"half")
    run(pets, tmp_path / "out", "--resolution=8")
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_full_disk_is_one_line(pets, run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_folder, "write_atomically", full)
    with pytest.raises(UserError, match="--output .*out: No space left on device"):
        run(pets, tmp_path / "out", "--resolution=8")
    monkeypatch.undo()
    monkeypatch.setattr(image_folder, "_encode", full)
    with pytest.raises(UserError, match="cannot be written to .No space left on device."):
        run(pets, tmp_path / "out", "--resolution=8")


def test_the_output_may_lie_in_the_source_but_not_around_it(pets, run, tmp_path):
    run(pets, pets / "prepared", "--resolution=8", "--eval_fraction=0")
    run(pets, pets / "prepared", "--resolution=8", "--eval_fraction=0")
    assert len(table(pets / "prepared/train")) == 24
    run(pets, pets / "smaller", "--resolution=4", "--eval_fraction=0")  # nor are the results of other calls photos
    assert len(table(pets / "smaller/train")) == 24
    for output in (pets, pets.parent):
        with pytest.raises(UserError, match="must not be the folder of the photos itself, or one around it"):
            run(pets, output)


# Files as people have them


def oriented():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(1, (30, 20)), "JPEG", exif=exif)


def bomb():
    """20,000 x 20,000 pixels in a file of some kilobytes."""
    return encoded(Image.new("1", (20_000, 20_000)), "PNG")


def animation(kind):
    frames = [picture(seed) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def palette_with_transparency():
    image = picture(3).convert("P")
    return encoded(image, "PNG", transparency=bytes(range(256)))


GOOD = {
    "cmyk.jpg": encoded(picture(0, mode="CMYK"), "JPEG"),
    "sixteen bits.png": encoded(Image.fromarray(np.arange(120, dtype=np.uint16).reshape(10, 12) * 500)),
    "palette.png": palette_with_transparency(),
    "rotated.jpg": oriented(),
    "animated.gif": animation("GIF"),
    "animated.webp": animation("WEBP"),
    "one pixel.png": encoded(picture(0, (1, 1))),
    "wide.png": encoded(picture(0, (20_000, 30), "L")),
    "png named.jpg": encoded(picture(5)),
    'it\'s "quoted" $HOME; rm -rf *.png': encoded(picture(6)),
    "émoji 🐈‍⬛ 猫.png": encoded(picture(7)),
    "new\nline\ttab.png": encoded(picture(8)),
    b"not utf-8 \xff\xfe.png": encoded(picture(9)),
    "x" * 240 + ".png": encoded(picture(10)),
    "-rf.png": encoded(picture(11)),
    "UPPER.JPG": encoded(picture(12), "JPEG"),
}
BAD = {
    "truncated.jpg": (encoded(picture(0, (200, 200)), "JPEG")[:3000], "truncated"),
    "empty.png": (b"", "the file is empty"),
    "text.jpg": (b"this is a note, not a photo\n", "not an image of a known format"),
    "bomb.png": (bomb(), "decompression bomb"),
    "phone.heic": (b"\0\0\0\x18ftypheic" + bytes(100), "not an image of a known format"),
}


@pytest.fixture
def attic(tmp_path):
    """What is in people's folders."""
    root = tmp_path / "attic"
    for label in ("one", "zwei drei"):
        for name, data in GOOD.items():
            folder = os.fsencode(root / label)
            os.makedirs(folder, exist_ok=True)
            Path(os.fsdecode(os.path.join(folder, os.fsencode(name)))).write_bytes(data)
    for name, (data, _) in BAD.items():
        put(root / "one" / name, data)
    (root / "one/again").symlink_to(root)
    (root / "one/circle.png").symlink_to("circle.png")
    (root / "one/broken.png").symlink_to("nowhere.png")
    (root / "one/linked.png").symlink_to(root / "one/palette.png")
    os.mkfifo(root / "one/pipe.png")
    put(root / "one/Thumbs.db", b"?")
    put(root / "__MACOSX/one/._cmyk.jpg", b"?")
    return root


REASONS = {
    **{f"one/{name}": reason for name, (_, reason) in BAD.items()},
    "one/circle.png": "Too many levels of symbolic links",
    "one/broken.png": "No such file or directory",
    "one/pipe.png": "not a regular file",
}


@pytest.mark.parametrize("flags", [["--resolution=16"], []], ids=["resized", "as they are"])
def test_files_as_people_have_them(attic, run, tmp_path, flags, caplog):
    out = tmp_path / "out"
    run(attic, out, *flags, "--eval_fraction=0.5")
    left_out = manifest_of(out)["left_out"]
    assert set(left_out) == set(REASONS)
    for name, reason in REASONS.items():
        assert reason in left_out[name]
    sources = [image["source"] for image in manifest_of(out)["images"]]
    assert len(sources) == len(set(sources)) == 2 * len(GOOD) + 1
    assert "one/new\nline\ttab.png" in sources
    for name in names_in(out):
        assert name.isascii()
        assert name.isprintable()
        assert len(name) < 150
    for split in ("train", "test"):
        source = load_images(DataOptions(train_data_dir=str(out), cache_dir=str(tmp_path / "cache")), split)
        assert len(source) == len(table(out / split))
        for row in range(len(source)):
            decode_image(source.read(row), 3, 16, True)
    file = {image["source"]: out / image["file"] for image in manifest_of(out)["images"]}
    turned = Image.open(file["one/rotated.jpg"])
    assert turned.width < turned.height
    first = np.asarray(Image.open(file["one/animated.gif"]).convert("RGB"))
    size = min(Image.fromarray(first).size)
    np.testing.assert_array_equal(first.transpose(2, 0, 1), decode_image(GOOD["animated.gif"], 3, size, False))


def test_unreadable_permissions(pets, run, tmp_path, monkeypatch):
    """As root no permission is missing, so that the system's answer is simulated."""

    def read_bytes(path):
        if path.name == "03.jpeg":
            raise PermissionError(13, "Permission denied")
        return path.open("rb").read()

    def scandir(path):
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied")
        return os_scandir(path)

    os_scandir = os.scandir
    monkeypatch.setattr(photo_files.Path, "read_bytes", read_bytes)
    monkeypatch.setattr(photo_files.os, "scandir", scandir)
    run(pets, tmp_path / "out", "--resolution=8")
    assert manifest_of(tmp_path / "out")["left_out"] == {"dog": "Permission denied", "03.jpeg": "Permission denied"}


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_real_permissions(pets, run, tmp_path):
    (pets / "cat/03.jpeg").chmod(0)
    (pets / "dog").chmod(0)
    run(pets, tmp_path / "out", "--resolution=8")
    (pets / "dog").chmod(stat.S_IRWXU)
    assert manifest_of(tmp_path / "out")["left_out"] == {"dog": "Permission denied", "03.jpeg": "Permission denied"}


def test_nothing_to_prepare(run, tmp_path):
    for name, data, message in (
        ("empty", None, "there is no image that can be used"),
        ("bad", b"", "one.png .the file is"),
    ):
        (tmp_path / name).mkdir()
        if data is not None:
            put(tmp_path / name / "one.png", data)
        with pytest.raises(UserError, match=message):
            run(tmp_path / name, tmp_path / f"{name} out")


# Archives


def zip_of(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(
                name if isinstance(name, zipfile.ZipInfo) else zipfile.ZipInfo(name, (2020, 1, 2, 3, 4, 6)), data
            )
    return path


def tar_of(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as file:
        for name, data in members.items():
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data or b"")
            file.addfile(info, io.BytesIO(data or b""))
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


MEMBERS = {f"raw-img/{name}/{n}.png": encoded(picture(n)) for name in ("cane", "gatto") for n in range(10)}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz"])
def test_archives(run, tmp_path, kind, capsys, monkeypatch):
    archive = tmp_path / f"animals.{kind}"
    mode = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}.get(kind)
    members = {**MEMBERS, "translate.py": b"print()", "raw-img/cane/._1.png": b"?", "__MACOSX/x.png": b"?"}
    zip_of(archive, members) if kind == "zip" else tar_of(archive, members, mode)
    for name, data in MEMBERS.items():
        put(tmp_path / "folder" / name, data)
    run(archive, tmp_path / "out", "--resolution=8")
    run(tmp_path / "folder", tmp_path / "from folder", "--resolution=8")
    of_archive, of_folder = (
        {name: data for name, data in contents(tmp_path / name).items() if name != "prepared.json"}
        for name in ("out", "from folder")
    )
    assert of_archive == of_folder
    assert not list((tmp_path / "out").glob(".unpacked*"))

    capsys.readouterr()
    monkeypatch.setattr(archives, "_unpack_whole", None)  # not a second time
    run(archive, tmp_path / "out", "--resolution=8")
    assert "nothing to do, 20 images are there" in capsys.readouterr().out
    monkeypatch.undo()

    next((tmp_path / "out/train").rglob("*.png")).unlink()
    run(archive, tmp_path / "out", "--resolution=8")
    assert "1 images written, 19 already there" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../evil.png", "/tmp/evil.png", "a/../../evil.png", "C:\\evil.png", "..\\evil.png"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_no_path_leaves_the_folder(run, tmp_path, name, kind):
    if kind == "tar" and "\\" in name:
        name = name.replace("\\", "/")
    members = {**MEMBERS, name: encoded(picture(0))}
    archive = (zip_of if kind == "zip" else tar_of)(tmp_path / f"a.{kind}", members)
    with pytest.raises(UserError, match="refused, because .* in it leads out of the folder"):
        run(archive, tmp_path / "deep/er/out")
    assert not list(tmp_path.rglob("evil*"))
    assert not list((tmp_path / "deep/er/out").glob(".unpacked*"))


def test_links_and_devices_stay_in_the_archive(run, tmp_path, caplog):
    png = encoded(picture(0))
    archive = tar_of(
        tmp_path / "a.tar.gz",
        {
            **MEMBERS,
            special("raw-img/cane/link.png", tarfile.SYMTYPE, "/etc/passwd"): None,
            special("raw-img/cane/hard.png", tarfile.LNKTYPE, "raw-img/cane/1.png"): None,
            special("raw-img/cane/device.png", tarfile.CHRTYPE): None,
            special("raw-img/cane/pipe.png", tarfile.FIFOTYPE): None,
            special("escape", tarfile.SYMTYPE, str(tmp_path)): None,
            "escape/evil.png": png,
            "raw-img/cane/1.png/below.png": png,
        },
    )
    before = set(tmp_path.iterdir())
    run(archive, tmp_path / "out", "--resolution=8", "--eval_fraction=0")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    sources = [image["source"] for image in manifest_of(tmp_path / "out")["images"]]
    assert len(sources) == 21  # the twenty, and one in an honest folder called escape

    link = zipfile.ZipInfo("raw-img/cane/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = zip_of(tmp_path / "b.zip", {**MEMBERS, link: png})
    run(archive, tmp_path / "out2", "--resolution=8", "--eval_fraction=0")
    assert len(manifest_of(tmp_path / "out2")["images"]) == 20


def test_archives_that_are_too_much(run, tmp_path, monkeypatch):
    archive = zip_of(tmp_path / "a.zip", {**MEMBERS, "raw-img/cane/zeros.png": bytes(3 * 2**20)})
    monkeypatch.setattr(archives, "LARGEST_FILE", 2**20)
    run(archive, tmp_path / "out", "--resolution=8")
    assert len(manifest_of(tmp_path / "out")["images"]) == 20
    monkeypatch.setattr(archives, "DISK_LEFT_FREE", 2**60)
    with pytest.raises(UserError, match="no room to unpack it"):
        run(archive, tmp_path / "out2")
    assert not list((tmp_path / "out2").glob(".unpacked*"))


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_damaged_archives(run, tmp_path, kind):
    archive = tmp_path / f"a.{kind}"
    zip_of(archive, MEMBERS) if kind == "zip" else tar_of(archive, MEMBERS, "w" if kind == "tar" else "w:gz")
    data = archive.read_bytes()
    damages = [data[: len(data) // 2], data[:200] + bytes(300) + data[500:], b"no archive"]
    for number, damage in enumerate(damages):
        archive.write_bytes(damage)
        with pytest.raises(UserError, match="a.(zip|tar|tar.gz): (the archive is damaged|is neither a folder nor)"):
            run(archive, tmp_path / f"out{number}")
        assert not list((tmp_path / f"out{number}").glob(".unpacked*"))


def test_an_encrypted_archive_is_named(run, tmp_path, caplog):
    archive = zip_of(tmp_path / "a.zip", MEMBERS)
    data = bytearray(archive.read_bytes())
    at = data.find(b"PK\x01\x02")
    data[at + 8] |= 1
    archive.write_bytes(data)
    run(archive, tmp_path / "out", "--resolution=8")
    assert len(manifest_of(tmp_path / "out")["images"]) == 19


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the photos"),
        (["nowhere", "--output=x"], "nowhere: there is no such folder or archive"),
        (["."], "--output: name the folder to make, or use --check"),
        ([".", "--output=x", "--resolution=0"], "--resolution 0: must be greater than 0"),
        ([".", "--output=x", "--eval_fraction=1"], "--eval_fraction 1.0: must be at least 0 and below 1"),
        ([".", "--output=x", "--captions=a photo"], "--captions 'a photo': must say where the class goes"),
        ([".", "--output=x", "--center_crop"], "--center_crop needs --resolution"),
        ([".", "--output=x", "--sysu_folders"], "--sysu_folders needs --resolution"),
        ([".", "--output_dir=x"], "unknown flag --output_dir=x; did you mean --output"),
        ([".", "--output=x", "--num_workers=-1"], "--num_workers -1: must be 0 or greater"),
    ],
)
def test_mistakes(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
    with pytest.raises(UserError) as caught:
        prepare_data.main()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_source_may_follow_check():
    for arguments in (["--check", "photos"], ["photos", "--check"], ["--source=photos", "--check=true"]):
        options = parse_prepare_options([*arguments, "--resolution=8"])
        assert (options.source, options.check, options.resolution) == ("photos", True, 8)


def test_help_and_mistakes_need_no_torch():
    code = "import sys, runpy; sys.argv = ['prepare_data.py', 'nowhere']; "
    code += "\ntry: runpy.run_path('prepare_data.py', run_name='__main__')\nexcept SystemExit as end: print(end.code)"
    code += "\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"], done.stderr


# The real collections


@pytest.mark.skipif(not SHARED_DATA.exists(), reason=f"there are no photos in {SHARED_DATA}")
@pytest.mark.parametrize(
    ("name", "layout", "train", "test"),
    [
        ("sysu-shape-dataset", "SYSU-Shape", 1387, 154),
        ("animals10", "Animals-10", 2700, 300),
        ("dtd", "DTD", 1080, 120),
    ],
)
def test_the_real_collections(name, layout, train, test, run, tmp_path):
    found = recognise(SHARED_DATA / name)
    assert (found.layout, found.left_out) == (layout, {})
    splits = split_photos(found.photos, 0.1, "test", 0)
    assert (len(splits["train"]), len(splits["test"])) == (train, test)
    few = {*sorted({photo.label for photo in found.photos})[:2]}
    run(SHARED_DATA / name, tmp_path / "out", "--resolution=32", "--classes", *few)
    source = load_images(DataOptions(train_data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache")))
    assert len(source) == sum(photo.label in few for photo in splits["train"])
