"""Names of controls and protocols, for settings that are read before torch is."""

CONTROLS = ("sinks", "random", "equal_mass", "recent", "lowest")
"""Keys that `MaskSinks` removes: the sinks, or others in their place."""
PROTOCOLS = ("paper", "held", "rule", "clean")
"""Ways to mask sinks that have a name; see `by_protocol`."""
