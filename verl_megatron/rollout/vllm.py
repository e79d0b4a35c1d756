"""In-process vLLM engine: standalone, or one tensor-parallel rank of a replica per torchrun rank."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device, rank_set
from parallel.weights.architecture import read_architecture
from parallel.weights.remote.models import local_folder
from parallel.weights.rules import vllm_tp_problems
from verl_megatron.config import RolloutConfig, older_settings
from verl_megatron.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from verl_megatron.rollout import vllm_cpu
from verl_megatron.rollout.admission import Admission, CacheReading
from verl_megatron.rollout.dispatch import generate
from verl_megatron.rollout.engine import TAGS, Tag, num_replicas
from verl_megatron.rollout.sampling import Generation, Request, Sampling, sample_seed, token_budget
from verl_megatron.rollout.vllm_cache import CacheGauge, cache_of, limited, no_larger_than_needed
from verl_megatron.rollout.vllm_decoding import drafts
from verl_megatron.rollout.vllm_decoding.bookkeeping import Bookkeeping
from verl_megatron.rollout.vllm_decoding.requests import sampling_params
from verl_megatron.rollout.vllm_folder import ModelView
from verl_megatron.rollout.vllm_process import (
    check_ranks,
    engine_environment,
    groups_in_order,
    preserved_environment,
    preserved_random_state,
    release_groups,
    resolve_dtype,
    starting,
)
from verl_megatron.rollout.vllm_weights import loading
from verl_megatron.rollout.vllm_weights.fp8 import QUANTIZATION, Fp8Weight, check_fp8, split_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocation:
    """The part of a trainer's ranks and memory that an engine uses."""

    # All ranks of the world by replica, then by tensor-parallel index; increasing within a replica.
    # Example: with (2, 3, 0, 1) and two ranks per replica, replica 0 is ranks 2 and 3. None: 0, 1, ...
    ranks: Sequence[int] | None = None
    # Tensors on this rank's device by vLLM's parameter names (as in `weight_target`). vLLM's parameters alias
    # their memory: writing into them updates vLLM. Construction keeps their contents, `sleep` does not free
    # them, and gpu_memory_utilization excludes them. Parameters without a tensor are random until the trainer
    # writes them: no weights are read from files. None: weights are read.
    shared_weights: Mapping[str, Tensor] | None = None
    # Samples that a replica has at once at most: its KV cache holds no more, and its CUDA graphs are for no
    # more than the next power of two. None: `config.max_num_seqs`.
    samples: int | None = None


