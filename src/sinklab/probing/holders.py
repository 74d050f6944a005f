"""Who holds the sinks of a recorded text: shares, main sinks by place, mobility and value norms of every layer."""

# R rows, T levels, L layers, H heads, K keys = N added sinks + S text positions
from __future__ import annotations

import numpy as np

from sinklab.sinks import Excess, find_sinks, main_sink, motion

HOLDERS: dict[str, str] = {
    "added": "share of (row, level, head) whose main sink is an added one",
    "first": "whose main sink is the first token",
    "early": "whose main sink is one of the second to fourth tokens",
    "other": "whose main sink is a later token",
    "none": "where no key is a sink",
}
"""Places of a main sink; the five add up to 1."""


def measured_heads(
    received_RTLHK: np.ndarray, value_RTLK: np.ndarray, visible_RTK: np.ndarray, added: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The measures of every layer (L,), and the mobility of all layers together.

    Args:
        received_RTLHK: column sums; keys begin with the added sinks.
        value_RTLK: norms of the values.
        visible_RTK: number of queries that see each key.
        added: N.
    """
    seen = visible_RTK[:, :, None, None]
    queries = visible_RTK.max()
    sinks_RTLHK = find_sinks(received_RTLHK, Excess(), seen)
    text_RTLHS = received_RTLHK[..., added:]
    over = (0, 1, 3)
    layers = {
        "sink_share": received_RTLHK[..., :added].sum(-1).mean(over) / queries,
        "top_text_share": text_RTLHS.max(-1).mean(over) / queries,
        "first_share": text_RTLHS[..., 0].mean(over) / queries,
        "sinks": sinks_RTLHK.sum(-1).mean(over),
        "text_sinks": sinks_RTLHK[..., added:].sum(-1).mean(over),
    }
    layers |= _holders(received_RTLHK, sinks_RTLHK, added)
    layers |= _values(value_RTLK, sinks_RTLHK.sum(3), received_RTLHK.shape[3], added)
    overall = {}
    for name, start in (("mobility", 0), ("text_mobility", added)):
        moved = motion(received_RTLHK[..., start:], seen[..., start:], added=added - start, rule=Excess())
        weight = np.where(np.isnan(moved.mobility), 0, moved.strength * moved.steps)
        with np.errstate(invalid="ignore"):
            layers[name] = (weight * np.nan_to_num(moved.mobility)).sum((0, 2)) / weight.sum((0, 2))
        overall[name] = moved.overall.mobility
    return layers, overall


def _holders(received: np.ndarray, sinks: np.ndarray, added: int) -> dict[str, np.ndarray]:
    main_RTLH = main_sink(received)
    counts = np.take_along_axis(sinks, np.maximum(main_RTLH, 0)[..., None], -1)[..., 0] & (main_RTLH >= 0)
    place = main_RTLH - added
    here = {
        "added": place < 0,
        "first": place == 0,
        "early": (place > 0) & (place < 4),
        "other": place >= 4,
    }
    shares = {f"main_{name}": (counts & where).mean((0, 1, 3)) for name, where in here.items()}
    return shares | {"main_none": (~counts).mean((0, 1, 3))}


def _values(value_RTLK: np.ndarray, sinks_RTLK: np.ndarray, heads: int, added: int) -> dict[str, np.ndarray]:
    """Norms by kind of key; a token that is a sink of some heads counts to both sides by their number."""

    def mean(norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        total = weight.sum((0, 1, 3), dtype=float)
        return np.divide((norm * weight).sum((0, 1, 3)), total, out=np.full(len(total), np.nan), where=total > 0)

    added_norm, norm, count = value_RTLK[..., :added], value_RTLK[..., added:], sinks_RTLK[..., added:]
    return {
        "value_added": mean(added_norm, np.ones_like(added_norm)),
        "value_sink": mean(norm, count),
        "value_other": mean(norm, heads - count),
    }
