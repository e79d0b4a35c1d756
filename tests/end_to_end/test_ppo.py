"""Whole runs of the toy job from the command line, as a user starts them."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.end_to_end.conftest import TRAIN, adaptive_settings, settings_of
from tests.end_to_end.launch import run
from tests.end_to_end.measured import learned
from verl_megatron.lifecycle.record import read_starts
from verl_megatron.observe.tracking import read_metrics


def test_swap_and_offload_learn_the_same(whole_run, toy, tmp_path):
    """Where weights and optimizer lie between the phases changes no bit of what is learned."""
    settings = adaptive_settings(toy, tmp_path / "run")
    run(
        4,
        TRAIN,
        *settings,
        "reshard.mode=swap",
        "reshard.offload=all",
        "reshard.verify=all",
        folder=tmp_path,
    )
    expected, found = learned(whole_run.output_dir), learned(tmp_path / "run")
    kept = [row.pop("reshard/bytes", 0) for row in expected]
    moved = [row.pop("reshard/bytes", 0) for row in found]
    assert found == expected
    assert 0 < moved[-1] < kept[-1], "what lies right already was moved, too: both copies are there"
    for role in ("actor", "critic"):
        whole, again = (
            load_file(folder / role / "model.safetensors")
            for folder in (whole_run.output_dir, tmp_path / "run")
        )
        assert all(torch.equal(whole[name], again[name]) for name in whole), role


def test_whole_run_leaves_what_it_promises(whole_run, toy):
    folder = whole_run.output_dir
    assert re.search(
        r"^vLLM: KV cache of 2,176 tokens a replica, 8 of a replica's 8 samples at once$",
        whole_run.ended.stdout,
        re.MULTILINE,
    ), whole_run.ended.text
    assert re.fullmatch(r"validation accuracy \d\.\d\d -> \d\.\d\d", whole_run.ended.last_line), (
        whole_run.ended.text
    )
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 3, 4]
    with (folder / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2", "3", "4"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    report = (folder / "report.png").read_bytes()
    assert report.startswith(b"\x89PNG\r\n\x1a\n") and len(report) > 10_000
    (start,) = read_starts(folder)
    assert start["exit"] == {"reason": "done", "text": "all 4 iterations", "rank": 0, "step": 4}
    assert start["hosts"][0]["ranks"] == [0, 1, 2, 3] and start["command"].count("verl_megatron") == 1
    assert (folder / "config.yaml").read_text().startswith("# Settings of start 1,")
    log = (folder / "run.log").read_text()
    assert " rank 0: step 4/4: " in log and "vLLM: KV cache of" in log
    assert all(line in log for line in whole_run.ended.stdout.splitlines() if line.startswith("step "))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "4 of 4" in page and "while the run was at work" not in page
    check_samples(folder / "samples")
    for step in (0, 4):
        rows = [
            json.loads(line) for line in (folder / f"validation/step_{step}.jsonl").read_text().splitlines()
        ]
        assert [row["sample"] for row in rows] == list(range(8))
        assert all(row["prompt"].startswith("sort ") and row["response"] and row["answer"] for row in rows)
    before, after = (
        load_file(folder / "actor/model.safetensors"),
        AutoModelForCausalLM.from_pretrained(toy / "model").state_dict(),
    )
    assert before.keys() == after.keys() and not any(
        torch.equal(before[name], after[name]) for name in before
    )


def check_samples(folder: Path) -> None:
    """Samples of the first and of the last iteration, with log-probs on which two engines agree."""
    assert sorted(path.name for path in folder.iterdir()) == ["step_1.jsonl", "step_4.jsonl"]
    for line in (folder / "step_4.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row["prompt"].startswith("sort ") and row["group"] < 2 and len(row["tokens"]) <= 8
        if "\ufffd" not in row["response"]:  # bytes that are no text are decoded in runs
            assert "".join(row["tokens"]).replace("</s>", "").strip() == row["response"].strip()
        pairs = zip(row["logprobs"], row["rollout_logprobs"], strict=True)
        assert row["logprobs"] and all(abs(ours - theirs) < 1e-4 for ours, theirs in pairs), row


def test_metrics_have_their_keys(whole_run):
    keys = {
        "rollout/throughput_tokens_per_sec",
        "reward/latency_ms",
        "train/step_time_ms",
        "memory/actor_gpu_mem_mb",
        "reshard/ms",
        "reshard/bytes",
        "critic/update_ms",
    }
    keys |= {
        "reward/mean",
        "reward/length",
        "kl/ref",
        "kl/coef",
        "policy/entropy",
        "policy/loss",
        "policy/grad_norm",
        "critic/loss",
        "critic/grad_norm",
    }
    for row in read_metrics(whole_run.output_dir)[1:]:
        assert not keys - row.keys(), keys - row.keys()
        assert all(value is not None for value in row.values()), row
        assert row["rollout/logprob_gap_max"] < 1e-4  # two engines, float32


def test_disjoint_roles_and_a_reward_model(toy, tmp_path):
    """Actor on ranks 0-1, critic on 2-3, a reward model on rank 1; Hugging Face gives the same scores."""
    torch.manual_seed(7)
    config = LlamaConfig.from_pretrained(toy / "model", num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "reward_model")
    places = [
        "actor.layout=tp2",
        "actor.devices=0-1",
        "critic.layout=pp2",
        "critic.devices=cuda:2-3",
        "reward.devices=1",
    ]
    more = [
        "run.iterations=1",
        "data.validation_temperature=0",
        "algorithm.num_mini_batches=1",
        "algorithm.kl_coef=0",
        f"reward.path={tmp_path}/reward_model",
    ]
    run(4, TRAIN, *settings_of(toy, tmp_path / "run", *places, *more, reward="tenth"), folder=tmp_path)

    row = read_metrics(tmp_path / "run")[1]
    assert abs(row["policy/ratio_max"] - 1) < 1e-6  # the first mini-batch is on policy
    assert row["critic/grad_norm"] > 0 and row["policy/grad_norm"] > 0 and "kl/ref" not in row
    tokenizer, actor = (
        AutoTokenizer.from_pretrained(toy / "model"),
        AutoModelForCausalLM.from_pretrained(toy / "model"),
    )
    for line in (tmp_path / "run/validation/step_0.jsonl").read_text().splitlines():
        found = json.loads(line)
        prompt = tokenizer(found["prompt"], return_tensors="pt").input_ids
        ids = actor.generate(prompt, do_sample=False, max_new_tokens=8)
        assert found["response"] == tokenizer.decode(ids[0, prompt.size(1) :], skip_special_tokens=True)
        with torch.no_grad():
            expected = model(ids).logits.item() + len(found["response"]) / 10
        assert abs(found["score"] - expected) < 1e-4, (found, expected)


def test_critic_on_the_actors_trunk(toy, tmp_path):
    """One model is trained and two are exported; the old values are those of the update's first step."""
    more = [
        *("run.iterations=2", "actor.layout=tp2", "rollout.tp=1", "algorithm.num_mini_batches=2"),
        *("critic.share_trunk=true", "critic.layout=tp2", "critic.lr=1e-2"),
        *("reshard.mode=share", "reshard.offload=all", "reshard.verify=all"),
    ]
    ended = run(2, TRAIN, *settings_of(toy, tmp_path / "run", *more), folder=tmp_path)
    for row in read_metrics(tmp_path / "run")[1:]:
        assert row["critic/loss"] > 0 and row["kl/ref"] is not None and row["policy/grad_norm"] > 0
        assert "critic/grad_norm" not in row and "time/values_s" not in row
    assert ended.stdout.count("exported ") == 2, ended.text
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "run/actor").state_dict()
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "run/critic").state_dict()
    assert critic["score.weight"].abs().max() > 1e-3 and critic.keys() - actor.keys() == {
        "score.weight",
        "score.bias",
    }
    assert all(torch.equal(actor[name], critic[name]) for name in actor.keys() & critic.keys())


