"""The parts of a plan against simpler truths: weight maps, schedules step by step, the queue, the packing."""

from dataclasses import dataclass, replace
from math import prod

import pytest

from parallel.layout import Layout
from parallel.placement import busiest_elements, place
from parallel.reshard.in_place.planner import Sides, least_layouts
from parallel.weights.rules import megatron_parameters, vllm_parameters
from tests.planned import H200, actor_alone, arch, run_config, run_of
from tests.scripted_engine import admission_of
from verl_megatron.data.packing import micro_batches
from verl_megatron.planner.activations import micro_batches_in_flight, training_bytes
from verl_megatron.planner.machine import GIB
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRole, part_elements
from verl_megatron.planner.reshard.memory import megatron_addresses
from verl_megatron.planner.rollout import serving
from verl_megatron.planner.rollout.decoding import rollout_seconds, samples_at_once
from verl_megatron.planner.search.choices import configured, uneven_stages
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.static import static_bytes
from verl_megatron.planner.text import samples_together
from verl_megatron.planner.training import group_rate, pipeline_seconds, step_seconds
from verl_megatron.planner.weight_sync import moved_bytes
from verl_megatron.rollout.dispatch import Dispatcher, WorkQueue

TIED = [("llama3-1b", "tp2pp4"), ("llama3-1b", "tp4"), ("qwen2.5-1.5b", "tp2pp2vpp2")]
SPLITS = [
    *TIED,
    ("llama3-8b", "tp2pp2"),
    ("llama3-8b", "tp8sp"),
    ("qwen2.5-7b", "pp4"),
    ("llama3-70b", "tp8pp4"),
]


@pytest.mark.parametrize("head", ["lm", "token", "sequence", "lm_token"])
@pytest.mark.parametrize(("model", "text"), SPLITS)
def test_elements_are_those_of_the_weight_map(model, text, head):
    layout = Layout.parse(text, ranks=tuple(range(32)))
    role = PlannedRole.of(name="actor", arch=arch(model), layout=layout, head=head, trainable=True)
    for stage in range(layout.pp):
        parameters = megatron_parameters(
            arch(model), layout, layout.rank_of(pp=stage, tp=layout.tp - 1), spec="te", head=head
        )
        assert role.elements[stage] == sum(prod(parameter.shape) for parameter in parameters)


@pytest.mark.parametrize("text", ["tp2", "tp8", "tp2dp2", "pp2"])
def test_shared_weights_are_those_that_lie_in_megatrons(text):
    """Parameter by parameter, where both sides have the same tensor-parallel size."""
    gpus = 8
    layout = Layout.parse(text.replace("dp2", ""), ranks=tuple(range(gpus)))
    config = run_config(text.replace("dp2", ""), rollout=layout.tp)
    config.reshard.mode = "share"
    run = actor_alone(config, gpus)
    for stage in range(layout.pp):
        mine = megatron_parameters(arch("llama3-8b"), layout, layout.rank_of(pp=stage), spec="te")
        theirs = vllm_parameters(arch("llama3-8b"), layout.tp, 0)
        memory = {0: megatron_addresses(mine, 2)}
        sides = Sides(source={0: mine}, destination={0: theirs}, memory=memory, element_bytes=2)
        assert serving.own_rollout_bytes(run, stage) == least_layouts(sides, in_place=False)[0].own_bytes


def test_states_of_a_learning_model():
    """2 + 4 + 12 bytes a parameter, the last over dp; in float32 4 + 4 + 8."""
    run = run_of(run_config("tp2sp"), 4)
    n = run.actor.elements[0]
    assert (
        static_bytes(run, run.actor, 0).weights,
        static_bytes(run, run.actor, 0).gradients,
        static_bytes(run, run.actor, 0).optimizer,
    ) == (2 * n, 4 * n, 6 * n)
    whole = run_of(run_config("tp2sp", distributed_optimizer=False), 4)
    assert static_bytes(whole, whole.actor, 0).optimizer == 12 * n
    single = run_of(run_config("tp2sp", dtype="float32"), 4)
    assert (
        static_bytes(single, single.actor, 0).weights,
        static_bytes(single, single.actor, 0).optimizer,
    ) == (4 * n, 4 * n)


