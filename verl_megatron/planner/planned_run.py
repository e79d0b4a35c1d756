"""A planned run as pure data: its models, their placement, and the work of an iteration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from math import ceil, prod

from parallel.layout import Layout
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import Head, is_language, megatron_parameters, vllm_parameters
from verl_megatron.algorithms import reuses_logprobs
from verl_megatron.algorithms.proximal import is_recomputed
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import (
    ModelSpec,
    ServingWorld,
    generated_samples,
    has_worlds,
    layout_of,
    models_of,
    models_of_world,
    num_ranks,
    num_rollout_ranks,
    scoring_worlds,
    shares_dtype,
    shares_trunk,
)
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.rollout.engine import num_replicas
from verl_megatron.rollout.vllm_weights.fp8 import is_quantized

ELEMENT_BYTES = {"auto": 2, "bfloat16": 2, "fp8": 2, "float16": 2, "float32": 4}  # auto: plans are for GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRole:
    """A Megatron-Core model of the run."""

    name: str  # actor, critic, reference, teacher, reward
    arch: Architecture
    layout: Layout
    head: Head
    trainable: bool
    layers: tuple[int, ...]  # layers of a rank, by pipeline stage
    elements: tuple[int, ...]  # parameters of a rank, by pipeline stage; exact, including padding
    fp8_weights: bool = False  # of the layers

    @classmethod
    def of(
        cls, *, name: str, arch: Architecture, layout: Layout, head: Head, trainable: bool
    ) -> "PlannedRole":
        """Build a role; ValueError if the architecture cannot be split over the layout."""
        sizes, split = part_elements(arch, layout.tp, head), layout.layers_of(arch.num_layers)
        layers = [0] * layout.pp
        for (stage, _), chunk in split.items():
            layers[stage] += len(chunk)
        elements = [count * sizes.layer for count in layers]
        elements[0] += sizes.embedding
        copied = (
            arch.tied and is_language(head) and layout.pp > 1
        )  # the last stage has its own copy of a tied embedding
        elements[-1] += sizes.output + copied * sizes.embedding
        return cls(
            name=name,
            arch=arch,
            layout=layout,
            head=head,
            trainable=trainable,
            layers=tuple(layers),
            elements=tuple(elements),
        )


def attention_channels(arch: Architecture) -> tuple[int, int]:
    """Channels of all query heads, and of all key-value heads."""
    return arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim


@dataclass(frozen=True, slots=True)
class PartElements:
    """Elements of the parts of a model on one rank."""

    embedding: int
    layer: int
    output: int  # final norm and head


@cache
def part_elements(arch: Architecture, tp: int, head: Head = "lm") -> PartElements:
    """Count Megatron's elements per part from a one-layer model; ValueError if `tp` cannot split it."""
    one, layout = replace(arch, num_layers=1), Layout(tp=tp, ranks=tuple(range(tp)))
    return _by_part(megatron_parameters(one, layout, 0, spec="local", head=head))


@cache
def served_elements(arch: Architecture, tp: int) -> PartElements:
    """Count vLLM's elements per part; a tied output is counted as the embedding."""
    return _by_part(vllm_parameters(replace(arch, num_layers=1), tp, 0))


def splits(count_elements: Callable[..., PartElements], arch: Architecture, tp: int, *head: Head) -> bool:
    """Return whether `tp` splits the model that `count_elements` counts."""
    try:
        return count_elements(arch, tp, *head) is not None
    except ValueError:
        return False


@cache
def fp8_saved_bytes(arch: Architecture, tp: int, element_bytes: int) -> int:
    """Count the bytes that fp8 saves in a layer of vLLM's: all but one of an element, less the scales."""
    layer = vllm_parameters(replace(arch, num_layers=1), tp, 0)
    return sum(
        prod(each.shape) * (element_bytes - 1) - 4 * each.shape[0]
        for each in layer
        if is_quantized(each.name)
    )


