"""Supervised tasks on the training engine: imitation, preferences, reward models. One file each."""
