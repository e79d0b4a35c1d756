"""Supervised fine-tuning of the toy model from the command line, under two layouts."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.launch import run
from verl_megatron.observe.tracking import read_metrics


def train(toy, folder, layout: str) -> list[dict]:
    settings = [
        "--config-path",
        "../recipes",
        "--config-name",
        "sft_toy_cpu",
        f"run.output_dir={folder}/run",
        "run.iterations=12",
        "engine.lr_warmup_steps=2",
    ]
    settings += [
        f"data.train={toy}/sft.jsonl",
        f"data.validation={folder}/val.jsonl",
        "data.samples_per_step=64",
        f"actor.path={toy}/model",
        f"actor.layout={layout}",
    ]
    (folder / "val.jsonl").write_text(
        "".join(line + "\n" for line in (toy / "sft.jsonl").read_text().splitlines()[-16:])
    )
    ended = run(2, "verl_megatron.sft", *settings, folder=folder)
    rows = read_metrics(folder / "run")
    before, after = (rows[at]["validation/loss"] for at in (0, -1))
    last = f"last loss {rows[-1]['sft/loss']:.4f}, validation loss {before:.4f} -> {after:.4f}"
    assert ended.last_line == last and after < before
    assert f"64 samples a step; actor {layout}:" in ended.stdout
    return rows[1:]


def test_sft_lowers_the_loss_under_any_layout(toy, tmp_path):
    runs, losses = {}, {}
    for layout in ("dp2", "tp2"):
        (tmp_path / layout).mkdir()
        runs[layout] = train(toy, tmp_path / layout, layout)
        losses[layout] = [row["sft/loss"] for row in runs[layout]]
    assert len(losses["dp2"]) == 12
    assert losses["dp2"][-1] < 0.6 * losses["dp2"][0], losses
    for one, other in zip(losses["dp2"], losses["tp2"], strict=True):
        assert abs(one - other) < 1e-4, losses  # float32 in another order, through twelve updates
    held_out = check_export(tmp_path / "tp2" / "run" / "actor", toy)
    assert abs(held_out - runs["tp2"][-1]["validation/loss"]) < 1e-4


def check_export(folder, toy) -> float:
    """The exported folder's loss on the held-out rows, computed by transformers alone."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder).float(),
    )
    total, count = 0.0, 0
    for line in (toy / "sft.jsonl").read_text().splitlines()[-16:]:
        row = json.loads(line)
        prompt = tokenizer(row["prompt"]).input_ids
        response = [*tokenizer(row["response"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        total -= logprobs_TV[places, torch.tensor(response)].sum().item()
        count += len(response)
    return total / count
