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
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar, dataclass_transform

import yaml

from common.errors import UserError, say

Options = TypeVar("Options")


class Range(NamedTuple):
    """The values that an option may have besides None: in words, and as a test."""

    wanted: str
    accepts: Callable[[float], bool]


VERSION = "0.1.0"
LARGEST_INT = 2**63 - 1  # that fits into a tensor
FINITE = Range("a finite number", math.isfinite)
STORABLE = Range(f"at most {LARGEST_INT}", lambda value: -LARGEST_INT <= value <= LARGEST_INT)
POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or greater", lambda value: value >= 0)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
BETWEEN_ZERO_AND_ONE = Range("greater than 0 and below 1", lambda value: 0 < value < 1)
UP_TO_ONE = Range("from 0 to 1", lambda value: 0 <= value <= 1)
# Standard deviation of a moving average's weights over the training, as a share of it: 12^-1/2 weighs all steps alike.
EMA_LENGTH = Range("from 0.001 to 0.288", lambda value: 0.001 <= value <= 0.288)


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
    positional: bool = False  # may be given as the first word, a list as the first words, without its flag
    repeatable: bool = False  # a list whose flag may be given several times
    instead_of: str | None = None  # another way to say the same: a flag for one replaces the other in a file
    only_with: str | Callable[[str], str] = ""  # has an effect if one of these is on, as in "ema_warmup logger=wandb"
    not_with: str = ""  # has no effect if one of these is on
    may_be_empty: bool = False  # a text for which being empty has a meaning
    nothing: object = None  # the value that asks for nothing, and so is no mistake even without effect
    saved: bool = True  # belongs to the run; otherwise only to one invocation, and is not saved
    may_change: bool = False  # with another value the run is still the same run
    fixed: bool = False  # with another value a checkpoint is of no use
    on_card: bool = True  # is of interest to users of the model


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


@section("configuration file")
class ConfigOptions:
    """The option that every script has."""

    config: str | None = option(None, "YAML file with any of these options; flags override it.", saved=False)


def sections_of(kind: type) -> list[type]:
    """Return the sections that a class of options inherits from, in the help's order: the last base comes first."""
    return [base for base in reversed(kind.__mro__) if "_facts" in vars(base)]


def facts_of(kind: type) -> dict[str, Facts]:
    """Return the facts of every option of a class, in order."""
    return {
        entry.name: Facts(**{**base._facts, **entry.metadata}) for base in sections_of(kind) for entry in fields(base)
    }


@cache
def habits() -> dict[str, dict]:
    """Read the flags that users of other programs type, and their meaning here."""
    return yaml.safe_load(Path(__file__).with_name("habits.yaml").read_text(encoding="utf-8"))


def own_name(name: str, kind: type) -> str | None:
    """Return the name that an option has here, given that or a name it has elsewhere; None if there is no such one."""
    facts = facts_of(kind)
    candidates = habits()["accepted"].get(name, ())
    for candidate in (name, *([candidates] if isinstance(candidates, str) else candidates)):
        if candidate in facts:
            return candidate
    if not name.startswith("no_") or (positive := own_name(name.removeprefix("no_"), kind)) is None:
        return None
    return f"no_{positive}" if facts[positive].default is True else None  # only what is on can be switched off


def in_own_names(arguments: Iterable[str], kind: type) -> list[str]:
    """Return a command line with each option under the name it has here, without those that are not needed here."""
    words, implied, pending = [], {}, list(arguments)
    while pending:
        word = pending.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        own = own_name(name, kind) if flag.startswith("--") else None
        if own is not None:
            words.append(f"--{own}{equals}{value}")
            implied |= habits()["implied"].get(name, {})
        elif flag.startswith("--") and _is_ignored(name):
            if f"{name}=" in habits()["ignored"] and not equals and pending and not pending[0].startswith("--"):
                pending.pop(0)
        else:
            words.append(word)
    return words + [f"--{name}={value}" for name, value in implied.items() if not names_flag(words, name)]


