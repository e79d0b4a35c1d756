"""On four ranks: Megatron's logits, log-probs and entropy against Hugging Face's for every family and layout; heads; training.

Every check runs inside one world, because importing and starting it costs more than the checks.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import device

device.initialize()

from parallel.collectives import all_max, all_names, all_sum  # noqa: E402
from parallel.groups import ProcessGroups  # noqa: E402
from parallel.layout import Layout  # noqa: E402
from parallel.weights.architecture import read_architecture  # noqa: E402
from tests.tiny import FAMILIES, write_hf  # noqa: E402
from verl_megatron.batch import RolloutBatch  # noqa: E402
from verl_megatron.config import AlgorithmConfig, EngineConfig  # noqa: E402
from verl_megatron.losses import PolicyTokens, policy_loss, value_loss  # noqa: E402
from verl_megatron.models.heads import head_weight  # noqa: E402
from verl_megatron.packing import balance, micro_batches  # noqa: E402
from verl_megatron.roles.engine import Engine  # noqa: E402

# (compact layout, ranks it occupies, stage_layers)
LAYOUTS = [
    ("tp1", 1, ()), ("tp1", 2, ()), ("tp2", 2, ()), ("pp2", 2, ()), ("cp2", 2, ()), ("tp2sp", 2, ()), ("pp2vpp2", 2, ()), ("pp2", 2, (1, 3)),
    ("tp1", 4, ()), ("tp4", 4, ()), ("tp4sp", 4, ()), ("pp4", 4, ()), ("tp2pp2", 4, ()), ("tp2pp2sp", 4, ()), ("tp2", 4, ()), ("pp2", 4, ()),
    ("cp2tp2sp", 4, ()), ("cp2pp2", 4, ()), ("cp2", 4, ()), ("cp4", 4, ()), ("tp2pp2vpp2", 4, ()),
]  # fmt: skip


def say(*what):
    if dist.get_rank() == 0:
        print(*what, flush=True)


def check(name: str, *, limit: float, **differences: float) -> None:
    """One line, and an end with an error if a difference on any rank is over the limit (NaN is)."""
    worst = all_max(torch.tensor([x if x == x else float("inf") for x in differences.values()], dtype=torch.float64)).tolist()
    say(name, *(f"{key}={value:.1e}" for key, value in zip(differences, worst)))
    assert max(worst) <= limit, f"{name}: {dict(zip(differences, worst))} over {limit}"


def make_batch(vocab_size: int, *, seed: int = 1) -> RolloutBatch:
    """Eight rows of different lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, vocab_size, (n,), generator=generator).tolist()  # noqa: E731
    prompts, responses = [draw(n) for n in (1, 5, 3, 9, 2, 30, 4, 6)], [draw(n) for n in (7, 1, 12, 4, 20, 40, 3, 9)]
    return RolloutBatch.from_rows(list(range(8)), prompts, responses)


class LogitsEngine(Engine):
    """Answers with whole logits, for comparison."""

    def _outputs(self, output, micro, model):
        weight = head_weight(model)
        local = output.squeeze(0).index_select(0, micro.index) @ weight.t()
        parts = [torch.empty_like(local) for _ in range(self.layout.tp)]
        dist.all_gather(parts, local, group=self.groups.tp)
        return {"logits": torch.cat(parts, -1)[:, : self.arch.vocab_size]}


def share_of(batch: RolloutBatch, layout: Layout, budget: int):
    """This rank's rows and micro-batches, as a role would borrow them."""
    if dist.get_rank() not in layout.ranks:
        return batch, []
    rows = balance(batch.lengths.tolist(), layout.dp)[layout.coordinates(dist.get_rank()).dp]
    mine = batch.select(torch.tensor(rows, dtype=torch.int64))
    micro = micro_batches(mine.lengths.tolist(), tokens_per_micro_batch=budget, multiple_of=layout.pp if layout.vpp > 1 else 1)
    return mine, micro


def hf_logits(model, batch: RolloutBatch) -> dict[int, torch.Tensor]:
    """By row number: [L, vocab], one row at a time without padding."""
    with torch.no_grad():
        return {int(i): model(ids[mask][None]).logits[0] for i, ids, mask in zip(batch.row_id, batch.generated_ids, batch.attention_mask)}


