"""Names of arms, controls and protocols, for settings that are read before torch is."""

CONTROLS = ("sinks", "random", "equal_mass")
"""Keys that are blocked: the sinks, or others in their place."""
ARMS = (*CONTROLS, "matched")
"""The same, and the sinks in the heads alone that have a control of equal mass."""
PROTOCOLS = ("paper", "held", "rule", "clean")
"""Ways to mask sinks that have a name; see `by_protocol`."""
