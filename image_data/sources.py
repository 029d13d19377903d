"""From what a user names (a Hub id, a folder, "digits") to rows of image files."""

import contextlib
import functools
import glob
import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError, first_cause, reason_of_hub, user_errors
from common.files import printable
from image_data.data_options import DataOptions
from image_data.decode import IMAGE_SUFFIXES, UndecodableImage, is_grey, read_image_file

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features

    from common.processes import Processes

logger = logging.getLogger(__name__)

DIGITS = "digits"
MOST_NAMED = 5
TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # that `datasets` reads in a folder of images
SPLITS_OF_PREPARE_DATA = {"train_data": "train", "eval_data": "test"}  # with --sysu_folders, whatever --eval_split is
SAMPLED_FOR_CHANNELS = 256


@dataclass
class ImageSource:
    """A split of a data set. Its images are still files: bytes, or a path."""

    dataset: "Dataset"  # all columns; the image column is not decoded
    image_column: str
    name: str
    split: str
    fingerprint: str  # the same in every process and run as long as the data are the same
    rows: Sequence[int]  # the row in the split of each image here

    def __len__(self) -> int:
        return len(self.dataset)

    def __str__(self) -> str:
        return f"{self.name}[{self.split}]"

    @property
    def annotation_columns(self) -> list[str]:
        return [name for name in self.dataset.column_names if name != self.image_column]

    def values(self, column: str) -> list:
        """Return what a column holds in every row."""
        return self.dataset.select_columns(column).with_format(None)[:][column]

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file; raise `UndecodableImage` if it cannot be read."""
        image = self._stored(index)
        if image is None:
            raise UndecodableImage("there is no image in this row")
        if image["bytes"] is not None:
            return image["bytes"]
        try:
            return read_image_file(image["path"])
        except UndecodableImage:
            if os.path.lexists(image["path"]):
                raise
            raise UndecodableImage("No such file; a metadata table may still name it") from None

    def describe(self, index: int) -> str:
        """Tell the user where this image is."""
        image = self._stored(index)
        if image is not None and image["bytes"] is None:
            return image["path"]
        return f"row {self.rows[index]} of {self}"

    def _stored(self, index: int) -> dict | None:
        """Return bytes and path from the table beneath the data set, in a tenth of the time that the latter takes."""
        return self.dataset.data.column(self.image_column)[self.rows[index]].as_py()  # `select` leaves the table whole

    def detect_channels(self) -> int:
        """Return 1 if all images of an even sample are grey, otherwise 3."""
        readable = False
        for index in spread(len(self), SAMPLED_FOR_CHANNELS):
            with contextlib.suppress(UndecodableImage):  # whether that is an error is decided when they are prepared
                if not is_grey(self.read(index)):
                    return 3
                readable = True
        return 1 if readable else 3


def open_source(options: DataOptions, processes: "Processes") -> ImageSource:
    """Open the images of a run; the main process of each machine goes first, and downloads what is missing."""
    from datasets.utils.logging import disable_progress_bar

    if not processes.is_local_main:
        disable_progress_bar()
    with processes.main_first():
        return load_images(options)


def load_images(options: DataOptions, split: str = "train") -> ImageSource:
    """Open the images that the options name. Nothing is decoded yet."""
    import datasets

    if options.max_train_samples is not None and options.max_train_samples < 1:
        raise UserError(f"--max_train_samples {options.max_train_samples} must be 1 or more")
    name, splits = _load_splits(options)
    if split not in splits:
        raise UserError(f"{name} has no split '{split}'; it has: {', '.join(splits) or 'none'}")
    dataset, where = splits[split], f"{name}[{split}]"
    if len(dataset) == 0:
        raise UserError(f"{where} is empty")
    image_column = _find_image_column(dataset, options.image_column, where)
    # `datasets` derives it from the files' names and modification times, from the Hub's commit, or from the content.
    fingerprint, tables = dataset._fingerprint, dataset.cache_files
    # Folders are sorted by class, and the first rows would be of one class alone.
    rows = spread(len(dataset), options.max_train_samples or len(dataset))
    if len(rows) < len(dataset):
        dataset = dataset.select(rows)
    try:
        dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
    except Exception as error:
        kind = dataset.features[image_column]
        raise UserError(f"column '{image_column}' of {where} does not hold images but {kind}") from error
    identity = (fingerprint, split, image_column, len(rows))
    if options.dataset_name is not None and dataset.builder_name != "imagefolder":
        identity += _states_of_files(dataset, image_column, tables, Path(options.dataset_name).expanduser())
    fingerprint = hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    return ImageSource(dataset, image_column, name, split, fingerprint, rows)


def _states_of_files(dataset: "Dataset", image_column: str, tables: list[dict], folder: Path) -> tuple[str, ...]:
    """Hash sizes and times of change of the files that the fingerprint by `datasets` says nothing of, if there are any.

    That of a set which `save_to_disk` wrote may be of the paths that its images once had; that of a table of paths is
    of the table alone.
    """
    from pyarrow import compute

    written = [table["filename"] for table in tables if Path(table["filename"]).is_relative_to(folder.resolve())]
    column = dataset.data.column(image_column)
    named = compute.filter(compute.struct_field(column, "path"), compute.struct_field(column, "bytes").is_null())
    digest = hashlib.blake2b(digest_size=16)
    with user_errors(f"column '{image_column}' holds paths that cannot be read", UnicodeDecodeError):
        files = [*sorted(written), *filter(None, named.to_pylist())]
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # what is missing or no path is an error later
            status = os.stat(file)
            digest.update(f"{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return (digest.hexdigest(),) if files else ()


def load_split(options: DataOptions, split: str) -> ImageSource:
    """Open the images that a run with these options is trained on, or all of another split."""
    return load_images(options if split == "train" else replace(options, max_train_samples=None), split)


def splits_of(options: DataOptions) -> list[str]:
    """Return the names of the splits that the data have."""
    return [*_load_splits(options)[1]]


def spread(total: int, count: int) -> Sequence[int]:
    """Return at most `count` numbers of `range(total)`, evenly spread."""
    return range(total) if count >= total else [position * total // count for position in range(count)]


def _load_splits(options: DataOptions) -> "tuple[str, dict[str, Dataset] | DatasetDict]":
    """Return the data set's name and its splits; a folder that has none is `train`."""
    dataset_name, folder = options.dataset_name, options.train_data_dir
    if dataset_name is None and folder is None:
        raise UserError("no images: name them with --dataset_name or --train_data_dir, or as the first word")
    if dataset_name is not None and folder is not None:
        raise UserError("--dataset_name and --train_data_dir are two ways to name the images: give only one of them")
    if folder is not None:
        return os.path.basename(_existing_folder(folder, "--train_data_dir")), _load_image_folder(options)
    if dataset_name == DIGITS:
        return DIGITS, {"train": load_digits()}
    path = Path(dataset_name).expanduser()
    if path.exists() or dataset_name.startswith((".", "/", "~")) or dataset_name.count("/") > 1:
        return os.path.basename(_existing_folder(dataset_name, "--dataset_name")), _load_local_folder(options)
    return dataset_name, _load_from_hub(options)


