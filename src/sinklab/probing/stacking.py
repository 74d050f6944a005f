"""Tensors of many layers or steps in one: ordinary tensors on the CPU, however the model ran."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerStack:
    """Tensors of one layer after another, in one float32 buffer made when the first comes.

    Small results that stay alive between a model's large temporaries would keep the system from using their room
    again: a forward would need several times their size.
    """

    def __init__(self, expected: int) -> None:
        self._expected = max(expected, 1)
        self._store: Tensor | None = None
        # What has no place in the buffer (layers of another shape, or on another device) turns all into a list.
        self._parts: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        """The next layer's."""
        count = len(self._parts)
        if self._store is None and not count:
            self._store = torch.empty((self._expected, *value.shape), dtype=torch.float32, device=value.device)
        store = self._store
        if store is not None:
            if count < self._expected and value.shape == store.shape[1:] and value.device == store.device:
                value = store[count].copy_(value)
            else:
                self._store = None
        self._parts.append(value)

    def stacked(self, places: list[int], axis: int) -> Tensor:
        """These layers along an axis: an ordinary tensor on the CPU, also where the model runs in inference mode."""
        with torch.inference_mode(False), torch.no_grad():
            if self._store is not None:
                return self._store[places].cpu().movedim(0, axis).contiguous()
            return stacked([self._parts[place].cpu().float() for place in places], axis)


def ordinary(tensor: Tensor) -> Tensor:
    """A tensor of its own on the CPU, which may be changed outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.cpu().clone()


def stacked(tensors: list[Tensor], dim: int) -> Tensor:
    """Tensors along a new axis, NaN where one of them is shorter than the longest."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors, dim)
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = torch.full((len(tensors), *widest), torch.nan, device=tensors[0].device)
    for row, tensor in zip(padded, tensors, strict=True):
        row[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded.movedim(0, dim)
