"""The condition given to the network besides a noisy image and its timestep: nothing, a class, or a caption.

A condition is a row of a table: of classes, or of captions as a frozen encoder sees them. One row stands for no
condition; a training image gets it with the probability `condition_dropout`, for classifier-free guidance (Ho &
Salimans 2022).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common.randomness import generator_for

PIPELINE_CODE = Path(__file__).with_name("conditional_pipeline.py")  # travels with every model that has a condition

# The token states of the captions in these rows [n, tokens, width], and which tokens are theirs [n, tokens].
CaptionTable = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RowSampler:
    """Draws a row of the table for every image of a batch, as a function of (seed, step, position in the global batch).

    Images of one group have the same choice: `groups` is the group of every image, `choices` are the rows of each.
    """

    def __init__(self, groups: torch.Tensor, choices: list[list[int]], null_row: int, dropout: float, seed: int):
        self._groups, self._null_row, self._dropout, self._seed = groups, null_row, dropout, seed
        self._choices = torch.tensor([row for rows in choices for row in rows])
        self._starts = torch.tensor([0, *map(len, choices)]).cumsum(0)

    def draw(self, images: torch.Tensor, step: int) -> torch.Tensor:
        """Draw the row of each image of a step's global batch."""
        generator = generator_for(self._seed, "condition", step)
        dropped = torch.rand(len(images), generator=generator) < self._dropout
        quantiles = torch.rand(len(images), generator=generator, dtype=torch.float64)
        starts, ends = self._starts[self._groups[images]], self._starts[self._groups[images] + 1]
        rows = self._choices[starts + (quantiles * (ends - starts)).long()]
        return rows.where(~dropped, self._null_row)


class Condition:
    """A table of conditions, and what a network, a run and a pipeline have because of it; by default nothing."""

    null_row = 0  # stands for no condition
    network: dict[str, int] = {}  # how the network differs from that without a condition
    settings: dict[str, object] = {}  # what makes another run of this one
    description: dict[str, object] | None = None  # for those who generate images; saved as JSON
    # For training alone.
    pipeline_entries: dict[str, object] = {}  # how `model_index.json` differs from that of a DDPMPipeline
    parts: dict[str, Any] = {}  # of the pipeline, besides network and scheduler: a text encoder and its tokenizer
    sampler: RowSampler | None = None
    balanced_labels: torch.Tensor | None = None  # the class of every image, if all classes are to come equally often
    rows_of_grid: list[str] = []  # what the rows of a sample grid show

    def inputs(self, rows: torch.Tensor, of_grid: bool = False) -> dict[str, torch.Tensor]:
        """Return the arguments of the network for these rows of the table, or of a sample grid."""
        return {}

    def draw(self, images: torch.Tensor, step: int) -> torch.Tensor:
        """Draw a row of the table for each image of a step's global batch."""
        return self.sampler.draw(images, step) if self.sampler else torch.zeros_like(images)


class NoCondition(Condition):
    """Images alone, as in the paper."""


class ClassCondition(Condition):
    """One of n classes. The last of the n + 1 rows stands for no class. A sample grid shows `grid_labels`."""

    def __init__(self, names: list[str], dropout: float = 0.0, grid_labels: Sequence[int] = ()):
        self.null_row = len(names)
        self.network = {"num_class_embeds": len(names) + 1}
        self.settings = {"class_names": names}
        self.description = {"condition": "class", "class_names": names, "dropout": dropout}
        self.pipeline_entries = {
            "_class_name": [PIPELINE_CODE.stem, "ClassConditionalDDPMPipeline"],
            "id2label": {str(label): name for label, name in enumerate(names)},
        }
        self._grid_labels = torch.tensor(grid_labels)
        self.rows_of_grid = [names[label] for label in grid_labels]

    def inputs(self, rows: torch.Tensor, of_grid: bool = False) -> dict[str, torch.Tensor]:
        return {"class_labels": self._grid_labels[rows] if of_grid else rows}


class TextCondition(Condition):
    """A caption, as the token states that a frozen encoder makes of it. `grid` is the table of the grid's prompts."""

    def __init__(
        self,
        table: CaptionTable,
        description: dict[str, object],
        null_row: int = 0,
        grid: CaptionTable | None = None,
        parts: dict[str, Any] | None = None,
    ):
        self._table, self._grid, self.null_row, self.parts = table, grid, null_row, parts or {}
        self.description, self.rows_of_grid = description, description["prompts"]
        self.settings = {"encoder": description["encoder"]}
        self.network = {"cross_attention_dim": table(torch.tensor([null_row]))[0].shape[2]}
        types = {name: ["transformers", type(part).__name__] for name, part in self.parts.items()}
        self.pipeline_entries = {"_class_name": [PIPELINE_CODE.stem, "TextToImageDDPMPipeline"], **types}

    def inputs(self, rows: torch.Tensor, of_grid: bool = False) -> dict[str, torch.Tensor]:
        states, mask = (self._grid if of_grid else self._table)(rows)
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}
