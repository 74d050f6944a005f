"""Where the greatest sink is, and how it moves over denoising steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .rules import namespace, widened

Array = TypeVar("Array")


def main_sink(received: Array) -> Array:
    """Index of the key that receives most, over the last axis (..., key) -> (...); -1 where every key is NaN."""
    xp = namespace(received)
    a: Any = widened(received, xp)
    if a.shape[-1] == 0:
        raise ValueError(f"main_sink needs at least one key: received has shape {tuple(a.shape)}.")
    absent = xp.isnan(a)
    position = xp.where(absent, xp.zeros_like(a) - float("inf"), a).argmax(-1)
    return xp.where(absent.all(-1), xp.zeros_like(position) - 1, position)


@dataclass(frozen=True)
class Trajectories:
    """Paths of the main sink. Leading axes (samples, if any) are kept in front."""

    position: Any
    """(..., step, layer, head) key of the main sink, -1 where the step does not exist"""
    moves: Any
    """(..., layer, head) number of steps at which the main sink is elsewhere than one step before"""
    transitions: Any
    """(..., layer, head) number of pairs of successive steps: the most that ``moves`` can be"""
    longest_stay: Any
    """(..., layer, head) longest run of successive steps at one position"""
    drift: Any
    """(..., layer, head) least-squares slope in positions per step; NaN with fewer than two steps"""


def trajectories(received: Array) -> Trajectories:
    """Paths of the main sink of ``received`` (..., step, layer, head, key), numpy or torch (the same kind out).

    Steps whose keys are all NaN do not exist and are passed over. Raises ValueError for fewer than four axes.
    """
    shape = tuple(received.shape)  # type: ignore[attr-defined]
    if len(shape) < 4:
        raise ValueError(f"trajectories needs (..., step, layer, head, key): got shape {shape}.")
    found: Any = main_sink(received)
    position = np.asarray(found.cpu() if hasattr(found, "cpu") else found)
    steps_first = np.moveaxis(position, -3, 0)
    exists = steps_first >= 0
    pairs = exists[1:] & exists[:-1]
    moved = pairs & (steps_first[1:] != steps_first[:-1])
    fields = {
        "position": position,
        "moves": moved.sum(0),
        "transitions": pairs.sum(0),
        "longest_stay": _longest_stay(exists, moved),
        "drift": _slope(steps_first, exists),
    }
    if namespace(received) is not np:
        import torch

        fields = {name: torch.from_numpy(np.array(value)) for name, value in fields.items()}
    return Trajectories(**fields)


def _longest_stay(exists: np.ndarray, moved: np.ndarray) -> np.ndarray:
    stay = exists[:1].sum(0)
    longest = stay.copy()
    for here, change in zip(exists[1:], moved, strict=True):
        stay = np.where(here, np.where(change, 1, stay + 1), 0)
        longest = np.maximum(longest, stay)
    return longest


def _slope(position: np.ndarray, exists: np.ndarray) -> np.ndarray:
    weight = exists.astype(float)
    count = weight.sum(0)
    step = np.arange(len(position), dtype=float).reshape(-1, *[1] * (position.ndim - 1))
    safe = np.maximum(count, 1)
    from_mean = (step - (step * weight).sum(0) / safe) * weight
    spread = (from_mean * step).sum(0)
    return np.where(count > 1, (from_mean * position).sum(0) / np.where(count > 1, spread, 1), np.nan)