class VLLMActor:
    """A vLLM engine, or this rank's part of one.

    Without torchrun (no RANK and no process group) it is standalone. In a torchrun world every rank
    constructs it. Each `tensor_parallel_size` consecutive entries of `ranks` form a replica; all replicas
    draw from one queue.

    Args:
        model_name: Hugging Face folder, hub name or URL.
        config: engine settings; `config.tp` is not read, and sampling parameters are passed to `generate`.
        max_model_len: maximum length of prompt and response together; None: the model's maximum.
        seed: of random weights and of `generate_text`.
        colocation: ranks, weights and samples; None: ranks 0, 1, ... and the weights of the folder.
        older: names of the older interface, such as `trust_remote_code=False`.

    Raises:
        ValueError: `tensor_parallel_size` does not divide the world size or the model's heads, the folder has
            no config.json, `ranks` is not such an order or differs from that of the process's other engines,
            or a tensor of `shared_weights` matches no parameter in name, shape, dtype, strides and device.
    """

    _open = 0  # open engines of this process; they share vLLM's process groups and so their TP size
    _open_ranks: tuple[int, ...] = ()  # `ranks` of the open engines
    _groups_are_ours = False  # vLLM also created the default process group

    def __init__(
        self,
        model_name: str | os.PathLike,
        tensor_parallel_size: int = 1,
        *,
        config: RolloutConfig | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
        colocation: Colocation | None = None,
        **older: Any,
    ):
        if settings := older_settings(older, where="VLLMActor()"):
            raise ValueError(f"VLLMActor() has no setting {', '.join(settings)}; leave it to RLTrainer")
        dummy = colocation is not None and colocation.shared_weights is not None
        self.model_name = local_folder(str(model_name), whole=not dummy)
        self.tp, self.seed = tensor_parallel_size, seed
        colocation = colocation or Colocation()
        self.config = limited(config or RolloutConfig(), samples=colocation.samples)
        self._in_world = bool(os.environ.get("RANK"))
        self._in_world |= dist.is_initialized() and not VLLMActor._groups_are_ours
        if self._in_world and not dist.is_initialized():
            device.initialize()
        if self._in_world:  # vLLM builds its groups over torch's default group
            self.world = rank_set.world()
        rank, world = (self.world.rank, self.world.size) if self._in_world else (0, 1)
        self.num_replicas = num_replicas(world_size=world, tp=self.tp)
        self._check_model(aliases=bool(colocation.shared_weights))
        self.ranks = check_ranks(
            range(world) if colocation.ranks is None else colocation.ranks, self.tp, world
        )
        if VLLMActor._open and self.ranks != VLLMActor._open_ranks:
            raise ValueError(
                f"ranks={self.ranks}: an open engine has {VLLMActor._open_ranks}, "
                "and engines of a process share their groups; close it first"
            )
        self.replica, self.tp_rank = divmod(self.ranks.index(rank), self.tp)
        self._asleep: set[Tag] = set()
        self._running: dict[int, Request] = {}
        self._tokenizer = None
        self._llm: Any = None  # while it starts, and once it is closed
        self._view = ModelView(self.model_name, weights=not dummy)
        options = self._view.options | dict(
            max_model_len=max_model_len, dtype=resolve_dtype(self.config.dtype)
        )
        with self._guarded():
            try:
                self._llm = self._start(options, colocation)
            except Exception:
                if not VLLMActor._open:  # existing groups may not fit the next engine
                    release_groups(ours=not self._in_world)
                raise
        self.world = rank_set.world()  # standalone, vLLM has created the default group
        model_config = self._llm.llm_engine.model_config
        self.max_model_len, self.vocab_size = model_config.max_model_len, model_config.get_vocab_size()
        self._gauge = CacheGauge(self._llm, required=self.config.dynamic_batching)
        self._books = Bookkeeping(self._llm.llm_engine)
        self.admission = Admission(
            cache_of(self._llm), limit=self.config.max_num_seqs, adaptive=self.config.dynamic_batching
        )

    def _check_model(self, *, aliases: bool) -> None:
        """Raise ValueError if vLLM cannot split the model, or hold its weights as the settings say."""
        arch = read_architecture(self.model_name)
        if problems := vllm_tp_problems(arch, self.tp):
            raise ValueError(f"rollout.tp={self.tp}: {problems[0]}")
        if self.config.weight_dtype == "fp8":
            dtype = getattr(torch, resolve_dtype(self.config.dtype))
            check_fp8(arch, self.tp, dtype, aliases=aliases)

    def _start(self, options: dict[str, Any], colocation: Colocation):
        with starting():
            from vllm import LLM
            from vllm.distributed.parallel_state import get_tp_group

        config, shared_weights = self.config, colocation.shared_weights or {}
        if device.is_gpu():
            options |= dict(
                gpu_memory_utilization=config.gpu_memory_utilization,
                enforce_eager=config.enforce_eager,
                enable_sleep_mode=config.sleep,
            )
        else:
            vllm_cpu.prepare()
            options |= vllm_cpu.engine_options(
                kv_cache_mib=config.kv_cache_mib, max_model_len=options["max_model_len"]
            )
        if self._in_world:
            options |= dict(tensor_parallel_size=self.tp, distributed_executor_backend="external_launcher")
        if config.weight_dtype == "fp8":
            options |= dict(quantization=QUANTIZATION)
        options |= drafts.engine_options(config)
        self.has_tokenizer = any((Path(self.model_name) / name).exists() for name in TOKENIZER_FILES)
        groups = groups_in_order(self.ranks, self.world.rank) if self._in_world else contextlib.nullcontext()
        weights = contextlib.nullcontext()
        if options["load_format"] == "dummy":
            is_fp8 = config.weight_dtype == "fp8"
            weights = loading.packing() if is_fp8 else loading.sharing(shared_weights)
        samples = min(colocation.samples or config.max_num_seqs, config.max_num_seqs)
        cache = no_larger_than_needed(samples, adaptive=config.dynamic_batching)
        with starting(), self._view.starting(), groups, weights, cache:
            llm = LLM(
                kv_cache_dtype=config.kv_cache_dtype,
                skip_tokenizer_init=not self.has_tokenizer,
                max_num_seqs=config.max_num_seqs,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",  # under the sampling distribution
                seed=self.seed,
                use_tqdm_on_load=False,
                **options,
            )
        # Newer engines destroy the default process group, the caller's, on garbage collection and at exit.
        finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        self.tp_group = get_tp_group().cpu_group if self.tp > 1 else None
        if self._in_world:
            expected = list(self.ranks[self.replica * self.tp : (self.replica + 1) * self.tp])
            assert get_tp_group().ranks == expected, f"vLLM's group {get_tp_group().ranks} is not {expected}"
        parameters = _parameters(llm)
        for name, tensor in shared_weights.items():
            assert parameters[name].data_ptr() == tensor.data_ptr(), (
                f"vLLM replaced {name} while it started, so that it is no longer shared"
            )
        VLLMActor._open += 1
        VLLMActor._open_ranks, VLLMActor._groups_are_ours = self.ranks, not self._in_world
        return llm

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of this replica's KV cache, tokens."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner rank of its replica's samples."""
        return self.tp_rank == 0

    def weight_target(self) -> dict[str, Tensor]:
        """Return this rank's shards by vLLM's names. After writing into them, call `reset_cache`."""
        return split_parameters(_parameters(self._llm))[0]

    def fp8_target(self) -> dict[str, Fp8Weight]:
        """Return this rank's fp8 weights by vLLM's names; empty unless `config.weight_dtype` is fp8."""
        return split_parameters(_parameters(self._llm))[1]

    # ---- requests ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Context required for `submit`, `step` and `abort`; see `RolloutEngine`."""
        assert not self._asleep, f"vLLM sleeps: wake {sorted(self._asleep)} first"
        with self._guarded(), self._books.in_use():
            try:
                yield
            finally:
                if self._running:  # after an exception: leave the engine usable
                    self._drop(list(self._running))

    def submit(self, request: Request) -> None:
        """Start a request."""
        from vllm.inputs import tokens_input

        budget = token_budget(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        params = sampling_params(request.sampling, seed=request.seed, max_tokens=budget)
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        self._llm.llm_engine.add_request(str(request.sample_id), prompt, params)
        self._running[request.sample_id] = request
        self._gauge.add(request.sample_id)
        self._books.add(request.sample_id, has_stop=bool(request.sampling.stop))

    def step(self) -> list[Generation]:
        """Decode a token or more of every running request; return the requests that finished."""
        return [self._finished(output) for output in self._llm.llm_engine.step() if output.finished]

    def read_cache(self) -> CacheReading:
        """Return the use of the KV cache after the last step."""
        return self._gauge.read()

    def abort(self, request_ids: Sequence[int]) -> list[Generation]:
        """Abort running requests; return their partial generations, with finish_reason "abort"."""
        generations = [
            self._books.tokens(sample_id).generation(self._running[sample_id], "abort")
            for sample_id in request_ids
        ]
        self._drop(request_ids)
        return generations

    def num_generated(self, request_id: int) -> int:
        """Return the tokens that a running request has generated so far."""
        return len(self._books.tokens(request_id).token_ids)

    def _drop(self, request_ids: Sequence[int]) -> None:
        self._llm.llm_engine.abort_request([str(sample_id) for sample_id in request_ids])
        for sample_id in request_ids:
            del self._running[sample_id]
            self._gauge.remove(sample_id)
            self._books.remove(sample_id)

    def _finished(self, output) -> Generation:
        request = self._running.pop(int(output.request_id))
        self._gauge.remove(request.sample_id)
        tokens, (completion,) = self._books.remove(request.sample_id), output.outputs
        generation = tokens.generation(request, completion.finish_reason, count=len(completion.token_ids))
        if not isinstance(completion.stop_reason, str) or self.config.speculative == "off":
            return generation
        return drafts.without_rest(
            generation,
            request.sampling,
            decode=self._llm.get_tokenizer().decode,
            most=self.config.speculative_tokens + 1,
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling, **options) -> list[Generation]:
        """Generate `requests`, all with `sampling`; options, result and errors as in `dispatch.generate`."""
        return generate(self, [replace(request, sampling=sampling) for request in requests], **options)

    def generate_text(self, prompts: Sequence[str], sampling: Sampling) -> list[str]:
        """Generate responses to `prompts`, in order, with the folder's tokenizer, on every replica.

        Raises:
            ValueError: the folder has no tokenizer, or as in `generate`.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_name)
        requests = [
            Request(i, self._tokenizer.encode_prompt(prompt), sample_seed(self.seed, 0, i))
            for i, prompt in enumerate(prompts)
        ]
        texts = [
            self._tokenizer.decode(sample.token_ids)
            for sample in self.generate(requests, sampling, shared=False)
        ]
        for stop in sampling.stop:
            texts = [text.split(stop)[0] for text in texts]
        return texts

    def sleep(self) -> None:
        """Free the GPU memory of weights (except shared ones) and KV cache; their contents are lost.

        No-op on CPUs or without `config.sleep`.
        """
        if device.is_gpu() and self.config.sleep and not self._asleep:
            with loading.keeping_cache():
                self._llm.sleep(level=2)
            self._asleep = set(TAGS)

    def has_room(self, tag: Tag) -> bool:
        """Whether there is certainly enough memory for `wake(tag)`; empties PyTorch's cache if needed."""
        return tag not in self._asleep or loading.make_room(tag)

    def wake(self, tag: Tag) -> None:
        """Allocate the memory of weights or KV cache again, at the same addresses.

        Raises:
            ValueError: the GPU has too little free memory.
        """
        if tag not in self._asleep:
            return
        loading.make_room(tag)
        try:
            with loading.keeping_cache():
                self._llm.wake_up(tags=[tag])
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            share, used = self.config.gpu_memory_utilization, device.used_memory_bytes() / 2**30
            raise ValueError(
                f"rollout.gpu_memory_utilization={share}: no room for vLLM's {tag} next to the models, "
                f"{used:.0f} GiB are in use; lower it, or raise tp or pp"
            ) from error
        self._asleep.remove(tag)

    def reset_cache(self) -> None:
        """Clear the prefix cache; required after the weights have changed."""
        assert self._llm.reset_prefix_cache(), "vLLM kept its prefix cache: requests are still running"

    def close(self) -> None:
        """Free the engine; the last one also destroys vLLM's process groups, not the caller's. Collective."""
        if self._llm is None:
            return
        with self._guarded():
            self._llm.llm_engine.model_executor.shutdown()
            self._llm = self.tp_group = None
            self._view.remove()
            VLLMActor._open -= 1
            if not VLLMActor._open:
                release_groups(ours=VLLMActor._groups_are_ours)
                VLLMActor._groups_are_ours = False

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Restore environment, random states and thread count on exit."""
        environment = engine_environment()
        if self._in_world:  # read by the external launcher; only torchrun sets them
            environment |= dict(RANK=str(self.world.rank), WORLD_SIZE=str(self.world.size))
            environment |= dict(
                LOCAL_RANK=str(torch.cuda.current_device() if device.is_gpu() else self.world.rank)
            )
        with preserved_environment(environment), preserved_random_state():
            with contextlib.nullcontext() if device.is_gpu() else vllm_cpu.preserving_threads():
                yield


def _parameters(llm) -> dict[str, Tensor]:
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
