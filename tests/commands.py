"""Commands as they are typed."""

import shlex

from sinklab.lab.cli import main


def cli(command):
    """The exit status of `sinklab COMMAND`."""
    return main(shlex.split(command))


def out_of(command, capsys):
    """What a command prints, which succeeds."""
    assert cli(command) == 0
    return capsys.readouterr().out


def error_of(command, capsys):
    """The error of a command that refuses what it was given."""
    assert cli(command) == 2
    return capsys.readouterr().err
