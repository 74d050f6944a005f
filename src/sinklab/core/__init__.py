"""Attention, sinks, sampling, models and probing: the part of the code to read first.

Nothing in here imports from the other two rings.
"""

PROVIDES = {
    "rules": "sinks",
    "statistics": "instrument.statistics",
    "interventions": "instrument.edits.block_keys",
    "selectors": "instrument.edits.selectors",
    "removals": "instrument.edits.removals",
    "sinks": "subject.sinks",
    "unmasking_rules": "subject.rules",
    "schedules": "subject.schedules",
}
"""Registry to the modules of this ring that register classes in it."""
