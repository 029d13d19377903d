"""Options: dataclasses that are the source of a script's flags, its help, its YAML keys and its checks.

Nothing heavy is imported here, so that `--help` and a mistake in a flag are answered at once.
"""

import argparse
import copy
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
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


LARGEST_INT = 2**63 - 1  # that fits into a tensor
FINITE = Range("a finite number", math.isfinite)
STORABLE = Range(f"at most {LARGEST_INT}", lambda value: -LARGEST_INT <= value <= LARGEST_INT)
POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or greater", lambda value: value >= 0)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_ONE = Range("from 0 to 1", lambda value: 0 <= value <= 1)


def from_to(least: int, most: int) -> Range:
    """Return the range of the whole numbers between two, both included."""
    return Range(f"from {least} to {most}", lambda value: least <= value <= most)


NUM_STEPS, NUM_WORKERS, RESOLUTION = from_to(1, 1_000_000), from_to(0, 1024), from_to(1, 16_384)


@dataclass(frozen=True)
class Facts:
    """All that is known of an option besides its name and type; `option` is given it."""

    default: object
    help: str
    must_be: Range | None = None
    aliases: str = ""  # other names that mean the same
    habits: str = ""  # words that people type when they mean it; the error suggests it
    positional: bool = False  # may be given as the first word, a list as the first words, without its flag
    repeatable: bool = False  # a list whose flag may be given several times
    instead_of: str | None = None  # another way to say the same: a flag for one replaces the other in a file
    only_with: str | Callable[[str], str] = ""  # has an effect if one of these is on, as in "ema_warmup logger=wandb"
    not_with: str = ""  # has none if one of these is on
    may_be_empty: bool = False  # a text, for which that means something
    nothing: object = None  # the value that asks for nothing, which is no mistake then
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


def spellings(name: str, facts: Facts) -> list[str]:
    """Return the names that an option can be given by, without the one that switches it off."""
    return [name, *facts.aliases.split()]


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
    from_file: Mapping[str, list[str]] | None = None,
) -> Options:
    """Return the options with `arguments` over `from_file` over the defaults, each in its range and with an effect."""
    facts = facts_of(kind)
    for name in facts:
        if facts[name].positional and arguments and not arguments[0].startswith("-"):
            if is_given(arguments, name, facts[name]):
                raise UserError(f"{arguments[0]} and --{name} say the same thing: leave one of them out")
            if isinstance(facts[name].default, list):
                arguments = [f"--{name}", *arguments]
            else:
                arguments = [f"--{name}={arguments[0]}", *arguments[1:]]
    given = {name for name in facts if is_given(arguments, name, facts[name])}
    pairs = [(name, facts[name].instead_of) for name in facts if facts[name].instead_of]
    replaced = given | {rival for pair in pairs for name, rival in (pair, pair[::-1]) if name in given}
    from_file = {name: words for name, words in (from_file or {}).items() if name not in replaced}
    options = read_options(kind, from_file, arguments, _make_parser(kind, description, usage))
    _check_effects(options, given)
    return options


