"""The command line: recipes, plans without GPUs, and presets."""
