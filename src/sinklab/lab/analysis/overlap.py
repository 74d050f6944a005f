"""How much sinks have in common: from step to step, from layer to layer, from head to head."""

# T steps, L layers, H heads, P pairs of heads, K keys, B and W of them as bits of bytes and words
import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from sinklab.lab.analysis.counts import Counts, counted, ratio, share, slabs, spans


def jaccard(one: Any, other: Any) -> np.ndarray:
    """Sinks in common over sinks in either, (...,) from two boolean arrays (..., key); NaN if
    neither has any.

    Counts (numbers of at least 0) work too: the sum of the lesser over the sum of the greater.
    Raises ValueError when the numbers of keys differ.
    """
    a = np.asarray(one)
    b = np.asarray(other)
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"jaccard compares sets of the same keys: got shapes {a.shape} and {b.shape}."
        )
    if a.dtype == bool and b.dtype == bool:
        return ratio(counted(a & b), counted(a | b))
    common = np.minimum(a, b).sum(-1, dtype=float)
    return ratio(common, np.maximum(a, b).sum(-1, dtype=float))


def overlap_by_step(sinks: Any) -> np.ndarray:
    """Jaccard overlap of every head's sinks with those of its next step: (..., step - 1, layer,
    head) from boolean (..., step, layer, head, key). NaN if neither step has a sink.
    """
    flags = _flags(sinks, 4, "overlap_by_step needs (..., step, layer, head, key)")
    return jaccard(flags[..., 1:, :, :, :], flags[..., :-1, :, :, :])


def overlap_by_layer(sinks: Any) -> np.ndarray:
    """(layer, layer) overlap of the layers' sinks, mean over steps and any axes in front; from
    (..., layer, head, key).

    A layer is the list of how many of its heads have a sink at each key; the overlap of two is the
    sum of the lesser counts over the sum of the greater, which is Jaccard's if there is one head.
    The first off-diagonal is the overlap of neighbours. NaN if two layers never have a sink. Time
    O(layer^2 key) per step, beside one pass.
    """
    return overlap_of_counts(
        _flags(sinks, 3, "overlap_by_layer needs (..., layer, head, key)").sum(-2)
    )


def overlap_of_counts(counts: np.ndarray) -> np.ndarray:
    """Overlap of layers from the numbers of heads (..., layer, key) that have a sink at the key."""
    layers, keys = counts.shape[-2:]
    total = np.zeros((layers, layers))
    seen = np.zeros((layers, layers))
    counts_TLK = counts.reshape(-1, layers, keys)
    for steps in spans(len(counts_TLK), layers * layers * keys):
        # Sums of small whole numbers are exact, and quick as a product.
        count_TLK = counts_TLK[steps].astype(np.float32)
        common_TLL = np.zeros((len(count_TLK), layers, layers), np.float32)
        for layer in range(layers):
            # of every pair once
            lesser_TLK = np.minimum(count_TLK[:, layer:], count_TLK[:, layer : layer + 1])
            common_TLL[:, layer, layer:] = lesser_TLK @ np.ones(keys, np.float32)
        common_TLL = np.maximum(common_TLL, common_TLL.swapaxes(1, 2))
        size_TL = np.diagonal(common_TLL, axis1=1, axis2=2)
        either_TLL = size_TL[:, :, None] + size_TL[:, None] - common_TLL
        total += (common_TLL / np.maximum(either_TLL, 1)).sum(0, dtype=float)
        seen += (either_TLL > 0).sum(0)
    return ratio(total, seen)


