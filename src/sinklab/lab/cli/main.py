"""`sinklab COMMAND`: every registered study has one, and there are a few others; `--help` is made
from docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

from sinklab import __version__
from sinklab.core import registry
from sinklab.core.errors import one_of
from sinklab.lab.cli.command import command_of
from sinklab.lab.cli.options import (
    MARK,
    REQUIRED,
    Command,
    Given,
    parsed,
    with_settings,
)
from sinklab.lab.cli.progress import say
from sinklab.lab.files import Terminated, load_plugin, on_signals
from sinklab.lab.registry import commands as registered
from sinklab.lab.registry import studies

ABOUT = (
    "A laboratory for attention sinks in diffusion language models. Start with `sinklab tour`: no "
    "download needed. With any command, --plugin FILE.py loads rules, interventions, … of your "
    "own, --config FILE (or a run folder) sets defaults, and --debug traces an error."
)
GROUPS = ("watch", "intervene", "train", "evaluate", "check", "more")
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


@registered.register("list")
@dataclass(frozen=True)
class List(Command):
    """Registered rules, statistics, interventions, caches, …

    Try
        sinklab list
        sinklab list interventions rules
        sinklab list interventions --plugin my_interventions.py
    """

    kind: MARK.Positional[tuple[str, ...]] = ()
    """Any of rules, statistics, interventions, selectors, removals, sinks, unmasking_rules, caches,
    schedules, families, figures, studies; all when left out.
    """
    group = "check"

    def run(self) -> None:
        """Print them."""
        for name in self.kind or KINDS:
            one_of("registry", name, KINDS)
            say(f"{name}:")
            for entry, value in registry.REGISTRIES[name].items():
                if isinstance(value, type) and dataclasses.is_dataclass(value):
                    options = inspect.signature(value).parameters.values()
                    told = [str(one.replace(annotation=one.empty)) for one in options]
                    entry += f" ({', '.join(told)})" * bool(told)
                about = (inspect.getdoc(value) or "").partition("\n\n")[0]
                say(f"  {entry}\n{textwrap.indent(about, ' ' * 6)}")


@registered.register("check")
@dataclass(frozen=True)
class Check(Command):
    """Does a plug-in keep the promises of what it registers?

    Each rule, statistic, edit, selector, removal, sink, cache, schedule and study that the file
    registers is tried on small models. Exit status 1: one does not keep them.

    Try
        sinklab check my_rule.py
        sinklab check my_selector.py shared_sinks:share=0.25
    """

    file: MARK.Positional[Path] = REQUIRED
    """The plug-in."""
    value: MARK.Positional[tuple[str, ...]] = ()
    """Parts to check with other options than the defaults, as text."""
    group = "check"

    def run(self) -> None:
        """Print the verdicts."""
        from sinklab.lab.checks import verdicts

        load_plugin(self.file)
        lines = [*verdicts(self.file, self.value)]
        if not lines:
            raise ValueError(
                f"{self.file} registers nothing that is checked; families and figures are "
                "not, and examples/ has a file of each kind"
            )
        say("\n".join(lines))
        if "FAILS" in "".join(lines):
            raise SystemExit(1)


def command_named(name: str) -> Command:
    """A command with its usual defaults."""
    if name in studies:
        return command_of(name, studies[name]())
    command: Command = registered[name]()
    return command


def _list() -> None:
    """Print a line on the package and the commands in their groups."""
    say("usage: sinklab COMMAND …\n")
    say(textwrap.fill(ABOUT, 100))
    commands = {name: command_named(name) for name in (*registered, *studies)}
    for group in GROUPS:
        lines = [
            (name, one.about().partition("\n")[0])
            for name, one in commands.items()
            if one.group == group
        ]
        if lines:
            say(f"\n{group}")
            for name, about in lines:
                say(f"  {name:9}  {about}")
    say("\nsinklab COMMAND --help has examples and the usual options, --help-all all of them.")


def _run(arguments: Sequence[str]) -> None:
    """Parse and do it; exits after help."""
    given, rest = tyro.cli(Given, args=arguments, return_unknown_args=True, add_help=False)
    for file in given.plugin:
        load_plugin(file)
    name, *rest = rest or [""]
    if name in ("", "-h", "--help"):
        _list()
        raise SystemExit(0 if arguments else 2)
    one_of("command", name, [*registered, *studies], "sinklab --help says what each is for")
    asks = given.help_all or not {"-h", "--help"}.isdisjoint(rest)
    if given.help_all:
        rest.append("--help")
    command = command_named(name).filled(rest)
    if given.config is not None and not asks:
        command = with_settings(command, given.config)
    is_short = asks and not given.help_all
    parsed(command, rest, f"sinklab {name}", is_short=is_short).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; any error is one line on stderr and exit status 2, with ``--debug`` a
    traceback. Ctrl-C (130) and SIGTERM (143) keep everything written.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    if [*arguments] == ["--version"]:
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
    try:
        with on_signals(_terminate, signal.SIGTERM):
            _run(arguments)
            sys.stdout.flush()
    except BrokenPipeError:
        # whoever read has gone (| head); what is left to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--debug" in arguments:
            raise
        say(f"sinklab: {_told(error)}", stream=sys.stderr)
        return 2
    except (KeyboardInterrupt, Terminated) as end:
        say("sinklab: interrupted; a run folder that was begun is kept", stream=sys.stderr)
        if isinstance(end, Terminated):
            return 143
        return 130
    return 0


def _told(error: Exception) -> str:
    """Error of a command in one line."""
    said = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError):
        return said
    return f"{type(error).__name__}, which --debug traces: {said}"


def _terminate(*_: object) -> None:
    # a scheduler repeats itself, and what is being put in order must not be cut short
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated(143)
