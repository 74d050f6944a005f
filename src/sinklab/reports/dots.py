"""Random draws of single tokens and queries for the figures that show a dot for each."""

# T steps, L layers, H heads, K keys (added sinks first), G states of queries
from __future__ import annotations

import numpy as np
import pandas as pd

from .samples import Sample

MOST_NORMS = 10_000
MOST_BOUNDS = 6_000


def drawn_norms(sample: Sample, samples: int) -> pd.DataFrame:
    """Tokens with the length of their value vectors: at most 10,000 of a kind over all ``samples``.

    Columns: place (of the layer), kind (0 other text, 1 text with a sink of some head, 2 added sinks), score (mean over
    heads, multiples of an even share), norm. Empty when value norms were not recorded.
    """
    norm_TLK = sample.value_norm_TLK
    if norm_TLK is None:
        return pd.DataFrame()
    exists_TLK = np.broadcast_to(sample.exists_TK[:, None], norm_TLK.shape) & ~np.isnan(norm_TLK)
    sinks_TLK = sample.sinks_TLHK.any(2)
    text_TLK = np.broadcast_to(np.arange(norm_TLK.shape[-1]) >= sample.added, norm_TLK.shape)
    frames = []
    for kind, among in enumerate((text_TLK & ~sinks_TLK, text_TLK & sinks_TLK, ~text_TLK)):
        cells = _some(np.flatnonzero(among & exists_TLK), MOST_NORMS // samples + 1, sample.index)
        step, place, key = np.unravel_index(cells, norm_TLK.shape)
        score = sample.share_TLHK[step, place, :, key].mean(-1) * sample.positions_T[step]
        columns = {"place": place, "kind": kind, "score": score, "norm": norm_TLK[step, place, key]}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def drawn_bounds(sample: Sample, samples: int) -> pd.DataFrame:
    """Mean output norm and no-op bound per step, state, layer and head: at most 6,000 over all ``samples``.

    Columns: state, output, bound. Empty when either was not recorded.
    """
    output, bound = sample.output_norm_TGLH, sample.noop_bound_TGLH
    if output is None or bound is None:
        return pd.DataFrame()
    cells = _some(np.flatnonzero(~np.isnan(output) & ~np.isnan(bound)), MOST_BOUNDS // samples + 1, sample.index)
    state = np.unravel_index(cells, output.shape)[1]
    return pd.DataFrame({"state": state, "output": output.ravel()[cells], "bound": bound.ravel()[cells]})


def _some(cells: np.ndarray, most: int, seed: int) -> np.ndarray:
    if len(cells) <= most:
        return cells
    return np.sort(np.random.default_rng(seed).choice(cells, most, replace=False))
