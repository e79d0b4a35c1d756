"""Command line of direct preference optimization.

`torchrun --nproc_per_node 2 -m verl_megatron.dpo --config-name dpo_toy_cpu`
"""

from parallel.runtime import process

if __name__ == "__main__":
    process.begin()  # before slow imports

    from verl_megatron.config import DPOConfig
    from verl_megatron.launch.supervised import run_supervised

    run_supervised(DPOConfig)
