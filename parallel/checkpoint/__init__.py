"""A run's state on disk: folders with digests, what a resumed run reads, and Megatron-Core's training state in them."""
