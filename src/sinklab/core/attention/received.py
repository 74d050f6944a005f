"""Received attention: how much attention each key of a call gets from all queries together.

A row of the attention map says where one query looks. A sink shows down a column, in a_j = Σ_i A_ij
(arXiv 2510.15731, Eq. 3 without its 1/S). Models never hold the map, whose size is S × S in every
head: `softmax_rows` computes it again, a chunk of rows at a time, in a buffer that the next chunk
overwrites. `attention_statistics` sums the columns and reads off whatever else is wanted, in one
pass and O(S) memory. Sums are in float32, since half precision would drift by percents. On a GPU
the kernels of ``extras/fast`` do the same pass, and are tested against this loop.
"""

# B batch, H selected query heads, K key/value heads, Q queries, S keys, D head dim, G query groups,
# C queries of a chunk
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import on_device
from sinklab.core.attention.visibility import compact
from sinklab.core.compat import without_tf32
from sinklab.core.errors import check_tensor, one_of
from sinklab.core.registry import fast_passes, fast_path

STATISTICS = ("received", "row_entropy", "row_logsumexp", "noop_bound")
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
CHUNK = {"cpu": (1 << 20, 256)}
"""By kind of device, the most scores and queries of a chunk: a CPU's must fit its caches."""
CHUNK_ELSEWHERE = (1 << 23, 1024)
"""Limits on an accelerator, which wants few launches."""
NEVER = -1e6
"""A finite exponent with an exponential of zero in every precision."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Queries, keys, mask and scale of a call, made by `Scores.of`."""

    q_BHQD: Tensor
    k_BKSD: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    chosen: tuple[int, ...]
    """Query heads to compute, the H axis of every result."""

    @classmethod
    def of(
        cls,
        q_BHQD: Tensor,
        k_BKSD: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        heads: Sequence[int] | None = None,
    ) -> Scores:
        """From the arguments of `scaled_dot_product_attention`, for some query heads or all. Raises
        ValueError when shapes do not fit, or for a head that is not there.
        """
        q, k = q_BHQD.shape, k_BKSD.shape
        fits = len(q) == len(k) == 4 and q[0] == k[0] and q[3] == k[3] and q[2] and k[2]
        if not fits or q[1] % k[1]:
            raise ValueError(
                "q and k must have four axes (batch, head, position, dim), share batch and head "
                "dim, have at least one position, and query heads must be a multiple of key heads, "
                f"got {tuple(q)} and {tuple(k)}: check the order, and add missing axes by unsqueeze"
            )
        chosen = tuple(range(q[1]) if heads is None else heads)
        for head in chosen:
            if not 0 <= head < q[1]:
                raise ValueError(
                    f"query heads are 0 … {q[1] - 1}, got {head}: name heads of this call"
                )
        if scale is None:
            scale = q[3] ** -0.5
        if mask is not None:
            mask = compact(mask)
            whole = (*q[:3], k[2])
            if any(own not in (1, size) for own, size in zip(mask.shape, whole, strict=True)):
                raise ValueError(
                    f"mask must broadcast to (batch, head, query, key) = {whole}, got "
                    f"{tuple(mask.shape)}"
                )
        return cls(q_BHQD.detach(), k_BKSD.detach(), mask, is_causal, scale, chosen)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, H, Q) of the selected heads."""
        return self.q_BHQD.shape[0], len(self.chosen), self.q_BHQD.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.promote_types(self.q_BHQD.dtype, torch.float32)

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.q_BHQD.shape[1] // self.k_BKSD.shape[1]


Pass = Callable[[Scores, Collection[str], Tensor | None, Tensor | None], dict[str, Tensor]]
"""A pass over (scores, names, groups_BGQ, norms_BKS) gives the named results, "received" as
(B, H, G, S).
"""


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Run without gradients, autocast or TF32."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), without_tf32(device):
        yield


def of_heads(x_BHSD: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads, as a view if they are consecutive."""
    consecutive = range(heads[0], heads[-1] + 1)
    if list(heads) == list(consecutive):
        return x_BHSD[:, consecutive.start : consecutive.stop]
    return x_BHSD.index_select(1, on_device(tuple(heads), x_BHSD.device))


