"""Megatron's logits, log-probs and entropy against Hugging Face's, for every family and layout.

On four ranks; the other heads, too.

Every check runs inside one world, because importing and starting it costs more than the checks.
"""

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.megatron import Pipeline
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity import world as parity
from tests.tiny import FAMILIES
from verl_megatron.config import EngineConfig
from verl_megatron.models.build import frozen
from verl_megatron.models.heads import head_weight
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.inference import infer_models
from verl_megatron.roles.schedule import pack_all, run_schedule

# (compact layout, ranks it occupies, stage_layers)
LAYOUTS = [
    ("tp1", 1, ()), ("tp1", 2, ()), ("tp2", 2, ()), ("pp2", 2, ()), ("cp2", 2, ()),
    ("tp2sp", 2, ()), ("pp2vpp2", 2, ()), ("pp2", 2, (1, 3)),
    ("tp1", 4, ()), ("tp4", 4, ()), ("tp4sp", 4, ()), ("pp4", 4, ()), ("tp2pp2", 4, ()),
    ("tp2pp2sp", 4, ()), ("tp2", 4, ()), ("pp2", 4, ()),
    ("cp2tp2sp", 4, ()), ("cp2pp2", 4, ()), ("cp2", 4, ()), ("cp4", 4, ()), ("tp2pp2vpp2", 4, ()),
]  # fmt: skip
TEMPERATURE = 0.8
CONFIG = EngineConfig(tokens_per_micro_batch=64)


class LogitsEngine(Engine):
    """Answers with whole logits, for comparison."""

    def outputs(self, output, micro, model):
        weight = head_weight(model)
        local = output.squeeze(0).index_select(0, micro.index) @ weight.t()
        parts = [torch.empty_like(local) for _ in range(self.layout.tp)]
        dist.all_gather(parts, local, group=self.groups.tp)
        return {"logits": torch.cat(parts, -1)[:, : self.arch.vocab_size]}


def logits_differ(engine: Engine, mine, micro, truth) -> float:
    """Largest difference of the logits at the asked tokens."""
    if not engine.groups.is_member:
        return 0.0
    with frozen(engine.chunks):
        answers = run_schedule(
            [engine],
            pack_all(engine, mine, micro),
            lambda _, outputs, micro: (micro, outputs["logits"]),
            forward_only=True,
        )
    worst = 0.0
    for packed, logits in answers:
        for n in range(len(logits)):
            sample, t = int(mine.sample_id[packed.sample[n]]), int(packed.offset[n])
            worst = max(worst, (logits[n] - truth[sample][t - 1]).abs().max().item())
    return worst


def results_differ(results, mine, truth) -> tuple[float, float]:
    """Largest differences of log-probs and entropy; both have to be 0 where nothing is asked.

    Samples have the engine's temperature, or their own.
    """
    worst_logprob = worst_entropy = 0.0
    for b, sample in enumerate(mine.sample_id.tolist() if results is not None else []):
        asked = mine.response_mask[b].nonzero().squeeze(1)
        temperature = TEMPERATURE if mine.temperature is None else mine.temperature[b]
        log_p = torch.log_softmax(truth[sample][asked - 1] / temperature, -1)
        want = log_p.gather(1, mine.generated_ids[b, asked, None]).squeeze(1)
        gap = (results["logprobs"][b, asked] - want).abs().max().item()
        worst_logprob = parity.largest([worst_logprob, gap])
        gap = (results["entropy"][b, asked] + (log_p.exp() * log_p).sum(-1)).abs().max().item()
        worst_entropy = parity.largest([worst_entropy, gap])
        assert not any(results[name][b, ~mine.response_mask[b]].any() for name in results)
    return worst_logprob, worst_entropy


def check_logits(family: str, folder: Path, layouts) -> None:
    model, arch = parity.write_once(folder, family), read_architecture(folder)
    batch = parity.make_batch(arch.vocab_size)
    with torch.no_grad():
        truth = parity.sample_logits(model, batch)
    for text, count, stage_layers in layouts:
        layout = Layout.parse(text, tuple(range(count)), stage_layers)
        common = {
            "arch": arch,
            "folder": str(folder),
            "groups": ProcessGroups(layout, world()),
            "head": "lm",
            "options": EngineOptions(config=CONFIG, seed=1, temperature=TEMPERATURE),
        }
        mine, micro = parity.share_of(batch, layout, 64)
        first = LogitsEngine(**common)
        logits = logits_differ(first, mine, micro, truth)
        copies = replace(common["options"], same_weights=first)
        engine = Engine(**common | {"folder": "not read", "options": copies})
        logprobs, entropy = results_differ(engine.infer(mine, micro), mine, truth)
        own = replace(mine, temperature=0.5 + mine.sample_id % 4 / 3)
        own_logprobs, own_entropy = results_differ(engine.infer(own, micro), own, truth)
        parity.check(
            f"{family} {layout} on {count}{list(stage_layers) or ''}",
            limit=1e-4,
            logits=logits,
            logprobs=parity.largest([logprobs, own_logprobs]),
            entropy=parity.largest([entropy, own_entropy]),
        )


