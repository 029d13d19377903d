"""The annotations of a data set's images: classes and captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import UserError
from image_data.sources import ImageSource, check_column

# In order of preference. The last of each may mean something else, and counts where there is none of the others.
LABEL_COLUMNS = ("label", "labels", "class", "class_name")
CAPTION_COLUMNS = ("caption", "captions", "text", "prompt", "description")

DEFAULT_TEMPLATES = ["a photo of a {class}"]
NUMERALS = "zero one two three four five six seven eight nine".split()

# The folders of Animals-10 have Italian names.
ANIMALS10 = {
    "cane": "dog", "cavallo": "horse", "elefante": "elephant", "farfalla": "butterfly", "gallina": "chicken",
    "gatto": "cat", "mucca": "cow", "pecora": "sheep", "ragno": "spider", "scoiattolo": "squirrel",
}  # fmt: skip


@dataclass(frozen=True)
class Labels:
    """The classes of a data set and the class of every one of its rows."""

    names: list[str]
    of_row: torch.Tensor  # int64, into `names`


def class_in_words(name: str) -> str:
    """Return a class as a caption says it: `polka_dotted` is polka dotted, 7 is seven."""
    is_digit = len(name) == 1 and name.isdecimal()
    return NUMERALS[int(name)] if is_digit else name.replace("_", " ").replace("-", " ")


def fill_templates(templates: list[str], class_names: list[str]) -> list[list[str]]:
    """Return the captions of each class."""
    templates = templates or DEFAULT_TEMPLATES
    return [[template.replace("{class}", class_in_words(name)) for template in templates] for name in class_names]


def find_labels(source: ImageSource, label_column: str | None = None) -> Labels:
    """Return the classes in the named column, in the only one there is, or of the folders the images are in."""
    import datasets

    classes = [name for name, feature in source.dataset.features.items() if isinstance(feature, datasets.ClassLabel)]
    found = classes or _usual_columns(source, LABEL_COLUMNS)
    column = _choose_column(source, "label_column", label_column, found, "columns of classes")
    labels = _labels_of_folders(source) if column is None else _labels_of_column(source, column)
    if len(labels.names) < 2:
        raise UserError(f"{source}: all images are of one class ({labels.names[0]}); a condition needs several")
    if set(labels.names) <= ANIMALS10.keys():  # nobody types Italian names to see an animal
        return Labels([ANIMALS10[name] for name in labels.names], labels.of_row)
    return labels


def find_captions(source: ImageSource, caption_column: str | None = None) -> list[list[str]] | None:
    """Return the captions of every row, one or several of each; None if no column is named and none is found."""
    found = _usual_columns(source, CAPTION_COLUMNS)
    column = _choose_column(source, "caption_column", caption_column, found, "captions")
    if column is None:
        return None
    captions = []
    for row, value in enumerate(source.values(column)):
        several = [value] if isinstance(value, str) else value
        if not (isinstance(several, list) and several and all(isinstance(caption, str) for caption in several)):
            raise UserError(f"{source.describe(row)}: column '{column}' holds no caption but {value!r}")
        captions.append(several)
    return captions


def _choose_column(source: ImageSource, flag: str, wanted: str | None, found: list[str], kind: str) -> str | None:
    """Return the column that the user wants, or the only one found, if there is one."""
    if wanted is not None:
        return check_column(flag, wanted, source.annotation_columns)
    if len(found) > 1:
        raise UserError(f"{source} has several {kind}; name one with --{flag}: {', '.join(found)}")
    return found[0] if found else None


def _labels_of_column(source: ImageSource, column: str) -> Labels:
    import datasets

    feature, values = source.dataset.features[column], source.values(column)
    if isinstance(feature, datasets.ClassLabel):
        names, number_of = feature.names, {number: number for number in range(feature.num_classes)}
    else:
        kinds = {type(value) for value in values} - {type(None)}
        if kinds not in ({str}, {int}):
            raise UserError(f"--label_column {column}: {source} holds no classes there but {feature}")
        distinct = sorted({value for value in values if value is not None})
        names, number_of = [str(value) for value in distinct], {value: n for n, value in enumerate(distinct)}
    for row, value in enumerate(values):
        if value not in number_of:
            raise UserError(f"{source.describe(row)} has no class in column '{column}' ({value})")
    return Labels(names, torch.tensor([number_of[value] for value in values]))


def _labels_of_folders(source: ImageSource) -> Labels:
    are_files = Path(source.describe(0)).is_absolute()  # of a table every row has all of its image's bytes
    folders = [Path(source.describe(row)).parent.name for row in range(len(source))] if are_files else []
    names = sorted(set(folders))
    if len(names) < 2:
        columns = ", ".join(source.annotation_columns)
        advice = "put the images of each class into a folder of its own, or train without classes"
        advice = f"name the column with --label_column, one of: {columns}" if columns else advice
        raise UserError(f"{source} has neither a column of classes nor a folder for each class; {advice}")
    number_of = {name: number for number, name in enumerate(names)}
    return Labels(names, torch.tensor([number_of[folder] for folder in folders]))


def _usual_columns(source: ImageSource, names: Sequence[str]) -> list[str]:
    """Return those of the names that are columns; the last one only if the others are not."""
    columns = source.annotation_columns
    return [name for name in names[:-1] if name in columns] or [name for name in names[-1:] if name in columns]
