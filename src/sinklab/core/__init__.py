"""Attention, sinks, sampling, models and probing: the part of the code to read first.

Nothing in here imports from the other two rings.
"""

PROVIDES = {
    "rules": "sinks",
    "statistics": "probing.statistics",
    "interventions": "probing.interventions.block_keys",
    "selectors": "probing.interventions.selectors",
    "removals": "probing.interventions.removals",
    "sinks": "models.sinks",
    "unmasking_rules": "sampling.rules",
    "schedules": "sampling.schedules",
}
"""Registry to the modules of this ring that register classes in it."""