def load_digits() -> "Dataset":
    """Return scikit-learn's handwritten digits, a real data set that needs no network: 1,797 grey images of 8x8."""
    import datasets  # these two take long to import, and few runs need them
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # grey levels from 0 to 16
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list("0123456789")))
    # Its fingerprint is the hash of its content, hence the same everywhere.
    return datasets.Dataset.from_dict({"image": list(pixels), "label": digits.target}, features=features, split="train")


def _existing_folder(folder: str, flag: str) -> str:
    path = Path(os.path.realpath(Path(folder).expanduser()))
    if path.is_symlink():  # what has no link left in it otherwise
        raise UserError(f"{flag} {folder}: is a symbolic link to itself")
    if not path.exists():
        raise UserError(f"{flag} {folder}: there is no such folder ({path})")
    if not path.is_dir():
        raise UserError(f"{flag} {folder} is a file; name the folder that holds it")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{flag} {folder}: no permission to read this folder ({path})")
    return str(path)


@dataclass
class ImagesOfFolder:
    """A folder that is not empty, as far as images are concerned."""

    path: str
    images: list[str]  # their names, sorted
    is_plain: bool  # has no table about the images, and no archive


def _load_image_folder(options: DataOptions) -> "dict[str, Dataset] | DatasetDict":
    """Load images from a folder and its sub-folders, or from those of each split (`_split_folders`).

    They are searched and listed here: `datasets` does not follow links, guesses (one photo called `test_1.jpg`, and it
    takes that one for the whole data set), and needs kilobytes for each file. Folders with tables or archives are
    left to it.
    """
    from image_data.workers import call_in_child

    folder = options.train_data_dir
    path = _existing_folder(folder, "--train_data_dir")
    roots = _split_folders(path) or {"train": path}
    splits = {name: folders_with_images(root, options.on_bad_image) for name, root in roots.items()}
    splits = {name: folders for name, folders in splits.items() if folders}
    if not splits:
        raise UserError(f"--train_data_dir {folder}: there are no images in this folder ({path})")
    for name, found in splits.items():
        _check_for_splits_below(folder, roots[name], found)
    if not all(each.is_plain for folders in splits.values() for each in folders):
        return call_in_child(functools.partial(_read_image_folder, folder, splits, _cache_of_datasets(options)))
    try:
        return _list_images(splits, roots)
    except Exception as error:
        raise UserError(f"--train_data_dir {folder} cannot be read: {_root_cause(error)}") from error


