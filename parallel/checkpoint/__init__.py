"""A run's checkpoints: folders with digests, checks on resume, and Megatron-Core's training state."""