@dataclass(frozen=True)
class Rows:
    """Rows of the attention map, until the next overwrite them."""

    at: tuple[slice, slice, slice]
    """Batch rows, selected heads and queries."""
    powers_BHCS: Tensor
    """exp(score - greatest score of the row); if causal, S ends at the last of these queries."""
    inverse_BHC: Tensor
    """1 / their sum; 0 for a query that may see no key."""
    lse_BHC: Tensor
    """Logarithm of the softmax denominator; -inf for such a query."""
    entropy_BHC: Tensor | None
    """Entropy in nats, 0 for such a query; None unless requested."""


def softmax_rows(
    scores: Scores, chunk: int | None = None, *, entropy: bool = False
) -> Iterator[Rows]:
    """Yield all rows of the map, `chunk` queries at a time, or as many as suit the device."""
    batch, heads, queries = scores.shape
    device = scores.q_BHQD.device
    keys = scores.k_BKSD.shape[2]
    room, tallest = CHUNK.get(device.type, CHUNK_ELSEWHERE)
    tall = min(queries, chunk or max(32, min(tallest, room // keys)))
    # short rows of several heads and batch rows are one product
    together = max(1, room // (tall * keys))
    wide = min(heads, together)
    deep = min(batch, max(1, together // heads))
    # entropy needs scores and powers at once, otherwise these take the place of those
    buffers = torch.empty(1 + entropy, deep * wide * tall * keys, dtype=scores.dtype, device=device)
    for at in product(_slices(batch, deep), _slices(heads, wide), _slices(queries, tall)):
        x_BHCS = _masked_scores(scores, at, buffers[0])
        powers_BHCS = buffers[-1, : x_BHCS.numel()].view_as(x_BHCS)
        top_BHC = x_BHCS.amax(-1)
        top_BHC.masked_fill_(top_BHC == -math.inf, 0.0)
        torch.exp2(x_BHCS.sub_(top_BHC.unsqueeze(-1)), out=powers_BHCS)
        total_BHC = powers_BHCS.sum(-1)
        inverse_BHC = torch.where(total_BHC > 0, 1 / total_BHC, 0.0)
        log_BHC = total_BHC.log2()
        entropy_BHC = None
        if entropy:
            # -Σ p ln p = ln Z - Σ p x for p = exp(x) / Z; zero times -inf would not be zero
            mean_BHC = x_BHCS.clamp_min_(NEVER).mul_(powers_BHCS).sum(-1) * inverse_BHC
            entropy_BHC = (log_BHC - mean_BHC).clamp_min_(0.0) * LN2
        yield Rows(at, powers_BHCS, inverse_BHC, (log_BHC + top_BHC) * LN2, entropy_BHC)


def _slices(total: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, total)) for first in range(0, total, step)]


def _masked_scores(scores: Scores, at: tuple[slice, slice, slice], room: Tensor) -> Tensor:
    """Scores of these rows in units of ln 2, as exp2 is faster than exp."""
    batches, some, part = at
    keys = scores.k_BKSD.shape[2]
    if scores.is_causal:
        keys = min(keys, part.stop)
    chosen = scores.chosen[some]
    q_BHCD = of_heads(scores.q_BHQD[batches, :, part], chosen).to(scores.dtype)
    key_heads = [head // scores.groups for head in chosen]
    k_BHSD = of_heads(scores.k_BKSD[batches, :, :keys], key_heads).to(scores.dtype)
    shape = (*q_BHCD.shape[:3], keys)
    x_BHCS = room[: math.prod(shape)].view(shape)
    torch.matmul(q_BHCD * (scores.scale * LOG2E), k_BHSD.mT, out=x_BHCS)
    if scores.mask is not None:
        mask = scores.mask
        if mask.shape[1] > 1:
            mask = of_heads(mask, chosen)
        for axis, where in ((0, batches), (2, part), (3, slice(0, keys))):
            if mask.shape[axis] > 1:
                mask = mask.narrow(axis, where.start, where.stop - where.start)
        x_BHCS.add_(_bias(mask, scores.dtype))
    if scores.is_causal and keys > part.start:
        # all queries of a chunk see the keys before it
        corner = torch.ones(shape[2], keys - part.start, dtype=torch.bool, device=room.device)
        x_BHCS[..., part.start :].masked_fill_(corner.triu_(1), -math.inf)
    return x_BHCS


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to these scores."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(~mask, -math.inf)
    # finfo.min times log2(e) would be -inf, and a row of finfo.min alone is uniform, not empty
    bias = (mask.to(dtype) * LOG2E).clamp_min_(torch.finfo(dtype).min / 2)
    return bias.masked_fill_(mask == -math.inf, -math.inf)


def attention_statistics(
    scores: Scores,
    names: Collection[str],
    *,
    v_BKSD: Tensor | None = None,
    groups_BGQ: Tensor | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """Any of `STATISTICS` in one pass, for the heads of `scores`.

    - "received": attention that every key receives, (B, H, S), which sums to the number of queries.
      With `groups_BGQ` (boolean, or weights per query) the part from each group, (B, G, H, S).
    - "row_logsumexp": logarithm of every query's softmax denominator, (B, H, Q); -inf for a query
      that may see no key.
    - "row_entropy": -Σ_j A_ij ln A_ij in nats, (B, H, Q); 0 for such a query.
    - "noop_bound": Σ_j A_ij |v_j| (arXiv 2601.19657, Eq. 20), (B, H, Q), at least the norm of the
      head's output. Needs `v_BKSD`.

    `chunk`: the loop, never a faster pass, with so many queries at a time. Raises ValueError for an
    unknown name, and when shapes do not fit.
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
    run: Pass = partial(_in_chunks, chunk=chunk)
    if chunk is None:
        run = fast_path(fast_passes, scores, names) or run
    with exactly(device):
        results = run(scores, names, groups, norms_BKS)
    if "received" in results:
        received = results["received"].transpose(1, 2)
        results["received"] = received[:, 0] if groups is None else received
    return results


def _in_chunks(
    scores: Scores,
    names: Collection[str],
    groups: Tensor | None,
    norms_BKS: Tensor | None,
    chunk: int | None,
) -> dict[str, Tensor]:
    """The pass as a loop."""
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
    for rows in softmax_rows(scores, chunk, entropy="row_entropy" in names):
        batches, some, part = rows.at
        keys = rows.powers_BHCS.shape[-1]
        if "received" in results:
            # the division of rows and the sum over them are one product
            weight_BHGC = rows.inverse_BHC.unsqueeze(2) * groups[batches, None, :, part]
            sums_BHGS = weight_BHGC @ rows.powers_BHCS
            results["received"][batches, some, :, :keys] += sums_BHGS
        if norms_BHS is not None:
            norms = norms_BHS[batches, some, :keys]
            bound_BHC = torch.einsum("bhcs,bhs->bhc", rows.powers_BHCS, norms)
            results["noop_bound"][rows.at] = bound_BHC * rows.inverse_BHC
        if "row_logsumexp" in results:
            results["row_logsumexp"][rows.at] = rows.lse_BHC
        if rows.entropy_BHC is not None:
            results["row_entropy"][rows.at] = rows.entropy_BHC
    return results


def row_logsumexp(
    q_BHQD: Tensor, k_BKSD: Tensor, *, chunk: int | None = None, **call: Any
) -> Tensor:
    """Log-sum-exp of every query's scores, (B, H, Q); `call`: further arguments of `Scores.of`."""
    scores = Scores.of(q_BHQD, k_BKSD, **call)
    return attention_statistics(scores, ("row_logsumexp",), chunk=chunk)["row_logsumexp"]


def attention_map(q_BHQD: Tensor, k_BKSD: Tensor, **call: Any) -> Tensor:
    """The whole map A, (B, H, Q, S), float32 (float64 for float64 inputs). It is not O(S): name
    the `heads` to look at.
    """
    scores = Scores.of(q_BHQD, k_BKSD, **call)
    shape = (*scores.shape, scores.k_BKSD.shape[2])
    map_BHQS = torch.zeros(shape, dtype=scores.dtype, device=q_BHQD.device)
    with exactly(q_BHQD.device):
        for rows in softmax_rows(scores):
            weights_BHCS = rows.powers_BHCS * rows.inverse_BHC.unsqueeze(-1)
            map_BHQS[rows.at][..., : weights_BHCS.shape[-1]] = weights_BHCS
    return map_BHQS


def value_norms(v_BKSD: Tensor, *, per_head: bool = False) -> Tensor:
    """L2 norm of every token's value (or key) vector, (B, S), averaged over heads (arXiv
    2601.19657, Eq. 14-16); `per_head`: without the average, (B, K, S).
    """
    dtype = torch.promote_types(v_BKSD.dtype, torch.float32)
    norms_BKS = torch.linalg.vector_norm(v_BKSD.detach(), dim=-1, dtype=dtype)
    if per_head:
        return norms_BKS
    return norms_BKS.mean(1)
