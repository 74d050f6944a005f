"""Proposed tokens at masked positions: temperature, top-p, top-k.

Published samplers draw from the same distributions by different arithmetic; this is one exact form.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.core.attention.context import on_device, widest_float
from sinklab.core.errors import Checked, check_vocabulary, limited, whole_numbers

# M candidate positions, V vocabulary, P pieces of it


@dataclass(frozen=True)
class TokenSampling(Checked):
    """Settings of drawing a token from the logits. Raises ValueError for numbers out of range."""

    temperature: float = limited(
        0.0, at_least=0, below=math.inf, remedy="0 takes the most probable token"
    )
    top_p: float | None = limited(None, above=0, at_most=1)
    """Keep the most probable tokens up to the one at which their probabilities together pass
    `top_p`.
    """
    top_k: int | None = limited(None, at_least=1)
    """Keep this many of the most probable tokens (more if the last ones tie)."""
    suppress_ids: tuple[int, ...] = limited((), read=whole_numbers)
    """Tokens that are ruled out (logit -inf), as in LLaDA's `logits_eos_inf`."""
    text_vocabulary: int | None = limited(None, at_least=1)
    """Ids from here on take no part in any probability, such as image codes."""

    def allowed(self, logits_MV: Tensor) -> Tensor:
        """The logits of the tokens that may be written."""
        logits_MV = logits_MV[:, : self.text_vocabulary]
        if not self.suppress_ids:
            return logits_MV
        check_vocabulary("suppress_ids", self.suppress_ids, logits_MV.shape[1])
        return logits_MV.index_fill(-1, on_device(self.suppress_ids, logits_MV.device), -torch.inf)

    @property
    def cuts(self) -> bool:
        """Whether top-p or top-k may rule tokens out."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    @property
    def shapes(self) -> bool:
        """Whether `shaped` changes the distribution."""
        return self.cuts or self.temperature not in (0, 1)


def shaped(logits_MV: Tensor, sampling: TokenSampling) -> Tensor:
    """The logits after temperature (if above 0), then top-p, then top-k; -inf for tokens cut.
    Source: `top_p_logits` and `top_k_logits` of Dream's generation_utils.py.
    """
    if sampling.temperature not in (0, 1):
        logits_MV = logits_MV / sampling.temperature
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_MV, order_MV = logits_MV.sort(-1, descending=True)
        mass_MV = sorted_MV.softmax(-1)
        # A token goes when those before it have passed top_p already, so the best one always stays.
        late_MV = mass_MV.cumsum(-1).roll(1, -1) > sampling.top_p
        late_MV[:, 0] = False
        logits_MV = logits_MV.masked_fill(late_MV.scatter(-1, order_MV, late_MV), -torch.inf)
    if sampling.top_k is not None and sampling.top_k < logits_MV.shape[-1]:
        least_M1 = logits_MV.topk(sampling.top_k, -1).values[:, -1:]
        logits_MV = logits_MV.masked_fill(logits_MV < least_M1, -torch.inf)
    return logits_MV


def proposals(
    logits_MV: Tensor,
    cut_MV: Tensor | None,
    sampling: TokenSampling,
    mask_id: int | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """The best value and the token proposed in every row, never `mask_id`; NaN for NaN logits.

    Uses the Gumbel-max trick as argmax(logits - T log E) with E exponential of rate 1, drawn in
    float64: coarser noise cuts the tail off and so lowers the temperature in effect. LLaDA's
    exp(logits) / (-log U)^T is the same distribution, but overflows. A CPU generator gives the same
    draw whatever the model runs on.

    `cut_MV` are the `shaped` logits if top-p or top-k cut some; a row in which they leave nothing
    but [MASK] gets the most probable other token.
    """
    if sampling.temperature == 0:
        return _best_but(logits_MV, mask_id)
    source = required(generator, "a temperature above 0")
    noise_MV = _log_exponential(logits_MV, source)
    if cut_MV is None:
        noise_MV.mul_(-sampling.temperature).add_(logits_MV)
    else:
        noise_MV.neg_().add_(cut_MV)
    if mask_id is not None and mask_id < noise_MV.shape[-1]:
        noise_MV[:, mask_id].fill_(-torch.inf)
    best_M, token_M = noise_MV.max(-1)
    if cut_MV is not None:
        left_M, instead_M = _best_but(logits_MV, mask_id)
        token_M = torch.where(best_M == -torch.inf, instead_M, token_M)
        best_M = torch.where(best_M == -torch.inf, left_M, best_M)
    return best_M, token_M


def _best_but(logits_MV: Tensor, mask_id: int | None) -> tuple[Tensor, Tensor]:
    """The best value and its id in every row, but never `mask_id`: of equals the first."""
    vocabulary = logits_MV.shape[-1]
    # A head may be narrower than the ids: then [MASK] has no logit and cannot be proposed.
    if mask_id is None or mask_id >= vocabulary:
        return _best(logits_MV)
    start = mask_id + 1
    if start == vocabulary:
        return _best(logits_MV[:, :mask_id])
    right_M, token_M = _best(logits_MV[:, start:])
    token_M = token_M + start
    if mask_id == 0:
        return right_M, token_M
    left_M, left_token_M = _best(logits_MV[:, :mask_id])
    token_M = torch.where(right_M > left_M, token_M, left_token_M)
    return torch.maximum(left_M, right_M), token_M


def _best(logits_MV: Tensor) -> tuple[Tensor, Tensor]:
    """`logits_MV.max(-1)`, the first of equals; on the CPU in two levels, five times as fast."""
    width = 64
    vocabulary = logits_MV.shape[-1]
    if logits_MV.device.type != "cpu" or vocabulary < width:
        best_M, token_M = logits_MV.max(-1)
        return best_M, token_M
    whole = vocabulary // width
    # A maximum is vectorised where its index is not; the last piece overlaps the one before it.
    pieces_MP = logits_MV[:, : whole * width].unflatten(1, (whole, width)).amax(-1)
    if whole * width < vocabulary:
        pieces_MP = torch.cat([pieces_MP, logits_MV[:, -width:].amax(-1, keepdim=True)], 1)
    start_M1 = (pieces_MP.argmax(1, keepdim=True) * width).clamp_(max=vocabulary - width)
    best_M, place_M = logits_MV.gather(1, start_M1 + torch.arange(width)).max(1)
    return best_M, start_M1[:, 0] + place_M


def required(generator: torch.Generator | None, what: str) -> torch.Generator:
    """The generator. Raises ValueError when there is none."""
    if generator is None:
        raise ValueError(
            f"{what} needs a source of randomness that can be written down, got generator=None; "
            "pass generator=torch.Generator().manual_seed(seed)."
        )
    return generator


def perturb(score_M: Tensor, alg_temp: float, generator: torch.Generator | None) -> Tensor:
    """Keys whose descending order is a draw without replacement, in proportion to exp(score /
    alg_temp): Gumbel-top-k.
    """
    source = required(generator, "alg_temp")
    noise_M = _log_exponential(score_M, source)
    return score_M.to(noise_M.dtype) / alg_temp - noise_M


def _log_exponential(like: Tensor, source: torch.Generator) -> Tensor:
    """Logarithms of exponential numbers of rate 1, in float64 if both devices have it."""
    noise = torch.empty(
        like.shape, dtype=widest_float(source.device), device=source.device
    ).exponential_(generator=source)
    return noise.to(like.device, widest_float(like.device)).log_()