def check_logits(family: str, folder: Path, layouts) -> None:
    model, arch = write_hf_once(folder, family), read_architecture(folder)
    batch = make_batch(arch.vocab_size)
    truth = hf_logits(model, batch)
    for text, count, stage_layers in layouts:
        layout = Layout.parse(text, tuple(range(count)), stage_layers)
        engine = LogitsEngine(arch=arch, folder=str(folder), groups=ProcessGroups(layout), config=EngineConfig(tokens_per_micro_batch=64), head="lm", seed=1)
        plain = Engine(arch=arch, folder=str(folder), groups=engine.groups, config=engine.config, head="lm", seed=1, temperature=0.8)
        mine, micro = share_of(batch, layout, 64)
        worst_logit = worst_logprob = worst_entropy = 0.0
        if engine.groups.is_member:
            from verl_megatron.models.build import frozen

            with frozen(engine.chunks):
                answers = engine._run(mine, micro, lambda outputs, micro: (micro, outputs["logits"]), forward_only=True)
            for packed, logits in answers:
                for n in range(len(logits)):
                    row, t = int(mine.row_id[packed.row[n]]), int(packed.column[n])
                    worst_logit = max(worst_logit, (logits[n] - truth[row][t - 1]).abs().max().item())
        results = plain.infer(mine, micro)
        if results is not None:
            for b, row in enumerate(mine.row_id.tolist()):
                asked = mine.response_mask[b].nonzero().squeeze(1)
                log_p = torch.log_softmax(truth[row][asked - 1] / 0.8, -1)
                want = log_p.gather(1, mine.generated_ids[b, asked, None]).squeeze(1)
                worst_logprob = max(worst_logprob, (results["logprobs"][b, asked] - want).abs().max().item())
                worst_entropy = max(worst_entropy, (results["entropy"][b, asked] + (log_p.exp() * log_p).sum(-1)).abs().max().item())
                assert not results["logprobs"][b, ~mine.response_mask[b]].any()
        check(f"{family} {layout} on {count}{list(stage_layers) or ''}", limit=1e-4, logits=worst_logit, logprobs=worst_logprob, entropy=worst_entropy)


def write_hf_once(folder: Path, family: str, head: str = "ForCausalLM"):
    """Every rank makes the same model; the first writes it."""
    from tests.tiny import make_hf

    if dist.get_rank() == 0:
        write_hf(folder, family, head)
    dist.barrier()
    return make_hf(family, head)


def check_heads(folder: Path) -> None:
    """Critic and reward model against Hugging Face's token and sequence classification."""
    for head, name in (("token", "ForTokenClassification"), ("sequence", "ForSequenceClassification")):
        path = folder / head
        model, arch = write_hf_once(path, "llama_tied_llama3", name), read_architecture(path)
        batch = make_batch(arch.vocab_size)
        for text, count in (("tp1", 1), ("tp2pp2sp", 4), ("cp2tp2", 4)):
            layout = Layout.parse(text, tuple(range(count)))
            engine = Engine(arch=arch, folder=str(path), groups=ProcessGroups(layout), config=EngineConfig(tokens_per_micro_batch=64), head=head, seed=1)
            mine, micro = share_of(batch, layout, 64)
            results = engine.infer(mine, micro, last_token=head == "sequence")
            worst = 0.0
            for b in range(len(mine) if results is not None else 0):
                ids = mine.generated_ids[b, mine.attention_mask[b]][None]
                with torch.no_grad():
                    want = model(ids).logits[0]
                if head == "sequence":
                    got = results["values"][b].sum()[None]
                else:
                    asked = mine.response_mask[b].nonzero().squeeze(1)
                    got, want = results["values"][b, asked], want[asked - 1, 0]
                worst = max(worst, (got - want.view_as(got)).abs().max().item())
            check(f"{head} head {layout} on {count}", limit=1e-4, values=worst)


def full_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Hugging Face tensors put together from all ranks' shards; the same on every rank."""
    mine = [(p, engine.tensors[p.chunk, p.name]) for p in engine.parameters if p.owner] if engine.groups.is_member else []
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    from parallel.weights.rules import hf_shapes

    full = {name: torch.full(shape, torch.nan).view(shape[0], -1) for name, shape in hf_shapes(engine.arch, engine.head).items()}
    for parameter, tensor in (pair for part in gathered for pair in part):
        matrix = tensor.view(tensor.shape[0], -1)
        for block in parameter.blocks:
            height, width = block.rows[1] - block.rows[0], block.cols[1] - block.cols[0]
            full[block.tensor][slice(*block.rows), slice(*block.cols)] = matrix[block.row : block.row + height, block.col : block.col + width]
    return full


