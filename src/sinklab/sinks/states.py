"""What a position of the canvas holds before a step; every table and array of states means these."""

STATES = ("masked", "committed", "prompt")
"""Names of the states, by code: still to be written, written, given. A position that does not exist has the code -1."""

MASKED, COMMITTED, PROMPT = range(len(STATES))
