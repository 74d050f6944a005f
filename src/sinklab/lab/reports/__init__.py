"""Figures, tables, sentences and one page from run folders; nothing else is read."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    build="answers report summary",
    charts="Axis Chart Line Map Mark",
    drawing="Curve Drawn Figure draw_all figure figures_of",
    figures=(
        "block_moves epsilon_curve heldout_loss main_holders massive_activations mobility_by_layer "
        "mobility_over_training optimization output_norm_against_bound overlap_by_step "
        "score_histogram sink_emergence sink_share sink_tokens sinks_over_training sinks_per_layer "
        "split_sinks trained_norms trained_share training_loss value_norms value_norms_by_state"
    ),
    maps=(
        "attention_map emergence_map figure_1 layer_head_map received_map sink_path_of_head "
        "sink_paths statistics_maps"
    ),
    runs="as_studies as_trainings",
    samples="NotRecorded Reader Sample",
    study="Study",
    tables="TABLES TRAINING_TABLES compare table write_tables",
    training="Training",
)
