"""Dense attention in place of SDPA: hides keys by hand and remembers every map; the slow twin of
the edits.
"""

# B batch, H heads, Q queries, S keys
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Hide = Callable[[int, Tensor], Tensor | None]
"""(layer, map before) -> what to hide, bool broadcastable to (B, H, Q, S), or None"""


class DenseTwin:
    """One forward. Each of `edits` sees the map that the one before it left; `zeroed` says whose
    values add nothing, `values` (layer, map, values) gives others.
    """

    def __init__(self, *edits, zeroed=None, values=None):
        self.edits, self.zeroed, self.values = edits, zeroed, values
        self.before = []
        self.maps = []

    def __call__(
        self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        layer, groups = len(self.maps), q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        if is_causal:
            x = x.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        if attn_mask is not None:
            x = (
                x.masked_fill(~attn_mask, -math.inf)
                if attn_mask.dtype == torch.bool
                else x + attn_mask
            )
        self.before.append([])
        for hide in self.edits:
            a = torch.softmax(x, -1).nan_to_num()
            self.before[-1].append(a)
            gone = hide(layer, a)
            if gone is not None:
                less = x.masked_fill(gone, -math.inf)
                x = torch.where((less == -math.inf).all(-1, keepdim=True), x, less)
        a = torch.softmax(x, -1).nan_to_num()
        self.maps.append(a)
        v = v if self.values is None else self.values(layer, a, v)
        zero = None if self.zeroed is None else self.zeroed(layer, a)
        return a @ (v if zero is None else v.masked_fill(zero.unsqueeze(-1), 0.0))


def dense(model, run, *edits, zeroed=None, values=None):
    """The output of `run()` with the twin in place of SDPA, and the twin."""
    twin = DenseTwin(*edits, zeroed=zeroed, values=values)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", twin)
        return run(), twin


def received(maps, real_BS=None):
    """Column sums (B, H, S) of a map (B, H, Q, S), over the queries that are not padding."""
    if real_BS is not None:
        maps = maps * real_BS[:, None, :, None]
    return maps.sum(-2)


def at(*positions):
    """These of twelve positions as flags."""
    return torch.isin(torch.arange(12), torch.tensor(positions))


def over_queries(rows_BHQ, real_BS):
    """The mean (B, H) over the queries that are not padding, in float32."""
    return ((rows_BHQ * real_BS[:, None]).sum(-1) / real_BS.sum(-1, keepdim=True)).float()


def top(score_BHS, k):
    """The k largest of every head as flags (B, H, 1, S), to hide them."""
    gone = torch.zeros_like(score_BHS, dtype=torch.bool).scatter(
        -1, score_BHS.topk(k, -1).indices, True
    )
    return gone.unsqueeze(2)
