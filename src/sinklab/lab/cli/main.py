"""`sinklab COMMAND`: every registered study has one, and there are a few others; `--help` is made
from docstrings.
"""

import _thread
import dataclasses
import inspect
import io
import os
import re
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

# private, and made for this: its error takes the place of tyro's box
from tyro._errors import on_parse_error

from sinklab import __version__
from sinklab.core import registry
from sinklab.core.errors import near, one_of
from sinklab.lab.cli.command import command, say, show
from sinklab.lab.cli.models import generate, info, train_command
from sinklab.lab.cli.options import (
    GONE,
    WORDS,
    Given,
    carried,
    options,
    refuse,
    values_of,
)
from sinklab.lab.cli.reports import compare, figures, merge, onetoken, report, table1
from sinklab.lab.cli.tour import tour
from sinklab.lab.files import Terminated, load_plugin, on_signals
from sinklab.lab.records.info import read_info
from sinklab.lab.records.storage import RUN_FILE
from sinklab.lab.registry import commands as registered_commands
from sinklab.lab.registry import studies
from sinklab.lab.studies.base import as_record

ABOUT = (
    "A laboratory for attention sinks in diffusion language models. Start with `sinklab tour`: no "
    "download needed. With any command, --plugin FILE.py loads rules, interventions, … of your "
    "own, and --debug traces an error."
)
KINDS = (
    "rules",
    "statistics",
    "interventions",
    "selectors",
    "removals",
    "sinks",
    "unmasking_rules",
    "caches",
    "schedules",
    "families",
    "figures",
    "studies",
)
GROUPS = tuple(WORDS["groups"])
MORE = "more"
"""Group of commands that no group names: the studies of a plug-in."""


