"""The command line: recipes, start of the ranks, plans without GPUs."""