def test_distillation_without_a_reward(toy, tmp_path):
    """A teacher of other weights is all that teaches, and no score is reported."""
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig.from_pretrained(toy / "model")).save_pretrained(tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(toy / "model" / name, tmp_path / "teacher")
    more = [
        *("algorithm.name=distillation", "algorithm.kl_coef=0", "algorithm.num_mini_batches=1"),
        *(f"teacher.path={tmp_path}/teacher", "reward.function=", "data.validation="),
        *("run.iterations=1", "run.export=false", "actor.layout=tp2", "rollout.tp=2"),
    ]
    run(2, TRAIN, *settings_of(toy, tmp_path / "run", *more), folder=tmp_path)
    (row,) = read_metrics(tmp_path / "run")
    assert row["kl/teacher"] > 0 and row["policy/grad_norm"] > 0
    assert not any(key.startswith("reward/") for key in row)
    for line in (tmp_path / "run/samples/step_1.jsonl").read_text(encoding="utf-8").splitlines():
        assert "score" not in json.loads(line)


def test_grpo_with_a_reward_that_fails(toy, tmp_path):
    """GRPO for two iterations; a reward that raises, hangs or gives NaN costs only its samples' scores."""
    questions = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()[:4]]
    lines = [
        json.dumps(question | {"kind": kind})
        for question, kind in zip(questions, ("raises", "hangs", "nan", "fine"))
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    algorithm = [
        "algorithm.name=grpo",
        "data.samples_per_prompt=4",
        "algorithm.kl_in=loss",
        "algorithm.kl_estimator=k3",
        "algorithm.kl_coef=0.05",
        "algorithm.num_mini_batches=2",
    ]
    job = [
        f"data.train={tmp_path}/train.jsonl",
        "data.validation=",
        "data.prompts_per_iteration=4",
        "run.iterations=2",
        "run.export=false",
    ]
    places = [
        "actor.layout=tp2",
        "critic.layout=tp1",
        "rollout.tp=1",
        "reward.timeout_s=3",
        "reward.failure_score=-1",
    ]
    memory = ["reshard.mode=share", "reshard.offload=optimizer", "reshard.verify=all"]
    ended = run(
        2,
        TRAIN,
        *settings_of(toy, tmp_path / "run", *algorithm, *job, *places, *memory, reward="bad"),
        folder=tmp_path,
    )

    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/failed"] == 12 / 16 and row["reward/mean"] == (4 - 12) / 16
        assert "critic/loss" not in row and row["policy/steps"] == 2
        assert row["kl/loss"] >= 0 and row["policy/entropy"] > 0
    for text in ("this reward is broken", "no answer within 3", "score is nan"):
        assert text in ended.stdout, ended.text
    assert ended.stdout.count("prompt: ") <= 2 * 3  # each kind once a replica


def test_rewards_by_source(toy, tmp_path):
    """Two sources with functions of their own: each has its mean, in training and in validation."""
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (toy / f"{name}.jsonl").read_text().splitlines()[:4]]
        lines = [json.dumps(row | {"data_source": "ab"[n % 2]}) for n, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    file = f"{toy}/rewards.py"
    job = [
        *(f"data.train={tmp_path}/train.jsonl", f"data.validation={tmp_path}/val.jsonl"),
        *("data.prompts_per_iteration=4", "data.samples_per_prompt=2", "rollout.max_tokens=6"),
        *("algorithm.name=grpo", "algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2"),
        *("run.iterations=1", "run.export=false", "run.validate_interval=1"),
    ]
    given = settings_of(toy, tmp_path / "run", *job)
    given[-len(job) - 1] = f"reward.function={{a:[{file}:letters:0.5,{file}:tenth],default:{file}:tenth:2}}"
    run(2, TRAIN, *given, "actor.layout=dp2", "rollout.tp=1", folder=tmp_path)
    rows = read_metrics(tmp_path / "run")
    row = {name: value for one in rows for name, value in one.items()}
    means = [row["reward/source/a"], row["reward/source/b"]]
    assert min(means) - 1e-6 <= row["reward/mean"] <= max(means) + 1e-6
    assert row["reward/letters"] >= 0 and row["reward/tenth"] > 0 and row["reward/letters/length"] > 0
    assert row["reward/source/b"] > 0 and row["validation/source/a"] > 0 and "reward/length" not in row
    validated = (row["validation/source/a"] + row["validation/source/b"]) / 2
    assert row["validation/accuracy"] == pytest.approx(validated)


def test_critic_warmup_and_early_stop(toy, tmp_path):
    """The actor waits for the critic, then skips its remaining updates as soon as it has moved.

    The KL of its first step is 0, that of the second is not. Each phase is profiled the second
    time it comes.
    """
    algorithm = [
        "algorithm.critic_warmup=1",
        "algorithm.epochs=2",
        "algorithm.num_mini_batches=2",
        "algorithm.target_kl=1e-7",
        "algorithm.correction=truncate",
    ]
    job = [
        "actor.layout=tp2",
        "critic.layout=pp2",
        "rollout.tp=2",
        "data.validation=",
        "run.iterations=3",
        "run.export=false",
        "run.track_metrics=[jsonl,profile]",
    ]
    ended = run(2, TRAIN, *settings_of(toy, tmp_path / "run", *algorithm, *job), folder=tmp_path)
    assert "USDT" not in ended.stderr
    check_profiles(tmp_path / "run/profile")

    warmup, learning, _ = read_metrics(tmp_path / "run")
    assert warmup["critic/grad_norm"] > 0 and not any(key.startswith("policy/") for key in warmup)
    assert learning["policy/steps"] == 2  # of four
    assert 0 < learning["policy/importance_weight"] <= 2


def check_profiles(folder: Path) -> None:
    """Reports and traces of the phases, each of the second time it came."""
    profiles = {path.stem.removesuffix("_rank0"): path.read_text() for path in folder.glob("*_rank0.txt")}
    assert profiles.keys() >= {"rollout", "log_probs", "values", "critic_update", "actor_update"}
    for name in ("rollout", "log_probs", "actor_update"):
        assert profiles[name].startswith(f"{name} on rank 0") and "aten::" in profiles[name], profiles[name]
    traces = {name: (folder / f"{name}_rank0.json").read_text() for name in ("log_probs", "actor_update")}
    assert "Backward" in traces["actor_update"] and "Backward" not in traces["log_probs"]
