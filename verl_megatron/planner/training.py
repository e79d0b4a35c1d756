"""Predicted seconds of forward passes and optimizer steps.

Every micro-batch on every pipeline stage takes the longer of the GPU's compute time and the process's launch
time. The GPU's time is a sum of matrix products, attention, memory-bound steps and tensor-parallel exchanges,
which do not overlap here. A backward pass has twice the products of a forward pass and 2.5 times its
attention; recomputation adds a forward pass. Letters as in activations.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.weights.rules import is_language
from verl_megatron.data.packing import LOGIT_CHUNK_BYTES
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRole, PlannedRun, attention_channels
from verl_megatron.planner.static import most_optimizer_bytes

ACCUMULATED_BYTES = 8  # per parameter and micro-batch: its float32 gradient is read and written
# Of a fully sharded model, per parameter and micro-batch, beside that. Weights for a pass: a rank's float32
# rows are rounded, and those of several ranks put in their places. Gradients: packed and added, as measured.
SHARD_BYTES, PLACED_BYTES, REDUCED_BYTES = 6, 4, 28
# Per parameter, read and written in float32: the gradient norm (4), clipping (8), Adam on gradient, master
# weight and moments (28), the updated weight (6).
STEP_BYTES = 46
HEAD_PASSES = (2, 3)  # over the logits in log_probs.py, forward and backward
HEAD_WEIGHT_BYTES = 8  # per element of the head's gradient and chunk of tokens
# transformer-engine in fp8 relative to bfloat16: products, memory-bound steps (inputs are scaled and cast),
# forward launches.
FP8 = {"products": 0.54, "memory": 2.0, "launch": 2.0}
FLOAT32_SLOWDOWN = 12.0  # PyTorch does not use TF32 by default; the vendor's rates differ by 15
PASSES = {"attention": 2.5, "memory": 2.0, "products": 2.0}  # cost of a backward pass in forward passes


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch on one pipeline stage."""

    forward: float
    backward: float


def slowdown(element_bytes: int) -> float:
    """Slowdown of matrix products relative to bfloat16."""
    return FLOAT32_SLOWDOWN if element_bytes == 4 else 1.0


def forward_flops(run: PlannedRun, role: PlannedRole) -> float:
    """FLOPs of one pass over all samples of an iteration."""
    packed, asked = run.samples * run.packed_tokens, run.samples * run.response_tokens
    return (
        role.arch.num_layers * packed * sum(layer_flops(run, role))
        + is_language(role.head) * 2 * asked * role.arch.hidden_size * role.arch.vocab_size
    )


def layer_flops(run: PlannedRun, role: PlannedRole) -> tuple[float, float]:
    """FLOPs of a layer's forward pass per token: products, and causal attention.

    Products are 2 h (2q + 2k + 3f), attention is 4 q times the tokens that one attends to.
    """
    arch = role.arch
    queries, keys = attention_channels(arch)
    return 2.0 * arch.hidden_size * (
        2 * queries + 2 * keys + 3 * arch.intermediate_size
    ), 4.0 * queries * run.attended_tokens


def infer_seconds(run: PlannedRun, machine: Machine, roles: Sequence[PlannedRole]) -> float:
    """Seconds of a forward pass over all samples by models of one layout.

    The models follow each other through one pipeline with all mini-batches.
    """
    count = run.micro_batches(roles[0])[0] * run.config.algorithm.num_mini_batches * len(roles)
    stages = [0.0] * roles[0].layout.pp  # of the average model
    for role in roles:
        for stage, each in enumerate(passes(run, machine, role)):
            stages[stage] += each.forward / len(roles)
    return pipeline_seconds(roles[0], count, stages)


def step_seconds(run: PlannedRun, machine: Machine, role: PlannedRole) -> float:
    """Seconds of one optimizer step on a mini-batch."""
    stages = passes(run, machine, role)
    work = pipeline_seconds(
        role, run.micro_batches(role)[0], [each.forward + each.backward for each in stages]
    )
    return work + optimizer_seconds(run, machine, role, last_backward=min(each.backward for each in stages))


def pipeline_seconds(role: PlannedRole, count: int, stages: list[float]) -> float:
    """Seconds of a 1F1B pipeline (Narayanan et al. 2021).

    The slowest stage works on all micro-batches; the bubble is the other stages' time of one, divided by vpp.
    """
    return count * max(stages) + (sum(stages) - max(stages)) / role.layout.vpp


