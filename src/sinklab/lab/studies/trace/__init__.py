"""A model watched while it writes, with and without interventions."""
