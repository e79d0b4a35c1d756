"""In-place (aliased) reshards: vLLM's parameters in Megatron's memory, one copy of the weights for both."""