def passes(run: PlannedRun, machine: Machine, role: PlannedRole) -> list[Pass]:
    """Seconds of an average micro-batch on each pipeline stage."""
    count = run.micro_batches(role)[0]
    samples = run.samples_of_rank(role) / count
    tokens, asked = (
        samples * run.packed_tokens / role.layout.cp,
        samples * run.response_tokens / role.layout.cp,
    )
    layer = _layer_pass(run, machine, role, tokens)
    sharded, copied = _sharded_exchange(run, machine, role), _sharded_copies(run, machine, role)
    sent = _pipeline_exchange(run, machine, role, tokens)
    stages = []
    for stage in range(role.layout.pp):
        head = (
            _head_pass(machine, role, asked, run.element_bytes)
            if is_language(role.head) and stage == role.layout.pp - 1
            else Pass(0.0, 0.0)
        )
        accumulated = role.elements[stage] * ACCUMULATED_BYTES / machine.copy_rate
        layers = role.layers[stage]
        stages.append(
            Pass(
                max(layers * layer.forward + head.forward + copied.forward, sharded.forward) + sent,
                max(layers * layer.backward + head.backward + accumulated + copied.backward, sharded.backward)
                + sent,
            )
        )
    return stages


def _layer_pass(run: PlannedRun, machine: Machine, role: PlannedRole, tokens: float) -> Pass:
    """Seconds of a layer: the GPU's, or the process's if launching takes longer."""
    arch, layout, recompute = role.arch, role.layout, run.config.engine.recompute
    computes_in_fp8 = run.config.engine.dtype == "fp8" or role.fp8_weights
    fp8 = FP8 if computes_in_fp8 else dict.fromkeys(FP8, 1.0)
    (queries, keys), tp = attention_channels(arch), layout.tp
    product_flops, attention_flops = (tokens * flops / tp for flops in layer_flops(run, role))
    slower = slowdown(run.element_bytes)
    products = product_flops / machine.layer_flops * slower * fp8["products"]
    attention = max(
        attention_flops / machine.attention_flops * slower, _context_exchange(run, machine, role, tokens)
    )
    # Read and written: norms 8h and residuals 12h; rotary embedding, attention operands and the gate on this
    # rank's heads and channels.
    outer = 20 * arch.hidden_size / (tp if layout.sequence_parallel else 1)
    touched = outer + (4 * (queries + keys) + 2 * (2 * queries + 2 * keys) + 6 * arch.intermediate_size) / tp
    memory = tokens * touched * run.element_bytes / 2 / machine.copy_rate * fp8["memory"]
    exchange = _tensor_exchange(run, machine, role, tokens)
    forward = products + attention + memory + exchange
    backward = PASSES["products"] * products + PASSES["attention"] * attention + PASSES["memory"] * memory
    # Under sequence parallelism the backward pass gathers the inputs again.
    backward += exchange * (1.5 if layout.sequence_parallel else 1.0)
    forward, backward = (
        max(forward, machine.forward_launch_s * fp8["launch"]),
        max(backward, machine.backward_launch_s),
    )
    return Pass(forward, backward + {"none": 0.0, "selective": attention, "full": forward}[recompute])


def _head_pass(machine: Machine, role: PlannedRole, asked: float, element_bytes: int) -> Pass:
    """Seconds of log_probs.py: logits once forward; backward again, with the two gradients.

    The gradients are those of the hidden states and of the weight.
    """
    logits, hidden = asked * role.arch.vocab_size / role.layout.tp, role.arch.hidden_size
    product = 2 * logits * hidden / machine.layer_flops * slowdown(element_bytes)
    forward_bytes, backward_bytes = (logits * element_bytes * count for count in HEAD_PASSES)
    chunks = max(1.0, element_bytes * logits / LOGIT_CHUNK_BYTES)
    backward_bytes += chunks * HEAD_WEIGHT_BYTES * role.arch.vocab_size / role.layout.tp * hidden
    return Pass(product + forward_bytes / machine.copy_rate, 3 * product + backward_bytes / machine.copy_rate)


