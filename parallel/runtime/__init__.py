"""Processes of a run: launch, fault detection, error reporting and cleanup."""
