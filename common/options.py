"""Options: dataclasses that are the source of a script's flags, its help, its YAML keys and its checks.

Nothing heavy is imported here, so that `--help` and a mistake in a flag are answered at once.
"""

import argparse
import copy
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar, dataclass_transform

import yaml

from common.errors import UserError

Options = TypeVar("Options")


class Range(NamedTuple):
    """The values that an option may have besides None: in words, and as a test."""

    wanted: str
    accepts: Callable[[float], bool]


POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or greater", lambda value: value >= 0)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_ONE = Range("from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class Facts:
    """All that is known of an option besides its name and type; `option` is given it."""

    default: object
    help: str
    must_be: Range | None = None
    aliases: str = ""  # other names that mean the same
    habits: str = ""  # words that people type when they mean it; the error suggests it
    positional: bool = False  # may be given as the first word, without its flag
    repeatable: bool = False  # a list whose flag may be given several times
    instead_of: str | None = None  # another way to say the same: a flag for one replaces the other in a file
    saved: bool = True  # is the run's; otherwise it belongs to one invocation, and is not written down
    may_change: bool = False  # with another value the run is still the same run
    fixed: bool = False  # with another value a checkpoint is of no use
    on_card: bool = True  # is of interest to who uses the model


def option(default, help: str, must_be: Range | None = None, **facts):  # noqa: A002 (argparse's own word)
    """Return a field of a section of options, with its `Facts`. A list is several words on the command line."""
    facts = {"default": default, "help": help, "must_be": must_be, **facts}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=facts)
    return field(default=default, metadata=facts)


@dataclass_transform(field_specifiers=(option,))
def section(heading: str, **facts) -> Callable[[type], type]:
    """Make a dataclass of options that stand under a heading in the help; the facts are those of all of them."""

    def make(kind: type) -> type:
        kind._argument_group_name, kind._facts = heading, facts
        return dataclass(kind)

    return make


def sections_of(kind: type) -> list[type]:
    """Return the sections that a class of options inherits from, the last of the help first, in the help's order."""
    return [base for base in reversed(kind.__mro__) if "_facts" in vars(base)]


def facts_of(kind: type) -> dict[str, Facts]:
    """Return the facts of every option of a class, in order."""
    return {
        entry.name: Facts(**{**base._facts, **entry.metadata}) for base in sections_of(kind) for entry in fields(base)
    }


def values_of(options: object, wanted: Callable[[Facts], bool]) -> dict[str, object]:
    """Return the values of the options whose facts are as wanted."""
    facts = facts_of(type(options))
    return {name: value for name, value in asdict(options).items() if wanted(facts[name])}


