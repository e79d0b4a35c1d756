"""Speculative decoding on a GPU: distribution, log-probs, metrics and versions with CUDA graphs, and sleep.

python tests/gpu/speculative_check.py FOLDER, which test_gpu.py writes
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a script, Python looks in the script's folder only
from tests.distributed import rollout_engines as engines  # isort: skip  # before vLLM

import torch
from transformers import AutoModelForCausalLM

from tests.distributed.speculative_alone import (
    ON,
    check_acceptance,
    check_circles,
    check_distribution,
    check_logprobs,
)
from tests.distributed.speculative_worker import likely_texts


def check_sleep(on) -> None:
    """Drafts go on after the engine has slept and got weights again."""
    on.sleep()
    for tag in ("weights", "kv_cache"):
        on.wake(tag)
    check_acceptance(on)  # which writes weights


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(engines.folder / "sharp", dtype=torch.float32)
    prompts = likely_texts(model)
    (engines.folder / "likely.json").write_text(json.dumps(prompts))
    on = engines.actor_of("sharp", config=replace(ON, gpu_memory_utilization=0.2))
    # Heads of 64 have weaker preferences than those of the CPU's test, so a wrong temperature takes more
    # samples to notice. bfloat16 moves probabilities by about one percent, far less than these tell apart,
    # but behind 2 % of the prefixes it has another token as the last of five.
    check_distribution(model, on, prompts[0], 8000, top_k=0)
    check_logprobs(model, on, prompts[0], atol=0.2, least_share=0.95)
    check_circles(on)
    check_sleep(on)
    on.close()
    print("all checks of speculative decoding passed", flush=True)


if __name__ == "__main__":
    main()
