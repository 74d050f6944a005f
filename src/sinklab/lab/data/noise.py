"""The masked-token objective: noise, and the loss on it. Equations are those of «One Token Is
Enough».

`masked_token_loss` is the definition; training computes the same loss in chunks, by labels with
weights 1/(t·N) (`sinklab.core.subject.head`).
"""

# B batch, S sequence, M masked positions (row-major order of the mask), V vocabulary
import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.errors import one_of

SAMPLERS = ("iid", "low_discrepancy")


def sample_times(
    batch: int,
    *,
    eps: float = 1e-3,
    sampler: str = "iid",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw diffusion times t_B in [eps, 1], the masking probability of the linear schedule.

    ``"iid"``: t = eps + (1 − eps)·u with u uniform (LLaDA, SMDM). ``"low_discrepancy"``: one u for
    all, u_b = (u + b / B) mod 1 in random row order, for less variance of the loss. `eps` bounds
    its weight 1/t. Raises ValueError for an unknown sampler.
    """
    one_of("sampler", sampler, SAMPLERS)
    if sampler == "iid":
        u_B = torch.rand(batch, generator=generator)
    else:
        offset = torch.rand((), generator=generator)
        order_B = torch.randperm(batch, generator=generator)
        u_B = (offset + order_B / batch) % 1.0
    return eps + (1 - eps) * u_B


def corrupt(
    ids_BS: Tensor,
    t_B: Tensor,
    *,
    mask_id: int,
    maskable_BS: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Replace each maskable token by [MASK] independently with probability t (Eq. 1, linear
    schedule).

    Args:
        ids_BS: clean token ids, int64.
        t_B: times in (0, 1], (B,) or (B, S) of each token.
        mask_id: id of [MASK].
        maskable_BS: False where a token must stay; None allows all.
        generator: on the device of ``ids_BS``.

    Returns the noisy ids and ``masked_BS``, True where a token was replaced.
    """
    t_BS = _by_token(t_B, ids_BS)
    # torch.rand is in [0, 1): t = 1 masks every token
    masked_BS = torch.rand(ids_BS.shape, generator=generator, device=ids_BS.device) < t_BS.to(
        ids_BS.device
    )
    if maskable_BS is not None:
        masked_BS &= maskable_BS
    return ids_BS.masked_fill(masked_BS, mask_id), masked_BS


def _by_token(t_B: Tensor, ids_BS: Tensor) -> Tensor:
    """Times (B, S) of each token."""
    if t_B.ndim == 2:
        return t_B
    return t_B[:, None].expand(ids_BS.shape)


def masked_token_loss(
    logits_MV: Tensor,
    ids_BS: Tensor,
    masked_BS: Tensor,
    t_B: Tensor,
    *,
    maskable_BS: Tensor | None = None,
) -> Tensor:
    """Negative masked-token log-likelihood with weight 1/t (Eq. 3–4).

    L = (1/N) · Σ_b (1/t_b) Σ_{i masked} −log p(x_i | noisy), N = number of maskable tokens; its
    expectation bounds the negative log-likelihood per token.

    Args:
        logits_MV: at the masked positions, in row-major order.
        ids_BS: clean token ids.
        masked_BS: True where the model saw [MASK].
        t_B: masking probability (B,), or (B, S) of each token.
        maskable_BS: tokens that could have been masked; None means all.

    Raises ValueError for N = 0.
    """
    if maskable_BS is None:
        maskable_BS = torch.ones_like(masked_BS)
    t_BS = _by_token(t_B, ids_BS)
    tokens = maskable_BS.sum()
    if not tokens:
        raise ValueError(
            "the loss is a mean over maskable tokens, but there is none to divide by; drop such "
            "rows"
        )
    exact_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    ce_M = F.cross_entropy(exact_MV, ids_BS[masked_BS], reduction="none")
    return (ce_M / t_BS.to(ce_M)[masked_BS]).sum() / tokens
