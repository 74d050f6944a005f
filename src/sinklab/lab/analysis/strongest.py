"""The strongest key of every head: its share of the attention, its position, and whether it
stays.
"""

# T steps, W windows of queries, L layers, H heads, K keys (added sinks first, then text positions),
# P paths of heads
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sinklab.lab.analysis.counts import ratio

STRONG = 0.3
"""mean attention weight above which a key is strong (Gu et al. 2410.10781, 3.2)"""


@dataclass(frozen=True)
class Strongest:
    """The strongest key of every head of one sample: the one with the greatest mean weight among
    the defined keys.
    """

    weight_TLH: np.ndarray
    """its mean weight over the queries that may see it, 0 to 1; NaN if no key is defined"""
    key_TLH: np.ndarray
    """its number, added sinks counted first; -1 if no key is defined"""
    added: int
    """added sink columns in front of the keys"""
    mobility_LH: np.ndarray
    """chance that at two steps it stands at different places; of an autoregressive model, in two
    windows of queries, among the keys that both see. NaN with fewer than two"""
    window_weight_LH: np.ndarray
    """of an autoregressive model the weight of a window's strongest key, mean over windows; NaN
    otherwise
    """

    @cached_property
    def weight_LH(self) -> np.ndarray:
        """Its mean weight, mean over steps; NaN if no key is ever defined."""
        here_TLH = ~np.isnan(self.weight_TLH)
        return ratio(np.where(here_TLH, self.weight_TLH, 0).sum(0, dtype=float), here_TLH.sum(0))

    @property
    def strong_LH(self) -> np.ndarray:
        """Whether the head has a strong key: a mean weight above `STRONG`, mean over steps."""
        return np.nan_to_num(self.weight_LH) > STRONG

    @property
    def counted_LH(self) -> np.ndarray:
        """Whether the mobility of the head counts: it has a strong key, be it another in every
        window of queries.
        """
        return self.strong_LH | (np.nan_to_num(self.window_weight_LH) > STRONG)

    @property
    def first_LH(self) -> np.ndarray:
        """Share of steps at which it is the first text token; NaN if no key is ever defined."""
        return ratio((self.key_TLH == self.added).sum(0), (self.key_TLH >= 0).sum(0))

    @property
    def strong_share(self) -> float:
        """Share of heads with a strong key."""
        return float(self.strong_LH.mean())

    @property
    def mobility_strong(self) -> float:
        """Mean of ``mobility_LH`` over the heads with a strong key (`counted_LH`); NaN without
        any.
        """
        return _mean(self.mobility_LH[self.counted_LH])


def strongest(
    key_TLH: Any,
    weight_TLH: Any,
    *,
    added: int = 0,
    mobility_LH: Any = None,
    windows_WLHK: Any = None,
) -> Strongest:
    """The strongest keys of one sample from their positions (-1: none) and their mean weights,
    (step, layer, head).

    Args:
        added: added sink columns in front of the keys.
        mobility_LH: mobility of a model with queries that see the whole canvas (`Motion.mobility`).
        windows_WLHK: of an autoregressive model the mean weights by window (see `window_mobility`),
            in its place. Without both, the chance that the keys of two steps differ.

    Raises:
        ValueError: when the shapes differ.
    """
    key, weight = np.asarray(key_TLH), np.asarray(weight_TLH)
    if key.ndim != 3 or key.shape != weight.shape:
        raise ValueError(
            f"strongest needs keys and weights (step, layer, head): got {key.shape} and "
            f"{weight.shape}."
        )
    window_weight_LH = np.full(key.shape[1:], np.nan)
    if windows_WLHK is not None:
        mobility_LH = window_mobility(windows_WLHK)
        # the first window sees a single key
        greatest_WLH = np.nan_to_num(np.fmax.reduce(windows_WLHK[1:], axis=-1))
        window_weight_LH = ratio(
            greatest_WLH.sum(0, dtype=float), np.full(key.shape[1:], len(greatest_WLH))
        )
    if mobility_LH is None:
        mobility_LH = chance_elsewhere(key, key >= 0)
    return Strongest(weight, key, added, np.asarray(mobility_LH), window_weight_LH)


def chance_elsewhere(key: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Chance (...) that at two of the steps ``here`` the keys (step, ...) differ; NaN with fewer
    than two.

    1 - sum over places of n (n - 1) / (N (N - 1)): the unbiased Gini-Simpson index of the places.
    """
    flat, flags = key.reshape(len(key), -1), here.reshape(len(key), -1)
    paths, keys = flat.shape[1], int(key.max(initial=0)) + 1
    cell = (np.arange(paths) * keys + np.maximum(flat, 0))[flags]
    visits = np.bincount(cell, minlength=paths * keys).reshape(paths, keys).astype(float)
    total = visits.sum(-1)
    same = (visits * (visits - 1)).sum(-1)
    pairs = np.where(total > 1, total * (total - 1), np.nan)
    return (1 - same / pairs).reshape(key.shape[1:])


def window_mobility(windows: Any) -> np.ndarray:
    """Chance (layer, head) that two windows of queries have their strongest keys at different
    places.

    A column sum keeps its old rows, so that the strongest key of all queries so far stands still by
    construction; disjoint windows share none. Of two windows only the keys that both see are
    compared, and a window that sees a single key is not counted. NaN with fewer than two windows
    that count.

    windows: (window, layer, head, key) mean weight that the queries of each window give the keys
    that all of them may see; NaN elsewhere.
    """
    weight_WPK = np.asarray(windows, dtype=np.float32)
    shape, keys = weight_WPK.shape[1:3], weight_WPK.shape[-1]
    weight_WPK = weight_WPK.reshape(len(weight_WPK), -1, keys)
    seen_W = (~np.isnan(weight_WPK)).any(1).sum(-1)
    weight_WPK = np.nan_to_num(weight_WPK, nan=-1.0)
    # the strongest of the first so many keys, for every number of them
    highest_WPK = np.maximum.accumulate(weight_WPK, axis=-1)
    before_WPK = np.concatenate(
        [np.full_like(highest_WPK[..., :1], -np.inf), highest_WPK[..., :-1]], axis=-1
    )
    rises_WPK = weight_WPK > before_WPK
    leader_WPK = np.maximum.accumulate(np.where(rises_WPK, np.arange(keys), 0), axis=-1)
    counts = [window for window, seen in enumerate(seen_W.tolist()) if seen > 1]
    differ_P, pairs = np.zeros(weight_WPK.shape[1]), 0
    for place, window in enumerate(counts):
        last = seen_W[window] - 1
        for later in counts[place + 1 :]:
            differ_P += leader_WPK[window, :, last] != leader_WPK[later, :, last]
            pairs += 1
    share_P = differ_P / pairs if pairs else np.full_like(differ_P, np.nan)
    return share_P.reshape(shape)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
