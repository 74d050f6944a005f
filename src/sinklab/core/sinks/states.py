"""Contents of a canvas position before a step; every table and array of states means these."""

STATES = ("masked", "committed", "prompt")
"""Names of the states, by code: still to be written, written, given. A position that does not exist
has the code -1.
"""

MASKED = 0
"""Code of a position that is still to be written."""
COMMITTED = 1
"""Code of a position that was written at an earlier step."""
PROMPT = 2
"""Code of a position that was given."""
