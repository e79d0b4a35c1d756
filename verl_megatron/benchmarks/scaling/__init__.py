"""Runs of a recipe on several numbers of ranks, and a model of larger sizes."""
