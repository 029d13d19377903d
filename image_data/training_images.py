"""The images of a run, as the configuration names them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import default_cache_dir
from common.machine import default_num_workers
from image_data.sources import load_images
from image_data.store import prepare_images

if TYPE_CHECKING:
    from common.processes import Processes
    from image_data.sources import ImageSource
    from image_data.store import InMemoryImages, StreamedImages
    from run_folder.config import TrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingImages:
    """The images of a run, and the processes that stream them if they do not fit into memory."""

    images: InMemoryImages | StreamedImages
    channels: int
    num_workers: int
    random_flip: bool = False  # horizontally, at random


def open_source(config: TrainingConfig, processes: Processes) -> ImageSource:
    """The data set that the configuration names; nothing of it is decoded yet."""
    from datasets.utils.logging import disable_progress_bar

    if not processes.is_local_main:
        disable_progress_bar()
    with processes.main_first():
        return load_images(
            dataset_name=config.dataset_name,
            dataset_config_name=config.dataset_config_name,
            train_data_dir=config.train_data_dir,
            image_column=config.image_column,
            cache_dir=config.cache_dir,
            max_train_samples=config.max_train_samples,
        )


def load_training_images(config: TrainingConfig, source: ImageSource, processes: Processes) -> TrainingImages:
    """The images of a data set as the configuration wants them, decoded once per machine."""
    num_workers = config.dataloader_num_workers
    if num_workers is None:
        num_workers = default_num_workers(processes.local_count)
    channels = source.detect_channels() if config.channels == "auto" else int(config.channels)
    images = prepare_images(
        source,
        resolution=config.resolution,
        channels=channels,
        center_crop=config.center_crop,
        memory_limit_bytes=int(config.in_memory_limit_gb * 2**30),
        num_workers=num_workers,
        on_bad_image=config.on_bad_image,
        cache_dir=Path(config.cache_dir or default_cache_dir()).expanduser(),
        work_here=processes.is_local_main,
        wait=processes.barrier,
    )
    logger.info(
        "%s[%s]: %d images, %d channel(s), %d data worker(s)",
        source.name,
        source.split,
        len(images),
        channels,
        num_workers,
    )
    if images.skipped:
        listed = "\n".join(f"  {name}" for name in images.skipped[:20])
        more = f"\n  and {len(images.skipped) - 20} more" if len(images.skipped) > 20 else ""
        logger.warning("%d image(s) could not be decoded and are left out:\n%s%s", len(images.skipped), listed, more)
    return TrainingImages(images, channels, num_workers, config.random_flip)
