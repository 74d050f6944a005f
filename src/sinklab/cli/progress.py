"""What a long command shows on the terminal: stages in words, a bar with the time left; nothing on standard output."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sinklab.studies.processes import Progress


class Shown(Progress):
    """Stages stay above the bar as they pass; away from a terminal only they are printed."""

    def __init__(self, console: Console, bars: Bars) -> None:
        self._console, self._bars = console, bars
        self._started = time.perf_counter()
        self._task = bars.add_task("starting", total=None)

    def __call__(self, text: str) -> None:
        """The same as `stage`: training reports in words alone."""
        self.stage(text)

    def stage(self, text: str) -> None:
        """Print the stage, and put it before the bar."""
        self._bars.update(self._task, description=text)
        elapsed = time.perf_counter() - self._started
        self._console.print(f"{elapsed:6.1f} s  {text}", style="dim", highlight=False, markup=False, soft_wrap=True)

    def count(self, done: int, total: int) -> None:
        """Move the bar."""
        self._bars.update(self._task, completed=done, total=total)


@contextmanager
def working() -> Iterator[Shown]:
    """A bar on the terminal for the length of the block; of several processes only the first one shows it."""
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield Shown(console, bars)
