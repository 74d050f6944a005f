"""Measurements of smollm2_diffusion.py: what blocking the strongest keys costs, and whether that is
recomputation.
"""

# N texts, B batch, S positions, K keys (added sink tokens first), M keys that are blocked or tokens
# that are asked for, T targets, V vocabulary
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from smollm2_measures import FEWEST_QUERIES, sight_of
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab import BlockKeys, trace
from sinklab.core.instrument import intervene
from sinklab.lab.data.rows import place_generator
from sinklab.lab.measures import MaskPositions

TARGETS = tuple(range(36, 128, 13))
"""Positions whose token is predicted from all that stands before it."""
LATE = 32
"""First query of a late block, and first position that is computed anew where earlier rows are
kept.
"""
REMOVED = 0.25
"""Share of all attention that the greater number of blocked keys takes away."""


@torch.inference_mode()
def block_costs(model: Any, ids_NS: Tensor, attention: str, mask_id: int) -> dict[str, Any]:
    """Nats of p(x_i | x_<i) at the targets, per text, with the strongest keys of a text and random
    ones blocked for all queries or for late ones; and the greatest weight of any key afterwards.

    Keys are those that receive most over all layers and heads, 1 of them, and as many as take 25 %
    of all attention. A model whose attention is causal is read in one pass; one that sees both
    sides is given the prefix and [MASK] behind it, a canvas for each target.

    Returns:
        ``none``, nats per text with nothing blocked; ``keys``, by "1" and "25 %": the number ``k``,
        the share ``removed``, nats by arm ``loss``, greatest weight of a key by arm
        ``strongest_after``, and the blocked keys of each canvas ``blocked`` and ``random`` (an
        added sink token is below 0).
    """
    seen = sight_of(attention, ids_NS.shape[1])
    canvases = canvases_of(ids_NS, attention, mask_id)
    weights, held, none = [], [], []
    for canvas_NS, targets in canvases:
        weight_NK, held_NK = received_over_heads(model, canvas_NS, seen)
        weights.append(weight_NK)
        held.append(held_NK)
        none.append(losses(model, canvas_NS, ids_NS, seen, targets)[0])
    keys = {"1": _with_keys(model, ids_NS, seen, canvases, weights, 1)}
    more = fewest_keys(weights, held)
    keys["25 %"] = (
        keys["1"] if more == 1 else _with_keys(model, ids_NS, seen, canvases, weights, more)
    )
    for one in keys.values():
        one["removed"] = removed(weights, held, one["k"])
    return {"none": torch.cat(none, 1).mean(1).tolist(), "keys": keys}


def _with_keys(
    model: Any,
    ids_NS: Tensor,
    seen: Tensor | None,
    canvases: list[Any],
    weights: list[Tensor],
    count: int,
) -> dict[str, Any]:
    """What `block_costs` says of so many blocked keys, but for the share that they hold."""
    length = ids_NS.shape[1]
    nats: dict[str, list[Tensor]] = {}
    after: dict[str, list[Tensor]] = {}
    blocked_keys, random_keys = [], []
    for (canvas_NS, targets), weight_NK in zip(canvases, weights, strict=True):
        # keys of the text count from 0, added sink tokens stand below
        top_NM = weight_NK.topk(count).indices - (weight_NK.shape[1] - length)
        other_NM = torch.stack(
            [alike(keys_M, min(targets), length, row) for row, keys_M in enumerate(top_NM)]
        )
        blocked_keys.append(top_NM.tolist())
        random_keys.append(other_NM.tolist())
        for arm, keys_NM in (("", top_NM), ("random ", other_NM)):
            for when, first in (("all", 0), ("late", LATE)):
                loss_NT, after_N = losses(model, canvas_NS, ids_NS, seen, targets, keys_NM, first)
                nats.setdefault(arm + when, []).append(loss_NT)
                after.setdefault(arm + when, []).append(after_N)
    return {
        "k": count,
        "loss": {arm: torch.cat(parts, 1).mean(1).tolist() for arm, parts in nats.items()},
        "strongest_after": {
            arm: torch.stack(parts).mean(0).tolist() for arm, parts in after.items()
        },
        "blocked": blocked_keys,
        "random": random_keys,
    }


