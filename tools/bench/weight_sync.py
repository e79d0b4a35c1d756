"""Weight sync between training and rollout in both directions: time and memory.

torchrun --nproc_per_node 4 tools/bench/weight_sync.py --shape llama3-8b --train tp2pp2 --rollout 2
    --mode swap --offload all [--csv FILE]
torchrun --nproc_per_node 4 tools/bench/weight_sync.py --hf FOLDER --load --train tp2pp2 --rollout 4
    --mode swap --no-optimizer

A Megatron-Core model and a vLLM engine share the same ranks. Weights are those of FOLDER, or random and a
function of their position in the Hugging Face tensors. They are the same in every layout and mode, so runs
with other modes print the same digest of the generated tokens.

The calls are those of a training iteration, in its order, up to the log-probs of the generated tokens. Half
of the repetitions synchronize the GPUs after every phase. The others do so only at both ends of each
direction, as training does, so that copies to and from the host overlap with other work. Times are those of
the slowest rank, memory that of the fullest. The exit status is 1 if a check fails.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs where nothing is installed

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.offload import gradients, optimizer_tensors
from parallel.placement import described, place
from parallel.rank_set import world
from parallel.reshard.execute import Resharder
from parallel.reshard.kernels import Checksums
from parallel.weights.architecture import Architecture, read_config
from parallel.weights.files import CheckpointFolder, load_parameters
from parallel.weights.shapes import SHAPES, shape
from parallel.weights.shard import ShardedParameter
from tools.bench.case import bytes_of, model_folder, say, small_weights
from tools.bench.weight_sync_measures import GIB, Clock, Memory, Row, table, write_csv
from verl_megatron.algorithms.losses import cross_entropy
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.checks.folders import check_weights
from verl_megatron.config import DataConfig, ModelConfig, ReshardConfig, RolloutConfig, TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import micro_batches
from verl_megatron.roles.engine import Engine
from verl_megatron.rollout.sampling import Generation, Request, Sampling, sample_seed
from verl_megatron.rollout.vllm import VLLMActor
from verl_megatron.rollout.weights import WeightSync
from verl_megatron.run import make_vllm

SEED, PROMPT_TOKENS = 1, 64
# Limit of a mean over tokens, times the square root of the number of layers. With random weights, 80
# layers of a 70B model measured 0.31; 80 layers of width 512 in bfloat16 are 0.28 from the same in float32.
# With other weights, the most likely tokens are several units apart.
LOG_PROBS_APART = {torch.float32: 5e-4, torch.bfloat16: 0.06}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings of the measurement."""

    model: str
    arch: Architecture
    train: Layout
    rollout: Layout
    learns: bool  # trainable: with gradient buffers and an optimizer
    config: TrainerConfig
    folder: str | None  # of the weights; None: random weights

    @property
    def reshard(self) -> ReshardConfig:
        return self.config.reshard

    def columns(self) -> dict[str, object]:
        """Return the CSV columns that describe the run."""
        import vllm

        ranks = f"{dist.get_world_size()} x {torch.cuda.get_device_name() if device.is_gpu() else 'CPU rank'}"
        found = {
            "model": self.model,
            "layers": self.arch.num_layers,
            "train": str(self.train),
            "rollout": str(self.rollout),
            "mode": self.reshard.mode,
        }
        found |= {
            "optimizer": self.learns,
            "offload": self.reshard.offload,
            "verify": self.reshard.verify,
            "window_mib": self.reshard.window_mib,
        }
        found |= {
            "utilization": self.config.rollout.gpu_memory_utilization,
            "eager": self.config.rollout.enforce_eager,
            "ranks": ranks,
        }
        return found | {
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }


# ---- model and engine --------------------------------------------------------------------------------------


