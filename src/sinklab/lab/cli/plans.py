"""Plan of a command: evaluations, time and memory, estimated from a model's size and the machine's
speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from sinklab.lab.studies.processes import Amount

SMALL_PRODUCTS, WATCHED = 150, 600
"""Number of small products that a layer takes whatever its size: in a small model's forward, and in
one under all statistics of a trace.
"""
EXTRA = 2.0
"""Factor for work of a forward beside its products: attention, an edit, the loop around it."""
START, PREPARING = 2.0, 10.0
"""Seconds for weights to be read, folders to be written and figures to be drawn; and of a training,
for its text.
"""
PROBE = 0.15
"""Seconds for which each speed of the machine is measured: others may work on it too."""


@dataclass(frozen=True)
class Plan:
    """Plan of a command."""

    line: str
    """Text for a reader."""
    seconds: float = 0.0
    """Seconds in all; 0 if not known beforehand."""
    first: float = 1.0
    """The share of its evaluations in the pass that is counted first; see `Amount.first`."""
    twins: bool | None = False
    """Untrained controls, see `Amount.twins`."""

    def of_a_pass(self, seconds: float) -> float:
        """Seconds of the whole run, if the first counted pass takes so many seconds."""
        return _with_twins(seconds / self.first, self.twins)


def together(plans: Sequence[Plan], words: str) -> Plan:
    """One plan of several parts, the first of which is counted first."""
    seconds = sum(plan.seconds for plan in plans)
    first = plans[0].first * plans[0].seconds / seconds
    return Plan(f"plan: {words}: about {duration(seconds)} (estimated)", seconds, first)


def _with_twins(seconds: float, twins: bool | None) -> float:
    """Seconds including those of two controls, which are made if they are asked for, or take
    little.
    """
    from sinklab.lab.studies.twins import LITTLE

    return 3 * seconds if twins or (twins is None and 2 * seconds < LITTLE) else seconds


@cache
def machine_speed(
    dtype: str, device: str, rows: int = 256, width: int = 1024
) -> tuple[float, float]:
    """Floating point operations a second in a product of matrices, and the seconds of a product
    that has almost none.

    Medians over a moment, not the best of it: the share of the machine that others take now they
    will take from a run too. Not means: one product that waits for its turn would count for a
    hundred. Of all threads and one, whichever is faster: if others work too, threads of a small
    product wait for one another longer than they compute.

    Args:
        dtype: of torch.
        device: of torch.
        rows: of the left matrix; those that a model runs at once.
        width: of both; its hidden size.
    """
    import torch

    def typical(rows: int, width: int) -> float:
        left, right = (
            torch.ones(size, width, dtype=getattr(torch, dtype), device=device)
            for size in (rows, width)
        )
        times = [_typical(lambda: (left @ right).sum().item())]
        threads = torch.get_num_threads()
        if threads > 1 and device == "cpu":
            torch.set_num_threads(1)
            times.append(_typical(lambda: (left @ right).sum().item()))
            torch.set_num_threads(threads)
        return min(times)

    least = typical(1, 8)
    return 2 * rows * width**2 / max(typical(rows, width) - least, 1e-6), least


def _typical(work: Callable[[], object]) -> float:
    """Seconds that this work takes, the median over `PROBE` seconds."""
    # the first time makes ready what the others find
    work()
    taken: list[float] = []
    while not taken or sum(taken) < PROBE:
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return median(taken)


@cache
def memory_speed(device: str) -> float:
    """Bytes a second that are read from memory, as the weights of a model are at every
    evaluation.
    """
    import torch

    numbers = torch.ones(1 << 24, device=device)
    return 4 * len(numbers) / _typical(lambda: numbers.sum().item())


def plan_of(
    amount: Callable[[Any, Any], Amount | None],
    settings: Any,
    model: str,
    reading: Any,
    *,
    trained: str = "",
) -> str:
    """The line of `plan_for`."""
    return plan_for(amount, settings, model, reading, trained=trained).line


def plan_for(
    amount: Callable[[Any, Any], Amount | None],
    settings: Any,
    model: str,
    reading: Any,
    *,
    trained: str = "",
) -> Plan:
    """Plan of the evaluations, their time, and the memory.

    Args:
        amount: as `Study.amount`.
        settings: of the run.
        model: only its config is read, no weights; "" for none.
        reading: how its weights will be loaded (`Reading`).
        trained: type that a model is trained in.

    Raises:
        ValueError: if there is no such model.
    """
    from sinklab.lab.checkpoints.info import describe
    from sinklab.lab.checkpoints.materialize import usable_device, weight_type

    # of packaged adapters on a base that was given, the base has the size
    info = describe(reading.base or model, revision=reading.revision) if model else None
    found = amount(settings, info)
    where = f" on {info.name}" if info else ""
    if found is None:
        return Plan(f"plan: how much {where.lstrip() or 'this'} takes is not known beforehand")
    device = reading.device or "cpu"
    usable_device(device)
    loaded = weight_type(reading.dtype, {"dtype": info.stored if info else None}, {"": device})
    dtype = "bfloat16" if "16" in (trained or str(loaded)) else "float32"
    bytes_each = {"bfloat16": 2, "float32": 4}[dtype]
    active, layers = (
        (info.active_parameters, info.layers) if info else (found.parameters or 0, found.layers)
    )
    one = _seconds_of_one(found, active, layers, dtype, device, info.hidden if info else 1024)
    seconds = START + PREPARING * found.trains + _with_twins(found.evaluations * one, found.twins)
    size = (info.parameters if info else active) * (16 if found.trains else bytes_each)
    size += info.canvas_bytes(dtype, found.positions) if info else 0
    apart = ", activations not counted," if found.trains else ""
    line = (
        f"plan: {found.words}{where}, {found.evaluations:,} evaluations of {found.positions:,} "
        "positions: about "
        f"{duration(seconds)} and {_rounded(size / 1e9)} GB{apart} on {device} (estimated)"
    )
    return Plan(line, seconds, found.first, found.twins)


def _seconds_of_one(
    found: Amount, active: int, layers: int, dtype: str, device: str, hidden: int
) -> float:
    """Seconds of an evaluation: its products, or reading the weights if that takes longer, and the
    overhead of each layer.
    """
    speed, least = machine_speed(dtype, device, min(found.positions, 1024), hidden)
    # a backward pass is two forward ones
    products = (3 if found.trains else EXTRA) * 2 * active * found.positions / speed
    reading = active * (2 if dtype == "bfloat16" else 4) / memory_speed(device)
    small = WATCHED if found.is_watched else SMALL_PRODUCTS
    return max(products, reading) + layers * small * least


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them, with two digits."""
    unit, size = next(
        (one for one in (("h", 3600), ("min", 60)) if seconds >= 2 * one[1]), ("s", 1)
    )
    return f"{_rounded(max(seconds / size, 0.1))} {unit}"


def _rounded(number: float) -> str:
    # two digits of 100 and more would be written with an exponent
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"
