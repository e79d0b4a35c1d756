"""On two ranks: each supervised task stopped by SIGTERM and resumed, against an undisturbed run."""

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from verl_megatron.config import DPOConfig, RewardModelConfig, SFTConfig
from verl_megatron.data.formats.json_lines import read_rows
from verl_megatron.model_specs import models_of
from verl_megatron.observe.tracking import read_metrics
from verl_megatron.supervised.trainer import SupervisedTrainer, spread

LAYOUTS = {SFTConfig: "dp2", DPOConfig: "tp2", RewardModelConfig: "pp2"}
STEPS = 4


class Stopped(SupervisedTrainer):
    """Its second rank gets SIGTERM during the second step."""

    def _step(self, items):
        if self.state.step == 1 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            assert self.preemption._asked.wait(timeout=30)  # until the listening thread has noticed
        return super()._step(items)


def config_of(schema: type, toy: Path, output_dir: Path, **run):
    config = schema()
    paired = schema is not SFTConfig
    config.data.train = str(toy / ("pairs.jsonl" if paired else "sft.jsonl"))
    config.data.validation = str(toy / ("few.jsonl" if paired else "few_sft.jsonl"))
    if paired:
        config.data.pairs_per_step = 6
    else:
        config.data.samples_per_step = 6
    config.data.max_tokens = 64
    model = models_of(config)[0].model
    model.path, model.layout, model.lr = str(toy / "model"), LAYOUTS[schema], 1e-3
    config.engine.lr_decay_style, config.engine.lr_warmup_steps = "cosine", 2
    for name, value in dict(
        output_dir=str(output_dir), iterations=STEPS, track_metrics=["jsonl"], **run
    ).items():
        setattr(config.run, name, value)
    return config


def learnt(folder: Path) -> list[dict]:
    """What each step has learnt, without times."""
    rows = read_metrics(folder)
    for row in rows:
        for name in [name for name in row if name.startswith("time/")]:
            del row[name]
    return rows


def check_resume(schema: type, toy: Path, out: Path) -> SupervisedTrainer:
    """The metrics of all steps are those of an undisturbed run, to the last bit."""
    whole = SupervisedTrainer(config_of(schema, toy, out / "whole", save_interval=3, async_save=True))
    whole.train()
    stopped = Stopped(config_of(schema, toy, out / "stopped", export=False))
    stopped.train()
    assert stopped.state.step == 2 and stopped.state.has_checkpoint
    for resume in ("newest", "verify"):
        again = SupervisedTrainer(config_of(schema, toy, out / "stopped", export=False, resume=resume))
        metrics = again.train()
    assert again.state.step == STEPS, metrics
    rows = learnt(out / "whole")
    assert learnt(out / "stopped") == rows and [row["step"] for row in rows] == [*range(STEPS + 1)]
    assert "validation/loss" in rows[0] and "validation/loss" in rows[-1]
    return whole


def check_scores(trainer: SupervisedTrainer, exported: Path) -> None:
    """transformers gives the exported reward model's scores."""
    batch, table = spread(trainer.inputs.validation, 2, trainer.world)
    values_BT = trainer.trained.infer(batch, table, ("values",), last_token=True)["values"]
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert model.config.num_labels == 1 and model.score.weight.shape[0] == 1
    with torch.no_grad():
        for ids, mask, values in zip(batch.generated_ids, batch.attention_mask, values_BT):
            expected = model(ids[mask][None]).logits.item()
            assert abs(values.sum().item() - expected) < 1e-5, (values.sum().item(), expected)


def main(toy: Path, out: Path) -> None:
    if int(os.environ["RANK"]) == 0:
        rows = (toy / "val_pairs.jsonl").read_text().splitlines()[:8]
        (toy / "few.jsonl").write_text("\n".join(rows) + "\n")
        rows = (toy / "sft.jsonl").read_text().splitlines()[:8]
        (toy / "few_sft.jsonl").write_text("\n".join(rows) + "\n")
    for schema in LAYOUTS:
        trainer = check_resume(schema, toy, out / schema.__name__)
        if schema is RewardModelConfig:
            check_scores(trainer, out / schema.__name__ / "whole" / "reward")
        trainer.say(f"{schema.__name__} passed")
    assert len(read_rows(toy / "few.jsonl")) == 8


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
