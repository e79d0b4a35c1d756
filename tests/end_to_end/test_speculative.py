"""A run with drafts: its log-probs are the trainer's, and metrics tell of drafts."""

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import run
from verl_megatron.observe.tracking import read_metrics

JOB = [
    *("algorithm.name=grpo", "data.samples_per_prompt=4", "data.prompts_per_iteration=8", "data.validation="),
    *("run.iterations=2", "run.export=false", "actor.layout=tp1", "rollout.tp=1"),
    # a small random model repeats itself at low temperatures
    *("rollout.temperature=0.1", "rollout.max_tokens=32", "rollout.ignore_eos=true"),
]
DRAFTS = ["rollout.speculative=ngram", "rollout.speculative_tokens=3", "rollout.speculative_max_seqs=64"]


def test_log_probs_with_drafts_are_the_trainers(toy, tmp_path):
    ended = run(1, TRAIN, *settings_of(toy, tmp_path / "run", *JOB, *DRAFTS), folder=tmp_path)
    assert not ended.code, ended.text
    assert "drafts of 3 tokens up to 64 samples" in ended.text
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/draft_fraction"] > 0.1
        assert 0 < row["rollout/acceptance_rate"] < 1 < row["rollout/acceptance_length"] < 4
        assert row["rollout/logprob_gap_max"] < 1e-3  # sums in float32, divided by the temperature
