"""Responses of a model folder to a file of prompts, and their scores: vLLM alone, on the ranks of a world.

`verl-megatron generate` and `verl-megatron evaluate` start it as `python -m verl_megatron.evaluation JSON` on
every rank; JSON holds the fields of `Evaluation`.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from parallel.runtime import leftovers, process
from verl_megatron.config import DataConfig, TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.observe.metrics import Sums

# Settings that are read; those of SCORES only by `evaluate`.
READ = {
    "actor": ("path",),
    "data": (
        *("validation", "validation_samples", "validation_temperature"),
        *("prompt_key", "answer_key", "max_prompt_tokens", "overlong"),
    ),
    "rollout": (
        *("tp", "top_p", "top_k", "min_tokens", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("dtype", "weight_dtype", "kv_cache_dtype", "kv_cache_mib", "max_num_seqs", "dynamic_batching"),
        *("speculative", "speculative_tokens", "speculative_max_seqs"),
        *("gpu_memory_utilization", "enforce_eager"),
    ),
    "run": ("seed",),
}
SCORES = {
    "reward": (
        *("function", "timeout_s", "workers", "failure_score"),
        *("format", "target_length", "code_timeout_s", "code_memory_mib"),
    )
}
INSTEAD = {
    "data.samples_per_prompt": "write --samples N",
    "rollout.adaptive_sampling": ("prompts are sampled at data.validation_temperature here; leave it out"),
    "rollout.temperature": "prompts are sampled at data.validation_temperature here; set that one",
}
SPEED = ("rollout/", "reward/latency_ms")  # metrics that a training run watches


@dataclass(kw_only=True)
class Evaluation:
    """What to generate, and where the samples go.

    The model is actor.path, the prompts are those of data.validation, and reward.function scores them if it
    is given. rollout.* and data.validation_temperature hold for the sampling.
    """

    settings: dict[str, Any] = field(default_factory=dict)  # by section
    out: str = ""  # JSON lines of all samples; empty: none are written
    samples: int = 1  # responses to each prompt
    scored: bool = True

    def config(self) -> TrainerConfig:
        """Return the settings as sections.

        Raises:
            ValueError: an unknown setting.
        """
        from verl_megatron.checks.overrides import structured

        data = dict(self.settings.get("data", {}))
        data["train"] = data.get("validation", "")  # is not read
        config = structured(self.settings | {"data": data}, TrainerConfig)
        config.rollout.sleep = False
        return config

    def fit_lengths(self) -> str:
        """Lower the limits of tokens that are not given to the model's positions; return a note, or "".

        Half of the positions are for the prompt. Limits that are given stay as they are.
        """
        from parallel.weights.architecture import read_architecture

        config = self.config()
        try:
            positions = read_architecture(config.actor.path).served_positions
        except ValueError:
            return ""  # `problems` says it
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
        has_prompt, has_response = (
            name in self.settings.get(section, {})
            for section, name in (("data", "max_prompt_tokens"), ("rollout", "max_tokens"))
        )
        if has_prompt and has_response or prompt + response <= positions:
            return ""
        if not has_response:
            response = positions - prompt if has_prompt else min(response, positions // 2)
        if not has_prompt:
            prompt = min(prompt, positions - response)
        if prompt < 1 or response < 1:
            return ""
        self._set("data", "max_prompt_tokens", prompt)
        self._set("rollout", "max_tokens", response)
        return (
            f"data.max_prompt_tokens={prompt} rollout.max_tokens={response}: the model has {positions:,} "
            "positions"
        )

    def _set(self, section: str, name: str, value: int) -> None:
        self.settings[section] = dict(self.settings.get(section, {})) | {name: value}

    def problems(self, *, world_size: int) -> list[str]:
        """Return all problems of the settings and the folder, or else those of the prompts' file."""
        from parallel.runtime.refusal import short_repr
        from parallel.weights.architecture import read_architecture
        from verl_megatron.checks.folders import inspect_folders
        from verl_megatron.checks.limits import check_values, value_problems
        from verl_megatron.checks.problems import problem_of
        from verl_megatron.checks.rollout import check_rollout
        from verl_megatron.checks.settings import check_functions
        from verl_megatron.checks.unused import unused_without_training
        from verl_megatron.data.formats.sources import has_weights, source_problem

        config = self.config()
        limits = DataConfig.__dataclass_fields__["samples_per_prompt"].metadata
        problems = value_problems("--samples", self.samples, limits) + check_values(config) + self._unread()
        if self.samples > 1 and not config.data.validation_temperature:
            problems.append(
                f"--samples {self.samples} of a prompt are identical at data.validation_temperature=0; "
                "set a higher one, such as 1"
            )
        if self.scored and not config.reward.function:
            problems.append("reward.function is not given; name a built-in function or FILE.py:NAME")
        elif self.scored:
            problems += check_functions(config.reward)
        problems += unused_without_training(config)
        if has_weights(config.data.validation):
            problems.append(
                f"data.validation={short_repr(config.data.validation)} has weights, and every prompt is "
                "asked once; leave them out"
            )
        elif reason := source_problem(config.data.validation):
            problems.append(f"data.validation={short_repr(config.data.validation)} {reason}")
        found = inspect_folders({"actor": (config.actor.path, "lm")}, rollout=True).problems
        problems += found or check_rollout(config, read_architecture(config.actor.path), world_size)
        return problems or problem_of(self.read)

    def _unread(self) -> list[str]:
        """Return a problem for each setting that is given and not read."""
        from parallel.runtime.refusal import short_repr

        read, problems = READ | (SCORES if self.scored else {}), []
        for section, values in self.settings.items():
            for setting in values:
                name = f"{section}.{setting}"
                if setting in read.get(section, ()):
                    continue
                is_score = setting in SCORES.get(section, ())
                reason = "is for scores, which evaluate gives" if is_score else "is for training"
                instead = INSTEAD.get(name, "leave it out")
                problems.append(f"{name}={short_repr(values[setting])} {reason}; {instead}")
        return problems

    def read(self):
        """Read tokenizer and prompts.

        Raises:
            ValueError: the tokenizer or the file cannot be used, or rows lack what the reward functions need.
        """
        from parallel.weights.architecture import read_architecture
        from verl_megatron.data.prompts import PromptDataset
        from verl_megatron.data.tokenizer import load_tokenizer
        from verl_megatron.preflight import reward_problem

        config = self.config()
        tokenizer = load_tokenizer(config.actor.path)
        vocab_size = read_architecture(config.actor.path).vocab_size
        prompts = PromptDataset(config.data.validation, tokenizer, config.data, vocab_size=vocab_size)
        if self.scored and (problem := reward_problem(config.reward.function, prompts)):
            raise ValueError(f"{problem} ({config.data.validation})")
        return tokenizer, prompts

    def run(self) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        """Generate and score; return the means and all samples on the first rank, None on others. Collective.

        Raises:
            ValueError: lists all problems of settings and files, before vLLM starts.
        """
        from parallel import device
        from parallel.rank_set import agree, world
        from verl_megatron.checks.problems import refuse
        from verl_megatron.checks.versions import check_versions
        from verl_megatron.observe.sources import Sources
        from verl_megatron.rewards.plan import is_routed
        from verl_megatron.rollout.sampler import Draw, Sampler, make_reward_pool
        from verl_megatron.rollout.sampling import Sampling
        from verl_megatron.rollout.vllm import Colocation, VLLMActor

        check_versions(vllm=True)
        device.initialize()
        ranks = world()
        agree(lambda: refuse(self.problems(world_size=ranks.size)), ranks)
        config, (tokenizer, dataset) = self.config(), self.read()
        prompts = list(dataset)[: config.data.validation_samples or None]
        each = ceil(len(prompts) * self.samples * config.rollout.tp / ranks.size)  # of a replica
        engine = VLLMActor(
            config.actor.path,
            config.rollout.tp,
            config=config.rollout,
            max_model_len=config.data.max_prompt_tokens + config.rollout.max_tokens,
            seed=config.run.seed,
            colocation=Colocation(samples=min(max(1, each), config.rollout.max_num_seqs)),
        )
        pool = make_reward_pool(config, engine) if self.scored else None
        sources = Sources([dataset.sources], always=self.scored and is_routed(config.reward.function))
        sampler = Sampler(engine, tokenizer=tokenizer, pool=pool, seed=config.run.seed, sources=sources)
        sampling = replace(
            Sampling.from_config(config.rollout), temperature=config.data.validation_temperature
        )
        draw = Draw(num_prompts=len(prompts), samples_per_prompt=self.samples, sampling=sampling)
        sums = Sums()
        try:
            batch = sampler.collect(GivenPrompts(prompts), draw, iteration=0, version=0)
            batch.rewards = sampler.score(batch, sums)
            if self.scored:
                sources.add(sums, "score", batch.rewards, batch.source_id)
        finally:
            if pool is not None:
                pool.close()
        own = self._rows(batch, prompts, tokenizer)
        self._add(own, batch, sums)
        means = sums.reduce(ranks)
        gathered = ranks.gather_object(own)
        engine.close()
        if gathered is None:
            return None
        rows = sorted((row for part in gathered for row in part), key=lambda row: row["sample"])
        return {"prompts": len(prompts), "samples": len(rows)} | means, rows

    def save(self, rows: list[dict[str, Any]]) -> None:
        """Write samples to `out`; if that is impossible by now, to a temporary file.

        Raises:
            ValueError: `out` cannot be written; it says where the samples are.
        """
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        try:
            Path(self.out).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            kept = _kept(text)
            where = f"the samples are in {kept}" if kept else "the samples are lost; run the command again"
            raise ValueError(f"--out {self.out} cannot be written ({error.strerror}); {where}") from None

    def _rows(self, batch: RolloutBatch, prompts: list[Prompt], tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Return this rank's samples as they are written."""
        rows = []
        for b, sample in enumerate(batch.sample_id.tolist()):
            prompt = prompts[sample // self.samples]
            response = tokenizer.decode(batch.generated_ids[b][batch.response_mask[b]].tolist())
            row = {"sample": sample, "prompt": prompt.text, "response": response, "answer": prompt.answer}
            rows.append(row | ({"score": batch.required("rewards")[b].item()} if self.scored else {}))
        return rows

    def _add(self, rows: list[dict[str, Any]], batch: RolloutBatch, sums: Sums) -> None:
        """Add this rank's samples to the sums that are printed as means."""
        lengths = batch.response_mask.sum(1)
        sums.add("response_tokens", lengths.sum(), len(lengths))
        sums.add("cut", batch.required("is_cut").sum(), len(lengths))
        if self.scored:
            sums.add("score", sum(row["score"] for row in rows), len(rows))


def _kept(text: str) -> str:
    """Write samples to a temporary file and return its name, or "" if there is no room either."""
    place = ""
    try:
        number, place = tempfile.mkstemp(".jsonl", "samples_", leftovers.lasting_folder())
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        if place:
            os.unlink(place)
        return ""
    return place


def described(means: dict[str, float]) -> str:
    """Return the result as a line: the score first, without figures of speed."""
    firsts = {name: means[name] for name in ("prompts", "samples", "score") if name in means}
    others = {name: means[name] for name in sorted(means) if not name.startswith(SPEED)}
    return ", ".join(f"{name} {value:.6g}" for name, value in (firsts | others).items())


def preload(arguments: Sequence[str]) -> None:
    """Import what ranks import, before they start."""
    import verl_megatron.rollout.vllm
    import verl_megatron.run  # noqa: F401
    from verl_megatron.rollout.vllm_process import import_vllm

    import_vllm()


def main() -> None:
    """Run the evaluation that the argument describes; user errors are printed once."""
    from parallel.runtime.refusal import RefusalError, complain, complain_of_output

    process.watch_stdout(complain_of_output)
    evaluation = Evaluation(**json.loads(sys.argv[1]))
    try:
        found = evaluation.run()
        if found is not None:
            means, rows = found
            try:
                if evaluation.out:
                    evaluation.save(rows)
            finally:
                print(described(means), flush=True)
    except ValueError as error:
        complain(str(error), agreed=isinstance(error, RefusalError))
    process.end(0)


if __name__ == "__main__":
    process.begin()
    gc.enable()
    main()
