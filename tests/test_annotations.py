"""Classes and captions, wherever a data set keeps them."""

import json
from pathlib import Path

import datasets
import pytest
import torch
from conftest import SHARED_DATA
from PIL import Image

from common.errors import UserError
from image_data.annotations import class_in_words, find_captions, find_labels
from image_data.data_options import DataOptions
from image_data.sources import ImageSource, load_images


def folder_of_images(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / name)
    return folder


def source_of(tmp_path: Path, **columns: object) -> ImageSource:
    count = len(next(iter(columns.values())))
    images = [Image.new("L", (8, 8), number) for number in range(count)]
    datasets.Dataset.from_dict({"image": images, **columns}).cast_column("image", datasets.Image()).save_to_disk(
        tmp_path
    )
    return load_images(DataOptions(str(tmp_path)))


def test_classes_of_the_digits():
    labels = find_labels(load_images(DataOptions("digits")))
    assert labels.names == list("0123456789")
    assert torch.bincount(labels.of_row).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_folders_are_classes(tmp_path):
    folder = folder_of_images(tmp_path, ["hen/1.png", "cow/1.png", "hen/2.png"])
    labels = find_labels(load_images(DataOptions(train_data_dir=str(folder))))
    assert labels.names == ["cow", "hen"]
    assert labels.of_row.tolist() == [0, 1, 1]


def test_folders_are_classes_where_metadata_say_nothing_of_them(tmp_path):
    folder = folder_of_images(tmp_path, ["hen/1.png", "cow/1.png"])
    lines = [{"file_name": name, "year": 2020} for name in ("hen/1.png", "cow/1.png")]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = load_images(DataOptions(train_data_dir=str(folder)))
    labels = find_labels(source)
    assert {Path(source.describe(row)).parent.name: labels.names[labels.of_row[row]] for row in range(2)} == {
        "hen": "hen",
        "cow": "cow",
    }


def test_classes_and_captions_of_metadata(tmp_path):
    folder = folder_of_images(tmp_path, ["1.png", "2.png", "3.png"])
    lines = [
        {"file_name": f"{number}.png", "label": label, "caption": f"{label} number {number}"}
        for number, label in ((1, "cow"), (2, "hen"), (3, "cow"))
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = load_images(DataOptions(train_data_dir=str(folder)))
    labels = find_labels(source)
    assert [labels.names[label] for label in labels.of_row] == ["cow", "hen", "cow"]
    assert find_captions(source) == [["cow number 1"], ["hen number 2"], ["cow number 3"]]


def test_numbers_and_words_are_classes(tmp_path):
    labels = find_labels(source_of(tmp_path, label=[30, 5, 30], weight=[0.5, 0.5, 1.0]))
    assert (labels.names, labels.of_row.tolist()) == (["5", "30"], [1, 0, 1])


def test_several_captions(tmp_path):
    captions = [["a", "b"], ["c"]]
    source = source_of(tmp_path, captions=captions, text=["x", "y"])
    assert find_captions(source, "captions") == captions
    with pytest.raises(UserError, match="--caption_column: captions, text"):
        find_captions(source)


def test_a_column_that_may_mean_something_else_counts_where_there_is_no_other(tmp_path):
    columns = {"description": ["x", "y"], "class_name": ["hen", "cow"]}
    source = source_of(tmp_path / "alone", **columns)
    assert find_captions(source) == [["x"], ["y"]]
    assert find_labels(source).names == ["cow", "hen"]
    source = source_of(tmp_path / "beside", **columns, caption=["a", "b"], label=["1", "2"])
    assert find_captions(source) == [["a"], ["b"]]
    assert find_labels(source).names == ["1", "2"]


@pytest.mark.parametrize(
    ("columns", "wanted", "message"),
    [
        ({"weight": [1.0, 2.0]}, None, "neither a column of classes nor a folder for each.*one of: weight"),
        ({"weight": [1.0, 2.0]}, "weight", "--label_column weight: .* holds no classes there but"),
        ({"label": ["a", "b"], "class": [1, 2]}, None, "several columns of classes.*--label_column: label, class"),
        ({"label": ["a", "b"]}, "kind", "`--label_column' value 'kind' needs to be one of: label"),
        ({"label": ["a", None]}, None, "row 1 of .* has no class in column 'label'"),
        ({"label": ["a", "a"]}, None, "all images are of one class .a."),
    ],
)
def test_classes_that_cannot_be_found(columns, wanted, message, tmp_path):
    with pytest.raises(UserError, match=message):
        find_labels(source_of(tmp_path, **columns), wanted)


def test_captions_that_are_none(tmp_path):
    source = source_of(tmp_path, caption=["a", None], label=[0, 1])
    with pytest.raises(UserError, match="row 1 .* holds no caption but None"):
        find_captions(source)
    with pytest.raises(UserError, match="`--caption_column' value 'words' needs to be one of: caption, label"):
        find_captions(source, "words")
    assert find_captions(load_images(DataOptions("digits"))) is None


def test_classes_as_captions_say_them():
    assert [class_in_words(name) for name in ("7", "12", "polka_dotted", "T-shirt")] == [
        "seven",
        "12",
        "polka dotted",
        "T shirt",
    ]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="../shared/data is not there")
def test_animals10_speaks_english():
    labels = find_labels(load_images(DataOptions(train_data_dir=str(SHARED_DATA / "animals10" / "raw-img"))))
    assert labels.names == "dog horse elephant butterfly chicken cat cow sheep spider squirrel".split()
    assert torch.bincount(labels.of_row).tolist() == [300] * 10