def _by_part(parameters) -> PartElements:
    parts = [0, 0, 0]
    for parameter in parameters:
        tensor = parameter.blocks[0].tensor
        parts[
            0 if tensor == "model.embed_tokens.weight" else 1 if tensor.startswith("model.layers.") else 2
        ] += prod(parameter.shape)
    return PartElements(*parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorld:
    """A scoring world with its models, on its ranks counted from 0."""

    world: ServingWorld
    roles: tuple[PlannedRole, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run on a number of ranks.

    Every sample is as long as the settings allow, unless `lengths` are given. Then seconds are those of these
    lengths, and memory that of the longest samples.
    """

    config: TrainerConfig
    world_size: int  # ranks that train
    ranks_per_host: int
    roles: tuple[PlannedRole, ...]  # on the ranks that train
    scoring: tuple[PlannedWorld, ...] = ()
    # Token budgets by role, per context-parallel rank; without an entry engine.tokens_per_micro_batch.
    budgets: Mapping[str, int] = field(default_factory=dict)
    lengths: Lengths | None = None  # of the responses
    unit: int = 1  # samples that stay in one micro-batch: 2 where pairs are compared

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        *,
        world_size: int,
        ranks_per_host: int = 8,
        read: Callable[[str], Architecture] = read_architecture,
        lengths: Lengths | None = None,
    ) -> "PlannedRun":
        """Plan the models that `build_run` would build.

        Args:
            read: returns the architecture of a model path.
            lengths: of the responses; None: all are as long as allowed.

        Raises:
            ValueError: an invalid model folder, layout or devices, or a layout that cannot split its model.
        """
        roles = [_planned(spec, read(spec.model.path), world_size) for spec in models_of(config)]
        num_replicas(
            world_size=num_rollout_ranks(config, world_size), tp=config.rollout.tp
        )  # refuses what does not divide
        try:
            served_elements(roles[0].arch, config.rollout.tp)
        except ValueError as error:
            raise ValueError(f"rollout.tp={config.rollout.tp}: {error}") from None
        return cls(
            config=config,
            world_size=world_size,
            ranks_per_host=min(ranks_per_host, num_ranks(config) if has_worlds(config) else world_size),
            roles=tuple(roles),
            scoring=_scoring(config, read),
            lengths=lengths,
        )

    @property
    def longest(self) -> "PlannedRun":
        """The run with all samples as long as allowed."""
        return replace(self, lengths=None)

    @property
    def actor(self) -> PlannedRole:
        return self.roles[0]

    @property
    def gpus(self) -> int:
        """GPUs of all worlds."""
        return num_ranks(self.config) if has_worlds(self.config) else self.world_size

    @property
    def replicas(self) -> int:
        return num_rollout_ranks(self.config, self.world_size) // self.config.rollout.tp

    @property
    def resharding_crosses_hosts(self) -> bool:
        """Whether weights come from other hosts.

        A pipeline stage's ranks are contiguous, so other stages may be on other hosts, and so are rows of
        fully sharded weights. Ranks outside the actor have no weights.
        """
        layout = self.actor.layout
        is_split = layout.pp > 1 or self.is_fully_sharded or self.gpus > len(layout.ranks)
        return self.gpus > self.ranks_per_host and is_split

    @property
    def steps_only(self) -> bool:
        """Whether optimizer state is on the GPU during optimizer steps only."""
        return self.config.reshard.offload == "steps"

    @property
    def is_fully_sharded(self) -> bool:
        """Whether weights are divided by rows among data-parallel ranks."""
        return self.config.engine.sharding == "full"

    @property
    def reads_peer_memory(self) -> bool:
        """Whether the ranks of a host read each other's weights, which must have vLLM's dtype for that.

        Fully sharded weights of the actor are float32.
        """
        if self.is_fully_sharded:
            return self.rollout_element_bytes == ELEMENT_BYTES["float32"]
        return shares_dtype(self.config)

    @property
    def streams(self) -> bool:
        """Whether replicas generate without pause; with partial=finish they pause at each update."""
        given = self.config.async_
        return given.is_stale and given.buffer == "window" and given.partial != "finish"

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.config.data.prompts_per_iteration * self.config.data.samples_per_prompt

    @property
    def generated_samples(self) -> int:
        """Samples that vLLM generates in an iteration, greedy ones included."""
        return generated_samples(self.config)

    @property
    def old_logprob_share(self) -> float:
        """Share of the samples whose old log-probs need a pass of their own."""
        if not is_recomputed(self.config.algorithm):
            return 0.0
        apart = (world.roles for world in self.scoring)
        models = {role.name for role in chain(self.roles, *apart)}
        reuses = reuses_logprobs(self.config.algorithm, models)
        return 1 - (reuses and not shares_trunk(self.config)) / self.config.algorithm.num_mini_batches

    @property
    def prompt_tokens(self) -> int:
        return self.config.data.max_prompt_tokens

    @property
    def response_tokens(self) -> float:
        """Tokens of a response: the most that are allowed, or the mean of `lengths`."""
        return self.config.rollout.max_tokens if self.lengths is None else self.lengths.mean

    @property
    def packed_tokens(self) -> float:
        """Tokens of a sample in a forward pass: all but the last, with its share of a shared prompt."""
        return ceil(self.prompt_tokens / self._sharing) + self.response_tokens - 1

    @property
    def attended_tokens(self) -> float:
        """Tokens that a packed one attends to, on average over a sample's.

        Half of a prompt those of the prompt, and all of it and half of the response those of the response.
        """
        prompt, response = self.prompt_tokens, self.response_tokens - 1
        square = response**2
        if self.lengths is not None:
            square = self.lengths.mean_square - 2 * self.lengths.mean + 1  # of a response without its last
        pairs = prompt**2 / (2 * self._sharing) + prompt * response + square / 2
        return pairs / self.packed_tokens

    @property
    def _sharing(self) -> int:
        """Samples that share the tokens of their prompt."""
        return self.config.data.samples_per_prompt if self.config.engine.shared_prompts else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight element in Megatron."""
        return ELEMENT_BYTES[self.config.engine.dtype]

    @property
    def rollout_element_bytes(self) -> int:
        """Bytes of an element of vLLM's weights, as they arrive, and KV cache."""
        dtype = self.config.rollout.dtype
        return self.element_bytes if dtype == "auto" else ELEMENT_BYTES[dtype]

    def snapshot_bytes(self, stage: int) -> float:
        """Bytes of the weights that leave a rank of a stage of the actor for a rollout world."""
        parts = self.actor.layout.dp if self.is_fully_sharded else 1
        return self.actor.elements[stage] * self.rollout_element_bytes / parts

    @property
    def fp8_saved_bytes(self) -> int:
        """Bytes that rollout.weight_dtype saves on a rank of vLLM's."""
        arch, rollout = self.actor.arch, self.config.rollout
        if rollout.weight_dtype != "fp8":
            return 0
        return arch.num_layers * fp8_saved_bytes(arch, rollout.tp, self.rollout_element_bytes)

    def samples_of_rank(self, role: PlannedRole) -> int:
        """Samples of a mini-batch on the data-parallel rank with the most."""
        units = self.samples / self.unit
        return self.unit * ceil(units / self.config.algorithm.num_mini_batches / role.layout.dp)

    def tokens_per_micro_batch(self, role: PlannedRole) -> int:
        """Token budget of a role's micro-batches; the reference shares those of the actor beside it."""
        shares = role.name == "reference" and role in self.roles
        budget = self.budgets.get("actor" if shares else role.name)
        return budget or self.config.engine.tokens_per_micro_batch

    def micro_batches(self, role: PlannedRole) -> tuple[int, int]:
        """Return a data-parallel rank's micro-batches per mini-batch, and the samples of a full one.

        Follows verl_megatron/data/packing.py.
        """
        layout, samples = role.layout, self.samples_of_rank(role)
        length = self.unit * (self.packed_tokens + 1)
        units = max(1, int(self.tokens_per_micro_batch(role) * layout.cp // length))
        together = min(samples, units * self.unit)
        count = ceil(samples / together)
        return (ceil(count / layout.pp) * layout.pp if layout.vpp > 1 else count), together


def _scoring(config: TrainerConfig, read: Callable[[str], Architecture]) -> tuple[PlannedWorld, ...]:
    worlds = []
    for world in scoring_worlds(config):
        specs = models_of_world(config, world)
        roles = [_planned(spec, read(spec.model.path), len(world.ranks)) for spec in specs]
        worlds.append(PlannedWorld(world=world, roles=tuple(roles)))
    return tuple(worlds)


def _planned(spec: ModelSpec, arch: Architecture, world_size: int) -> PlannedRole:
    try:
        layout = layout_of(spec.model, world_size)
        role = PlannedRole.of(
            name=spec.name, arch=arch, layout=layout, head=spec.head, trainable=spec.trainable
        )
        return replace(role, fp8_weights=bool(spec.fp8_weights_by))
    except ValueError as error:
        raise ValueError(f"{spec.section}.layout={spec.model.layout!r}: {error}") from None


def communicators(run: PlannedRun) -> int:
    """Count the NCCL communicators of a rank: the world's, those of the models' layouts, and vLLM's.

    Models with equal layouts share them (parallel/groups.py).
    """
    groups = set()
    for layout in {role.layout for role in run.roles}:
        for axes in ("tp", "cp", "dp", "pp", "cp dp", "tp cp", "tp pp", "tp cp dp", "tp cp dp pp"):
            if spanned := tuple(axis for axis in axes.split() if getattr(layout, axis) > 1):
                groups.add((layout, spanned))
    vllm = 1 + 2 * (
        run.config.rollout.tp > 1
    )  # its world group; for tensor parallelism, PyTorch's and its own
    return len(groups) + (1 + vllm) * (run.world_size > 1)
