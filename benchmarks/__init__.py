"""Measurements: one script for each thing measured."""
