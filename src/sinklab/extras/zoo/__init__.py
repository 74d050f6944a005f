"""Families, decoders and recipes beyond those of the two papers."""
