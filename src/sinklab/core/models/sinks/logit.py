"""A learned sink logit per head, as gpt-oss has it: one more term in every softmax, with nothing
behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinklab.core.models.sinks.base import Sink
from sinklab.core.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.core.models.sinks.prefix import SinkPrefix


@sinks.register("logit")
class LogitSink(Sink):
    """Learned logits b of each layer and query head, as one more term of its softmax.

    Weights become exp(s_ij) / (exp(b) + Σ_k exp(s_ik)).

    A key and a value of zero with b added to the scores; equal to the output without it times
    sigmoid(lse − b), with lse the log-sum-exp of the query's scores
    (:func:`sinklab.core.attention.with_sink_logits`).
    """

    tensors = ("sink_logits",)
    positions = 0

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """(layers, query heads, N)."""
        backbone = config.backbone
        return (backbone.num_hidden_layers, backbone.num_attention_heads, config.sink_count)

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values of zero, with the parameters as their logits."""
        from sinklab.core.models.sinks.prefix import per_layer

        config = model.config
        logits_LHN = model.sink_logits
        zeros = logits_LHN.new_zeros(
            len(logits_LHN), config.sink_count, config.kv_heads, config.head_dim
        )
        return replace(per_layer(zeros, zeros), logits=tuple(logits_LHN))
