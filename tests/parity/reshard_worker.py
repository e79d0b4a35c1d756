"""Weights from Megatron's shards into vLLM's and back, on four ranks: bit by bit against a fresh vLLM engine.

The first argument is vLLM's tensor-parallel size: a process can hold several engines, but of one size only.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.reshard.execute import Resharder
from parallel.reshard.plan import compile_plan
from parallel.reshard.transport import Transport
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import vllm_parameters
from tests.parity.world import (
    check,
    largest,
    make_batch,
    run_checks,
    sample_logits,
    say,
    share_of,
    shared_folder,
    write_once,
)
from tests.tiny import SERVED, write_tokenizer
from verl_megatron.algorithms.losses import cross_entropy
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import EngineConfig, ReshardConfig, RolloutConfig
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.rollout.sampling import Request, Sampling
from verl_megatron.rollout.vllm import Colocation, VLLMActor
from verl_megatron.rollout.weights import WeightSync

# Every family under one tensor-parallel size of vLLM. With its 1 or 2 key-value heads, all under 4 and the
# first two under 2 have fewer of them than ranks.
FAMILIES = {
    1: ("llama", "qwen2_tied_yarn"),
    2: ("llama_tied_llama3", "mistral", "qwen3"),
    4: ("llama_linear", "qwen2", "qwen3_tied"),
}
# (compact layout, ranks it occupies, stage_layers)
LAYOUTS = [
    ("tp1", (0,), ()), ("tp1", (3,), ()), ("tp1", (0, 1), ()), ("tp2", (0, 1), ()), ("tp2sp", (2, 1), ()),
    ("pp2", (0, 1), ()), ("pp2", (2, 3), (1, 3)), ("pp2vpp2", (1, 2), ()), ("tp1", (0, 1, 2, 3), ()),
    ("tp2", (0, 1, 2, 3), ()), ("tp2pp2", (0, 1, 2, 3), ()), ("tp2pp2sp", (0, 1, 2, 3), (3, 1)),
    ("tp2pp2vpp2", (0, 1, 2, 3), ()), ("tp4", (0, 1, 2, 3), ()), ("tp4sp", (3, 1, 2, 0), ()),
    ("pp4", (0, 1, 2, 3), ()), ("pp2", (0, 1, 2, 3), ()), ("cp2tp2", (0, 1, 2, 3), ()),
]  # fmt: skip
FULLY_SHARDED = [("tp1", (0, 1, 2, 3), ()), ("tp1", (1, 2, 3), ()), ("tp1", (2,), ())]
CONFIG = EngineConfig(tokens_per_micro_batch=64)
FULL = replace(CONFIG, sharding="full")


@dataclass
class Case:
    """A family on this rank, and what vLLM holds after it read the exported folder by itself."""

    family: str
    tp: int
    template: Path  # where the model came from
    exported: Path  # after a step of training
    fresh: dict[str, Tensor]
    tokens: list[list[int]]  # greedy

    @property
    def arch(self):
        return read_architecture(self.template)


def make_engine(
    folder: Path, layout: Layout, *, head="lm", train: bool = False, config: EngineConfig = CONFIG
) -> Engine:
    engine = Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head=head,
        options=EngineOptions(config=config, seed=1),
    )
    if train:  # weights move into the distributed optimizer's buffers, and away from the folder's
        engine.prepare_training(lr=1e-2, total_steps=1)
        batch = make_batch(engine.arch.vocab_size)
        mine, micro = share_of(batch, layout, 64)
        engine.train_step(
            mine,
            micro,
            lambda outputs, micro: cross_entropy(outputs["logprobs"]),
            fields=(),
            scale=LossScale(int(batch.response_mask.sum())),
        )
    return engine


def make_vllm(folder: Path, tp: int, *, load_weights: bool) -> VLLMActor:
    return VLLMActor(
        str(folder),
        tp,
        config=RolloutConfig(tp=tp, max_num_seqs=8, enforce_eager=True, dtype="float32"),
        max_model_len=64,
        colocation=None if load_weights else Colocation(shared_weights={}),
    )


def greedy(vllm: VLLMActor) -> list[list[int]]:
    requests = [Request(sample_id=i, prompt_token_ids=[3 + i, 40, 7 * i + 5], seed=i) for i in range(8)]
    samples = vllm.generate(requests, Sampling(temperature=0.0, max_tokens=12, ignore_eos=True), shared=False)
    return [sample.token_ids for sample in samples]


def assert_bitwise(found: dict, expected: dict, what: str) -> None:
    """Equal names and bits: NaN equals nothing, and zeros have to be zeros of the same sign."""
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    wrong = [
        name
        for name, tensor in expected.items()
        if not torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))
    ]
    assert not wrong, f"{what}, rank {dist.get_rank()}: {wrong[:4]} and {len(wrong)} in all differ"


def poison(tensors: dict) -> None:
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def into_vllm(engine: Engine, vllm: VLLMActor, case: Case) -> None:
    poison(vllm.weight_target())
    sync = WeightSync(
        engine.weight_source(),
        Layout.parse(f"tp{vllm.tp}", ranks=vllm.ranks),
        ReshardConfig(verify="all"),
        world(),
        dtype=torch.float32,
    )
    sync.attach(vllm)
    report = sync.run()
    assert report.checked_slices > 0
    assert_bitwise(vllm.weight_target(), case.fresh, f"{case.family} {engine.layout} to vLLM tp{case.tp}")


def move(source: dict, destination: dict, *, given: dict, taken: dict) -> None:
    plan = compile_plan(source=source, destination=destination, element_bytes=4, window_bytes=2**20)
    transport = Transport(
        dtype=torch.float32, group=world().device_group, device=device.device(), verify="all"
    )
    Resharder(plan, given, taken, transport).run()


def shards_of(engine: Engine) -> dict:
    return dict(engine.weight_source().shards)


def held_by(engine: Engine) -> dict:
    return engine.tensors if engine.groups.is_member else {}


def back_from_vllm(engine: Engine, vllm: VLLMActor, case: Case) -> None:
    """Also the tied copy on the last stage, and zeros where the vocabulary is padded."""
    held = held_by(engine)
    before = {key: tensor.clone() for key, tensor in held.items()}
    poison(held)
    served = {rank: vllm_parameters(case.arch, case.tp, rank % case.tp) for rank in range(4)}
    move(
        served,
        shards_of(engine),
        given={(0, name): tensor for name, tensor in vllm.weight_target().items()},
        taken=held,
    )
    assert_bitwise(held, before, f"{case.family} vLLM tp{case.tp} to {engine.layout}")


def between_disjoint_ranks(case: Case) -> None:
    """The actor on ranks 0-1 and vLLM's parameters, as plain tensors, on ranks 2-3; there and back."""
    rank = dist.get_rank()
    for text in ("tp2", "pp2vpp2", "tp1"):
        engine = make_engine(case.exported, Layout.parse(text, (0, 1)))
        served = {other: vllm_parameters(case.arch, case.tp, other % case.tp) for other in (2, 3)}
        plain = {(0, p.name): torch.full(p.shape, torch.nan) for p in served.get(rank, [])}
        held = held_by(engine)
        before = {key: tensor.clone() for key, tensor in held.items()}
        move(shards_of(engine), served, given=held, taken=plain)
        if rank in served:
            assert_bitwise(
                {name: tensor for (_, name), tensor in plain.items()},
                case.fresh,
                f"{case.family} {text} to other ranks",
            )
        poison(held)
        move(served, shards_of(engine), given=plain, taken=held)
        assert_bitwise(held, before, f"{case.family} {text} from other ranks")


