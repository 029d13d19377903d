"""The options of a data set."""

from typing import Literal

from common.options import NOT_NEGATIVE, NUM_WORKERS, POSITIVE, RESOLUTION, option, section

INTERPOLATION = "bicubic"


@section("data")
class DataOptions:
    """The options that name a data set, and say what its images become and how they are kept."""

    dataset_name: str | None = option(
        None,
        "Hub id or local folder of a data set, or 'digits' (embedded, and the default when no data is named).",
    )
    dataset_config_name: str | None = option(
        None,
        "Configuration of the data set, if it has several.",
        only_with="dataset_name",
        not_with="dataset_name=digits",
    )
    train_data_dir: str | None = option(
        None, "Folder of images, instead of dataset_name.", instead_of="dataset_name", on_card=False
    )
    image_column: str | None = option(None, "Column with the images; found by itself if there is only one.")
    max_train_samples: int | None = option(None, "Use only so many images, evenly spread over the data set.", POSITIVE)
    cache_dir: str | None = option(
        None,
        "Folder for downloaded and decoded data (default: that of datasets, and ~/.cache/exact-ddpm).",
        saved=False,
    )
    resolution: int = option(
        32,
        "Size of the images; others are resized, the shorter side to this.",
        RESOLUTION,
        fixed=True,
    )
    interpolation: Literal["bicubic", "bilinear"] = option(
        INTERPOLATION, "How larger photos are resized, antialiased; the diffusers example's is bilinear."
    )
    channels: Literal["auto", "1", "3", "4"] = option(
        "auto", "1 grey, 3 RGB, 4 RGBA; auto: 1 if all are grey.", fixed=True
    )
    center_crop: bool = option(False, "Crop at the centre instead of at random.")
    random_flip: bool = option(True, "Flip images horizontally at random.")
    num_workers: int | None = option(
        None,
        "Processes that decode images (default: min(4, usable cores / processes on this machine)).",
        NUM_WORKERS,
        may_change=True,
        on_card=False,
    )
    in_memory_limit_gb: float = option(
        8.0, "Decoded data beyond this size is streamed from the disk.", NOT_NEGATIVE, may_change=True, on_card=False
    )
    on_bad_image: Literal["fail", "skip"] = option(
        "fail", "What to do with a file that cannot be decoded.", may_change=True
    )
