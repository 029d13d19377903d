"""From what a user names to rows of image files: every kind of data set, and every mistake in naming one."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from image_helpers import GIGABYTE, ROOT, everything, image_folder, image_options, load, photos, png, prepare, write  # noqa: F401
from PIL import Image

from common.errors import UserError, reason_of_hub
from image_data.data_options import DataOptions
from image_data.sources import load_split

# Sources: what can be named


def test_digits(load):
    source = load("digits")
    assert len(source) == 1797
    assert source.dataset.features["label"].names == list("0123456789")
    assert source.dataset[10]["label"] == 0
    image = Image.open(io.BytesIO(source.read(0)))
    assert (image.mode, image.size) == ("L", (8, 8))
    # The first row of the first digit is 0 0 5 13 9 1 0 0 of 16.
    assert np.asarray(image)[0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert source.describe(17) == "row 17 of digits[train]"
    assert source.detect_channels() == 1


def test_files_are_those_of_the_data_set(load, photos, tmp_path):
    tables = [photos, load("digits"), load("digits", max_train_samples=7)]
    tables.append(load(train_data_dir=str(tmp_path / "photos"), max_train_samples=5))
    for source in tables:
        stored = source.dataset[:][source.image_column]
        assert len(stored) == len(source)
        assert [source.read(index) for index in range(len(source))] == [
            one["bytes"] or Path(one["path"]).read_bytes() for one in stored
        ]


def test_the_memory_of_listing_files_is_not_kept(load, tmp_path, monkeypatch):
    """Of a folder with a table, and of one that is named as a data set; other folders `datasets` does not list."""
    image_folder(tmp_path / "photos")
    listed_here, load_dataset = [], datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **options: listed_here.append(1) or load_dataset(*args, **options)
    )
    assert len(load(train_data_dir=str(tmp_path / "photos"))) == 12
    lines = "\n".join(json.dumps({"file_name": f"{index:03d}.png"}) for index in range(6))
    (tmp_path / "photos/class0/metadata.jsonl").write_text(lines)
    assert len(load(train_data_dir=str(tmp_path / "photos"))) == 6
    assert len(load(str(tmp_path / "photos"))) == 6
    assert not listed_here  # but in other processes


LAYOUTS = {
    "classes": ["b/1.png", "b/0.JPG", "a/2.png", "a/notes.txt"],
    "no classes": ["b.png", "a.png", "10.png", "9.png"],
    "one class": ["cats/0.png", "cats/1.png"],
    "unequal depths": ["a/0.png", "b/c/1.png", "2.png"],
    "classes below": ["x/a/0.png", "y/a/1.png", "y/b/0.png"],
    "names": ["ä ö/[0].png", "ä ö/0*.png", "b-1/0.png", "b/0.png", "B/0.webp"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_are_listed_as_datasets_would(layout, load, tmp_path):
    for file in LAYOUTS[layout]:
        write(tmp_path / "photos" / file, png(0))
    source = load(train_data_dir=str(tmp_path / "photos"))
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "photos"), cache_dir=str(tmp_path / "cache"))
    theirs = theirs["train"].cast_column("image", datasets.Image(decode=False))
    assert source.dataset.features == theirs.features
    listed = source.dataset.to_list()
    assert listed == sorted(theirs.to_list(), key=lambda row: os.path.split(row["image"]["path"]))


def test_folders_of_splits_are_no_classes(load, tmp_path):
    for split in ("train", "test"):
        write(tmp_path / "photos" / split / "0.png", png(0))
    assert load(train_data_dir=str(tmp_path / "photos")).dataset.column_names == ["image"]


def test_the_same_folder_elsewhere_has_the_same_fingerprint(load, tmp_path):
    """As on a node to which a job has copied it: what is prepared in a cache that both share is found."""
    folder = image_folder(tmp_path / "photos")
    shutil.copytree(folder, tmp_path / "scratch" / "copy")  # with times of change
    first, second = (load(train_data_dir=str(path)) for path in (folder, tmp_path / "scratch" / "copy"))
    assert first.fingerprint == second.fingerprint
    assert second.describe(0) == str(tmp_path / "scratch/copy/class0/000.png")


def test_class_folders(load, tmp_path):
    source = load(train_data_dir=str(image_folder(tmp_path / "my [photos]")))
    assert len(source) == 12
    assert source.dataset.features["label"].names == ["class0", "class1"]
    assert source.read(1) == (tmp_path / "my [photos]/class0/002.png").read_bytes()
    assert source.describe(1) == str(tmp_path / "my [photos]/class0/002.png")
    assert source.image_column == "image"
    assert source.detect_channels() == 3


def test_a_flat_folder(load, photos):
    assert len(photos) == 12
    assert photos.dataset.column_names == ["image"]


@pytest.mark.parametrize("name", ["test_1.png", "train station.png", "val.png"])
def test_files_named_like_splits_do_not_hide_the_others(load, tmp_path, name):
    for file in (name, "a.png", "b.png"):
        write(tmp_path / "photos" / "holidays" / file, png(0))
    assert len(load(train_data_dir=str(tmp_path / "photos"))) == 3


def test_split_folders(load, tmp_path):
    for split, count in (("train", 4), ("test", 2)):
        image_folder(tmp_path / "photos" / split, count)
    source = load(train_data_dir=str(tmp_path / "photos"))
    assert len(source) == 4
    assert source.dataset.features["label"].names == ["class0", "class1"]
    assert len(load(train_data_dir=str(tmp_path / "photos"), split="test")) == 2


def test_a_class_named_like_a_split_is_a_class(load, tmp_path):
    for name in ("train", "car", "bus"):
        write(tmp_path / "vehicles" / name / "0.png", png(0))
    assert load(train_data_dir=str(tmp_path / "vehicles")).dataset.features["label"].names == ["bus", "car", "train"]


@pytest.mark.parametrize("extra", ["__MACOSX/train/._0.png", "annotations/0.json", ".cache/0.png", "photos.zip"])
def test_what_is_no_image_beside_the_splits_leaves_them_splits(load, tmp_path, extra):
    for split, count in (("train", 4), ("test", 2)):
        image_folder(tmp_path / "photos" / split, count)
    write(tmp_path / "photos" / extra, png(0))
    assert len(load(train_data_dir=str(tmp_path / "photos"))) == 4
    assert len(load(train_data_dir=str(tmp_path / "photos"), split="test")) == 2


AMBIGUOUS = {
    "another folder": (["train/0.png", "val/0.png", "more/0.png"], "more beside them"),
    "no folder for training": (["test/0.png", "cats/0.png", "dogs/0.png"], "cats, dogs beside them"),
    "images": (["test/0.png", "0.png"], "0.png beside them"),
    "a table": (["train/0.png", "test/0.png", "metadata.csv"], "metadata.csv beside them"),
    "two of one split": (["train/0.png", "test/0.png", "eval/0.png"], "two of them for one split"),
    "two for training": (["train/0.png", "training/0.png"], "two of them for one split"),
    "prepare_data.py --sysu_folders": (
        ["train_data/0.png", "eval_data/0.png", "normalized_eval_data/0.png"],
        "normalized_eval_data beside them",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_images_for_a_test_are_never_trained_on_without_a_word(load, tmp_path, name):
    files, problem = AMBIGUOUS[name]
    for file in files:
        write(tmp_path / "photos" / file, png(0) if file.endswith("png") else b"file_name,text\ntrain/0.png,a cat\n")
    train = {file.split("/")[0] for file in files if file.startswith("train")}
    example = f", such as .*/photos/{min(train)}, or" if train else ", or"
    with pytest.raises(UserError, match=f"folders of splits .* and {problem}; name the folder to train on{example}"):
        load(train_data_dir=str(tmp_path / "photos"))


@pytest.mark.parametrize(("link", "of"), [("test", "train"), ("train", "test")])
def test_a_split_may_be_a_link_to_another(load, tmp_path, link, of):
    image_folder(tmp_path / "photos" / of, 4)
    (tmp_path / "photos" / link).symlink_to(tmp_path / "photos" / of)
    assert [len(load(train_data_dir=str(tmp_path / "photos"), split=split)) for split in ("train", "test")] == [4, 4]


def test_a_folder_that_may_not_be_read_is_named(load, tmp_path, monkeypatch):
    folder, scandir = image_folder(tmp_path / "photos"), os.scandir

    def refused(path):
        if str(path).endswith("class0"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)  # root may read everything
    with pytest.raises(UserError, match=r"1 image file\(s\) cannot be read: .*class0/ \(Permission denied\)"):
        load(train_data_dir=str(folder))


def test_class_folders_may_be_links(load, tmp_path):
    image_folder(tmp_path / "elsewhere")
    (tmp_path / "photos").mkdir()
    for name in ("class0", "class1"):
        (tmp_path / "photos" / name).symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "photos" / "itself").symlink_to(tmp_path / "photos")
    source = load(train_data_dir=str(tmp_path / "photos"))
    assert len(source) == 12
    assert source.dataset["label"] == [0] * 6 + [1] * 6


def test_hidden_files_and_folders_are_not_images_of_the_set(load, tmp_path):
    write(tmp_path / "photos" / "0.png", png(0))
    for name in (".hidden.png", ".ipynb_checkpoints/0.png", "__MACOSX/0.png"):
        write(tmp_path / "photos" / name, png(1))
    assert len(load(train_data_dir=str(tmp_path / "photos"))) == 1


def test_captions(load, tmp_path):
    lines = [{"file_name": f"{index}.png", "text": f"caption {index}"} for index in range(3)]
    for line in lines:
        write(tmp_path / "photos" / line["file_name"], png(0))
    (tmp_path / "photos/metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = load(train_data_dir=str(tmp_path / "photos"))
    assert source.dataset[2]["text"] == "caption 2"
    assert source.read(2) == png(0)


def parquet(path, column="img", count=5):
    rows = [{"bytes": png(index), "path": f"{index}.png"} for index in range(count)]
    features = datasets.Features({column: datasets.Image(), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict({column: rows, "label": range(count)}, features=features)
    path.mkdir(parents=True)
    dataset.to_parquet(str(path / "train-00000-of-00001.parquet"))
    return dataset


def test_parquet(load, tmp_path):
    parquet(tmp_path / "pictures")
    source = load(str(tmp_path / "pictures"))
    assert source.image_column == "img"
    assert source.read(3) == png(3)
    assert source.describe(3) == "row 3 of pictures[train]"


def test_parquet_written_without_datasets(load, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "pictures").mkdir()
    rows = [{"bytes": png(index), "path": None} for index in range(3)]
    pq.write_table(pa.table({"picture": rows, "other": [1, 2, 3]}), tmp_path / "pictures/train.parquet")
    assert load(str(tmp_path / "pictures")).read(2) == png(2)


def test_a_cache_in_the_folder_that_holds_the_data(load, tmp_path):
    parquet(tmp_path / "pictures")
    for _ in range(2):
        assert len(load(str(tmp_path / "pictures"), cache_dir=str(tmp_path))) == 5
        assert [file.name for file in (tmp_path / "pictures").iterdir()] == ["train-00000-of-00001.parquet"]


def test_what_save_to_disk_wrote(load, tmp_path):
    dataset = parquet(tmp_path / "pictures")
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=dataset, test=dataset.select(range(2))).save_to_disk(str(tmp_path / "two"))
    assert load(str(tmp_path / "one")).read(3) == png(3)
    assert len(load(str(tmp_path / "two"), split="test")) == 2


def test_a_folder_of_images_as_dataset_name(load, tmp_path):
    assert len(load(str(image_folder(tmp_path / "photos")))) == 12


def test_the_hub(load, monkeypatch, tmp_path):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.DatasetDict(train=parquet(tmp_path / "pictures"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = load("uoft-cs/cifar10", "plain_text")
    assert asked == [(("uoft-cs/cifar10", "plain_text"), {"cache_dir": str(tmp_path / "datasets" / "datasets")})]
    assert source.describe(0) == "row 0 of uoft-cs/cifar10[train]"


def test_a_sample_of_the_rows_covers_all_classes(load, tmp_path):
    source = load(train_data_dir=str(image_folder(tmp_path / "photos")), max_train_samples=4)
    assert source.dataset["label"] == [0, 0, 1, 1]
    assert list(source.rows) == [0, 3, 6, 9]
    assert source.read(1) == (tmp_path / "photos/class0/006.png").read_bytes()
    assert load("digits", max_train_samples=3).describe(1) == "row 599 of digits[train]"
    assert len(load("digits", max_train_samples=5000)) == 1797


def test_a_sample_of_the_training_images_is_none_of_the_test_images(load, tmp_path):
    for split, count in (("train", 8), ("test", 6)):
        image_folder(tmp_path / "photos" / split, count=count)
    options = DataOptions(train_data_dir=str(tmp_path / "photos"), max_train_samples=4, cache_dir=str(tmp_path))
    assert [len(load_split(options, split)) for split in ("train", "test")] == [4, 6]


def test_channels_of_grey_and_mixed_sets(load, tmp_path):
    source = load(train_data_dir=str(image_folder(tmp_path / "photos", mode="L")))
    assert source.detect_channels() == 1
    write(tmp_path / "photos/class1/011.png", b"broken")  # no opinion
    assert source.detect_channels() == 1
    write(tmp_path / "photos/class1/009.png", png(0))
    assert source.detect_channels() == 3


# Sources: the image column


def table(path, **columns):
    kinds = {"image": datasets.Image(), "text": datasets.Value("string")}
    features = datasets.Features({name: kinds[kind] for name, kind in columns.items()})
    values = {"image": {"bytes": png(0), "path": None}, "text": "words"}
    rows = {name: [values[kind]] for name, kind in columns.items()}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(path))
    return str(path)


def test_the_one_image_column_is_found(load, tmp_path):
    assert load(table(tmp_path / "set", text="text", picture="image")).image_column == "picture"


def test_no_image_column(load, tmp_path):
    with pytest.raises(UserError, match=r"set\[train\] has no image column; .* --image_column, one of: a, b"):
        load(table(tmp_path / "set", a="text", b="text"))


def test_several_image_columns(load, tmp_path):
    folder = table(tmp_path / "set", photo="image", depth="image", caption="text")
    with pytest.raises(UserError, match=r"several image columns \(photo, depth\); .* one of: photo, depth, caption"):
        load(folder)
    assert load(folder, image_column="depth").image_column == "depth"


def test_an_image_column_that_is_not_there(load, tmp_path):
    with pytest.raises(UserError, match="^`--image_column' value 'x' needs to be one of: a, b$"):
        load(table(tmp_path / "set", a="image", b="text"), image_column="x")


def test_an_image_column_that_holds_something_else(load, tmp_path):
    datasets.Dataset.from_dict({"number": [1]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(UserError, match=r"column 'number' of set\[train\] does not hold images but Value\('int64'\)"):
        load(str(tmp_path / "set"), image_column="number")


# Sources: errors


def test_naming_nothing_or_too_much(load, tmp_path):
    with pytest.raises(UserError, match="no images: name them with --dataset_name or --train_data_dir"):
        load()
    with pytest.raises(UserError, match="are two ways to name the images"):
        load("digits", train_data_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "~/nowhere", "a/b/c"])
def test_a_missing_folder(load, name):
    with pytest.raises(UserError, match=rf"--dataset_name {name}: there is no such folder \(/.*\)"):
        load(name)
    with pytest.raises(UserError, match=rf"--train_data_dir {name}: there is no such folder"):
        load(train_data_dir=name)


def test_a_file_instead_of_a_folder(load, tmp_path):
    write(tmp_path / "photo.png", png(0))
    with pytest.raises(UserError, match="is a file; name the folder that holds it"):
        load(train_data_dir=str(tmp_path / "photo.png"))


def test_an_empty_folder(load, tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="--train_data_dir .*photos: there are no images in this folder"):
        load(train_data_dir=str(tmp_path / "photos"))
    with pytest.raises(UserError, match="--dataset_name .*photos: this folder contains no data"):
        load(str(tmp_path / "photos"))
    write(tmp_path / "photos/notes.txt", b"nothing here")
    with pytest.raises(UserError, match="there are no images in this folder"):
        load(train_data_dir=str(tmp_path / "photos"))


def test_an_empty_set(load, tmp_path):
    dataset = parquet(tmp_path / "pictures")
    dataset.select([]).to_parquet(str(tmp_path / "none/train.parquet"))
    with pytest.raises(UserError, match="--dataset_name .*none cannot be read: it is empty"):
        load(str(tmp_path / "none"))
    dataset.select([]).save_to_disk(str(tmp_path / "saved"), num_shards=1)
    with pytest.raises(UserError, match=r"saved\[train\] is empty"):
        load(str(tmp_path / "saved"))


def test_a_missing_split(load, tmp_path):
    dataset = parquet(tmp_path / "pictures")
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(UserError, match="^set has no split 'validation'; it has: train, test$"):
        load(str(tmp_path / "set"), split="validation")
    with pytest.raises(UserError, match="^digits has no split 'test'; it has: train$"):
        load("digits", split="test")
    # Neither is a folder without splits, whose only one is for training, all splits.
    for file in ("a.png", "b.png"):
        write(tmp_path / "flat" / file, png(0))
    image_folder(tmp_path / "classes", 4)
    dataset.save_to_disk(str(tmp_path / "saved"))
    for named in ({"train_data_dir": "flat"}, {"train_data_dir": "classes"}, {"dataset_name": "saved"}):
        data = {name: str(tmp_path / folder) for name, folder in named.items()}
        with pytest.raises(UserError, match="has no split 'test'; it has: train$"):
            load(**data, split="test")


def test_an_unreadable_folder(load, tmp_path, monkeypatch):
    image_folder(tmp_path / "photos")
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, whom nothing is forbidden
    with pytest.raises(UserError, match="no permission to read this folder"):
        load(train_data_dir=str(tmp_path / "photos"))


def test_a_folder_that_cannot_be_read(load, tmp_path):
    write(tmp_path / "set/train.parquet", b"not parquet")
    with pytest.raises(UserError, match=r"--dataset_name .*set cannot be read: \w+: "):
        load(str(tmp_path / "set"))


def test_the_hub_out_of_reach(load, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        load("nobody/nothing")
    message = str(caught.value)
    assert message.startswith("--dataset_name nobody/nothing is neither a local folder (/")
    assert "nor could it be loaded from the Hub (HF_HUB_OFFLINE is set" in message


def test_too_few_samples(load):
    with pytest.raises(UserError, match="--max_train_samples 0 must be 1 or more"):
        load("digits", max_train_samples=0)


# Sources: fingerprints

FINGERPRINT = """
import sys
import image_data.batches
from image_data.data_options import DataOptions
from image_data.sources import load_images
assert "datasets" not in sys.modules and "sklearn" not in sys.modules  # slow to import, and not always needed
folder = DataOptions(train_data_dir=sys.argv[1], cache_dir=sys.argv[2])
print(load_images(DataOptions("digits")).fingerprint, load_images(folder).fingerprint)
"""


def test_fingerprints_are_the_same_in_another_process(load, tmp_path):
    folder = str(image_folder(tmp_path / "photos"))
    here = [load("digits").fingerprint, load(train_data_dir=folder).fingerprint]
    command = [sys.executable, "-c", FINGERPRINT, folder, str(tmp_path / "another cache")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split() == here


def test_fingerprints_change_with_the_files(load, tmp_path):
    folder = image_folder(tmp_path / "photos")
    seen = [load(train_data_dir=str(folder)).fingerprint]
    write(folder / "class0/000.png", png(99))
    os.utime(folder / "class0/000.png", (1, 1))
    seen.append(load(train_data_dir=str(folder)).fingerprint)
    (folder / "class0/000.png").unlink()
    seen.append(load(train_data_dir=str(folder)).fingerprint)
    seen.append(load(train_data_dir=str(folder), max_train_samples=5).fingerprint)
    assert len(set(seen)) == 4


def test_fingerprints_of_saved_sets_follow_the_content(load, tmp_path):
    fingerprints = set()
    for count in (4, 5):
        dataset = parquet(tmp_path / f"pictures{count}", count=count)
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        dataset.save_to_disk(str(tmp_path / "set"))
        fingerprints.add(load(str(tmp_path / "set")).fingerprint)
    assert len(fingerprints) == 2


@pytest.mark.parametrize("kind", ["a saved set", "a table of paths"])
def test_fingerprints_follow_files_that_are_written_anew(load, tmp_path, kind):
    """`datasets` knows the paths alone; a set that is only read again is the same."""
    photos, fingerprints = image_folder(tmp_path / "photos"), []
    paths = sorted(map(str, photos.rglob("*.png")))
    for number in (0, 0, 1):
        Path(paths[0]).write_bytes(png(number))
        os.utime(paths[0], ns=(number, number))
        dataset = datasets.Dataset.from_dict({"image": paths})
        if kind == "a saved set":
            if number or not fingerprints:
                shutil.rmtree(tmp_path / "set", ignore_errors=True)
                dataset.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "set"))
        elif not fingerprints:
            (tmp_path / "set").mkdir()
            dataset.to_parquet(str(tmp_path / "set" / "train.parquet"))
        fingerprints.append(load(str(tmp_path / "set"), image_column="image").fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


# Names that lead nowhere, or that only one system reads


def test_links_that_lead_to_themselves(load, tmp_path):
    (tmp_path / "self").symlink_to("self")
    for options in ({"train_data_dir": str(tmp_path / "self")}, {"dataset_name": str(tmp_path / "self")}):
        with pytest.raises(UserError, match=f"{tmp_path}/self: (is a symbolic link to itself|there is no such folder)"):
            load(**options)
    folder = image_folder(tmp_path / "photos")
    for name in ("class0/loop.png", "loop", "loop.png"):
        (folder / name).symlink_to(Path(name).name)
    with pytest.raises(UserError, match=r"2 image file\(s\) cannot be read: .*loop.png \(not a regular file\), .*skip"):
        load(train_data_dir=str(folder))
    assert len(load(train_data_dir=str(folder), on_bad_image="skip")) == 12
    (folder / "around").symlink_to(folder)
    assert len(load(train_data_dir=str(folder), on_bad_image="skip")) == 12


def test_a_name_that_is_not_utf8(load, tmp_path):
    folder = image_folder(tmp_path / "photos")
    os.rename(folder / "class0/000.png", os.fsencode(folder) + b"/class0/caf\xe9.png")
    for options in ({"train_data_dir": str(folder)}, {"dataset_name": str(folder)}):
        with pytest.raises(UserError) as caught:
            load(**options)
        assert "class0/caf\\xe9.png is not UTF-8; rename it, or let prepare_data.py make a folder" in str(caught.value)


@pytest.mark.parametrize("flag", ["train_data_dir", "dataset_name"])
def test_kinds_of_images_that_are_not_read_are_named(flag, load, tmp_path, caplog):
    folder = image_folder(tmp_path / "photos")
    for number in range(6):
        write(folder / f"class0/IMG_{number}.HEIC", b"a photo of a telephone")
    write(folder / "class0/notes.txt", b"not an image")
    with pytest.raises(UserError, match=r"6 image file\(s\) cannot be read: .*--on_bad_image skip"):
        load(**{flag: str(folder)})
    assert len(load(**{flag: str(folder)}, on_bad_image="skip")) == 12
    assert "6 image file(s) cannot be read and are left out: " in caplog.text
    assert "class0/IMG_0.HEIC (of an unsupported format), " in caplog.text
    assert "class0/IMG_4.HEIC (of an unsupported format), ..." in caplog.text
    assert "notes.txt" not in caplog.text


@pytest.mark.parametrize("name", ["saved", "train.arrow"])
def test_an_arrow_file_whose_offsets_lead_out_of_it(load, tmp_path, name):
    """To read it would end the process with a segmentation fault."""
    images = [{"bytes": png(number), "path": None} for number in range(4)]
    saved = datasets.Dataset.from_dict({"image": images}).cast_column("image", datasets.Image(decode=False))
    saved.save_to_disk(tmp_path / "saved")
    file = next((tmp_path / "saved").glob("*.arrow"))
    if name != "saved":
        file = file.rename(tmp_path / name)
        shutil.rmtree(tmp_path / "saved")
    folder = str(tmp_path / "saved" if name == "saved" else tmp_path)
    assert len(load(dataset_name=folder)) == 4
    ends = np.cumsum([len(image["bytes"]) for image in images]).astype(np.int32)
    data = file.read_bytes()
    assert data.count(ends.tobytes()) == 1
    file.write_bytes(data.replace(ends.tobytes(), (ends + 2**30).tobytes()))
    with pytest.raises(UserError, match="cannot be read: ArrowInvalid: .* invalid"):
        load(dataset_name=folder)


def test_damaged_metadata_is_named(load, tmp_path):
    folder = image_folder(tmp_path / "photos")
    write(folder / "metadata.jsonl", b'{"file_name": ')
    with pytest.raises(UserError, match=r"cannot be read: .*; its metadata: .*photos/metadata\.jsonl"):
        load(train_data_dir=str(folder))


def test_why_the_hub_has_it_not(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert reason_of_hub(OSError("any")) == ("HF_HUB_OFFLINE is set, and there is no copy of it on this machine")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    unreachable = RuntimeError("outer")
    unreachable.__cause__ = ConnectionError("[Errno -2] Name or service not known")
    assert reason_of_hub(unreachable).startswith("the Hub cannot be reached, and there is no copy of it on this")
    assert reason_of_hub(ValueError("404: no such repository")) == "ValueError: 404: no such repository"


def test_splits_further_down_are_not_trained_on_as_one(load, tmp_path):
    """As an archive unpacks; a class that happens to be called test is no split."""
    for name in ("inner/train", "inner/test", "cat"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / name / "0.png")
    with pytest.raises(UserError, match=r"splits further down \(test, train in .*inner\); name the folder to train on"):
        load(train_data_dir=str(tmp_path))
    shutil.rmtree(tmp_path / "inner" / "train")
    assert len(load(train_data_dir=str(tmp_path))) == 2
