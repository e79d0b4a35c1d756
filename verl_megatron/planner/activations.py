"""Activation memory of a training step between forward and backward, after Korthikanti et al. 2022.

The paper is arXiv 2205.05198. Here attention is fused and stores no score matrix, the feed-forward is gated,
and query and key-value heads differ in number. Letters, per token of the sequence: h hidden size, q and k
channels of all query and of all key-value heads, f feed-forward channels, t tensor-parallel size.

Elements stored per layer: inputs and outputs of the two norms (4h, divided by t only under sequence
parallelism); queries, keys and values after rotary embedding (q + 2k), the attention output (q), both inputs
of the gate (2f) and their product (f), all divided by t. With norms on queries and keys, also the inputs of
these norms (q + k). Full recomputation stores only the layer's input (h).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Protocol

from parallel.weights.rules import is_language
from verl_megatron.data.packing import LOGIT_CHUNK_BYTES, MICRO_BATCHES_PER_STAGE, USED_SHARE
from verl_megatron.planner.planned_run import PlannedRole, PlannedRun, attention_channels, part_elements


def layer_elements(role: PlannedRole) -> float:
    """Elements that a layer stores per token of the sequence, on one tensor-parallel rank."""
    arch, tp = role.arch, role.layout.tp
    queries, keys = attention_channels(arch)
    inner = 2 * queries + 2 * keys + 3 * arch.intermediate_size + (queries + keys) * arch.qk_norm
    return 4 * arch.hidden_size / _outer_split(role) + inner / tp


def _outer_split(role: PlannedRole) -> int:
    """Number of parts into which the hidden states between tensor-parallel products are split."""
    return role.layout.tp if role.layout.sequence_parallel else 1


def micro_batches_in_flight(role: PlannedRole, stage: int, count: int) -> float:
    """Micro-batches whose activations a stage stores at once under 1F1B.

    The unit is the stage's whole layers. Interleaved stages (Narayanan et al. 2021) run 2 (pp - stage - 1) +
    (vpp - 1) pp chunks ahead, and one more.
    """
    layout = role.layout
    if layout.vpp == 1:
        return min(layout.pp - stage, count)
    return (
        min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, count * layout.vpp) / layout.vpp
    )


def training_bytes(run: PlannedRun, role: PlannedRole, stage: int) -> float:
    """Peak activation bytes on a rank of `stage` during an update."""
    count, samples = run.micro_batches(role)
    tokens, width = samples * run.packed_tokens / role.layout.cp, run.element_bytes
    layer = tokens * layer_elements(role) * width
    kept = (
        tokens * role.arch.hidden_size * width / _outer_split(role)
        if run.config.engine.recompute == "full"
        else layer
    )
    in_flight = micro_batches_in_flight(role, stage, count)
    # One layer more: the gradients of the current layer, or the layer being recomputed.
    return (
        in_flight * role.layers[stage] * kept
        + layer
        + head_bytes(run, role, stage, backward=True)
        + fp8_weight_bytes(run, role, stage, copies=2)
        + gathered_bytes(run, role, backward=True)
    )


def inference_bytes(run: PlannedRun, role: PlannedRole, stage: int) -> float:
    """Peak activation bytes of a forward pass without gradients: those of one layer and of the head."""
    tokens = run.micro_batches(role)[1] * run.packed_tokens / role.layout.cp
    return (
        tokens * layer_elements(role) * run.element_bytes
        + head_bytes(run, role, stage, backward=False)
        + fp8_weight_bytes(run, role, stage, copies=1)
        + gathered_bytes(run, role, backward=False)
    )


def gathered_bytes(run: PlannedRun, role: PlannedRole, *, backward: bool) -> float:
    """Bytes of the weights that a pass of a fully sharded model gathers, and of their gradients.

    Two layers are there at once, and the head all the time. Gradients are those of one layer, of the
    embedding or of the head: as computed, in float32 for the sum over the ranks, and a rank's share of that.
    """
    if not run.is_fully_sharded:
        return 0.0
    parts = part_elements(role.arch, 1)
    is_tied = role.arch.tied and is_language(role.head)
    head = sum(role.elements) - sum(role.layers) * parts.layer - (0 if is_tied else parts.embedding)
    largest = max(parts.layer, parts.embedding, head)
    gradients = (run.element_bytes + 4 + 4 / role.layout.dp) * largest if backward else 0.0
    return (2 * parts.layer + head) * run.element_bytes + gradients


def fp8_weight_bytes(run: PlannedRun, role: PlannedRole, stage: int, *, copies: int) -> float:
    """Bytes of transformer-engine's fp8 copies of bfloat16 weights during a pass.

    There is one copy as is, and one transposed for the backward pass.
    """
    return (
        copies * role.layers[stage] * part_elements(role.arch, role.layout.tp).layer
        if run.config.engine.dtype == "fp8" and not role.fp8_weights
        else 0.0
    )


def head_bytes(run: PlannedRun, role: PlannedRole, stage: int, *, backward: bool) -> float:
    """Bytes that verl_megatron/models/log_probs.py allocates on the last stage.

    These are the hidden states of all tokens and of the target tokens, and chunks of logits.
    """
    if stage != role.layout.pp - 1 or not is_language(role.head):
        return 0.0
    samples, vocabulary = run.micro_batches(role)[1], role.arch.vocab_size / role.layout.tp
    packed, asked = (samples * count / role.layout.cp for count in (run.packed_tokens, run.response_tokens))
    hidden = (packed + asked) * role.arch.hidden_size * run.element_bytes
    logits = run.element_bytes * ceil(asked) * vocabulary
    chunk = min(LOGIT_CHUNK_BYTES, logits)
    if not backward:
        return hidden + chunk
    # The weight's gradient; several chunks are also summed in float32.
    return (
        2 * hidden
        + chunk
        + vocabulary * role.arch.hidden_size * (run.element_bytes + 4 * (logits > LOGIT_CHUNK_BYTES))
    )


# ---- engine.dynamic_batching, as verl_megatron/roles/token_budget.py measures it ---------------------------


class Kind(Protocol):
    """Ranks with the same memory use (planner/memory.py)."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def phases(self) -> Mapping[str, Mapping[str, float]]: ...
    def total(self, phase: str) -> float: ...