def train(folder: Path, head: str, layout_text: str, count: int, stage_layers, *, budget: int, distributed_optimizer: bool, recompute: str = "none"):
    """Three optimizer steps on all ranks' rows; the losses and the weights afterwards."""
    arch, layout = read_architecture(folder), Layout.parse(layout_text, tuple(range(count)), stage_layers)
    config = EngineConfig(tokens_per_micro_batch=budget, distributed_optimizer=distributed_optimizer, clip_grad=0.5, adam_eps=1e-4, recompute=recompute, schedule="cosine", warmup_steps=1)
    engine = Engine(arch=arch, folder=str(folder), groups=ProcessGroups(layout), config=config, head=head, seed=1)
    engine.prepare_training(lr=3e-3, total_steps=6)
    batch = make_batch(arch.vocab_size)
    generator = torch.Generator().manual_seed(5)
    noise = lambda: torch.randn(batch.generated_ids.shape, generator=generator) * batch.response_mask  # noqa: E731
    batch.logprobs, batch.advantages, batch.ref_logprobs = -4 + 0.3 * noise(), noise(), -4 + 0.3 * noise()
    batch.values, batch.returns = noise(), noise()
    algorithm = AlgorithmConfig(entropy_coef=0.01, kl_in="loss", kl_estimator="k3")

    def policy(outputs, fields):
        return policy_loss(outputs["logprobs"], outputs["entropy"], PolicyTokens(fields["logprobs"], fields["advantages"], fields["ref_logprobs"]), algorithm, 0.1)

    def value(outputs, fields):
        return value_loss(outputs["values"], fields["values"], fields["returns"], algorithm)

    loss, fields = (policy, ("logprobs", "advantages", "ref_logprobs")) if head == "lm" else (value, ("values", "returns"))
    mine, micro = share_of(batch, layout, budget)
    history = []
    for _ in range(3):
        sums = engine.train_step(mine, micro, loss, fields=fields, num_tokens=int(batch.response_mask.sum()))
        history.append(sums.reduce(all_sum=all_sum, all_max=all_max, all_names=all_names))
    return history, full_weights(engine)


def check_training(folder: Path) -> None:
    """Losses, gradient norms and weights after three steps do not depend on the layout, the packing or the optimizer's sharding."""
    for head, family in (("lm", "qwen2_tied_yarn"), ("lm", "qwen3"), ("token", "llama_tied_llama3")):
        path = folder / f"train_{head}_{family}"
        write_hf_once(path, family, "ForTokenClassification" if head == "token" else "ForCausalLM")
        want, weights = train(path, head, "tp1", 1, (), budget=1000, distributed_optimizer=False)
        for text, count, stage_layers, budget, extra in (
            ("tp1", 1, (), 40, {}), ("tp1", 4, (), 64, {}), ("tp2pp2", 4, (), 64, {}), ("tp2pp2sp", 4, (), 64, dict(recompute="full")), ("tp4sp", 4, (), 64, {}),
            ("pp2vpp2", 4, (), 64, {}), ("pp2", 4, (1, 3), 64, dict(distributed_optimizer=False)), ("cp2tp2sp", 4, (), 64, {}), ("cp2", 4, (), 64, dict(recompute="selective")),
        ):  # fmt: skip
            got, trained = train(path, head, text, count, stage_layers, budget=budget, **{"distributed_optimizer": True, **extra})
            metric = max(abs(a[key] - b[key]) for a, b in zip(got, want) for key in b)
            moved = max((trained[name] - weights[name]).abs().max().item() for name in weights)
            check(f"train {head} {family} {text} on {count} {extra or ''}", limit=5e-5, metrics=metric, weights=moved)


def main() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    folder = Path(folder[0])
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted in ("", "logits"):
        for number, family in enumerate(FAMILIES):
            check_logits(family, folder / family, LAYOUTS if number == 1 else LAYOUTS[number % 3 :: 3] + LAYOUTS[12:13])
    if wanted in ("", "heads"):
        check_heads(folder)
    if wanted in ("", "train"):
        check_training(folder)
    say("all passed")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
