"""Ranks that are forked from one process of their host, which has imported their modules once.

The launcher starts a fork server (`server`) and asks it for each rank (`client`). Importing torch,
Megatron-Core and vLLM takes many seconds of a core, and a host without GPUs has few cores for its ranks.
"""

began: float | None = None  # in a forked rank: when its server began to import, seconds since boot
