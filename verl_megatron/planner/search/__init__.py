"""The layout search: what it tries, what fits, and how many GPUs train, generate and score."""
