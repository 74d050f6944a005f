"""Where the greatest sink is."""

from __future__ import annotations

from typing import Any

from .scale import Array, namespace, widened


def main_sink(received: Array) -> Array:
    """Index of the key that receives most, over the last axis (..., key) -> (...); -1 where every key is NaN.

    numpy array or torch tensor, the same kind out; ties go to the earlier key. One copy of ``received``.
    Raises ValueError when there is no key.
    """
    xp = namespace(received)
    a: Any = widened(received, xp)
    if a.shape[-1] == 0:
        raise ValueError(f"main_sink needs at least one key: received has shape {tuple(a.shape)}.")
    absent = xp.isnan(a)
    position = xp.where(absent, xp.zeros_like(a) - float("inf"), a).argmax(-1)
    return xp.where(absent.all(-1), xp.zeros_like(position) - 1, position)
