"""Messages of a command while it works: stages, and how far a pass is: what is done, how fast, and
what is left, measured while it lasts.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from sinklab.lab.files import COUNT
from sinklab.lab.studies.processes import Progress, duration

RAW = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Spellings of control characters, which a terminal would obey."""
FIRST = 2.0
"""Seconds of a wait before a line tells of it, away from a terminal."""
EVERY = 5.0
"""Seconds between two such lines at first; in a long pass a tenth of the time so far, which is
more.
"""
SURE = 3.0
"""Seconds after which a pass of which at least two parts are done says how long the rest takes."""
SURE_OF_ONE = 10.0
"""Seconds after which a pass with one part done does; that part may have been slower than the
others will be.
"""


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


class Pace:
    """How fast a pass goes. Its first part is slower than the others and does not count once there
    are more.
    """

    def __init__(self, done: float, now: float) -> None:
        self.began = now
        """Time at which it began."""
        self.done = done
        """Parts done."""
        self.seconds = 0.0
        """Seconds since it began."""
        self.rate = 0.0
        """Parts a second; 0 before the first."""
        self.is_sure = False
        """Whether the rate says enough of the rest."""
        self._there = done
        self._from = (done, now)

    def move(self, done: float, now: float) -> None:
        """Note that so much is done now."""
        since, moment = self._from
        if done > since and now > moment:
            self.rate = (done - since) / (now - moment)
        if self.done == self._there < done:
            self._from = (done, now)
        self.done = done
        self.seconds = now - self.began
        least = SURE_OF_ONE
        if done > self._from[0]:
            least = SURE
        self.is_sure = self.seconds >= least

    def left(self, total: float) -> float:
        """Seconds that the rest takes, of so many parts in all."""
        return (total - self.done) / self.rate


def rate_in_words(rate: float) -> str:
    """Parts a second, or the time of each."""
    if rate >= 1:
        return f"{rate:.2g} a second"
    return f"{duration(1 / rate)} each"


class RateColumn(ProgressColumn):
    """The rate, in the bar of a terminal."""

    def render(self, task: Task) -> Text:
        """Speed of a task, by `rate_in_words`."""
        if not task.speed:
            return Text("")
        return Text(rate_in_words(task.speed))


class Shown(Progress):
    """Stages stay above the bar as they pass; away from a terminal a line now and then tells how
    far a pass is.
    """

    def __init__(
        self, console: Console, bars: Bars, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console = console
        self._bars = bars
        self._clock = clock
        self._started = self._told = clock()
        self._task = bars.add_task("starting", total=None)
        self._pace: Pace | None = None

    def stage(self, text: str) -> None:
        """Print the stage, and put it before the bar."""
        text = spelt(text)
        self._bars.update(self._task, description=text)
        self._print(text)

    def count(self, done: float, total: float, what: str = "") -> None:
        """Move the bar, or away from a terminal print the progress, if it was not printed a moment
        ago; `what` is counted, where no stage says so.
        """
        now = self._clock()
        if what:
            self._bars.update(self._task, description=what)
            what += ": "
        if self._pace is None or done < self._pace.done:
            self._pace = Pace(done, now)
            self._bars.reset(self._task, total=total, completed=int(done))
        self._pace.move(done, now)
        self._bars.update(self._task, completed=done, total=total)
        if not self._pace.rate or done >= total:
            return
        due = max(EVERY, self._pace.seconds / 10)
        if not self._console.is_terminal and self._pace.is_sure and now - self._told >= due:
            rate = rate_in_words(self._pace.rate)
            left = duration(self._pace.left(total))
            self._print(f"{what}{int(done)} of {total:.0f}, {rate}, about {left} left")

    def _print(self, text: str) -> None:
        self._told = self._clock()
        elapsed = self._told - self._started
        self._console.print(
            f"{elapsed:6.1f} s  {text}", style="dim", highlight=False, markup=False, soft_wrap=True
        )


@contextmanager
def working() -> Iterator[Shown]:
    """A bar on the terminal for the length of the block; of several processes only the first one
    shows it.
    """
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    stage = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    columns = (*stage, BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown = Shown(console, bars)
        before = COUNT.set(shown.count)
        try:
            yield shown
        finally:
            COUNT.reset(before)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Says the text while the block lasts: on a terminal it goes with it, elsewhere it is printed
    after two seconds.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(spelt(text))):
            yield
        return
    timer = threading.Timer(FIRST, say, (text,), {"stream": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