def _read_image_folder(folder: str, splits: dict[str, list[ImagesOfFolder]], cache_dir: str | None) -> "DatasetDict":
    import datasets

    patterns = {name: [f"{glob.escape(each.path)}/*" for each in folders] for name, folders in splits.items()}
    try:
        return datasets.load_dataset("imagefolder", data_files=patterns, cache_dir=cache_dir)
    except Exception as error:
        tables = [Path(each.path, name) for folders in splits.values() for each in folders for name in TABLES]
        there = ", ".join(printable(str(table)) for table in tables if table.exists())
        where = f"; its metadata: {there}" if there else ""
        raise UserError(f"--train_data_dir {folder} cannot be read: {_root_cause(error)}{where}") from error


def _list_images(splits: dict[str, list[ImagesOfFolder]], roots: dict[str, str]) -> "dict[str, Dataset]":
    """Return the paths of the images in the order of their names, with a folder's name as their label.

    There are labels if there are several, all at one depth, as in `datasets`.
    """
    import datasets

    names = sorted({os.path.basename(each.path) for folders in splits.values() for each in folders})
    depths = {
        len(Path(os.path.relpath(each.path, roots[name])).parts) for name, folders in splits.items() for each in folders
    }
    features = datasets.Features(image=datasets.Image())
    if len(names) > 1 and len(depths) == 1 and depths != {0}:
        features["label"] = datasets.ClassLabel(names=names)
    return {name: _list_split(name, folders, roots[name], features) for name, folders in splits.items()}


