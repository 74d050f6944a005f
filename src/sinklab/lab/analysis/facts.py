"""Facts of one sample: which key of every head receives most, how much, whether it is a sink, and
how that changes.

They are made once, while the attention is in memory: tables, figures and sentences are of facts,
not of maps. Samples are pooled by adding up, so most facts are sums and the numbers of what was
added. Whoever wants another rule derives them anew from the arrays, by the same function.
"""

# T steps, L layers, H heads, K keys (added sinks first), R text keys, E thresholds, G states of
# positions or queries
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from sinklab.core.sinks import DEFAULT, STATES, Excess, Gu, Rule, has_unequal_counts, where_exists
from sinklab.lab.analysis.counts import Scored, main_sink, ratio, scored
from sinklab.lab.analysis.movement import Motion, at_key, followed, of_windows
from sinklab.lab.analysis.rules import Top

CHUNK = 1 << 22
"""numbers of received attention that are worked on at once, in whole layers"""
EPSILONS = np.linspace(0, 10, 21)
"""thresholds of the published curve (Rulli et al., Fig. 10)"""
EDGES = np.geomspace(2.0**-8, 2.0**12, 81)
"""borders of the bins of scores, in multiples of an even share"""
with warnings.catch_warnings():
    # Eq. 3 as printed is listed to show that it never fires.
    warnings.simplefilter("ignore")
    RULES: Mapping[str, Rule] = {
        "excess, sum, 3": Excess(3.0),
        "excess, mean, 3 (as printed)": Excess(3.0, "mean"),
        "excess, percent, 3": Excess(3.0, "percent"),
        "excess, z-score, 3": Excess(3.0, "zscore"),
        "mean weight over 0.3 (Gu)": Gu(0.3),
        "top 1": Top(1),
    }
    """the rules of the literature"""
COUNTS = ("heads", "keys", "sinks", "with_sink", "received", "absorbed", "both", "either")
"""what is counted of each rule; both, either: keys that it and the first rule flag"""
MOTION = Motion._fields[2:]
HEADS = (*MOTION, "weight", "first", "stable_mobility", "window_weight")
"""fields of the fact ``heads``: those of `Motion`, and of the strongest key, be it a sink or not"""
WIDE = ("share", "text_share", "added_share", "absorbed", "sinks", "stays", "is_sink")
"""facts by step, layer and head besides ``main``"""
PLACES = (*STATES, "sink")
"""places of a strongest key: a position in one of the states, or an added sink"""

FACTS, FACTS_TABLE = "measures", "facts"
"""file of arrays, and table by step, layer and head, that hold the facts of a recording"""
DRAWN = {"received", "received_by_state", "output_norm", "noop_bound"}
DRAWN |= {"visible", "positions", "step_number", "value_norm"}
"""arrays that figures of their own show, or that give the steps and numbers of queries of others"""

_HEAD, _LAYER, _KEY = ("step", "layer", "head"), ("layer",), ("step", "key")
_SUM = ("sum", "layer")
SUMMED = ("text_share", "added_share", "absorbed", "sinks")
"""facts of these that are summed over steps and heads"""
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("main", *WIDE), _HEAD),
    **{f"sum_{name}": _SUM for name in SUMMED},
    **dict.fromkeys(("events", "added_events", "mains", "steps", "places"), _LAYER),
    "share_LH": ("layer", "head"),
    "heads": ("field", "layer", "head"),
    "text_heads": ("text_field", "layer", "head"),
    **dict.fromkeys(("events_TK", "mains_TK", "share_TK", "visible"), _KEY),
    **dict.fromkeys(("positions", "step_number"), ("step",)),
    **dict.fromkeys(("sum_stays", "sum_strongest"), ("sum", "step")),
    "with_sink": ("sum",),
    "curve": ("layer", "threshold"),
    "cells": ("bin",),
    "rules": ("rule", "count"),
    "added_norm": _SUM,
    **dict.fromkeys(("sink_norm", "rest_norm"), ("sum", "state", "layer")),
}
"""Every fact and the names of its axes; ``sum``: the sum of numbers, and how many were added."""


