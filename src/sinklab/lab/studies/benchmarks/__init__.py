"""Benchmarks through lm-eval, and the tables of both papers."""
