"""Decoding written out for one row and one position at a time, each schedule by its definition: the
slow twins.
"""

import math

import torch
from toy_denoiser import MASK, VOCABULARY

# S positions, V vocabulary

Found = list[tuple[float, int, int]]
"""(score, position, token) of every masked position of the block."""


def cut(logits, top_p, top_k):
    """Probabilities after top-p, then top-k."""
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    whole = sum(weights)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = list(order)
    if top_p is not None:
        kept, mass = [], 0.0
        for token in order:
            if mass > top_p:
                break
            kept.append(token)
            mass += weights[token] / whole
    if top_k is not None:
        kept = kept[:top_k]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def score_of(rule, logits, token, position, top_p=None, top_k=None):
    if rule == "left_to_right":
        return -position
    if rule == "low_confidence":
        return cut(logits, None, None)[token]
    probabilities = cut(logits, top_p, top_k)
    if rule == "maskgit_plus":
        return probabilities[token]
    if rule == "topk_margin":
        first, second = sorted(probabilities, reverse=True)[:2]
        return first - second
    assert rule == "entropy"
    return sum(p * math.log(p + 1e-10) for p in probabilities)


def find(toy, ids, block, rule, **cuts):
    row = torch.tensor([ids])
    logits_SV = toy.dense(row, torch.ones_like(row, dtype=torch.bool))[0].tolist()
    found = []
    for position in block:
        if ids[position] == MASK:
            logits = logits_SV[position]
            token = max(
                (token for token in range(VOCABULARY) if token != MASK),
                key=lambda token: logits[token],
            )
            found.append((score_of(rule, logits, token, position, **cuts), position, token))
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))


def even(steps):
    def count(found, nth, size):
        return size // steps + (nth < size % steps)

    return count


def timed(eps, steps):
    times = torch.linspace(1, eps, steps + 1)

    def count(found, nth, size):
        if nth == steps - 1:
            return len(found)
        return int(torch.tensor(float(len(found))) * (1 - times[nth + 1] / times[nth]))

    return count


def threshold(tau):
    return lambda found, nth, size: max(1, sum(score >= tau for score, _, _ in found))


def dynamic(tau, quotas):
    """SDAR: as many as are above the threshold, and no fewer than the quota of a whole block."""
    return lambda found, nth, size: max(quotas[nth], sum(score > tau for score, _, _ in found))


def factor(f, strict):
    def count(found, nth, size):
        n = 1
        while n < len(found) and found[n][0] >= 1 - f / (n + 2):
            n += 1
        return len(found) if not strict and n == len(found) - 1 else n

    return count


def entropy_bound(gamma):
    def count(found, nth, size):
        entropies = [-score for score, _, _ in found]
        allowed = [
            n
            for n in range(1, len(found) + 1)
            if n == 1 or sum(entropies[:n]) - max(entropies[:n]) <= gamma
        ]
        return max(allowed)

    return count


def plain_row(
    toy,
    ids,
    rule,
    blocks,
    stops=(),
    **cuts,
):
    """The canvas of a row without padding before the first evaluation and after each.

    Args:
        blocks: (positions, count) of each block; count(found, nth, size) -> how many of the found
            are committed.
    """
    ids, canvases = list(ids), [list(ids)]
    to_fill = [position for position, token in enumerate(ids) if token == MASK]
    at = 0
    for size, count in blocks:
        block, at, nth = to_fill[at : at + size], at + size, 0
        while found := find(toy, ids, block, rule, **cuts):
            for _, position, token in found[: count(found, nth, len(block))]:
                ids[position] = token
            nth += 1
            _end(ids, to_fill, stops)
            canvases.append(list(ids))
    return canvases


def _end(ids, to_fill, stops):
    for position in to_fill:
        if ids[position] == MASK:
            return
        if ids[position] in stops:
            for later in to_fill:
                if later > position:
                    ids[later] = ids[position]
            return


def distinct(canvases):
    """These canvases without those that are as the one before: a row that is done waits."""
    return [now for before, now in zip([None, *canvases], canvases, strict=False) if now != before]
