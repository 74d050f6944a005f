"""Measurements of smollm2_diffusion.py: where strongest keys stand, what they carry, what a start
token changes.
"""

# N texts, B batch, S positions, L layers, H heads, K keys (added sink columns first), D hidden
# size, G key/value heads, M positions that are asked for, V vocabulary, P pairs of layer and head
# or end tokens
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
from torch.nn.functional import cross_entropy, pad

from sinklab import trace
from sinklab.lab.data.rows import place_generator

STRONG = 0.3
"""Mean weight above which a key is strong (Gu et al. 2024, arXiv 2410.10781)."""
FEWEST_QUERIES = 8
"""Queries that must see a key before its mean weight says anything."""
SPIKE_LAYER = 20
"""Hidden states behind this many layers are searched for massive activations."""


def book_rows(tokenizer: Any, file: Path, length: int, per_book: int) -> Tensor:
    """Consecutive stretches of each book from its beginning on, int64 (N, S), books one behind the
    other.
    """
    rows = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(
                json.loads(line)["text"][: 12 * length * per_book], add_special_tokens=False
            ).input_ids
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
    """Who sees whom, bool (S, S) for `visible`: full (None), causal, all_first (causal, but row 0
    sees all), or alone-N (full, but row N sees itself alone).
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
    """Mean weight of every key over the queries that may see it, (N, L, H, K); NaN where too few
    queries see it.
    """
    found = []
    for ids_BS in ids_NS.split(batch):
        with trace(model, ("received",)) as recording:
            model(ids_BS, visible=visible, logits_to_keep=torch.zeros(0, dtype=torch.int64))
        seen_BK = recording.visible[0].float()
        weight_BLHK = recording.received[0] / seen_BK[:, None, None]
        found.append(weight_BLHK.masked_fill((seen_BK < FEWEST_QUERIES)[:, None, None], torch.nan))
    return torch.cat(found)


def strength(
    weights_NLHK: Tensor, ids_NS: Tensor, noisy_NS: Tensor, tokenizer: Any, mask_id: int
) -> dict[str, Any]:
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
        "added_of_strong": float(
            ((place_NLH < added) & strong_NLH).sum() / strong_NLH.sum().clamp_min(1)
        ),
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
def states_behind(model: Any, layer: int, length: int) -> Iterator[list[Tensor]]:
    """Hidden states (B, S, D) that leave this layer, one tensor a forward over so many positions:
    an added sink token runs through the layers by itself, and is left out.
    """
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        state_BSD = out[0] if isinstance(out, tuple) else out
        if state_BSD.shape[1] == length:
            kept.append(state_BSD.detach())

    hook = model.model.layers[layer - 1].register_forward_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()


@torch.inference_mode()
def spikes(
    model: Any, ids_NS: Tensor, visible: Tensor | None, layer: int = SPIKE_LAYER
) -> dict[str, Any]:
    """The greatest magnitude of the hidden states of each text: its size, position and channel; and
    the median.
    """
    with states_behind(model, layer, ids_NS.shape[1]) as kept:
        for ids_BS in ids_NS.split(8):
            model(ids_BS, visible=visible, logits_to_keep=torch.zeros(0, dtype=torch.int64))
    size_NSD = torch.cat(kept).abs()
    greatest_N, flat_N = size_NSD.flatten(1).max(1)
    width = size_NSD.shape[-1]
    return {
        "greatest": greatest_N.tolist(),
        "median": float(size_NSD.amax(-1).median()),
        "position": (flat_N // width).tolist(),
        "channel": (flat_N % width).tolist(),
    }


@torch.inference_mode()
def channels(
    model: Any,
    noisy_NS: Tensor,
    visible: Tensor | None,
    pairs: list[list[int]],
    layer: int = SPIKE_LAYER,
) -> dict[str, Any]:
    """The channel in which the hidden state of each strong key peaks, over the strong heads of each
    text.

    Args:
        model, noisy_NS, visible: as for `weights_of`.
        pairs: (layer, head) of the parent whose first token is strong.
        layer: the hidden states are those that leave so many layers.

    Returns:
        per text ``channels``, share of strong heads by channel (an added sink token has no state of
        the text and counts as "added"), ``size``, the median magnitude there, and ``kept_pairs``,
        the share of the pairs in which the first token is strong.
    """
    with states_behind(model, layer, noisy_NS.shape[1]) as kept:
        weights_NLHK = weights_of(model, noisy_NS, visible)
    size_NSD = torch.cat(kept).abs()
    added = weights_NLHK.shape[-1] - noisy_NS.shape[1]
    top_NLH, place_NLH = weights_NLHK.nan_to_num(-1).max(-1)
    found: dict[str, list[Any]] = {"channels": [], "size": [], "kept_pairs": []}
    for row, size_SD in enumerate(size_NSD):
        counted: Counter[str] = Counter()
        sizes = []
        for place in place_NLH[row][top_NLH[row] > STRONG].tolist():
            if place < added:
                counted["added"] += 1
                continue
            peak, channel = size_SD[place - added].max(-1)
            counted[str(int(channel))] += 1
            sizes.append(float(peak))
        total = max(counted.total(), 1)
        found["channels"].append(
            {channel: count / total for channel, count in counted.most_common(5)}
        )
        found["size"].append(float(np.median(sizes)) if sizes else None)
        is_strong_P = [bool(weights_NLHK[row, one, head, added] > STRONG) for one, head in pairs]
        found["kept_pairs"].append(float(np.mean(is_strong_P)))
    return found


@torch.inference_mode()
def value_norms(model: Any, ids_NS: Tensor, visible: Tensor | None) -> dict[str, Any]:
    """Norm of the strongest key's value over the mean of the others of its text, median over strong
    heads, per text.

    An added sink token counts among the keys.
    """
    norms: list[list[Tensor]] = []
    hooks = []
    groups = model.config.backbone.num_key_value_heads

    def keep(module: Any, args: Any, value_BSE: Tensor) -> None:
        if value_BSE.shape[1] == ids_NS.shape[1]:
            norms[-1].append(value_BSE.unflatten(-1, (groups, -1)).norm(dim=-1).transpose(1, 2))

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
    norm_NLGK = torch.cat([torch.stack(parts, 1) for parts in norms])
    sink = model.sink_prefix(ids_NS.shape[1])
    if sink is not None:
        sink_LGK = torch.stack([values_1GND[0].norm(dim=-1) for values_1GND in sink.values])
        norm_NLGK = torch.cat([sink_LGK.expand(len(ids_NS), -1, -1, -1), norm_NLGK], -1)
    weight_NLHK = torch.cat(weights).nan_to_num(-1)
    norm_NLHK = norm_NLGK.repeat_interleave(weight_NLHK.shape[2] // groups, 2)
    top_NLH, place_NLH = weight_NLHK.max(-1)
    mine_NLH = norm_NLHK.gather(-1, place_NLH[..., None])[..., 0]
    others_NLH = (norm_NLHK.sum(-1) - mine_NLH) / (norm_NLHK.shape[-1] - 1)
    ratio_NLH = (mine_NLH / others_NLH).masked_fill(top_NLH <= STRONG, torch.nan)
    return {"ratio": ratio_NLH.flatten(1).nanmedian(1).values.tolist()}


@torch.inference_mode()
def added_sink(model: Any, ids_NS: Tensor, layer: int = SPIKE_LAYER) -> dict[str, Any]:
    """Mean weight of the added sink token, and its spike, where it sees itself alone and where it
    sees all.

    It is run in the sequence, in front of the text, which is the same as the model's own way where
    it sees itself.
    """
    count, length = model.config.sink_count, ids_NS.shape[1]
    keys = count + length
    own_KK = torch.ones(keys, keys, dtype=torch.bool)
    own_KK[:count] = torch.eye(count, keys, dtype=torch.bool)
    found: dict[str, Any] = {}
    for name, seen_KK in (("alone", own_KK), ("all", torch.ones_like(own_KK))):
        shares, sizes = [], []
        for ids_BS in ids_NS.split(8):
            sink_BND = model.sink_embeddings.expand(len(ids_BS), -1, -1)
            embeds_BKD = torch.cat([sink_BND, model.model.embed_tokens(ids_BS)], 1)
            with (
                trace(model.model, ("received",)) as recording,
                states_behind(model, layer, keys) as kept,
            ):
                model.model(
                    inputs_embeds=embeds_BKD,
                    attention_mask=seen_KK[None, None].expand(len(ids_BS), 1, -1, -1),
                    position_ids=torch.arange(keys)[None],
                    use_cache=False,
                    is_causal=False,
                )
            # of the text's own queries, as where the sink runs by itself
            alone = count if name == "alone" else 0
            share_BLH = (recording.received[0][..., :count].sum(-1) - alone) / (
                length if alone else keys
            )
            shares.append(share_BLH.mean((1, 2)))
            sizes.append(kept[0][:, :count].abs().amax((1, 2)))
        found[name] = {"share": torch.cat(shares).tolist(), "spike": torch.cat(sizes).tolist()}
    return found


@torch.inference_mode()
def masked_losses(
    model: Any, ids_NS: Tensor, masked_NS: Tensor, visible: Tensor | None, mask_id: int | None
) -> list[float]:
    """Nats per text at the masked positions, mean. `mask_id` None leaves the text as it is, for a
    causal model.
    """
    found = []
    for row in range(len(ids_NS)):
        part = slice(row, row + 1)
        ids_1S = (
            ids_NS[part] if mask_id is None else ids_NS[part].masked_fill(masked_NS[part], mask_id)
        )
        logits_MV = model(ids_1S, visible=visible, logits_to_keep=masked_NS[part]).logits
        found.append(float(cross_entropy(logits_MV.float(), ids_NS[part][masked_NS[part]])))
    return found


def starts(
    model: Any, ids_NS: Tensor, attention: str, mask_id: int, bos: int, end: int
) -> dict[str, Any]:
    """Start token and padding: the text as it is, without its first token, behind a start token,
    and followed by end-of-text tokens that are seen or hidden.

    Args:
        model: as for `weights_of`.
        ids_NS: texts.
        attention: as `sight_of` names it.
        mask_id: [MASK]; 15 % of the tokens from the third on are masked, the same in all arms.
        bos, end: ids of the start token and of the end of a text.

    Returns:
        per arm: ``loss`` at those tokens (of a causal model that of the next token there),
        ``first`` mean weight of the first column, ``strongest`` that of the strongest key,
        ``strong_heads``, ``moved``, share of the strong heads whose strongest key is another token
        of the text than without a change, ``end`` attention on all end tokens.
    """
    length, paddings = ids_NS.shape[1], ids_NS.shape[1] // 2
    masked_NS = masked_at(ids_NS, 0.15, -1) == -1
    masked_NS[:, :2] = False
    ends_NP = torch.full((len(ids_NS), paddings), end)
    is_causal = attention == "causal"
    arms = {
        "as it is": (ids_NS, masked_NS, 0, None),
        "first dropped": (ids_NS[:, 1:], masked_NS[:, 1:], -1, None),
        "start token": (pad(ids_NS, (1, 0), value=bos), pad(masked_NS, (1, 0)), 1, None),
        "end seen": (torch.cat([ids_NS, ends_NP], 1), pad(masked_NS, (0, paddings)), 0, None),
        "end hidden": (torch.cat([ids_NS, ends_NP], 1), pad(masked_NS, (0, paddings)), 0, length),
    }
    found: dict[str, Any] = {}
    usual_NLH = torch.zeros(0)
    for arm, (text_NS, wanted_NS, shift, real) in arms.items():
        seen = sight_of(attention, text_NS.shape[1])
        if real is not None:
            hidden_SS = torch.ones(text_NS.shape[1], text_NS.shape[1], dtype=torch.bool)
            # rows of end tokens see one another, and say nothing of the keys of the text
            hidden_SS[:real, real:] = False
            hidden_SS[real:, :real] = False
            seen = hidden_SS if seen is None else seen & hidden_SS
        read_NS = text_NS if is_causal else text_NS.masked_fill(wanted_NS, mask_id)
        weights_NLHK = weights_of(model, read_NS, seen)
        added = weights_NLHK.shape[-1] - text_NS.shape[1]
        text_NLHS = weights_NLHK[..., added:].nan_to_num(0)
        if real is not None:
            text_NLHS = text_NLHS[..., :real]
        top_NLH, place_NLH = text_NLHS.max(-1)
        place_NLH = place_NLH - shift
        usual_NLH = place_NLH if arm == "as it is" else usual_NLH
        strong_NLH = top_NLH > STRONG
        moved_NLH = strong_NLH & (place_NLH != usual_NLH)
        found[arm] = {
            "loss": masked_losses(model, text_NS, wanted_NS, seen, None if is_causal else mask_id),
            "first": text_NLHS[..., 0].mean((1, 2)).tolist(),
            "strongest": top_NLH.mean((1, 2)).tolist(),
            "strong_heads": strong_NLH.float().mean((1, 2)).tolist(),
            "moved": float(moved_NLH.sum() / strong_NLH.sum().clamp_min(1)),
            "end": text_NLHS[..., length:].sum(-1).mean((1, 2)).tolist()
            if arm == "end seen"
            else None,
        }
    return found


def interval(values: Any, seed: int = 0) -> dict[str, float]:
    """Mean over texts with its 95 % interval (Student's t)."""
    from scipy import stats

    array = np.asarray(values, float)
    array = array[~np.isnan(array)]
    reach = stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array))
    return {
        "mean": float(array.mean()),
        "low": float(array.mean() - reach),
        "high": float(array.mean() + reach),
    }
