"""Mathematics of attention on queries, keys and values: received attention, log-sum-exp, value
norms.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    context="RunningCanvas decoding decoding_run is_observed is_watched running running_canvas "
    "unobserved watching",
    received=(
        "attention_map attention_statistics noop_bound received_attention row_entropy "
        "row_logsumexp value_norms with_sink_logits"
    ),
    scores="Scores Visibility allowed",
)
