"""The whole way of weights between training and rollout, with a real vLLM."""
