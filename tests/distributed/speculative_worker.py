"""Process of test_speculative.py: `speculative_worker.py FOLDER`, alone or one of two ranks."""

import json
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.distributed import rollout_engines as engines
from tests.distributed.speculative_alone import GREEDY, ON, VOCABULARY, check_alone, load_of
from verl_megatron.rollout.sampling import Request, Sampling

LIKELY = "likely.json"


def likely_texts(model) -> list[list[int]]:
    """Return prompts that the model itself might write, so that it accepts some of their drafts."""
    torch.manual_seed(0)
    start_PT = torch.arange(3, VOCABULARY)[:, None]
    return model.generate(
        start_PT, max_new_tokens=140, min_new_tokens=140, do_sample=True, temperature=0.6, eos_token_id=None
    ).tolist()


def alone() -> None:
    model = AutoModelForCausalLM.from_pretrained(engines.folder / "sharp", dtype=torch.float32)
    prompts = likely_texts(model)
    (engines.folder / LIKELY).write_text(json.dumps(prompts))
    check_alone(prompts, prompts[0], model)


def world() -> None:
    """Greedy samples of two replicas, and of one of two ranks, are alike; random ones agree on both ranks."""
    os.environ.update(engines.TORCHRUN)
    dist.init_process_group("gloo")
    prompts = json.loads((engines.folder / LIKELY).read_text())
    requests = [Request(n, prompt, n) for n, prompt in enumerate(prompts)]
    found = []
    for tp in (1, 2):
        actor = engines.actor_of("sharp", tp, config=ON)
        mine = engines.tokens_of(actor.generate(requests, GREEDY)) if actor.is_owner or tp == 2 else {}
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        found.append({sample: tokens for part in parts for sample, tokens in part.items()})
        actor.generate(requests, Sampling(max_tokens=40, ignore_eos=True))  # checks that the ranks agree
        assert load_of(actor)["rollout/acceptance_length"] > 1.2
        actor.close()
    assert found[0] == found[1] and len(found[0]) == len(requests)


if __name__ == "__main__":
    alone() if engines.TORCHRUN["WORLD_SIZE"] == "1" else world()
    print("all checks of speculative decoding passed", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
