"""What a command would take: evaluations, time and memory, estimated from a model's size and the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

from sinklab.studies.processes import Amount

SMALL_PRODUCTS, WATCHED = 150, 600
"""Of a layer, whatever its size: what a small model's forward takes, and one under all statistics of a trace."""
EXTRA = 2.0
"""What a forward takes beside its products: attention, an edit, the loop around it."""
START = 1.0
"""Seconds for weights to be read and folders to be written."""


@cache
def machine_speed(dtype: str, device: str) -> tuple[float, float]:
    """Floating point operations a second in a product of matrices, and the seconds of a product that has almost none.

    Args:
        dtype: of torch.
        device: of torch.
    """
    import torch

    def best(rows: int, width: int) -> float:
        left, right = (torch.ones(size, width, dtype=getattr(torch, dtype), device=device) for size in (rows, width))
        taken = []
        for _ in range(4):
            started = time.perf_counter()
            (left @ right).sum().item()
            taken.append(time.perf_counter() - started)
        return min(taken)

    least, rows, width = best(1, 8), 256, 1024
    return 2 * rows * width**2 / max(best(rows, width) - least, 1e-6), least


def plan_of(
    amount: Callable[[Any, Any], Amount | None], settings: Any, model: str, reading: Any, *, trained: str = ""
) -> str:
    """One line: what is evaluated, how long it may take, and how much memory.

    Args:
        amount: as `Study.amount`.
        settings: of the run.
        model: whose config is read, and no weights; "" for none.
        reading: how its weights will be loaded (`Reading`).
        trained: type that a model is trained in.

    Raises:
        ValueError: where there is no such model.
    """
    from sinklab.checkpoints.info import describe
    from sinklab.checkpoints.materialize import usable_device, weight_type
    from sinklab.studies.twins import LITTLE

    # of packaged adapters on a base that was given, the base has the size
    info = describe(reading.base or model, revision=reading.revision) if model else None
    found = amount(settings, info)
    where = f" on {info.name}" if info else ""
    if found is None:
        return f"plan: how much {where.lstrip() or 'this'} takes is not known beforehand"
    device = reading.device or "cpu"
    usable_device(device)
    loaded = weight_type(reading.dtype, {"dtype": info.stored if info else None}, {"": device})
    dtype = "bfloat16" if "16" in (trained or str(loaded)) else "float32"
    active, layers = (info.active_parameters, info.layers) if info else (found.parameters or 0, found.layers)
    speed, least = machine_speed(dtype, device)
    # a backward pass is two forward ones
    passes, bytes_each = (3, 16) if found.trains else (EXTRA, {"bfloat16": 2, "float32": 4}[dtype])
    small = WATCHED if found.is_watched else SMALL_PRODUCTS
    seconds = found.evaluations * (passes * 2 * active * found.positions / speed + layers * small * least)
    seconds *= 3 if found.twins or (found.twins is None and 2 * seconds < LITTLE) else 1
    seconds += START
    size = (info.parameters if info else active) * bytes_each
    size += info.canvas_bytes(dtype, found.positions) if info else 0
    apart = ", activations not counted," if found.trains else ""
    return (
        f"plan: {found.words}{where}, {found.evaluations:,} evaluations of {found.positions:,} positions: about "
        f"{duration(seconds)} and {_rounded(size / 1e9)} GB{apart} on {device} (estimated)"
    )


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them, with two digits."""
    unit, size = next((one for one in (("h", 3600), ("min", 60)) if seconds >= 2 * one[1]), ("s", 1))
    return f"{_rounded(max(seconds / size, 0.1))} {unit}"


def _rounded(number: float) -> str:
    # two digits of 100 and more would be written with an exponent
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"
