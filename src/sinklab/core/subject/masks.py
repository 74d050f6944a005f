"""Positions and attention masks of a canvas.

A full pass without padding has no mask at all, so that the fastest kernels run; everything else is
one boolean mask in which every query sees the added sinks.
"""

# B batch, S canvas, W columns that run, Q queries, N added sinks, J keys = N + S
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.compat import attention_of
from sinklab.core.errors import check_tensor
from sinklab.core.subject.prefix import SinkPrefix


@dataclass(frozen=True, eq=False)
class CanvasGeometry:
    """Everything that depends only on the shape of the canvas and its padding."""

    shape: tuple[int, ...]
    backend: str
    position_ids_BS: Tensor
    mask: Tensor | None
    """For the decoder; None when nothing is blocked."""
    sinks: SinkPrefix | None

    @classmethod
    def of(
        cls,
        model: Any,
        real_BS: Tensor | None,
        like: Tensor,
        shape: tuple[int, ...],
        *,
        sinks: SinkPrefix | None = None,
        causal: bool = False,
        visible: Tensor | None = None,
        is_doubled: bool = False,
    ) -> CanvasGeometry:
        """For texts of this shape (B, S) and :func:`real_positions`.

        Args:
            like: a tensor of the dtype and device of the states.
            sinks: the model's prefix, if it is known.
            causal, visible: as in :meth:`DiffusionLM.forward`.
            is_doubled: whether a clean text of the same shape follows this one.
        """
        config = model.config
        length = shape[1]
        backend = attention_of(model.model.config)
        position_ids_BS = position_ids(real_BS, length, start=config.text_start, device=like.device)
        if sinks is None:
            lengths_B = None
            if real_BS is not None:
                lengths_B = real_BS.sum(dim=1)
            sinks = model.sink_prefix(length, lengths_B)
        seen = whole_text(config.attention, real_BS, length, like.device)
        if config.block_length is not None and (is_doubled or length > config.block_length):
            block_BS = blocks(config, real_BS, length, like.device)
            if is_doubled:
                seen = noisy_and_clean(block_BS, config.clean_attention == "causal")
            else:
                seen = block_causal(block_BS)
        if is_doubled:
            length = 2 * length
            position_ids_BS = position_ids_BS.repeat(1, 2)
            if real_BS is not None:
                real_BS = real_BS.repeat(1, 2)
        if real_BS is None and config.sink is not None and config.sink.needs_mask:
            real_BS = torch.ones(1, length, dtype=torch.bool, device=like.device)
        mask = attention_mask(
            real_BS,
            length,
            sinks=config.sink_count,
            causal=causal,
            backend=backend,
            like=like,
            visible=visible,
            seen=seen,
        )
        return cls(tuple(shape), backend, position_ids_BS, mask, sinks)

    def rows(self, columns: slice | Tensor) -> Tensor | None:
        """The mask of these queries."""
        mask = self.mask
        if mask is None or mask.shape[2] == 1:
            return mask
        return take(mask.transpose(1, 2), columns).transpose(1, 2)


def take(values: Tensor, columns: slice | Tensor) -> Tensor:
    """Take these columns of (1 or B, S, …): a slice or int64 (W,)."""
    if isinstance(columns, slice):
        return values[:, columns]
    return values.index_select(1, columns)