def facts(
    arrays: Mapping[str, np.ndarray],
    states_TS: np.ndarray | None = None,
    *,
    rule: Rule = DEFAULT,
    added: int = 0,
    so_far: bool = False,
) -> dict[str, np.ndarray]:
    """Facts of one sample, by name (`AXES`).

    Args:
        arrays: of a recording as they are stored, by name: received, visible, positions; and, if
            they were recorded, value_norm, window_received.
        states_TS: state of each position (`STATES`), -1 if there is none; None if not known.
        rule: definition of a sink.
        added: added sink columns in front of the keys.
        so_far: a step has the queries of all steps before it too, so that a key stays strongest by
            construction: mobility is told by disjoint windows of queries.
    """
    received, visible_TK, positions_T = (arrays[n] for n in ("received", "visible", "positions"))
    steps, layers, heads, keys = received.shape
    named = rules_beside(rule)
    stride = max(1, CHUNK // max(1, steps * heads * keys))
    parts = []
    for start in range(0, layers, stride):
        some = received[:, start : start + stride]
        parts.append(_of_layers(some, visible_TK, positions_T, named, added))
    found = {name: _joined(name, [part[name] for part in parts]) for name in parts[0]}
    events_TLK, share_TLK = found.pop("events_TLK"), found.pop("share_TLK")
    found |= {
        "visible": visible_TK.astype(np.float32),
        "positions": positions_T.astype(np.float32),
        "events_TK": events_TLK.sum(1, dtype=np.int32),
        "share_TK": share_TLK.mean(1),
        "added_events": events_TLK[..., :added].sum((0, 2), dtype=float),
    }
    if "step_number" in arrays:
        found["step_number"] = arrays["step_number"]
    found["heads"] = np.concatenate([found["heads"], _of_strongest(found, arrays, added, so_far)])
    if "value_norm" not in arrays:
        return found
    exists_TK = ~np.isnan(share_TLK).all(1)
    norm_TLK = np.where(exists_TK[:, None], arrays["value_norm"], np.nan).astype(np.float32)
    found["added_norm"] = _sums(norm_TLK[..., :added])
    if states_TS is not None:
        # masks differ from text in everything
        places = [(states_TS == state)[:, None] for state in range(len(STATES))]
        heads_TL1 = (found["main"] >= 0).sum(2)[..., None]
        sinks_TLR = events_TLK[..., added:].astype(float)
        for name, weight_TLR in (("sink_norm", sinks_TLR), ("rest_norm", heads_TL1 - sinks_TLR)):
            both = [_sums(norm_TLK[..., added:], weight_TLR * here) for here in places]
            found[name] = np.array(both).swapaxes(0, 1)
    return found


def others(dims: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Recorded statistics, of these axes, that no figure of its own shows."""
    return [
        name for name, axes in dims.items() if name not in DRAWN and {"step", "layer"} <= {*axes}
    ]


def means(
    arrays: Mapping[str, np.ndarray], dims: Mapping[str, tuple[str, ...]]
) -> dict[str, np.ndarray]:
    """(T, L) mean of each of `others` over all its other axes, as facts ("mean drift"); NaN is left
    out.
    """
    found = {}
    for name in others(dims):
        values = np.moveaxis(arrays[name], dims[name].index("layer"), 1).astype(float)
        values_TLX = values.reshape(*values.shape[:2], -1)
        count_TL = (~np.isnan(values_TLX)).sum(2)
        found[f"mean {name}"] = np.asarray(ratio(np.nansum(values_TLX, axis=2), count_TL))
    return found


def rules_beside(rule: Rule) -> dict[str, Rule]:
    """The rules that are counted: those of the literature, behind ``rule`` if it is none."""
    first = next(iter(RULES.values()))
    return dict(RULES) if rule == first else {"": rule, **RULES}


def _joined(name: str, parts: list[np.ndarray]) -> np.ndarray:
    axes = AXES.get(name, ("step", "layer", "key"))
    if "layer" in axes:
        return np.concatenate(parts, axis=axes.index("layer"))
    return np.sum(parts, axis=0)


def _sums(values_TLX: np.ndarray, weights: Any = 1.0) -> np.ndarray:
    """(2, L) sum of weighted numbers over all axes but the second, and of their weights; NaN is
    left out.
    """
    values = values_TLX.astype(float)
    known = ~np.isnan(values)
    weight = np.where(known, weights, 0.0)
    over = (0, *range(2, values.ndim))
    return np.array([(np.where(known, values, 0) * weight).sum(over), weight.sum(over)])


def _of_layers(
    received_TLHK: np.ndarray,
    visible_TK: np.ndarray,
    positions_T: np.ndarray,
    rules: Mapping[str, Rule],
    added: int,
) -> dict[str, np.ndarray]:
    """The facts of some layers that need all their keys."""
    visible, positions = visible_TK[:, None, None], positions_T[:, None, None]
    one = scored(received_TLHK, visible, positions)
    most_T11 = one.most
    main_TLH = main_sink(one.score)
    exists_TLH = main_TLH >= 0
    text = one.score[..., added:]
    text_main_TLH = main_sink(text)
    known = where_exists(one.exists, one.received)
    there = ~np.isnan(one.received) & (one.seen_by > 0)
    total_TLH = where_exists(there, one.received).sum(-1)
    rows, sinks = _of_rules(one, rules, known, main_TLH, total_TLH)
    number_TLH = sinks.sum(-1)
    events_TLK = sinks.sum(2, dtype=np.uint16)
    taken_TLH = np.where(sinks, known, 0).sum(-1)
    moved = followed(one, main_TLH, sinks)
    found: dict[str, Any] = {
        "main": main_TLH.astype(np.int32),
        "share": at_key(one.score, main_TLH) / most_T11,
        "text_share": at_key(text, text_main_TLH) / most_T11,
        "added_share": np.full(main_TLH.shape, np.nan),
        "absorbed": ratio(taken_TLH, total_TLH),
        "sinks": np.where(exists_TLH, number_TLH, np.nan),
        "stays": _stays(sinks, number_TLH),
        "is_sink": moved.counted.astype(float),
    }
    if added:
        found["added_share"] = one.score[..., :added].sum(-1) / most_T11
    found |= {f"sum_{name}": _sums(found[name]) for name in SUMMED}
    found |= {
        "sum_stays": _sums(found["stays"].swapaxes(0, 1)),
        "sum_strongest": _sums(found["share"].swapaxes(0, 1)),
        "events": number_TLH.sum((0, 2), dtype=float),
        "mains": exists_TLH.sum((0, 2), dtype=float),
        "steps": exists_TLH.any(2).sum(0, dtype=float),
        "share_LH": np.nansum(found["share"], axis=0, dtype=float),
        "heads": np.array([getattr(moved, name) for name in MOTION], dtype=float),
        "with_sink": np.array([(number_TLH[exists_TLH] > 0).sum(), exists_TLH.sum()], dtype=float),
        "events_TLK": events_TLK,
        "share_TLK": one.score.mean(2) / most_T11,
        "mains_TK": _holders(main_TLH, received_TLHK.shape[-1]),
        "curve": _curve(one),
        "places": one.exists.sum((0, 2, 3), dtype=float),
        "cells": _binned(one),
        "rules": rows,
    }
    if added:
        alone = scored(one.received[..., added:], one.seen_by[..., added:], positions)
        flags = alone.flags(next(iter(rules.values())))
        moved = followed(alone, main_sink(alone.score), flags)
        found["text_heads"] = np.array([getattr(moved, name) for name in MOTION], dtype=float)
    return found


def _of_rules(
    one: Scored,
    rules: Mapping[str, Rule],
    known: np.ndarray,
    main_TLH: np.ndarray,
    total_TLH: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """`COUNTS` of each rule, and the flags of the first."""
    heads, keys = np.count_nonzero(main_TLH >= 0), np.count_nonzero(one.exists)
    rows: list[list[Any]] = []
    first = np.zeros(0)
    for rule in rules.values():
        if rule == Top(1):
            # also of a single key, of which the rule leaves none
            flags = np.arange(one.received.shape[-1]) == main_TLH[..., None]
        else:
            flags = one.flags(rule)
        if not rows:
            first = flags
        sinks, both = np.count_nonzero(flags), np.count_nonzero(flags & first)
        absorbed = known[flags].sum(dtype=float)
        with_sink = np.count_nonzero(flags.any(-1))
        either = sinks + np.count_nonzero(first) - both
        received = total_TLH.sum(dtype=float)
        rows.append([heads, keys, sinks, with_sink, received, absorbed, both, either])
    return np.array(rows, dtype=float), first


def _curve(one: Scored) -> np.ndarray:
    """(L, E) number of (step, head, key) that are sinks of `Excess` at each of `EPSILONS`."""
    rules = [Excess(epsilon) for epsilon in EPSILONS.tolist()]
    if has_unequal_counts(one.seen_by).any():
        return np.array([one.flags(rule).sum((0, 2, 3)) for rule in rules], dtype=float).T
    # one bound a step; what is above a higher one is above the lowest
    cells = np.nonzero(one.flags(rules[0]))
    values, layers = one.received[cells], one.received.shape[1]
    counts = []
    for rule in rules:
        limit_T = np.broadcast_to(rule.threshold(one.most), (len(one.received), 1, 1))[:, 0, 0]
        above = values > limit_T[cells[0]]
        counts.append(np.bincount(cells[1][above], minlength=layers))
    return np.array(counts, dtype=float).T


def _binned(one: Scored) -> np.ndarray:
    """Number of scores below the first of `EDGES`, in each bin, and at or above the last."""
    place = np.searchsorted(EDGES, one.score[one.exists], side="right")
    return np.bincount(place, minlength=len(EDGES) + 1).astype(float)


def _holders(main_TLH: np.ndarray, keys: int) -> np.ndarray:
    """(T, K) number of heads whose strongest key it is."""
    rows_TN = main_TLH.reshape(len(main_TLH), -1)
    step, place = np.nonzero(rows_TN >= 0)
    cells = step * keys + rows_TN[step, place]
    return np.bincount(cells, minlength=len(rows_TN) * keys).reshape(-1, keys).astype(np.int32)


def _stays(sinks: np.ndarray, number_TLH: np.ndarray) -> np.ndarray:
    """(T, L, H) Jaccard overlap of a head's sinks with those of the step before; NaN if neither
    step has any, and at the first.
    """
    found = np.full(number_TLH.shape, np.nan)
    common = (sinks[1:] & sinks[:-1]).sum(-1)
    found[1:] = ratio(common, number_TLH[1:] + number_TLH[:-1] - common)
    return found


def _of_strongest(
    found: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], added: int, so_far: bool
) -> np.ndarray:
    """The fields of `HEADS` behind those of `Motion`."""
    main_TLH, share_TLH = found["main"], found["share"]
    counts_LH = (~np.isnan(share_TLH)).sum(0)
    weight_LH = ratio(np.nansum(share_TLH, axis=0, dtype=float), counts_LH)
    first_LH = ratio((main_TLH == added).sum(0), (main_TLH >= 0).sum(0))
    mobility_LH = found["heads"][MOTION.index("mobility")]
    window_LH = np.full(main_TLH.shape[1:], np.nan)
    if so_far:
        # a text of fewer than eight queries has no window
        mobility_LH = window_LH
        if "window_received" in arrays:
            mobility_LH, window_LH = of_windows(arrays["window_received"])
    return np.array([weight_LH, first_LH, mobility_LH, window_LH])


def sink_columns(
    received_LHK: np.ndarray, seen_K: np.ndarray, place_K: np.ndarray, rule: Rule = DEFAULT
) -> dict[str, np.ndarray]:
    """Facts of one step in few numbers, each (L,): means over heads, for runs that keep no arrays.

    share: of the attention that the strongest key receives; sinks: keys that the rule calls so;
    with_sink: whether there is one; gu_rate: whether there is one and the strongest key holds more
    than 30 % (Gu et al., 2410.10781); in_masked, in_committed, in_prompt, in_sink: whether the
    strongest key is there.

    Args:
        received_LHK: attention that each key receives, from whichever queries.
        seen_K: whether any query sees the key.
        place_K: number of its place in `PLACES`; read of keys that are seen.
        rule: definition of a sink.
    """
    total_LH1 = np.nansum(received_LHK, axis=-1, keepdims=True)
    share_LHK = np.nan_to_num(received_LHK) / np.maximum(total_LH1, 1e-12)
    positions = np.count_nonzero(seen_K & (place_K != PLACES.index("sink")))
    # as if every position were a query, and each saw the keys that any sees
    one = scored(share_LHK, seen_K[None, None].astype(np.float32), np.full((1, 1), positions))
    main_LH = main_sink(one.score)
    best_LH, number_LH = at_key(share_LHK, main_LH), one.flags(rule).sum(-1)
    found = {
        "share": best_LH,
        "sinks": number_LH,
        "with_sink": number_LH > 0,
        "gu_rate": (best_LH > Gu().weight) & (number_LH > 0),
    }
    found |= {f"in_{name}": place_K[main_LH] == place for place, name in enumerate(PLACES)}
    return {name: value_LH.mean(-1, dtype=float) for name, value_LH in found.items()}
