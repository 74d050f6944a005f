"""Figures, tables, sentences and one page from run folders; nothing else is read."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    build="report summary",
    comparison="compare",
    drawing="CURVES Drawn FIGURES draw_all",
    figures="block_moves heldout_loss sink_share sinks_per_layer split_sinks value_norms",
    maps="attention_map layer_head_map received_map",
    paths="overlap_by_step sink_path sink_path_of_head",
    samples="NotRecorded",
    scores="epsilon_curve output_norm_against_bound score_histogram sink_tokens value_norm_scatter",
    study="LayerFacts Sample Study as_studies",
    tables="TABLES TRAINING_TABLES table write_tables",
    training="HeldoutLoss Training as_trainings",
    training_curves=(
        "massive_activations mobility_over_training optimization sink_emergence sinks_over_training training_loss"
    ),
    training_layers="emergence_map main_holders trained_norms trained_share",
)
