"""Beyond the papers: each folder registers itself and can be deleted without a trace."""