def _is_ignored(name: str) -> bool:
    """Tell whether a name is of something that is not needed here; if so print a note, once per machine."""
    reason = habits()["ignored"].get(name, habits()["ignored"].get(f"{name}="))
    if reason is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"note: {name} is not needed and ignored: {reason}")
    return reason is not None


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
    """Return the options: `arguments` over `from_file` over the defaults, each checked for its range and its effect."""
    facts, arguments = facts_of(kind), in_own_names(arguments, kind)
    if from_file is None and (file := value_of_flag(arguments, "config", "the name of a YAML file")) is not None:
        from_file = read_config_file(Path(file).expanduser(), kind)
    for name in facts:
        if facts[name].positional and arguments and not arguments[0].startswith("-"):
            if is_given(arguments, name):
                raise UserError(
                    f"{arguments[0]} and --{name} are two ways to say the same thing: give only one of them"
                )
            if isinstance(facts[name].default, list):
                arguments = [f"--{name}", *arguments]
            else:
                arguments = [f"--{name}={arguments[0]}", *arguments[1:]]
    given = {name for name in facts if is_given(arguments, name)}
    pairs = [(name, facts[name].instead_of) for name in facts if facts[name].instead_of]
    for pair in pairs:
        wanted = {name for name, words in (from_file or {}).items() if words != [f"--{name}={facts[name].default}"]}
        if given.issuperset(pair) or (wanted.issuperset(pair) and not given.intersection(pair)):
            raise UserError(f"--{pair[0]} and --{pair[1]} are two ways to say the same thing: give only one of them")
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
        following = unknown[1] if unknown[1:] and not unknown[1].startswith("-") else ""
        value = unknown[0].partition("=")[2] or following
        if not name.startswith("-") and name == unknown[0]:
            raise UserError(f"{name}: only one name can stand without a flag, and it comes first, before all flags")
        raise UserError(f"unknown flag {name}{_suggestion(name, value, kind)}")
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
            raise UserError(f"--{name}: contains the character NUL")
        if any("\ud800" <= letter <= "\udfff" for letter in value):  # as Python has what it cannot read
            raise UserError(
                f"--{name}: is not valid UTF-8; if the name on disk is, set a UTF-8 locale such as LC_ALL=C.UTF-8"
            )
        return os.path.expanduser(value) if re.match(r"~[^\s/]*(/|$)", value) else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        for must_be in (FINITE if isinstance(value, float) else STORABLE, facts.must_be):
            if must_be is not None and not must_be.accepts(value):
                raise UserError(f"--{name} {value}: must be {must_be.wanted}")
    return value


def _check_effects(options: object, given: set[str]) -> None:
    """Raise for an option that the others leave without effect; one from a file is reset if flags are the cause."""
    facts = facts_of(type(options))

    def is_on(wish: str) -> bool:
        name, _, value = wish.partition("=")
        actual = getattr(options, name, None)
        return str(actual) == value if value else actual not in (None, False, [], "")

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

    class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Help without the spellings with hyphens, which work too, and without defaults that are None."""

        def _format_action_invocation(self, action: argparse.Action) -> str:
            names = ", ".join(name for name in action.option_strings if "-" not in name.lstrip("-"))
            return f"{names} {value_name(action)}".strip()

        def _get_help_string(self, action: argparse.Action) -> str | None:
            if action.option_strings[0].startswith("--no_"):
                return f"Turn --{action.dest} off."
            nothing = action.default is None or action.default is False or action.default == []
            return action.help if nothing else super()._get_help_string(action)

    class Parser(HfArgumentParser):
        @staticmethod
        def _parse_dataclass_field(parser: argparse.ArgumentParser, field: Field) -> None:
            """Hand argparse only those facts that it understands."""
            facts, field = Facts(**field.metadata), copy.copy(field)
            field.metadata = {"help": facts.help}
            field.metadata |= {"action": "extend"} if facts.repeatable else {}
            HfArgumentParser._parse_dataclass_field(parser, field)

        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message} (see --help)")

    parser = Parser(
        sections_of(kind),
        allow_abbrev=False,
        prog=Path(sys.argv[0]).name,
        usage=usage,
        description=description,
        epilog=examples(),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"exact-ddpm {VERSION}", help="Print the version.")
    return parser


def value_name(action: argparse.Action) -> str:
    """Name the values that a flag takes, for the help."""
    if action.nargs == 0 or isinstance(action.const, bool):
        return ""
    if action.choices:
        name = f"{{{','.join(map(str, action.choices))}}}"
    elif action.type in (int, float):
        name = "N" if action.type is int else "X"
    elif re.search("_dir$|^(generated|real|compare|source|run|runs|model)$", action.dest):
        name = "FOLDER"
    elif re.search("_file$|^(config|statistics|save_statistics|inception_weights|output)$", action.dest):
        name = "FILE"
    else:
        name = "NAME" if re.search("name|column|split|scheduler|encoder|features|model_id", action.dest) else "VALUE"
    return f"{name} [{name} ...]" if action.nargs in ("+", "*") else name


def examples() -> str:
    """Return the commands in the docstring of the script, for the end of its help."""
    lines = (getattr(sys.modules["__main__"], "__doc__", None) or "").splitlines()
    commands = [f"  {line}" for line in lines if line.startswith(("python ", "accelerate ", "torchrun "))]
    return "\n".join(["examples:", *commands]) if commands else ""


def value_of_flag(arguments: list[str], name: str, what: str) -> str | None:
    """Return the value of a flag on the command line, if it is there; for flags that must be known before parsing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", nargs="?", const="")
    value = parser.parse_known_args(arguments)[0].value
    if value == "":
        raise UserError(f"--{name} needs {what}")
    return value


