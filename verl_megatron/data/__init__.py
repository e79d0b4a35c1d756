"""Data: prompt files, the rollout batch, its distribution over ranks, and packed micro-batches."""
