"""Whether attention calls made now are meant to be seen by taps (`sinklab.probing`), and whether a tap is there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OBSERVED: ContextVar[bool] = ContextVar("sinklab_attention_observed", default=True)
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
