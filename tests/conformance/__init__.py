"""Conformance suites: the whole contract of what can be registered, for the classes of the package.
`sinklab check` has a short form of each for plug-ins.
"""
