"""The rollout in a plan: lengths of responses, vLLM's memory, and the seconds of decoding."""
