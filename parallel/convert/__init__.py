"""Conversion between Hugging Face folders and Megatron-Core's distributed checkpoints, without a GPU, a model or process groups."""
