"""Who holds what and how it moves. Knows nothing of reinforcement learning, Hydra or vLLM."""
