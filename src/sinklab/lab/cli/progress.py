"""Messages of a command while it works: stages, and how far a pass is: what is done, how fast, and
what is left, measured while it lasts.
"""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from sinklab.lab.files import COUNT
from sinklab.lab.studies.progress import Progress, duration

RAW = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Spellings of control characters, which a terminal would obey."""
EVERY = 10.0
"""Seconds between two lines on how far a pass is, at first."""
SURE = 3.0
"""Seconds of a pass before it says how long the rest takes."""


def spelt(text: object) -> str:
    """A text with its control characters spelt out, whoever wrote them."""
    return str(text).translate(RAW)


def say(*parts: str | tuple[str, str], stream: TextIO | None = None, exact: bool = False) -> None:
    """Print a text, in lines that are not wrapped. Every command prints through this, `show` and
    `Shown`.

    Args:
        parts: stand one behind the other, each a text or (text, style), such as ("3", "bold").
        stream: standard output when left out.
        exact: away from a terminal, as it is written: for the text of a model, which goes into a
            file.
    """
    stream = stream or sys.stdout
    texts = []
    for part in parts:
        if isinstance(part, str):
            part = (part, "")
        texts.append(part)
    if exact and not stream.isatty():
        print("".join(text for text, _ in texts), file=stream)
    elif any(style for _, style in texts):
        styled = Text.assemble(*((spelt(text), style) for text, style in texts))
        Console(file=stream, highlight=False).print(styled, soft_wrap=True)
    else:
        print("".join(spelt(text) for text, _ in texts), file=stream)


def show(rows: Iterable[Sequence[object]], columns: Sequence[object] = (), title: str = "") -> None:
    """Print a table; without names of columns it has no lines, and its first column is bold."""
    if columns:
        table = Table(title_justify="left")
        if title:
            table.title = Text(spelt(title))
        for name in columns:
            table.add_column(Text(spelt(name)))
    else:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
    for row in rows:
        table.add_row(*(Text(spelt(cell)) for cell in row))
    Console(highlight=False).print(table)


def pace(done: float, total: float, began: float, seconds: float) -> str:
    """How far a pass is, how fast it goes, and what is left.

    Args:
        done: parts done.
        total: parts in all.
        began: parts that were done when it began, which the rate leaves out.
        seconds: since then; before three of them, and before a twentieth of the parts, nothing is
            said of what is left.
    """
    text = f"{int(done)} of {total:.0f}"
    if done <= began or seconds < SURE or (done - began) * 20 < total - began:
        return text
    rate = (done - began) / seconds
    speed = f"{duration(1 / rate)} each"
    if rate >= 1:
        speed = f"{rate:.2g} a second"
    return f"{text}, {speed}, about {duration((total - done) / rate)} left"


class Shown(Progress):
    """One line that stays in place; away from a terminal a line for each kind of stage, and now and
    then one on how far it is.
    """

    def __init__(
        self, console: Console, bars: Bars, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console = console
        self._bars = bars
        self._clock = clock
        self._started = self._told = self._begun = clock()
        self._task = bars.add_task("starting", total=None, pace="")
        self._stage = "starting"
        self._kinds: set[str] = set()
        self._first = self._done = math.inf

    def stage(self, text: str) -> None:
        """Name what is done; away from a terminal once, whatever its numbers."""
        self._stage = spelt(text)
        self._bars.update(self._task, description=self._stage)
        kind = re.sub(r"\d+", "", self._stage)
        if kind not in self._kinds and not self._console.is_terminal:
            self._kinds.add(kind)
            self.note(text)

    def note(self, text: str) -> None:
        """Print a line, on a terminal above the one that stays."""
        self._told = self._clock()
        elapsed = self._told - self._started
        line = f"{elapsed:6.1f} s  {spelt(text)}"
        self._console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def count(self, done: float, total: float, what: str = "") -> None:
        """Tell how far a pass is; `what` is counted, where no stage says so."""
        now = self._clock()
        if done < self._done:
            self._first, self._begun = done, now
        self._done = done
        text = pace(done, total, self._first, now - self._begun)
        self._bars.update(
            self._task, completed=done, total=total, pace=text, description=what or self._stage
        )
        # seldom in a long run: after each line it lasts half as long again
        due = max(EVERY, (now - self._started) / 3)
        is_due = now - self._told >= due and not self._console.is_terminal
        if is_due and done < total and text.endswith("left"):
            self.note(f"{what or self._stage}: {text}")


@contextmanager
def working() -> Iterator[Shown]:
    """A line on the terminal for the length of the block; of several processes only the first one
    shows it.
    """
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    words = TextColumn("{task.description} {task.fields[pace]}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown = Shown(console, bars)
        before = COUNT.set(shown.count)
        try:
            yield shown
        finally:
            COUNT.reset(before)
