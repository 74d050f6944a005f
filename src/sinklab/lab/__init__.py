"""Both papers, and what a researcher does every day: files, training, scoring, studies, reports."""

PROVIDES = {
    "attention_functions": "eager",
    "caches": "caching.blocks",
    "commands": "cli.main cli.models cli.reports cli.tour",
    "denoisers": "caching.session",
    "families": "checkpoints.families checkpoints.formats",
    "interventions": "measures.amplify measures.patch measures.positions scoring.hidden_states",
    "figures": "reports.figures studies.curve.figures",
    "removals": "measures.partial measures.values",
    "rules": "analysis.rules",
    "schedules": "samplers",
    "selectors": "measures.controls",
    "sinks": "added_sinks",
    "statistics": "measures.statistics",
    "studies": ("studies.benchmarks.study studies.curve.study studies.trace.study"),
    "unmasking_rules": "samplers",
}
"""Registry to the modules of this ring that register classes in it."""
