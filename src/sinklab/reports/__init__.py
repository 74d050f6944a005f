"""Figures, sentences and one page from run folders; nothing else is read."""

from .figures import heldout_loss, sink_share, sink_tokens, value_norms
from .maps import received_map, sink_path
from .report import report, summary
from .study import LayerFacts, Study, as_studies

__all__ = [
    "LayerFacts",
    "Study",
    "as_studies",
    "heldout_loss",
    "received_map",
    "report",
    "sink_path",
    "sink_share",
    "sink_tokens",
    "summary",
    "value_norms",
]
