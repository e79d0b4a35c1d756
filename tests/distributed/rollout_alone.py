"""One process with vLLM: its samples, their log-probs, ends, refusals, and how weights are written."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rollout_engines import (
    FOLLOWING,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    TORCHRUN,
    actor_of,
    folder,
    process_state,
    seven,
    tokens_of,
    write_all,
)
from tests.one_rank import ONE_RANK
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout import vllm_cpu
from verl_megatron.rollout.sampling import Request, Sampling, sample_seed
from verl_megatron.rollout.vllm import Colocation, VLLMActor
from verl_megatron.rollout.vllm_decoding.bookkeeping import replaced
from verl_megatron.rollout.vllm_decoding.requests import sampling_params
from verl_megatron.rollout.vllm_weights import loading


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


def check_bookkeeping(actor):
    """Tokens, log-probs and every step are those of vLLM's own loop, also where a cache block is full."""
    scheduler, steps = actor._llm.llm_engine.engine_core.engine_core.scheduler, []

    def schedule(*args):
        found = type(scheduler).schedule(scheduler, *args)
        cached = found.scheduled_cached_reqs
        blocks = [list(map(len, ids or ())) for ids in cached.new_block_ids]
        steps.append(
            (
                [*found.num_scheduled_tokens.values()],
                cached.num_computed_tokens,
                cached.num_output_tokens,
                blocks,
            )
        )
        return found

    def bare(requests, sampling):
        params = [
            sampling_params(sampling, seed=request.seed, max_tokens=sampling.max_tokens)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
        with actor._guarded():
            outputs = [output.outputs[0] for output in actor._llm.generate(prompts, params, use_tqdm=False)]
        return [
            (output.token_ids, list(output.logprobs.logprobs), output.finish_reason) for output in outputs
        ]

    variants = [dict(ignore_eos=True), dict(temperature=2.0)]
    if actor.has_tokenizer:
        variants.append(dict(stop=(actor._llm.get_tokenizer().decode([140]),)))
    requests = [Request(i, PROMPTS[3][: 60 + 5 * i], sample_seed(5, 1, i)) for i in range(8)]
    with replaced(scheduler, "schedule", schedule):
        for changes in variants:
            sampling = Sampling(max_tokens=100, **changes)
            actor.reset_cache()
            samples = actor.generate(requests, sampling)
            found, steps[:] = steps[:], []
            actor.reset_cache()
            assert [(sample.token_ids, sample.logprobs, sample.finish_reason) for sample in samples] == bare(
                requests, sampling
            )
            assert found == steps and len(steps) > 20
            assert any(any(blocks) for *_, blocks in steps) and not all(any(blocks) for *_, blocks in steps)
            steps.clear()


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
    with pytest.raises(ValueError, match="rollout.tp=2 must divide the number of ranks that generate, 1"):
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


def check_samples_follow_the_cache(model="a"):
    """A cache for 3 of 12 growing samples: without the setting vLLM preempts, with it the number follows."""
    greedy, loads, samples = Sampling(temperature=0, max_tokens=220, ignore_eos=True), [], []
    for follows in (False, True):
        actor = actor_of(model, config=replace(FOLLOWING, max_num_seqs=12, dynamic_batching=follows))
        samples.append(actor.generate(REQUESTS[:6] + REQUESTS[8:14], greedy))
        actor.admission.add_load(sums := Sums(), is_first=True)
        loads.append(sums.reduce(ONE_RANK))
        actor.close()
    assert tokens_of(samples[0]) == tokens_of(samples[1])
    for one, other in zip(*samples):
        torch.testing.assert_close(
            one.logprobs, other.logprobs, rtol=0, atol=1e-4
        )  # preempted: computed again
    fixed, following = loads
    assert fixed["rollout/preempted"] >= 5 and fixed["rollout/kv_cache_used"] == 1
    assert following["rollout/preempted"] == 0
    assert following["rollout/concurrent"] < fixed["rollout/concurrent"] <= 12


def check_shared_memory():
    """Each kind of parameter between construction and use, on modules that stand for vLLM's."""
    emptying = loading.Emptying()
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
            loading.share(model, {"3.bias": torch.ones(4), name: tensor}, emptying.emptied)
    given = {"0.weight": torch.randn(6, 4), "1.bias": torch.randn(8), "3.bias": torch.randn(4)}
    rest = loading.share(model, given, emptying.emptied)
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
    assert [loading.sleeping_bytes(allocations, tag) for tag in ("weights", "kv_cache")] == [1001, 1100]


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
    check_bookkeeping(actor)
    actor.close()
    check_text(fresh)
    check_bookkeeping(fresh)
    fresh.close()
    check_weights_need_their_patch()
    check_tied()
    check_samples_follow_the_cache()
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
