"""While vLLM goes to sleep and wakes up, PyTorch keeps its cached memory."""

import pytest
import torch

from verl_megatron.rollout.vllm_weights.loading import keeping_cache


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_emptied_while_vllm_goes_to_sleep_or_wakes_up(fails, monkeypatch):
    emptied = []
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "empty_cache", lambda name=module.__name__: emptied.append(name))

    def empty() -> None:
        torch.cuda.empty_cache()
        torch.accelerator.empty_cache()
        if fails and not emptied:
            raise RuntimeError("planned")

    try:
        with keeping_cache():
            empty()
    except RuntimeError as error:
        assert fails and str(error) == "planned"
    assert emptied == []
    empty()
    assert emptied == ["torch.cuda", "torch.accelerator"]
