"""Commands as they are typed."""

import shlex

from sinklab.lab.cli import main


def cli(command: str) -> int:
    """The exit status of `sinklab COMMAND`."""
    return main(shlex.split(command))
