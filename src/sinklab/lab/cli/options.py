"""Options of a command: tyro makes them of its dataclass, with defaults from a file of settings."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import docstring_parser
import tyro
from typeguard import TypeCheckError, check_type
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from sinklab.core.errors import known_fields
from sinklab.lab.files import ordinary, refused
from sinklab.lab.records.info import read_info
from sinklab.lab.records.storage import RUN_FILE

# types are made of these while running, which no checker follows
MARK: Any = tyro.conf
REQUIRED: Any = tyro.MISSING
"""Default of a field that has to be given."""
RARE = """
backbone batch cfg_scale change control device_map estimator every
full_forward gpus_per_worker gradient_checkpointing heldout_rows keep_arrays kv_heads
likelihood_batch likelihood_cfg_scale log_every logit_shift lora_rank maps micro_batch min_lr
mlp_size
noise num_fewshot only pairs record_sinks render revision row_start
save_every shard sink_rule sink_side stop_at_eos stop_ids streaming suppress_ids
text_only time_sampler top_k top_p warmup weight_decay
"""
"""Options that --help leaves to --help-all, in every command."""
PERMISSIONS = "out render resume run_code score_only shard"
"""Permissions to run code, write, send or go on: given on the command line alone, never by a
file.
"""
ALSO = (
    "Also: --help-all for every option, --config FILE (or a run folder) for other defaults, "
    "--plugin FILE.py, --debug."
)
"""Last line of a help."""


@dataclass(frozen=True)
class Given:
    """Options of every command, read before its own options."""

    plugin: MARK.UseAppendAction[tuple[Path, ...]] = ()
    """Python file with rules, interventions, … of your own."""
    config: Path | None = None
    """TOML file, or a run folder, whose settings are the defaults."""
    debug: MARK.FlagCreatePairsOff[bool] = False
    """Trace an error."""
    help_all: MARK.FlagCreatePairsOff[bool] = False
    """Show every option."""


class Command:
    """A frozen dataclass: its fields, and those of settings among them, are options.

    Each has a default, which may be `REQUIRED`, and a docstring, which is its help.
    """

    group = "more"
    """Group in the list of commands."""

    def about(self) -> str:
        """Help of the command."""
        return str(self.__doc__)

    def hidden(self) -> Iterable[str]:
        """Fields that are no options."""
        return ()

    def filled(self, arguments: Sequence[str], config: Path | None) -> Command:
        """The command with the defaults that these arguments, after its name, ask for."""
        return self

    def settings_of(self, run: Path) -> dict[str, Any]:
        """Settings that a run folder gives to this command."""
        return read_info(run / RUN_FILE).settings

    def run(self) -> None:
        """Do it."""
        raise NotImplementedError


@cache
def described(kind: type) -> dict[str, str]:
    """The docstrings of the fields of a class, each in one line."""
    return {
        one.arg_name: " ".join(str(one.description).split())
        for base in reversed(kind.__mro__[:-1])
        if dataclasses.is_dataclass(base)
        for one in docstring_parser.parse_from_object(base).params
    }


def names_of(command: Any) -> set[str]:
    """Names of the options of a command."""
    names: set[str] = set()
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if dataclasses.is_dataclass(value):
            names.update(one.name for one in dataclasses.fields(value))
        else:
            names.add(field.name)
    return names.difference(command.hidden())


def settings_in(
    source: Path | None, command: Command, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Defaults from a TOML file or a run folder, without `PERMISSIONS`.

    Args:
        source: the file or folder; None for none.
        command: takes the settings that it has; those of other commands in a run are told of.
        tell: is called with a message.

    Raises:
        ValueError: for a file that cannot be read, and a name in it that is no option.
    """
    if source is None:
        return {}
    is_run = source.is_dir()
    if is_run:
        settings = command.settings_of(source)
    else:
        with refused(f"{source} cannot be read as settings, a TOML file or a run folder"):
            settings = tomllib.loads(ordinary(source).read_text("utf-8"))
    renamed = {"prompts": "prompt"}
    settings = {
        renamed.get(name, name.replace("-", "_")): value for name, value in settings.items()
    }
    permissions = PERMISSIONS.split()
    known = names_of(command).difference(permissions)
    left = [name for name in settings if name not in known]
    if left and not is_run:
        known_fields(str(source), [name for name in left if name not in permissions], sorted(known))
    if left:
        tell(f"sinklab: not taken from {source}: {', '.join(left)}")
    taken = {name: value for name, value in settings.items() if name in known}
    if is_run and "model" in known:
        # a folder that came from elsewhere does not choose what is loaded
        taken["model"] = REQUIRED
    return taken


