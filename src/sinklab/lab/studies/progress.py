"""The progress of work in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

Tick = Callable[[], object]
"""Called after each of some evaluations."""


def nothing(*said: object) -> None:
    """Tell nobody, where progress would be told."""


class Progress:
    """The progress of a long run in words; the command line draws a bar with the time left."""

    def __init__(self, say: Callable[[str], object] = nothing) -> None:
        self._say = say

    def stage(self, text: str) -> None:
        """A new stage begins."""
        self._say(text)

    def note(self, text: str) -> None:
        """A message that must not be missed, however long it takes."""
        self._say(text)

    def count(self, done: float, total: float) -> None:
        """`done` of `total` parts of the pass in work are done; the total may shrink if a text ends
        early.

        Less than before begins another pass. A part that takes long may be counted while it is
        done, as a fraction.
        """

    def counter(self, total: int) -> Callable[[], None]:
        """A function to call after each of `total` evaluations."""
        numbers = iter(range(1, total + 1))
        self.count(0, total)
        return lambda: self.count(next(numbers, total), total)


Audience = Progress | Callable[[str], object] | None
"""Progress to show, or a function that is called with the text of each stage."""


def as_progress(given: Audience) -> Progress:
    """`given` as a Progress: a function is called with the text of each stage; None says
    nothing.
    """
    if isinstance(given, Progress):
        return given
    return Progress(given or nothing)


class Meter:
    """Counts the evaluations of a study of several parts (texts, blocks), each of at most `steps`
    steps.
    """

    def __init__(self, progress: Progress, parts: int, steps: int) -> None:
        self.progress = progress
        self.done = 0
        self.total = parts * steps
        self.steps = steps
        self._began = perf_counter()
        self._started = 0
        self._said = ""

    def stage(self, text: str) -> None:
        """A part begins; the text is told if it is another one than before."""
        self._started = self.done
        if text != self._said:
            self._said = text
            self.progress.stage(text)
        self.progress.count(self.done, self.total)

    def step(self) -> None:
        """Count one more evaluation."""
        self.done += 1
        self.total = max(self.total, self.done)
        self.progress.count(self.done, self.total)

    def seconds(self) -> float:
        """Seconds since the first part began."""
        return perf_counter() - self._began

    def end(self) -> None:
        """The part is over; steps that it did not need are no longer to come."""
        self.total -= max(self.steps - (self.done - self._started), 0)
        self.progress.count(self.done, max(self.total, self.done))