def names_flag(arguments: Iterable[str], name: str) -> bool:
    """Return whether the command line gives a flag, in either spelling."""
    return any(argument.partition("=")[0].replace("-", "_") == f"__{name}" for argument in arguments)


def is_given(arguments: Iterable[str], name: str) -> bool:
    """Return whether the command line gives an option, or switches it off."""
    return names_flag(arguments, name) or names_flag(arguments, f"no_{name}")


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
        nearest = difflib.get_close_matches(str(path), map(str, Path("configs").glob("*.yaml")), n=1, cutoff=0.8)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise UserError(f"--config {path}: cannot be read ({error.strerror}){hint}") from error
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"--config {path}: is not valid YAML ({where}{error.problem})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # from text, dates or nesting that YAML cannot read
        raise UserError(f"--config {path}: is not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must be a list of 'name: value' lines, as configs/digits.yaml is")
    try:
        return flags_by_option(values, kind)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error


def flags_by_option(values: dict[str, object], kind: type) -> dict[str, list[str]]:
    """Return options, under any of their names and as YAML gives them, as words of the command line."""
    found: dict[str, tuple[str, list[str]]] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        own = own_name(name, kind)
        if name == "config":
            raise UserError("config: a file does not name another file; give its path with --config")
        if isinstance(value, dict):
            raise UserError(f"{key}: is a section; here every option is a line of its own, as in configs/digits.yaml")
        if own is None and _is_ignored(name):
            continue
        if own not in facts_of(kind):
            raise UserError(f"unknown key {key}{_suggestion(name, value, kind)}")
        if own in found:
            raise UserError(f"{found[own][0]} and {key} are one option: give it once")
        found[own] = (str(key), flags_of(own, value, kind))
    implied = habits()["implied"]
    given = [str(key).replace("-", "_") for key, value in values.items() if value is not None]
    implied = {own: value for name in given for own, value in implied.get(name, {}).items()}
    words_of = {name: [f"--{name}={value}"] for name, value in implied.items()}
    return words_of | {own: words for own, (_, words) in found.items() if words}


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


def _suggestion(name: str, value: object, kind: type) -> str:
    """Return the end of a message about an unknown name: what to give instead, or the option that is nearest."""
    prefix, plain = "--" if name.startswith("--") else "", name.lstrip("-").replace("-", "_")
    if (answer := habits()["answered"].get(plain)) is not None:
        return ": " + answer.format(script=Path(sys.argv[0]).name, value="N" if value in ("", None) else value)
    names = (f"{no}{name}" for name in (*habits()["accepted"], *facts_of(kind)) for no in ("", "no_"))
    known = {name: own for name in names if (own := own_name(name, kind))}
    nearest = difflib.get_close_matches(plain, known, n=1, cutoff=0.7)
    return f"; did you mean {prefix}{known[nearest[0]]}?" if nearest else " (see --help)"
