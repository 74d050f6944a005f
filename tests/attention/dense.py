"""The whole map in float64 and every statistic of it: the slow twins."""

import math

import torch


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
