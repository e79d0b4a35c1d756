"""Scores of a reward model that vLLM serves in a process of its own, from texts."""

import os
from collections.abc import Sequence
from typing import Any

from parallel import device
from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import read_config
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.rollout import vllm_cpu
from verl_megatron.rollout.vllm_folder import ModelView
from verl_megatron.rollout.vllm_process import ENVIRONMENT, resolve_dtype, starting

_CPU_CACHE_MIB = 256


class PoolingScorer:
    """A sequence-classification model of one label, as vLLM's pooling kind, on one GPU or the CPU.

    It reads prompt and response with its own tokenizer and chat template, as reward models are trained here:
    the response ends in the end-of-sequence token. The score is the label's logit there.

    Args:
        folder: Hugging Face folder with its tokenizer.
        dtype: of weights and computation; auto: bfloat16 on GPUs, float32 on CPUs.
        max_tokens: longest prompt with response; None: the model's maximum.
        gpu_memory_utilization: share of the GPU's memory that vLLM takes.

    Raises:
        ValueError: the folder has no such model, no tokenizer, or weights that are missing or broken.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: str = "auto",
        max_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
    ):
        check_folder(folder, max_tokens=max_tokens)
        self._tokenizer = load_tokenizer(folder)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        view = ModelView(folder, weights=True)
        options: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization}
        with starting():
            from vllm import LLM, PoolingParams

            if not device.is_gpu():
                vllm_cpu.prepare()
                options = vllm_cpu.engine_options(kv_cache_mib=_CPU_CACHE_MIB, max_model_len=max_tokens)
            with view.starting():
                self._llm: Any = LLM(
                    runner="pooling",
                    dtype=resolve_dtype(dtype),  # pyright: ignore[reportArgumentType]  # one of its names
                    max_model_len=max_tokens,
                    use_tqdm_on_load=False,
                    **view.options,
                    **options,
                )
        self._params = PoolingParams(use_activation=False)
        self.max_tokens: int = self._llm.llm_engine.model_config.max_model_len

    def scores(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the score of each sample; of one that cannot be read, a dict that says why."""
        found: list[Any] = [self._token_ids(sample) for sample in samples]
        readable = [at for at, ids in enumerate(found) if isinstance(ids, list)]
        prompts = [{"prompt_token_ids": found[at]} for at in readable]
        outputs = self._llm.classify(prompts, pooling_params=self._params, use_tqdm=False) if prompts else []
        for at, output in zip(readable, outputs, strict=True):
            found[at] = float(output.outputs.probs[0])
        return found

    def _token_ids(self, sample: dict[str, Any]) -> list[int] | dict[str, str]:
        """Return prompt and response in the model's own tokens, or what is wrong with them."""
        messages, response = sample.get("messages"), sample.get("response")
        prompt = messages or sample.get("prompt")
        if not isinstance(prompt, str | list) or not isinstance(response, str):
            return {"error": "a sample needs a prompt, or messages, and a response"}
        tokenizer = self._tokenizer
        try:
            before, behind = tokenizer.demonstration_text(prompt, response)
            if isinstance(prompt, str):
                ids = tokenizer.encode_text(before, is_chat=False) + tokenizer.encode_response(behind)
            else:
                ids = sum(tokenizer.encode_chat(before, behind), [])
        except ValueError as error:
            return {"error": str(error)}
        if len(ids) > self.max_tokens:
            return {"error": f"{len(ids)} tokens are more than the model's {self.max_tokens}"}
        return ids


def check_folder(folder: str, *, max_tokens: int | None = None) -> None:
    """Check that a folder has a sequence-classification model of one label, for samples of that length.

    Raises:
        ValueError: it has not, or its positions are fewer.
    """
    config = read_config(folder)
    kinds, labels = config.get("architectures"), config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    is_classifier = isinstance(kinds, list) and str(kinds[:1]).endswith("ForSequenceClassification']")
    if not is_classifier or num_labels != 1:
        raise ValueError(
            f"{folder} is no reward model: config.json has architectures={short_repr(kinds)} with "
            f"{short_repr(num_labels)} labels; give a sequence-classification folder with one label"
        )
    positions = config.get("max_position_embeddings")
    if max_tokens is not None and isinstance(positions, int) and max_tokens > positions:
        raise ValueError(
            f"--max-tokens {max_tokens} is more than the {positions} positions of {folder}; lower it"
        )
