"""A Megatron-Core model on the ranks of its layout: loading, forward passes, optimizer steps, export."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel import device, megatron
from parallel.checkpoint import optimizer_shards
from parallel.checkpoint import training_state as checkpoint
from parallel.export import ShardedModel, export_folder
from parallel.groups import ProcessGroups
from parallel.offload import Offload, gradients, optimizer_tensors
from parallel.reshard.source import WeightSource
from parallel.weights.architecture import Architecture, read_config
from parallel.weights.files import CheckpointFolder
from parallel.weights.loading import copy_same, load_parameters
from parallel.weights.row_shards import row_shards
from parallel.weights.rules import Head, megatron_shards
from parallel.weights.shard import Shards
from parallel.weights.writing import with_dtype
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import CriticConfig, EngineConfig
from verl_megatron.config.rollout import GRADIENTS_LEAVE, OPTIMIZER_LEAVES
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.models.build import build_chunks
from verl_megatron.models.heads import trunk
from verl_megatron.models.log_probs import Softmax
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.compute import compute_of
from verl_megatron.roles.full_sharding import FullySharded, tensors_of
from verl_megatron.roles.heads import HEADS, Outputs, finite
from verl_megatron.roles.inference import infer_models
from verl_megatron.roles.learning_rate import make_scheduler
from verl_megatron.roles.optimizer import gathers_late, make_optimizer, wrap_data_parallel
from verl_megatron.roles.schedule import pack_all, run_schedule


class Loss(Protocol):
    """Loss function: outputs and fields of N tokens → per-token loss [N] float32, and metrics."""

    def __call__(self, outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Sums]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options shared by the models of a run."""

    config: EngineConfig
    seed: int  # of initial weights
    temperature: float = 1.0  # of samples that have none; divides the logits of a language-model head
    progress: Callable[[], None] = lambda: None  # called before each micro-batch
    critic: CriticConfig = field(default_factory=CriticConfig)  # of a value head on the actor's trunk
    fp8_weights_by: str = ""  # as of `ModelSpec`
    steps_only: bool = False  # optimizer state is on the GPU during optimizer steps only
    same_weights: "Engine | None" = None  # not trained yet, of this folder and layout