def check_exported(case: Case, layout: Layout, engine: Engine, folder: Path) -> None:
    """The files hold the same bits whatever the layout that wrote them."""
    engine.export(folder, template=str(case.template))
    dist.barrier()
    if dist.get_rank() == 0:
        assert_bitwise(
            load_file(folder / "model.safetensors"),
            load_file(case.exported / "model.safetensors"),
            f"{case.family} exported by {layout}",
        )


def make_case(folder: Path, family: str, tp: int) -> tuple[Case, VLLMActor]:
    """Train a step, export, let one vLLM load the folder; the other vLLM has random weights."""
    template, exported = folder / family, folder / f"{family}_exported"
    if dist.get_rank() == 0:
        write_tokenizer(template)
    original = write_once(template, family, **SERVED[family])
    make_engine(template, Layout.parse("tp2pp2", (0, 1, 2, 3)), train=True).export(
        exported, template=str(template)
    )
    loaded = make_vllm(exported, tp, load_weights=True)
    fresh = {name: tensor.clone() for name, tensor in loaded.weight_target().items()}
    case = Case(family, tp, template, exported, fresh, greedy(loaded))
    loaded.close()
    embedding = original.get_input_embeddings().weight[3:].detach()
    assert (load_file(exported / "model.safetensors")["model.embed_tokens.weight"][3:] != embedding).any(), (
        "the step has to change the weights"
    )
    return case, make_vllm(template, tp, load_weights=False)


