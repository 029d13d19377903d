"""image_data/: from what a user names, by way of the cache, to the images of a step."""

import errno
import io
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import common.machine
from common.errors import UserError
from common.machine import default_num_workers
from conditions.condition import NoCondition
from image_data import store
from image_data.batches import TrainingBatches, epoch_order
from image_data.data_options import DataOptions
from image_data.sources import load_images
from image_data.store import ImageDecoder, InMemoryImages, StreamedImages, TrainingImages, load_training_images
from image_data.workers import map_in_workers

ROOT = Path(__file__).parent.parent
CIFAR10 = ROOT / "../shared/data/cifar10"
GIGABYTE = 2**30


def png(seed, width=8, height=8, mode="RGB"):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def image_folder(path, count=12, **options):
    for index in range(count):
        write(path / f"class{index % 2}" / f"{index:03}.png", png(index, **options))
    return path


@pytest.fixture
def load(tmp_path):
    def load(*args, split="train", **options):
        return load_images(DataOptions(*args, cache_dir=str(tmp_path / "datasets"), **options), split)

    return load


@pytest.fixture
def prepare(tmp_path):
    def prepare(source, memory_limit_bytes=GIGABYTE, num_workers=0, work_here=True, wait=lambda: None, **changes):
        processes = SimpleNamespace(is_local_main=work_here, barrier=wait)
        changes = {"cache_dir": tmp_path / "prepared", **changes}
        options = image_options(memory_limit_bytes=memory_limit_bytes, num_workers=num_workers, **changes)
        return load_training_images(options, source, processes).images

    return prepare


def image_options(cache_dir, memory_limit_bytes=GIGABYTE, num_workers=0, **changes):
    options = {
        "resolution": 8,
        "channels": "3",
        "center_crop": False,
        "in_memory_limit_gb": memory_limit_bytes / GIGABYTE,
        "dataloader_num_workers": num_workers,
        "on_bad_image": "fail",
        "cache_dir": str(cache_dir),
    }
    return DataOptions(**(options | changes))


@pytest.fixture
def photos(tmp_path, load):
    """Twelve images of different shapes, and three of them upright."""
    for index in range(12):
        size = (8 + index, 8) if index % 4 else (8, 15)
        write(tmp_path / "photos" / f"{index:03}.png", png(index, *size))
    return load(train_data_dir=str(tmp_path / "photos"))


