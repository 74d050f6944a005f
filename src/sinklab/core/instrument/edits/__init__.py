"""Edits of attention calls, one file each."""
