"""The reasoning battery: problems with known answers, with and without sinks."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    settings="BatterySettings Condition",
    study="Battery score_battery",
    run="accuracy",
    tables="battery_contrasts battery_gate battery_scores battery_sentences write_battery_tables",
    figures="battery_by_removed battery_by_skill write_battery_figures",
)
