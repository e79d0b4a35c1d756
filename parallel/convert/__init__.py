"""Conversion between Hugging Face folders and Megatron-Core's distributed checkpoints.

Needs no GPU, model or process groups.
"""
