"""What the network is told of an image besides its timestep: nothing, its class, or a caption.

A condition is a row of a table: of classes, or of captions as a frozen encoder sees them. One row says nothing; an
image gets it with the probability `condition_dropout`, for classifier-free guidance (Ho & Salimans 2022). Which row
an image gets in a step is, like all randomness, a function of (seed, step, position in the global batch).
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.files import default_cache_dir, replace_folder, write_atomically
from common.randomness import generator_for
from conditions import conditional_pipeline
from conditions.guidance import CONDITION_FILE
from conditions.text_encoder import (
    EncodedCaptions,
    encode_once,
    fingerprint,
    load_text_encoder,
    text_encoder_config,
    words_of,
)
from image_data.annotations import Labels, fill_templates, find_captions, find_labels
from image_data.sources import spread

if TYPE_CHECKING:
    from common.processes import Processes
    from image_data.sources import ImageSource
    from image_data.store import TrainingImages
    from run_folder.config import ConditionalConfig

logger = logging.getLogger(__name__)

PROMPTS_OF_CAPTIONS = 8  # rows of a sample grid if nobody says what to draw


class Unconditional:
    """Images alone, as in the paper; and what every condition has."""

    network: dict[str, int] = {}  # how the network differs from that without a condition
    balanced_labels: torch.Tensor | None = None  # the class of every image, if all classes are to come equally often
    settings: dict[str, object] = {}  # what makes another run of this one
    description: dict[str, object] | None = None  # for those who generate images; saved as JSON
    rows_of_grid: list[str] = []  # what the rows of a sample grid show

    def draw(self, images: torch.Tensor, step: int) -> torch.Tensor:
        """The row of the table for each image of a step's global batch."""
        return torch.zeros_like(images)

    def inputs(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the network takes for these rows of the table."""
        return {}

    def inputs_of_grid(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What it takes to draw these rows of a sample grid."""
        return {}

    def pipeline_entries(self) -> dict[str, object]:
        """How `model_index.json` differs from that of a DDPMPipeline."""
        return {}

    def write_parts(self, output_dir: Path) -> None:
        """Write what belongs to the pipeline and does not change during training."""


class Conditional(Unconditional):
    """A table of conditions, the rows each image may get, and how one of them is drawn.

    Images of one group have the same choice: `groups` is the group of every image, `choices` are the rows of each.
    """

    def __init__(self, groups: torch.Tensor, choices: list[list[int]], nothing: int, config: ConditionalConfig):
        self._groups, self._nothing = groups, nothing
        self._choices = torch.tensor([row for rows in choices for row in rows])
        self._starts = torch.tensor([0, *map(len, choices)]).cumsum(0)
        self._dropout, self._seed = config.condition_dropout, config.seed

    def draw(self, images: torch.Tensor, step: int) -> torch.Tensor:
        generator = generator_for(self._seed, "condition", step)
        dropped = torch.rand(len(images), generator=generator) < self._dropout
        quantiles = torch.rand(len(images), generator=generator, dtype=torch.float64)
        starts, ends = self._starts[self._groups[images]], self._starts[self._groups[images] + 1]
        rows = self._choices[starts + (quantiles * (ends - starts)).long()]
        return rows.where(~dropped, self._nothing)

    def write_parts(self, output_dir: Path) -> None:
        file, text = output_dir / CONDITION_FILE, json.dumps(self.description, indent=2)
        if file.exists() and file.read_text(encoding="utf-8") == text:
            return
        self._write_components(output_dir)
        shutil.copyfile(conditional_pipeline.__file__, output_dir / Path(conditional_pipeline.__file__).name)
        write_atomically(file, text)  # last: where it is, the rest is

    def _write_components(self, output_dir: Path) -> None:
        """Write the parts of the pipeline that have folders."""


class ClassCondition(Conditional):
    """One of n classes. The table has n + 1 rows, the last of which stands for no class."""

    def __init__(self, names: list[str], labels: torch.Tensor, config: ConditionalConfig):
        count = len(names)
        super().__init__(labels, [[label] for label in range(count)], nothing=count, config=config)
        self._names = names
        self.balanced_labels = labels if config.balance else None
        self.network = {"num_class_embeds": count + 1}
        self.settings = {"class_names": names}
        self.description = {"condition": "class", "class_names": names, "dropout": config.condition_dropout}
        self._shown = list(spread(count, config.eval_batch_size))
        self.rows_of_grid = [names[label] for label in self._shown]

    def inputs(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"class_labels": rows}

    def inputs_of_grid(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.inputs(torch.tensor(self._shown)[rows])

    def pipeline_entries(self) -> dict[str, object]:
        return {
            "_class_name": ["conditional_pipeline", "ClassConditionalDDPMPipeline"],
            "id2label": {str(label): name for label, name in enumerate(self._names)},
        }


class TextCondition(Conditional):
    """A caption of several, as token embeddings. The first row of the table is the empty caption."""

    def __init__(
        self,
        groups: torch.Tensor,
        captions: list[list[str]],
        labels: torch.Tensor | None,
        prompts: list[str],
        config: ConditionalConfig,
        processes: Processes,
    ):
        distinct = sorted({caption for several in captions for caption in several} - {""})
        row_of = {caption: row for row, caption in enumerate(["", *distinct])}
        choices = [[row_of[caption] for caption in several] for several in captions]
        super().__init__(groups, choices, nothing=0, config=config)
        self.balanced_labels = labels if config.balance else None
        self.rows_of_grid = [prompts[row] for row in spread(len(prompts), config.eval_batch_size)]
        self._encode(["", *distinct], config, processes)
        self.network = {"cross_attention_dim": self._table.width}
        self.settings = {"encoder": self._identity}
        self.description = {
            "condition": "text",
            "text_encoder": config.text_encoder,
            "encoder": self._identity,
            "dropout": config.condition_dropout,
            "prompts": self.rows_of_grid,
            "vocabulary": sorted({word for caption in distinct for word in words_of(caption)}),
        }

    def _encode(self, captions: list[str], config: ConditionalConfig, processes: Processes) -> None:
        """Once per machine; the other processes hear which files it is in."""
        files, self._encoder = None, None
        if processes.is_local_main:
            self._encoder = load_text_encoder(config.text_encoder, processes.device)
            identity = fingerprint(*self._encoder)
            cache_dir = Path(config.cache_dir or default_cache_dir()).expanduser()
            files = (
                identity,
                *(encode_once(*self._encoder, identity, texts, cache_dir) for texts in (captions, self.rows_of_grid)),
            )
            self._encoder[1].cpu()  # it is needed once more, to be saved
        self._identity, *files = next(filter(None, processes.all_gather(files)))
        self._table, self._grid = map(EncodedCaptions, files)

    def inputs(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._inputs(self._table, rows)

    def inputs_of_grid(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._inputs(self._grid, rows)

    def _inputs(self, table: EncodedCaptions, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        states, mask = table[rows]
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def pipeline_entries(self) -> dict[str, object]:
        tokenizer, encoder = self._encoder
        return {
            "_class_name": ["conditional_pipeline", "TextToImageDDPMPipeline"],
            "text_encoder": ["transformers", type(encoder).__name__],
            "tokenizer": ["transformers", type(tokenizer).__name__],
        }

    def _write_components(self, output_dir: Path) -> None:
        tokenizer, encoder = self._encoder
        for name, part in (("tokenizer", tokenizer), ("text_encoder", encoder)):
            aside = output_dir / f".{name}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            part.save_pretrained(aside)
            replace_folder(aside, output_dir / name)


@dataclass(frozen=True)
class Annotations:
    """What a data set says of its images, as far as it is asked for."""

    captions: list[list[str]] | None  # of every row; None where there are none, or they are made of the classes
    labels: Labels | None


def find_annotations(config: ConditionalConfig, source: ImageSource) -> Annotations:
    """The classes or captions that the configuration asks for; no image need be decoded to know that there are none."""
    from_classes = config.condition == "class" or bool(config.caption_template)
    captions = None if from_classes else find_captions(source, config.caption_column)
    labels = find_labels(source, config.label_column) if captions is None or config.balance else None
    return Annotations(captions, labels)


def load_condition(
    config: ConditionalConfig, annotations: Annotations, data: TrainingImages, processes: Processes
) -> Conditional:
    """The condition of the images that could be decoded."""
    kept = torch.as_tensor(data.images.kept)
    labels = annotations.labels.of_row[kept] if annotations.labels is not None else None
    if annotations.captions is not None:
        captions = [annotations.captions[row] for row in kept.tolist()]
        distinct = sorted({several[0] for several in captions})
        examples = [distinct[index] for index in spread(len(distinct), PROMPTS_OF_CAPTIONS)]
        groups, prompts = torch.arange(len(captions)), config.validation_prompts or examples
        logger.info("%d distinct captions, such as %s", len(distinct), "; ".join(examples[:3]))
        return TextCondition(groups, captions, labels, prompts, config, processes)

    names = annotations.labels.names
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    logger.info("Classes: %s", ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True)))
    if config.condition == "class":
        return ClassCondition(names, labels, config)
    captions = fill_templates(config.caption_template, names)
    prompts = config.validation_prompts or [several[0] for several in captions]
    return TextCondition(labels, captions, labels, prompts, config, processes)


def check_condition(config: ConditionalConfig) -> None:
    """Raise before any image is decoded if the encoder cannot be had."""
    if config.condition == "text":
        text_encoder_config(config.text_encoder)
