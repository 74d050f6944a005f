"""Measurements of smollm2_diffusion.py: where strongest keys stand, what they carry, what blocking them costs."""

# N texts, B batch, S positions, L layers, H heads, K keys (added sink columns first), D hidden size, T targets
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab import trace
from sinklab.data.rows import place_generator

STRONG = 0.3
"""Mean weight above which a key is strong (Gu et al. 2024, arXiv 2410.10781)."""
FEWEST_QUERIES = 8
"""Queries that must see a key before its mean weight says anything."""
SPIKE_LAYER = 20
"""Hidden states behind this many layers are searched for massive activations."""
TARGETS = tuple(range(36, 128, 13))
"""Positions whose token is predicted from all that stands before it."""
LATE = 32
"""First query of a late block."""


def book_rows(tokenizer: Any, file: Path, length: int, per_book: int) -> Tensor:
    """Consecutive stretches of each book from its beginning on, int64 (N, S), books one behind the other."""
    rows = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(json.loads(line)["text"][: 12 * length * per_book], add_special_tokens=False).input_ids
            rows += [ids[place * length : (place + 1) * length] for place in range(per_book)]
    return torch.tensor(rows)


def masked_at(ids_NS: Tensor, ratio: float, mask_id: int, draw: int = 0) -> Tensor:
    """Texts of which this share of tokens is masked, the same places for every model."""
    noisy_NS = ids_NS.clone()
    count = round(ratio * ids_NS.shape[1])
    for row in range(len(ids_NS)):
        order_S = torch.randperm(ids_NS.shape[1], generator=place_generator(draw, row))
        noisy_NS[row, order_S[:count]] = mask_id
    return noisy_NS


def sight_of(attention: str, length: int) -> Tensor | None:
    """Who sees whom, bool (S, S) for `visible`: full (None), causal, all_first (causal, but row 0 sees all), or alone-N
    (full, but row N sees itself alone).
    """
    if attention == "full":
        return None
    if attention == "causal":
        return torch.ones(length, length, dtype=torch.bool).tril()
    if attention == "all_first":
        seen_SS = torch.ones(length, length, dtype=torch.bool).tril()
        seen_SS[0] = True
        return seen_SS
    row = int(attention.removeprefix("alone-"))
    seen_SS = torch.ones(length, length, dtype=torch.bool)
    seen_SS[row] = False
    seen_SS[row, row] = True
    return seen_SS


@torch.inference_mode()
def weights_of(model: Any, ids_NS: Tensor, visible: Tensor | None = None, batch: int = 8) -> Tensor:
    """Mean weight of every key over the queries that may see it, (N, L, H, K); NaN where too few queries see it."""
    found = []
    for ids_BS in ids_NS.split(batch):
        with trace(model, ("received",)) as recording:
            model(ids_BS, visible=visible, logits_to_keep=torch.zeros(0, dtype=torch.int64))
        seen_BK = recording.visible[0].float()
        weight_BLHK = recording.received[0] / seen_BK[:, None, None]
        found.append(weight_BLHK.masked_fill((seen_BK < FEWEST_QUERIES)[:, None, None], torch.nan))
    return torch.cat(found)


def strength(weights_NLHK: Tensor, ids_NS: Tensor, noisy_NS: Tensor, tokenizer: Any, mask_id: int) -> dict[str, Any]:
    """How strong the strongest key of each head is, where it stands and which token it is."""
    added = weights_NLHK.shape[-1] - ids_NS.shape[1]
    top_NLH, place_NLH = weights_NLHK.nan_to_num(-1).max(-1)
    strong_NLH = top_NLH > STRONG
    first_NLH = weights_NLHK[..., added]
    tokens: Counter[str] = Counter()
    per_text = []
    for row in range(len(ids_NS)):
        places = place_NLH[row][strong_NLH[row]]
        for place in places.tolist():
            tokens[name_of(place - added, noisy_NS[row], tokenizer, mask_id)] += 1
        counted = Counter(places.tolist()).most_common(2)
        per_text.append(sum(count for _, count in counted) / max(len(places), 1))
    total = max(sum(tokens.values()), 1)
    return {
        "strong_heads": strong_NLH.float().mean((1, 2)).tolist(),
        "strongest_share": top_NLH.mean((1, 2)).tolist(),
        "first_share": first_NLH.mean((1, 2)).tolist(),
        "first_strong_heads": float((first_NLH.mean(0) > STRONG).float().mean()),
        "first_strong_pairs": (first_NLH.mean(0) > STRONG).nonzero().tolist(),
        "added_share": weights_NLHK[..., :added].sum(-1).mean((1, 2)).tolist() if added else None,
        "added_of_strong": float(((place_NLH < added) & strong_NLH).sum() / strong_NLH.sum().clamp_min(1)),
        "on_two_places": per_text,
        "tokens": {token: count / total for token, count in tokens.most_common(8)},
    }