def read_options(
    kind: type[Options],
    from_file: Mapping[str, list[str]],
    arguments: Iterable[str] = (),
    parser: argparse.ArgumentParser | None = None,
) -> Options:
    """Return the options, each in its range, whether or not they go together."""
    words, arguments = [word for words in from_file.values() for word in words], [*arguments]
    # With one hyphen argparse would take a flag's first letter for a flag, and show the rest as its value.
    single = [argument for argument in arguments if re.match(r"-[A-Za-z]\w", argument)]
    *sections, unknown = (parser or _make_parser(kind)).parse_args_into_dataclasses(
        words if single else [*words, *arguments], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown := single or unknown:
        name = unknown[0].partition("=")[0]  # its value is nobody's business: it may be a token
        raise UserError(f"unknown flag {name}{_suggestion(name, kind, '--')}")
    options = kind(**{name: value for section in sections for name, value in vars(section).items()})
    facts = facts_of(kind)
    for name, value in vars(options).items():
        several = isinstance(value, list)
        if isinstance(value, str) and not (value.strip() or facts[name].may_be_empty):
            raise UserError(f"--{name}: is empty; give it a value or leave it out")
        checked = [_checked(name, one, facts[name]) for one in (value if several else [value])]
        setattr(options, name, checked if several else checked[0])
    return options


def _checked(name: str, value: object, facts: Facts) -> object:
    """Return a value, a path with its `~` expanded; raise if it is not in its range."""
    if isinstance(value, str):
        if "\0" in value:
            raise UserError(f"--{name}: the character NUL is in it")
        if any("\ud800" <= letter <= "\udfff" for letter in value):  # as Python has what it cannot read
            raise UserError(f"--{name}: is not in UTF-8; if its name is, set a locale that has it, LC_ALL=C.UTF-8")
        return os.path.expanduser(value) if re.match(r"~[^\s/]*(/|$)", value) else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        for must_be in (FINITE if isinstance(value, float) else STORABLE, facts.must_be):
            if must_be is not None and not must_be.accepts(value):
                raise UserError(f"--{name} {value}: must be {must_be.wanted}")
    return value


def _check_effects(options: object, given: set[str]) -> None:
    """Raise for an option that does nothing beside the others; one of a file may be left over from what flags chose."""
    facts = facts_of(type(options))

    def is_on(wish: str) -> bool:
        name, _, value = wish.partition("=")
        actual = getattr(options, name, None)
        return actual == value if value else actual not in (None, False, [], "")

    for name, own in facts.items():
        needed = (own.only_with(name) if callable(own.only_with) else own.only_with).split()
        in_the_way = [wish for wish in own.not_with.split() if is_on(wish)]
        value = getattr(options, name)
        if not in_the_way and (not needed or any(map(is_on, needed))):
            continue
        if name in given or value not in (own.default, [], None):
            if name not in given and given & {wish.partition("=")[0] for wish in (*needed, *in_the_way)}:
                setattr(options, name, copy.copy(own.default))
            elif in_the_way and value != own.nothing:
                raise UserError(f"--{name} has no effect with {_as_flags(in_the_way, 'and')}: leave one of them out")
            elif not in_the_way:
                raise UserError(f"--{name} has no effect without {_as_flags(needed, 'or')}")


def _as_flags(wishes: list[str], word: str) -> str:
    return f" {word} ".join(f"--{wish.replace('=', ' ')}" for wish in wishes)


def _make_parser(kind: type, description: str = "", usage: str = "") -> argparse.ArgumentParser:
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


def is_given(arguments: Iterable[str], name: str, facts: Facts) -> bool:
    """Return whether the command line gives an option, by any of its names."""
    return any(names_flag(arguments, spelling) for spelling in (*spellings(name, facts), f"no_{name}"))


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML without its worst trap: of two lines with one key the first is lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                line = key_node.start_mark.line + 1
                raise UserError(f"{key} is given twice, in line {seen[key]} and in line {line}")
            seen[str(key)] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_config_file(path: Path, kind: type) -> dict[str, list[str]]:
    """Return a YAML file as the flags that each option in it stands for, so that both go through the same checks."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader) or {}
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from error
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of a text, a date or a depth that YAML has not
        raise UserError(f"--config {path}: is not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must be a list of 'name: value' lines, as configs/digits.yaml is")
    try:
        return flags_by_option(values, kind)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error


def flags_by_option(values: dict[str, object], kind: type) -> dict[str, list[str]]:
    """Return options, under any of their names and as YAML gives them, as words of the command line."""
    named = {name: option for option, facts in facts_of(kind).items() for name in spellings(option, facts)}
    for name in values:
        if name not in named:
            raise UserError(f"unknown key {name}{_suggestion(str(name), kind)}")
        if named[name] != name and named[name] in values:
            raise UserError(f"{name} and {named[name]} are one option: give it once")
    return {named[name]: words for name, value in values.items() if (words := flags_of(name, value, kind))}


def flags_of(name: str, value: object, kind: type) -> list[str]:
    """Return a value from a file as words of the command line; none if it says nothing."""
    if value is None or value == []:
        return []
    facts = facts_of(kind)
    takes_several = name in facts and isinstance(facts[name].default, list)
    if takes_several and isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict | list):
        raise UserError(f"{name} must be a single value, not several")
    if name == "mixed_precision" and value is False:
        value = "no"  # YAML reads a bare no as false
    return [f"--{name}={value}"]


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
