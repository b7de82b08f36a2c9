"""Benchmarks: what is measured, against what, and how it is shown."""
