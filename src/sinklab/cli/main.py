"""`sinklab COMMAND`: every registered study has one, and there are a few others; `--help` is made from docstrings."""

import dataclasses
import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from sinklab import registry
from sinklab.cli.command import command, say, value_of, values_of
from sinklab.cli.models import generate, info, serve, train_command, validate
from sinklab.cli.reports import compare, figures, merge, onetoken, report, table1, tour
from sinklab.cli.sharing import export, gallery, push
from sinklab.errors import Terminated, on_sigterm

ABOUT = (
    "A laboratory for attention sinks in diffusion language models. Start with `sinklab tour`: no download needed. "
    "With any command, --plugin FILE.py loads rules, interventions, … of your own, and --debug traces an error."
)
KINDS: tuple[str, ...] = ("rules", "statistics", "interventions", "sinks", "unmasking_rules", "caches", "schedules")
KINDS += ("families", "figures", "studies")


def list_registered(kind: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """List what is registered: rules, interventions, caches, studies, …, with their options.

    Try
        sinklab list
        sinklab list interventions rules
        sinklab list interventions --plugin my_interventions.py

    Args:
        kind: any of rules, statistics, interventions, sinks, unmasking_rules, caches, schedules, families, figures,
            studies; all when left out.
    """
    for name in kind or KINDS:
        if name not in KINDS:
            raise registry.unknown("registry", name, KINDS)
        print(f"{name}:")
        for entry, value in getattr(registry, name).items():
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
            options = ", ".join(f"{field.name}{_default(field)}" for field in fields if field.init)
            about = (inspect.getdoc(value) or "").partition("\n")[0]
            print(f"  {entry}{f' ({options})' if options else ''}\n      {about}")


def _default(field: dataclasses.Field) -> str:
    return "" if field.default is dataclasses.MISSING else f"={field.default!r}"


OTHERS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(tour, generate, serve, info, validate, report, figures, compare, merge, table1, onetoken),
        *(export, gallery, push),
    )
}
OTHERS["list"] = list_registered
TRAIN = "Train a diffusion language model: from scratch, from a causal model, or its sink alone."


def _commands(arguments: Sequence[str]) -> Iterator[tuple[str, str, Callable[[], Callable[..., None]]]]:
    """Name, one line about it, and what makes the function, of every command.

    Args:
        arguments: behind the name of the command; some of them decide the defaults of others.
    """
    again = value_of(arguments, "--reproduce")
    for name, kind in registry.studies.items():
        run = None if again is None else Path(again)
        yield name, (kind.__doc__ or "").partition("\n")[0], partial(command, name, kind(), run)
    yield "train", TRAIN, partial(train_command, arguments)
    for name, function in OTHERS.items():
        yield name, (function.__doc__ or "").partition("\n")[0], partial(_same, function)


def _same(function: Callable[..., None]) -> Callable[..., None]:
    return function


def _app(arguments: Sequence[str]) -> tyro.extras.SubcommandApp:
    """All commands by one line each, and the one that is run with its options."""
    app = tyro.extras.SubcommandApp()
    for name, about, make in _commands(arguments[1:]):
        if name in arguments[:1]:
            app.command(name=name)(_unwrapped(make()))
        else:
            # stands in the list of commands for one that is not run
            app.command(name=name, help=about)(lambda: None)
    return app


def _unwrapped(function: Callable[..., None]) -> Callable[..., None]:
    """The function with each argument of its docstring in one line: tyro keeps line breaks of the source."""
    text, heading, arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    function.__doc__ = text + heading + re.sub(r"\n {5,}", " ", arguments)
    return function


def _plugged(arguments: Sequence[str]) -> list[str]:
    """The arguments without ``--plugin FILE``; the files are loaded. Raises ValueError for one that cannot be."""
    files, rest = values_of(arguments, "--plugin")
    for file in files:
        if not file:
            raise ValueError("--plugin takes a Python file: --plugin FILE.py")
        registry.load_plugin(file)
    return rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; whatever stops it is one line on stderr and exit status 2, with ``--debug`` a traceback. Ctrl-C
    (130) and SIGTERM (143) keep what is written.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug, arguments = "--debug" in given, [one for one in given if one != "--debug"]
    # the models live on this machine or are named by the user; their progress bars are noise here
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        with on_sigterm(_terminate):
            arguments = _plugged(arguments)
            _app(arguments).cli(args=arguments, prog="sinklab", description=ABOUT)
    except Exception as error:
        if debug:
            raise
        fault = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}, which --debug traces: "
        say(f"sinklab: {fault}{' '.join(str(error).split())}", sys.stderr)
        return 2
    except (KeyboardInterrupt, Terminated) as end:
        print("sinklab: interrupted; what was written so far is kept", file=sys.stderr)
        return 143 if isinstance(end, Terminated) else 130
    return 0


def _terminate(*_: object) -> None:
    # a scheduler repeats itself, and what is being put in order must not be cut short
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated(143)
