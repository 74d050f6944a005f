"""Attention masks for padded or causal passes; a full pass without padding needs none."""

# B batch, S sequence, Q queries, K keys = N sinks + S
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from sinklab.compat import is_compiled
from sinklab.errors import check_tensor

MAKES_ITS_OWN = Version(transformers.__version__) < Version("5.23")
"""Whether transformers makes a mask in compiled code where nothing is hidden: 5.17 does; those up to 5.23 were not
tried.
"""


def real_positions(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Where there is text, bool (B, S), or None without any padding (so that no mask is built).

    Raises:
        ValueError: if shapes disagree, or a row is all padding.
    """
    if attention_mask is None:
        return None
    check_tensor("attention_mask", attention_mask, input_ids.shape, remedy="as input_ids, 1 for text and 0 for padding")
    real_BS = attention_mask.bool()
    if bool(real_BS.all()):
        return None
    if not bool(real_BS.any(dim=1).all()):
        raise ValueError("every row needs at least one token that is not padding; drop the empty rows of the batch")
    return real_BS


def position_ids(real_BS: Tensor | None, length: int, *, start: int, device: torch.device) -> Tensor:
    """Positions of the text (1 or B, S), from ``start`` on; padding takes none.

    Args:
        real_BS: from :func:`real_positions`.
        length: S.
        start: position of the first token of text.
        device: where to put them.
    """
    if real_BS is None:
        return torch.arange(length, device=device)[None] + start
    return (real_BS.long().cumsum(dim=1) - 1).clamp(min=0) + start


def attention_mask(
    real_BS: Tensor | None,
    length: int,
    *,
    sinks: int,
    causal: bool,
    backend: str,
    like: Tensor,
    visible: Tensor | None = None,
) -> Tensor | None:
    """Mask of shape (B or 1, 1, 1 or Q, K) for this attention backend.

    None when nothing is hidden, or the kernel's own causal flag says it all.

    Args:
        real_BS: from :func:`real_positions`; all True makes a mask where nothing is hidden, too.
        length: S.
        sinks: N; every query sees them.
        causal: text sees only text to its left.
        backend: ``attn_implementation`` of the backbone.
        like: a tensor of the dtype and device of the states.
        visible: bool (S, S) or (B, S, S), True where a query of the text may see a key of the text.

    Raises:
        ValueError: if this backend cannot take such a mask, or ``visible`` is none.
    """
    if real_BS is None and visible is None and backend != "eager" and not (causal and sinks):
        return None
    if backend not in ("eager", "sdpa"):
        raise ValueError(
            f"padding and visibility are supported with attn_implementation 'sdpa' or 'eager', but it is {backend!r}; "
            "use sdpa"
        )
    if real_BS is None:
        real_BS = torch.ones(1, length, dtype=torch.bool, device=like.device)
    seen_B1QS = real_BS[:, None, None, :]
    if causal:
        seen_B1QS = seen_B1QS & torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
    if visible is not None:
        if visible.dtype != torch.bool or visible.ndim not in (2, 3) or visible.shape[-2:] != (length, length):
            raise ValueError(
                f"visible must be a bool tensor of shape (S, S) or (B, S, S) with S = {length} (True = the query, a "
                f"row, may see the key), but is {visible.dtype} of shape {tuple(visible.shape)}"
            )
        seen_B1QS = seen_B1QS & (visible if visible.ndim == 2 else visible[:, None])
    seen_B1QK = F.pad(seen_B1QS, (sinks, 0), value=True)
    if backend == "sdpa":
        return seen_B1QK
    return torch.zeros_like(seen_B1QK, dtype=like.dtype).masked_fill(~seen_B1QK, torch.finfo(like.dtype).min)


def transformers_makes_one(decoder: Any) -> bool:
    """Whether transformers would make a mask of its own, which does not know the sinks, for this compiled decoder."""
    return MAKES_ITS_OWN and is_compiled(decoder) and decoder.config._attn_implementation == "sdpa"
