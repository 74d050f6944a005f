"""The options of a command: made of settings and their docstrings, filled from a file, and named in
its errors.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from typeguard import TypeCheckError, check_type

from sinklab.core.errors import known_fields, near, one_of
from sinklab.core.registry import INSTEAD
from sinklab.lab.files import ordinary, read_json, refused, toml_of
from sinklab.lab.records.storage import RUN_FILE
from sinklab.lab.studies.base import from_record

# types that are made here are marked too, which no checker follows
MARK: Any = tyro.conf
WORDS = toml_of(__package__, "options.toml")
RARE = frozenset(WORDS["rare"].split())
"""Options that --help leaves to --help-all, in every command."""
PERMISSIONS = frozenset(WORDS["permissions"].split())
"""Permissions to run code, write, send or go on: given on the command line alone, never by a
file.
"""
GONE = {name: instead for names, instead in WORDS["gone"].items() for name in names.split()}
INSTEAD.update(GONE)
"""Commands and options that were taken away -> what to use instead."""
FILES = WORDS["files"]
"""Options of every command with settings, and their help."""


@cache
def described(kind: type) -> dict[str, str]:
    """Descriptions of the fields of a class, by name, each in one line: tyro keeps line breaks of
    the source.
    """
    found: dict[str, str] = {}
    for one in kind.__mro__:
        try:
            source: Any = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        except (OSError, TypeError):  # made while running, or built in
            continue
        for field, text in itertools.pairwise(source.body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign):
                found.setdefault(ast.unparse(field.target), " ".join(str(text.value.value).split()))
    return found


def typed(settings: Any, *hidden: str, closed: bool = False) -> Any:
    """Class for the command line to fill in: fields, help and defaults of these settings, but none
    of their checks.

    tyro would draw a box around the error of a settings class; `checked` makes the settings
    themselves of it, once.

    Args:
        settings: as they are by default.
        hidden: fields that the command does not have.
        closed: a field of few values is one of them by its type, for completion; else they are its
            name in the help, and an error names the near one.
    """
    kind: Any = type(settings)
    defaults: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    helps = described(kind)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        value = getattr(settings, field.name)
        hint = hints[field.name]
        registry = field.metadata.get("registry")
        if registry is not None and isinstance(value, tuple):
            value = tuple(map(registry.as_text, value))
            hint = tuple[str, ...]
        elif registry is not None:
            value = value and registry.as_text(value)
            hint = str | None
        if hint == bool | None:
            hint = bool
            if value is None:
                # neither on nor off: a flag for each
                hint = MARK.FlagCreatePairsOff[bool]
                value = False
                about = MARK.arg(help=f"The opposite of --{field.name}.")
                defaults[f"no_{field.name}"] = False
                annotations[f"no_{field.name}"] = Annotated[hint, about]
        defaults[field.name] = value
        hint = _argument(field, hint, value, helps.get(field.name), closed=closed)
        if field.name in hidden:
            hint = MARK.Suppress[hint]
        annotations[field.name] = hint
    members = {
        "__annotations__": annotations,
        "__post_init__": _unchecked,
        "__doc__": kind.__doc__,
    }
    members |= {"__module__": kind.__module__, "made_of": kind, **defaults}
    made: Any = dataclass(frozen=True)(type(kind.__name__, (kind,), members))
    return made()


def _argument(
    field: dataclasses.Field, hint: Any, value: Any, about: str | None, *, closed: bool
) -> Any:
    """The type of a field with the words of its help."""
    how: dict[str, Any] = {"help": about}
    choices = tuple(field.metadata.get("one_of", ()))
    word = _word(field.name, hint)
    if choices:
        several = typing.get_origin(hint) is tuple
        if closed and several:
            hint = tuple[Literal[choices], ...]  # type: ignore[valid-type]
        elif closed:
            hint = Literal[choices] | None
        how["metavar"] = f"{{{','.join(map(str, choices))}}}{' …' * several}"
    elif word:
        how["metavar"] = word
    if value is None or value == ():
        how["help_behavior_hint"] = ""
    return Annotated[hint, MARK.arg(**how)]


def _unchecked(settings: Any) -> None:
    """No check: `checked` makes them."""


NAMES = {
    of: kind.__name__.upper() for kind in (int, float, str, Path) for of in (kind, kind | None)
}
"""Words for the value of an option, which may be left out."""


def _word(name: str, hint: Any, *, positional: bool = False) -> str | None:
    """Word for the value of an argument in the help: [RUN …] for `runs`, FLOAT for an option of
    numbers.
    """
    several = typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (...,)
    if several:
        hint = typing.get_args(hint)[0]
    word = NAMES.get(hint)
    if positional:
        word = name.removesuffix("s").upper()
    if several and word:
        return f"[{word} …]"
    return word


def checked(given: Any, **changes: Any) -> Any:
    """The settings that `typed` stands for, with these changes. Raises ValueError for values that
    make no sense.
    """
    values = {}
    own = vars(given)
    kind = getattr(given, "made_of", type(given))
    for field in dataclasses.fields(kind):
        value = own[field.name]
        if f"no_{field.name}" in own:
            value = value or None
        if own.get(f"no_{field.name}"):
            value = False
        values[field.name] = changes.get(field.name, value)
    return kind(**values)


KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "[INT …]": "whole numbers",
    "[FLOAT …]": "numbers",
}
"""Values of an option in words, by its word in the help."""


def refuse(event: Any, command: str, arguments: Sequence[str], names: Iterable[str]) -> None:
    """Say in a sentence the error of tyro, in place of its box; errors unknown here keep the box.

    Args:
        event: one of ``tyro._errors``, told apart by their fields.
        command: its name.
        arguments: behind the name.
        names: of the options of the command, as fields.

    Raises:
        ValueError: naming the expected and given values, and the remedy.
    """
    remedy = f"sinklab {command} --help says what it takes"
    told = vars(event)
    surplus = [*told.get("tokens", ()), *told.get("unrecognized_tokens", ())]
    for flag in surplus:
        if flag.startswith("--"):
            flag = flag.partition("=")[0].replace("_", "-")
            if flag in GONE:
                raise ValueError(f"there is no option {flag!r}; {GONE[flag]}")
            found = near(flag, [f"--{name.replace('_', '-')}" for name in (*names, *FILES)])
            more = found or f"sinklab {command} --help-all lists its options"
            raise ValueError(f"unknown option {flag!r} of sinklab {command}; {more}")
    if told.get("missing_arguments"):
        needed = " and ".join(one.arg.display_name() for one in event.missing_arguments)
        raise ValueError(f"sinklab {command} needs {needed}, but it is not given; {remedy}")
    if surplus:
        raise ValueError(
            f"sinklab {command} takes no further arguments, but there is {surplus[0]!r}; {remedy}"
        )
    argument = told.get("argument")
    if argument is None:
        return
    flag = argument.display_name()
    word = str(argument.lowered.metavar)
    if told.get("choices"):
        one_of(flag, event.value, event.choices, remedy)
    given = []
    if flag.startswith("--"):
        given = values_of(arguments, flag, nargs="*")[0][-1:]
    words = " ".join(itertools.chain(*given))
    raise ValueError(f"{flag} takes {KINDS.get(word, word)}, but is {words!r}; {remedy}")


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag that decides the defaults of all others, so that it is read before
    them.
    """
    return next(reversed(values_of(arguments, flag)[0]), None)


