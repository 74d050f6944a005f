"""Figures, tables, sentences and one page from run folders; nothing else is read."""

from .benchmark_figures import table1_figure
from .benchmark_tables import table1_numbers, table1_text, write_table1
from .comparison import compare
from .curves import (
    massive_activations,
    mobility_over_training,
    optimization,
    sink_emergence,
    sinks_over_training,
    training_loss,
)
from .drawing import CURVES, FIGURES, Drawn, draw_all
from .figures import block_moves, heldout_loss, sink_share, sinks_per_layer, split_sinks, value_norms
from .layered import emergence_map, main_holders, trained_norms, trained_share
from .maps import attention_map, layer_head_map, received_map
from .masking_figures import (
    MaskingCurve,
    as_curves,
    masking_curve_figure,
    masking_curve_sentences,
    masking_curve_table,
    write_masking_curves,
)
from .onetoken_tables import onetoken_numbers, onetoken_text, write_onetoken
from .paths import overlap_by_step, sink_path, sink_path_of_head
from .recorded import NotRecorded
from .report import report, summary
from .scores import epsilon_curve, output_norm_against_bound, score_histogram, sink_tokens, value_norm_scatter
from .study import LayerFacts, Sample, Study, as_studies
from .tables import TABLES, table, write_tables
from .training import HeldoutLoss, Training, as_trainings
from .training_tables import TRAINING_TABLES

__all__ = [
    "CURVES",
    "FIGURES",
    "TABLES",
    "TRAINING_TABLES",
    "Drawn",
    "HeldoutLoss",
    "LayerFacts",
    "MaskingCurve",
    "NotRecorded",
    "Sample",
    "Study",
    "Training",
    "as_curves",
    "as_studies",
    "as_trainings",
    "attention_map",
    "block_moves",
    "compare",
    "draw_all",
    "emergence_map",
    "epsilon_curve",
    "heldout_loss",
    "layer_head_map",
    "main_holders",
    "masking_curve_figure",
    "masking_curve_sentences",
    "masking_curve_table",
    "massive_activations",
    "mobility_over_training",
    "onetoken_numbers",
    "onetoken_text",
    "optimization",
    "output_norm_against_bound",
    "overlap_by_step",
    "received_map",
    "report",
    "score_histogram",
    "sink_emergence",
    "sink_path",
    "sink_path_of_head",
    "sink_share",
    "sink_tokens",
    "sinks_over_training",
    "sinks_per_layer",
    "split_sinks",
    "summary",
    "table",
    "table1_figure",
    "table1_numbers",
    "table1_text",
    "trained_norms",
    "trained_share",
    "training_loss",
    "value_norm_scatter",
    "value_norms",
    "write_masking_curves",
    "write_onetoken",
    "write_table1",
    "write_tables",
]
