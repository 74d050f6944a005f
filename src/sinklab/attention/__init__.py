"""Pure mathematics of attention on queries, keys and values; knows no model."""

from sinklab.attention.observation import is_observed, is_watched, unobserved, watching
from sinklab.attention.received import noop_bound, received_attention, row_entropy, row_logsumexp
from sinklab.attention.values import remove_keys, value_norms
from sinklab.attention.visibility import allowed, real_queries, visible_queries

__all__ = [
    "allowed",
    "is_observed",
    "is_watched",
    "noop_bound",
    "real_queries",
    "received_attention",
    "remove_keys",
    "row_entropy",
    "row_logsumexp",
    "unobserved",
    "value_norms",
    "visible_queries",
    "watching",
]