def shown(folder):
    """Everything in a folder, however deep, hidden or not."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


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
    assert asked == [(("uoft-cs/cifar10", "plain_text"), {"cache_dir": str(tmp_path / "datasets")})]
    assert source.describe(0) == "row 0 of uoft-cs/cifar10[train]"


def test_a_sample_of_the_rows_covers_all_classes(load, tmp_path):
    source = load(train_data_dir=str(image_folder(tmp_path / "photos")), max_train_samples=4)
    assert source.dataset["label"] == [0, 0, 1, 1]
    assert list(source.rows) == [0, 3, 6, 9]
    assert source.read(1) == (tmp_path / "photos/class0/006.png").read_bytes()
    assert load("digits", max_train_samples=3).describe(1) == "row 599 of digits[train]"
    assert len(load("digits", max_train_samples=5000)) == 1797


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
    with pytest.raises(UserError, match="either --dataset_name or --train_data_dir"):
        load()
    with pytest.raises(UserError, match="not with both"):
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
    with pytest.raises(UserError, match="--dataset_name .*photos: there are no data in this folder"):
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
    assert "nor could it be loaded from the Hub" in message
    assert message.endswith("HF_HUB_OFFLINE is set)")


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


# Prepared images


def everything(images):
    return images.crops(torch.arange(len(images)), torch.zeros(len(images), 2))


def test_cifar_like_images_come_out_bit_exact(load, prepare, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    for index, image in enumerate(pixels):
        path = tmp_path / "photos" / f"{index:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    images = prepare(load(train_data_dir=str(tmp_path / "photos")), resolution=32)
    assert isinstance(images, InMemoryImages)
    np.testing.assert_array_equal(everything(images).numpy(), pixels.transpose(0, 3, 1, 2))


def test_random_crops(photos, prepare):
    images = prepare(photos)
    original = np.asarray(Image.open(io.BytesIO(photos.read(3)))).transpose(2, 0, 1)  # 8 high, 11 wide
    upright = np.asarray(Image.open(io.BytesIO(photos.read(4)))).transpose(2, 0, 1)  # 15 high, 8 wide
    assert (original.shape, upright.shape) == ((3, 8, 11), (3, 15, 8))
    almost_one = 1 - 2**-24
    for corner, left in ((0, 0), (0.24, 0), (0.26, 1), (0.5, 2), (almost_one, 3)):
        crop = images.crops(torch.tensor([3]), torch.tensor([[almost_one, corner]]))[0]
        np.testing.assert_array_equal(crop, original[:, :, left : left + 8])
    for corner, top in ((0, 0), (0.5, 4), (almost_one, 7)):
        crop = images.crops(torch.tensor([4]), torch.tensor([[corner, almost_one]]))[0]
        np.testing.assert_array_equal(crop, upright[:, top : top + 8])


@pytest.mark.parametrize("center_crop", [False, True])
def test_streamed_images_are_those_in_memory(photos, prepare, center_crop):
    in_memory = prepare(photos, center_crop=center_crop)
    streamed = prepare(photos, center_crop=center_crop, memory_limit_bytes=0)
    assert isinstance(in_memory, InMemoryImages)
    assert isinstance(streamed, StreamedImages)
    assert len(in_memory) == len(streamed) == 12
    indices, corners = torch.tensor([3, 3, 0, 11]), torch.rand(4, 2)
    assert torch.equal(in_memory.crops(indices, corners), streamed.crops(indices, corners))


def test_memory_is_estimated_with_the_aspect_ratio(load, prepare, tmp_path):
    source = load(train_data_dir=str(image_folder(tmp_path / "photos", width=32, height=16)))
    needed = 12 * 3 * 8 * 16
    assert isinstance(prepare(source, memory_limit_bytes=needed), InMemoryImages)
    assert isinstance(prepare(source, memory_limit_bytes=needed - 1), StreamedImages)
    assert isinstance(prepare(source, memory_limit_bytes=needed // 2, center_crop=True), InMemoryImages)


def test_workers_make_no_difference(photos, prepare, tmp_path):
    alone = prepare(photos, cache_dir=tmp_path / "a")
    shared = prepare(photos, cache_dir=tmp_path / "b", num_workers=2)
    assert torch.equal(everything(alone), everything(shared))


def test_what_is_prepared_is_found_again(photos, prepare, monkeypatch, tmp_path):
    decoded = []
    decode_image = store.decode_image
    monkeypatch.setattr(store, "decode_image", lambda *args: decoded.append(args) or decode_image(*args))

    first = prepare(photos)
    assert len(decoded) == 12
    assert torch.equal(everything(prepare(photos)), everything(first))
    assert len(decoded) == 12
    prepare(photos, resolution=4)
    prepare(photos, channels=1)
    prepare(photos, center_crop=True)
    prepare(photos, memory_limit_bytes=0)
    assert len(decoded) == 5 * 12
    prepare(photos, memory_limit_bytes=0)
    assert len(decoded) == 5 * 12


def test_a_changed_file_is_decoded_anew(load, prepare, tmp_path):
    folder = image_folder(tmp_path / "photos")
    before = everything(prepare(load(train_data_dir=str(folder))))
    write(folder / "class0/000.png", png(99))
    os.utime(folder / "class0/000.png", (1, 1))
    after = everything(prepare(load(train_data_dir=str(folder))))
    assert (before != after).flatten(1).any(1).tolist() == [True] + [False] * 11


def test_a_damaged_cache_is_made_anew(photos, prepare, tmp_path):
    before = everything(prepare(photos)).clone()
    (folder,) = (tmp_path / "prepared").iterdir()
    for damage in (
        lambda: os.truncate(folder / "pixels", 100),
        lambda: os.truncate(folder / "index.safetensors", 20),
        lambda: (folder / "pixels").unlink(),
    ):
        damage()
        assert torch.equal(everything(prepare(photos)), before)


@pytest.fixture
def damaged(tmp_path, load):
    """Ten images, of which numbers 3 and 7 are broken and number 8 is gone since the folder was read."""
    image_folder(tmp_path / "photos", 10)
    for index in (3, 7):
        write(tmp_path / f"photos/class1/{index:03}.png", b"broken")
    source = load(train_data_dir=str(tmp_path / "photos"))
    (tmp_path / "photos/class0/008.png").unlink()
    return source


@pytest.mark.parametrize("memory", [0, GIGABYTE])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_images_fail(damaged, prepare, tmp_path, memory, num_workers):
    gone = tmp_path / "photos/class0/008.png"
    with pytest.raises(UserError) as caught:
        prepare(damaged, memory_limit_bytes=memory, num_workers=num_workers)
    assert str(caught.value) == (
        f"cannot decode {gone}: No such file or directory; repair or remove this image, "
        "or leave such images out with --on_bad_image skip"
    )
    assert shown(tmp_path / "prepared") == []


@pytest.mark.parametrize("memory", [0, GIGABYTE])
def test_bad_images_are_left_out(damaged, prepare, tmp_path, memory):
    images = prepare(damaged, memory_limit_bytes=memory, on_bad_image="skip")
    assert len(images) == 7
    assert images.skipped == [
        f"{tmp_path}/photos/class0/008.png: No such file or directory",
        f"{tmp_path}/photos/class1/003.png: not an image of a known format",
        f"{tmp_path}/photos/class1/007.png: not an image of a known format",
    ]
    assert images.kept.tolist() == [0, 1, 2, 3, 5, 7, 9]  # the even images are first
    expected = [png(index) for index in (0, 2, 4, 6, 1, 5, 9)]
    for image, data in zip(everything(images), expected, strict=True):
        np.testing.assert_array_equal(image, np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1))

    assert prepare(damaged, memory_limit_bytes=memory, on_bad_image="skip").skipped == images.skipped
    with pytest.raises(UserError, match=r"cannot decode .*008.png: No such file"):
        prepare(damaged, memory_limit_bytes=memory, on_bad_image="fail", wait=lambda: pytest.fail("too late"))


def test_an_image_put_right_is_not_left_out_for_ever(damaged, prepare, tmp_path):
    assert len(prepare(damaged, on_bad_image="skip")) == 7
    write(tmp_path / "photos/class0/008.png", png(8))
    assert len(prepare(damaged, on_bad_image="skip")) == 8


def test_nothing_but_bad_images(load, prepare, tmp_path):
    for index in range(3):
        write(tmp_path / f"photos/{index}.png", b"broken")
    source = load(train_data_dir=str(tmp_path / "photos"))
    with pytest.raises(UserError, match=r"none of the 3 images can be decoded, the first being .*0.png: not an image"):
        prepare(source, on_bad_image="skip")
    assert shown(tmp_path / "prepared") == []


def test_a_row_without_an_image(load, prepare, tmp_path):
    rows = [{"bytes": png(0), "path": None}, None]
    features = datasets.Features(image=datasets.Image())
    datasets.Dataset.from_dict({"image": rows}, features=features).save_to_disk(str(tmp_path / "set"))
    images = prepare(load(str(tmp_path / "set")), on_bad_image="skip")
    assert images.skipped == ["row 1 of set[train]: there is no image in this row"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interruption_leaves_nothing_half_made(photos, prepare, monkeypatch, tmp_path, interruption):
    decode_image, calls = store.decode_image, itertools.count()

    def interrupted(*args):
        if next(calls) == 5:
            raise interruption
        return decode_image(*args)

    monkeypatch.setattr(store, "decode_image", interrupted)
    with pytest.raises(interruption):
        prepare(photos)
    assert shown(tmp_path / "prepared") == []


def test_a_full_disk(photos, prepare, monkeypatch, tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        prepare(photos)
    assert f"to {tmp_path}/prepared (No space left on device)" in str(caught.value)
    assert "--cache_dir" in str(caught.value)
    assert shown(tmp_path / "prepared") == []


def test_an_unwritable_cache(photos, prepare, tmp_path):
    write(tmp_path / "file", b"")
    with pytest.raises(UserError, match=r"cannot write the prepared images to .*file.*--cache_dir"):
        prepare(photos, cache_dir=tmp_path / "file")


def test_one_process_works_and_the_others_wait(photos, prepare, tmp_path):
    def until_prepared():
        events.append("waiting")
        prepare(photos, wait=lambda: events.append("published"))

    events = []
    images = prepare(photos, work_here=False, wait=until_prepared)
    assert events == ["waiting", "published"]
    assert len(images) == 12


def test_an_error_is_raised_before_the_barrier(damaged, prepare):
    with pytest.raises(UserError):
        prepare(damaged, wait=lambda: pytest.fail("the others would wait for ever"))


def test_a_cache_that_is_not_shared(photos, prepare):
    with pytest.raises(UserError, match="--cache_dir .* must be a folder that all processes of a machine share"):
        prepare(photos, work_here=False)


def prepare_at_once(start, results, source, cache_dir):
    start.wait()
    images = load_training_images(image_options(cache_dir, channels="1", center_crop=True), source).images
    results.put((len(images), int(everything(images).sum())))


def test_two_runs_can_prepare_the_same_set_at_once(load, tmp_path):
    source = load("digits")
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(2), context.Queue()
    arguments = (start, results, source, tmp_path / "prepared")
    runs = [context.Process(target=prepare_at_once, args=arguments) for _ in range(2)]
    for run in runs:
        run.start()
    found = [results.get(timeout=60) for _ in runs]
    for run in runs:
        run.join()
    assert found[0] == found[1]
    assert found[0][0] == 1797
    assert len(list((tmp_path / "prepared").iterdir())) == 1


def test_the_second_of_two_runs_keeps_what_the_first_published(photos, prepare, monkeypatch, tmp_path):
    publish = store._publish

    def after_another(unfinished, folder):
        shutil.copytree(unfinished, folder)
        (folder / "from the other run").touch()
        publish(unfinished, folder)

    monkeypatch.setattr(store, "_publish", after_another)
    assert len(prepare(photos)) == 12
    (folder,) = (tmp_path / "prepared").iterdir()
    assert (folder / "from the other run").exists()


# Batches


def batches_of(images, **changes):
    data = TrainingImages(images, 3, changes.pop("num_workers", 0), changes.pop("random_flip", True))
    share = SimpleNamespace(index=changes.pop("process_index", 0), count=changes.pop("num_processes", 1))
    options = {"condition": NoCondition(), "seed": 0, "total_batch_size": 6, "passes": 1, "processes": share}
    return TrainingBatches(data, **(options | changes))


@pytest.fixture
def squares(load, prepare):
    return prepare(load("digits", max_train_samples=50), channels=1)


def test_every_image_comes_once_an_epoch(squares):
    training = batches_of(squares)
    assert training.steps_per_epoch == 8  # of 6: two images are left over
    epochs = [torch.cat([training.indices(epoch * 8 + step) for step in range(8)]) for epoch in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch.tolist())) == 48
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    # Over epochs the left-over images are not always the same.
    assert set(torch.cat(epochs).tolist()) == set(range(50))


def test_the_order_is_a_function_of_seed_and_epoch():
    order = epoch_order(50, 1, 2)
    assert sorted(order.tolist()) == list(range(50))
    epoch_order.cache_clear()
    assert torch.equal(order, epoch_order(50, 1, 2))
    assert not torch.equal(order, epoch_order(50, 1, 3))
    assert not torch.equal(order, epoch_order(50, 2, 2))


def take(training, count, first_step=0):
    iterator = training.from_step(first_step)
    taken = [batch.images for batch in itertools.islice(iterator, count)]
    iterator.close()
    return taken


def test_a_step_holds_the_images_it_names(squares):
    training = batches_of(squares, random_flip=False)
    for step, images in enumerate(take(training, 10)):
        assert images.shape == (6, 1, 8, 8)
        assert images.dtype == torch.uint8
        assert torch.equal(images, squares.crops(training.indices(step), torch.zeros(6, 2)))


def test_flips(squares):
    plain, flipped = (take(batches_of(squares, random_flip=flip), 40) for flip in (False, True))
    plain, flipped = torch.cat(plain), torch.cat(flipped)
    as_they_are = (plain == flipped).flatten(1).all(1)
    mirrored = (plain.flip(-1) == flipped).flatten(1).all(1)
    assert (as_they_are | mirrored).all()
    assert 80 < mirrored.sum() < 160  # of 240


@pytest.mark.parametrize("memory", [0, GIGABYTE])
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 3), (2, 1), (3, 1), (3, 2), (2, 3)])
def test_the_global_batch_is_the_same_however_it_is_shared(photos, prepare, memory, processes, accumulation):
    images = prepare(photos, memory_limit_bytes=memory)
    whole = take(batches_of(images), 5)
    shares = [
        batches_of(images, process_index=index, num_processes=processes, passes=accumulation)
        for index in range(processes)
    ]
    taken = [take(share, 5) for share in shares]
    size = 6 // (processes * accumulation)
    for step in range(5):
        joined = torch.empty_like(whole[step])
        for process, share in enumerate(shares):
            assert taken[process][step].shape == (accumulation * size, 3, 8, 8)
            passes = zip(share.positions.split(size), taken[process][step].split(size), strict=True)
            for number, (positions, images) in enumerate(passes):
                start = (number * processes + process) * size
                assert positions.tolist() == list(range(start, start + size))
                joined[start : start + size] = images
        assert torch.equal(joined, whole[step])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streaming_equals_memory(photos, prepare, num_workers):
    in_memory = take(batches_of(prepare(photos)), 7)
    streamed = take(batches_of(prepare(photos, memory_limit_bytes=0), num_workers=num_workers), 7)
    assert all(torch.equal(*pair) for pair in zip(in_memory, streamed, strict=True))


@pytest.mark.parametrize("memory", [0, GIGABYTE])
def test_a_resumed_run_continues_as_if_uninterrupted(photos, prepare, memory):
    training = batches_of(prepare(photos, memory_limit_bytes=memory))
    whole = take(training, 7)
    assert all(torch.equal(*pair) for pair in zip(whole[4:], take(training, 3, first_step=4), strict=True))


class RecordedCrops:
    """Stands in for prepared images; keeps what was asked of it."""

    def __init__(self):
        self.corners = []

    def __len__(self):
        return 64

    def crops(self, indices, corners):
        self.corners.append(corners)
        return torch.arange(4, dtype=torch.uint8).expand(len(indices), 1, 1, 4).clone()


def test_crops_and_flips_are_drawn_anew_for_every_image_and_step():
    images = RecordedCrops()
    steps = torch.stack(take(batches_of(images, total_batch_size=64), 50))
    corners = torch.stack(images.corners)
    assert corners.shape == (50, 64, 2)
    assert len(corners.unique()) > 6000  # of 6,400 numbers
    assert corners.min() >= 0
    assert corners.max() < 1
    torch.testing.assert_close(corners.mean((0, 1)), torch.tensor([0.5, 0.5]), atol=0.02, rtol=0)
    flipped = steps[:, :, 0, 0, 0] == 3
    assert len(set(map(tuple, flipped.tolist()))) == 50
    assert (flipped.float().mean(0) > 0.2).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_random_state_is_left_alone(photos, prepare, num_workers):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=num_workers)
    before = torch.get_rng_state()
    take(training, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_larger_than_the_set(squares):
    with pytest.raises(UserError, match=r"batch of 51 images .* 50 images .*--total_batch_size or --train_batch_size"):
        batches_of(squares, total_batch_size=51)
    assert batches_of(squares, total_batch_size=50).steps_per_epoch == 1


def test_a_batch_that_cannot_be_shared(squares):
    with pytest.raises(UserError, match="total batch of 6 images .* 4 processes with 1 gradient accumulation steps"):
        batches_of(squares, num_processes=4)


def test_an_image_that_goes_bad_during_training(photos, prepare, tmp_path):
    training = batches_of(prepare(photos, memory_limit_bytes=0), total_batch_size=12, num_workers=1)
    (tmp_path / "photos/004.png").unlink()
    with pytest.raises(UserError, match=r"004.png has changed since the images were checked: No such file"):
        take(training, 1)


# Workers


def test_closing_the_iterator_ends_the_workers(photos, prepare):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=2)
    iterator = training.from_step(0)
    next(iterator)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    iterator.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_the_signals_meant_for_the_main_process(photos, prepare, number):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=2)
    expected = take(training, 12)
    iterator = training.from_step(0)
    taken = [batch.images for batch in itertools.islice(iterator, 2)]
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, number)
    time.sleep(0.2)  # long enough to die of it
    taken += [batch.images for batch in itertools.islice(iterator, 10)]
    assert all(worker.is_alive() for worker in workers)
    assert all(torch.equal(*pair) for pair in zip(expected, taken, strict=True))
    iterator.close()


def test_without_memory_for_workers_there_are_none(photos, prepare, monkeypatch, caplog):
    def no_memory(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=2)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", no_memory)
    with caplog.at_level(logging.WARNING):
        assert len(take(training, 3)) == 3
    assert caplog.messages == [
        "2 data workers could not be started ([Errno 12] Cannot allocate memory); decoding in the main process"
    ]


def test_everything_that_workers_need_can_be_pickled(photos, prepare, load):
    for source in (photos, load("digits")):
        copy = pickle.loads(pickle.dumps(source))
        assert (copy.read(3), copy.describe(3)) == (source.read(3), source.describe(3))
    decoder = pickle.loads(pickle.dumps(ImageDecoder(photos, 3, 8, False)))
    assert [decoder.decode(row).shape for row in range(2)] == [(3, 15, 8), (3, 8, 9)]
    load_step = batches_of(prepare(photos, memory_limit_bytes=0))._load
    for copied, original in zip(pickle.loads(pickle.dumps(load_step))(5), load_step(5), strict=True):
        np.testing.assert_array_equal(copied, original)


def test_workers_that_are_spawned(photos, prepare):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=1)
    expected = [training.crops(step, training.indices(step)) for step in range(2)]
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        taken = take(training, 2)
    finally:
        torch.multiprocessing.set_start_method(before, force=True)
    assert all(torch.equal(*pair) for pair in zip(expected, taken, strict=True))


def square(item):
    return item**2, torch.get_num_threads()


def test_results_come_in_order_from_single_threaded_workers():
    assert list(map_in_workers(square, range(9), 2)) == [(item**2, 1) for item in range(9)]


def test_default_num_workers(monkeypatch):
    for cores, quota, processes, workers in (
        (64, [], 1, 4),
        (64, [], 16, 4),
        (64, [], 32, 2),
        (2, [], 1, 2),
        (2, [], 4, 0),
        (64, [3.5], 1, 3),
        (64, [8.0, 0.5], 1, 0),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(common.machine, "_cgroup_quotas", lambda quota=quota: quota)
        assert default_num_workers(processes) == workers


def test_quotas_of_containers_and_schedulers(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("0::/slurm/job\n")
    for path, text in (("", "max 100000"), ("slurm", "400000 100000"), ("slurm/job", "150000 100000")):
        write(tmp_path / "two" / path / "cpu.max", text.encode())
    assert sorted(common.machine._cgroup_quotas(tmp_path / "two", membership)) == [1.5, 4.0]

    membership.write_text("5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n")
    for file, text in (("cpu.cfs_quota_us", "250000\n"), ("cpu.cfs_period_us", "100000\n")):
        write(tmp_path / "one/cpu,cpuacct" / file, text.encode())
    assert common.machine._cgroup_quotas(tmp_path / "one", membership) == [2.5]
    assert common.machine._cgroup_quotas(tmp_path, tmp_path / "nothing") == []


# CIFAR-10 itself


@pytest.mark.skipif(not CIFAR10.exists(), reason="the folder ../shared/data/cifar10 is not there")
def test_cifar10(load, prepare):
    source = load(str(CIFAR10))
    assert (len(source), source.image_column, source.detect_channels()) == (50_000, "img", 3)
    assert source.describe(17) == "row 17 of cifar10[train]"

    images = prepare(load(str(CIFAR10), max_train_samples=2000), resolution=32, num_workers=2)
    assert len(images) == 2000
    for index in (0, 1, 1999):
        decoded = np.asarray(Image.open(io.BytesIO(source.read(index * 25))))
        np.testing.assert_array_equal(everything(images)[index], decoded.transpose(2, 0, 1))
