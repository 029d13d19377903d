"""What a network is told to draw: classes or prompts, which seed gets which, and how much it is made to heed them."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.errors import UserError
from conditions.conditional_pipeline import encode_prompts, guide
from conditions.text_encoder import fingerprint, load_text_encoder, words_of
from image_data.sources import spread
from schedulers.denoising import network_predict

if TYPE_CHECKING:
    from generation.generate_options import ConditionOptions
    from run_folder.saved_model import SavedModel
    from schedulers.denoising import Predict

logger = logging.getLogger(__name__)

CONDITION_FILE = "condition.json"  # written by conditions/condition.py
ALL = "all"
LONGEST_NAME = 40


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: its scale (1 is none), and from which to which timestep, both included."""

    scale: float = 1.0
    rescale: float = 0.0
    interval: tuple[int, int] | None = None  # Kynkäänniemi et al. 2024

    @property
    def name(self) -> str:
        """For the name of a folder."""
        parts = [f"guidance-{self.scale:g}"] if self.scale != 1 else []
        parts += [f"rescale-{self.rescale:g}"] if self.rescale else []
        return "-".join(parts + (["interval", *map(str, self.interval)] if self.interval else []))

    def __call__(self, t: torch.Tensor) -> bool:
        """Whether there is any at this timestep."""
        if self.scale == 1 or self.interval is None:
            return self.scale != 1
        # On a GPU this waits for the step before, which costs less than the pass of the network that it may save.
        return self.interval[0] <= int(t) <= self.interval[1]


class NoCondition:
    """A network that is told nothing; and what every condition has."""

    name = ""  # for the name of a folder
    guidance = Guidance()
    settings: dict[str, Any] = {}  # for samples.json

    def predict_for(self, network: torch.nn.Module, seeds: list[int]) -> Predict:
        """What the denoising loop calls for a batch of seeds."""
        return network_predict(network)

    def layout(self, seeds: Sequence[int], limit: int | None) -> Layout:
        """A grid of the images, or of at most so many of them."""
        shown = list(seeds[:limit])
        return Layout(shown, max(1, round(len(shown) ** 0.5)), [])