def test_full_sharding_divides_all_states():
    """4 + 4 + 8 bytes a parameter over dp; offloaded or not, gradients are there during updates only."""
    run = run_of(run_config("tp1", sharding="full"), 4)
    n, states = run.actor.elements[0], static_bytes(run, run.actor, 0)
    assert (states.weights, states.gradients, states.optimizer) == (n, n, 2 * n)
    frozen = replace(run.actor, trainable=False)
    assert static_bytes(run, frozen, 0).weights == 2 * n / 4
    whole = run_of(run_config("tp1"), 4)
    parts = part_elements(run.actor.arch, 1)
    more = training_bytes(run, run.actor, 0) - training_bytes(whole, whole.actor, 0)
    assert more >= 2 * (parts.output + 2 * parts.layer) + (2 + 4 + 1) * parts.embedding


def test_a_fully_sharded_model_is_whole_while_it_is_built():
    """Each after those before it, which are sharded: actor and critic in float32."""
    run = run_of(run_config("tp1", sharding="full"), 8)
    actor, critic, reference = (role.elements[0] for role in run.roles)
    (kind,) = plan_memory(run, H200).kinds
    assert kind.phases["build"]["weights"] == 4 * (actor + critic) / 8 + 2 * reference
    assert kind.phases["rollout"]["weights"] == (4 * (actor + critic) + 2 * reference) / 8


def test_every_micro_batch_of_a_fully_sharded_model_waits_for_slow_links():
    def step(rate: float, **engine) -> float:
        run = run_of(run_config("tp1", sharding="full", **engine), 8)
        return step_seconds(run, replace(H200, same_host_rate=rate), run.actor)

    run = run_of(run_config("tp1", sharding="full"), 8)
    (count, _), received = run.micro_batches(run.actor), run.actor.elements[0] * 7 / 8
    gathers_and_reduction = (2 + 2 + 4) * received
    assert step(1e6) == pytest.approx(count * gathers_and_reduction / 1e6, rel=1e-3)
    halved = step(1e6, tokens_per_micro_batch=run.config.engine.tokens_per_micro_batch // 2)
    assert halved == pytest.approx(2 * step(1e6), rel=1e-3)
    assert step(1e15) == step(1e14)  # behind the layers' work


def in_flight_by_schedule(*, pp: int, vpp: int, stage: int, count: int) -> float:
    """Simulate Megatron's 1F1B schedule: warm-up, alternating passes, cool-down; in layers of the stages."""
    total = count * vpp
    warm_up = min(total, pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp)
    held_now = most = warm_up
    for _ in range(total - warm_up):
        held_now += 1
        most = max(most, held_now)
        held_now -= 1
    return most / vpp


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(1, 1, 4), (4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 4, 4), (4, 4, 4)]
)
def test_micro_batches_in_flight_are_those_of_the_schedule(pp, vpp, count):
    layout = Layout(pp=pp, vpp=vpp, ranks=tuple(range(pp)))
    role = PlannedRole.of(name="actor", arch=arch("llama3-8b"), layout=layout, head="lm", trainable=True)
    for stage in range(pp):
        assert micro_batches_in_flight(role, stage, count) == in_flight_by_schedule(
            pp=pp, vpp=vpp, stage=stage, count=count
        )


@pytest.mark.parametrize(
    ("stages", "count"), [([1.0, 1.0], 8), ([2.0, 3.0, 2.0], 5), ([1.0] * 4, 1), ([4.0, 1.0], 3)]
)
def test_a_pipeline_takes_as_long_as_its_stages_one_after_another(stages, count):
    """Forward only: a stage begins a micro-batch when it and the stage before are done."""
    done = [0.0] * len(stages)
    for _ in range(count):
        ready = 0.0
        for place_, seconds in enumerate(stages):
            ready = done[place_] = max(ready, done[place_]) + seconds
    layout = Layout(pp=len(stages), ranks=tuple(range(len(stages))))
    role = PlannedRole.of(
        name="actor", arch=replace(arch("llama3-8b"), num_layers=12), layout=layout, head="lm", trainable=True
    )
    assert pipeline_seconds(role, count, stages) == pytest.approx(done[-1])


