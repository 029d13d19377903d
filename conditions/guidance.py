"""The content of generated images: classes or prompts, which seed gets which, and how strong the guidance is."""

from __future__ import annotations

import difflib
import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.errors import UserError, user_errors
from common.files import default_cache_dir
from conditions.condition import CaptionTable, ClassCondition, Condition, NoCondition, TextCondition
from conditions.conditional_pipeline import guide
from conditions.text_encoder import EncodedCaptions, TextEncoder, words_of
from image_data.sources import spread
from schedulers.denoising import Predict, network_predict

if TYPE_CHECKING:
    from generation.generate_options import ConditionOptions
    from run_folder.saved_model import SavedModel

logger = logging.getLogger(__name__)

ALL = "all"
LONGEST_NAME = 40
MOST_IN_MEMORY = 1000  # prompts


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: its scale (1 is none), and from which to which timestep, both included."""

    scale: float = 1.0
    rescale: float = 0.0
    interval: Sequence[int] | None = None  # Kynkäänniemi et al. 2024

    @property
    def name(self) -> str:
        """Return the part of a folder's name."""
        parts = [f"guidance-{self.scale:g}"] if self.scale != 1 else []
        parts += [f"rescale-{self.rescale:g}"] if self.rescale else []
        return "-".join(parts + (["interval", *map(str, self.interval)] if self.interval else []))

    @property
    def first_timestep(self) -> int:
        """Return a timestep at which there is guidance, if there is any."""
        return self.interval[0] if self.interval else 0

    def applies_at(self, t: torch.Tensor) -> bool:
        # On a GPU int(t) waits for the step before, which costs less than the pass of the network that it may save.
        return self.scale != 1 and (self.interval is None or self.interval[0] <= int(t) <= self.interval[1])


@dataclass(frozen=True)
class Layout:
    """The seed whose image is in each place of a grid; None where a row has no more images."""

    places: list[int | None]
    columns: int
    row_names: list[str]

    @property
    def seeds(self) -> list[int]:
        return [seed for seed in self.places if seed is not None]


