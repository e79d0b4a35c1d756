"""Command line of reward-model training.

`torchrun --nproc_per_node 2 -m verl_megatron.reward_model --config-name reward_model_toy_cpu`
"""

from parallel.runtime import process

if __name__ == "__main__":
    process.begin()  # before slow imports

    from verl_megatron.config import RewardModelConfig
    from verl_megatron.launch.supervised import run_supervised

    run_supervised(RewardModelConfig)
