"""Imports what ranks import, once: a process that is forked after it starts at once."""

import transformers

import verl_megatron.sft
import verl_megatron.trainer  # noqa: F401
from verl_megatron.rollout.vllm_process import starting

transformers.AutoTokenizer  # noqa: B018 (imported when it is first touched)
with starting():
    import vllm  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
