"""The masked-token objective of masked diffusion language models."""

# B batch, S sequence, M masked positions (row-major order of the mask), V vocabulary
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_token_loss(
    logits_MV: Tensor,
    ids_BS: Tensor,
    masked_BS: Tensor,
    t_B: Tensor,
    *,
    maskable_BS: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative masked-token log-likelihood with weight 1/t (Eq. 3–4 of «One Token Is Enough»).

    L = (1/N) · Σ_b (1/t_b) Σ_{i masked} −log p(x_i | noisy), N = number of maskable tokens. Its expectation over t and
    masks bounds the negative log-likelihood per token; for a uniform model it is log V whatever t is.

    Args:
        logits_MV: logits at the masked positions only, in the row-major order of ``masked_BS``.
        ids_BS: clean token ids.
        masked_BS: bool, True where the model saw [MASK].
        t_B: masking probability of each row.
        maskable_BS: bool, the tokens that could have been masked; None means all.
        reduction: ``"mean"`` (a scalar as above) or ``"row"`` (shape (B,), each row divided by its own maskable
            count). The result is float32, or float64 where the logits are.

    Raises:
        ValueError: if the number of logit rows is not the number of masked positions, shapes disagree, a row (for
            "mean": every row) has no maskable token, or the reduction is unknown.
    """
    if reduction not in ("mean", "row"):
        raise ValueError(f"reduction must be 'mean' or 'row', but is {reduction!r}")
    n_masked = int(masked_BS.sum())
    if logits_MV.ndim != 2 or logits_MV.shape[0] != n_masked:
        raise ValueError(
            f"logits must have one row per masked position ({n_masked}), but have shape {tuple(logits_MV.shape)}; "
            "ask the model for logits_to_keep=masked_BS"
        )
    maskable_BS = torch.ones_like(masked_BS) if maskable_BS is None else maskable_BS
    if not ids_BS.shape == masked_BS.shape == maskable_BS.shape or t_B.shape != ids_BS.shape[:1]:
        raise ValueError(
            "ids, masked and maskable must have one shape (B, S) and times (B,), but have "
            f"{tuple(ids_BS.shape)}, {tuple(masked_BS.shape)}, {tuple(maskable_BS.shape)} and {tuple(t_B.shape)}"
        )
    tokens_B = maskable_BS.sum(dim=1)
    tokens = tokens_B if reduction == "row" else tokens_B.sum()
    if not bool(tokens.all()):
        raise ValueError("the loss is a mean over maskable tokens, but there is none to divide by; drop such rows")
    exact_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    ce_M = F.cross_entropy(exact_MV, ids_BS[masked_BS], reduction="none")
    row_M = masked_BS.nonzero()[:, 0]
    weighted_M = ce_M / t_B.to(ce_M)[row_M]
    if reduction == "mean":
        return weighted_M.sum() / tokens
    return weighted_M.new_zeros(ids_BS.shape[0]).index_add(0, row_M, weighted_M) / tokens
