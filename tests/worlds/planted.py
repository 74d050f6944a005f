"""Worlds with a known answer: what recordings hold when nothing is there, or when one thing was
planted.

A world is drawn for whole samples (texts, problems, seeds): they are independent, what lies within
one is not.
"""

# N samples, T steps, S positions and queries, H heads, K keys

from __future__ import annotations

import numpy as np
from scipy import special

CLASSES = np.array(["words", "punctuation", "newline", "digits"], dtype=object)


def tokens(
    rng,
    samples,
    *,
    at_place=0.0,
    on_class=0.0,
    steps=16,
    length=48,
    sinks=3,
):
    """Received attention and classes of tokens, both (N, T, S), with a few sinks a sample that
    stand still.

    A sink stands at a place that is a sink in every sample with probability ``at_place``, on
    punctuation with probability ``on_class``, else anywhere. With both 0 neither place nor class
    has an effect; since a sink stays for all steps, the steps of a sample are one observation of
    its place.
    """
    classes_NS = CLASSES[rng.choice(len(CLASSES), (samples, length), p=(0.7, 0.15, 0.05, 0.1))]
    level_NS = np.zeros((samples, length))
    for level_S, classes_S in zip(level_NS, classes_NS, strict=True):
        for sink in range(sinks):
            luck, marked = rng.random(), np.flatnonzero(classes_S == "punctuation")
            if luck < at_place:
                place = 5 * sink
            elif luck < at_place + on_class and len(marked):
                place = rng.choice(marked)
            else:
                place = rng.integers(length)
            level_S[place] += 6.0
    received_NTS = 0.5 + level_NS[:, None] + rng.gamma(2, 0.25, (samples, steps, length))
    return received_NTS, np.broadcast_to(classes_NS[:, None], received_NTS.shape)


def start_shares(rng, samples, share, spread):
    """Share of each sample's sinks that lie at the start (N,): Beta of this mean, spread near 0
    alike, near 1 all or none.
    """
    size = 1 / spread - 1
    return rng.beta(share * size, (1 - share) * size, samples)


def median_of_beta(share, spread):
    """The median of ``start_shares``."""
    size = 1 / spread - 1
    return float(special.betaincinv(share * size, (1 - share) * size, 0.5))


def differences(rng, kind, shape):
    """Differences of losses of samples with mean 0 and deviation 1: "normal", "heavy" tails, or
    "skewed".
    """
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "heavy":
        return rng.standard_t(5, shape) / np.sqrt(5 / 3)
    return rng.exponential(1, shape) - 1


def paths(
    rng,
    kind,
    heads=3,
    steps=24,
    keys=40,
):
    """Received attention (T, 1, H, K) of one sample: a main sink a head, noise elsewhere.

    static: at one place. moving: elsewhere at each step. split: two places take turns. none: no
    sink. Heads of a sample share their path but for a shift.
    """
    place_TH = np.broadcast_to(_place(rng, kind, steps, keys), (steps, heads))
    shift_H = rng.integers(0, 4, heads)
    received = rng.gamma(4, 0.25, (steps, 1, heads, keys)) * 0.5
    if kind != "none":
        spot = np.clip(np.rint(place_TH) + shift_H, 0, keys - 1).astype(int)[:, None, :, None]
        np.put_along_axis(received, spot, 0.5 * keys, axis=-1)
    return received / received.sum(-1, keepdims=True) * keys


def _place(rng, kind, steps, keys):
    """Where the main sink of the first head stands at each step (T, 1)."""
    start, shape = rng.integers(0, keys), (steps, 1)
    if kind == "split":
        return np.where(rng.random(shape) < 0.5, start, rng.integers(0, keys))
    if kind == "moving":
        place_T1 = rng.integers(0, keys, shape)
        # a draw of no use, so that worlds stay those of docs/statistics.md
        rng.random(shape)
        return place_T1
    return start


def causal_maps(rng, kind, heads=6, length=64):
    """Attention (H, S, S) of the heads of an autoregressive model over one text.

    uniform: every query weighs all keys so far about alike. previous: it gives four fifths to the
    token before it. first: in half of the heads 55 to 85 % goes to the first token, the others are
    those of previous. moving: in half of the heads as much goes to one of the keys so far, to
    another one for every window of eight queries.
    """
    weight_HSS = np.tril(rng.gamma(4, 0.25, (heads, length, length)))
    weight_HSS /= weight_HSS.sum(-1, keepdims=True)
    if kind == "uniform":
        return weight_HSS
    before_S = np.maximum(np.arange(length) - 1, 0)
    target_HS = np.broadcast_to(before_S, (heads, length)).copy()
    share_HS = np.full((heads, length), 0.8)
    half = heads // 2
    if kind != "previous":
        share_HS[:half] = rng.uniform(0.55, 0.85, (half, 1))
        target_HS[:half] = 0
    if kind == "moving":
        for start in range(0, length, 8):
            target_HS[:half, start : start + 8] = rng.integers(0, start + 1, (half, 1))
    aimed_HSS = np.eye(length)[target_HS]
    return share_HS[..., None] * aimed_HSS + (1 - share_HS[..., None]) * weight_HSS
