"""Received attention in multiples of an even share, and keys that can be judged."""

# S keys; "..." stands for any axes in front of the key axis
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

Array = TypeVar("Array")
LAST = int(np.finfo(np.float16).max.view(np.uint16))
"""the bits of the greatest number of half precision; with more it is below 0, infinite or NaN"""


def namespace(array: Any) -> ModuleType:
    """numpy, or torch for a tensor: the functions used here have the same names in both."""
    if type(array).__module__.startswith("torch"):
        import torch

        return torch
    return np


def widened(array: Any, xp: ModuleType = np) -> Any:
    """``array`` in at least single precision: sums of float16 overflow. With xp = numpy a tensor
    becomes an array.
    """
    own = namespace(array)
    if own is np and xp is np:
        array = np.asarray(array)
        if array.dtype == np.float16:
            codes = array.view(np.uint16)
            if codes.max(initial=0) > LAST:
                return array.astype(np.float32)
            # The bits in their places give the number up to a power of two, in half of the time.
            bits = np.asarray(np.multiply(codes, 1 << 13, dtype=np.uint32)).view(np.float32)
            bits *= np.float32(2.0**112)
            return bits
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float32)
        return array
    import torch

    array = torch.as_tensor(array).detach()
    if array.dtype not in (torch.float32, torch.float64):
        array = array.float()
    if xp is np:
        return array.cpu().numpy()
    return array


def even_share(received: Array, visible: Any = None, positions: Any = None) -> tuple[Array, Any]:
    """(received, visible) scaled as if every position had run as a query, so that an even share is
    1 at every step.

    Under a cache, and in token by token decoding, only some positions run as queries; column sums
    are then small for want of queries, not of attention. Both counts are multiplied by positions /
    queries that ran; the queries that ran are the most that see any one key. The mean weight
    received / visible does not change.

    Args:
        received: (..., key) column sums a_j, numpy or torch (the same kind out, half precision
            widened).
        visible: number of queries that see each key, broadcastable to ``received``; None: all of
            them see every key, and all are ``positions`` or, without it, the keys that are not NaN.
        positions: number of canvas positions, broadcastable to ``received`` without its key axis;
            None: no scaling.

    Returns received of its own shape and visible broadcastable to it. Costs one copy of received
    when anything is scaled and none otherwise. Raises ValueError when the shapes do not fit.
    """
    xp = namespace(received)
    a = widened(received, xp)
    count: Any = None
    if positions is not None:
        count = fitted(widened(positions, xp)[..., None], a, xp, "positions")
    elif visible is None:
        count = (~xp.isnan(a)).sum(-1)[..., None] + xp.zeros_like(a[..., :1])
    if visible is None:
        return a, count
    seen = fitted(widened(visible, xp), a, xp, "visible")
    if count is None:
        return a, seen
    ran = xp.amax(xp.nan_to_num(seen), -1)[..., None]
    here = (ran > 0) & (count > 0)
    factor = xp.where(here, count, xp.ones_like(count)) / xp.where(here, ran, xp.ones_like(ran))
    # On a GPU the question waits for the device, which costs more than to multiply by one.
    if xp is np and bool((factor == 1).all()):
        return a, seen
    return a * factor, seen * factor


def fitted(array: Any, a: Any, xp: ModuleType, name: str) -> Any:
    """``array`` in the dtype and on the device of ``a``. Raises ValueError unless it broadcasts to
    it.
    """
    if xp is not np:
        array = array.to(a.device, a.dtype)
    elif array.dtype != a.dtype and a.dtype in (np.float32, np.float64):
        array = array.astype(a.dtype)
    shape = tuple(array.shape)
    whole = tuple(a.shape)
    with suppress(ValueError):
        if np.broadcast_shapes(shape, whole) == whole:
            return array
    if name == "positions":
        raise ValueError(
            f"positions must broadcast to received without its key axis: shapes {shape[:-1]} and "
            f"{whole[:-1]}. Insert the missing axes, for example positions[:, None, None]."
        )
    raise ValueError(
        f"{name} must broadcast to received: shapes {shape} and {whole}. Insert the missing axes, "
        f"for example {name}[:, :, None, None]."
    )


LEAST_QUERIES = 8
"""fewer queries than these say nothing about a key that others than they do not see"""
UNSEEN = 1e-12
"""queries of a key that none sees, to avoid division by 0"""
SINGLE_ROW = 3.0
"""the epsilon of the published figures: a key that fewer than S / epsilon queries see could be a
sink by one row
"""


def differently_seen(visible: Any) -> Any:
    """Whether the keys of a row are seen by different numbers of queries, boolean (..., 1); unseen
    keys apart.
    """
    xp = namespace(visible)
    seen = xp.nan_to_num(visible)
    most = xp.amax(seen, -1)[..., None]
    return ((seen > UNSEEN) & (seen < most)).any(-1)[..., None]


def is_defined(visible: Any) -> Any:
    """Keys (..., key) that enough queries see to be judged.

    If all keys of a row are seen by the same queries, all of them are. If not (a causal mask), a
    key takes at least max(8, S / 3) queries, S being the most that see any key: of fewer, one row
    that gives all of its weight away could make it a sink (epsilon = 3).
    """
    xp = namespace(visible)
    seen = xp.nan_to_num(visible)
    least = (xp.amax(seen, -1)[..., None] / SINGLE_ROW).clip(LEAST_QUERIES)
    return (seen > UNSEEN) & (~differently_seen(visible) | (seen >= least))


def even_weight(visible: Any) -> Any:
    """e_j (..., key): the weight that a key would get from the queries that may see it if each
    weighed all keys alike.

    It is the mean of 1 / (keys that the query sees) over these queries, and 1 / S if S queries see
    every key. The counts alone tell it if keys are seen from some query on, as under a causal or
    block-causal mask: there the q-th query from the end sees the keys that at least q queries see.
    A sliding window is not such a mask. NaN if no query sees the key.
    """
    xp = namespace(visible)
    seen = xp.nan_to_num(visible)
    order = xp.argsort(seen)
    place = xp.argsort(order)
    if xp is np:
        take = np.take_along_axis
    else:
        take = xp.take_along_dim
    rising = take(seen, order, -1)
    steps = xp.diff(rising, 1, -1, rising[..., :1] * 0)
    numbers = xp.arange(seen.shape[-1], 0, -1, device=seen.device)
    total = take((steps / numbers).cumsum(-1), place, -1)
    divisor = xp.where(seen > UNSEEN, seen, xp.zeros_like(seen) + float("nan"))
    return xp.where(differently_seen(visible), total, xp.ones_like(seen)) / divisor


def only(exists: Any, a: Array, other: float = 0.0) -> Array:
    """``a`` if ``exists``, else ``other``; in numpy ``a`` itself, no copy, if everything exists."""
    xp = namespace(a)
    if xp is np and exists.all():
        return a
    return xp.where(exists, a, xp.zeros_like(a) + other)
