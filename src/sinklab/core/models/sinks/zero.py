"""The sink token whose values are zero (Table 5): it takes attention and adds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinklab.core.models.sinks.base import Sink
from sinklab.core.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor


@sinks.register("zero")
class ZeroValueSink(Sink):
    """A learned embedding, run through the layers, with value states of zero in each (Table 5)."""

    label = "zero-value"

    def values(self, v_BKND: Tensor) -> Tensor:
        """Zeros."""
        return v_BKND.new_zeros(v_BKND.shape)
