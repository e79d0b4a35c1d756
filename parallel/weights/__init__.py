"""The mapping between the tensors of Megatron, vLLM and Hugging Face for one model."""