def fit_budgets(
    run: PlannedRun, gpu_bytes: float, kinds_of: Callable[[PlannedRun], Sequence[Kind]]
) -> PlannedRun:
    """Return the run with the micro-batches that fit into a GPU; as it is without engine.dynamic_batching.

    Args:
        kinds_of: plans the memory of a run.
    """
    if not run.config.engine.dynamic_batching or run.budgets:
        return run
    kinds, found = kinds_of(row_by_row(run)), {}
    for role in run.roles:
        if not role.trainable:
            continue
        beside = {"optimizer"} if run.steps_only else set()  # what is not there during passes
        room = [
            (kind, gpu_bytes - sum_without(kind.phases[phase], beside | {"activations"}))
            for kind in kinds
            if set(kind.ranks) & set(role.layout.ranks)
            for phase in (f"{role.name}_update" if f"{role.name}_update" in kind.phases else "actor_update",)
        ]
        rows = min(_fitting_rows(run, role, kind, free * USED_SHARE) for kind, free in room)
        found[role.name] = _limited(run, role, int(_tokens_of(run, role, 1) * rows))
    return replace(run, budgets=found)


def sum_without(parts: Mapping[str, float], names: Collection[str]) -> float:
    """Return the bytes of the other parts of a phase."""
    return sum(size for part, size in parts.items() if part not in names)


def row_by_row(run: PlannedRun) -> PlannedRun:
    """Return the run with the least memory that engine.dynamic_batching can do with."""
    if not run.config.engine.dynamic_batching:
        return run
    trained = (role for role in run.roles if role.trainable)
    return replace(run, budgets={role.name: _tokens_of(run, role, run.unit) for role in trained})


def _tokens_of(run: PlannedRun, role: PlannedRole, rows: int) -> int:
    """Tokens of rows on a context-parallel rank."""
    return int(-(-(run.packed_tokens + 1) * rows // role.layout.cp))


def _fitting_rows(run: PlannedRun, role: PlannedRole, kind: Kind, room: float) -> float:
    """Rows of a micro-batch whose update takes `room` bytes on a kind of rank; at least one unit."""
    layout, most, unit = role.layout, run.samples_of_rank(role), run.unit
    rank = min(set(kind.ranks) & set(layout.ranks))
    stage = layout.ranks.index(rank) * layout.pp // len(layout.ranks)
    one, two = (
        training_bytes(replace(run, budgets={role.name: _tokens_of(run, role, rows)}), role, stage)
        for rows in (unit, 2 * unit)
    )
    return min(unit * (1 + max(0.0, room - one) / (two - one)), most) if two > one else most


def _limited(run: PlannedRun, role: PlannedRole, tokens: int) -> int:
    """Limit a budget so that no pipeline stage waits for lack of micro-batches."""
    layout, usual = role.layout, run.config.engine.tokens_per_micro_batch
    if layout.pp == 1:
        return tokens
    share = _tokens_of(run, role, run.samples_of_rank(role)) // (layout.pp * MICRO_BATCHES_PER_STAGE)
    return min(tokens, max(usual, share))