class Engine:
    """A model on the ranks of its layout.

    Every rank of `groups.world` constructs it; on non-members the methods do nothing.
    """

    def __init__(
        self,
        *,
        arch: Architecture,
        folder: str | None,
        groups: ProcessGroups,
        head: Head,
        options: EngineOptions,
    ):
        """
        Args:
            folder: Hugging Face folder with the weights; None keeps the initial weights and reads no files.
        """
        self.arch, self.groups = arch, groups
        self.head: Head = head
        self.config, self.temperature, self.progress = options.config, options.temperature, options.progress
        self.steps_only = options.steps_only
        self.value_head = options.critic if head == "lm_token" else None
        self.layout, self.scattered = groups.layout, False
        self.compute = compute_of(options.config, fp8_weights_by=options.fp8_weights_by)
        self.optimizer: Any = None  # Megatron-Core sets attributes that it does not declare
        self.offload = Offload(device.device())  # optimizer state
        self.idle_gradients = Offload(device.device())
        self.copies = checkpoint.HostCopies()
        self.chunks: list[Any] = []
        if not groups.is_member:
            return
        megatron.seed(groups, options.seed)
        self.chunks = build_chunks(arch, groups, self.compute, head=head)
        self.model_config: Any = self.chunks[0].config
        self.parameters = self._shards_of(head)[groups.rank]
        if self.config.sharding == "full":
            self.chunks = [FullySharded(chunk, groups, self.compute.dtype) for chunk in self.chunks]
        self.tensors = tensors_of(self.chunks)
        described = {(p.chunk, p.name): p.shape for p in self.parameters}
        built = {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}
        assert described == built, (
            f"the weight map and the model disagree: {set(described.items()) ^ set(built.items())}"
        )
        if folder is not None:
            self._load(folder, options)
        if self.value_head is not None and groups.is_last_stage:
            self._prepare_value_head(self.value_head)

    def _load(self, folder: str, options: EngineOptions) -> None:
        """Copy the weights that another engine has of the folder, and read the others."""
        absent, new = self.parameters, []
        if other := options.same_weights:
            absent = copy_same(self.parameters, self.tensors, other.parameters, other.tensors)
        if absent:
            with CheckpointFolder(folder) as files:
                new = load_parameters(files, absent, self.tensors)
        if new and self.head == "sequence":
            self._initialize_score(options.seed)

    def _initialize_score(self, seed: int) -> None:
        """Draw the weights of a new score head, the same under every layout.

        Their standard deviation is 1 / sqrt(H + 1) for hidden size H (Stiennon et al. 2020, appendix C).
        """
        generator = torch.Generator().manual_seed(seed)
        width = self.arch.hidden_size
        values = torch.randn(1, width, generator=generator) / (width + 1) ** 0.5
        tensor = self.tensors[len(self.chunks) - 1, "output_layer.weight"]
        if len(tensor):  # fully sharded, only one rank has the row
            tensor.copy_(values)

    def _prepare_value_head(self, critic: CriticConfig) -> None:
        """Apply the settings of the value head and load its weights if they are given; new ones are 0."""
        trunk(self.chunks[-1]).value_head.trains_trunk = critic.trunk_gradient
        if critic.path:
            own = [parameter for parameter in self.parameters if parameter.name.startswith("value_head.")]
            with CheckpointFolder(critic.path) as files:
                load_parameters(files, own, self.tensors)

    # ---- training ------------------------------------------------------------------------------------------

    def prepare_training(self, *, lr: float, total_steps: int) -> None:
        """Create gradient buffers, the optimizer and its schedule. Collective over `groups.world`."""
        assert not self.compute.fp8_weights, "models with weights in fp8 are frozen"
        if self.groups.is_member:
            self.chunks = wrap_data_parallel(self.chunks, self.groups, self.config)
        self.optimizer = make_optimizer(
            self.chunks,
            self.groups,
            self.config,
            dtype=self.compute.dtype,
            lr=lr,
            value_head_lr=self.value_head.lr if self.value_head is not None else None,
        )
        if not self.groups.is_member:
            return
        self.model_config.grad_scale_func = self.optimizer.scale_loss
        # The distributed optimizer may have moved parameters into its buffers; weight sync reads them there.
        self.tensors = tensors_of(self.chunks)
        self.scheduler = make_scheduler(self.optimizer, self.config, lr=lr, total_steps=total_steps)
        self._rest()

    def train_step(
        self,
        batch: RolloutBatch,
        micro_batches: Sequence[list[int]],
        loss: Loss,
        *,
        fields: tuple[str, ...],
        scale: LossScale,
    ) -> Sums:
        """Take one optimizer step on the mean of a loss over all data-parallel ranks.

        Args:
            batch: this rank's data-parallel share of the samples.
            micro_batches: sample indices into `batch` of each micro-batch; equal on all ranks of one
                data-parallel index.
            fields: per-token fields of `batch` that `loss` reads.
            scale: weights and divisor that turn per-token losses into a mean over all data-parallel ranks.

        Returns:
            The loss function's metrics (last stage only) and the gradient norm.

        Raises:
            ValueError: the gradient norm is not finite.
        """
        sums, head = Sums(), HEADS[self.head]
        if not self.groups.is_member:
            return sums
        self.onload_async()
        self.idle_gradients.onload_async()
        self.idle_gradients.wait()
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

        def on_last_stage(_: Engine, outputs: Outputs, micro: MicroBatch):
            loss_N, metrics = loss(outputs, micro)
            if scale.weight_B is not None:
                sample_N = batch.sample_id.to(loss_N.device)[micro.sample]
                loss_N = scale.weight_B.to(loss_N.device)[sample_N] * loss_N
            total = loss_N.sum()
            return total / scale.divisor, torch.zeros((), dtype=torch.int, device=total.device), metrics

        for metrics in run_schedule(
            [self],
            pack_all(self, batch, micro_batches, fields=fields, last_token=head.last_token),
            on_last_stage,
            forward_only=False,
        ):
            sums.merge(metrics)
        self.scheduler.step(1)  # before the optimizer step, so that the first warm-up rate is above 0
        with self._optimizer_state():
            _, grad_norm, _ = self.optimizer.step()
            if self.config.sharding == "full":
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()  # no memory between the steps
        sums.max(f"{head.metrics}/grad_norm", finite(float(grad_norm or 0.0), head))
        self.scattered = gathers_late(self.config, self.layout)
        return sums

    def gather_weights(self) -> None:
        """Gather `tensors` on every rank; call it before reading them. Collective over the layout."""
        if self.scattered:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self.scattered = False

    def weight_source(self) -> WeightSource:
        """Return the source of a weight sync; call after `prepare_training`, which may move the weights."""
        return WeightSource(
            arch=self.arch,
            tensors=self.tensors if self.groups.is_member else {},
            shards=self._shards_of("lm"),
            # Fully sharded weights that are trained are float32, their own master weights.
            dtype=torch.float32 if self.config.sharding == "full" else self.compute.dtype,
            gather=self.gather_weights,
        )

    def _shards_of(self, head: Head) -> Shards:
        """Return the parameters of every rank of the layout, for a model with this head."""
        shards = megatron_shards(self.arch, self.layout, spec=self.compute.spec, head=head)
        return row_shards(shards, self.layout) if self.config.sharding == "full" else shards

    # ---- memory --------------------------------------------------------------------------------------------

    def offload_async(self, what: str) -> None:
        """Start to offload training-only state; the weights stay on the GPU. No-op if already offloaded.

        Args:
            what: "none"; "grads", gradient buffers, which are dropped and whose memory PyTorch reuses at
                once; "optimizer", float32 master weights and Adam's moments, moved to pinned host memory;
                "all" and "steps", both.
        """
        if self.optimizer is None:
            return
        if what in GRADIENTS_LEAVE:
            self.idle_gradients.offload_async(
                keep=(), drop=gradients(self.chunks), stay=self.tensors.values()
            )
            self.idle_gradients.wait_offload(for_others=False)
        if what in OPTIMIZER_LEAVES:
            self.offload.offload_async(
                keep=optimizer_tensors(self.optimizer), drop=(), stay=self.tensors.values()
            )

    def wait_offload(self, *, for_others: bool = True) -> None:
        """Wait for the offload and free its GPU memory. Forward passes and weight sync still work.

        Args:
            for_others: release the memory to other allocators; False keeps it in PyTorch's cache.
        """
        self.offload.wait_offload(for_others=for_others)
        if for_others and self.steps_only:
            device.release_cached_memory()  # of the latest step

    def onload_async(self) -> None:
        """Start to load the optimizer state back; steps and checkpoints wait for it or start it.

        No-op with `steps_only`.
        """
        if not self.steps_only:
            self.offload.onload_async()

    @contextlib.contextmanager
    def _optimizer_state(self) -> Iterator[None]:
        """Have the optimizer state on the GPU within the context."""
        self.offload.onload_async()
        self.offload.wait()
        yield
        self._rest()

    def _rest(self) -> None:
        """Take the optimizer state off the GPU until the next step, with `steps_only`."""
        if self.steps_only:
            self.offload_async("optimizer")
            self.offload.wait_offload(for_others=False)

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Return this rank's share of the training state, and the scheduler's state.

        Tensors are float32 on the CPU, as from `checkpoint.gather`. Offloaded state is loaded back.
        Collective over the layout's ranks; empty on others.
        """
        if not self.groups.is_member:
            return {}
        self.gather_weights()
        with self._optimizer_state():
            tensors, step = checkpoint.gather(self.chunks, self.optimizer, self.groups, self.copies)
        return {"tensors": tensors, "optimizer_step": step, "scheduler": self.scheduler.state_dict()}

    def snapshot(self) -> tuple[checkpoint.Snapshot, dict]:
        """Snapshot weights and optimizer state, loadable under any layout, and JSON metadata for `load`.

        Collective over `groups.world`. A snapshot is valid until the next one is made.
        """
        state = self.state_dict()
        snapshot = checkpoint.Snapshot(state.pop("tensors", {}), self.chunks, self.optimizer, self.groups)
        return snapshot, self._from_first_member(state)

    def reserve_copies(self) -> int:
        """Allocate the host memory of all snapshots; return its bytes on this rank."""
        if self.groups.is_member:
            self.copies.reserve(self.chunks, self.optimizer, self.groups)
        return self.copies.num_bytes

    def norms(self) -> dict[str, float]:
        """Return norms of the weights and of Adam's moments; they do not depend on the layout or the rank."""
        norms = {}
        if self.groups.is_member:
            self.gather_weights()
            with self._optimizer_state():
                norms = optimizer_shards.norms(self.chunks, self.optimizer, self.groups)
        return self._from_first_member(norms)

    def _from_first_member(self, value: dict) -> dict:
        """Broadcast a value of the layout's first rank to all ranks."""
        world = self.groups.world
        return world.broadcast_object(value, src=world.ranks.index(self.layout.ranks[0]))

    def load(self, folder: Path, state: dict) -> None:
        """Load a snapshot from `folder` with its metadata, under any layout.

        Collective over `groups.world`.
        """
        if self.groups.is_member:
            self.gather_weights()
        with self._optimizer_state():
            checkpoint.read(folder, self.chunks, self.optimizer, self.groups, step=state["optimizer_step"])
        if self.groups.is_member:
            self.scheduler.num_steps = 0  # Megatron-Core adds the saved steps to this counter
            self.scheduler.load_state_dict(state["scheduler"])

    def export(self, folder: Path, *, template: str, head: Head | None = None) -> None:
        """Export a Hugging Face folder; config and tokenizer are `template`'s. Collective over the layout.

        Args:
            head: of the exported model; None: this one's, which on a shared trunk are two.
        """
        head = head or self.head
        if not self.groups.is_member:
            return
        self.gather_weights()
        export_folder(
            ShardedModel(
                arch=self.arch,
                head=head,
                dtype=self.compute.dtype,
                tensors=self.tensors,
                shards=self._shards_of(self.head),
            ),
            folder,
            template_folder=Path(template),
            ranks=self.groups.members,
            config=self.arch.to_hf(head=head, carry=with_dtype(read_config(template), self.compute.dtype)),
        )

    # ---- forward passes ------------------------------------------------------------------------------------

    def infer(
        self, batch: RolloutBatch, micro_batches: Sequence[list[int]], *, last_token: bool = False
    ) -> dict[str, Tensor] | None:
        """Return per-token outputs [B, T] float32 on the CPU; None on ranks without the last stage.

        Tokens that are no targets have 0. A language-model head returns "logprobs" and "entropy", a value
        head "values". With context parallelism each rank fills in its own tokens and the results are summed.
        """
        return infer_models([self], batch, micro_batches, HEADS[self.head].names, last_token=last_token)[0]

    def outputs(self, output: Tensor, micro: MicroBatch, model) -> Outputs:
        """Compute head outputs [N] of the target tokens from the last chunk's output [1, P, H or 1]."""
        softmax = Softmax(vocab_size=self.arch.vocab_size, temperature=self.temperature, group=self.groups.tp)
        return HEADS[self.head].compute(output.squeeze(0), model, micro, softmax)
