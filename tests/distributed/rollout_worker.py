"""Processes of test_rollout.py: `rollout_worker.py FOLDER`.

One process writes the samples that a world of four has to reproduce.
"""

import gc
import json
import os
import random
import sys
import time
from pathlib import Path

folder = Path(sys.argv[-1])
TORCHRUN = {
    name: os.environ.pop(name, "")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
}

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from verl_megatron.config import RolloutConfig  # noqa: E402
from verl_megatron.rollout import vllm_cpu, vllm_weights  # noqa: E402
from verl_megatron.rollout.sampling import Request, Sampling, sample_seed  # noqa: E402
from verl_megatron.rollout.vllm import Colocation, VLLMActor  # noqa: E402


def make_prompt(i: int) -> list[int]:
    return [1] + [3 + (7 * i + j * j) % 140 for j in range(2 + (147 if i % 4 == 3 else i))]


CONFIG = RolloutConfig(max_num_seqs=8, kv_cache_mib=32)
SAMPLING = Sampling(temperature=0.7, max_tokens=24, ignore_eos=True)
# Prompts of 3 to 149 tokens, two samples each; the long ones fill a block of the prefix cache.
PROMPTS = [make_prompt(i) for i in range(16)]
REQUESTS = [Request(sample, PROMPTS[sample // 2], sample_seed(5, 1, sample)) for sample in range(32)]
STARTED = time.monotonic()


def actor_of(name, tp=1, **options):
    actor = VLLMActor(folder / name, tp, config=CONFIG, max_model_len=256, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{time.monotonic() - STARTED:.1f} s: engine {name} is up", flush=True)
    return actor


def tokens_of(samples):
    return {str(sample.sample_id): sample.token_ids for sample in samples}


def process_state():
    generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return (
        generators,
        gc.isenabled(),
        dict(os.environ),
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def seven(tensor):
    """A trainer's buffer of the same layout, filled with something that no initialisation writes."""
    return torch.full_like(tensor, 7.0)


def write_all(target, source):
    """All of source's parameters into target's, in place."""
    written = target.weight_target()
    for name, tensor in source.weight_target().items():
        written.pop(name).copy_(tensor)
    assert not written, written.keys()


def hf_logprobs(model, sample, *, temperature, top_k=0, top_p=1.0):
    """Log-probabilities of the sample's response under what sampling makes of Hugging Face's logits."""
    ids = torch.tensor([list(sample.prompt_token_ids) + sample.token_ids])
    logits_TV = model(ids).logits[0, len(sample.prompt_token_ids) - 1 : -1].float() / temperature
    if top_k:
        logits_TV = logits_TV.masked_fill(logits_TV < logits_TV.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        probs_TV, order_TV = logits_TV.softmax(-1).sort(descending=True)
        keep_TV = torch.zeros_like(logits_TV, dtype=torch.bool).scatter(
            -1, order_TV, probs_TV.cumsum(-1) - probs_TV < top_p
        )
        logits_TV = logits_TV.masked_fill(~keep_TV, -torch.inf)
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]


@torch.no_grad()
def check_logprobs(actor, samples):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "a", dtype=torch.float32)
    for sample in samples:
        torch.testing.assert_close(
            torch.tensor(sample.logprobs), hf_logprobs(model, sample, temperature=0.7), rtol=0, atol=1e-4
        )
    for changes in (dict(temperature=1.3, top_k=5), dict(temperature=1.0, top_p=0.6)):
        for sample in actor.generate(REQUESTS[:6], Sampling(**changes, max_tokens=8, ignore_eos=True)):
            torch.testing.assert_close(
                torch.tensor(sample.logprobs), hf_logprobs(model, sample, **changes), rtol=0, atol=1e-4
            )
    (sample,) = actor.generate(REQUESTS[:1], Sampling(temperature=0, max_tokens=8, ignore_eos=True))
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None)[
        0, ids.shape[1] :
    ]
    assert sample.token_ids == expected.tolist()
    torch.testing.assert_close(
        torch.tensor(sample.logprobs), hf_logprobs(model, sample, temperature=1.0), rtol=0, atol=1e-4
    )  # greedy: nothing is scaled


def check_ends(actor, samples):
    """Stop ids, end of sequence, minimum and maximum lengths."""
    stop = samples[0].token_ids[5]
    stopping = dict(temperature=0.7, max_tokens=24)
    for free, sample in zip(
        samples,
        actor.generate(REQUESTS, Sampling(**stopping, stop_token_ids=(stop,), ignore_eos=True)),
        strict=True,
    ):
        cut = free.token_ids.index(stop) + 1 if stop in free.token_ids else 24
        assert sample.token_ids == free.token_ids[:cut] and sample.finish_reason == (
            "stop" if stop in free.token_ids else "length"
        )
    longer = actor.generate(
        REQUESTS, Sampling(**stopping, stop_token_ids=(stop,), ignore_eos=True, min_tokens=10)
    )
    assert (
        all(len(sample.token_ids) >= 10 and stop not in sample.token_ids[:9] for sample in longer)
        and len(longer[0].token_ids) > 6
    )
    ended = [
        sample
        for sample in actor.generate(REQUESTS, Sampling(temperature=2.0, max_tokens=90))
        if sample.finish_reason == "stop"
    ]
    assert ended and all(
        sample.token_ids.index(2) == len(sample.token_ids) - 1 for sample in ended
    )  # 2 ends a sequence
    last = Request(7, [1] * 250, 3)
    (sample,) = actor.generate([last], SAMPLING)
    assert len(sample.token_ids) == 6 and sample.finish_reason == "length"  # what fits into max_model_len=256


def check_refusals(actor):
    for prompt, message in (
        ([1] * 256, "sample 9: a prompt of 256 tokens"),
        ([], "sample 9 has an empty prompt"),
        ([150], "sample 9: token id 150"),
    ):
        with pytest.raises(ValueError, match=message):
            actor.generate([*REQUESTS[:2], Request(9, prompt, 0)], SAMPLING)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        actor.generate(REQUESTS[:1], Sampling(stop=("w5",)))
    with pytest.raises(ValueError, match="rollout.tp=2 must divide the 1 ranks"):
        VLLMActor(folder / "a", 2)
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        VLLMActor(folder)


def check_failing_callback(actor, samples):
    """An error in on_finish travels, and the engine is usable afterwards."""

    def fail(sample):
        raise KeyError(sample.sample_id)

    with pytest.raises(KeyError):
        actor.generate(REQUESTS, SAMPLING, on_finish=fail)
    assert tokens_of(actor.generate(REQUESTS[:3], SAMPLING)) == tokens_of(samples[:3])


def check_converted(samples):
    """vLLM generates the same from the original and from a folder converted back from Megatron-Core."""
    converted = actor_of("converted")
    assert converted.generate(REQUESTS, SAMPLING) == samples
    converted.close()


def check_write_in_place(actor, fresh):
    """Other weights written into a used engine give that model's rows once the prefix cache is reset."""
    expected = fresh.generate(REQUESTS, SAMPLING)
    write_all(actor, fresh)
    stale = actor.generate(REQUESTS, SAMPLING)
    assert stale != expected  # keys and values of the long prompts are the old weights'
    actor.reset_cache()
    assert actor.generate(REQUESTS, SAMPLING) == expected  # to the last bit


def check_weights_need_their_patch():
    """Without it the CPU build hides linear weights: what `parameters` gives could not be written."""
    import vllm._custom_ops as ops

    name, patch = vllm_cpu.CPU_PATCHES["keep_weights"]
    vllm_cpu.CPU_PATCHES["keep_weights"] = (name, lambda: setattr(ops, "_supports_onednn", True))
    packed = actor_of("a")
    assert any(tensor.numel() == 0 for tensor in packed.weight_target().values())
    packed.close()
    vllm_cpu.CPU_PATCHES["keep_weights"] = (name, patch)


def check_shared_memory():
    """Each kind of parameter between construction and use, on modules that stand for vLLM's."""
    emptying = vllm_weights.Emptying()
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(emptying)
    embedding, linear, head = (
        torch.nn.Embedding(6, 4),
        torch.nn.Linear(4, 8),
        torch.nn.Linear(4, 6, bias=False),
    )  # they register first and fill then
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, linear, head, torch.nn.LayerNorm(4))
    hook.remove()
    parameters = dict(model.named_parameters())
    assert [name for name, parameter in parameters.items() if parameter.untyped_storage().nbytes()] == [
        "3.weight",
        "3.bias",
    ]  # perhaps unfinished
    wrong = {
        "0.weight": (torch.zeros(6, 3), r"0.weight is \(6, 3\) .* parameter is \(6, 4\)"),
        "1.weight": (torch.zeros(4, 8).T, r"strides \(1, 8\).*strides \(4, 1\)"),
        "1.bias": (torch.zeros(9)[1:], "no multiple of 16 bytes"),
        "2.weight": (torch.zeros(6, 4), "no parameter 2.weight"),
        "3.weight": (torch.zeros(4, dtype=torch.float64), "float64.*float32"),
    }
    for name, (tensor, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            vllm_weights.share(model, {"3.bias": torch.ones(4), name: tensor}, emptying.emptied)
    given = {"0.weight": torch.randn(6, 4), "1.bias": torch.randn(8), "3.bias": torch.randn(4)}
    rest = vllm_weights.share(model, given, emptying.emptied)
    assert len(rest) == 2 and rest[0] is model[1].weight and rest[1] is model[3].weight
    model[1].weight.data.fill_(0.5)  # has memory again
    assert model[2].weight is model[0].weight and all(
        parameters[name].data_ptr() == tensor.data_ptr() for name, tensor in given.items()
    )
    hidden = torch.nn.functional.layer_norm(given["0.weight"][[5]], (4,), torch.ones(4), given["3.bias"])
    assert torch.equal(model[3](model[0](torch.tensor([5]))), hidden)
    torch.testing.assert_close(model[1](hidden), 0.5 * hidden.sum() + given["1.bias"][None])


def check_sleeping_bytes():
    from vllm.device_allocator import AllocationData

    sizes = (("weights", True), ("weights", False), ("kv_cache", True), ("runtime", True))
    allocations = [
        AllocationData((0, 10**i, 0, 0), tag, is_asleep=asleep) for i, (tag, asleep) in enumerate(sizes)
    ]
    assert [vllm_weights.sleeping_bytes(allocations, tag) for tag in ("weights", "kv_cache")] == [1001, 1100]


def check_tied():
    """One parameter under two names, in memory of ours."""
    own = actor_of("tied")
    shared = {name: seven(tensor) for name, tensor in own.weight_target().items()}
    assert "lm_head.weight" not in shared
    expected = own.generate(REQUESTS[:4], SAMPLING)
    weights = {name: tensor.clone() for name, tensor in own.weight_target().items()}
    own.close()
    actor = actor_of("tied", colocation=Colocation(shared_weights=shared))
    for name, tensor in shared.items():
        tensor.copy_(weights[name])
    assert actor.generate(REQUESTS[:4], SAMPLING) == expected
    actor.close()


def check_text(fresh):
    prompts = ["w5 w6 w7", "w9"]
    whole = fresh.generate_text(prompts, SAMPLING)
    assert len(whole) == 2 and all(text.startswith("w") for text in whole)
    stop = whole[0].split()[4]
    assert (
        fresh.generate_text(prompts, Sampling(temperature=0.7, max_tokens=24, ignore_eos=True, stop=(stop,)))[
            0
        ]
        == whole[0].split(stop)[0]
    )


def alone():
    before = process_state()
    actor = actor_of("a")
    samples = actor.generate(REQUESTS, SAMPLING)
    assert process_state() == before
    assert [sample.sample_id for sample in samples] == list(range(32)) and all(
        len(sample.token_ids) == len(sample.logprobs) == 24 for sample in samples
    )
    assert len({tuple(sample.token_ids) for sample in samples}) == 32
    assert tokens_of(actor.generate(REQUESTS[::-1], SAMPLING)) == tokens_of(samples)
    (folder / "alone.json").write_text(
        json.dumps([tokens_of(samples), {sample.sample_id: sample.logprobs for sample in samples}])
    )
    check_logprobs(actor, samples)
    check_ends(actor, samples)
    check_refusals(actor)
    check_failing_callback(actor, samples)
    check_converted(samples)
    fresh = actor_of("b")
    check_write_in_place(actor, fresh)
    actor.close()
    check_text(fresh)
    fresh.close()
    check_weights_need_their_patch()
    check_tied()
    assert process_state() == before and not dist.is_initialized()
    check_shared_memory()
    check_sleeping_bytes()
    os.environ.update(TORCHRUN)
    joined = actor_of("a")  # joins torchrun's world by itself
    assert dist.get_world_size() == 1 and tokens_of(joined.generate(REQUESTS[:4], SAMPLING)) == tokens_of(
        samples[:4]
    )
    joined.close()
    assert dist.is_initialized()


def check_samples(actor, mine, expected, expected_logprobs):
    """Each sample is some replica's, with the tokens and log-probabilities that one rank alone gives it."""
    taken = [None] * dist.get_world_size()
    dist.all_gather_object(taken, {sample.sample_id: sample.token_ids for sample in mine})
    taken = [taken[rank] for rank in actor.ranks]
    for place, samples in enumerate(taken):
        assert samples == taken[place - place % actor.tp]
    owners = taken[:: actor.tp]
    assert sorted(sample for samples in owners for sample in samples) == list(range(32))
    for sample in mine:
        assert sample.token_ids == expected[str(sample.sample_id)]
        torch.testing.assert_close(
            torch.tensor(sample.logprobs),
            torch.tensor(expected_logprobs[str(sample.sample_id)]),
            rtol=0,
            atol=1e-4,
        )
    return [len(samples) for samples in owners]


def shards_of(actor):
    """Weights of each tensor-parallel slot, on every rank."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: tensor.clone() for name, tensor in actor.weight_target().items()})
    return [held[rank] for rank in actor.ranks[: actor.tp]]


def check_refused_options():
    """While an engine in the usual order is open."""
    wrong = {
        (2, 0, 1, 3): r"must increase, and \[2, 0\]",
        (0, 1, 2, 2): "each of the world's 4 ranks once",
        (0, 1): "4 ranks once",
        (0, 2, 1, 3): "close it first",
    }
    for ranks, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            actor_of("a", 2, colocation=Colocation(ranks=ranks))


def check_shared(shards, expected, expected_logprobs):
    """An engine with another order of ranks, most of it in our memory, generates what the others do."""
    ranks = (0, 2, 1, 3)
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight is \(7, 7\) torch.float32, .* parameter is \("
    ):
        small = Colocation(shared_weights={"model.embed_tokens.weight": torch.zeros(7, 7)})
        actor_of("a", 2, colocation=small)
    weights = shards[ranks.index(dist.get_rank()) % 2]
    kept = {"model.norm.weight", "model.layers.1.self_attn.o_proj.weight"}
    assert kept < weights.keys()
    shared = {name: seven(tensor) for name, tensor in weights.items() if name not in kept}
    actor = actor_of("a", 2, colocation=Colocation(ranks=ranks, shared_weights=shared))
    assert (actor.replica, actor.tp_rank, actor.is_owner) == {
        0: (0, 0, True),
        2: (0, 1, False),
        1: (1, 0, True),
        3: (1, 1, False),
    }[dist.get_rank()]
    held = actor.weight_target()
    assert held.keys() == weights.keys() and all((tensor == 7).all() for tensor in shared.values()), (
        "they were written to"
    )
    addresses = {tensor.data_ptr() for tensor in shared.values()}
    assert all(held[name].data_ptr() not in addresses and held[name].abs().max() < 0.01 for name in kept)
    for name, tensor in weights.items():
        (held[name] if name in kept else shared[name]).copy_(tensor)
    finished = []
    shares = check_samples(
        actor, actor.generate(REQUESTS, SAMPLING, on_finish=finished.append), expected, expected_logprobs
    )
    assert len(finished) == (shares[actor.replica] if actor.is_owner else 0), shares
    held = actor.weight_target()
    assert all(held[name].data_ptr() == tensor.data_ptr() for name, tensor in shared.items())
    actor.close()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in shared.items())


def world():
    os.environ.update(TORCHRUN)
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())  # ranks whose generators differ, as a trainer's do
    expected, expected_logprobs = json.loads((folder / "alone.json").read_text())
    before = process_state()
    actor = actor_of("a", 2, colocation=Colocation(shared_weights={}))
    assert process_state() == before
    with pytest.raises(ValueError, match=r"rollout.tp=3 must divide the 4 ranks"):
        VLLMActor(folder / "a", 3)
    source = actor_of("a", 2)
    write_all(actor, source)
    source.close()
    shards = shards_of(actor)
    check_refused_options()
    assert (actor.replica, actor.num_replicas, actor.tp_rank) == (
        dist.get_rank() // 2,
        dist.get_world_size() // 2,
        dist.get_rank() % 2,
    )
    finished = []
    shares = check_samples(
        actor, actor.generate(REQUESTS, SAMPLING, on_finish=finished.append), expected, expected_logprobs
    )
    assert len(finished) == (shares[actor.replica] if actor.is_owner else 0), shares

    def slow(sample):
        time.sleep(0.3)

    shares = check_samples(
        actor,
        actor.generate(REQUESTS, SAMPLING, on_finish=slow if actor.replica == 0 else None),
        expected,
        expected_logprobs,
    )
    assert shares[0] < 14, shares  # 8 at first, then one each 0.3 s
    assert tokens_of(actor.generate(REQUESTS[:6], SAMPLING, shared=False)) == {
        str(sample): expected[str(sample)] for sample in range(6)
    }
    assert process_state() == before
    store = dist.distributed_c10d._get_default_store()
    assert not any(
        store.check([f"verl_megatron/samples/{i}"]) or store.check([f"verl_megatron/samples/{i}/finished"])
        for i in range(4)
    )
    actor.close()
    check_shared(shards, expected, expected_logprobs)
    for tp in (4, 1):  # more ranks than key-value heads; four replicas
        actor = actor_of("a", tp)
        check_samples(actor, actor.generate(REQUESTS, SAMPLING), expected, expected_logprobs)
        actor.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 4


if __name__ == "__main__":
    alone() if TORCHRUN["WORLD_SIZE"] == "1" else world()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - STARTED:.1f} s: all rollout checks passed", flush=True)
    dist.destroy_process_group()
