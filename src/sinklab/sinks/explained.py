"""Semantic or positional: how much of where attention lands is explained by what a token is, and how much by where."""

# C classes, P positions
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .frequency import coded


@dataclass(frozen=True)
class Explained:
    """Shares of the variance of received attention over places (sample, step, position). Samples add up.

    The shares are adjusted R^2: of pure noise none is explained, however many positions there are; they can fall a
    little below 0 then. NaN where attention does not vary or there are too few places.
    """

    labels: tuple[str, ...]
    """classes, in the order of the rows"""
    count_CP: np.ndarray
    """(class, position) number of places"""
    total_CP: np.ndarray
    """(class, position) sum of what they receive"""
    squares: float
    """sum of the squares"""

    @property
    def places(self) -> int:
        """Number of places."""
        return int(self.count_CP.sum())

    @property
    def by_class(self) -> float:
        """Share explained by the class of the token alone: the semantic score."""
        return self._adjusted(_between(self.count_CP.sum(1), self.total_CP.sum(1)), (self.count_CP.sum(1) > 0).sum())

    @property
    def by_position(self) -> float:
        """Share explained by the position alone: the positional score."""
        return self._adjusted(_between(self.count_CP.sum(0), self.total_CP.sum(0)), (self.count_CP.sum(0) > 0).sum())

    @property
    def by_both(self) -> float:
        """Share explained by an effect of the class plus an effect of the position."""
        return self._adjusted(*self._additive)

    @property
    def unique_class(self) -> float:
        """What the class explains beyond the position."""
        return self.by_both - self.by_position

    @property
    def unique_position(self) -> float:
        """What the position explains beyond the class."""
        return self.by_both - self.by_class

    @property
    def shared(self) -> float:
        """What either explains, because certain tokens stand at certain positions."""
        return self.by_class + self.by_position - self.by_both

    @cached_property
    def _additive(self) -> tuple[float, int]:
        """Sum of squares and number of parameters of the least-squares fit class + position."""
        here_P = self.count_CP.sum(0) > 0
        count_CP, total_CP = self.count_CP[:, here_P].astype(float), self.total_CP[:, here_P]
        count_P, total_P = count_CP.sum(0), total_CP.sum(0)
        # Normal equations with the positions eliminated: as small as the number of classes.
        left_CC = np.diag(count_CP.sum(1)) - (count_CP / count_P) @ count_CP.T
        right_C = total_CP.sum(1) - (count_CP / count_P) @ total_P
        rank = int(np.linalg.matrix_rank(left_CC, hermitian=True))
        beyond = float(right_C @ (np.linalg.pinv(left_CC, rcond=1e-9, hermitian=True) @ right_C))
        return _between(count_P, total_P) + beyond, int(here_P.sum()) + rank

    def _adjusted(self, between: float, parameters: int) -> float:
        places = self.places
        spread = self.squares - self.total_CP.sum() ** 2 / places if places else 0.0
        if spread <= 1e-12 * self.squares or places <= parameters:
            return float("nan")
        return float(1 - (1 - between / spread) * (places - 1) / (places - parameters))

    def __add__(self, other: Explained) -> Explained:
        labels = tuple(sorted({*self.labels, *other.labels}))
        width = max(self.count_CP.shape[1], other.count_CP.shape[1])
        count_CP, total_CP = np.zeros((len(labels), width), dtype=np.int64), np.zeros((len(labels), width))
        for part in (self, other):
            rows = [labels.index(label) for label in part.labels]
            count_CP[rows, : part.count_CP.shape[1]] += part.count_CP
            total_CP[rows, : part.total_CP.shape[1]] += part.total_CP
        return Explained(labels, count_CP, total_CP, self.squares + other.squares)


def _between(count: np.ndarray, total: np.ndarray) -> float:
    """Sum of squares between groups of these sizes and sums."""
    here = count > 0
    return float((total[here] ** 2 / count[here]).sum() - total.sum() ** 2 / max(count.sum(), 1))


def explained_mass(received: Any, classes: Any, positions: Any = None) -> Explained:
    """How much of the variance of received attention the classes and the positions of tokens explain.

    Every place (sample, step, position) is one observation. With y what it receives, the share explained by a grouping
    is the sum of squares between the groups over the whole one (R^2), adjusted for the number of groups; "both" is the
    fit of an effect per class plus one per position, so that what is unique to each can be told apart.

    Args:
        received: (..., position) what each place receives: share or score, mean over heads (and layers), or numbers of
            sink events. Added sink columns left out. NaN where there is no place.
        classes: labels of the same shape (``token_classes``), None where there is no place.
        positions: whole numbers of at least 0, broadcastable to received; None: the place on the last axis. Any other
            notion of position will do, such as the distance to the rightmost masked position.

    Time O(places + classes^2 positions). Raises ValueError when shapes differ or no place is left.
    """
    y, names = np.asarray(received, dtype=float), np.asarray(classes, dtype=object)
    if y.ndim < 1 or y.shape != names.shape:
        raise ValueError(f"One class per place: received has shape {y.shape}, classes {names.shape}.")
    where = np.arange(y.shape[-1]) if positions is None else np.asarray(positions)
    if not np.issubdtype(where.dtype, np.integer) or where.min(initial=0) < 0:
        raise ValueError(f"positions are whole numbers of at least 0: got {where.dtype} from {where.min(initial=0)}.")
    where = np.broadcast_to(where, y.shape)
    here = np.isfinite(y) & (names != None)  # noqa: E711 - elementwise
    if not here.any():
        raise ValueError("explained_mass needs at least one place that holds a token and a finite number: got none.")
    y, where = y[here], where[here]
    labels, row = coded(names[here])
    width = int(where.max()) + 1
    cell = row * width + where
    shape = (len(labels), width)
    count_CP = np.bincount(cell, minlength=len(labels) * width).reshape(shape)
    total_CP = np.bincount(cell, weights=y, minlength=len(labels) * width).reshape(shape)
    return Explained(tuple(labels), count_CP, total_CP, float((y**2).sum()))
