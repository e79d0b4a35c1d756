"""Megatron-Core models: layer specifications, attention and heads."""
