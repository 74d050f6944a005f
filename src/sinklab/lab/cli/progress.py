"""Messages of a command: results, tables, and while it works its stages and what is left."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from sinklab.lab.studies.progress import Progress

RAW = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Spellings of control characters, which a terminal would obey."""
EVERY = 10.0
"""Seconds between two lines on how far a pass is, at first."""


def spelt(text: object) -> str:
    """A text with its control characters spelt out, whoever wrote them."""
    return str(text).translate(RAW)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a text, in lines that are not wrapped. Every command prints through this, `show` and
    `Shown`.
    """
    print(spelt(text), file=stream or sys.stdout)


def show(rows: Iterable[Sequence[object]], columns: Sequence[object], title: str = "") -> None:
    """Print a table."""
    table = Table(title=Text(spelt(title)), title_justify="left")
    for name in columns:
        table.add_column(Text(spelt(name)))
    for row in rows:
        table.add_row(*(Text(spelt(cell)) for cell in row))
    Console(highlight=False).print(table)


class Shown(Progress):
    """One line that stays in place; away from a terminal a line for each kind of stage, and now and
    then one on how far it is.
    """

    def __init__(self, bars: Bars) -> None:
        super().__init__()
        self._bars = bars
        self._started = self._told = bars.get_time()
        self._task = bars.add_task("starting", total=None)
        self._stage = "starting"
        self._kinds: set[str] = set()

    def stage(self, text: str) -> None:
        """Name what is done; away from a terminal once, whatever its numbers."""
        self._stage = spelt(text)
        self._bars.update(self._task, description=self._stage)
        kind = re.sub(r"\d+", "", self._stage)
        if kind not in self._kinds and not self._bars.console.is_terminal:
            self._kinds.add(kind)
            self.note(text)

    def note(self, text: str) -> None:
        """Print a line, on a terminal above the one that stays."""
        self._told = self._bars.get_time()
        line = f"{self._told - self._started:6.1f} s  {spelt(text)}"
        self._bars.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def count(self, done: float, total: float) -> None:
        """Tell how far a pass is."""
        (task,) = self._bars.tasks
        if done < task.completed:
            self._bars.reset(self._task)
        self._bars.update(self._task, completed=done, total=total)
        # seldom in a long run: after each line it lasts half as long again
        now = self._bars.get_time()
        is_due = now - self._told >= max(EVERY, (now - self._started) / 3)
        if is_due and task.time_remaining and not self._bars.console.is_terminal:
            left = timedelta(seconds=round(task.time_remaining))
            self.note(f"{self._stage}: {done / total:.0%}, about {left} left")


@contextmanager
def working() -> Iterator[Shown]:
    """A line on the terminal for the length of the block; of several processes only the first one
    shows it.
    """
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=1e9,
    ) as bars:
        yield Shown(bars)
