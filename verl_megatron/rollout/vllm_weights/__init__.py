"""The memory of vLLM's weights: parameters in external memory or in one allocation, and in fp8."""
