"""`reward-server`: a reward model behind an address, for `reward.function=http://...`."""

import signal

from parallel.runtime.refusal import short_repr
from verl_megatron.launch.options import SHARE, Options, whole_number

HELP = """\
Serves MODEL, a sequence-classification folder with one label, in vLLM: reward.function=http://HOST:PORT asks
it for scores. It reads texts with its own tokenizer and chat template, so these may differ from the actor's.
It takes one GPU that the run does not use (CUDA_VISIBLE_DEVICES says which), or the CPU. Ctrl-C ends it.
"""
EXAMPLES = (
    "outputs/toy/reward_model/reward",
    "/models/Skywork-Reward-V2-Qwen3-8B --host 0.0.0.0 --port 8100 --max-tokens 8192",
)
DTYPES = ("auto", "bfloat16", "float16", "float32")


def run(arguments: list[str]) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ValueError: no such model, or an address that cannot be listened at.
    """
    given = _parser().parse_args(arguments)
    from parallel.weights.remote.models import local_folder
    from verl_megatron.rewards.serving import ScoreServer
    from verl_megatron.rollout.vllm_pooling import PoolingScorer, check_folder

    folder = local_folder(given.model, whole=True)
    check_folder(folder, max_tokens=given.max_tokens)
    try:
        server = ScoreServer(given.host, given.port)
    except OSError as error:
        raise ValueError(
            f"--host {short_repr(given.host)} --port {given.port} cannot be listened at ({error.strerror}); "
            "give another"
        ) from None
    model = PoolingScorer(
        folder,
        dtype=given.dtype,
        max_tokens=given.max_tokens,
        gpu_memory_utilization=given.gpu_memory_utilization,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.close())
    print(f"{folder}, up to {model.max_tokens:,} tokens: reward.function={server.address}/score", flush=True)
    server.serve(model.scores)
    return 0


def _parser() -> Options:
    options = Options(prog="verl-megatron reward-server", description=HELP, examples=EXAMPLES)
    options.add_argument("model", metavar="MODEL", help="Hugging Face folder, hub name or URL")
    options.add_argument("--host", default="127.0.0.1", help="address to listen at; nothing is encrypted")
    options.add_argument("--port", type=whole_number(0, 65535), default=8000, help="port; 0: a free one")
    options.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights")
    options.add_argument(
        "--max-tokens",
        type=whole_number(2),
        help="longest prompt with response (default: the model's positions)",
    )
    options.add_argument(
        "--gpu-memory-utilization", type=SHARE, default=0.9, metavar="SHARE", help="of the GPU's memory"
    )
    return options
