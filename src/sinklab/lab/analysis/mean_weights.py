"""Mean weights of keys, and the main sink, which has the greatest."""

# "..." stands for any axes in front of the key axis
from typing import Any

import numpy as np

from sinklab.core.sinks.normalize import Array, fitted, is_defined, namespace, widened


def mean_weight(received: Any, visible: Any) -> Any:
    """w_j (..., key): the mean weight that a key gets from the queries that may see it; NaN if it
    is not defined.

    Of a causal map it is the alpha of Gu et al. (2410.10781, 3.2), and if all queries see every key
    the column mean of Rulli et al.; see `is_defined` for the keys that have none.
    """
    xp = namespace(received)
    a = widened(received, xp)
    seen = fitted(widened(visible, xp), a, xp, "visible")
    nothing = xp.zeros_like(seen) + float("nan")
    return a / xp.where(is_defined(seen), seen, nothing)


def main_sink(received: Array, visible: Any = None) -> Array:
    """Index of the strongest key, over the last axis (..., key) -> (...); -1 if no key is defined.

    The strongest key has the greatest mean weight (`mean_weight`); without ``visible`` all queries
    see every key, and it is the one that receives most. numpy array or torch tensor, the same kind
    out; ties go to the earlier key. A copy of ``received`` or two. Raises ValueError when there is
    no key.
    """
    xp = namespace(received)
    a: Any
    if visible is None:
        a = widened(received, xp)
    else:
        a = mean_weight(received, visible)
    if a.shape[-1] == 0:
        raise ValueError(f"main_sink needs at least one key: received has shape {tuple(a.shape)}.")
    position = a.argmax(-1)
    if xp is np and not np.isnan(np.take_along_axis(a, position[..., None], -1)).any():
        # argmax stops at NaN, so there is none
        return position
    absent = xp.isnan(a)
    position = xp.where(absent, xp.zeros_like(a) - float("inf"), a).argmax(-1)
    return xp.where(absent.all(-1), xp.zeros_like(position) - 1, position)
