"""Gated attention: an element-wise sigmoid gate on the attention output, from the layer's normed input (Eq. 8–10)."""

# B batch, S sequence, E hidden size, A attention width (heads × head dim)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """sigmoid(X·W_g + b), as wide as the concatenated heads; ``bias`` is where b starts, None leaves it out (Eq. 9)."""

    def __init__(self, hidden_size: int, width: int, bias: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden_size))
        self.bias = None if bias is None else nn.Parameter(torch.full((width,), bias))
        self.bias_start = bias

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Factors (B, S, A) in (0, 1)."""
        return torch.sigmoid(nn.functional.linear(x_BSE, self.weight, self.bias))


def attach(attention: Any, gate: Gate) -> None:
    """Multiply what enters ``attention.o_proj`` by the gate of what entered ``attention``.

    Hooks and not a subclass: they fit every decoder with the usual projection names and copy no model code.
    """
    pending: list[Tensor] = []

    def remember(module: nn.Module, args: tuple, kwargs: dict) -> None:
        # replaced, not appended: an exception inside attention must not leave a stale gate behind
        pending[:] = [gate(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])]

    def apply(module: nn.Module, args: tuple) -> tuple:
        return (args[0] * pending.pop(), *args[1:])

    attention.register_forward_pre_hook(remember, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(apply)