class HandOver:
    """A trained model, its vLLM engine and the weight sync between them.

    Built and used by all ranks of the world together.
    """

    def __init__(self, case: Case, clock: Clock):
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
        if case.learns:
            with clock.part("one optimizer step"):
                self._step()
        rng = random.Random(SEED)
        prompts = [
            [rng.randrange(3, case.arch.vocab_size) for _ in range(PROMPT_TOKENS)]
            for _ in range(case.config.data.prompts_per_iteration)
        ]
        self.requests = [Request(i, prompt, sample_seed(SEED, 0, i)) for i, prompt in enumerate(prompts)]
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
                config=case.config.engine,
                head="lm",
                seed=SEED,
            )
        with clock.part("weights read" if case.folder else "random weights"), self._weights() as weights:
            for parameter in engine.parameters:
                tensor = engine.tensors[parameter.chunk, parameter.name]
                tensor.copy_(weights(parameter, tensor.dtype))
            device.release_cached_memory()
        if case.learns:
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
        what = self.case.reshard.offload
        memory.begin()
        with clock.whole("to rollout, in one go"):
            with clock.part("to rollout: offload, copy to the host"):
                self.engine.offload_async(what)
            with clock.part("to rollout: vLLM's weights wake"):
                self.vllm.wake("weights")
            if clock.splits:
                with clock.part("to rollout: reshard with proof"):
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

    def back(self, clock: Clock, memory: Memory) -> None:
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
            found = self.engine.infer(
                batch, micro_batches(lengths, tokens_per_micro_batch=budget, multiple_of=self.case.train.pp)
            )
        apart = (
            (found["logprobs"] - batch.rollout_logprobs)[batch.response_mask].abs().mean()
            if found
            else torch.tensor(0.0)
        )
        return float(world().all_max(apart.double()[None]))

    # ---- checks

    def vllm_has_the_weights(self) -> bool:
        """Check each element on this rank; needs a few times the memory of the largest parameter."""
        held = self.vllm.weight_target()
        with self._weights() as weights:
            equal = [
                torch.equal(held[p.name], weights(p, held[p.name].dtype))
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
        if self.case.learns:
            sizes |= {
                "gradient buffers": _bytes(gradients(self.engine.chunks)),
                "what the optimizer keeps": _bytes(optimizer_tensors(self.engine.optimizer)),
            }
        for way, resharder in (("to rollout", self.sync.to_rollout), ("back", self.sync.to_train)):
            if resharder is not None:
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


# ---- measurement -------------------------------------------------------------------------------------------


class Checks:
    """Checks after every repetition, on every rank."""

    def __init__(self, hand_over: HandOver):
        self.hand_over, self.before_N = hand_over, hand_over.parameters.run()
        self.tokens: list[list[list[int]]] = []  # of each repetition
        self.apart = 0.0  # largest difference between log-probs of training and rollout
        self.ways_back = self.changed = 0
        self.served = False

    def after(self, tokens: list[list[int]], apart: float) -> None:
        self.tokens.append(tokens)
        self.apart = max(self.apart, apart)
        self.ways_back += 1
        self.changed += int((self.hand_over.parameters.run() != self.before_N).sum())

    def rows(self) -> list[Row]:
        """Return the result's rows. Collective over the world."""
        digests: list = [None] * dist.get_world_size()
        dist.all_gather_object(digests, [digest(tokens) for tokens in self.tokens])
        alike = {one for of_rank in digests for one in of_rank}
        changed, unserved = world().all_max(torch.tensor([self.changed, int(not self.served)])).tolist()
        flat = [token for row in self.tokens[0] for token in row]
        limit = (
            LOG_PROBS_APART[self.hand_over.engine.compute.dtype] * self.hand_over.case.arch.num_layers**0.5
        )
        found = {
            "vLLM's weights are, element by element, those that training should have": not unserved,
            f"Megatron's weights have the same bits after each of {self.ways_back} ways back": not changed,
            f"the tokens are the same in each of {self.ways_back} repetitions and on every replica": len(
                alike
            )
            == 1,
            f"{len(flat)} tokens were generated, {len(set(flat))} different ones": len(set(flat)) > 1,
            f"their log-probs in training and in vLLM differ by {self.apart:.1e} on average, at "
            f"most {limit:.0e}": self.apart <= limit,
        }
        return [
            *(Row("check", name, "yes" if holds else "NO", "") for name, holds in found.items()),
            Row("digest", "all tokens", digests[0][0], ""),
        ]


def digest(tokens: list[list[int]]) -> str:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


def measure(hand_over: HandOver, repetitions: int) -> list[Row]:
    """Run one uncounted repetition, then the given number of each kind."""
    clock, memory, checks = Clock(), Memory(), Checks(hand_over)
    memory.note("trained, vLLM asleep")
    for number in range(-1, 2 * repetitions):
        clock.splits = number % 2 == 0 or number < 0
        hand_over.to_rollout(clock, memory)
        if number < 0:
            checks.served = hand_over.vllm_has_the_weights()
        rows = hand_over.generate(clock, memory)
        hand_over.back(clock, memory)
        checks.after([row.token_ids for row in rows], hand_over.log_probs_apart(rows, clock))
        if number < 0:  # warm-up: libraries start and kernels are compiled
            clock.milliseconds.clear()
            memory.stages = {"trained, vLLM asleep": memory.stages["trained, vLLM asleep"]}
    return [*clock.rows("phase"), *memory.rows(), *hand_over.plan_rows(), *checks.rows()]


# ---- command line ------------------------------------------------------------------------------------------


def read_options() -> tuple[argparse.Namespace, Case, dict]:
    """Parse the command line, reject contradictory options early, and read the config.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(SHAPES))
    model.add_argument(
        "--hf", type=Path, help="a folder with a config.json; its weights are read with --load only"
    )
    parser.add_argument("--load", action="store_true", help="the weights of --hf instead of random ones")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than the model has")
    parser.add_argument("--train", default="tp2", help="Megatron's layout")
    parser.add_argument(
        "--rollout", type=int, default=2, help="vLLM's tensor-parallel size; the other ranks are replicas"
    )
    parser.add_argument("--mode", choices=["keep", "share", "swap"], default="keep", help="as reshard.mode")
    parser.add_argument(
        "--offload", choices=["none", "grads", "optimizer", "all"], default="none", help="as reshard.offload"
    )
    parser.add_argument(
        "--optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradient buffers and Adam's state, made by one step",
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="of each kind: phase by phase, and in one go"
    )
    parser.add_argument("--tokens", type=int, default=32, help="generated for each prompt")
    parser.add_argument("--prompts", type=int, default=8, help="that each replica answers")
    parser.add_argument("--utilization", type=float, default=0.5, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument(
        "--verify",
        choices=["sample", "all", "none"],
        default="sample",
        help="the proof of each reshard, as reshard.verify",
    )
    parser.add_argument("--window-mib", type=int, default=256, help="as reshard.window_mib")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    try:
        case, hf = _case(options)
    except ValueError as error:
        parser.error(str(error))
    return options, case, hf


def _case(options: argparse.Namespace) -> tuple[Case, dict]:
    if options.offload != "none" and not options.optimizer:
        raise ValueError(
            f"--offload {options.offload} moves what the optimizer needs, and --no-optimizer leaves it out; "
            "drop one of them"
        )
    if min(options.repetitions, options.tokens, options.prompts, options.rollout) < 1:
        raise ValueError("--repetitions, --tokens, --prompts and --rollout have to be at least 1")
    if options.load and (options.shape or options.layers):
        raise ValueError("--load reads all weights of a folder; give --hf, and no --shape or --layers")
    hf = shape(options.shape) if options.shape else read_config(options.hf)
    arch = Architecture.from_hf(hf, source=options.shape or str(options.hf / "config.json"))
    arch = replace(arch, num_layers=options.layers or arch.num_layers)
    ranks = tuple(range(int(os.environ.get("WORLD_SIZE", "1"))))
    train, rollout = (
        Layout.parse(options.train, ranks=ranks),
        Layout.parse(f"tp{options.rollout}", ranks=ranks),
    )
    if PROMPT_TOKENS + options.tokens > arch.max_positions:
        raise ValueError(
            f"prompts of {PROMPT_TOKENS} tokens and --tokens {options.tokens} are more than the model's "
            f"{arch.max_positions} positions; lower --tokens"
        )
    train, rollout = place(
        arch, train, rollout, ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
    )
    config = TrainerConfig(
        data=DataConfig(max_prompt_tokens=PROMPT_TOKENS, prompts_per_iteration=options.prompts),
        actor=ModelConfig(layout=options.train),
        rollout=RolloutConfig(
            tp=options.rollout,
            max_tokens=options.tokens,
            gpu_memory_utilization=options.utilization,
            enforce_eager=options.eager,
        ),
        reshard=ReshardConfig(
            mode=options.mode, window_mib=options.window_mib, verify=options.verify, offload=options.offload
        ),
    )
    model, folder = options.shape or options.hf.resolve().name, str(options.hf) if options.load else None
    if folder:
        check_weights(folder, "lm")
    return Case(
        model=model,
        arch=arch,
        train=train,
        rollout=rollout,
        learns=options.optimizer,
        config=config,
        folder=folder,
    ), hf


def main() -> int:
    options, case, hf = read_options()
    device.initialize()
    say(
        f"{case.model} ({case.arch.num_layers} layers), {case.train} -> {case.rollout}, {options.mode}; "
        f"order of ranks: {described(case.train, case.rollout)}"
    )
    built = Clock()
    with model_folder(case.arch, hf) as folder:
        case.config.actor.path = folder
        hand_over = HandOver(case, built)
        rows = [*measure(hand_over, options.repetitions), *built.rows("build")]
        hand_over.close()
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        if options.csv:
            write_csv(options.csv, case.columns(), rows)
    dist.destroy_process_group()
    return int(any(row.kind == "check" and row.value != "yes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
