"""Statistics of softmax attention that never hold the S x S map: received attention, log-sum-exp,
entropy, Eq. 20.

`attention_statistics` computes any of them in one pass over the scores; the other functions are one
of them each.
"""

# B batch, H query heads (those selected), K key/value heads, Q queries, S keys, D head dim, G query
# groups, C queries of a chunk, R = B·H of a chunk
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from sinklab.core.attention.chunks import LN2, chunks, exactly
from sinklab.core.attention.scores import Scores, of_heads
from sinklab.core.errors import check_tensor, one_of
from sinklab.core.registry import fast_passes, fast_path

Pass = Callable[[Scores, Collection[str], Tensor | None, Tensor | None], dict[str, Tensor]]
"""Signature of a pass: (scores, names, groups_BGQ, norms_BKS) -> the named results; "received" (B,
H, G, S).
"""


class CallOptions(TypedDict, total=False):
    """Optional arguments of a call beside queries and keys, as `Scores.of` takes them."""

    mask: Tensor | None
    is_causal: bool
    scale: float | None
    heads: Sequence[int] | None
    """Query heads to compute, in this order; all when left out."""


STATISTICS = ("received", "row_entropy", "row_logsumexp", "noop_bound")


def attention_statistics(
    scores: Scores,
    names: Collection[str],
    *,
    v_BKSD: Tensor | None = None,
    groups_BGQ: Tensor | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """Any of "received", "row_entropy", "row_logsumexp" and "noop_bound" in one pass: a second
    costs little.

    Shapes and meanings are those of the functions of these names (`received_attention`); H counts
    the heads that `Scores.of(…, heads=…)` was called for. `v_BKSD` is needed for the bound.

    Raises ValueError for an unknown name, and when shapes do not fit.
    """
    for name in names:
        one_of("a statistic of a pass", name, STATISTICS)
    batch, _, queries = scores.shape
    device = scores.q_BHQD.device
    groups = groups_BGQ
    if groups is not None:
        check_tensor("groups_BGQ", groups, (batch, None, queries))
        groups = groups.to(device, scores.dtype)
    norms_BKS = None
    if "noop_bound" in names:
        if v_BKSD is None:
            raise ValueError(
                "noop_bound weighs the norms of the values, but none were given: pass v_BKSD"
            )
        norms_BKS = value_norms(v_BKSD, per_head=True).to(scores.dtype)
    fused: Pass | None = None
    if chunk is None:
        fused = fast_path(fast_passes, scores, names)
    if fused is not None:
        results = fused(scores, names, groups, norms_BKS)
    else:
        with exactly(device):
            results = _in_chunks(scores, names, groups, norms_BKS, chunk)
    if "received" in results:
        received = results["received"].transpose(1, 2)
        if groups is None:
            received = received[:, 0]
        results["received"] = received
    return results


def _in_chunks(
    scores: Scores,
    names: Collection[str],
    groups: Tensor | None,
    norms_BKS: Tensor | None,
    chunk: int | None,
) -> dict[str, Tensor]:
    """The pass as a loop over chunks of rows: the reference for every faster one."""
    batch, heads, queries = scores.shape
    like: dict[str, Any] = {"dtype": scores.dtype, "device": scores.q_BHQD.device}
    if groups is None:
        groups = torch.ones((), **like).expand(batch, 1, queries)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, scores.shape)
    if "received" in shapes:
        shapes["received"] = (batch, heads, groups.shape[1], scores.k_BKSD.shape[2])
    results = {name: torch.zeros(shape, **like) for name, shape in shapes.items()}
    norms_BHS = None
    if norms_BKS is not None:
        norms_BHS = of_heads(norms_BKS, [head // scores.groups for head in scores.chosen])
    for part in chunks(scores, chunk, exponents="row_entropy" in names):
        rows = (part.batches, part.heads, part.queries)
        inverse_BHC = part.inverse_BHC
        if "received" in results:
            weight_BHGC = inverse_BHC.unsqueeze(2) * groups[part.batches, None, :, part.queries]
            # The weighted sum over queries is the normalisation and the column sum in one small
            # matmul.
            sums_RGS = torch.bmm(weight_BHGC.flatten(0, 1), part.weights_BHCS.flatten(0, 1))
            received = results["received"][part.batches, part.heads, :, : part.keys]
            received += sums_RGS.view(*weight_BHGC.shape[:3], part.keys)
        if "row_logsumexp" in results:
            results["row_logsumexp"][rows] = (part.total_BHC.log2() + part.shift_BHC) * LN2
        if norms_BHS is not None:
            norms = norms_BHS[part.batches, part.heads, : part.keys]
            # matmul of these shapes takes up to nine times as long on a CPU
            bound_BHC = torch.einsum("bhcs,bhs->bhc", part.weights_BHCS, norms)
            results["noop_bound"][rows] = bound_BHC * inverse_BHC
        if part.exponents_BHCS is not None:
            # -sum p ln p = ln Z - sum p x for p = exp(x) / Z; a row without keys has neither.
            mean_BHC = part.exponents_BHCS.mul_(part.weights_BHCS).sum(-1) * inverse_BHC
            entropy_BHC = (part.total_BHC.log2() - mean_BHC) * LN2
            entropy_BHC = torch.where(part.total_BHC > 0, entropy_BHC, 0.0)
            results["row_entropy"][rows] = entropy_BHC.clamp_min_(0.0)
        del part
    return results


def received_attention(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    *,
    groups_BGQ: Tensor | None = None,
    chunk: int | None = None,
    **call: Unpack[CallOptions],
) -> Tensor:
    """Attention that every key receives, a_j = sum over queries i of A_ij (arXiv 2510.15731, Eq. 3
    without its 1/S).

    Takes the arguments of `scaled_dot_product_attention` as the model gives them: keys unexpanded
    under grouped heads, boolean mask (True = may attend) or additive mask, both broadcastable to
    (B, H, Q, S). Without `groups_BGQ` returns (B, H, S), which sums to the number of queries over
    keys. With it (boolean, or weights per query) returns (B, G, H, S): the part received from each
    group of queries. float32, float64 for float64 inputs. Memory O(S): a few buffers of `chunk`
    query rows (None: chosen to stay near the caches of the processor).

    Raises ValueError when shapes do not fit.
    """
    scores = Scores.of(q_BHQD, k_BKSD, **call)
    return attention_statistics(scores, ("received",), groups_BGQ=groups_BGQ, chunk=chunk)[
        "received"
    ]


def row_logsumexp(
    q_BHQD: Tensor, k_BKSD: Tensor, *, chunk: int | None = None, **call: Unpack[CallOptions]
) -> Tensor:
    """Natural logarithm of the softmax denominator of every query, (B, H, Q); -inf for a query that
    may see no key.
    """
    return attention_statistics(Scores.of(q_BHQD, k_BKSD, **call), ("row_logsumexp",), chunk=chunk)[
        "row_logsumexp"
    ]


def row_entropy(
    q_BHQD: Tensor, k_BKSD: Tensor, *, chunk: int | None = None, **call: Unpack[CallOptions]
) -> Tensor:
    """Entropy of every attention row, -sum_j A_ij ln A_ij in nats, (B, H, Q); 0 for a query that
    may see no key.
    """
    return attention_statistics(Scores.of(q_BHQD, k_BKSD, **call), ("row_entropy",), chunk=chunk)[
        "row_entropy"
    ]


def noop_bound(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    chunk: int | None = None,
    **call: Unpack[CallOptions],
) -> Tensor:
    """Upper bound of the head output's norm, sum_j A_ij |v_j| (arXiv 2601.19657, Eq. 20), (B, H,
    Q).

    Small when attention rests on keys of small values, the third argument: attending there
    approximates doing nothing.
    """
    scores = Scores.of(q_BHQD, k_BKSD, **call)
    return attention_statistics(scores, ("noop_bound",), v_BKSD=v_BKSD, chunk=chunk)["noop_bound"]


def attention_map(q_BHQD: Tensor, k_BKSD: Tensor, **call: Unpack[CallOptions]) -> Tensor:
    """The whole attention map A of some query heads, (B, H, Q, S), float32 (float64 for float64
    inputs); no gradient.

    The one function here that is not O(S): name the `heads` to look at. A query that may see no key
    has a row of zeros. Raises ValueError when shapes do not fit, or for a head that is not there.
    """
    scores = Scores.of(q_BHQD, k_BKSD, **call)
    shape = (*scores.shape, scores.k_BKSD.shape[2])
    map_BHQS = torch.zeros(shape, dtype=scores.dtype, device=q_BHQD.device)
    with exactly(q_BHQD.device):
        for part in chunks(scores):
            weights_BHCS = part.weights_BHCS * part.inverse_BHC.unsqueeze(-1)
            map_BHQS[part.batches, part.heads, part.queries, : part.keys] = weights_BHCS
    return map_BHQS


def value_norms(v_BKSD: Tensor, *, per_head: bool = False) -> Tensor:
    """L2 norm of every token's value vector, or key vector, averaged over heads (arXiv 2601.19657,
    Eq. 14-16): (B, S).

    `per_head=True` leaves out the average (Eq. 15): (B, K, S). The mean over key/value heads is the
    mean over query heads, since every value head serves the same number of query heads.
    """
    dtype = torch.promote_types(v_BKSD.dtype, torch.float32)
    norms_BKS = torch.linalg.vector_norm(v_BKSD.detach(), dim=-1, dtype=dtype)
    if per_head:
        return norms_BKS
    return norms_BKS.mean(1)


def with_sink_logits(out_BHQD: Tensor, lse_BHQ: Tensor, logits_HN: Tensor) -> Tensor:
    """The attention output as if every row of the softmax had N more terms exp(b), with nothing
    behind them: exact.

    `out_BHQD` and `lse_BHQ` are output and row log-sum-exp without them; out' = out · sigmoid(lse −
    ln Σ_n exp(b_n)). These are the learned sinks of gpt-oss (arXiv 2508.10925), one a head there.
    """
    kept_BHQ = torch.sigmoid(lse_BHQ - logits_HN.to(lse_BHQ).logsumexp(-1)[:, None])
    return out_BHQD * kept_BHQ.unsqueeze(-1).to(out_BHQD.dtype)
