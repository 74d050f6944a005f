"""Measurements of what sinks do (2025 and 2026), one file each: a statistic, a rule, a selector or
an edit.
"""