class Condition(NoCondition):
    """Classes or prompts, in turn: the image of seed s shows `choices[s % len(choices)]`."""

    def __init__(
        self,
        choices: list[str],
        inputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        nothing: int,
        guidance: Guidance,
        settings: dict[str, Any],
        rows: Sequence[int] | torch.Tensor,
        short: str,
    ):
        self.choices, self.guidance, self.settings, self._short = choices, guidance, settings, short
        self._inputs, self._nothing = inputs, nothing  # of rows of the table of conditions; the row that says nothing
        self._rows = torch.as_tensor(rows)  # of each choice

    @property
    def name(self) -> str:
        text = re.sub(r"\W+", "-", self._short).strip("-").lower()
        if len(text) > LONGEST_NAME:
            digest = hashlib.blake2b(repr(self.settings).encode(), digest_size=4).hexdigest()
            text = f"{text[: LONGEST_NAME - len(digest)]}-{digest}"
        return "-".join(filter(None, [text, self.guidance.name]))

    def predict_for(self, network: torch.nn.Module, seeds: list[int]) -> Predict:
        device = next(network.parameters()).device
        rows = self._rows[torch.tensor([seed % len(self.choices) for seed in seeds])]
        predict_told, predict_untold = (
            network_predict(partial(network, **{name: value.to(device) for name, value in self._inputs(some).items()}))
            for some in (rows, torch.full_like(rows, self._nothing))
        )

        def predict(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            prediction = predict_told(samples, t)
            if not self.guidance(t):
                return prediction
            return guide(prediction, predict_untold(samples, t), self.guidance.scale, self.guidance.rescale)

        return predict

    def layout(self, seeds: Sequence[int], limit: int | None) -> Layout:
        """With a row for each choice, at most so many; a place is empty where a choice has no more images."""
        seeds_of: dict[str, list[int]] = {choice: [] for choice in self.choices}
        if len(seeds_of) == 1:
            return super().layout(seeds, limit)
        for seed in seeds:
            seeds_of[self.choices[seed % len(self.choices)]].append(seed)
        there = [choice for choice, some in seeds_of.items() if some]
        shown = [there[position] for position in spread(len(there), limit or len(there))]
        columns = min(max(map(len, seeds_of.values())), max(1, limit // len(shown)) if limit else len(seeds))
        rows = [(seeds_of[choice] + [None] * columns)[:columns] for choice in shown]
        return Layout([seed for row in rows for seed in row], columns, shown)

    def guided(self, guidance: Guidance) -> Condition:
        """The same with other guidance."""
        settings = {**self.settings, **settings_of_guidance(guidance)}
        return Condition(self.choices, self._inputs, self._nothing, guidance, settings, self._rows, self._short)


@dataclass(frozen=True)
class Layout:
    """Which seed's image is where in a grid; None is an empty place."""

    places: list[int | None]
    columns: int
    row_names: list[str]

    @property
    def seeds(self) -> list[int]:
        return [seed for seed in self.places if seed is not None]


def read_condition(model: SavedModel) -> dict[str, Any] | None:
    """What the model was told of its training images."""
    path = model.path / CONDITION_FILE
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    network = model.network_config
    if network["_class_name"] != "UNet2DModel" or network.get("num_class_embeds") or network.get("class_embed_type"):
        raise UserError(
            f"{model.name}: its network wants to be told what to draw, but there is no {CONDITION_FILE} that says what "
            f"it knows; models of train_conditional.py have one"
        )
    return None


def condition_of(options: ConditionOptions, model: SavedModel, device: torch.device) -> NoCondition:
    """What the flags tell the model."""
    condition = read_condition(model)
    kind = condition["condition"] if condition else None
    check_kind(options, model, kind)
    if condition is None:
        return NoCondition()
    guidance = guidance_of(options, model, condition)
    if kind == "class":
        return classes_of(options, condition["class_names"], guidance)
    return prompts_of(options, model, condition, guidance, device)


def conditions_at(
    scales: list[float], options: ConditionOptions, model: SavedModel, device: torch.device
) -> list[NoCondition]:
    """The same at several guidance scales; prompts are encoded once."""
    first = condition_of(replace(options, guidance_scale=scales[0]), model, device)
    others = [replace(options, guidance_scale=scale) for scale in scales[1:]]
    return [first, *(first.guided(guidance_of(other, model, read_condition(model))) for other in others)]


def check_kind(options: ConditionOptions, model: SavedModel, kind: str | None) -> None:
    """Raise for flags that are not for this kind of model."""
    if options.class_labels and kind != "class":
        raise UserError(f"--class_labels {' '.join(options.class_labels)}: {model.name} was trained without classes")
    for name in ("prompt", "prompts_file", "negative_prompt"):
        if getattr(options, name) and kind != "text":
            raise UserError(f"--{name} {shown(getattr(options, name))}: {model.name} was trained without captions")
    if options.guidance_scale != 1 and kind is None:
        raise UserError(f"--guidance_scale {options.guidance_scale:g}: {model.name} was trained without a condition")


def shown(value: str | list[str]) -> str:
    return f"'{value if isinstance(value, str) else value[0]}'"


def guidance_of(options: ConditionOptions, model: SavedModel, condition: dict[str, Any]) -> Guidance:
    if options.guidance_scale != 1 and not condition["dropout"]:
        raise UserError(
            f"--guidance_scale {options.guidance_scale:g}: {model.name} was trained with --condition_dropout 0 and "
            f"does not know what an image looks like that nothing is said of"
        )
    interval = tuple(options.guidance_interval) or None
    return Guidance(options.guidance_scale, options.guidance_rescale, interval)


def classes_of(options: ConditionOptions, names: list[str], guidance: Guidance) -> Condition:
    asked = options.class_labels or [ALL]
    labels = [label for name in asked for label in (range(len(names)) if name == ALL else [label_of(name, names)])]
    choices = [names[label] for label in labels]
    settings = {"labels": choices, **settings_of_guidance(guidance)}
    logger.info("Classes, in turn: %s", ", ".join(choices[:12]) + (", ..." if len(choices) > 12 else ""))
    short = "all classes" if labels == list(range(len(names))) else f"class {' '.join(choices)}"
    return Condition(choices, lambda rows: {"class_labels": rows}, len(names), guidance, settings, labels, short)


def label_of(name: str, names: list[str]) -> int:
    """The number of a class by its name, whatever the case, or by its number."""
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


def prompts_of(
    options: ConditionOptions, model: SavedModel, condition: dict[str, Any], guidance: Guidance, device: torch.device
) -> Condition:
    prompts = [*options.prompt, *read_prompts(options.prompts_file)] or condition["prompts"]
    negative = options.negative_prompt or ""
    known = set(condition["vocabulary"])
    unknown = sorted({word for text in (*prompts, negative) for word in words_of(text) if word not in known})
    if unknown:
        logger.warning("Words that no caption of the training had: %s", ", ".join(unknown))
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    states, mask = encode_prompts(*encoder_of(model, condition, device), [*row_of, negative], device)
    logger.info("Prompts, in turn: %s", "; ".join(prompts[:8]) + ("; ..." if len(prompts) > 8 else ""))

    def inputs(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"encoder_hidden_states": states[rows], "encoder_attention_mask": mask[rows]}

    settings = {"prompts": prompts, "negative_prompt": negative, **settings_of_guidance(guidance)}
    rows = [row_of[prompt] for prompt in prompts]
    return Condition(prompts, inputs, len(row_of), guidance, settings, rows, " ".join(prompts))


def settings_of_guidance(guidance: Guidance) -> dict[str, Any]:
    return {
        "guidance_scale": guidance.scale,
        "guidance_rescale": guidance.rescale,
        "guidance_interval": guidance.interval and list(guidance.interval),
    }


def read_prompts(file: str | None) -> list[str]:
    """A prompt on each line; lines with nothing on them are left out."""
    if file is None:
        return []
    try:
        lines = [line.strip() for line in Path(file).expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts_file {file}: cannot be read ({getattr(error, 'strerror', error)})") from error
    if not any(lines):
        raise UserError(f"--prompts_file {file}: there is no prompt in it")
    return [line for line in lines if line]


def encoder_of(model: SavedModel, condition: dict[str, Any], device: torch.device) -> tuple:
    """Tokenizer and encoder of the training: those in the pipeline's or run's folder, or those of the same name."""
    for folder in (model.path, model.path.parent):
        if (folder / "text_encoder").is_dir() and (folder / "tokenizer").is_dir():
            found = load_text_encoder(str(folder / "text_encoder"), device, str(folder / "tokenizer"))
            break
    else:
        try:
            found = load_text_encoder(condition["text_encoder"], device)
        except UserError as error:
            raise UserError(
                f"{model.name}: its text encoder, {condition['text_encoder']}, is neither beside it nor to be had; the "
                f"run's folder has it (text_encoder, tokenizer)"
            ) from error
    if fingerprint(*found) != condition["encoder"]:
        raise UserError(
            f"{model.name}: its text encoder, {condition['text_encoder']}, is not the one that it was trained with"
        )
    return found
