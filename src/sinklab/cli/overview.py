"""`sinklab --help`: the commands by what one wants, a line each, and the command that another name stands for."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.cli.options import WORDS
from sinklab.errors import unknown

GROUPS: dict[str, dict[str, str]] = WORDS["groups"]
MORE = "more"
"""Group of what no group names: the studies of a plug-in."""


def grouped(commands: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The commands with their lines by group.

    Args:
        commands: name -> first line of the docstring, which stands for a command that no group names.
    """
    groups = {
        group: {name: line for name, line in lines.items() if name in commands} for group, lines in GROUPS.items()
    }
    named = {name for lines in groups.values() for name in lines}
    rest = {name: line for name, line in commands.items() if name not in named}
    return groups | {MORE: rest} if rest else groups


def show(about: str, commands: Mapping[str, str]) -> None:
    """Print what the package is and every command in its group."""
    console = Console(highlight=False)
    console.print(Text("usage: sinklab COMMAND …\n"))
    console.print(Text(about))
    for group, lines in grouped(commands).items():
        table = Table.grid(padding=(0, 2))
        for name, line in lines.items():
            table.add_row(Text(f"  {name:9}", style="bold"), Text(line))
        console.print(Text(f"\n{group}", style="bold"))
        console.print(table)
    console.print(Text("\nsinklab COMMAND --help has examples and the options; --help-all has all options."))


def no_such_command(name: str, commands: Mapping[str, str]) -> ValueError:
    """The error for a command that is not there, with the one that was meant where that is known."""
    for command, words in WORDS["meant"].items():
        if name in words.split():
            lines = {one: line for group in grouped(commands).values() for one, line in group.items()}
            return ValueError(f"unknown command {name!r}; did you mean {command!r}? {lines[command]}")
    return unknown("command", name, commands, "sinklab --help says what each is for")
