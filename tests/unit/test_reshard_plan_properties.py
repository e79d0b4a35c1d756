"""Properties of every plan, over random models, layouts, hosts and windows, and over arbitrary shards.

The truth is counting: each Hugging Face element has a number, and the reference executor of test_reshard_plan
executes the plan.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from parallel.layout import Layout
from parallel.reshard.plan import Plan
from parallel.reshard.rectangles import area, intersect
from tests.strategies import Case, any_cases, model_cases
from tests.toy_shards import Toy, megatron_like, vllm_like
from tests.unit.test_reshard_plan import filled, follow, numbered, numbers
from tests.worlds import ROOT

# The same examples on every run; they are large, which is no fault.
repeatable = partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
CASES = st.one_of(model_cases(), any_cases())


def owned(case: Case, rank: int) -> list:
    return [parameter for parameter in case.source.get(rank, []) if parameter.owner]


def needed_bytes(case: Case, tensors: dict) -> dict[int, int]:
    """Bytes of the distinct elements that each destination rank needs and does not hold as an owner."""
    missing = {
        rank: np.setdiff1d(numbers(wanted, tensors), numbers(owned(case, rank), tensors))
        for rank, wanted in case.destination.items()
    }
    return {rank: elements.size * case.element_bytes for rank, elements in missing.items()}


@repeatable(max_examples=60)
@given(CASES)
def test_each_element_is_written_once_and_right(case):
    tensors, plan = numbered(case.shapes), case.compile()
    result, writes = follow(plan, case.source, case.destination, tensors)
    for rank, parameters in case.destination.items():
        for key, expected in filled(parameters, tensors, 0).items():
            assert (writes[rank][key] == 1).all(), (rank, key)
            np.testing.assert_array_equal(result[rank][key], expected)


@repeatable(max_examples=30)
@given(any_cases())
def test_destination_rectangles_do_not_overlap(case):
    written: dict[tuple, list] = {}
    plan = case.compile()
    for t in plan.transfers():
        chunk, name, row, col = t.destination
        written.setdefault((t.destination_rank, chunk, name), []).append(
            (row, row + t.shape[0], col, col + t.shape[1])
        )
    for part in plan.padding:
        written.setdefault((part.rank, part.chunk, part.name), []).append((*part.rows, *part.cols))
    for place, rects in written.items():
        assert all(area(rect) > 0 for rect in rects), place
        assert not any(intersect(a, b) for i, a in enumerate(rects) for b in rects[:i]), place


@repeatable(max_examples=60)
@given(CASES)
def test_windows_hold_what_their_pairs_exchange(case):
    plan = case.compile()
    for t in plan.direct:
        assert t.source_rank == t.destination_rank or (
            case.peer_memory and case.hosts[t.source_rank] == case.hosts[t.destination_rank]
        ), t
    for window in plan.windows:
        assert window
        for (src, dst), message in window.items():
            assert src != dst and not (case.peer_memory and case.hosts[src] == case.hosts[dst]), (
                src,
                dst,
            )
            assert message and all((t.source_rank, t.destination_rank) == (src, dst) for t in message), (
                src,
                dst,
            )


@repeatable(max_examples=60)
@given(CASES)
def test_bytes_and_staging_are_counted_right_and_kept_small(case):
    plan = case.compile()
    sent, received, copied, peak, before = Counter(), Counter(), Counter(), Counter(), Counter()
    for t in plan.transfers():
        counters = (copied,) if t.source_rank == t.destination_rank else (sent, received)
        for counter, rank in zip(counters, (t.source_rank, t.destination_rank)):
            counter[rank] += t.elements * case.element_bytes
    for window in plan.windows:
        staged = Counter()
        for pair, message in window.items():
            for rank in pair[:1] if plan.one_sided else pair:
                staged[rank] += sum(t.elements for t in message) * case.element_bytes
        peak |= before + staged  # a window is packed while the one before is on its way
        before = staged
    assert max(peak.values(), default=0) <= case.window_bytes
    for promised, counted in (
        (plan.sent_bytes, sent),
        (plan.received_bytes, received),
        (plan.local_bytes, copied),
        (plan.staged_bytes, peak),
    ):
        assert promised == {rank: counted[rank] for rank in plan.ranks}
    assert sum(sent.values()) == sum(received.values())


@repeatable(max_examples=60)
@given(CASES)
def test_no_rank_receives_less_than_it_must(case):
    plan, needed = case.compile(), needed_bytes(case, numbered(case.shapes))
    assert plan.lower_bound_bytes == max(needed.values())
    assert all(plan.received_bytes[rank] >= needed[rank] for rank in needed)
    event(
        "receives more than the bound"
        if max(plan.received_bytes.values()) > plan.lower_bound_bytes
        else "receives the bound"
    )


@repeatable(max_examples=60)
@given(model_cases())
def test_ranks_of_a_model_receive_no_more_than_they_must(case):
    """No rank's shard names an element twice: a tied output layer is the embedding or on another stage."""
    plan, needed = case.compile(), needed_bytes(case, numbered(case.shapes))
    assert plan.received_bytes == {rank: needed.get(rank, 0) for rank in plan.ranks}


