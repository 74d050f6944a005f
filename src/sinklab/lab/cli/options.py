"""Options of a command: tyro makes them of its dataclass, with defaults from a file of settings."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

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
backbone batch cfg_scale control device_map estimator every
full_forward gpus_per_worker gradient_checkpointing heldout_rows keep_arrays kv_heads
likelihood_batch likelihood_cfg_scale log_every logit_shift lora_rank maps micro_batch min_lr
mlp_size
noise num_fewshot only pairs record_sinks render revision row_start
save_every shard sink_rule sink_side stop_at_eos stop_ids streaming suppress_ids
text_only time_sampler top_k top_p warmup weight_decay
"""
"""Options that --help leaves to --help-all, in every command."""
PERMISSIONS = "out render run_code shard"
"""Permissions to run code, write or share: given on the command line alone, never by a file."""
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

    def filled(self, arguments: Sequence[str]) -> Command:
        """The command with the defaults that these arguments, after its name, ask for."""
        return self

    def decided(self) -> Iterable[str]:
        """Settings that words of the command line decide, whatever a file says."""
        return ()

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


def with_settings(command: Command, source: Path) -> Command:
    """The command with defaults from a TOML file or a run folder, without `PERMISSIONS`.

    Raises:
        ValueError: for a file that cannot be read, a name in it that is no option or is one of
            `PERMISSIONS`, and a value that makes no sense.
    """
    is_run = source.is_dir()
    if is_run:
        settings = read_info(source / RUN_FILE).settings
    else:
        with refused(f"{source} cannot be read as settings, a TOML file or a run folder"):
            settings = tomllib.loads(ordinary(source).read_text("utf-8"))
    if isinstance(settings.get("prompts"), str):
        raise ValueError(
            f"{source} gives prompts as a text: there they are a list of texts; a file of them is "
            "given as --prompts FILE"
        )
    renamed = {"prompts": "prompt"}
    taken = {renamed.get(name, name.replace("-", "_")): value for name, value in settings.items()}
    for name in PERMISSIONS.split():
        if taken.pop(name, None) is not None and not is_run:
            raise ValueError(
                f"{source} gives {name}, which is given on the command line alone: "
                f"--{name.replace('_', '-')}"
            )
    for name in command.decided():
        taken.pop(name, None)
    names = names_of(command)
    known_fields(str(source), taken, sorted(names))
    if is_run and "model" in names:
        # a folder that came from elsewhere does not choose what is loaded
        taken["model"] = REQUIRED
    return _replaced(command, taken)


def _replaced(value: Any, taken: dict[str, Any]) -> Any:
    """A dataclass, and those in it, with values by the names of fields; the first has each."""
    hints = typing.get_type_hints(type(value))
    changes = {}
    for field in dataclasses.fields(value):
        now = getattr(value, field.name)
        if dataclasses.is_dataclass(now):
            changes[field.name] = _replaced(now, taken)
        elif field.name in taken:
            given = taken.pop(field.name)
            if isinstance(given, list):
                given = tuple(given)
            if given is not REQUIRED:
                with refused(f"settings say {field.name}={given!r}", TypeCheckError):
                    check_type(given, hints[field.name])
            changes[field.name] = given
    return dataclasses.replace(value, **changes)


def parsed(command: Any, arguments: Sequence[str], prog: str, *, is_short: bool) -> Command:
    """The command with the options that were given; exits after help, and after errors of options.

    Args:
        command: with its defaults.
        arguments: behind its name.
        prog: how it is called.
        is_short: whether the help leaves out `RARE` options.

    Raises:
        ValueError: for values that make no sense.
    """
    left_out = {*command.hidden()}
    if is_short:
        left_out.update(RARE.split())
    how: dict[str, Any] = {
        "description": f"{inspect.cleandoc(command.about())}\n\n{ALSO}",
        "config": (MARK.OmitArgPrefixes, MARK.PositionalMetavarFromFieldName),
        "registry": constructors(left_out),
    }
    return built(tyro.cli(type(command), default=command, args=arguments, prog=prog, **how))


def built(parsed: Any) -> Any:
    """A dataclass that tyro has parsed: made here, where its errors are not drawn in a box."""
    if not isinstance(parsed, partial):
        return parsed
    return parsed.func(**{name: built(value) for name, value in parsed.keywords.items()})


def constructors(left_out: set[str]) -> ConstructorRegistry:
    """How tyro reads dataclasses: without fields that are left out, registered values as text."""
    rules = ConstructorRegistry()
    owners: dict[str, type] = {}

    @rules.struct_rule
    def settings(info: StructTypeInfo) -> StructConstructorSpec | None:
        kind = info.type
        if not dataclasses.is_dataclass(kind) or kind.__module__.startswith("tyro."):
            return None
        hints = typing.get_type_hints(kind, include_extras=True)
        options = []
        fixed = {}
        for field in dataclasses.fields(kind):
            value = getattr(info.default, field.name, field.default)
            # where two groups have an option, it is that of the first
            if field.name in left_out or owners.setdefault(field.name, kind) is not kind:
                fixed[field.name] = value
                continue
            hint = hints[field.name]
            registry = field.metadata.get("registry")
            if registry is not None:
                hint = str | None
                if isinstance(value, tuple):
                    hint, value = tuple[str, ...], tuple(map(registry.as_text, value))
                elif value is not None:
                    value = registry.as_text(value)
            elif hint is Any:
                # settings of a study, or names of its models
                hint = type(value) if dataclasses.is_dataclass(value) else tuple[str, ...]
            elif hint == bool | None:
                # a pair of flags, and neither of them
                hint = MARK.DisallowNone[hint]
            about = described(kind).get(field.name)
            options.append(StructFieldSpec(field.name, hint, value, about))

        def later(**values: Any) -> Any:
            return partial(kind, **fixed, **values)

        return StructConstructorSpec(later, tuple(options))

    return rules