def values_of(arguments: Sequence[str], flag: str, nargs: str = "?") -> tuple[list[Any], list[str]]:
    """Values of all occurrences of a flag, and the arguments without them: a word or None, or with
    nargs "*" all words behind it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    how: dict[str, Any] = {"dest": "values", "nargs": nargs, "action": "append", "default": []}
    parser.add_argument(flag, f"--{flag[2:].replace('-', '_')}", **how)
    given, rest = parser.parse_known_args(arguments)
    return given.values, rest


@dataclass(frozen=True)
class Given:
    """Settings given in a file."""

    source: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_run: bool = False
    """Whether a run wrote it, which may hold more than a command has options for."""
    reproduced: Path | None = None
    """Folder of the run that is to be reproduced."""

    @classmethod
    def by(cls, arguments: Sequence[str], settings_of: Callable[[Path], dict[str, Any]]) -> Given:
        """Read the file of --config or --reproduce. Raises ValueError for both, and for a file that
        cannot be read.
        """
        config = value_of(arguments, "--config")
        again = value_of(arguments, "--reproduce")
        if config and again:
            raise ValueError(
                "--config and --reproduce both say what the defaults are; give one of them"
            )
        if again:
            run = Path(again)
            return cls(str(run / RUN_FILE), settings_of(run), is_run=True, reproduced=run)
        if not config:
            return cls()
        with refused(f"{config} cannot be read as settings, a TOML file or a run.json"):
            is_toml = Path(config).suffix == ".toml"
            if is_toml:
                found = tomllib.loads(ordinary(config).read_text("utf-8"))
            else:
                found = read_json(Path(config), dict)
            settings = {
                name.replace("-", "_"): value
                for name, value in dict(found.get("settings", found)).items()
            }
        return cls(config, settings, is_run=not is_toml)

    def divided(self, known: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
        """Settings for a command with these options, and the names of those it leaves.

        Args:
            known: options of the command.

        Raises:
            ValueError: for a name in a file of settings that is no option, with the near one.
        """
        known = {*known} - PERMISSIONS
        left = [name for name in self.settings if name not in known]
        if not self.is_run:
            known_fields(
                self.source, [name for name in left if name not in PERMISSIONS], sorted(known)
            )
        return {name: value for name, value in self.settings.items() if name in known}, left

    def value(self, name: str, hint: Any) -> Any:
        """Value of an option in the file. Raises ValueError unless it is of its type."""
        value = self.settings[name]
        if isinstance(value, list):
            value = tuple(value)
        with refused(f"{self.source}: {name} cannot be {value!r}", TypeCheckError):
            return check_type(value, hint)


def _names(settings: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def carried(function: Any, name: str) -> Any:
    """An attribute that the function of a command may have: options that it hides (``hidden``), and
    its place in the list of commands (``listed``); () without it.
    """
    return getattr(function, name, ())


def options(
    function: Callable[..., None],
    given: Given,
    *,
    short: bool = False,
    closed: bool = False,
) -> tuple[Callable[..., None], list[str], list[str]]:
    """A command as tyro takes it, the names of its options, and of the settings it leaves in a
    file.

    Args:
        function: its groups of settings are settings by default; those named by its attribute
            ``hidden`` are left out.
        given: settings of a file, which become the defaults.
        short: leave out rare options, for the help.
        closed: as for `typed`.
    """
    own = inspect.signature(function).parameters
    hidden = {*own, *carried(function, "hidden")}
    groups = {
        name: one.default for name, one in own.items() if dataclasses.is_dataclass(one.default)
    }
    names = [name for name in own if name not in groups]
    names += [
        name
        for group in groups.values()
        for name in _names(group)
        if name not in hidden or name == "prompts"
    ]
    taken, left = given.divided(names)
    rare = frozenset[str]()
    if short:
        rare = RARE
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    seen: set[str] = set()
    for name, one in own.items():
        value = one.default
        hint = hints[name]
        if name in groups:
            kinds = typing.get_type_hints(type(value))
            fields = _names(value)
            mine = {*taken}.intersection(fields).difference(own, seen - {"prompts"})
            if name == "inputs":
                # texts of prompts are arguments, a file of them is an option, and a file of
                # settings has the texts
                mine = set()
            value = from_record(value, {key: given.value(key, kinds[key]) for key in mine})
            value = typed(value, *hidden, *seen, *rare, closed=closed)
            seen |= {*fields}
            hint = MARK.OmitArgPrefixes[type(value)]
        elif name in taken:
            value = given.value(name, hint)
        if name not in groups:
            hint = _plain_argument(name, hint, value)
        if name in rare:
            hint = MARK.Suppress[hint]
        parameters.append(
            one.replace(default=value, annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
        )
    more: dict[str, str] = {}
    if groups:
        more = FILES
    for name in more:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=FILE)
        )

    def call(**values: Any) -> None:
        function(**{name: value for name, value in values.items() if name not in FILES})

    call.__name__ = function.__name__
    call.__doc__ = _told(function, more, short)
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call, names, left


def _plain_argument(name: str, hint: Any, value: Any) -> Any:
    """The type of an argument that is no group of settings, with its word in the help."""
    of = hint
    marks: list[Any] = []
    if typing.get_origin(hint) is Annotated:
        of, *marks = typing.get_args(hint)
    how: dict[str, Any] = {"metavar": _word(name, of, positional=MARK.Positional in marks)}
    is_absent = value is inspect.Parameter.empty and typing.get_origin(of) is tuple
    if is_absent or value is None or value in ((), ""):
        how["help_behavior_hint"] = ""
    return Annotated[hint, MARK.arg(**how)]


FILE = Annotated[Path | None, MARK.arg(metavar="PATH", help_behavior_hint="")]


def _told(function: Callable[..., None], more: dict[str, str], short: bool) -> str:
    """The docstring with each argument in one line: tyro keeps line breaks of the source."""
    text, _, arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    if short:
        text += "\nSee --help-all for all options.\n"
    lines = re.sub(r"\n {5,}", " ", arguments) + "".join(
        f"\n    {name}: {about}" for name, about in more.items()
    )
    return f"{text}\nArgs:\n{lines}"
