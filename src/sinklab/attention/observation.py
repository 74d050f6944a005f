"""Whether attention calls made now are meant to be seen by taps (`sinklab.probing`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OBSERVED: ContextVar[bool] = ContextVar("sinklab_attention_observed", default=True)


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