def check_family(folder: Path, family: str, tp: int) -> None:
    case, vllm = make_case(folder, family, tp)
    assert any(not torch.equal(tensor, case.fresh[name]) for name, tensor in vllm.weight_target().items()), (
        "nothing would be seen to move"
    )
    configs = [(CONFIG, each) for each in LAYOUTS] + [(FULL, each) for each in FULLY_SHARDED]
    for config, (text, ranks, stage_layers) in configs:
        layout = Layout.parse(text, ranks, stage_layers)
        engine = make_engine(case.exported, layout, config=config)
        into_vllm(engine, vllm, case)
        back_from_vllm(engine, vllm, case)
        if text in ("tp1", "tp4", "pp2vpp2"):
            check_exported(
                case, layout, engine, folder / f"{family}_{text}_{len(ranks)}_{ranks[0]}_{config.sharding}"
            )
    tokens = greedy(vllm)
    assert tokens == case.tokens and len({tuple(row) for row in tokens}) > 1, (tokens, case.tokens)
    if tp <= 2:
        between_disjoint_ranks(case)
    vllm.close()
    say(f"{family} tp{tp}: {len(configs)} layouts there and back, {sum(map(len, tokens))} greedy tokens")


def check_export_is_hugging_face() -> None:
    """The exported folder in transformers: the same logits, settings, tokenizer; a critic's classifier."""
    folder = shared_folder()
    for head, kind, family in (
        ("lm", AutoModelForCausalLM, "qwen2_tied_yarn"),
        ("lm", AutoModelForCausalLM, "mistral"),
        ("token", AutoModelForTokenClassification, "qwen3"),
    ):
        template, exported = folder / f"{family}_{head}", folder / f"{family}_{head}_exported"
        original = write_once(template, family, "ForCausalLM" if head == "lm" else "ForTokenClassification")
        if dist.get_rank() == 0:
            write_tokenizer(template)
            GenerationConfig(
                do_sample=True, temperature=0.6, max_new_tokens=77, eos_token_id=[2, 5]
            ).save_pretrained(template)
        dist.barrier()
        make_engine(template, Layout.parse("tp2pp2", (0, 1, 2, 3)), head=head).export(
            exported, template=str(template)
        )
        dist.barrier()
        loaded, info = kind.from_pretrained(exported, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert_bitwise(
            dict(loaded.named_parameters()), dict(original.named_parameters()), f"exported {family}"
        )
        batch = make_batch(original.config.vocab_size)
        with torch.no_grad():
            pairs = list(zip(sample_logits(original, batch), sample_logits(loaded.eval(), batch)))
        assert loaded.get_input_embeddings().num_embeddings == original.config.vocab_size == 150
        assert (
            loaded.dtype == torch.float32
            and loaded.config.eos_token_id == 2
            and loaded.config.tie_word_embeddings == original.config.tie_word_embeddings
        )
        generation = GenerationConfig.from_pretrained(exported)
        assert (generation.temperature, generation.max_new_tokens, generation.eos_token_id) == (
            0.6,
            77,
            [2, 5],
        )
        assert PreTrainedTokenizerFast.from_pretrained(exported).encode("w3 w4 w149") == [3, 4, 149]
        # Equal weights, but tensors that begin elsewhere in memory are summed in another order.
        check(
            f"exported {head} {family}",
            limit=1e-6,
            logits=largest((a - b).abs().max().item() for a, b in pairs),
        )


if __name__ == "__main__":
    tp, wanted = int(sys.argv[1]), sys.argv[2:]
    root = shared_folder()
    checks = {family: lambda family=family: check_family(root, family, tp) for family in FAMILIES[tp]}
    run_checks(checks | ({"export": check_export_is_hugging_face} if tp == 1 else {}), wanted)
