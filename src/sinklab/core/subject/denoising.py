"""The model as a denoiser: ids in, logits at the wanted positions out.

Decoding evaluates one canvas again and again, so what does not depend on the text is computed once.
The lab registers a subclass that remembers keys and values for caches; an extra may register a
faster one, which gives the same numbers up to rounding.
"""

# B batch, S canvas, M wanted positions (row-major), V vocabulary
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import running
from sinklab.core.compat import attention_of
from sinklab.core.errors import check_tensor
from sinklab.core.subject import masks
from sinklab.core.subject.canvas import Canvas, Places
from sinklab.core.subject.denoisers import Denoiser
from sinklab.core.subject.masks import CanvasGeometry


class ModelDenoiser(Denoiser):
    """The denoiser of a model, bound to its present weights and a padding, under
    ``torch.inference_mode``.
    """

    def __init__(self, model: Any, attention_BS: Tensor | None = None) -> None:
        self.model = model
        self.attention_BS = attention_BS
        self._geometry: CanvasGeometry | None = None

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V) at the wanted positions, computed afresh."""
        with torch.inference_mode():
            return self.full_pass(ids_BS, at)

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas itself. Raises ValueError for padding that this denoiser was not made with."""
        if self.attention_BS is None and not canvas.attention_BS.all():
            raise ValueError(
                "padding is text to a denoiser that was made without it, and this canvas has some; "
                "use model.denoiser(canvas.attention_BS), or denoise(model, canvas), which does"
            )
        return canvas

    def geometry(self, ids_BS: Tensor, wanted_BS: Tensor) -> CanvasGeometry:
        """The geometry of this shape. Raises ValueError if it does not fit."""
        check_tensor(
            "the wanted positions of a denoiser", wanted_BS, ids_BS.shape, "bool", "as the ids"
        )
        known = self._geometry
        backend = attention_of(self.model.model.config)
        if known is None or known.shape != ids_BS.shape or known.backend != backend:
            self.model.config.check_length(ids_BS.shape[1])
            real_BS = masks.real_positions(ids_BS, self.attention_BS)
            like = ids_BS.new_empty(0, dtype=self.model.dtype)
            known = CanvasGeometry.of(self.model, real_BS, like, ids_BS.shape)
            self._geometry = known
        return known

    def full_pass(self, ids_BS: Tensor, at: Places, store: Any = None) -> Tensor:
        """Logits (M, V) from all columns, which a store remembers."""
        geometry = self.geometry(ids_BS, at.wanted_BS)
        # call the whole model: a trace must see where a forward begins
        with running(ids_BS):
            return self.model(
                ids_BS,
                self.attention_BS,
                logits_to_keep=at.flat_M,
                sink_prefix=store or geometry.sinks,
                visible=self.visible(at.wanted_BS),
            ).logits

    def visible(self, wanted_BS: Tensor) -> Tensor | None:
        """Visibility of this evaluation, bool (B, query, key); None: that of the model alone."""
        return None
