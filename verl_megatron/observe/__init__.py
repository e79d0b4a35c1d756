"""Metrics of a run and their destinations."""