def name_of(place: int, noisy_S: Tensor, tokenizer: Any, mask_id: int) -> str:
    """The token at a place as a person reads it."""
    if place < 0:
        return "added token"
    token = int(noisy_S[place])
    return "[MASK]" if token == mask_id else tokenizer.decode([token])


@contextmanager
def states_behind(model: Any, layer: int) -> Iterator[list[Tensor]]:
    """Hidden states (B, S, D) that leave this layer, one tensor a forward."""
    kept: list[Tensor] = []
    hook = model.model.layers[layer - 1].register_forward_hook(
        lambda module, args, out: kept.append((out[0] if isinstance(out, tuple) else out).detach())
    )
    try:
        yield kept
    finally:
        hook.remove()


@torch.inference_mode()
def spikes(model: Any, ids_NS: Tensor, visible: Tensor | None, layer: int = SPIKE_LAYER) -> dict[str, Any]:
    """The greatest magnitude of the hidden states of each text: its size, position and channel; and the median."""
    with states_behind(model, layer) as kept:
        for ids_BS in ids_NS.split(8):
            model(ids_BS, visible=visible, logits_to_keep=torch.zeros(0, dtype=torch.int64))
    size_NSD = torch.cat(kept)[:, -ids_NS.shape[1] :].abs()
    greatest_N, flat_N = size_NSD.flatten(1).max(1)
    width = size_NSD.shape[-1]
    return {
        "greatest": greatest_N.tolist(),
        "median": float(size_NSD.amax(-1).median()),
        "position": (flat_N // width).tolist(),
        "channel": (flat_N % width).tolist(),
    }


@torch.inference_mode()
def value_norms(model: Any, ids_NS: Tensor, visible: Tensor | None) -> dict[str, Any]:
    """Norm of the strongest key's value over the mean of the other positions', median over strong heads, per text."""
    norms: list[list[Tensor]] = []
    hooks = []

    def keep(module: Any, args: Any, value_BSE: Tensor) -> None:
        if value_BSE.shape[1] == ids_NS.shape[1]:
            norms[-1].append(value_BSE.unflatten(-1, (heads, -1)).norm(dim=-1).transpose(1, 2))

    heads = model.config.backbone.num_key_value_heads
    for layer in model.model.layers:
        hooks.append(layer.self_attn.v_proj.register_forward_hook(keep))
    try:
        weights = []
        for ids_BS in ids_NS.split(8):
            norms.append([])
            weights.append(weights_of(model, ids_BS, visible))
    finally:
        for hook in hooks:
            hook.remove()
    norm_NLGS = torch.cat([torch.stack(parts, 1) for parts in norms])
    weight_NLHS = torch.cat(weights)[..., -ids_NS.shape[1] :].nan_to_num(-1)
    share = weight_NLHS.shape[2] // norm_NLGS.shape[2]
    norm_NLHS = norm_NLGS.repeat_interleave(share, 2)
    top_NLH, place_NLH = weight_NLHS.max(-1)
    mine_NLH = norm_NLHS.gather(-1, place_NLH[..., None])[..., 0]
    others_NLH = (norm_NLHS.sum(-1) - mine_NLH) / (norm_NLHS.shape[-1] - 1)
    ratio_NLH = (mine_NLH / others_NLH).masked_fill(top_NLH <= STRONG, torch.nan)
    return {"ratio": ratio_NLH.flatten(1).nanmedian(1).values.tolist()}


def blocked(seen: Tensor | None, keys_N: Tensor, first: int, length: int) -> Tensor:
    """Sight (N, S, S) in which one key of each text is blocked for the queries from `first` on, never for its own."""
    base_SS = torch.ones(length, length, dtype=torch.bool) if seen is None else seen
    seen_NSS = base_SS.expand(len(keys_N), -1, -1).clone()
    for row, key in enumerate(keys_N.tolist()):
        own = bool(seen_NSS[row, key, key])
        seen_NSS[row, first:, key] = False
        seen_NSS[row, key, key] = own
    return seen_NSS


@torch.inference_mode()
def block_costs(model: Any, ids_NS: Tensor, attention: str, mask_id: int) -> dict[str, Any]:
    """Nats of p(x_i | x_<i) at the targets, per text, with the strongest key of a text and a random one blocked for all
    queries or for late ones; and the greatest weight of any key afterwards.

    A model whose attention is causal is read in one pass; one that sees both sides is given the prefix and [MASK]
    behind it, a canvas for each target.
    """
    length = ids_NS.shape[1]
    seen = sight_of(attention, length)
    is_causal = attention == "causal"
    canvases = [ids_NS] if is_causal else [_prefix(ids_NS, target, mask_id) for target in TARGETS]
    costs: dict[str, list[Tensor]] = {}
    shares: dict[str, list[Tensor]] = {}
    for number, canvas_NS in enumerate(canvases):
        targets = TARGETS if is_causal else (TARGETS[number],)
        weight_NK = weights_of(model, canvas_NS, seen).nan_to_num(0).mean((1, 2))[:, -length:]
        top_N = weight_NK.argmax(-1)
        random_N = torch.stack([_alike(int(top), min(targets), length, row) for row, top in enumerate(top_N)])
        arms = {
            "none": None,
            "all": blocked(seen, top_N, 0, length),
            "late": blocked(seen, top_N, LATE, length),
            "random all": blocked(seen, random_N, 0, length),
            "random late": blocked(seen, random_N, LATE, length),
        }
        for arm, seen_NSS in arms.items():
            loss_NT, after_N = _losses(model, canvas_NS, ids_NS, seen if seen_NSS is None else seen_NSS, targets)
            costs.setdefault(arm, []).append(loss_NT)
            shares.setdefault(arm, []).append(after_N)
    return {
        "loss": {arm: torch.cat(parts, 1).mean(1).tolist() for arm, parts in costs.items()},
        "strongest_after": {arm: torch.stack(parts).mean(0).tolist() for arm, parts in shares.items()},
    }


def _prefix(ids_NS: Tensor, target: int, mask_id: int) -> Tensor:
    canvas_NS = ids_NS.clone()
    canvas_NS[:, target:] = mask_id
    return canvas_NS


def _alike(top: int, target: int, length: int, row: int) -> Tensor:
    """Another key of the same state: of the prefix where the strongest is, else of the masked part."""
    low, high = (0, target) if top < target else (target, length)
    place = int(torch.randint(low, high - 1, (), generator=place_generator(0, row, target)))
    return torch.tensor(place + (place >= top))


def _losses(model: Any, canvas_NS: Tensor, ids_NS: Tensor, seen: Tensor | None, targets: tuple[int, ...]) -> Any:
    """Nats at the targets (N, T), and the greatest mean weight of a key over layers and heads (N,)."""
    losses, after = [], []
    for start in range(0, len(canvas_NS), 8):
        part = slice(start, start + 8)
        visible = seen if seen is None or seen.ndim == 2 else seen[part]
        wanted_BS = torch.zeros_like(canvas_NS[part], dtype=torch.bool)
        wanted_BS[:, list(targets)] = True
        with trace(model, ("received",)) as recording:
            logits_MV = model(canvas_NS[part], visible=visible, logits_to_keep=wanted_BS).logits
        truth_M = ids_NS[part][wanted_BS]
        losses.append(cross_entropy(logits_MV.float(), truth_M, reduction="none").view(-1, len(targets)))
        seen_BK = recording.visible[0].float()
        mean_BK = (recording.received[0] / seen_BK.clamp_min(FEWEST_QUERIES)[:, None, None]).mean((1, 2))
        after.append(mean_BK.max(-1).values)
    return torch.cat(losses), torch.cat(after)


def interval(values: Any, seed: int = 0) -> dict[str, float]:
    """Mean over texts with its 95 % interval (Student's t)."""
    from scipy import stats

    array = np.asarray(values, float)
    array = array[~np.isnan(array)]
    reach = stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array))
    return {"mean": float(array.mean()), "low": float(array.mean() - reach), "high": float(array.mean() + reach)}
