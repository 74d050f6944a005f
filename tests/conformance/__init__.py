"""Conformance suites: the whole contract of what can be registered."""
