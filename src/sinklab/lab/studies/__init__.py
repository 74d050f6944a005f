"""What is run: one folder a study."""