def parse_options(
    kind: type[Options],
    arguments: list[str],
    *,
    description: str,
    usage: str = "%(prog)s [--flag value ...]",
    from_file: Sequence[str] = (),
) -> Options:
    """Return the options with `arguments` over `from_file` over the defaults, each in its range."""
    facts = facts_of(kind)
    for name in facts:
        if facts[name].positional and arguments and not arguments[0].startswith("-"):
            arguments = [f"--{name}={arguments[0]}", *arguments[1:]]
    pairs = [(name, facts[name].instead_of) for name in facts if facts[name].instead_of]
    for given, rival in [*pairs, *(pair[::-1] for pair in pairs)]:
        if names_flag(arguments, given) and not names_flag(arguments, rival):
            from_file = [flag for flag in from_file if not flag.startswith(f"--{rival}=")]
    *sections, unknown = _make_parser(kind, description, usage).parse_args_into_dataclasses(
        [*from_file, *arguments], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise UserError(f"unknown flag {unknown[0]}{_suggestion(unknown[0], kind, '--')}")
    options = kind(**{name: value for section in sections for name, value in vars(section).items()})
    for name, value in vars(options).items():
        must_be = facts[name].must_be
        for number in value if isinstance(value, list) else [value]:
            if must_be is not None and number is not None and not must_be.accepts(number):
                raise UserError(f"--{name} {number}: must be {must_be.wanted}")
    return options


def _make_parser(kind: type, description: str, usage: str) -> argparse.ArgumentParser:
    """Return a parser that reports a mistake in one line and does not guess at abbreviations."""
    from transformers import HfArgumentParser

    class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
        """Help without the spellings with hyphens, which work too, and without defaults that are None."""

        def _format_action_invocation(self, action: argparse.Action) -> str:
            names = ", ".join(name for name in action.option_strings if "-" not in name.lstrip("-"))
            return f"{names} {{{','.join(map(str, action.choices))}}}" if action.choices else names

        def _get_help_string(self, action: argparse.Action) -> str | None:
            if action.option_strings[0].startswith("--no_"):
                return f"Not --{action.dest}."
            nothing = action.default is None or action.default == []
            return action.help if nothing else super()._get_help_string(action)

    class Parser(HfArgumentParser):
        @staticmethod
        def _parse_dataclass_field(parser: argparse.ArgumentParser, field: Field) -> None:
            """Hand argparse what it knows of the facts."""
            facts, field = Facts(**field.metadata), copy.copy(field)
            aliases = [f"--{spelling}" for name in facts.aliases.split() for spelling in (name, name.replace("_", "-"))]
            field.metadata = {"help": facts.help, "aliases": aliases}
            field.metadata |= {"action": "extend"} if facts.repeatable else {}
            HfArgumentParser._parse_dataclass_field(parser, field)

        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message} (see --help)")

    return Parser(
        sections_of(kind),
        allow_abbrev=False,
        prog=Path(sys.argv[0]).name,
        usage=usage,
        description=description,
        formatter_class=HelpFormatter,
    )


def value_of_flag(arguments: list[str], name: str, what: str) -> str | None:
    """Return the value that the command line gives a flag, if it does; for what the parser must know first."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", nargs="?", const="")
    value = parser.parse_known_args(arguments)[0].value
    if value == "":
        raise UserError(f"--{name} needs {what}")
    return value


def names_flag(arguments: Iterable[str], name: str) -> bool:
    """Return whether the command line gives a flag, in either spelling."""
    return any(argument.partition("=")[0].replace("-", "_") == f"__{name}" for argument in arguments)


def read_config_file(path: Path, kind: type) -> list[str]:
    """Return a YAML file as the flags it stands for, so that both go through the same checks."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: is not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must be a list of 'name: value' lines, as configs/digits.yaml is")
    try:
        return flags_of(values, kind)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error


def flags_of(values: dict[str, object], kind: type) -> list[str]:
    """Return options by their names, as YAML gives them, as flags."""
    options = {name: facts for option, facts in facts_of(kind).items() for name in (option, *facts.aliases.split())}
    flags = []
    for name, value in values.items():
        if name not in options:
            raise UserError(f"unknown key {name}{_suggestion(str(name), kind)}")
        if isinstance(value, list) and isinstance(options[name].default, list):
            flags += [f"--{name}", *map(str, value)] if value else []
            continue
        if isinstance(value, dict | list):
            raise UserError(f"{name} must be a single value, not {value}")
        if name == "mixed_precision" and value is False:
            value = "no"  # YAML reads a bare no as false
        if value is not None:
            flags.append(f"--{name}={value}")
    return flags


def _suggestion(name: str, kind: type, prefix: str = "") -> str:
    """Return the end of a message about an unknown name: what was probably meant."""
    plain = name.partition("=")[0].lstrip("-").replace("-", "_")
    meant = {}
    for option_name, facts in facts_of(kind).items():
        for spelling in (option_name, *facts.habits.split()):
            meant[spelling] = option_name
            if facts.default is True:  # a switch that is on
                meant[f"no_{spelling}"] = f"no_{option_name}"
    nearest = difflib.get_close_matches(plain, meant.values(), n=1, cutoff=0.5)
    nearest = [meant[plain]] if plain in meant else nearest
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else " (see --help)"