def _list_split(name: str, folders: list[ImagesOfFolder], root: str, features: "Features") -> "Dataset":
    """Return the images of a split; its fingerprint is of names, sizes and times of change, wherever the folder is."""
    import datasets
    import pyarrow

    digest, images, labels = hashlib.blake2b(digest_size=16), [], []
    for folder in folders:
        files = [os.path.join(folder.path, image) for image in folder.images]
        paths, nothing = pyarrow.array(files, pyarrow.string()), pyarrow.nulls(len(files), pyarrow.binary())
        images.append(pyarrow.StructArray.from_arrays([nothing, paths], ["bytes", "path"]))
        if "label" in features:
            number = features["label"].str2int(os.path.basename(folder.path))
            labels.append(pyarrow.array(np.full(len(files), number)))
        digest.update(os.path.relpath(folder.path, root).encode())
        for image, status in zip(folder.images, map(os.stat, files), strict=True):
            digest.update(f"\0{image}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    columns = [pyarrow.chunked_array(column) for column in (images, labels) if column]
    table = pyarrow.Table.from_arrays(columns, schema=features.arrow_schema).combine_chunks()
    return datasets.Dataset(
        datasets.table.InMemoryTable(table),
        datasets.DatasetInfo(features=features),
        datasets.NamedSplit(name),
        fingerprint=digest.hexdigest(),
    )


def folders_with_images(path: str, on_bad_image: str) -> list[ImagesOfFolder]:
    """Return all folders with images in and below one; raise, or warn, for what cannot be read."""
    found, unread = _search(path)
    _leave_out(unread, on_bad_image)
    return found


def _search(path: str) -> tuple[list[ImagesOfFolder], list[str]]:
    """Return all folders with images in and below one, each once, and the images and folders that cannot be read."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    found, unread, seen = [], [], set()

    def cannot_be_searched(error: OSError) -> None:
        unread.append(f"{printable(error.filename)}{os.sep} ({error.strerror})")

    for folder, sub_folders, files in os.walk(path, onerror=cannot_be_searched, followlinks=True):
        seen.add(os.path.realpath(folder))
        sub_folders[:] = [
            name
            for name in sub_folders
            if not name.startswith((".", "__")) and os.path.realpath(os.path.join(folder, name)) not in seen
        ]
        images, is_plain = [], True
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            is_plain &= name not in TABLES and suffix != ".zip"
            if reason := _why_unread(os.path.join(folder, name), ImageFolder.EXTENSIONS):
                unread.append(reason)
            elif suffix in ImageFolder.EXTENSIONS and not name.startswith("."):
                images.append(name)
        if images or not is_plain:
            found.append(ImagesOfFolder(folder, sorted(images), is_plain))
    return sorted(found, key=lambda each: each.path), unread


def _why_unread(file: str, read: Collection[str]) -> str | None:
    """Name a file that has the name of an image and cannot be read as one, with the reason."""
    suffix, name = os.path.splitext(file)[1].lower(), os.path.basename(file)
    if suffix not in IMAGE_SUFFIXES or name.startswith("."):
        return None
    if suffix not in read:
        return f"{printable(file)} (of an unsupported format)"
    # To open a pipe would wait for ever.
    return None if os.path.isfile(file) else f"{printable(file)} (not a regular file)"


def _leave_out(unread: list[str], on_bad_image: str) -> None:
    """Say which files are not used, or raise if none may be left out."""
    if not unread:
        return
    listed = ", ".join(sorted(unread)[:MOST_NAMED]) + (", ..." if len(unread) > MOST_NAMED else "")
    if on_bad_image == "fail":
        advice = "convert or remove them, or leave them out with --on_bad_image skip"
        raise UserError(f"{len(unread)} image file(s) cannot be read: {listed}; {advice}")
    logger.warning("%d image file(s) cannot be read and are left out: %s", len(unread), listed)


def _splits_by_name() -> dict[str, str]:
    """Return which split a folder of each of these names holds, in lower case."""
    from datasets.data_files import SPLIT_KEYWORDS

    split_of = {keyword: str(split) for split, keywords in SPLIT_KEYWORDS.items() for keyword in keywords}
    return split_of | SPLITS_OF_PREPARE_DATA


def _check_for_splits_below(folder: str, root: str, found: list[ImagesOfFolder]) -> None:
    """Raise if folders of several splits stand side by side further down, as archives often unpack."""
    split_of, below = _splits_by_name(), {}
    for each in found:
        parts = Path(os.path.relpath(each.path, root)).parts
        for depth, name in enumerate(parts):
            if name.lower() in split_of:
                below.setdefault(parts[:depth], {})[split_of[name.lower()]] = name
    for parts, names in below.items():
        if len(names) > 1:
            there, splits = os.path.join(root, *parts), ", ".join(sorted(names.values()))
            raise UserError(
                f"--train_data_dir {folder}: has folders of splits further down ({splits} in {there}); name the folder "
                f"to train on, such as {there}"
            )


def _split_folders(path: str) -> dict[str, str]:
    """Return the folder of each split if all images are in such (as in train/ and test/), nothing if there are none.

    Raise if it is not clear: images that were set aside for a test must not be trained on without a word.
    """
    split_of = _splits_by_name()
    # Not entry.is_dir(), which raises for a link that leads to itself.
    names = sorted(
        entry.name for entry in os.scandir(path) if not entry.name.startswith((".", "__")) and os.path.isdir(entry.path)
    )
    if not any(name.lower() in split_of for name in names):
        return {}
    folders = [name for name in names if _search(os.path.join(path, name))[0]]
    named = {name: split_of[name.lower()] for name in folders if name.lower() in split_of}
    others = [name for name in folders if name not in named]
    beside = [entry.name for entry in os.scandir(path) if entry.name in TABLES or _is_image(entry)]
    splits = set(named.values())
    if not named or (not others and not beside and len(splits) == len(named)):
        return {split: os.path.join(path, name) for name, split in named.items()}
    if splits == {"train"} and others and not beside:
        logger.warning("%s: %s is taken for a class, as %s are", path, ", ".join(named), ", ".join(others))
        return {}
    found = [*others, *sorted(beside)[:MOST_NAMED]]
    problem = f"{', '.join(found)} beside them" if found else "two of them for one split"
    train = [name for name, split in named.items() if split == "train"]
    example = f", such as {os.path.join(path, train[0])}" if train else ""
    raise UserError(
        f"--train_data_dir {path}: has folders of splits ({', '.join(named)}) and {problem}; name the folder to train "
        f"on{example}, or move the rest elsewhere"
    )


def _is_image(entry: os.DirEntry) -> bool:
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    suffix = os.path.splitext(entry.name)[1].lower()
    return suffix in ImageFolder.EXTENSIONS and not entry.name.startswith(".") and os.path.isfile(entry.path)


def _load_local_folder(options: DataOptions) -> "dict[str, Dataset] | DatasetDict":
    """Load a folder as `datasets` reads it: parquet, CSV, images and more, or what `save_to_disk` wrote."""
    from image_data.workers import call_in_child

    path = _existing_folder(options.dataset_name, "--dataset_name")
    loaded = call_in_child(functools.partial(_read_local_folder, options, path))
    if any(dataset.builder_name == "imagefolder" for dataset in loaded.values()):
        folders_with_images(path, options.on_bad_image)  # for the images that are not read
    return loaded


def _read_local_folder(options: DataOptions, path: str) -> "dict[str, Dataset] | DatasetDict":
    import datasets

    try:
        _check_arrow_files(path)
        if Path(path, datasets.config.DATASET_STATE_JSON_FILENAME).exists():
            return {"train": datasets.load_from_disk(path)}
        if Path(path, datasets.config.DATASETDICT_JSON_FILENAME).exists():
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path, options.dataset_config_name, cache_dir=_cache_of_datasets(options))
    except datasets.data_files.EmptyDatasetError as error:
        raise UserError(f"--dataset_name {options.dataset_name}: this folder contains no data ({path})") from error
    except Exception as error:
        raise UserError(f"--dataset_name {options.dataset_name} cannot be read: {_root_cause(error)}") from error


def _check_arrow_files(path: str) -> None:
    """Raise for Arrow files whose offsets lead out of them: `datasets` trusts those, and the process would crash."""
    import pyarrow

    for file in sorted(Path(path).rglob("*.arrow")):
        with pyarrow.memory_map(str(file)) as source:
            try:
                batches = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:  # of the other of the two formats
                reader = pyarrow.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            for batch in batches:
                batch.validate(full=True)  # which looks at the offsets and not at the images


def _load_from_hub(options: DataOptions) -> "DatasetDict":
    import datasets

    name = options.dataset_name
    try:
        return datasets.load_dataset(name, options.dataset_config_name, cache_dir=_cache_of_datasets(options))
    except Exception as error:
        raise UserError(
            f"--dataset_name {name} is neither a local folder ({Path(name).resolve()} does not exist) "
            f"nor could it be loaded from the Hub ({reason_of_hub(error)})"
        ) from error


def _cache_of_datasets(options: DataOptions) -> str | None:
    """Return where `datasets` keeps what it makes; in a folder named after the data it would mix with them."""
    return options.cache_dir and str(Path(options.cache_dir).expanduser() / "datasets")


def _root_cause(error: BaseException) -> str:
    """Return the first line of the error beneath `datasets`' general ones."""
    cause = first_cause(error)
    if isinstance(cause, UnicodeEncodeError):
        file = printable(cause.object)
        return f"the name of {file} is not UTF-8; rename it, or let prepare_data.py make a folder with plain names"
    message = str(cause).strip().split("\n")[0]
    if "corresponds to no data" in message:  # what `datasets` says about files without rows
        return "it is empty"
    return f"{type(cause).__name__}: {message}"


def check_column(flag: str, column: str, columns: Iterable[str]) -> str:
    """Return the column; raise, in the words of the diffusers examples, if there is none of this name."""
    if column not in columns:
        there = ", ".join(columns) or "(the data has no such columns)"
        raise UserError(f"`--{flag}' value '{column}' needs to be one of: {there}")
    return column


def _find_image_column(dataset: "Dataset", wanted: str | None, where: str) -> str:
    import datasets

    columns = dataset.column_names
    if wanted is not None:
        return check_column("image_column", wanted, columns)
    images = [
        column
        for column, feature in dataset.features.items()
        # Parquet files written without `datasets` hold plain structs.
        if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})
    ]
    if len(images) != 1:
        found = f"several image columns ({', '.join(images)})" if images else "no image column"
        raise UserError(f"{where} has {found}; name the one to use with --image_column, one of: {', '.join(columns)}")
    return images[0]
