"""`verl-megatron reward-server` in front of a tiny reward model whose tokenizer is not the actor's."""

import os
import signal
import subprocess
import sys

import torch
from transformers import AutoModelForSequenceClassification

from tests.characters import characters
from tests.tiny import SERVED, write_hf
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rewards.worker import WRONG_TYPE

TEXTS = [("2 + 2?", "four"), ("2 + 2?", "five"), ("name a fig", "a fig " * 9)]
CHATS = [([{"role": "user", "content": prompt}], response) for prompt, response in TEXTS]


def test_scores_are_those_of_the_model_on_the_texts(tmp_path):
    """Compared with transformers; prompts are texts, chats, and one that is longer than the model."""
    write_hf(tmp_path, "llama", "ForSequenceClassification", **SERVED["llama"])
    tokenizer = characters()
    tokenizer.hf.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "verl_megatron", "reward-server", str(tmp_path), "--port", "0"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    server = subprocess.Popen(command, cwd=ROOT, env=environment_of_ranks(), text=True, **pipes)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        assert "reward.function=http" in said, server.communicate()[1]
        with RewardPool(said.split("reward.function=")[1].strip(), workers=2, timeout_s=60) as pool:
            for number, ((prompt, response), (messages, _)) in enumerate(zip(TEXTS, CHATS)):
                pool.submit(number, prompt, response, None)
                pool.submit(10 + number, "the actor's own text", response, None, {}, messages)
            pool.submit(20, "x" * 300, "y", None)
            rewards = pool.results()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
    assert rewards[20].failure == WRONG_TYPE and "more than the model's 256" in str(pool.first_failure)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    for number, ((prompt, response), (messages, _)) in enumerate(zip(TEXTS, CHATS)):
        chat = tokenizer.encode_chat(*tokenizer.demonstration_text(messages, response))
        text = tokenizer.encode_prompt(prompt), tokenizer.encode_response(response)
        for sample, (ids, response_ids) in ((number, text), (10 + number, chat)):
            with torch.no_grad():
                expected = model(torch.tensor([ids + response_ids])).logits.item()
            assert abs(rewards[sample].score - expected) < 1e-4  # float32, another order of sums
