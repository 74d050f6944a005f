"""Layouts that a writer and its readers agree on: the axes of what a run of kind "study" holds of one sample."""

STUDY_DIMS: dict[str, tuple[str, ...]] = {
    "received": ("step", "layer", "head", "key"),
    "visible": ("step", "key"),
    "positions": ("step",),
    "step_number": ("step",),
    "value_norm": ("step", "layer", "key"),
    "key_norm": ("step", "layer", "key"),
    "main_by_state": ("step", "state", "layer", "head"),
    "share_by_state": ("step", "state", "layer", "head"),
    "received_by_state": ("step", "state", "layer", "head", "key"),
    "row_entropy": ("step", "state", "layer", "head"),
    "row_logsumexp": ("step", "state", "layer", "head"),
    "output_norm": ("step", "state", "layer", "head"),
    "noop_bound": ("step", "state", "layer", "head"),
}
"""Axes of the arrays "attention"; only the first four are in every study."""