@repeatable(max_examples=60)
@given(CASES)
def test_elements_come_from_the_nearest_owner(case):
    tensors, total = numbered(case.shapes), sum(int(np.prod(shape)) for shape in case.shapes.values())
    on_rank = {rank: np.zeros(total + 1, dtype=bool) for rank in range(len(case.hosts))}
    on_host = {host: np.zeros(total + 1, dtype=bool) for host in case.hosts}
    owners = set()
    for rank in case.source:
        owners |= {(rank, parameter.chunk, parameter.name) for parameter in owned(case, rank)}
        elements = numbers(owned(case, rank), tensors)
        on_rank[rank][elements] = on_host[case.hosts[rank]][elements] = True
    for t in case.compile().transfers():
        elements = tensors[t.tensor][slice(*t.rows), slice(*t.cols)]
        src_host, dst_host = case.hosts[t.source_rank], case.hosts[t.destination_rank]
        assert (t.source_rank, *t.source[:2]) in owners, t
        assert t.source_rank == t.destination_rank or not on_rank[t.destination_rank][elements].any(), t
        assert src_host == dst_host or not on_host[dst_host][elements].any(), t


@repeatable(max_examples=60)
@given(CASES, st.data())
def test_a_plan_without_an_owner_for_an_element_is_refused(case, data):
    lost, tensors = data.draw(st.sampled_from(sorted(case.source))), numbered(case.shapes)
    left = replace(
        case, source={rank: parameters for rank, parameters in case.source.items() if rank != lost}
    )
    wanted = [numbers(parameters, tensors) for parameters in case.destination.values()]
    sources = [numbers(owned(left, rank), tensors) for rank in left.source]
    if np.setdiff1d(np.concatenate(wanted), np.concatenate([*sources, []])).size:
        with pytest.raises(ValueError, match="no source rank holds them"):
            left.compile()
    else:
        left.compile()


def content(plan: Plan) -> str:
    """All that a plan says, in order; only of types that every version of Python writes alike."""
    windows = []
    for window in plan.windows:
        messages = []
        for pair, message in window.items():
            messages.append((pair, [str(t) for t in message], [(t.source, t.destination) for t in message]))
        windows.append(messages)
    direct = [(str(t), t.source, t.destination) for t in plan.direct]
    padding = [(part.rank, part.chunk, part.name, part.rows, part.cols) for part in plan.padding]
    return repr(
        (
            plan.ranks,
            plan.element_bytes,
            plan.window_bytes,
            plan.one_sided,
            direct,
            windows,
            padding,
            plan.lower_bound_bytes,
            plan.gather_all_bytes,
        )
    )


@repeatable(max_examples=30)
@given(CASES, st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_in_the_mappings_is_no_matter(case, random):
    assert content(case.compile(order=lambda entries: random.sample(entries, len(entries)))) == content(
        case.compile()
    )


def fixed_digests() -> list[str]:
    """Of two plans, whose content has to be the same wherever and whenever they are compiled."""
    digests = []
    for toy, layout, tp, to_vllm in (
        (Toy(tied=True, vocab=41), "tp2pp2", 4, True),
        (Toy(groups=1), "tp4pp2vpp2", 2, False),
    ):
        trained = {
            rank: megatron_like(toy, Layout.parse(layout, ranks=tuple(range(8))), rank) for rank in range(8)
        }
        served = {rank: vllm_like(toy, tp, rank % tp) for rank in range(4, 12)}
        source, destination = (trained, served) if to_vllm else (served, trained)
        hosts = tuple(rank // 4 for rank in range(12))
        case = Case(
            note="",
            source=source,
            destination=destination,
            shapes=toy.shapes(),
            hosts=hosts,
            element_bytes=2,
            window_bytes=500,
            peer_memory=to_vllm,
        )
        digests.append(hashlib.sha256(content(case.compile()).encode()).hexdigest()[:16])
    return digests


# Ranks on several machines compile a plan each and must agree. A change of the planner changes these digests,
# another Python must not.
GOLDEN = ["08a640417dc6f12e", "41c8699db3d6c65e"]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_other_processes_compile_the_same_plan(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed == fixed_digests() == GOLDEN


if __name__ == "__main__":
    print(*fixed_digests())
