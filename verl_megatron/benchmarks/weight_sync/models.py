"""A trained model and a vLLM engine on the same ranks, with the weight sync between them."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.offload import gradients, optimizer_tensors
from parallel.rank_set import world
from parallel.reshard.execute import Resharder
from parallel.reshard.kernels import Checksums
from parallel.weights.architecture import Architecture
from parallel.weights.files import CheckpointFolder
from parallel.weights.loading import load_parameters
from parallel.weights.shard import ShardedParameter
from verl_megatron.algorithms.losses import cross_entropy
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.benchmarks.case import bytes_of, small_weights
from verl_megatron.benchmarks.weight_sync.measures import GIB, Clock, Memory, Row
from verl_megatron.config import ReshardConfig, TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import micro_batches
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.rollout.sampling import Generation, Request, Sampling, sample_seed
from verl_megatron.rollout.vllm import VLLMActor
from verl_megatron.rollout.weights import WeightSync
from verl_megatron.run import make_vllm

SEED, PROMPT_TOKENS = 1, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCase:
    """Settings of the measurement."""

    model: str
    arch: Architecture
    train: Layout
    rollout: Layout
    trainable: bool  # with gradient buffers and an optimizer
    config: TrainerConfig
    folder: str | None  # of the weights; None: random weights

    @property
    def reshard(self) -> ReshardConfig:
        return self.config.reshard

    def columns(self) -> dict[str, object]:
        """Return the CSV columns that describe the run."""
        import vllm

        ranks = f"{dist.get_world_size()} x {torch.cuda.get_device_name() if device.is_gpu() else 'CPU rank'}"
        columns: dict[str, object] = {
            "model": self.model,
            "layers": self.arch.num_layers,
            "train": str(self.train),
            "rollout": str(self.rollout),
            "mode": self.reshard.mode,
        }
        columns |= {
            "optimizer": self.trainable,
            "offload": self.reshard.offload,
            "verify": self.reshard.verify,
            "window_mib": self.reshard.window_mib,
        }
        columns |= {
            "utilization": self.config.rollout.gpu_memory_utilization,
            "eager": self.config.rollout.enforce_eager,
            "ranks": ranks,
        }
        return columns | {
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }


class SyncedModels:
    """A trained model, its vLLM engine and the weight sync between them.

    Built and used by all ranks of the world together.
    """

    def __init__(self, case: SyncCase, clock: Clock):
        """Build in the order of a training run; `clock` measures each part."""
        self.case, self.build_clock = case, clock
        if case.reshard.mode == "keep":
            self.vllm = self._serve()
            self.engine = self._train()
            self.sync = self._plan()
        else:
            self.engine = self._train()
            self.sync = self._plan()
            self.vllm = self._serve(self.sync.shared_weights)
        with clock.part("every slice resolved"):
            self.sync.attach(self.vllm)
        if case.trainable:
            with clock.part("one optimizer step"):
                self._step()
        rng = random.Random(SEED)
        self.requests = []
        for i in range(case.config.data.prompts_per_iteration):
            prompt = [rng.randrange(3, case.arch.vocab_size) for _ in range(PROMPT_TOKENS)]
            self.requests.append(Request(i, prompt, sample_seed(SEED, 0, i)))
        self.parameters = Checksums(
            [tensor.view(len(tensor), -1) for _, tensor in sorted(self.engine.tensors.items())],
            device=device.device(),
        )

    def _serve(self, shared: Mapping[str, Tensor] | None = None) -> VLLMActor:
        with self.build_clock.part("vLLM"):
            return make_vllm(self.case.config, self.case.rollout, shared)

    def _train(self) -> Engine:
        case, clock = self.case, self.build_clock
        with clock.part("Megatron-Core model"):
            engine = Engine(
                arch=case.arch,
                folder=None,
                groups=ProcessGroups(case.train, world()),
                head="lm",
                options=EngineOptions(config=case.config.engine, seed=SEED),
            )
        with clock.part("weights read" if case.folder else "random weights"), self._weights() as weights:
            for parameter in engine.parameters:
                tensor = engine.tensors[parameter.chunk, parameter.name]
                tensor.copy_(weights(parameter, tensor.dtype))
            device.release_cached_memory()
        if case.trainable:
            with clock.part("optimizer"):
                engine.prepare_training(lr=0.0, total_steps=1)
        return engine

    @contextmanager
    def _weights(self) -> Iterator[Callable[[ShardedParameter, torch.dtype], Tensor]]:
        """Return the expected values of a parameter of either side, on this rank's device."""
        if not self.case.folder:
            yield partial(small_weights, spread=self.case.arch.initializer_range)
            return
        with CheckpointFolder(self.case.folder) as files:

            def read(parameter: ShardedParameter, dtype: torch.dtype) -> Tensor:
                tensor = torch.empty(parameter.shape, dtype=dtype, device=device.device())
                load_parameters(files, [parameter], {(parameter.chunk, parameter.name): tensor})
                return tensor

            yield read

    def _plan(self) -> WeightSync:
        with self.build_clock.part("plan"):
            return WeightSync(
                self.engine.weight_source(),
                self.case.rollout,
                self.case.reshard,
                world(),
                dtype=self.engine.compute.dtype,
            )

    def _step(self) -> None:
        """Create gradients and Adam's moments; with a learning rate of 0 the weights do not change."""
        rows, half = [*range(self.case.train.pp)], PROMPT_TOKENS // 2
        batch = RolloutBatch.from_lists(
            rows, [[3 + i for i in range(half)]] * len(rows), [[3 + i for i in range(half)]] * len(rows)
        )
        # one sample per micro-batch: as many as stages, as interleaved schedules require
        micro = [[row] for row in rows]
        self.engine.train_step(
            batch,
            micro,
            lambda outputs, micro: cross_entropy(outputs["logprobs"]),
            fields=(),
            scale=LossScale(half * len(rows)),
        )
        self.engine.gather_weights()

    # ---- a repetition

    def to_rollout(self, clock: Clock, memory: Memory) -> None:
        """Give the GPU and the weights to vLLM, as a training iteration does."""
        memory.begin()
        with clock.whole("to rollout, in one go"):
            with clock.part("to rollout: offload, copy to the host"):
                self.engine.offload_async(self.case.reshard.offload)
            with clock.part("to rollout: vLLM's weights wake"):
                self.vllm.wake("weights")
            if clock.splits:
                with clock.part("to rollout: verified reshard"):
                    self.sync.run()
                memory.note("weights in vLLM")
                self._wake_kv_cache(clock)
            else:  # as in a training run
                self.sync.run(meanwhile=partial(self._wake_kv_cache, clock))
        if clock.splits:
            memory.note("KV cache awake")

    def _wake_kv_cache(self, clock: Clock) -> None:
        with clock.part("to rollout: offload, free the memory"):
            self.engine.wait_offload()
        with clock.part("to rollout: KV cache wakes"):
            self.vllm.wake("kv_cache")

    def generate(self, clock: Clock, memory: Memory) -> list[Generation]:
        """Generate all samples in order; every replica generates all of them."""
        tokens = self.case.config.rollout.max_tokens
        with clock.part("generate"):
            rows = self.vllm.generate(
                self.requests, Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True), shared=False
            )
        if clock.splits:
            memory.note("generated")
        return sorted(rows, key=lambda row: row.sample_id)

    def to_train(self, clock: Clock, memory: Memory) -> None:
        """Give the GPU and the weights back to training, as a training iteration does."""
        with clock.whole("back to training, in one go"):
            with clock.part("back: Megatron's weights restored"):
                self.sync.restore()
            with clock.part("back: vLLM sleeps"):
                self.vllm.sleep()
            with clock.part("back: offload, fetch from the host"):
                self.engine.onload_async()
                self.engine.offload.wait()
        if clock.splits:
            memory.note("back in training")

    def log_probs_apart(self, rows: list[Generation], clock: Clock) -> float:
        """Return the mean absolute difference per token between the trained model's log-probs and vLLM's.

        Every data-parallel rank computes all samples. Collective over the world.
        """
        ids, prompts, tokens, logprobs = zip(
            *((row.sample_id, row.prompt_token_ids, row.token_ids, row.logprobs) for row in rows)
        )
        batch = RolloutBatch.from_lists(list(ids), list(prompts), list(tokens), list(logprobs))
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, tokens)]
        budget = self.case.config.engine.tokens_per_micro_batch
        with clock.part("log-probs in training"):
            outputs = self.engine.infer(
                batch, micro_batches(lengths, tokens_per_micro_batch=budget, multiple_of=self.case.train.pp)
            )
        assert batch.rollout_logprobs is not None
        apart = (
            (outputs["logprobs"] - batch.rollout_logprobs)[batch.response_mask].abs().mean()
            if outputs
            else torch.tensor(0.0)
        )
        return float(world().all_max(apart.double()[None]))

    # ---- checks

    def vllm_has_the_weights(self) -> bool:
        """Check each element on this rank; needs a few times the memory of the largest parameter."""
        target = self.vllm.weight_target()
        with self._weights() as weights:
            equal = [
                torch.equal(target[p.name], weights(p, target[p.name].dtype))
                for p in self.sync.destination[self.sync.rank]
            ]
        device.release_cached_memory()
        return all(equal)

    def plan_rows(self) -> list[Row]:
        """Return the bytes on the busiest or fullest rank. Collective over the world."""
        own = {
            (0, name): tensor
            for name, tensor in self.vllm.weight_target().items()
            if name not in self.sync.shared_weights
        }
        sizes = {
            "weights that training keeps": bytes_of(self.engine.tensors),
            "weights that vLLM has of its own": bytes_of(own),
        }
        if self.case.trainable:
            sizes |= {
                "gradient buffers": _bytes(gradients(self.engine.chunks)),
                "what the optimizer keeps": _bytes(optimizer_tensors(self.engine.optimizer)),
            }
        for way, resharder in (("to rollout", self.sync.to_rollout), ("back", self.sync.to_train)):
            if isinstance(resharder, Resharder):
                sizes |= {
                    f"received on the way {way}": resharder.bytes["received"],
                    f"staging on the way {way}": _staging(resharder),
                }
        largest = world().all_max(torch.tensor(list(sizes.values()))).tolist()
        return [Row("plan", name, size / GIB, "GiB") for name, size in zip(sizes, largest)]

    def close(self) -> None:
        self.vllm.close()


def _staging(resharder: Resharder) -> int:
    return resharder.plan.staged_bytes.get(resharder.rank, 0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
