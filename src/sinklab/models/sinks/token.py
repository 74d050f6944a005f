"""The sink token: a learned embedding, run through the layers (Eq. 5–6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.models.sinks.base import Sink
from sinklab.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor


@sinks.register("token")
class TokenSink(Sink):
    """A learned embedding, run through the layers, that sees itself alone (Eq. 5–6)."""

    label = ""

    def embeddings(self, model: Any) -> Tensor:
        """The parameter itself (N, E)."""
        return model.sink_embeddings