def list_registered(kind: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Registered rules, statistics, interventions, caches, …

    Try
        sinklab list
        sinklab list interventions rules
        sinklab list interventions --plugin my_interventions.py

    Args:
        kind: any of rules, statistics, interventions, selectors, removals, sinks, unmasking_rules,
            caches, schedules, families, figures, studies; all when left out.
    """
    for name in kind or KINDS:
        one_of("registry", name, KINDS)
        say(f"{name}:")
        for entry, value in registry.REGISTRIES[name].items():
            options = []
            if dataclasses.is_dataclass(value):
                fields = [field for field in dataclasses.fields(value) if field.init]
                options = [f"{field.name}{_default(field)}" for field in fields]
            if options:
                entry = f"{entry} ({', '.join(options)})"
            about = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", "\n      ")
            say(f"  {entry}\n      {about}")


def check(
    file: Annotated[Path, tyro.conf.Positional],
    value: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    on: str = "",
) -> None:
    """Does a plug-in keep the promises of what it registers?

    Each rule, statistic, edit, selector, removal, sink, cache, schedule, family, figure and study
    that the file registers is tried on small models. Exit status 1: one does not keep them.

    Try
        sinklab check my_rule.py
        sinklab check my_selector.py shared_sinks:share=0.25

    Args:
        file: the plug-in.
        value: what to check with other options than the defaults, as text.
        on: what a family or a figure needs: a small checkpoint of it, a run to draw.
    """
    from sinklab.lab.checks import verdicts

    load_plugin(file)
    lines = [*verdicts(file, value, on)]
    if not lines:
        raise ValueError(f"{file} registers nothing; examples/ has a file of each kind")
    say("\n".join(lines))
    if "FAILS" in "".join(lines):
        raise SystemExit(1)


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return f"={field.default!r}"


OTHERS = {
    "tour": tour,
    "generate": generate,
    "info": info,
    "report": report,
    "figures": figures,
    "compare": compare,
    "merge": merge,
    "table1": table1,
    "onetoken": onetoken,
    "list": list_registered,
    "check": check,
}
"""Commands that are neither a study's nor an extra's."""
HELP = frozenset(("--help", "-h", "--help-all"))
TRAIN = "A model with a sink or without, or the sink alone."


def _nothing() -> None:
    """A command that is listed alone."""


def listings() -> dict[str, dict[str, Any]]:
    """Name of a command -> its `group` in the help, and words that are `meant` by it: those of the
    lab from options.toml, those of an extra from the attribute ``listed`` of its function.
    """
    found = {}
    for group, names in WORDS["groups"].items():
        for name in names.split():
            meant = WORDS["meant"].get(name, "")
            found[name] = {"group": group, "meant": meant}
    for name, own in registered_commands.items():
        listed = carried(own, "listed")
        if listed:
            found[name] = listed
    return found


def grouped(commands: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The commands, name -> first line of the docstring, by group."""
    groups: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    known = listings()
    for name in dict.fromkeys([*known, *commands]):
        if name in commands:
            group = known.get(name, {"group": MORE})["group"]
            groups.setdefault(group, {})[name] = commands[name]
    return groups


def _show(about: str, commands: Mapping[str, str]) -> None:
    """Print a line on the package and the commands in their groups."""
    say("usage: sinklab COMMAND …\n")
    say(textwrap.fill(about, 100))
    for group, lines in grouped(commands).items():
        say("\n", (group, "bold"))
        show((f"  {name:9}", line) for name, line in lines.items())
    say("\nsinklab COMMAND --help has examples and the usual options, --help-all all of them.")


def _no_such_command(name: str, commands: Mapping[str, str]) -> ValueError:
    """The error for a command that is not there, with the nearest one if that is known."""
    for meant, listed in listings().items():
        if meant in commands and name in listed.get("meant", "").split():
            about = commands[meant]
            return ValueError(f"unknown command {name!r}; did you mean {meant!r}? {about}")
    if name in GONE:
        return ValueError(f"there is no command {name!r}; {GONE[name]}")
    hint = near(name, commands) or "sinklab --help says what each is for"
    return ValueError(f"unknown command {name!r}; {hint}")


def _settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Settings of a command in a run folder. Raises ValueError if another command wrote it."""
    if name in studies:
        return as_record(studies[name]().settings_of(folder))
    if name == "train":
        from sinklab.lab.training.checkpoints import settings_of

        return dataclasses.asdict(settings_of(folder))
    return read_info(folder / RUN_FILE).settings


def _needs_model(run: Path, arguments: Sequence[str]) -> None:
    """Raises ValueError if a run is to be reproduced and no model is given: the default need not be
    the run's.
    """
    if values_of(arguments, "--model")[0]:
        return
    name = str(read_info(run / RUN_FILE).model.get("name"))
    raise ValueError(
        f"--reproduce takes settings and no model, and {run} is of {name!r}; give --model {name}"
    )


def _app(arguments: Sequence[str], names: list[str]) -> tyro.extras.SubcommandApp:
    """All commands by one line each, and the one that is run with its options; their names are
    added to `names`.
    """
    app = tyro.extras.SubcommandApp()
    called = next(iter(arguments), "")
    rest = arguments[1:]
    completes = called.startswith("--tyro-")
    if completes:
        rest = []
    # of `train` the function that makes its command
    commands = {**studies, "train": train_command, **OTHERS, **registered_commands}
    lines = {name: (one.__doc__ or "").partition("\n")[0] for name, one in commands.items()}
    lines["train"] = TRAIN
    if not called or called in HELP:
        _show(ABOUT, lines)
        code = 2
        if called:
            code = 0
        raise SystemExit(code)
    if not called.startswith("-") and called not in commands:
        raise _no_such_command(called, lines)
    for name, one in commands.items():
        if name == called or completes:
            asks = bool(HELP.intersection(rest))
            short = asks and "--help-all" not in rest
            plain: Callable[..., None] = one
            if name in studies:
                plain = command(name, one())
            elif name == "train":
                plain = train_command(rest)
            given = Given.by(rest, partial(_settings_of, name))
            if given.reproduced and not asks and "model" in inspect.signature(plain).parameters:
                _needs_model(given.reproduced, rest)
            function, options_of, left = options(plain, given, short=short, closed=completes)
            app.command(name=name)(function)
            names += options_of
            if left:
                say(f"sinklab: not taken from {given.source}: {', '.join(left)}", stream=sys.stderr)
        else:
            # stands in the list of commands for one that is not run
            app.command(name=name, help=lines[name])(_nothing)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; any error is one line on stderr and exit status 2, with ``--debug`` a
    traceback. Ctrl-C (130) and SIGTERM (143) keep everything written.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [one for one in arguments if one != "--debug"]
    if arguments == ["--version"]:
        say(f"sinklab {__version__}")
        return 0
    # the models live on this machine or are named by the user; their progress bars are noise here
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for stream in (sys.stdout, sys.stderr):
        # a sign that the terminal or the pipe cannot show is spelt, and ends no command after its
        # work
        if isinstance(stream, io.TextIOWrapper):
            # a file that became a pipe after it was opened cannot be asked for its position
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    names: list[str] = []
    try:
        with on_signals(_terminate, signal.SIGTERM), _no_interrupt_lost():
            files, arguments = values_of(arguments, "--plugin")
            for file in files:
                if not file:
                    raise ValueError("--plugin takes a Python file: --plugin FILE.py")
                load_plugin(file)
            app = _app(arguments, names)
            shortened = {"--help-all": "--help"}
            arguments = [shortened.get(one, one) for one in arguments]
            told = partial(refuse, command=arguments[0], arguments=arguments[1:], names=names)
            with on_parse_error(told):
                app.cli(args=arguments, prog="sinklab", description=ABOUT)
            sys.stdout.flush()
    except BrokenPipeError:
        # whoever read has gone (| head); what is left to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        say(f"sinklab: {_told(error, names)}", stream=sys.stderr)
        return 2
    except (KeyboardInterrupt, Terminated) as end:
        say("sinklab: interrupted; a run folder that was begun is kept", stream=sys.stderr)
        if isinstance(end, Terminated):
            return 143
        return 130
    return 0


def _told(error: Exception, names: Iterable[str]) -> str:
    """Error of a command in one line, with the options (`names`) that it speaks of."""
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError) or re.search(
        r"allocate memory|out of memory", said, re.IGNORECASE
    ):
        return (
            f"there is not enough memory ({said or 'an object could not be made'}); give a "
            "smaller model, a narrower "
            "type (--dtype bfloat16) or fewer texts at once, or take a machine with more"
        )
    words = said.replace("=", "= ").replace("(", "( ").split()
    flags: dict[str, None] = {}
    for name in names:
        # a word such as "model" is no option unless it is named as one
        is_named = f"{name}=" in words or words[:1] == [name] or ("_" in name and name in words)
        flag = f"--{name.replace('_', '-')}"
        if is_named and flag not in said:
            flags[flag] = None
    if flags:
        said += f" (in a command {', '.join(flags)})"
    if isinstance(error, ValueError | OSError):
        return said
    return f"{type(error).__name__}, which --debug traces: {said}"


def _terminate(*_: object) -> None:
    # a scheduler repeats itself, and what is being put in order must not be cut short
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated(143)


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come while Python cannot raise, as in ``__del__``, are raised a
    moment later.
    """
    before = sys.unraisablehook

    def again(lost: Any) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt | Terminated):
            before(lost)
        elif threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, partial(_raise, lost.exc_value))
            threading.Timer(0.01, _thread.interrupt_main).start()

    usual = signal.getsignal(signal.SIGINT)
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
        if signal.getsignal(signal.SIGINT) is not usual:
            signal.signal(signal.SIGINT, usual)


def _raise(end: BaseException, *_: object) -> None:
    raise end
