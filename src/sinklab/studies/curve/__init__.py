"""Held-out loss over the number of masked columns."""
