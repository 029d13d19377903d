"""Collections of photos: the layouts that people have them in, and the split."""

import json
import random
import shutil
import unicodedata

import pytest
from photo_helpers import collection, contents, encoded, manifest_of, names_in, pets, picture, put, run, table  # noqa: F401

from common.errors import UserError
from image_data.annotations import ANIMALS10
from preparation.image_folder import split_photos
from preparation.layouts import Photo, recognise

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


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["cat/1.png", "dog/2.png"], ["cat", "dog"]),
        (["cat/1.png", "2.png"], [None, None]),
        (["train/1.png", "test/2.png"], [None, None]),
        (["all/1.png", "all/2.png"], [None, None]),
    ],
)
def test_class_folders_with_a_table_of_captions_keep_their_classes(tmp_path, names, labels):
    collection(tmp_path, names)
    (tmp_path / "metadata.csv").write_text(
        "".join(f"{line}\n" for line in ("file_name,text", *(f"{name},a pet" for name in names)))
    )
    found = {photo.name: (photo.label, photo.caption) for photo in recognise(tmp_path).photos}
    assert found == {name: (label, "a pet") for name, label in zip(names, labels, strict=True)}


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


def test_an_unquoted_comma_is_no_class(tmp_path):
    collection(tmp_path, ["a.png", "b.png"])
    (tmp_path / "metadata.csv").write_text("file_name,caption\na.png,a red car, parked outside\nb.png,a dog\n")
    with pytest.raises(UserError, match="metadata.csv line 2: has 3 fields, but the header 2; put quotes"):
        recognise(tmp_path)


@pytest.mark.parametrize(
    "table",
    ["file_name\ntrain/1.png\ntest/2.png\n", "file_name,split\ntrain/1.png,training\ntest/2.png,eval\n"],
    ids=["folders", "a column"],
)
def test_a_table_keeps_the_split_of_its_collection(tmp_path, table):
    collection(tmp_path, ["train/1.png", "test/2.png"])
    (tmp_path / "metadata.csv").write_text(table)
    found = recognise(tmp_path)
    assert found.has_split
    assert {photo.name: photo.split for photo in found.photos} == {"train/1.png": "train", "test/2.png": "test"}


def test_what_a_table_says_of_splits_is_understood_or_refused(tmp_path):
    collection(tmp_path, ["1.png", "2.png"])
    (tmp_path / "metadata.csv").write_text("file_name,split\n1.png,train\n2.png,fold 3\n")
    with pytest.raises(UserError, match="metadata.csv line 3: split 'fold 3': must be train, validation or test"):
        recognise(tmp_path)


def test_photos_beside_split_folders_are_left_out_with_a_word(tmp_path):
    collection(tmp_path, ["train/1.png", "test/2.png", "3.png"])
    found = recognise(tmp_path)
    assert [photo.name for photo in found.photos] == ["test/2.png", "train/1.png"]
    assert found.left_out == {"3.png": "beside the split folders, so it has no split"}
    (tmp_path / "metadata.csv").write_text("file_name\ntrain/1.png\ntest/2.png\n3.png\n")
    found = recognise(tmp_path)
    assert found.has_split
    assert found.left_out == {"3.png": "has no split, while others have"}


def test_a_test_split_is_never_a_class(tmp_path, caplog):
    collection(tmp_path, ["train/1.png", "test/2.png", "unlabeled/3.png"])
    with pytest.raises(UserError, match=r"has folders of splits .test, train. and unlabeled beside them"):
        recognise(tmp_path)
    (tmp_path / "metadata.csv").write_text("file_name\ntrain/1.png\ntest/2.png\nunlabeled/3.png\n")
    with pytest.raises(UserError, match="has folders of splits"):
        recognise(tmp_path)
    (tmp_path / "metadata.csv").unlink()
    shutil.rmtree(tmp_path / "test")
    assert recognise(tmp_path).layout == "class folders"
    assert "train is taken for a class, like the folders beside it" in caplog.text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["test/1.png", "2.png"], "splits .test. and photos beside them; move these elsewhere"),
        (["test/1.png", "cats/2.png", "3.png", "4.png", "5.png"], "splits .test. and cats, photos beside them"),
        (["test/1.png", "val/2.png"], "splits .test, val. and none to train on, or name the folder to use"),
    ],
)
def test_test_images_are_no_photos_like_others(tmp_path, names, message):
    with pytest.raises(UserError, match=message):
        recognise(collection(tmp_path, names))


def test_a_folder_of_test_images_alone_is_a_folder(tmp_path):
    assert [photo.name for photo in recognise(collection(tmp_path, ["test/1.png", "test/2.png"])).photos]


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
