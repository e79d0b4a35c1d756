"""Ranks whose modules are imported before torch's agent starts them.

The launcher starts processes that import (`server`), and asks them for ranks (`client`). Importing torch,
Megatron-Core and vLLM takes many seconds of a core. A host without GPUs has few cores, so that one process
imports for all of its ranks, which are forked. On GPUs, ranks import while the launcher itself imports torch.
"""

began: float | None = None  # in such a rank: when its process began to import, seconds since boot
