"""What those who run attention and those who watch it (`sinklab.probing`) tell each other, without knowing each other.

Whether calls made now are meant to be seen, whether somebody watches, and which canvas is being evaluated.
"""

# B batch rows, S canvas positions, Q queries
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

_OBSERVED: ContextVar[bool] = ContextVar("sinklab_attention_observed", default=True)
_RUNNING: ContextVar[RunningCanvas | None] = ContextVar("sinklab_attention_running", default=None)
# A count and not a context variable: a tap's hooks hang on the model, whatever thread runs it.
_LOCK = threading.Lock()
_watchers = 0


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide the attention calls made inside the block from every trace and intervention.

    A sink prefix is run through the layers alone to get its keys and values: that pass is bookkeeping of the model, not
    a step of the text, and editing or recording it would be wrong.
    """
    token = _OBSERVED.set(False)
    try:
        yield
    finally:
        _OBSERVED.reset(token)


def is_observed() -> bool:
    """Whether an attention call made now is to be seen: False inside `unobserved()`."""
    return _OBSERVED.get()


@contextmanager
def watching() -> Iterator[None]:
    """Say that somebody reads attention calls: while the block lasts, nobody may take a short cut around them.

    A decoder that leaves out queries it does not need, or module calls that hooks would see, asks `is_watched()` first.
    Blocks may overlap in any order, and in several threads.
    """
    global _watchers
    with _LOCK:
        _watchers += 1
    try:
        yield
    finally:
        with _LOCK:
            _watchers -= 1


def is_watched() -> bool:
    """Whether some `watching()` block is open."""
    return _watchers > 0


@dataclass(frozen=True, eq=False)
class RunningCanvas:
    """The canvas that a denoiser is evaluating now."""

    ids_BS: Tensor
    """Token ids of the whole canvas, as the model reads them."""
    columns: slice | Tensor | None
    """The canvas positions whose queries run, in the order of the queries: a slice, int64 (Q,), or None for all."""


@contextmanager
def running(ids_BS: Tensor, columns: slice | Tensor | None = None) -> Iterator[None]:
    """Say that the model calls inside the block evaluate this canvas, and which of its columns become queries.

    Under a cache a model is handed the states of some columns: nothing in its arguments says which they are.
    """
    token = _RUNNING.set(RunningCanvas(ids_BS, columns))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_canvas() -> RunningCanvas | None:
    """The canvas of the innermost `running(…)` block; None where no denoiser has announced one.

    Ask inside an attention call that is watched: a denoiser need not announce what nobody can hear of.
    """
    return _RUNNING.get()
