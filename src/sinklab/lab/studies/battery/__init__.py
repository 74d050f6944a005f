"""The reasoning battery: problems with known answers, with and without sinks."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="BatterySettings Battery score_battery")
