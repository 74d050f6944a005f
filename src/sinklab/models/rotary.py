"""Rotary tables: their precision, and their rebuilding on a model that was made without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def attach(decoder: Any, dtype: str) -> None:
    """Round the cosines and sines of a transformers decoder to ``dtype`` (nothing to do for ``float32``)."""
    if dtype != "float32":
        decoder.rotary_emb.register_forward_hook(_round_to_bfloat16)


def _round_to_bfloat16(module: nn.Module, args: tuple, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(table.bfloat16().to(table.dtype) for table in tables)


def rebuild(decoder: Any, device: torch.device | str) -> None:
    """Compute the frequencies of a decoder whose buffers are on the meta device; they stay float32."""
    rotary = decoder.rotary_emb
    for name, buffer in type(rotary)(decoder.config).named_buffers():
        setattr(rotary, name, buffer.to(device))
