"""The condition of a training run, from the classes or captions of its images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.files import default_cache_dir
from conditions.condition import ClassCondition, Condition, RowSampler, TextCondition
from conditions.text_encoder import EncodedCaptions, TextEncoder, text_encoder_config, words_of
from image_data.annotations import Labels, fill_templates, find_captions, find_labels
from image_data.sources import spread

if TYPE_CHECKING:
    from common.processes import Processes
    from image_data.sources import ImageSource
    from image_data.store import TrainingImages
    from run_folder.config import ConditionalConfig

logger = logging.getLogger(__name__)

EXAMPLES = 8  # captions in a sample grid if no prompts are given

# The captions of every row of a data set, and its classes; None where there are none, or they are not needed.
Annotations = tuple[list[list[str]] | None, Labels | None]


def check_condition(config: ConditionalConfig) -> None:
    """Raise before any image is decoded if the encoder cannot be had."""
    if config.condition == "text":
        text_encoder_config(config.text_encoder)


def find_annotations(config: ConditionalConfig, source: ImageSource) -> Annotations:
    """Return the classes or captions; no image need be decoded to know that there are none."""
    from_classes = config.condition == "class" or bool(config.caption_template)
    captions = None if from_classes else find_captions(source, config.caption_column)
    return captions, find_labels(source, config.label_column) if captions is None or config.balance else None


def load_condition(
    config: ConditionalConfig, annotations: Annotations, data: TrainingImages, processes: Processes
) -> Condition:
    """Return the condition of the images that could be decoded, ready for training."""
    captions, classes = annotations
    kept = torch.as_tensor(data.images.kept)
    labels = classes.of_row[kept] if classes is not None else None
    if captions is not None:
        groups, captions = torch.arange(len(kept)), [captions[row] for row in kept.tolist()]
        distinct = sorted({several[0] for several in captions})
        examples = [distinct[index] for index in spread(len(distinct), EXAMPLES)]
        logger.info("%d distinct captions, such as %s", len(distinct), "; ".join(examples[:3]))
    else:
        names = classes.names
        groups, captions = labels, fill_templates(config.caption_template, names)
        examples = [several[0] for several in captions]
        counts = torch.bincount(labels, minlength=len(names)).tolist()
        logger.info("Classes: %s", ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True)))

    if config.condition == "class":
        grid_labels = list(spread(len(names), config.eval_batch_size))
        condition = ClassCondition(names, config.condition_dropout, grid_labels)
        choices = [[label] for label in range(len(names))]
    else:
        # The first row of the table is the empty caption.
        distinct = ["", *sorted({caption for several in captions for caption in several} - {""})]
        condition = encode_captions(config, distinct, config.validation_prompts or examples, processes)
        row_of = {caption: row for row, caption in enumerate(distinct)}
        choices = [[row_of[caption] for caption in several] for several in captions]
    condition.sampler = RowSampler(groups, choices, condition.null_row, config.condition_dropout, config.seed)
    condition.balanced_labels = labels if config.balance else None
    return condition


def encode_captions(
    config: ConditionalConfig, captions: list[str], prompts: list[str], processes: Processes
) -> TextCondition:
    """Encode captions and prompts of the sample grids, once per machine; its other processes read the files."""
    prompts = [prompts[row] for row in spread(len(prompts), config.eval_batch_size)]
    cache_dir = Path(config.cache_dir or default_cache_dir()).expanduser()
    found, parts = None, {}
    if processes.is_local_main:
        text_encoder = TextEncoder(config.text_encoder, processes.device)
        files = [text_encoder.encode_once(texts, cache_dir) for texts in (captions, prompts)]
        found = text_encoder.fingerprint, *(file.name for file in files)
        # The encoder is only needed once more, to be saved.
        parts = {"text_encoder": text_encoder.encoder.cpu(), "tokenizer": text_encoder.tokenizer}
    fingerprint, *names = next(filter(None, processes.all_gather(found)))
    description = {
        "condition": "text",
        "text_encoder": config.text_encoder,
        "encoder": fingerprint,
        "dropout": config.condition_dropout,
        "prompts": prompts,
        "vocabulary": sorted({word for caption in captions for word in words_of(caption)}),
    }
    table, grid = (EncodedCaptions(cache_dir / name) for name in names)  # each machine has a cache of its own
    return TextCondition(table, description, grid=grid, parts=parts)