@pytest.mark.parametrize(
    ("samples", "tokens", "layout", "budget"),
    [
        (256, 512, "tp2sp", 8192),
        (64, 1000, "tp1", 5000),
        (192, 5000, "tp2pp2vpp2", 8192),
        (128, 3000, "tp2cp2", 4096),
    ],
)
def test_micro_batches_are_those_of_packing(samples, tokens, layout, budget):
    run = run_of(run_config(layout, samples=samples, tokens=tokens, tokens_per_micro_batch=budget), 8)
    role = run.actor
    mine = [2 * tokens] * -(-samples // 4 // role.layout.dp)
    packed = micro_batches(
        mine,
        tokens_per_micro_batch=budget * role.layout.cp,
        multiple_of=role.layout.pp if role.layout.vpp > 1 else 1,
    )
    assert run.micro_batches(role) == (len(packed), max(map(len, packed)))


@pytest.mark.parametrize(
    ("limit", "cached", "said"),
    [
        (256, 128, "128 of a replica's 128 samples at once"),
        (64, 128, "samples at once (rollout.max_num_seqs)"),
        (256, 100, "100 of a replica's 128 samples at once (the KV cache"),
    ],
)
def test_what_keeps_samples_waiting_is_named(limit, cached, said):
    config = run_config(samples=256, rollout=2)
    config.rollout.max_num_seqs = limit
    run = run_of(config, 4)
    assert said in samples_together(
        run, cached * (run.prompt_tokens + run.response_tokens) * serving.kv_bytes_per_token(run)
    )


def test_plans_keep_room_in_the_cache_with_dynamic_batching():
    config = run_config(samples=256, rollout=2)
    config.rollout.dynamic_batching = True
    run = run_of(config, 4)
    cache_bytes = 100 * (run.prompt_tokens + run.response_tokens) * serving.kv_bytes_per_token(run)
    said = samples_together(run, cache_bytes)
    assert said.startswith("90 of a replica's 128 samples at once (rollout.dynamic_batching keeps room")


@pytest.mark.parametrize(
    ("samples", "gpus", "tp", "limit"), [(256, 4, 2, 256), (256, 4, 4, 256), (256, 8, 1, 16), (30, 8, 1, 256)]
)
def test_samples_at_once_are_those_a_replica_draws_first(samples, gpus, tp, limit):
    config = run_config("tp2sp", samples=samples, rollout=tp)
    config.rollout.max_num_seqs = limit
    run = run_of(config, gpus)
    first = Dispatcher(WorkQueue(samples, num_replicas=1), admission=admission_of(limit), group=None)
    first.share = Dispatcher(_Queue(samples, run.replicas), admission=admission_of(limit), group=None).share
    assert samples_at_once(run, float("inf")) == len(first.draw(0))


@dataclass
class _Queue:
    """What a dispatcher asks a queue of several replicas before it draws."""

    total: int
    num_replicas: int


@pytest.mark.parametrize(("count", "per_prompt"), [(1, 1), (5, 1), (8, 8), (13, 8), (32, 8)])
def test_samples_share_their_prompts_cache(count, per_prompt):
    config = run_config("tp2sp", samples=4)
    config.data.samples_per_prompt, config.data.max_prompt_tokens = per_prompt, 15_360
    run = run_of(config, 2)
    tokens = serving.cached_tokens(run, count)
    assert tokens == -(-count // per_prompt) * 15_360 + count * 512
    assert (
        serving.samples_cached(run, tokens) == count and serving.samples_cached(run, tokens - 1) == count - 1
    )


def test_generation_without_cuda_graphs_or_in_float32_takes_longer():
    def seconds(dtype="bfloat16", eager=False):
        config = run_config("tp2sp", samples=256, dtype=dtype)
        config.rollout.enforce_eager = eager
        return rollout_seconds(run_of(config, 4), H200, 64 * GIB)

    assert seconds(eager=True) > 3 * seconds() and seconds(dtype="float32") > 2 * seconds()


def test_groups_that_do_not_divide_a_host_cross_its_border():
    def rate(span, hosts, each):
        return group_rate(
            run_of(run_config("tp1", rollout=1), hosts * each, ranks_per_host=each), H200, span=span
        )

    assert rate(4, 1, 6) == rate(2, 8, 6) == rate(4, 2, 8) == H200.same_host_rate
    assert rate(4, 8, 6) == H200.other_host_rate


def received_elements(train, rollout, gpus, *, ranks_per_host):
    """A 70B actor's run, and what `busiest_elements` says of its weight sync under the best placement."""
    run = actor_alone(run_config(train, model="llama3-70b", rollout=rollout), gpus)
    served = Layout.parse(f"tp{rollout}", tuple(range(gpus)))
    placed = place(run.actor.arch, run.actor.layout, served, ranks_per_host=ranks_per_host)
    return run, busiest_elements(run.actor.arch, *placed, ranks_per_host=ranks_per_host)


@pytest.mark.parametrize(
    ("layout", "rollout", "gpus"),
    [("tp2pp2", 2, 16), ("tp4pp2", 8, 16), ("tp8", 8, 16), ("tp2pp2", 4, 8), ("tp8pp4", 8, 32)],
)
def test_weights_come_from_other_hosts_where_the_best_placement_has_to_take_them_there(layout, rollout, gpus):
    run, (from_other_hosts, _) = received_elements(layout, rollout, gpus, ranks_per_host=8)
    assert run.resharding_crosses_hosts == (from_other_hosts > 0)


@pytest.mark.parametrize(
    ("train", "rollout", "gpus"),
    [("tp2pp2", 4, 4), ("tp4", 2, 4), ("tp2", 4, 4), ("pp4", 4, 4), ("tp8pp4", 8, 32)],
)
def test_moved_bytes_are_those_of_the_best_placement(train, rollout, gpus):
    """The formula counts classes of tensors, so norms and rounding differ."""
    run, (_, elements) = received_elements(train, rollout, gpus, ranks_per_host=gpus)
    assert moved_bytes(run) == pytest.approx(2 * elements, rel=0.15)


def test_mfu_is_the_share_of_the_vendors_rate():
    """6 FLOPs a parameter and token: at one millionth of the rate it takes a million times as long."""
    run = run_of(run_config("tp2sp"), 4)
    time = plan_seconds(run, H200, plan_memory(run, H200))
    tokens, matrices = 256 * 1023, 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    flops = 6 * tokens * matrices + 3 * 32 * tokens * 4 * 4096 * 1023 / 2
    assert time.mfu("critic_update") == pytest.approx(flops / time.seconds["critic_update"] / 4 / 989e12)


@pytest.mark.parametrize(
    ("change", "phase"),
    [({"recompute": "full"}, "actor_update"), ({"tokens_per_micro_batch": 4096}, "actor_update")],
)
def test_what_saves_activations_costs_time(change, phase):
    plain, saving = (run_of(run_config("tp2sp", **engine), 4) for engine in ({}, change))
    before, after = (plan_memory(run, H200) for run in (plain, saving))
    assert after.phase_bytes(phase) < before.phase_bytes(phase)
    assert plan_seconds(saving, H200, after).seconds[phase] > plan_seconds(plain, H200, before).seconds[phase]


def test_offload_frees_the_rollout_and_takes_host_memory():
    config = run_config("tp2pp2sp")
    before = plan_memory(run_of(config, 4), H200)
    after = plan_memory(run_of(configured(config, {"reshard.offload": "all"}), 4), H200)
    states = sum(
        getattr(static_bytes(run_of(config, 4), role, 0), part)
        for role in run_of(config, 4).roles
        for part in ("gradients", "optimizer")
    )
    assert before.phase_bytes("rollout") - after.phase_bytes("rollout") == pytest.approx(states)
    assert after.host_bytes > before.host_bytes + 4 * 40 * GIB


def test_a_checkpoint_is_written_from_host_memory():
    config = run_config("tp2sp")
    plain = plan_memory(run_of(config, 4), H200).host_bytes
    config.run.save_interval = 50
    run = run_of(config, 4)
    models = sum(
        max(role.elements) * role.layout.tp for role in run.roles if role.trainable
    )  # each once, whatever dp
    assert plan_memory(run, H200).host_bytes - plain == pytest.approx(12 * models)


def test_offload_holds_gradients_and_optimizer_of_the_model_that_learns():
    config = run_config("tp2pp2sp")
    run = run_of(config, 4)
    before, after = (
        plan_memory(run, H200),
        plan_memory(run_of(configured(config, {"reshard.offload": "all"}), 4), H200),
    )
    for phase, resting in (("critic_update", run.actor), ("actor_update", run.roles[1])):
        away = max(
            static_bytes(run, resting, stage).gradients + static_bytes(run, resting, stage).optimizer
            for stage in range(2)
        )
        assert before.phase_bytes(phase) - after.phase_bytes(phase) == pytest.approx(away, rel=0.02), phase


def test_fp8_keeps_copies_of_the_layers_weights_while_it_computes():
    plain, fp8 = (
        plan_memory(run_of(run_config("tp2pp2sp", **engine), 4), H200) for engine in ({}, {"dtype": "fp8"})
    )
    layers = 16 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) / 2  # parameters of a rank
    for phase, copies in (
        ("log_probs", 2),
        ("actor_update", 2),
    ):  # of actor and reference; as they are and transposed
        assert fp8.phase_bytes(phase) - plain.phase_bytes(phase) == pytest.approx(copies * layers, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "pp"), [(126, 16), (126, 4), (126, 64), (80, 16), (28, 8), (30, 4), (5, 4), (33, 2)]
)
def test_uneven_stages_are_what_megatron_allows(layers, pp):
    """All layers, at least one each, and only the first and the last differ from the others."""
    stages = uneven_stages(layers, pp)
    if layers % pp == 0:
        assert not stages
    elif stages:
        assert sum(stages) == layers and min(stages) > 0 and len(stages) == pp and len(set(stages[1:-1])) <= 1
        Layout(pp=pp, stage_layers=tuple(stages), ranks=tuple(range(pp))).layers_of(layers)
    else:
        assert -(-layers // pp) * (pp - 2) > layers - 2


@pytest.mark.parametrize("offload", ["none", "grads", "optimizer", "all"])
def test_ranks_without_a_model_hold_vllm_alone(offload):
    config = run_config("tp2sp")
    config.actor.devices, config.critic.devices, config.reshard.offload = "0-1", "0-1", offload
    busy, idle = plan_memory(run_of(config, 4), H200).kinds
    assert (busy.ranks, idle.ranks) == ((0, 1), (2, 3))
    assert not any(
        idle.phases[phase].get(part)
        for phase in idle.phases
        for part in ("weights", "gradients", "optimizer")
    )
    assert idle.phases["rollout"]["kv cache"] == busy.phases["rollout"]["kv cache"] > 0


@pytest.mark.parametrize("old_logprobs", ["sampler", "loglinear"])
def test_old_log_probs_without_a_pass_take_the_references_time_alone(old_logprobs):
    def passes(**settings) -> dict[str, float]:
        run = run_of(
            configured(run_config(), {f"algorithm.{name}": value for name, value in settings.items()}), 4
        )
        return plan_seconds(run, H200, plan_memory(run, H200)).seconds

    both, one = passes(kl_in="loss"), passes(kl_in="loss", old_logprobs=old_logprobs)
    assert 0.4 < one["log_probs"] / both["log_probs"] < 0.6
    assert "log_probs" not in passes(kl_coef=0.0, old_logprobs=old_logprobs)
    assert one["actor_update"] == both["actor_update"]
