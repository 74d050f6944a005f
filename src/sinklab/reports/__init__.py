"""Figures, tables, sentences and one page from run folders; nothing else is read."""

from .comparison import compare
from .drawing import FIGURES, Drawn, draw_all
from .figures import block_moves, heldout_loss, sink_share, sinks_per_layer, split_sinks, value_norms
from .maps import attention_map, layer_head_map, received_map
from .paths import overlap_by_step, sink_path, sink_path_of_head
from .recorded import NotRecorded
from .report import report, summary
from .scores import epsilon_curve, output_norm_against_bound, score_histogram, sink_tokens, value_norm_scatter
from .study import LayerFacts, Sample, Study, as_studies
from .tables import TABLES, table, write_tables

__all__ = [
    "FIGURES",
    "TABLES",
    "Drawn",
    "LayerFacts",
    "NotRecorded",
    "Sample",
    "Study",
    "as_studies",
    "attention_map",
    "block_moves",
    "compare",
    "draw_all",
    "epsilon_curve",
    "heldout_loss",
    "layer_head_map",
    "output_norm_against_bound",
    "overlap_by_step",
    "received_map",
    "report",
    "score_histogram",
    "sink_path",
    "sink_path_of_head",
    "sink_share",
    "sink_tokens",
    "sinks_per_layer",
    "split_sinks",
    "summary",
    "table",
    "value_norm_scatter",
    "value_norms",
    "write_tables",
]
