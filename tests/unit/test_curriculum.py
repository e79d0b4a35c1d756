"""The curriculum: its rule against a plain loop, draws by changing weights, exact resumption, the hook."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.one_rank import ONE_RANK, OneRank
from tests.scripted_engine import ScriptedEngine
from tests.unit.test_sampler import FirstToken, draw_of, odd_vary, prompt_of, sampler_of
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.curriculum import (
    FLOOR,
    MEMORY,
    MOST_SOURCES,
    PRIOR,
    CurriculumCursor,
    Source,
    SourceIndex,
    variance_weights,
)
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.manifest import _is_cursor
from verl_megatron.observe.metrics import Sums
from verl_megatron.rewards.shaping import has_variance
from verl_megatron.rollout.curriculum import Curriculum, weights_by

COUNTS = {"a": 40, "b": 300, "c": 7, "d": 553, "e": 100}
GIVEN = [0.5, 2, 0.1, 1, 0.4]
SHARES = [weight / 4 for weight in GIVEN]


def index_of(counts: dict[str, int]) -> SourceIndex:
    """Sources whose prompts take turns as long as they have any."""
    index, left = SourceIndex("level", "train.jsonl"), dict(counts)
    while any(left.values()):
        for name in [name for name, count in left.items() if count]:
            index.add({"level": name}, 0)
            left[name] -= 1
    return index


def cursor_of(given=(), *, counts=COUNTS, seed=3, shuffle=True) -> CurriculumCursor:
    return CurriculumCursor(index_of(counts), given, seed=seed, shuffle=shuffle)


def drawn_by_source(cursor: CurriculumCursor, count: int) -> list[int]:
    counts = Counter(cursor.source_of(prompt) for prompt in cursor.draw(count))
    return [counts[source] for source in range(len(cursor.sources))]


def seen(name: str, given: float, *groups: list[float]) -> Source:
    source = Source(name=name, prompts=9, given=given, weight=given)
    for scores in groups:
        source.see(scores)
    return source


# ---- the rule ----------------------------------------------------------------------------------------------


def test_means_of_a_source_fade_with_the_prompts_that_follow():
    generator = torch.Generator().manual_seed(2)
    groups = [torch.randn(2 + n % 5, generator=generator).round().tolist() for n in range(200)]
    source = seen("a", 1.0, *groups)
    totals = dict.fromkeys(("groups", "score", "variance", "varied"), 0.0)
    for age, scores in enumerate(reversed(groups)):
        weight, scores_n = (1 - 1 / MEMORY) ** age, torch.tensor(scores, dtype=torch.float64)
        totals["groups"] += weight
        totals["score"] += weight * scores_n.mean().item()
        totals["variance"] += weight * scores_n.var().item()
        totals["varied"] += weight * (len(set(scores)) > 1)
    assert source.groups == pytest.approx(totals["groups"]) and source.groups < MEMORY
    for name in ("score", "variance", "varied"):
        assert getattr(source, name) == pytest.approx(totals[name] / totals["groups"])


@pytest.mark.parametrize("scores", [[], [1.0], [float("nan"), 1.0], [float("inf"), 0.0]], ids=str)
def test_prompts_that_compare_nothing_are_left_out(scores):
    assert seen("a", 1.0, scores, [0.0, 1.0]) == seen("a", 1.0, [0.0, 1.0])


def test_equal_scores_have_no_variance_to_the_bit():
    for value in (0.1, 1e-30, 1e30, -0.7):
        assert seen("a", 1.0, *[[value] * count for count in range(2, 40)]).variance == 0.0


def test_weights_are_given_ones_times_the_relative_variance_above_a_floor():
    right, mixed, wrong, new = [1.0] * 4, [0.0, 1.0, 0.0, 1.0], [0.0] * 4, []
    sources = [seen("right", 0.2, *[right] * 9), seen("mixed", 0.3, *[mixed] * 9)]
    sources += [seen("wrong", 0.4, *[wrong] * 500), seen("new", 0.1, new)]
    groups = sum((1 - 1 / MEMORY) ** age for age in range(9))
    expected = [0.2 * PRIOR / (groups + PRIOR), 0.3, 0.4 * FLOOR, 0.1]
    assert variance_weights(sources) == pytest.approx(expected)
    assert variance_weights([sources[0], sources[2], sources[3]]) == [0.2, 0.4, 0.1], "nothing differs"


def test_an_impossible_source_falls_to_the_floor_and_comes_back():
    cursor, share = cursor_of([1, 1], counts={"possible": 50, "impossible": 50}), []
    for step in range(120):
        cursor.draw(16)
        answers = [[0.0, 1.0] if not source or step >= 60 else [0.0, 0.0] for source in cursor.recent]
        cursor.observe(answers)
        cursor.weigh(variance_weights(cursor.sources))
        share.append(cursor.sources[1].weight)
    assert share[0] > share[1] > share[2] and share[59] == pytest.approx(FLOOR / (1 + FLOOR))
    assert min(share) >= FLOOR / 2, "nothing starves" and share[119] > 0.4


# ---- draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("given", [GIVEN, []], ids=["weights", "rows"])
def test_sources_have_their_share_of_any_number_of_prompts(given, shuffle):
    shares = SHARES if given else [count / 1000 for count in COUNTS.values()]
    cursor, total, times = cursor_of(given, shuffle=shuffle), [0] * 5, Counter()
    for count in (1, 2, 3, 64, 130, 800, 9000):
        prompts = cursor.draw(count)
        times.update(prompts)
        for source in map(cursor.source_of, prompts):
            total[source] += 1
        assert len(prompts) == count
        assert all(abs(got - sum(total) * share) <= 2 for got, share in zip(total, shares, strict=True))
    for source, count in enumerate(total):  # 10,000 prompts: within 1 % of the weight
        assert count == pytest.approx(10_000 * shares[source], rel=0.01)
        of_source = [times[prompt] for prompt in range(1000) if cursor.source_of(prompt) == source]
        assert max(of_source) - min(of_source) <= 1
    assert cursor.epoch == 10


def test_without_shuffling_sources_keep_their_order_and_alternate():
    cursor = cursor_of([1, 1], counts={"a": 3, "b": 3}, shuffle=False)
    assert cursor.draw(8) == [0, 1, 2, 3, 4, 5, 0, 1]


def test_a_source_of_weight_0_is_not_drawn():
    cursor = cursor_of(GIVEN)
    cursor.draw(33)
    cursor.weigh([0, 1, 0, 3, 0])
    drawn = drawn_by_source(cursor, 400)
    assert drawn[::2] == [0, 0, 0] and drawn[1] == pytest.approx(100, abs=2) and sum(drawn) == 400
    cursor.weigh([1e300, 1e300, 1e-300, 1e300, 1e300])
    assert drawn_by_source(cursor, 400)[2] == 0 and cursor.sources[0].weight == 0.25


@pytest.mark.parametrize("iterations", [0, 1, 7, 40])
def test_a_cursor_resumes_exactly(iterations):
    def go(cursor: CurriculumCursor, steps: int) -> list[list[int]]:
        drawn = []
        for _ in range(steps):
            drawn.append(cursor.draw(23))
            cursor.observe(
                [[float(prompt % (3 + source)), 1.0] for prompt, source in zip(drawn[-1], cursor.recent)]
            )
            cursor.weigh(variance_weights(cursor.sources))
        return drawn

    cursor = cursor_of(GIVEN)
    go(cursor, iterations)
    state = json.loads(json.dumps(cursor.state_dict()))
    assert _is_cursor(state)
    resumed = cursor_of(GIVEN)
    resumed.load_state_dict(state)
    assert go(resumed, 30) == go(cursor, 30) and resumed.state_dict() == cursor.state_dict()


def scores_of(prompts: list[int], sources: list[int]) -> list[list[float]]:
    """Scores of two samples of each prompt; the sources differ in how often these differ."""
    return [[float(prompt % (3 + source) == 0), 1.0] for prompt, source in zip(prompts, sources, strict=True)]


@pytest.mark.parametrize("stale", [0, 1, 3])
def test_orders_ahead_of_time_draw_by_the_scores_that_are_known(stale):
    """As a rollout on ranks of its own has them; in turns (0) they draw what a single cursor does."""
    cursor, alone = cursor_of(GIVEN), cursor_of(GIVEN)
    ahead, ordered, drawn = cursor.fork(), [], []
    for step in range(25):
        while len(ordered) <= step + stale:
            ahead.learn(cursor)
            prompts = ahead.draw(23)
            ordered.append((prompts, ahead.progress()))
        prompts, progress = ordered[step]
        cursor.advance(progress)
        assert cursor.recent == [cursor.source_of(prompt) for prompt in prompts]
        for one, their in ((cursor, prompts), (alone, alone.draw(23))):
            one.observe(scores_of(their, list(one.recent)))
            one.weigh(variance_weights(one.sources))
        drawn.append(prompts)
        if not stale:
            assert cursor.state_dict() == alone.state_dict()
    counts = Counter(cursor.source_of(prompt) for prompts in drawn for prompt in prompts)
    assert [source.drawn for source in cursor.sources] == [counts[source] for source in range(5)]
    assert max(source.weight / source.given for source in cursor.sources) > 1


def test_positions_of_another_curriculum_are_refused():
    state = cursor_of(GIVEN).state_dict()
    swapped = {"b": 40, "a": 300, "c": 7, "d": 553, "e": 100}
    others = [cursor_of(), cursor_of([1] * 5), cursor_of(GIVEN, counts=swapped)]
    others.append(PromptCursor(num_prompts=1000, seed=3))
    for other in others:
        with pytest.raises(ValueError, match="another data.curriculum"):
            other.load_state_dict(state)
        with pytest.raises(ValueError, match="another data.curriculum"):
            cursor_of(GIVEN).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"weight": [-1.0] * 5},
        {"weight": [1.0] * 4},
        {"drawn": [0.5] * 5},
        {"credits": [float("nan")] * 5},
        {"score": ["a"] * 5},
        {"varied": 3},
        {"more": [1.0] * 5},
    ],
    ids=str,
)
def test_a_state_that_no_run_writes_is_found(change):
    state = cursor_of(GIVEN).state_dict()
    assert _is_cursor(state) and not _is_cursor(state | {"curriculum": state["curriculum"] | change})
    assert not _is_cursor(state | {"curriculum": 3}) and not _is_cursor(state | {"curriculum": {}})


# ---- sources -----------------------------------------------------------------------------------------------


def test_columns_and_files_name_sources():
    index = SourceIndex("extra.level", "[x]")
    for value in (1, "1", None, True, 2.5, 1):
        index.add({"extra": {"level": value}}, 0)
    index.add({}, 0)
    assert list(index.names) == ["1", "", "True", "2.5"] and list(index.of_prompt) == [0, 0, 1, 2, 3, 0, 1]
    assert index.why_not(is_whole=True) == "" and "sources of prompts: 4, '1', ''" in index.note
    for text, names in {
        "x/a.jsonl,x/b.jsonl": ["a.jsonl", "b.jsonl"],
        "x/a.jsonl:1,y/a.jsonl:2": ["x/a.jsonl", "y/a.jsonl"],
        "a.jsonl:1,a.jsonl:2": ["1: a.jsonl", "2: a.jsonl"],
    }.items():
        index = SourceIndex("files", text)
        for part in (0, 0, 1):
            index.add({}, part)
        assert list(index.names) == names and list(index.of_prompt) == [0, 0, 1]


def test_columns_that_name_no_sources_are_refused():
    many = SourceIndex("id", "x")
    for number in range(MOST_SOURCES + 5):
        many.add({"id": number}, 0)
    assert "more than 1000 values" in many.why_not(is_whole=False) and len(many.names) == MOST_SOURCES
    for row, words in {
        "x": ({"tags": ["a"]}, "is ['a'] in a row"),
        "y": ({"tags": "b"}, "have the value 'b' there"),
        "z": ({}, "neither files nor a column to choose by: all rows of data.train have nothing there"),
    }.values():
        index = SourceIndex("tags", "x")
        index.add(row, 0)
        assert words in index.why_not(is_whole=True)
    assert index.why_not(is_whole=False) == "", "later rows may have other values"
    assert index.note == "data.curriculum=tags: none of the rows read has anything there"
    for path, is_whole in (("a.jsonl", False), ("a.jsonl,b.jsonl", True)):
        one = SourceIndex("files", path)
        one.add({}, 0)
        assert "only one has prompts" in one.why_not(is_whole=is_whole)
    assert one.why_not(is_whole=False) == "", "the second file may have some"


# ---- in a run ----------------------------------------------------------------------------------------------


class TwoRanks(OneRank):
    """A rank of two, whose other rank gives `other` to each exchange of objects."""

    size = 2

    def __init__(self, other):
        self.other = other

    def all_gather_object(self, value):
        return [self.other, value]


def batch_of(scores: list[list[float]]) -> RolloutBatch:
    flat = [score for group in scores for score in group]
    batch = RolloutBatch.from_lists(list(range(len(flat))), [[1]] * len(flat), [[2]] * len(flat))
    groups = [[number] * len(group) for number, group in enumerate(scores)]
    batch.group_id = torch.tensor(sum(groups, []))
    batch.rewards = torch.tensor(flat)
    return batch


def test_scores_reach_the_sources_of_their_prompts_wherever_samples_lie():
    scores = [[0.0, 1.0, 5.0], [1.0, 1.0, 2.0], [0.5, 0.25, 9.0], [0.0, 0.0, 0.0]]
    whole, states = batch_of(scores), []
    rows = list(zip(whole.group_id.tolist(), whole.sample_id.tolist(), whole.rewards.tolist()))
    for own in (list(range(12)), [11, 3, 4, 0], []):
        cursor, sampler = cursor_of([1, 1], counts={"a": 5, "b": 5}), sampler_of(ScriptedEngine(odd_vary))
        others = [b for b in range(12) if b not in own]
        sampler.engine.world = TwoRanks([rows[b] for b in others])
        cursor.draw(4)
        expected = [replace(source) for source in cursor.sources]
        for source, group in zip(cursor.recent, scores):
            expected[source].see(group[:2])
        curriculum = Curriculum(cursor, sampler, hook=None, with_greedy=True)
        curriculum.follow(whole.select(torch.tensor(own, dtype=torch.int64)), Sums())
        for source, weight in zip(expected, variance_weights(expected)):
            source.weight = weight / sum(variance_weights(expected))
        assert cursor.sources == expected and not cursor.recent
        states.append(cursor.state_dict())
    assert states[0] == states[1] == states[2]


def test_dynamic_sampling_counts_the_prompts_that_it_replaces():
    """Odd prompts vary. Prompts 0, 2, 4, ... are of the source "even"; all that are drawn count."""
    index = SourceIndex("level", "x")
    for number in range(20):
        index.add({"level": "odd" if number % 2 else "even"}, 0)
    cursor = CurriculumCursor(index, seed=1, shuffle=False)
    sampler, sums = sampler_of(ScriptedEngine(odd_vary), FirstToken()), Sums()
    source = TrainingPrompts([prompt_of(number) for number in range(20)], cursor)
    batch = sampler.collect(source, draw_of(4), iteration=1, version=0, keep_group=has_variance)
    batch.rewards = sampler.score(batch, sums)
    Curriculum(cursor, sampler, hook=None).follow(batch, sums)
    even, odd = cursor.sources
    assert even.drawn + odd.drawn == 8 and even.varied == even.variance == 0.0 and odd.varied == 1.0
    assert sums.reduce(ONE_RANK)["data/weight/even"] == 0.5
    assert odd.weight > even.weight == pytest.approx(1 - odd.weight)


def followed(hook, counts=None) -> tuple[CurriculumCursor, dict[str, float]]:
    """A cursor after an iteration of four prompts with the weights of a hook, and its metrics."""
    cursor, sums = cursor_of(counts=counts or {"a": 5, "b": 15}), Sums()
    curriculum = Curriculum(cursor, sampler_of(ScriptedEngine(odd_vary)), hook=hook)
    cursor.draw(4)
    curriculum.follow(batch_of([[0.0, 1.0]] * 4), sums)
    return cursor, sums.reduce(ONE_RANK)


def test_a_hook_gives_weights_by_name():
    asked = []

    def hook(sources):
        asked.extend(sources)
        return {"b": 1, "a": 3.0}

    cursor, metrics = followed(hook)
    assert [source.weight for source in cursor.sources] == [0.75, 0.25]
    assert metrics == {"data/weight/a": 0.25, "data/weight/b": 0.75}, "those of this iteration"
    assert [(source.name, source.drawn, source.varied) for source in asked] == [("a", 1, 1.0), ("b", 3, 1.0)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda sources: 1 / 0, "raised ZeroDivisionError"),
        (lambda sources: None, "returned None"),
        (lambda sources: {"a": 1}, "a weight for each source, ['a', 'b']"),
        (lambda sources: {"a": 1, "b": 1, "c": 1}, "a weight for each source"),
        (lambda sources: {"a": 1, "b": -1}, "gave 'b' the weight -1"),
        (lambda sources: {"a": float("nan"), "b": 1}, "gave 'a' the weight nan"),
        (lambda sources: {"a": 10**400, "b": 1}, "gave 'a' the weight"),
        (lambda sources: {"a": "1", "b": 1}, "gave 'a' the weight '1'"),
        (lambda sources: {"a": 0, "b": 0}, "gave all sources the weight 0"),
    ],
)
def test_what_a_hook_must_not_return_is_said(answer, words):
    with pytest.raises(ValueError, match="curriculum=") as refused:
        followed(answer)
    assert words in str(refused.value) and ";" in str(refused.value)


def test_a_hook_cannot_change_the_sources():
    def hook(sources):
        for source in sources:
            source.drawn = source.weight = 77
        return {"a": 1, "b": 1}

    cursor, _ = followed(hook)
    assert [source.drawn for source in cursor.sources] == [1, 3]
    assert weights_by(hook, cursor.sources) == [1.0, 1.0]


def test_at_most_20_sources_have_a_metric():
    _, metrics = followed(None, {f"s{number}": 1 + (number > 4) for number in range(30)})
    assert len(metrics) == 21 and sum(metrics.values()) == pytest.approx(1)
    assert metrics["data/weight/other"] == pytest.approx((5 + 5 * 2) / 55) and "data/weight/s5" in metrics
