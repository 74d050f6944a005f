"""The attention of a model in training, on a fixed text under masks that open one by one.

A token once open stays open, as in a denoising run with only right guesses, so that the levels play
the part of steps and sinks can move. What is measured are facts, as of a study.
"""

# R rows, T levels, L layers, H heads, S text positions, K keys = added sinks + S
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.instrument import trace
from sinklab.core.sinks import COMMITTED, MASKED
from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.facts import MOTION, facts

LEVELS = (0.9, 0.7, 0.5, 0.3, 0.1)
"""Shares of a row that are masked."""

MEASURES: tuple[str, ...] = (
    # shares of attention: of added sinks together, and of the greatest key of a head's text
    "sink_share",
    "top_text_share",
    # sinks in a head, and those that are tokens of the text; share of heads that have none
    "sinks",
    "text_sinks",
    "main_none",
    # chance that two levels have their main sinks apart, NaN without sinks
    "mobility",
    # mean norms of the values of added sinks, of visible text that is a sink and is none, of masks
    "value_added",
    "value_sink",
    "value_other",
    "value_masked",
)
"""Measures of every layer, NaN if there is no such thing."""
SUMS = (
    "sum_added_share",
    "sum_text_share",
    "sum_sinks",
    "events",
    "added_events",
    "mains",
    "added_norm",
    "sink_norm",
    "rest_norm",
)


def pooled(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The measures of every layer (L,), and mobility of all of them together as the first of
    (1 + L,), from the facts of each row of text.
    """
    found = {name: np.sum([row[name] for row in rows], axis=0) for name in SUMS}
    paths = np.array([row["heads"][: len(MOTION)] for row in rows])
    motion = dict(zip(MOTION, paths.swapaxes(0, 1), strict=True))
    moves_RLH = motion["mobility"]
    weight_RLH = np.where(np.isnan(moves_RLH), 0, motion["strength"] * motion["steps"])
    moved_L, of_L = (weight_RLH * np.nan_to_num(moves_RLH)).sum((0, 2)), weight_RLH.sum((0, 2))
    return {
        "sink_share": ratio(*found["sum_added_share"]),
        "top_text_share": ratio(*found["sum_text_share"]),
        "sinks": ratio(*found["sum_sinks"]),
        "text_sinks": ratio(found["events"] - found["added_events"], found["mains"]),
        "main_none": 1 - np.mean([row["is_sink"].mean((0, 2)) for row in rows], axis=0),
        "mobility": ratio(np.append(moved_L.sum(), moved_L), np.append(of_L.sum(), of_L)),
        "value_added": ratio(*found["added_norm"]),
        "value_sink": ratio(*found["sink_norm"][:, COMMITTED]),
        "value_other": ratio(*found["rest_norm"][:, COMMITTED]),
        "value_masked": ratio(*(found["sink_norm"] + found["rest_norm"])[:, MASKED]),
    }


@torch.no_grad()
def measured(
    model: Any, ids_RS: Tensor, *, causal: bool = False, given: int = 0
) -> list[dict[str, Any]]:
    """Sinks and value norms of a model on clean text, computed as it trains: a row of `MEASURES`
    for the whole model (``layer`` -1) and one a layer.

    Args:
        model: a DiffusionLM; its training mode and compiled decoder are put back.
        ids_RS: int64 rows of text without padding.
        causal: read the clean text from left to right: how a model looks during a causal warm
            start.
        given: tokens at the head of each row that are never masked, such as a start token.
    """
    # at -1 no id is masked
    mask_id = -1 if causal else model.config.mask_token_id
    shown_TRS = _shown(ids_RS.long().cpu(), mask_id, given)
    keep_RS = torch.zeros(ids_RS.shape, dtype=torch.bool, device=model.device)
    # next to no logits
    keep_RS[:, -1] = True
    with _at_rest(model), trace(model) as recording:
        for shown_RS in shown_TRS:
            model(shown_RS.to(model.device), logits_to_keep=keep_RS, causal=causal)
            recording.mark()
    names = ("received", "value_norm", "visible")
    received_RTLHK, norm_RTLK, visible_RTK = (
        recording.array(name).swapaxes(0, 1) for name in names
    )
    masked_RTS = (shown_TRS == mask_id).numpy().swapaxes(0, 1)
    positions_T = visible_RTK.max((0, 2))
    added, length = recording.prefix, ids_RS.shape[1]
    layers = pooled(
        [
            facts(
                {**dict(zip(names, arrays, strict=True)), "positions": positions_T},
                np.where(masked_TS, MASKED, COMMITTED),
                added=added,
            )
            for *arrays, masked_TS in zip(
                received_RTLHK, norm_RTLK, visible_RTK, masked_RTS, strict=True
            )
        ]
    )
    overall, *mobility_L = layers.pop("mobility").tolist()
    rows = [{"layer": -1} | {name: _mean(values_L) for name, values_L in layers.items()}]
    rows[0]["mobility"] = overall
    for layer, mobility in enumerate(mobility_L):
        here = {name: float(values_L[layer]) for name, values_L in layers.items()}
        rows.append({"layer": layer, "mobility": mobility, **here})
    # of all added sinks together, if every key drew alike
    seen_S = np.arange(1, length + 1) if causal else length
    even_share = float(np.mean(added / (added + seen_S)))
    return [row | {"added": added, "even_share": even_share} for row in rows]


def _shown(ids_RS: Tensor, mask_id: int, given: int) -> Tensor:
    """Ids that the model reads, (T, R, S); without a mask (-1) the clean text, one level."""
    if mask_id < 0:
        return ids_RS[None]
    hidden_TRS = nested_masks(ids_RS[:, given:].shape)
    return torch.where(F.pad(hidden_TRS, (given, 0)), mask_id, ids_RS)


def nested_masks(shape: Sequence[int]) -> Tensor:
    """Masked positions bool (T, R, S), the most masked level first: each row masks round(level · S)
    tokens, at least one, in one order of its own.
    """
    rank_RS = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(1).argsort(1)
    return torch.stack([rank_RS < max(1, round(level * shape[1])) for level in LEVELS])


def _mean(values_L: np.ndarray) -> float:
    known = values_L[~np.isnan(values_L)]
    return float(known.mean()) if len(known) else float("nan")


@contextmanager
def _at_rest(model: Any) -> Iterator[None]:
    """Evaluation mode and an uncompiled decoder; both are put back."""
    decoder, was = model.model, model.training
    # Module.compile() keeps the compiled call here and nothing else
    compiled, decoder._compiled_call_impl = decoder._compiled_call_impl, None
    model.eval()
    try:
        yield
    finally:
        decoder._compiled_call_impl = compiled
        model.train(was)
