"""Plan of a command: evaluations, time and memory, estimated from a model's size and the machine's
speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sinklab.lab.studies.processes import Amount

BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a number of this type."""
SMALL_PRODUCTS = 150
WATCHED = 600
"""Number of small products that a layer takes whatever its size: in a small model's forward, and in
one under all statistics of a trace.
"""
EXTRA = 2.0
"""Factor for work of a forward beside its products: attention, an edit, the loop around it."""
START = 2.0
PREPARING = 10.0
"""Seconds for weights to be read, folders to be written and figures to be drawn; and of a training,
for its text.
"""
PROBE = 0.05
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
    from sinklab.lab.studies.scored import LITTLE

    if twins or (twins is None and 2 * seconds < LITTLE):
        return 3 * seconds
    return seconds


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

    how: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    threads = {torch.get_num_threads()}
    if device == "cpu":
        threads.add(1)
    seconds = []
    for height, size in ((1, 8), (rows, width)):
        left = torch.ones(height, size, **how)
        right = torch.ones(size, size, **how)
        work = "(left @ right).sum().item()"
        seconds.append(min(_typical(work, count, left=left, right=right) for count in threads))
    least, whole = seconds
    return 2 * rows * width**2 / max(whole - least, 1e-6), least


@cache
def memory_speed(device: str) -> float:
    """Bytes a second that are read from memory, as the weights of a model are at every
    evaluation.
    """
    import torch

    numbers = torch.ones(1 << 24, device=device)
    work = "numbers.sum().item()"
    return 4 * len(numbers) / _typical(work, torch.get_num_threads(), numbers=numbers)


def _typical(work: str, threads: int, **named: Any) -> float:
    """Seconds that this work on tensors takes, the median over `PROBE` seconds."""
    from torch.utils.benchmark import Timer

    timer = Timer(work, globals=named, num_threads=threads)
    return timer.blocked_autorange(min_run_time=PROBE).median


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
    info = None
    where = "this"
    if model:
        info = describe(reading.base or model, revision=reading.revision)
        where = f"on {model}"
    found = amount(settings, info)
    if found is None:
        return Plan(f"plan: how much {where} takes is not known beforehand")
    device = reading.device or "cpu"
    usable_device(device)
    loaded = weight_type(reading.dtype, {"dtype": info and info.stored}, {"": device})
    dtype = "float32"
    if "16" in (trained or str(loaded)):
        dtype = "bfloat16"
    bytes_each = BYTES[dtype]
    apart = ""
    if found.trains:
        # weights, gradients and two averages of them
        bytes_each = 16
        apart = ", activations not counted,"
    words = found.words
    active = found.parameters or 0
    layers = found.layers
    hidden = 1024
    size = active * bytes_each
    if info is not None:
        words = f"{words} {where}"
        active = info.active_parameters
        layers = info.layers
        hidden = info.hidden
        size = info.parameters * bytes_each + info.canvas_bytes(dtype, found.positions)
    speed, least = machine_speed(dtype, device, min(found.positions, 1024), hidden)
    factor = EXTRA
    if found.trains:
        # a backward pass is two forward ones
        factor = 3
    small = SMALL_PRODUCTS
    if found.is_watched:
        small = WATCHED
    # its products, or reading the weights if that takes longer, and the overhead of each layer
    products = factor * 2 * active * found.positions / speed
    one = max(products, active * BYTES[dtype] / memory_speed(device)) + layers * small * least
    seconds = START + PREPARING * found.trains + _with_twins(found.evaluations * one, found.twins)
    line = (
        f"plan: {words}, {found.evaluations:,} evaluations of {found.positions:,} positions: about "
        f"{duration(seconds)} and {_rounded(size / 1e9)} GB{apart} on {device} (estimated)"
    )
    return Plan(line, seconds, found.first, found.twins)


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them, with two digits."""
    unit, size = next(
        (one for one in (("h", 3600), ("min", 60)) if seconds >= 2 * one[1]), ("s", 1)
    )
    return f"{_rounded(max(seconds / size, 0.1))} {unit}"


def _rounded(number: float) -> str:
    # two digits of 100 and more would be written with an exponent
    if number < 99.5:
        return f"{number:.2g}"
    return f"{number:,.0f}"
