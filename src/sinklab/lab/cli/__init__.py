"""The command line: parse, call one function, print the path of the result."""

from sinklab.lab.cli.main import main

__all__ = ["main"]
