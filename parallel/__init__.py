"""Parallel layouts, sharded weights and resharding; independent of reinforcement learning, Hydra and vLLM."""
