"""Attention, sinks, sampling, models and probing: what is read in an evening, and knows nothing of
the other rings.
"""
