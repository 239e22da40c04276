"""Measurements: what is measured, against what, with which bar. Run one by `python benchmarks/run.py NAME`."""