def overlap_by_head(sinks: Any) -> np.ndarray:
    """(..., layer) mean Jaccard overlap over all pairs of two heads of a layer, from boolean (...,
    layer, head, key).

    Pairs without a sink in either do not count; NaN if no pair is left. Time O(head^2 key) per
    layer.
    """
    flags = _flags(sinks, 3, "overlap_by_head needs (..., layer, head, key)")
    heads, keys = flags.shape[-2:]
    flags_LHK = flags.reshape(-1, heads, keys)
    found_L = np.full(len(flags_LHK), np.nan)
    first_P, second_P = np.triu_indices(heads, 1)
    for layers in spans(len(flags_LHK), heads * max(heads, keys)):
        # 64 keys in a word
        bits_LHB = np.packbits(flags_LHK[layers], axis=-1)
        words_LHW = np.pad(bits_LHB, [(0, 0), (0, 0), (0, -bits_LHB.shape[-1] % 8)]).view(np.uint64)
        size_HL = np.bitwise_count(words_LHW).sum(-1, dtype=np.uint16).T
        common_PL = np.zeros((len(first_P), len(bits_LHB)), dtype=np.uint16)
        for words_HL in words_LHW.T.copy():
            common_PL += np.bitwise_count(words_HL.take(first_P, 0) & words_HL.take(second_P, 0))
        either_PL = size_HL.take(first_P, 0) + size_HL.take(second_P, 0) - common_PL
        shared_PL = common_PL / np.maximum(either_PL, 1).astype(np.float32)
        found_L[layers] = ratio(shared_PL.sum(0, dtype=float), np.count_nonzero(either_PL, axis=0))
    return found_L.reshape(flags.shape[:-2])


@dataclass(frozen=True)
class LayerSinks(Counts):
    """Sinks of each layer; counts of several samples add up."""

    heads: np.ndarray
    """(layer,) number of (step, head)"""
    steps: np.ndarray
    """(layer,) number of steps"""
    sinks: np.ndarray
    """(layer,) number of (step, head, key) that are sinks"""
    keys: np.ndarray
    """(layer,) number of (step, key) that are a sink of at least one head"""
    scores: np.ndarray
    """(layer,) sum of the scores of all sinks, in multiples of an even share"""

    number = share("sinks", "heads")
    """(layer,) mean number of sinks of a head"""
    distinct = share("keys", "steps")
    """(layer,) mean number of keys that are a sink of at least one head of the layer"""
    score = share("scores", "sinks")
    """(layer,) mean score of a sink, in multiples of an even share; NaN without any"""


def sinks_per_layer(
    sinks: Any, received: Any, visible: Any = None, positions: Any = None
) -> LayerSinks:
    """Number and strength of the sinks of each layer (Rulli et al., 4.2: in LLaDA they get fewer
    and stronger).

    sinks: boolean (..., layer, head, key); received of the same shape; visible, positions: see
    ``find_sinks``. Raises ValueError when the shapes differ. O(size), working memory a few slabs.
    """
    flags = _flags(sinks, 3, "sinks_per_layer needs (..., layer, head, key)")
    if flags.shape != np.shape(received):
        raise ValueError(
            f"One sink flag per score: sinks have shape {flags.shape}, received "
            f"{np.shape(received)}."
        )
    if flags.ndim == 3:
        flags = flags[None]
    counts = [LayerSinks(*np.zeros((5, flags.shape[-3])))]
    for slab in slabs(received, visible, positions):
        exists_TLH: Any = slab.exists.any(-1)
        here = flags[slab.at]
        scores = np.where(here, slab.received, 0).sum((0, 2, 3), dtype=float)
        heads, steps = exists_TLH.sum((0, 2)), exists_TLH.any(2).sum(0)
        sinks, keys = here.sum((0, 2, 3)), here.any(2).sum((0, 2))
        counts.append(LayerSinks(heads, steps, sinks, keys, scores))
    return reduce(operator.add, counts)


def _flags(sinks: Any, axes: int, needs: str) -> np.ndarray:
    flags = np.asarray(sinks.cpu() if hasattr(sinks, "cpu") else sinks, dtype=bool)
    if flags.ndim < axes:
        raise ValueError(f"{needs}: got shape {flags.shape}.")
    return flags
