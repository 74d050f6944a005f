"""The whole map in float64 and every statistic of it: the slow twins; and masks of every kind."""

import math
from contextlib import contextmanager

import torch

from sinklab.core.attention import Scores, attention_statistics


@contextmanager
def float32_precision(name):
    """Products of float32 as precise as torch's switch says inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def dense_scores(q, k, mask=None, is_causal=False, scale=None):
    """Scores of query heads before their keys, masked."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    x = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        x = x.masked_fill(
            ~torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(), -math.inf
        )
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask.double()
    return x


def dense_attention(*args, **options):
    return torch.softmax(dense_scores(*args, **options), -1).nan_to_num(0.0)


def twins(q, k, v, mask, is_causal, groups):
    x = dense_scores(q, k, mask, is_causal)
    a = torch.softmax(x, -1).nan_to_num(0.0)
    norms = v.double().norm(dim=-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return {
        "received": torch.einsum("bgq,bhqs->bghs", groups.double(), a),
        "row_entropy": torch.special.entr(a).sum(-1),
        "row_logsumexp": torch.logsumexp(x, -1),
        "noop_bound": torch.einsum("bhqs,bhs->bhq", a, norms),
    }


def received_attention(q, k, *, groups_BGQ=None, chunk=None, **call):
    """Not a twin: what the package says each key receives."""
    scores = Scores.of(q, k, **call)
    found = attention_statistics(scores, ("received",), groups_BGQ=groups_BGQ, chunk=chunk)
    return found["received"]


ALL = ("received", "row_entropy", "row_logsumexp", "noop_bound")
KINDS = (
    "none",
    "causal",
    "padding",
    "padding_expanded",
    "an_empty_row",
    "two_axes",
    "keys_by_head",
    "additive",
    "additive_keys",
    "least",
    "causal_padding",
)


def mask_of(kind, batch, heads, queries, keys, dtype=torch.float32, device="cpu"):
    """A mask of this kind for a call of these sizes; and whether the call is causal."""
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=device)
    padding[0, ..., :5] = False
    seen = torch.rand(batch, 1, queries, keys, device=device) > 0.3
    seen[0, 0, queries // 2] = False
    additive = torch.randn(batch, heads, queries, keys, device=device, dtype=dtype)
    additive = additive.masked_fill(~seen, -math.inf)
    least = torch.zeros_like(additive[:, :1]).masked_fill(~seen, torch.finfo(dtype).min)
    masks = {
        "padding": padding,
        "causal_padding": padding,
        "padding_expanded": padding.expand(batch, 1, queries, keys),
        "an_empty_row": seen,
        "two_axes": seen[-1, 0],
        "keys_by_head": torch.rand(batch, heads, 1, keys, device=device) > 0.2,
        "additive": additive,
        "additive_keys": additive[:, :1, :1].clamp_min(-9),
        "least": least,
    }
    return masks.get(kind), kind.startswith("causal")
