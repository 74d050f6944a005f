"""The command line: parse, call one function, print where the result lies."""

from sinklab.lab.cli.main import main

__all__ = ["main"]
