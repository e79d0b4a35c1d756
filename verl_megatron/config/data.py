"""Settings of prompts, demonstrations and rewards."""

from dataclasses import dataclass

from verl_megatron.config.section import COUNT, MISSING, POSITIVE, SHARE, Section, as_json, joined, setting

_FILES = ".jsonl, .parquet, .arrow, .csv or .tsv file, a folder of shards, or a list of them"
_WEIGHTED = f"{_FILES}, with weights or without: [a.jsonl:0.7,b.parquet:0.3]"


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts: rows with at least a prompt and the ground truth for its reward."""

    train: str = setting(MISSING, _WEIGHTED, many=joined)
    validation: str = setting("", f"{_FILES}; empty: no validation", many=joined)
    prompt_key: str = setting("prompt", "a string, or a list of chat messages; dots go into objects")
    answer_key: str = setting("answer", "ground truth passed to the reward; dots go into objects")
    max_prompt_tokens: int = setting(1024, "maximum prompt length, chat template included", within=POSITIVE)
    overlong: str = setting(
        "error",
        'prompts over max_prompt_tokens: "error" or "drop" (the count is reported)',
        choices=("error", "drop"),
    )
    # Every rank has a table of all samples.
    prompts_per_iteration: int = setting(256, "prompts per iteration", within="[1, 1000000]")
    samples_per_prompt: int = setting(1, "responses per prompt; GRPO needs at least 2", within="[1, 1000000]")
    shuffle: bool = setting(True, "reshuffle the prompts every epoch")
    curriculum: str = setting(
        "",
        "draw those sources of prompts more often whose samples differ in score; files: the paths of "
        "data.train, else a column such as data_source; empty: off",
    )
    validation_samples: int = setting(0, "number of validation prompts; 0: the whole file", within=COUNT)
    validation_temperature: float = setting(
        1.0, "sampling temperature of validation; 0: greedy", within="[0, 2]"
    )  # vLLM's range


@dataclass(kw_only=True)
class SupervisedDataConfig(Section):
    """What all data files of supervised training have in common."""

    train: str = setting(MISSING, _WEIGHTED, many=joined)
    validation: str = setting("", f"{_FILES}; empty: no validation", many=joined)
    max_tokens: int = setting(
        2048, "maximum length of a prompt together with a response", within="[2, 1000000000]"
    )
    overlong: str = setting(
        "error",
        'rows over max_tokens: "error" or "drop" (the count is reported)',
        choices=("error", "drop"),
    )
    shuffle: bool = setting(True, "reshuffle every epoch")


@dataclass(kw_only=True)
class SFTDataConfig(SupervisedDataConfig):
    """Demonstrations: rows with a prompt and the response to imitate."""

    prompt_key: str = setting("prompt", "a string, or a list of chat messages")
    response_key: str = setting("response", "a string, or one assistant turn")
    imitated_turns: str = setting(
        "all", "which assistant turns of chat messages have a loss", choices=("all", "last")
    )
    samples_per_step: int = setting(256, "demonstrations per optimizer step", within="[1, 1000000]")


@dataclass(kw_only=True)
class PairDataConfig(SupervisedDataConfig):
    """Preference pairs: rows with a prompt, a chosen and a rejected response."""

    prompt_key: str = setting(
        "prompt", "a string, or a list of chat messages; not needed where both responses repeat it"
    )
    chosen_key: str = setting(
        "chosen", "the better response: a string, or messages that end in an assistant turn"
    )
    rejected_key: str = setting("rejected", "the worse response, in the same form")
    pairs_per_step: int = setting(64, "pairs per optimizer step", within="[1, 500000]")


@dataclass(kw_only=True)
class RewardConfig(Section):
    """Source of the rewards: a Python function, a reward model, or both (their sum)."""

    function: str = setting(
        "match",
        "built-in name, path.py:function (must import within 90 s) or http://HOST:PORT/PATH; "
        "[math:0.8,format:0.2] adds several, {DATA_SOURCE:math,default:exact} chooses by the row's "
        "data_source; empty: none",
        many=as_json,
    )
    timeout_s: float = setting(10.0, "time limit of all calls for a sample, seconds", within="(0, 10000000]")
    workers: int = setting(
        1, "reward worker processes, or requests of a server, per vLLM replica", within="[1, 1024]"
    )
    format: str = setting(
        r"<think>((?!</?think>).)*</think>\s*<answer>((?!</?answer>).)*</answer>",
        "format: regular expression of a whole response",
    )
    target_length: int = setting(
        0, "length: characters up to which it is 1; 0: the row's column target_length", within=COUNT
    )
    code_timeout_s: float = setting(5.0, "code: time limit of one program, seconds", within="(0, 100000]")
    code_memory_mib: int = setting(
        1024, "code: memory of all processes of a program, MiB", within="[64, 16777216]"
    )
    overlong_tokens: int = setting(
        0, "last tokens before rollout.max_tokens in which the score falls; 0: off", within=COUNT
    )
    overlong_penalty: float = setting(
        1.0, "largest deduction from the score, at rollout.max_tokens", within=SHARE
    )
    missing_eos_penalty: float = setting(
        0.0, "deduction from the score of a response without an end-of-sequence token", within=SHARE
    )
    failure_score: float = setting(
        0.0, "score of a call that raised, timed out or returned no finite number", within="[-1e30, 1e30]"
    )  # float32
    path: str = setting("", "sequence-classification folder, hub name or URL; empty: no reward model")
    layout: str = setting("tp1", "layout of the reward model, as actor.layout")
    devices: str = setting(
        "",
        "ranks of the reward model: some of those that train, or after them for ranks that only score; "
        "empty: all that train",
    )
    dtype: str = setting("auto", "dtype of the reward model, as reference.dtype", choices=("auto", "fp8"))

    @property
    def is_given(self) -> bool:
        """Whether anything gives a score."""
        return bool(self.function or self.path)
