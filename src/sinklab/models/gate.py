"""Gated attention: an element-wise sigmoid gate on the attention output, from the layer's normed input (Eq. 8–10)."""

# B batch, S sequence, E hidden size, A attention width (heads × head dim)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """sigmoid(X·W_g + b), as wide as the concatenated heads; ``bias`` is where b starts, None leaves it out (Eq. 9).

    Its bound methods are the hooks of :func:`attach`, so that a copied or pickled model uses the copy's gate.
    """

    def __init__(self, hidden_size: int, width: int, bias: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden_size))
        self.bias = None if bias is None else nn.Parameter(torch.full((width,), bias))
        self.bias_start = bias
        self.pending: Tensor | None = None
        """Factors for the output projection that comes next; None when none are owed."""

    def __getstate__(self) -> dict[str, Any]:
        # factors that an interrupted call left behind belong to its graph and cannot be copied
        return {**self.__dict__, "pending": None}

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Factors (B, S, A) in (0, 1)."""
        return torch.sigmoid(nn.functional.linear(x_BSE, self.weight, self.bias))

    def remember(self, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before attention: compute the factors from its input."""
        self.pending = self(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def multiply(self, projection: nn.Module, args: tuple) -> tuple | None:
        """Before the output projection: apply the factors once; when none are owed, leave the input as it is."""
        if self.pending is None:
            return None
        factors, self.pending = self.pending, None
        return (args[0] * factors, *args[1:])


def attach(attention: Any, gate: Gate) -> None:
    """Multiply what enters ``attention.o_proj`` by the gate of what entered ``attention``.

    Hooks and not a subclass: they fit every decoder with the usual projection names and copy no model code.
    """
    attention.register_forward_pre_hook(gate.remember, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(gate.multiply)