def parsed(
    command: Any,
    arguments: Sequence[str],
    prog: str,
    defaults: Mapping[str, Any],
    *,
    is_short: bool,
) -> Command:
    """The command with the options that were given; exits after help, and after errors of options.

    Args:
        command: with its usual defaults.
        arguments: behind its name.
        prog: how it is called.
        defaults: from a file of settings, in place of its own.
        is_short: whether the help leaves out `RARE` options.

    Raises:
        ValueError: for values that make no sense.
    """
    marks = (MARK.OmitArgPrefixes, MARK.PositionalMetavarFromFieldName)
    rules = constructors(defaults, is_short=is_short)
    how: dict[str, Any] = {"args": arguments, "prog": prog, "config": marks, "registry": rules}
    return built(tyro.cli(type(command), default=command, **how))


def built(parsed: Any) -> Any:
    """A dataclass that tyro has parsed: made here, where its errors are not drawn in a box."""
    if not isinstance(parsed, partial):
        return parsed
    return parsed.func(**{name: built(value) for name, value in parsed.keywords.items()})


def constructors(defaults: Mapping[str, Any], *, is_short: bool) -> ConstructorRegistry:
    """How tyro reads dataclasses: with the limits of their fields, registered values as text.

    Args:
        defaults: of options, from a file of settings.
        is_short: leave out `RARE` options.
    """
    rules = ConstructorRegistry()
    shown: dict[str, type] = {}
    hidden: set[str] = set()

    @rules.struct_rule
    def settings(info: StructTypeInfo) -> StructConstructorSpec | None:
        kind = info.type
        if not dataclasses.is_dataclass(kind) or kind.__module__.startswith("tyro."):
            return None
        about = str(kind.__doc__).partition("\n\n")[0]
        if isinstance(info.default, Command):
            about = f"{inspect.cleandoc(info.default.about())}\n\n{ALSO}"
            hidden.clear()
            hidden.update(info.default.hidden())
            shown.clear()
        hints = typing.get_type_hints(kind, include_extras=True)
        options = []
        fixed = {}
        for field in dataclasses.fields(kind):
            value = getattr(info.default, field.name, field.default)
            hint = _hint(field, hints[field.name], value)
            value = _written(field, value)
            # where two groups have an option, it is that of the first
            first = shown.setdefault(field.name, kind)
            is_rare = is_short and field.name in RARE.split()
            if first is not kind or field.name in hidden or is_rare:
                fixed[field.name] = value
                continue
            if field.name in defaults:
                value = _checked(field.name, defaults[field.name], hint)
            if value in (None, ()):
                hint = Annotated[hint, MARK.arg(help_behavior_hint="")]
            options.append(
                StructFieldSpec(field.name, hint, value, described(kind).get(field.name))
            )

        @wraps(kind, updated=())
        def later(**values: Any) -> Any:
            return partial(kind, **fixed, **values)

        later.__doc__ = about
        return StructConstructorSpec(later, tuple(options))

    return rules


def _hint(field: dataclasses.Field, hint: Any, value: Any) -> Any:
    """The type of an option."""
    choices = field.metadata.get("one_of")
    if hint is Any and "registry" not in field.metadata:
        # a command of several studies
        hint = type(value)
        if hint is tuple:
            hint = tuple[str, ...]
    if hint == bool | None:
        # a pair of flags, and neither of them
        return MARK.DisallowNone[hint]
    if "registry" in field.metadata:
        word: Any = str
    elif choices:
        word = Literal[tuple(choices)]
    else:
        return hint
    if isinstance(value, tuple):
        return tuple[word, ...]
    if value is None:
        return word | None
    return word


def _written(field: dataclasses.Field, value: Any) -> Any:
    """A value of a registry as text."""
    registry = field.metadata.get("registry")
    if registry is None or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(map(registry.as_text, value))
    return registry.as_text(value)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A value of a file. Raises ValueError unless it is of its type."""
    if value is REQUIRED:
        return value
    if isinstance(value, list):
        value = tuple(value)
    with refused(f"the file of settings says {name}={value!r}, which cannot be", TypeCheckError):
        return check_type(value, hint)
