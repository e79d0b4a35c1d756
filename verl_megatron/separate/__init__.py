"""Rollout on GPUs of its own: a rollout world beside the training world, joined by a bridge."""