def real_positions(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Positions of text, bool (B, S), or None without any padding.

    Raises ValueError if shapes disagree, or a row is all padding.
    """
    if attention_mask is None:
        return None
    check_tensor(
        "attention_mask",
        attention_mask,
        input_ids.shape,
        remedy="as input_ids, 1 for text and 0 for padding",
    )
    real_BS = attention_mask.bool()
    if bool(real_BS.all()):
        return None
    if not bool(real_BS.any(dim=1).all()):
        raise ValueError(
            "every row needs at least one token that is not padding; drop the empty rows of the "
            "batch"
        )
    return real_BS


def starts(real_BS: Tensor) -> Tensor:
    """Positions of text, bool (B, S), right after padding."""
    return real_BS.bool() & ~F.pad(real_BS.bool()[:, :-1], (1, 0), value=True)


def position_ids(
    real_BS: Tensor | None, length: int, *, start: int, device: torch.device
) -> Tensor:
    """Positions (1 or B, S) from ``start`` on; padding takes none."""
    if real_BS is None:
        return torch.arange(length, device=device)[None] + start
    return (real_BS.long().cumsum(dim=1) - 1).clamp(min=0) + start


def blocks(
    config: Any, real_BS: Tensor | None, length: int, device: torch.device, size: int | None = None
) -> Tensor:
    """Index of the block of each column (1 or B, S); ``size`` replaces ``block_length``."""
    if config.blocks_from == "column":
        real_BS = None
    return position_ids(real_BS, length, start=0, device=device) // (size or config.block_length)


def block_causal(block_BS: Tensor) -> Tensor:
    """Block-causal visibility, bool (B, query, key): the own block and those before it."""
    return block_BS[:, None] <= block_BS[:, :, None]


def whole_text(
    attention: str, real_BS: Tensor | None, length: int, device: torch.device
) -> Tensor | None:
    """Visibility by a config's ``attention``, bool (1 or B, query, key); None if it is full."""
    if attention == "full":
        return None
    place_BS = position_ids(real_BS, length, start=0, device=device)
    if attention == "causal":
        return block_causal(place_BS)
    return (place_BS[:, :, None] > 0) | (place_BS[:, None] == 0)


def noisy_and_clean(block_BS: Tensor, causal: bool) -> Tensor:
    """Visibility, bool (B, 2S, 2S), if the clean text follows the noisy one (BD3-LM, 2503.09573,
    Eq. 9–12); with ``causal`` a clean token sees its own block only up to itself.
    """
    query_BS1 = block_BS[:, :, None]
    key_B1S = block_BS[:, None]
    clean_BSS = key_B1S <= query_BS1
    if causal:
        clean_BSS = clean_BSS.tril()
    noisy_BSJ = torch.cat([key_B1S == query_BS1, key_B1S < query_BS1], 2)
    return torch.cat([noisy_BSJ, torch.cat([torch.zeros_like(clean_BSS), clean_BSS], 2)], 1)


def attention_mask(
    real_BS: Tensor | None,
    length: int,
    *,
    sinks: int,
    causal: bool,
    backend: str,
    like: Tensor,
    visible: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor | None:
    """Mask (B or 1, 1, 1 or Q, J) for this attention backend, boolean or (eager) additive; None
    when nothing is blocked, or the kernel's causal flag is enough.

    Args:
        real_BS: all True makes a mask even if nothing is blocked.
        length: S.
        sinks: N; every query sees them.
        causal: text sees only text to its left.
        backend: ``attn_implementation``.
        like: a tensor of the dtype and device of the states.
        visible: the caller's visibility, bool (S, S) or (B, S, S).
        seen: the model's own, bool (1 or B, S, S).

    Raises:
        ValueError: for a backend that cannot take the mask, or a wrong ``visible``.
    """
    is_added = backend == "eager"
    is_open = real_BS is None and visible is None and seen is None
    if is_open and not is_added and not (causal and sinks):
        return None
    if not is_added and backend != "sdpa":
        raise ValueError(
            "padding, blocks and visibility are supported with attn_implementation 'sdpa' or "
            f"'eager', but it is {backend!r}; use sdpa"
        )
    seen_B1QS = torch.ones(1, 1, 1, length, dtype=torch.bool, device=like.device)
    if real_BS is not None:
        seen_B1QS = real_BS[:, None, None]
    if causal:
        seen_B1QS = (
            seen_B1QS & torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
        )
    if visible is not None:
        shape: tuple[int | None, ...] = (length, length)
        if visible.ndim == 3:
            shape = (None, *shape)
        remedy = f"it is (S, S) or (B, S, S) with S = {length}, True if the row may see the column"
        check_tensor("visible", visible, shape, "bool", remedy)
        seen_B1QS = seen_B1QS & visible.unsqueeze(-3)
    if seen is not None:
        seen_B1QS = seen_B1QS & seen[:, None]
    seen_B1QJ = F.pad(seen_B1QS, (sinks, 0), value=True)
    if not is_added:
        return seen_B1QJ
    return torch.zeros_like(seen_B1QJ, dtype=like.dtype).masked_fill(
        ~seen_B1QJ, torch.finfo(like.dtype).min
    )