def check_families() -> None:
    folder = parity.shared_folder()
    for place, family in enumerate(FAMILIES):
        check_logits(family, folder / family, parity.thinned(LAYOUTS, place, every=3))


def check_heads() -> None:
    """Critic and reward model against Hugging Face's token and sequence classification."""
    folder = parity.shared_folder()
    for head, name in (("token", "ForTokenClassification"), ("sequence", "ForSequenceClassification")):
        path = folder / head
        model, arch = parity.write_once(path, "llama_tied_llama3", name), read_architecture(path)
        batch = parity.make_batch(arch.vocab_size)
        for text, count in (("tp1", 1), ("tp2pp2sp", 4), ("cp2tp2", 4)):
            layout = Layout.parse(text, tuple(range(count)))
            engine = Engine(
                arch=arch,
                folder=str(path),
                groups=ProcessGroups(layout, world()),
                head=head,
                options=EngineOptions(config=CONFIG, seed=1),
            )
            mine, micro = parity.share_of(batch, layout, 64)
            results = engine.infer(mine, micro, last_token=head == "sequence")
            worst = 0.0
            with torch.no_grad():
                truth = parity.sample_logits(model, mine)
            for b in range(len(mine) if results is not None else 0):
                if head == "sequence":
                    got, want = results["values"][b].sum()[None], truth[b]
                else:
                    asked = mine.response_mask[b].nonzero().squeeze(1)
                    got, want = results["values"][b, asked], truth[b][asked - 1, 0]
                worst = max(worst, (got - want).abs().max().item())
            parity.check(f"{head} head {layout} on {count}", limit=1e-4, values=worst)


def check_together() -> None:
    """Two models in one pass give what each gives alone, bit by bit."""
    folder = parity.shared_folder() / "qwen3"
    parity.write_once(folder, "qwen3")
    arch = read_architecture(folder)
    for text, ranks in (
        ("tp1", (1,)),
        ("tp2pp2sp", (0, 1, 2, 3)),
        ("pp2vpp2", (0, 1, 2, 3)),
        ("pp4", (0, 1, 2, 3)),
        ("cp2tp2", (0, 1, 2, 3)),
    ):
        layout = Layout.parse(text, ranks)
        common = {"arch": arch, "groups": ProcessGroups(layout, world()), "head": "lm"}
        read = EngineOptions(config=CONFIG, seed=1, temperature=TEMPERATURE)
        engines = [
            Engine(folder=str(folder), options=read, **common),
            Engine(folder=None, options=EngineOptions(config=CONFIG, seed=2), **common),
        ]
        mine, micro = parity.share_of(parity.make_batch(arch.vocab_size), layout, 64)
        alone, together = (
            [engine.infer(mine, micro) for engine in engines],
            infer_models(engines, mine, micro, ("logprobs", "entropy")),
        )
        for one, other in zip(alone, together, strict=True):
            assert (one is None) == (other is None) and all(
                torch.equal(other[name], value) for name, value in (one or {}).items()
            ), text
        assert alone[0] is None or not torch.allclose(alone[0]["logprobs"], alone[1]["logprobs"]), (
            "the models are the same"
        )
        parity.say(f"together under {layout}: equal bit by bit")
        engines[1].compute = replace(engines[1].compute, fp8=True)  # for its padding, which both get then
        padded = infer_models(engines, mine, micro, ("logprobs", "entropy"))
        for one, other in zip(alone, padded, strict=True):
            for name, value in (one or {}).items():
                torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5)  # float32, other blocks


def check_shapes() -> None:
    """Shapes that another stage sends are asked for once each; those of micro-batches differ."""
    folder = parity.shared_folder() / "qwen3"
    parity.write_once(folder, "qwen3")
    arch, layout = read_architecture(folder), Layout.parse("pp4", (0, 1, 2, 3))
    engine = Engine(
        arch=arch,
        groups=ProcessGroups(layout, world()),
        head="lm",
        folder=None,
        options=EngineOptions(config=CONFIG, seed=1),
    )
    usual, came = Pipeline._communicate_shapes, []

    def communicate(self, *wanted):
        with patch.multiple(dist, isend=refuse, irecv=refuse, P2POp=refuse):
            came.append(usual(self, *wanted))
        return came[-1]

    def refuse(*_, **__):
        raise AssertionError("a stage tells its neighbour a shape")

    with patch.object(Pipeline, "_communicate_shapes", communicate):
        mine, micro = parity.share_of(parity.make_batch(arch.vocab_size), layout, 64)
        engine.infer(mine, micro)
    from_previous = [tuple(shape) for shape, _ in came if shape]
    assert engine.groups.is_first_stage != (len(set(from_previous)) > 1), from_previous
    assert len(from_previous) == (0 if engine.groups.is_first_stage else len(micro)), from_previous
    parity.say("shapes: known to every stage")


if __name__ == "__main__":
    parity.run_checks(
        {
            "families": check_families,
            "heads": check_heads,
            "together": check_together,
            "shapes": check_shapes,
        },
        sys.argv[1:],
    )
