"""How faithful block caches are, with and without protected sinks."""
