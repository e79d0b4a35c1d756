"""One map of a model's weights: how Megatron's, vLLM's and Hugging Face's tensors cover each other."""
