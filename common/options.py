"""What a script is told: dataclasses that are the source of its flags, its help and its YAML keys.

Nothing heavy is imported here, so that `--help` and a mistake in a flag are answered at once.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import NoReturn

import yaml

from common.errors import UserError


def option(default, help: str, **metadata):  # noqa: A002 (argparse's own word)
    """A field of a section of options. A list is given as `default=[]` and on the command line as several words."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def names_of(sections: Iterable[type]) -> list[str]:
    return [entry.name for section in sections for entry in fields(section)]


def lists_of(sections: Iterable[type]) -> list[str]:
    """The options that take several words."""
    return [entry.name for section in sections for entry in fields(section) if entry.default_factory is not MISSING]


def parse_options(
    sections: Sequence[type],
    arguments: list[str],
    *,
    description: str,
    usage: str = "%(prog)s [--flag value ...]",
    from_file: Sequence[str] = (),
    habits: dict[str, str] | None = None,
    positional: str | None = None,
) -> dict[str, object]:
    """The values of all options: `arguments` over `from_file` over the defaults.

    An unknown name is an error that suggests the nearest; `habits` says what fingers type and mean by it.
    `positional` names the one option that may be given without its flag, as the first word.
    """
    if positional is not None and arguments and not arguments[0].startswith("-"):
        arguments = [f"--{positional}={arguments[0]}", *arguments[1:]]
    parser = _make_parser(sections, description, usage)
    *parsed, unknown = parser.parse_args_into_dataclasses(
        [*from_file, *arguments], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise UserError(unknown_name(unknown[0], "flag", names_of(sections), habits or {}))
    return {name: value for section in parsed for name, value in vars(section).items()}


def _make_parser(sections: Sequence[type], description: str, usage: str) -> argparse.ArgumentParser:
    """A parser that reports a mistake in one line and does not guess at abbreviations."""
    from transformers import HfArgumentParser

    class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
        """Without the spellings with hyphens, which work too, and without defaults that are None."""

        def _format_action_invocation(self, action: argparse.Action) -> str:
            names = ", ".join(name for name in action.option_strings if "-" not in name.lstrip("-"))
            return f"{names} {{{','.join(map(str, action.choices))}}}" if action.choices else names

        def _get_help_string(self, action: argparse.Action) -> str | None:
            if action.option_strings[0].startswith("--no_"):
                return f"Not --{action.dest}."
            nothing = action.default is None or action.default == []
            return action.help if nothing else super()._get_help_string(action)

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message} (see --help)")

    return Parser(
        sections,
        allow_abbrev=False,
        prog=Path(sys.argv[0]).name,
        usage=usage,
        description=description,
        formatter_class=HelpFormatter,
    )


def value_of_flag(arguments: list[str], name: str, what: str) -> str | None:
    """The value that the command line gives a flag, if it does; for what must be known before the rest is parsed."""
    named = None
    for position, argument in enumerate(arguments):
        flag, separator, value = argument.partition("=")
        if flag == f"--{name}":
            named = value if separator else next(iter(arguments[position + 1 :]), "")
            if not named:
                raise UserError(f"--{name} needs {what}")
    return named


def names_flag(arguments: list[str], name: str) -> bool:
    return any(argument.partition("=")[0].replace("-", "_") == f"__{name}" for argument in arguments)


def read_config_file(path: Path, names: Sequence[str], habits: dict[str, str], lists: Sequence[str] = ()) -> list[str]:
    """A YAML file as the flags it stands for, so that both go through the same checks.

    Only what is named in `lists` may have several values.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: is not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must be a list of 'name: value' lines, as configs/digits.yaml is")
    flags = []
    for name, value in values.items():
        if name not in names:
            raise UserError(f"--config {path}: " + unknown_name(str(name), "key", names, habits))
        if isinstance(value, list) and name in lists:
            flags += [f"--{name}", *map(str, value)] if value else []
            continue
        if isinstance(value, dict | list):
            raise UserError(f"--config {path}: {name} must be a single value, not {value}")
        if name == "mixed_precision" and value is False:
            value = "no"  # YAML reads a bare no as false
        if value is not None:
            flags.append(f"--{name}={value}")
    return flags


def unknown_name(name: str, kind: str, names: Sequence[str], habits: dict[str, str]) -> str:
    plain = name.partition("=")[0].lstrip("-").replace("-", "_")
    nearest = difflib.get_close_matches(plain, [*names, *(f"no_{n}" for n in names)], n=1, cutoff=0.5)
    nearest = [habits[plain]] if plain in habits else nearest
    prefix = "--" if kind == "flag" else ""
    suggestion = f"; did you mean {prefix}{nearest[0]}?" if nearest else " (see --help)"
    return f"unknown {kind} {name}{suggestion}"


def check_values(values: object, names: Iterable[str], accepted: Callable[[object], bool], wanted: str) -> None:
    """Raise for the first of the options that has a value which is not accepted."""
    for name in names:
        value = getattr(values, name)
        if value is not None and not accepted(value):
            raise UserError(f"--{name} {value}: must be {wanted}")


def check_positive(values: object, names: Iterable[str]) -> None:
    check_values(values, names, lambda value: value > 0, "greater than 0")


def check_not_negative(values: object, names: Iterable[str]) -> None:
    check_values(values, names, lambda value: value >= 0, "0 or greater")


def check_below_one(values: object, names: Iterable[str]) -> None:
    check_values(values, names, lambda value: 0 <= value < 1, "at least 0 and below 1")


def resolve_precision(mixed_precision: str | None) -> str:
    """The flag, or what `accelerate launch --mixed_precision` says."""
    return mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
