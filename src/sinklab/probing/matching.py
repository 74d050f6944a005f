"""Which keys of a step are sinks, and the position beside each that is like it in everything else."""

# L layers, H heads, K keys (sink columns first), S text positions, P pairs
from __future__ import annotations

import difflib

import numpy as np

from sinklab.sinks import Excess, find_sinks

PLACES = ("block", "future", "committed", "prompt")
"""Where a position stands: masked in the block that is written, masked to the right of it, written, given."""
CHOICES = ("excess", "strongest")


def checked_choice(choose: str, epsilon: float) -> None:
    """Raises ValueError for an unknown way to choose sinks, and a negative epsilon."""
    if choose not in CHOICES:
        near = difflib.get_close_matches(str(choose), CHOICES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "excess is the default."
        raise ValueError(f"sinks are chosen by {' or '.join(CHOICES)}, got {choose!r}; {hint}")
    Excess(epsilon)


def places_of(state_S: np.ndarray, block: int, block_length: int | None) -> np.ndarray:
    """The number in `PLACES` of every position, int8 (S,).

    Args:
        state_S: 0 masked, 1 committed, 2 prompt.
        block: that is written now.
        block_length: open positions of a block; None means that there is one block.
    """
    rank_S = np.cumsum(state_S != 2) - 1
    block_S = np.zeros_like(rank_S) if block_length is None else rank_S // block_length
    return np.select([state_S == 2, state_S == 1, block_S > block], [3, 2, 1], 0).astype(np.int8)


def sink_heads(
    received_LHK: np.ndarray,
    place_S: np.ndarray,
    *,
    visible_LK: np.ndarray | None = None,
    choose: str = "excess",
    epsilon: float = 3.0,
) -> np.ndarray:
    """In how many heads of a layer each text position is a sink, int64 (L, S).

    "excess": the key receives more than 1 + epsilon (S − 1) / S times an even share (arXiv 2510.15731, Eq. 3, in sums);
    added sink columns take part in the count and are no answer. "strongest": in each head the key of each place that
    receives most, however little that is; a place of fewer than two positions has none.

    Raises:
        ValueError: for an unknown choice, or fewer keys than positions.
    """
    checked_choice(choose, epsilon)
    added = received_LHK.shape[-1] - len(place_S)
    if added < 0:
        raise ValueError(f"there are {len(place_S)} positions and must be as many keys, got {received_LHK.shape[-1]}")
    if choose == "excess":
        seen = None if visible_LK is None else visible_LK[:, None]
        return np.asarray(find_sinks(received_LHK, Excess(epsilon), visible=seen))[..., added:].sum(1)
    count_LS = np.zeros((received_LHK.shape[0], len(place_S)), np.int64)
    for place in range(len(PLACES)):
        there = np.flatnonzero(place_S == place)
        if len(there) >= 2:
            best_LH = there[received_LHK[..., added + there].argmax(-1)]
            for layer, best_H in enumerate(best_LH):
                np.add.at(count_LS[layer], best_H, 1)
    return count_LS


def matched_pairs(
    sink_S: np.ndarray, place_S: np.ndarray, token_S: np.ndarray, random: np.random.Generator, most: int
) -> np.ndarray:
    """Some sinks of every place, each with a non-sink of the same place: int64 (P, 2), sink and match.

    The match holds the same token where there is one left, and is the nearest of those; of two as near, one is drawn.
    Nothing is matched twice; a sink without a match left is dropped.

    Args:
        sink_S: which positions are sinks in this layer and step.
        place_S: where each position stands.
        token_S: what stands there now.
        random: draws which sinks are taken.
        most: pairs of a place at most.
    """
    pairs = []
    for place in range(len(PLACES)):
        here_S = place_S == place
        free = np.flatnonzero(here_S & ~sink_S).tolist()
        for sink in random.permutation(np.flatnonzero(here_S & sink_S))[:most]:
            if not free:
                break
            others = np.array(free)
            cost = np.abs(others - sink) + len(sink_S) * (token_S[others] != token_S[sink])
            match = int(random.choice(others[cost == cost.min()]))
            free.remove(match)
            pairs.append((int(sink), match))
    return np.array(pairs, np.int64).reshape(-1, 2)
