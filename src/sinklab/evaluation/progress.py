"""How far a study is: stages in words, evaluations in numbers."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Told how far a long run is; this one says nothing. The command line draws a bar with the time left."""

    def stage(self, text: str) -> None:
        """A new stage begins."""

    def count(self, done: int, total: int) -> None:
        """So many model evaluations of so many are done; the total may shrink where a text ends early."""


class _Words(Progress):
    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def stage(self, text: str) -> None:
        self._say(text)


def as_progress(given: Progress | Callable[[str], object] | None) -> Progress:
    """`given` as a Progress; a function is called with the text of each stage."""
    if given is None:
        return Progress()
    return given if isinstance(given, Progress) else _Words(given)


class Meter:
    """Counts the evaluations of a study that writes several texts of at most so many steps."""

    def __init__(self, progress: Progress, texts: int, steps: int) -> None:
        self.progress, self.done, self.total, self.steps = progress, 0, texts * steps, steps
        self._begun = 0

    def stage(self, text: str) -> None:
        """A text begins."""
        self._begun = self.done
        self.progress.stage(text)
        self.progress.count(self.done, self.total)

    def step(self) -> None:
        """One more evaluation."""
        self.done += 1
        self.total = max(self.total, self.done)
        self.progress.count(self.done, self.total)

    def end(self) -> None:
        """The text is over; steps that it did not need are no longer to come."""
        self.total -= max(self.steps - (self.done - self._begun), 0)
        self.progress.count(self.done, max(self.total, self.done))
