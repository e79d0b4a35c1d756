"""A replica of two ranks whose samples have turns; `continue_turn` is called on one of them.

Each rank has an engine that answers alike, as tensor-parallel ranks of vLLM do.
"""

import torch.distributed as dist

from parallel import device
from parallel.rank_set import world
from tests.scripted_engine import ScriptedEngine
from verl_megatron.rollout.dispatch import ContinueTurn, generate
from verl_megatron.rollout.sampling import Request, Sampling


def sample(continue_turn: ContinueTurn) -> list[int]:
    """Tokens of a sample, the same on both ranks."""
    ranks = world()
    engine = ScriptedEngine(lambda request: [7] * (3 if len(request.prompt_token_ids) == 1 else 2))
    engine.world, engine.tp_rank, engine.tp_group = ranks, ranks.rank, ranks.cpu_group
    engine.is_owner = ranks.is_first
    (found,) = generate(engine, [Request(0, [1], 0, Sampling(max_tokens=7))], continue_turn=continue_turn)
    return found.token_ids


def refused(continue_turn: ContinueTurn) -> str:
    """Message of the error, which both ranks have."""
    try:
        sample(continue_turn)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def main() -> None:
    device.initialize()
    ranks, calls = world(), []

    def tool(so_far):
        calls.append(ranks.rank)
        return iter([50 + len(calls), 51]) if so_far.is_sampled is None else None

    def fails(so_far):
        raise ValueError("the tool is gone")

    found = [
        sample(tool),
        refused(fails),
        refused(lambda so_far: lambda: None),
        refused(lambda so_far: ["fifty"]),
    ]
    assert set(calls) <= {0}, "called on another rank than the owner"
    everywhere = ranks.all_gather_object(found)
    assert everywhere[0] == everywhere[1], everywhere
    if ranks.is_first:
        print(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
