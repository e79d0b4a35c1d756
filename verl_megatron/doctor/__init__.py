"""`verl-megatron doctor`: looks at a machine before a run, and says what to do about what it finds."""
