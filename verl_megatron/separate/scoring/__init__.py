"""Frozen models on ranks of their own: what training asks of them, and how they answer."""
