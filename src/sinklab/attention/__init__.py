"""Pure mathematics of attention on queries, keys and values; knows no model."""

from sinklab.attention.observation import (
    RunningCanvas,
    is_observed,
    is_watched,
    running,
    running_canvas,
    unobserved,
    watching,
)
from sinklab.attention.received import (
    attention_map,
    attention_statistics,
    noop_bound,
    received_attention,
    row_entropy,
    row_logsumexp,
)
from sinklab.attention.scores import Scores
from sinklab.attention.values import key_norms, remove_keys, value_norms
from sinklab.attention.visibility import allowed, real_queries, visible_queries

__all__ = [
    "RunningCanvas",
    "Scores",
    "allowed",
    "attention_map",
    "attention_statistics",
    "is_observed",
    "is_watched",
    "key_norms",
    "noop_bound",
    "real_queries",
    "received_attention",
    "remove_keys",
    "row_entropy",
    "row_logsumexp",
    "running",
    "running_canvas",
    "unobserved",
    "value_norms",
    "visible_queries",
    "watching",
]