@dataclass(frozen=True)
class GenerationCondition:
    """Classes or prompts, in turn: the image of seed s shows `choices[s % len(choices)]`."""

    condition: Condition = field(default_factory=NoCondition)
    choices: Sequence[str] = ("",)
    rows: Sequence[int] = (0,)  # of the table of conditions, for each choice
    guidance: Guidance = Guidance()
    request: dict[str, Any] = field(default_factory=dict)  # what was asked for, as samples.json has it
    short_name: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Return what two sets of images must have in common to be one."""
        guidance = {f"guidance_{name}": value for name, value in asdict(self.guidance).items()}
        return {**self.request, **guidance} if self.request else {}

    @property
    def name(self) -> str:
        """Return the part of a folder's name."""
        text = re.sub(r"\W+", "-", self.short_name).strip("-").lower()
        if len(text) > LONGEST_NAME:
            digest = hashlib.blake2b(repr(self.settings).encode(), digest_size=4).hexdigest()
            text = f"{text[: LONGEST_NAME - len(digest)]}-{digest}"
        return "-".join(filter(None, [text, self.guidance.name]))

    def predict_for(self, network: torch.nn.Module, seeds: list[int]) -> Predict:
        """Return the prediction, guided or not, that the denoising loop makes for a batch of seeds.

        Guidance takes one pass of the network over each image twice, with its condition and without.
        """
        device = next(network.parameters()).device
        rows = torch.tensor([self.rows[seed % len(self.choices)] for seed in seeds])

        def predict_with(rows: torch.Tensor) -> Predict:
            inputs = {name: value.to(device) for name, value in self.condition.inputs(rows).items()}
            return network_predict(partial(network, **inputs))

        conditional = predict_with(rows)
        with_and_without = predict_with(torch.cat([rows, torch.full_like(rows, self.condition.null_row)]))

        def predict(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            if not self.guidance.applies_at(t):
                return conditional(samples, t)
            predictions = with_and_without(torch.cat([samples, samples]), t).chunk(2)
            return guide(*predictions, self.guidance.scale, self.guidance.rescale, samples.shape[1])

        return predict

    def layout(self, seeds: Sequence[int], limit: int | None) -> Layout:
        """Arrange the images, at most `limit`, in a row for each choice, or nearly a square if there is one choice."""
        seeds_of: dict[str, list[int]] = {choice: [] for choice in self.choices}
        if len(seeds_of) == 1:
            shown = list(seeds[:limit])
            return Layout(shown, max(1, round(len(shown) ** 0.5)), [])
        for seed in seeds:
            seeds_of[self.choices[seed % len(self.choices)]].append(seed)
        drawn = [choice for choice, some in seeds_of.items() if some]
        shown = [drawn[position] for position in spread(len(drawn), limit or len(drawn))]
        columns = min(max(map(len, seeds_of.values())), max(1, limit // len(shown)) if limit else len(seeds))
        rows = [(seeds_of[choice] + [None] * columns)[:columns] for choice in shown]
        return Layout([seed for row in rows for seed in row], columns, shown)


def condition_of(options: ConditionOptions, model: SavedModel, device: torch.device) -> GenerationCondition:
    """Return what the flags ask of the model; raise for flags that do not go with it."""
    kind = model.condition["condition"] if model.condition else None
    if options.class_labels and kind != "class":
        raise UserError(f"--class_labels {' '.join(options.class_labels)}: {model.name} was trained without classes")
    for name in ("prompt", "prompts_file", "negative_prompt"):
        value = getattr(options, name)
        if value and kind != "text":
            shown = value if isinstance(value, str) else value[0]
            raise UserError(f"--{name} '{shown}': {model.name} was trained without captions")
    guidance = guidance_of(options, model)
    if kind is None:
        return GenerationCondition()
    if kind == "class":
        return class_condition(options.class_labels or [ALL], model.condition["class_names"], guidance)
    return prompt_condition(options, model, guidance, device)


def conditions_at(
    scales: list[float], options: ConditionOptions, model: SavedModel, device: torch.device
) -> list[GenerationCondition]:
    """Return the same condition at several guidance scales; prompts are encoded once."""
    condition = condition_of(options, model, device)
    guidances = (guidance_of(replace(options, guidance_scale=scale), model) for scale in scales)
    return [replace(condition, guidance=guidance) for guidance in guidances]


def guidance_of(options: ConditionOptions, model: SavedModel) -> Guidance:
    if options.guidance_scale != 1:
        flag = f"--guidance_scale {options.guidance_scale:g}"
        if model.condition is None:
            raise UserError(f"{flag}: {model.name} was trained without a condition")
        if not model.condition["dropout"]:
            raise UserError(
                f"{flag}: {model.name} was trained with --condition_dropout 0 and cannot predict without a condition"
            )
    last = model.scheduler.config.num_train_timesteps - 1
    if options.guidance_interval and options.guidance_interval[1] > last:
        words = " ".join(map(str, options.guidance_interval))
        raise UserError(f"--guidance_interval {words}: the timesteps of {model.name} are 0 to {last}")
    return Guidance(options.guidance_scale, options.guidance_rescale, options.guidance_interval or None)


def class_condition(labels: list[str], names: list[str], guidance: Guidance) -> GenerationCondition:
    """Return the condition that shows these classes in turn, by name or number."""
    rows = [row for label in labels for row in (range(len(names)) if label == ALL else [label_of(label, names)])]
    choices = [names[row] for row in rows]
    logger.info("Classes, in turn: %s", ", ".join(choices[:12]) + (", ..." if len(choices) > 12 else ""))
    short_name = "all classes" if rows == list(range(len(names))) else f"class {' '.join(choices)}"
    return GenerationCondition(ClassCondition(names), choices, rows, guidance, {"labels": choices}, short_name)


def label_of(name: str, names: list[str]) -> int:
    """Return the number of a class by its name, whatever the case, or by its number."""
    lower = [known.lower() for known in names]
    if name in names:
        return names.index(name)
    if name.lower() in lower:
        return lower.index(name.lower())
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    nearest = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {names[lower.index(nearest[0])]}?" if nearest else f"there are {', '.join(names[:20])}"
    raise UserError(f"--class_labels {name}: no such class; {hint}{', ...' if not nearest and len(names) > 20 else ''}")


def prompt_condition(
    options: ConditionOptions, model: SavedModel, guidance: Guidance, device: torch.device
) -> GenerationCondition:
    """Return the condition that shows the prompts in turn; the negative prompt is the row without a condition."""
    prompts = options.prompt or (read_prompts(options.prompts_file) if options.prompts_file else [])
    prompts, negative = prompts or model.condition["prompts"], options.negative_prompt or ""
    if unknown := unknown_words((*prompts, negative), model.condition):
        logger.warning("Words that occur in no caption of the training: %s", ", ".join(unknown))
    logger.info("Prompts, in turn: %s", "; ".join(prompts[:8]) + ("; ..." if len(prompts) > 8 else ""))
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    table = encoded([*row_of, negative], text_encoder_of(model, device))
    condition = TextCondition(table, model.condition, null_row=len(row_of))
    request = {"prompts": prompts, "negative_prompt": negative}
    rows = [row_of[prompt] for prompt in prompts]
    return GenerationCondition(condition, prompts, rows, guidance, request, short_name=" ".join(prompts))


def encoded(prompts: list[str], text_encoder: TextEncoder) -> CaptionTable:
    """Return the table of these prompts: of many, which padded would take gigabytes, in a file."""
    if len(prompts) > MOST_IN_MEMORY:
        try:
            return EncodedCaptions(text_encoder.encode_once(prompts, default_cache_dir()))
        except UserError as error:
            logger.warning("%d prompts are kept in memory: %s", len(prompts), error)
    text_encoder.warn_of_long(prompts)
    states, mask = text_encoder.encode(prompts)
    return lambda rows: (states[rows], mask[rows])


def unknown_words(texts: Iterable[str], condition: dict[str, Any] | None) -> list[str]:
    """Return the words that no caption of the training had, of which the network knows nothing."""
    known = set(condition["vocabulary"]) if condition and condition["condition"] == "text" else None
    return [] if known is None else sorted({word for text in texts for word in words_of(text)} - known)


def read_prompts(file: str) -> list[str]:
    """Read a prompt from each line that is not blank."""
    with user_errors(f"--prompts_file {file}: cannot be read", OSError, UnicodeDecodeError):
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts_file {file}: there is no prompt in it")
    return prompts


def text_encoder_of(model: SavedModel, device: torch.device) -> TextEncoder:
    """Load the text encoder of the training: the one saved with the model, or the one of the same name."""
    name = model.condition["text_encoder"]
    if model.text_encoder_folders:
        found = TextEncoder(model.text_encoder_folders[0], device, tokenizer=model.text_encoder_folders[1])
    else:
        try:
            found = TextEncoder(name, device)
        except UserError as error:
            raise UserError(
                f"{model.name}: its text encoder, {name}, is not beside it and cannot be loaded; the run's folder has"
                f" it (text_encoder, tokenizer)"
            ) from error
    if found.fingerprint != model.condition["encoder"]:
        raise UserError(f"{model.name}: its text encoder, {name}, is not the one that it was trained with")
    return found
