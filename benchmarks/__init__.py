"""Measurements: one script for each thing measured, and the study."""
