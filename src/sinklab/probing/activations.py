"""The greatest numbers in the residual stream, layer by layer: massive activations (arXiv 2402.17762)."""

# B batch, S text positions, D hidden size, L layers
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention import is_observed

SAMPLE = 1 << 14
"""numbers of a row, about, that its median is taken of"""


class Activations:
    """Greatest |x| of every forward since the start, and the mean of the rows' medians."""

    def __init__(self, layers: int) -> None:
        self._seen: list[dict[str, list[Tensor]]] = [{} for _ in range(layers)]

    def see(self, layer: int, states_BSD: Tensor) -> None:
        """The states after a layer: of the text, or of the added sinks, which models run unobserved and apart."""
        size_BSD = states_BSD.detach().abs()
        if not is_observed():
            self._keep(layer, "added", size_BSD.amax((1, 2)))
            return
        self._keep(layer, "first", size_BSD[:, 0].amax(1))
        if size_BSD.shape[1] > 1:
            self._keep(layer, "other", size_BSD[:, 1:].amax((1, 2)))
        self._keep(layer, "median", _spread(size_BSD).median(1).values)

    def _keep(self, layer: int, name: str, value_B: Tensor) -> None:
        self._seen[layer].setdefault(name, []).append(value_B.float())

    def measured(self) -> dict[str, np.ndarray]:
        """The measures of a snapshot (L,), NaN where nothing was seen."""
        found = {
            f"activation_{name}": np.full(len(self._seen), np.nan) for name in ("added", "first", "other", "median")
        }
        for layer, seen in enumerate(self._seen):
            for name, values in seen.items():
                many = torch.cat(values)
                found[f"activation_{name}"][layer] = (many.mean() if name == "median" else many.amax()).item()
        greatest = np.fmax(found["activation_first"], found["activation_other"])
        with np.errstate(divide="ignore", invalid="ignore"):
            found["activation_ratio"] = greatest / found["activation_median"]
        return found


def _spread(size_BSD: Tensor) -> Tensor:
    """Some of the numbers of every row, from all its positions and channels."""
    width, flat = size_BSD.shape[2], size_BSD.flatten(1)
    stride = max(1, flat.shape[1] // SAMPLE)
    # a stride that shares a factor with the width would read few of the channels
    while math.gcd(stride, width) > 1:
        stride += 1
    return flat[:, ::stride]


@contextmanager
def watched_activations(model: Any) -> Iterator[Activations]:
    """Watch the states after every decoder layer of a transformers model.

    Raises:
        ValueError: if the model has no decoder with a list of layers.
    """
    decoder = getattr(model, getattr(model, "base_model_prefix", "") or "model", model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"massive activations are read after each decoder layer, but {type(model).__name__} keeps no list `layers` "
            "in its backbone; pass a DiffusionLM or a Llama-like transformers model"
        )
    seen = Activations(len(layers))

    def hook(layer: int) -> Any:
        def after(module: nn.Module, args: tuple, output: Any) -> None:
            seen.see(layer, output if isinstance(output, Tensor) else output[0])

        return after

    hooks = [module.register_forward_hook(hook(index)) for index, module in enumerate(layers)]
    try:
        yield seen
    finally:
        for one in hooks:
            one.remove()