def optimizer_seconds(run: PlannedRun, machine: Machine, role: PlannedRole, *, last_backward: float) -> float:
    """Seconds of the optimizer step outside the forward and backward passes.

    Gradients are zeroed, reduced over dp·cp (concurrently with the last backward pass) and applied. Weights
    are gathered (concurrently with the next forward pass, except after an iteration's last step).
    """
    count, layout = max(role.elements), role.layout
    moved = 0.0
    if run.steps_only:  # from host memory, and back
        moved = 2 * most_optimizer_bytes(run, role) / machine.pinned_rate
    if run.is_fully_sharded:  # passes reduce and gather
        return STEP_BYTES * count / layout.dp / machine.copy_rate + moved
    replicas = layout.dp * layout.cp
    distributed = run.config.engine.distributed_optimizer
    own = count / replicas if distributed else count
    rate = group_rate(run, machine, span=layout.tp * replicas, stride=layout.tp)
    share = (replicas - 1) / replicas
    reduced = 4 * count * share / rate * (1 if distributed else 2)
    steps = run.config.algorithm.epochs * run.config.algorithm.num_mini_batches
    gathered = run.element_bytes * count * share / rate / steps if distributed else 0.0
    applied = (4 * count + STEP_BYTES * own) / machine.copy_rate
    return applied + moved + max(0.0, reduced - last_backward) + gathered


# ---- links ---------------------------------------------------------------------------------------------


def group_rate(run: PlannedRun, machine: Machine, *, span: int, stride: int = 1) -> float:
    """B/s per rank in a collective over a group that covers `span` ranks, with members `stride` ranks apart.

    Between hosts, a ring crosses each host boundary once for all members on that host, on the adapters of
    each. A group that would fit a host but does not divide it crosses a boundary, with one member in the
    worst case.
    """
    if run.world_size <= run.ranks_per_host or run.ranks_per_host % span == 0:
        return machine.same_host_rate
    if span <= run.ranks_per_host:
        return min(machine.same_host_rate, machine.other_host_rate)
    return min(machine.same_host_rate, machine.other_host_rate * max(1, run.ranks_per_host // stride))


def _tensor_exchange(run: PlannedRun, machine: Machine, role: PlannedRole, tokens: float) -> float:
    """Seconds of a layer's forward all-reduces: two, or the equivalent gathers and scatters.

    Sequence parallelism uses gathers and scatters.
    """
    tp = role.layout.tp
    if tp == 1:
        return 0.0
    moved = 4 * (tp - 1) / tp * tokens * role.arch.hidden_size * run.element_bytes
    return moved / group_rate(run, machine, span=tp) + 4 * machine.collective_s


def _sharded_exchange(run: PlannedRun, machine: Machine, role: PlannedRole) -> Pass:
    """Seconds to gather the weights of a fully sharded model and to reduce its float32 gradients.

    Both happen concurrently with the layers' work, in every micro-batch.
    """
    if not run.is_fully_sharded:
        return Pass(0.0, 0.0)
    dp = role.layout.dp
    moved = sum(role.elements) * (dp - 1) / dp / group_rate(run, machine, span=dp)
    return Pass(run.element_bytes * moved, (run.element_bytes + 4) * moved)


def _sharded_copies(run: PlannedRun, machine: Machine, role: PlannedRole) -> Pass:
    """Seconds to round and to place gathered weights of a fully sharded model, and its gradients."""
    if not run.is_fully_sharded:
        return Pass(0.0, 0.0)
    dp, elements = role.layout.dp, sum(role.elements)
    gathered = SHARD_BYTES / dp + PLACED_BYTES * (dp > 1)
    return Pass(
        gathered * elements / machine.copy_rate, (gathered + REDUCED_BYTES) * elements / machine.copy_rate
    )


def _context_exchange(run: PlannedRun, machine: Machine, role: PlannedRole, tokens: float) -> float:
    """Seconds to receive the other context-parallel ranks' keys and values, concurrently with attention.

    Counted per forward pass of a layer.
    """
    layout, arch = role.layout, role.arch
    if layout.cp == 1:
        return 0.0
    moved = (
        (layout.cp - 1)
        * tokens
        * 2
        * max(1, arch.num_kv_heads / layout.tp)
        * arch.head_dim
        * run.element_bytes
    )
    return (
        moved / group_rate(run, machine, span=layout.tp * layout.cp, stride=layout.tp)
        + (layout.cp - 1) * machine.collective_s
    )


def _pipeline_exchange(run: PlannedRun, machine: Machine, role: PlannedRole, tokens: float) -> float:
    """Seconds to send a micro-batch's hidden states to the next stage, once for each virtual stage."""
    layout = role.layout
    if layout.pp == 1:
        return 0.0
    step = layout.tp * layout.cp * layout.dp
    rate = machine.same_host_rate if step < run.ranks_per_host else machine.other_host_rate
    sent = tokens * role.arch.hidden_size * run.element_bytes / (layout.tp if layout.sequence_parallel else 1)
    return layout.vpp * (sent / rate + machine.collective_s)
