"""The options of a data set."""

from typing import Literal

from common.options import NOT_NEGATIVE, NUM_WORKERS, POSITIVE, RESOLUTION, option, section

INTERPOLATION = "bicubic"


@section("data")
class DataOptions:
    """The options that name a data set, and say what its images become and how they are kept."""

    dataset_name: str | None = option(
        None,
        "Data set: a Hub id, a local folder, or 'digits', which is built in (default: digits, if you name no data).",
    )
    dataset_config_name: str | None = option(
        None,
        "Which configuration of the data set to use, if it has several.",
        only_with="dataset_name",
        not_with="dataset_name=digits",
    )
    train_data_dir: str | None = option(
        None, "Folder of images, flat or by class, instead of dataset_name.", instead_of="dataset_name", on_card=False
    )
    image_column: str | None = option(None, "Column with the images (default: the only one there is).")
    max_train_samples: int | None = option(
        None, "Train on this many images only, evenly spread over the data set.", POSITIVE
    )
    cache_dir: str | None = option(
        None,
        "Folder for downloaded and decoded data (default: the cache of datasets, and ~/.cache/exact-ddpm).",
        saved=False,
    )
    resolution: int = option(
        32,
        "Size of the training images in pixels. The shorter side is resized to this, and the rest is cropped.",
        RESOLUTION,
        fixed=True,
    )
    interpolation: Literal["bicubic", "bilinear"] = option(
        INTERPOLATION, "Filter for resizing, with antialiasing; the diffusers example uses bilinear."
    )
    channels: Literal["auto", "1", "3", "4"] = option(
        "auto", "Colour channels: 1 grey, 3 RGB, 4 RGBA. auto is 1 if all images are grey, otherwise 3.", fixed=True
    )
    center_crop: bool = option(False, "Crop at the centre instead of at a random place.")
    random_flip: bool = option(True, "Mirror images left to right at random; turn it off for text and digits.")
    num_workers: int | None = option(
        None,
        "Processes that decode images (default: usable cores divided by the training processes here, at most 4).",
        NUM_WORKERS,
        may_change=True,
        on_card=False,
    )
    in_memory_limit_gb: float = option(
        8.0,
        "Data up to this size is decoded once and kept; larger data is streamed from the disk.",
        NOT_NEGATIVE,
        may_change=True,
        on_card=False,
    )
    on_bad_image: Literal["fail", "skip"] = option(
        "fail", "What to do with an image that cannot be decoded: stop, or leave it out.", may_change=True
    )
