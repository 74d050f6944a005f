"""Value vectors, and exact removal of keys from an attention output that is already known."""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim, M removed keys

import torch
from torch import Tensor


def value_norms(v_BKSD: Tensor, *, per_head: bool = False) -> Tensor:
    """L2 norm of every token's value vector, averaged over heads (arXiv 2601.19657, Eq. 14-16): (B, S).

    `per_head=True` leaves out the average (Eq. 15): (B, K, S). The mean over key/value heads is the mean over query
    heads, since every value head serves the same number of query heads.
    """
    return _norms(v_BKSD, per_head)


def key_norms(k_BKSD: Tensor, *, per_head: bool = False) -> Tensor:
    """L2 norm of every token's key vector as it enters the scores (rotated, normed), averaged over heads: (B, S).

    `per_head=True` leaves out the average: (B, K, S).
    """
    return _norms(k_BKSD, per_head)


def _norms(x_BKSD: Tensor, per_head: bool) -> Tensor:
    dtype = torch.promote_types(x_BKSD.dtype, torch.float32)
    norms_BKS = torch.linalg.vector_norm(x_BKSD.detach(), dim=-1, dtype=dtype)
    return norms_BKS if per_head else norms_BKS.mean(1)


def remove_keys(
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    keys_BHM: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention output as if some keys had been masked before the softmax: exact, O(Q·M) beside what is known.

    `out_BHQD` and `lse_BHQ` are output and row log-sum-exp with the keys present; `keys_BHM` holds the indices of M
    distinct keys per query head, all visible to every query. Returns (out, lse) without them:
    out' = (out - sum_M A_ij v_j) / (1 - sum_M A_ij), lse' = lse + ln(1 - sum_M A_ij).
    Loses precision as the removed mass tends to 1 (cancellation): mask before the softmax there.

    Raises ValueError when as many keys are removed as there are, or an index lies outside.
    """
    keys = k_BKSD.shape[2]
    if keys_BHM.shape[-1] >= keys:
        raise ValueError(f"at least one key must stay: {keys_BHM.shape[-1]} of {keys} were to be removed, name fewer")
    if keys_BHM.numel() and not (int(keys_BHM.min()) >= 0 and int(keys_BHM.max()) < keys):
        raise ValueError(
            f"key indices must lie in 0 … {keys - 1}, got {int(keys_BHM.min())} … {int(keys_BHM.max())}: "
            "count from the first key, sink columns included"
        )
    groups = q_BHQD.shape[1] // k_BKSD.shape[1]
    scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
    k_BHMD = _gather(k_BKSD.repeat_interleave(groups, 1), keys_BHM)
    v_BHMD = _gather(v_BKSD.repeat_interleave(groups, 1), keys_BHM)
    p_BHQM = torch.exp(q_BHQD @ k_BHMD.transpose(-1, -2) * scale - lse_BHQ.unsqueeze(-1))
    left_BHQ = 1 - p_BHQM.sum(-1)
    return (out_BHQD - p_BHQM @ v_BHMD) / left_BHQ.unsqueeze(-1), lse_BHQ + left_BHQ.log()


def _gather(x_BHSD: Tensor, keys_BHM: Tensor) -> Tensor:
    return x_BHSD.gather(2, keys_BHM.unsqueeze(-1).expand(-1, -1, -1, x_BHSD.shape[-1]))
