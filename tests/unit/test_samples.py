"""Records of samples: what is written of them, the texts of tokens, and what marks a response as cut off."""

import json

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from tests.characters import characters
from tests.one_rank import ONE_RANK
from tests.scripted_engine import ScriptedEngine
from verl_megatron.algorithms.diagnostics import batch_sums, zero_variance_fraction
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.data.tokenizer import Tokenizer, load_tokenizer
from verl_megatron.examples.toy import make_rows, write_tokenizer
from verl_megatron.observe.report.samples import read_groups
from verl_megatron.observe.samples import record_samples, records, remove_later, sample_rows, write_rows
from verl_megatron.rollout.sampler import Draw, Sampler
from verl_megatron.rollout.sampling import Sampling

# ---- texts of tokens --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, [f"{row['prompt']} {row['response']}" for row in make_rows(1)["sft"][:2000]])
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"</s>": len(alphabet)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>"))


@pytest.mark.parametrize("text", ["fig apple", "naïve 🙂 日本 x", "🙂🙂", "line\n  break"])
def test_texts_of_tokens_join_to_the_response(sentencepiece, byte_level, text):
    ids = [*byte_level.hf.encode(text), byte_level.eos_token_id]
    texts = byte_level.token_texts(ids)
    assert len(texts) == len(ids) and "".join(texts) == f"{text}</s>"
    ids = sentencepiece.encode_response(text)
    texts = sentencepiece.token_texts(ids)
    assert len(texts) == len(ids) and "".join(texts).strip() == f"{text}</s>"
    assert all("\ufffd" not in part for part in texts)


def test_a_character_of_several_tokens_belongs_to_the_first_and_half_a_one_is_marked(byte_level):
    ids = byte_level.hf.encode("a🙂b")
    assert byte_level.token_texts(ids) == ["a", "🙂", "", "", "", "b"]
    assert byte_level.token_texts(ids[:3]) == ["a", "\ufffd", "\ufffd"]


# ---- rows -------------------------------------------------------------------------------------------------


def recorded_batch() -> RolloutBatch:
    """Two prompts of two samples; the first response has a tool's answer `+` in it, the last one is cut."""
    prompts = [list(map(ord, prompt)) for prompt in ("ab", "ab", "cde", "cde")]
    responses = [[*map(ord, response), 2] for response in ("x+y", "xy", "z")] + [[*map(ord, "zz")]]
    logprobs = [[-1.0, -1.25, -1.5, -1.75][: len(response)] for response in responses]
    batch = RolloutBatch.from_lists([0, 1, 2, 3], prompts, responses, logprobs)
    batch.response_mask[0, 3] = False
    batch.logprobs = batch.rollout_logprobs + 0.5 * batch.response_mask
    batch.group_id, batch.rewards = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 0.5, 0.5])
    batch.is_cut = torch.tensor([False, False, False, True])
    return batch


def test_a_row_has_the_texts_and_the_log_probs_of_each_token():
    first, second = sample_rows(recorded_batch(), characters(), prompts=1)
    assert first == {
        "sample": 0,
        "group": 0,
        "prompt": "ab",
        "response": "x+y",
        "score": 1.0,
        "is_cut": False,
        "tokens": ["x", "+", "y", "</s>"],
        "logprobs": [-0.5, None, -1.0, -1.25],
        "rollout_logprobs": [-1.0, None, -1.5, -1.75],
    }
    assert (second["sample"], second["response"], second["logprobs"]) == (1, "xy", [-0.5, -0.75, -1.0])


def test_a_record_is_read_by_the_report(tmp_path):
    path = tmp_path / "samples" / "step_7.jsonl"
    record_samples(recorded_batch(), characters(), ONE_RANK, prompts=2, path=path)
    notes = []
    groups = read_groups(tmp_path, last_step=7, notes=notes)
    assert notes == [] and [group.prompt for group in groups] == ["ab", "cde"]
    assert [sample.is_cut for sample in groups[1].samples] == [False, True]
    assert groups[0].samples[0].gaps == [0.5, None, 0.5, 0.5]


def test_rows_are_ordered_and_lone_surrogates_can_be_written(tmp_path):
    path = tmp_path / "new" / "step_1.jsonl"
    write_rows(path, [{"sample": 1}, {"sample": 0, "text": "\ud800 é"}])
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [
        {"sample": 0, "text": "\ud800 é"},
        {"sample": 1},
    ]


def test_a_resumed_run_removes_the_records_that_it_repeats_and_nothing_else(tmp_path):
    for name in ("step_2", "step_10", "step_11", "step_x", "notes"):
        (tmp_path / f"{name}.jsonl").touch()
    remove_later(tmp_path, 10)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["notes", "step_2", "step_x"]
    assert [step for step, _ in records(tmp_path)] == [2]
    remove_later(tmp_path / "nothing", 1)


# ---- metrics ----------------------------------------------------------------------------------------------


class Limited(ScriptedEngine):
    """An engine that says which responses ended at their limit."""

    def _end(self, sample_id, reason):
        request, _, tokens = self.running[sample_id]
        is_cut = len(tokens) == request.sampling.max_tokens
        return super()._end(sample_id, "length" if is_cut else reason)


def test_responses_that_end_at_their_limit_are_counted():
    engine = Limited(lambda request: [65] * (3 + request.sample_id))
    sampler = Sampler(engine, tokenizer=characters(), pool=None, seed=1)
    prompts = [Prompt(prompt_token_ids=[70 + number], text="p", answer="") for number in range(4)]
    draw = Draw(num_prompts=4, samples_per_prompt=1, sampling=Sampling(max_tokens=5))
    batch = sampler.collect(GivenPrompts(prompts), draw, iteration=1, version=0)
    assert batch.is_cut.tolist() == [False, False, True, True]
    metrics = batch_sums(batch, kl_estimator="k1").reduce(ONE_RANK)
    assert metrics["rollout/cut_fraction"] == 0.5


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_prompts_without_variance_are_found_however_samples_are_spread(groups):
    """Two ranks: the maximum over both is that of one rank with all samples."""
    batch = recorded_batch()
    batch.group_id = torch.tensor(groups)
    whole = zero_variance_fraction(batch, num_groups=2, all_max=lambda x: x)
    assert whole == {(0, 0, 1, 1): 0.5, (0, 1, 0, 1): 0.0}[tuple(groups)]
    bounds, parts = [], [batch.select(torch.tensor(part)) for part in ([0, 3], [1, 2])]
    for part in parts:
        zero_variance_fraction(part, num_groups=2, all_max=lambda x: (bounds.append(x.clone()), x)[1])
    together = torch.maximum(*bounds)
    assert zero_variance_fraction(parts[0], num_groups=2, all_max=lambda x: together) == whole
