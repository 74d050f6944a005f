"""The progress of work in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        """`done` of `total` parts of the pass in work are done; less than before begins another
        pass.
        """

    def counter(self, total: int) -> Callable[[], None]:
        """A function to call after each of `total` evaluations."""
        numbers = iter(range(1, total + 1))
        self.count(0, total)
        return lambda: self.count(next(numbers, total), total)

    def within(self, first: int, size: int, total: int) -> Progress:
        """Progress of whoever makes `size` of `total` samples, from number `first` on: what it
        counts is a share of them.
        """
        return _Within(self, first, size, total)


@dataclass
class _Within(Progress):
    whole: Progress
    first: int
    size: int
    total: int

    def stage(self, text: str) -> None:
        self.whole.stage(text)

    def note(self, text: str) -> None:
        self.whole.note(text)

    def count(self, done: float, total: float) -> None:
        self.whole.count(self.first + self.size * done / total, self.total)


Audience = Progress | Callable[[str], object] | None
"""Progress to show, or a function that is called with the text of each stage."""


def as_progress(given: Audience) -> Progress:
    """`given` as a Progress: a function is called with the text of each stage; None says
    nothing.
    """
    if isinstance(given, Progress):
        return given
    return Progress(given or nothing)
