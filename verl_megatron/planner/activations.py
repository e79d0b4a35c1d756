"""Bytes that a training step holds between its forward and its backward pass, after Korthikanti et al. 2022 (arXiv 2205.05198).

Attention is fused and keeps no square; the feed-forward is gated; query and key-value heads differ in number. Letters, per token of
the sequence: h hidden size, q and k channels of all query and of all key-value heads, f feed-forward channels, t tensor-parallel size.

A layer keeps, in elements: the inputs of its two norms and their results (4h, divided by t only under sequence parallelism); queries,
keys and values after the rotation (q + 2k), attention's result (q), both halves before the gate (2f) and the product after it (f), all
divided by t. With norms on queries and keys also what went into these (q + k). Full recomputation keeps the layer's input (h) alone.
"""

from math import ceil

from verl_megatron.models.log_probs import CHUNK_BYTES
from verl_megatron.planner.case import Case, PlannedRole, attention_channels, part_elements


def layer_elements(role: PlannedRole) -> float:
    """Elements that a layer keeps for each token of the sequence, on one tensor-parallel rank."""
    arch, tp = role.arch, role.layout.tp
    queries, keys = attention_channels(arch)
    inner = 2 * queries + 2 * keys + 3 * arch.intermediate_size + (queries + keys) * arch.qk_norm
    return 4 * arch.hidden_size / _outer_split(role) + inner / tp


def _outer_split(role: PlannedRole) -> int:
    """Into how many parts the hidden states between the split products are cut."""
    return role.layout.tp if role.layout.sequence_parallel else 1


def micro_batches_in_flight(role: PlannedRole, stage: int, count: int) -> float:
    """Micro-batches whose activations a stage holds at once under 1F1B, in units of the stage's whole layers.

    Interleaved stages (Narayanan et al. 2021) run 2 (pp - stage - 1) + (vpp - 1) pp chunks ahead, and one more.
    """
    layout = role.layout
    if layout.vpp == 1:
        return min(layout.pp - stage, count)
    return (
        min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, count * layout.vpp) / layout.vpp
    )


def training_bytes(case: Case, role: PlannedRole, stage: int) -> float:
    """The most that activations take on a rank of `stage` during an update."""
    count, rows = case.micro_batches(role)
    tokens, width = rows * case.packed_tokens / role.layout.cp, case.element_bytes
    layer = tokens * layer_elements(role) * width
    kept = (
        tokens * role.arch.hidden_size * width / _outer_split(role)
        if case.config.engine.recompute == "full"
        else layer
    )
    in_flight = micro_batches_in_flight(role, stage, count)
    # One layer more: the gradients of the layer that is under way, or the layer that is computed again.
    return (
        in_flight * role.layers[stage] * kept
        + layer
        + head_bytes(case, role, stage, backward=True)
        + fp8_weight_bytes(case, role, stage, copies=2)
    )


def inference_bytes(case: Case, role: PlannedRole, stage: int) -> float:
    """The most that a forward pass without gradients takes: one layer's values, and the head's."""
    tokens = case.micro_batches(role)[1] * case.packed_tokens / role.layout.cp
    return (
        tokens * layer_elements(role) * case.element_bytes
        + head_bytes(case, role, stage, backward=False)
        + fp8_weight_bytes(case, role, stage, copies=1)
    )


def fp8_weight_bytes(case: Case, role: PlannedRole, stage: int, *, copies: int) -> float:
    """transformer-engine's copies of the layers' weights during a pass, in fp8: as they are, and for the backward pass transposed."""
    return (
        copies * role.layers[stage] * part_elements(role.arch, role.layout.tp).layer
        if case.config.engine.dtype == "fp8"
        else 0.0
    )


def head_bytes(case: Case, role: PlannedRole, stage: int, *, backward: bool) -> float:
    """What verl_megatron/models/log_probs.py takes on the last stage: hidden states of all and of the asked tokens, and chunks of logits."""
    if stage != role.layout.pp - 1 or role.head != "lm":
        return 0.0
    rows, vocabulary = case.micro_batches(role)[1], role.arch.vocab_size / role.layout.tp
    packed, asked = (rows * count / role.layout.cp for count in (case.packed_tokens, case.response_tokens))
    hidden = (packed + asked) * role.arch.hidden_size * case.element_bytes
    logits = case.element_bytes * ceil(asked) * vocabulary
    chunk = min(CHUNK_BYTES, logits)
    if not backward:
        return hidden + chunk
    # The weight's gradient: of several chunks a sum in float32, too.
    return (
        2 * hidden
        + chunk
        + vocabulary * role.arch.hidden_size * (case.element_bytes + 4 * (logits > CHUNK_BYTES))
    )