def canvases_of(
    ids_NS: Tensor, attention: str, mask_id: int
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """What a model reads to predict the targets, and which of them."""
    if attention == "causal":
        return [(ids_NS, TARGETS)]
    found = []
    for target in TARGETS:
        canvas_NS = ids_NS.clone()
        canvas_NS[:, target:] = mask_id
        found.append((canvas_NS, (target,)))
    return found


def received_over_heads(
    model: Any, canvas_NS: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mean over layers and heads: weight of each key over the queries that see it (0 where too few
    do), and its share of all attention, both (N, K).
    """
    weights, held = [], []
    for canvas_BS in canvas_NS.split(8):
        with trace(model, ("received",)) as recording:
            model(canvas_BS, visible=seen, logits_to_keep=torch.zeros(0, dtype=torch.int64))
        received_BK, seen_BK = recording.received[0].mean((1, 2)), recording.visible[0].float()
        weights.append(
            (received_BK / seen_BK.clamp_min(1)).masked_fill(seen_BK < FEWEST_QUERIES, 0)
        )
        held.append(received_BK / canvas_NS.shape[1])
    return torch.cat(weights), torch.cat(held)


def removed(weights: list[Tensor], held: list[Tensor], count: int) -> float:
    """Share of all attention that the strongest keys of each text hold, mean over texts and
    canvases.
    """
    shares = []
    for weight_NK, held_NK in zip(weights, held, strict=True):
        shares.append(held_NK.gather(1, weight_NK.topk(count).indices).sum(1))
    return float(torch.cat(shares).mean())


def fewest_keys(weights: list[Tensor], held: list[Tensor]) -> int:
    """The fewest strongest keys of a text that hold `REMOVED` of all attention; at most a quarter
    of the keys.
    """
    most = weights[0].shape[1] // 4
    for count in range(1, most):
        if removed(weights, held, count) >= REMOVED:
            return count
    return most


def alike(keys_M: Tensor, target: int, length: int, row: int) -> Tensor:
    """As many other keys of the same state (before the target or masked) and age (before `LATE` or
    later), (M,).

    An added sink token stands for the oldest keys. Where there are too few such keys, any others.
    """
    bounds = ((0, LATE), (LATE, target), (target, length))
    generator = place_generator(0, row, target)
    chosen: list[int] = []
    blocked = set(keys_M.tolist())
    for key in keys_M.tolist():
        first, stop = next((low, high) for low, high in bounds if max(key, 0) < high)
        free = [
            place for place in range(first, stop) if place not in blocked and place not in chosen
        ]
        if not free:
            free = [
                place for place in range(length) if place not in blocked and place not in chosen
            ]
        chosen.append(free[int(torch.randint(len(free), (), generator=generator))])
    return torch.tensor(chosen)


def blocked(seen: Tensor | None, keys_NM: Tensor, first: int, length: int) -> Tensor:
    """Sight (N, S, S) in which some keys of each text are blocked for the queries from `first` on,
    never for their own.

    Keys below 0, added sink tokens, are left out.
    """
    base_SS = torch.ones(length, length, dtype=torch.bool) if seen is None else seen
    seen_NSS = base_SS.expand(len(keys_NM), -1, -1).clone()
    for row, keys_M in enumerate(keys_NM.tolist()):
        for key in keys_M:
            if key >= 0:
                own = bool(seen_NSS[row, key, key])
                seen_NSS[row, first:, key] = False
                seen_NSS[row, key, key] = own
    return seen_NSS


@torch.inference_mode()
def losses(
    model: Any,
    canvas_NS: Tensor,
    ids_NS: Tensor,
    seen: Tensor | None,
    targets: tuple[int, ...],
    keys_NM: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Nats at the targets (N, T), and the greatest mean weight of a key over layers and heads (N,).

    keys_NM: keys that are blocked for the queries from `first` on; None for none.
    """
    length = canvas_NS.shape[1]
    sight = seen if keys_NM is None else blocked(seen, keys_NM, first, length)
    # an added sink token is no key of the text, and is blocked by an edit
    loses_sink_N = (
        torch.zeros(len(canvas_NS), dtype=torch.bool) if keys_NM is None else (keys_NM < 0).any(1)
    )
    loss_NT, after_N = torch.zeros(len(canvas_NS), len(targets)), torch.zeros(len(canvas_NS))
    for loses_sink in (False, True):
        rows = (loses_sink_N == loses_sink).nonzero()[:, 0]
        for part in rows.split(8):
            if not len(part):
                continue
            visible = sight if sight is None or sight.ndim == 2 else sight[part]
            with intervene(model, sink_blocked(model, first)) if loses_sink else nullcontext():
                loss_NT[part], after_N[part] = _read(
                    model, canvas_NS[part], ids_NS[part], visible, targets
                )
    return loss_NT, after_N


def sink_blocked(model: Any, first: int) -> BlockKeys:
    """The edit that blocks the added sink tokens for the queries from `first` on."""
    return MaskPositions(added=tuple(range(model.config.sink_count)), queries=f"from{first}")


def _read(
    model: Any, canvas_BS: Tensor, ids_BS: Tensor, visible: Tensor | None, targets: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    wanted_BS = torch.zeros_like(canvas_BS, dtype=torch.bool)
    wanted_BS[:, list(targets)] = True
    with trace(model, ("received",)) as recording:
        logits_MV = model(canvas_BS, visible=visible, logits_to_keep=wanted_BS).logits
    loss_M = cross_entropy(logits_MV.float(), ids_BS[wanted_BS], reduction="none")
    seen_BK = recording.visible[0].float()
    mean_BK = (recording.received[0] / seen_BK.clamp_min(FEWEST_QUERIES)[:, None, None]).mean(
        (1, 2)
    )
    return loss_M.view(-1, len(targets)), mean_BK.max(-1).values


@contextmanager
def attending(model: Any, form: str) -> Iterator[None]:
    """The model with another form of attention as its own: full, causal or first_alone."""
    before, model.config.attention = model.config.attention, form
    try:
        yield
    finally:
        model.config.attention = before


@torch.inference_mode()
def kept_costs(
    model: Any, ids_NS: Tensor, attention: str, mask_id: int, costs: dict[str, Any]
) -> dict[str, Any]:
    """Nats of the same conditionals where the rows before `LATE` are kept as they were computed,
    and only later rows are computed anew: with nothing blocked, with the strongest key of
    `block_costs` blocked for these, and a random one.

    The rows are kept when the text has `LATE` tokens and [MASK] stands behind them, as the cache
    "prefix" keeps what stands to the left of a block; of a causal model that is its KV cache. The
    row before the first new one is computed as well where logits are shifted.

    Args:
        model, ids_NS, attention, mask_id: as for `block_costs`.
        costs: what `block_costs` gave for the same texts.
    """
    canvases = canvases_of(ids_NS, attention, mask_id)
    one = costs["keys"]["1"]
    nats: dict[str, list[list[float]]] = {"none": [], "blocked": [], "random": []}
    inside = []
    start_NS = ids_NS.clone()
    start_NS[:, LATE:] = mask_id
    # a memory of keys and values needs to know who sees whom from the model itself
    with attending(model, "causal" if attention == "causal" else model.config.attention):
        for row in range(len(ids_NS)):
            session = model.denoiser(plain=True).begin()
            session(start_NS[row : row + 1], _wanted(start_NS[:1], (LATE,)))
            of_row: dict[str, list[float]] = {arm: [] for arm in nats}
            for number, (canvas_NS, targets) in enumerate(canvases):
                (key,), (other,) = one["blocked"][number][row], one["random"][number][row]
                inside.append(key < LATE - 1)
                truth_T = ids_NS[row, list(targets)]
                for arm, place in (("none", None), ("blocked", key), ("random", other)):
                    wanted_1S, later = (
                        _wanted(canvas_NS[:1], targets),
                        slice(LATE, canvas_NS.shape[1]),
                    )
                    with (
                        nullcontext()
                        if place is None
                        else intervene(model, _blocking(place, model))
                    ):
                        logits_TV = session(canvas_NS[row : row + 1], wanted_1S, later)
                    of_row[arm] += cross_entropy(
                        logits_TV.float(), truth_T, reduction="none"
                    ).tolist()
            for arm, values in of_row.items():
                nats[arm].append(values)
    means = {arm: [sum(values) / len(values) for values in rows] for arm, rows in nats.items()}
    return {"loss": means, "inside": sum(inside) / len(inside)}


def _wanted(ids_1S: Tensor, targets: tuple[int, ...]) -> Tensor:
    wanted_1S = torch.zeros_like(ids_1S, dtype=torch.bool)
    wanted_1S[:, list(targets)] = True
    return wanted_1S


def _blocking(place: int, model: Any) -> BlockKeys:
    """The edit that blocks a key, or below 0 the added sink tokens, for the late queries."""
    return (
        sink_blocked(model, LATE) if place < 0 else MaskPositions((place,), queries=f"from{LATE}")
    )
