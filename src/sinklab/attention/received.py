"""Statistics of softmax attention that never hold the S x S map: received attention, log-sum-exp, entropy, Eq. 20."""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim, G query groups, C queries of a chunk

import torch
from torch import Tensor

from sinklab.attention.chunks import LN2, Scores
from sinklab.attention.values import value_norms


def received_attention(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    groups_BGQ: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attention that every key receives, a_j = sum over queries i of A_ij (arXiv 2510.15731, Eq. 3 without its 1/S).

    Takes the arguments of `scaled_dot_product_attention` as the model gives them: keys unexpanded under grouped heads,
    boolean mask (True = may attend) or additive mask, both broadcastable to (B, H, Q, S).
    Without `groups_BGQ` returns (B, H, S), which sums to the number of queries over keys. With it (boolean, or weights
    per query) returns (B, G, H, S): the part received from each group of queries. float32, float64 for float64 inputs.
    Memory O(S): one buffer of `chunk` query rows (None: 256 on a CPU, more on an accelerator).

    Raises ValueError when shapes do not fit.
    """
    scores = Scores.of(q_BHQD, k_BKSD, mask, is_causal, scale)
    batch, heads, queries, _ = q_BHQD.shape
    groups = _checked_groups(groups_BGQ, batch, queries, scores.dtype)
    n_groups = 1 if groups is None else groups.shape[1]
    received = torch.zeros(batch, heads, n_groups, k_BKSD.shape[2], dtype=scores.dtype, device=q_BHQD.device)
    with torch.no_grad(), torch.autocast(q_BHQD.device.type, enabled=False):
        for part in scores.chunks(chunk):
            weight_BHGC = part.inverse_total().unsqueeze(2)
            if groups is not None:
                weight_BHGC = weight_BHGC * groups[part.batches, None, :, part.queries]
            # The weighted sum over queries is the normalisation and the column sum in one small matmul.
            sums_RGS = torch.bmm(weight_BHGC.flatten(0, 1), part.weights_BHCS.flatten(0, 1))
            received[part.batches, part.heads, :, : part.keys] += sums_RGS.view(*weight_BHGC.shape[:3], part.keys)
    return received[:, :, 0] if groups is None else received.transpose(1, 2)


def _checked_groups(groups_BGQ: Tensor | None, batch: int, queries: int, dtype: torch.dtype) -> Tensor | None:
    if groups_BGQ is None:
        return None
    if groups_BGQ.dim() != 3 or groups_BGQ.shape[0] != batch or groups_BGQ.shape[2] != queries:
        raise ValueError(
            f"groups_BGQ must have shape (batch, group, query) = ({batch}, any, {queries}), "
            f"got {tuple(groups_BGQ.shape)}"
        )
    return groups_BGQ.to(dtype)


def row_logsumexp(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Natural logarithm of the softmax denominator of every query, (B, H, Q); -inf for a query that may see no key."""
    scores = Scores.of(q_BHQD, k_BKSD, mask, is_causal, scale)
    lse_BHQ = torch.empty(q_BHQD.shape[:3], dtype=scores.dtype, device=q_BHQD.device)
    with torch.no_grad(), torch.autocast(q_BHQD.device.type, enabled=False):
        for part in scores.chunks(chunk):
            lse_BHQ[part.batches, part.heads, part.queries] = (part.total_BHC.log2() + part.shift_BHC) * LN2
    return lse_BHQ


def row_entropy(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Entropy of every attention row, -sum_j A_ij ln A_ij in nats, (B, H, Q); 0 for a query that may see no key."""
    scores = Scores.of(q_BHQD, k_BKSD, mask, is_causal, scale)
    entropy_BHQ = torch.empty(q_BHQD.shape[:3], dtype=scores.dtype, device=q_BHQD.device)
    with torch.no_grad(), torch.autocast(q_BHQD.device.type, enabled=False):
        for part in scores.chunks(chunk):
            p_BHCS = part.weights_BHCS.mul_(part.inverse_total().unsqueeze(-1))
            entropy_BHQ[part.batches, part.heads, part.queries] = torch.special.entr(p_BHCS).sum(-1)
    return entropy_BHQ


def noop_bound(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Upper bound of the head output's norm, sum_j A_ij |v_j| (arXiv 2601.19657, Eq. 20), (B, H, Q).

    Small where attention rests on keys of small values: attending there approximates doing nothing.
    """
    scores = Scores.of(q_BHQD, k_BKSD, mask, is_causal, scale)
    groups = q_BHQD.shape[1] // k_BKSD.shape[1]
    norms_BHS = value_norms(v_BKSD, per_head=True).to(scores.dtype).repeat_interleave(groups, 1)
    bound_BHQ = torch.empty(q_BHQD.shape[:3], dtype=scores.dtype, device=q_BHQD.device)
    with torch.no_grad(), torch.autocast(q_BHQD.device.type, enabled=False):
        for part in scores.chunks(chunk):
            norms = norms_BHS[part.batches, part.heads, : part.keys].unsqueeze(-1)
            sums_BHC = (part.weights_BHCS @ norms).squeeze(-1)
            bound_BHQ[part.batches, part.heads, part.queries] = sums_BHC * part.inverse_total()
    return bound_BHQ
