"""The reasoning battery: problems with known answers, with and without sinks."""
