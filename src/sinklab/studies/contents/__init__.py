"""What can be read in the states of sinks."""
