"""Fast paths, each with a slow twin in the core that tests hold it to."""
