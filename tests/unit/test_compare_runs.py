"""The comparison sees a changed bit, a missing metric and nothing else."""

import math

from tools.compare_runs import ROOT, differences, known_settings, with_names_of

BEFORE = [{"step": 1, "policy/loss": 0.1, "time/rollout_s": 1.0, "reward/latency_ms": 3.0, "kl/ref": None}]


def test_equal_runs_have_no_differences():
    assert (
        differences(BEFORE, [BEFORE[0] | {"time/rollout_s": 2.0, "reward/latency_ms": 4.0}], relative=0) == []
    )


def test_the_last_bit_counts_unless_a_tolerance_is_given():
    changed = [BEFORE[0] | {"policy/loss": math.nextafter(0.1, 1)}]
    assert len(differences(BEFORE, changed, relative=0)) == 1
    assert differences(BEFORE, changed, relative=1e-6) == []


def test_a_missing_metric_differs_whatever_the_tolerance():
    without = [{name: value for name, value in BEFORE[0].items() if name != "kl/ref"}]
    assert differences(BEFORE, without, relative=1.0) == ["kl/ref at step 1: None -> None"]
    assert len(differences(BEFORE, BEFORE + [BEFORE[0] | {"step": 2}], relative=1.0)) == 2


def test_settings_have_the_names_that_the_tree_knows():
    given = ["--config-name", "ppo_toy_cpu", "data.validation_samples=64", "run.seed=1", "actor.new=2"]
    assert with_names_of({"data.validation_rows", "run.seed"}, given) == [
        *given[:2],
        "data.validation_rows=64",
        *given[3:],
    ]
    assert with_names_of(known_settings(ROOT), given) == given
