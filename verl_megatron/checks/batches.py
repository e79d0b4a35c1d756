"""Division of an iteration's samples into mini-batches and data-parallel ranks."""

from parallel.layout import Layout
from parallel.runtime.refusal import counted, short_repr
from verl_megatron.checks.rollout import SETTING, least_samples
from verl_megatron.config import EngineConfig, SupervisedConfig, TrainerConfig
from verl_megatron.data.pairs import is_paired, items_per_step
from verl_megatron.model_specs import layout_of, models_of, num_rollout_ranks

MOST_SAMPLES = 1_000_000  # per iteration: every rank has a table of all


def check_batch(config: TrainerConfig, layouts: dict[str, Layout | None]) -> list[str]:
    """Check that the samples of an iteration divide into mini-batches and data-parallel ranks."""
    data, algorithm = config.data, config.algorithm
    samples, parts = data.prompts_per_iteration * data.samples_per_prompt, algorithm.num_mini_batches
    product = (
        f"data.prompts_per_iteration={data.prompts_per_iteration} x "
        f"data.samples_per_prompt={data.samples_per_prompt} = {samples} samples"
    )
    if parts < 1 or samples < 1:
        return []  # reported by their intervals
    if samples > MOST_SAMPLES:
        return [
            f"{short_repr(product)[1:-1]} are more than {MOST_SAMPLES:,}; "
            "lower one of them and raise run.iterations"
        ]
    least = data.prompts_per_iteration * least_samples(config)
    if least < samples:
        product = f"{product}, of which {SETTING} leaves at least {least},"
    elif samples % parts:
        return [
            f"{product} do not split into algorithm.num_mini_batches={parts}; choose a divisor of {samples}"
        ]
    return [
        f"{product} in {parts} mini-batches of {least // parts} leave some of the {layout.dp} "
        f"data-parallel ranks of {name}.layout={layout} without a sample; "
        "use fewer mini-batches, more samples or a layout with less dp"
        for name, layout in layouts.items()
        if layout is not None and least // parts < layout.dp
    ]


def batch_arithmetic(config: TrainerConfig, world_size: int) -> str:
    """Describe the batch division of an iteration in one line; `config` must have passed `check_config`.

    Where prompts differ in their number of samples, it is that of the most.
    """
    data, algorithm, engine = config.data, config.algorithm, config.engine
    samples = data.prompts_per_iteration * data.samples_per_prompt
    mini_batch = samples // algorithm.num_mini_batches
    shares = []
    for spec in models_of(config):
        if spec.trainable:
            layout = layout_of(spec.model, world_size)
            share = _about(mini_batch, layout.dp)
            shares.append(f"{spec.name} {layout}: {share} of a mini-batch a data-parallel rank")
    steps = algorithm.epochs * algorithm.num_mini_batches
    replicas = num_rollout_ranks(config, world_size) // config.rollout.tp
    least = data.prompts_per_iteration * least_samples(config)
    fewer = f" (at least {least}, by {SETTING})" if least < samples else ""
    return (
        f"{counted(data.prompts_per_iteration, 'prompt')} x {counted(data.samples_per_prompt, 'sample')} = "
        f"{counted(samples, 'sample')}{fewer}"
        f" = {counted(algorithm.num_mini_batches, 'mini-batch', 'mini-batches')} of "
        f"{mini_batch}; {'; '.join(shares)};"
        f" micro-batches {_largest(engine)}; "
        f"{counted(algorithm.epochs, 'epoch')}: {counted(steps, 'optimizer step')}"
        f" an iteration; rollout {counted(replicas, 'replica')} of "
        f"tp{config.rollout.tp}{_at_once(config)}"
    )


def supervised_arithmetic(config: SupervisedConfig, world_size: int, *, items: int = 0) -> str:
    """Describe the batch of an optimizer step in one line; `config` must have passed its checks.

    Args:
        items: number of samples or pairs in the data; 0: not known yet.
    """
    trained, count = models_of(config)[0], items_per_step(config.data)
    item = "pair" if is_paired(config.data) else "sample"
    layout = layout_of(trained.model, world_size)
    steps, taken = config.run.iterations, config.run.iterations * count
    whole = f" of {items:,}, {taken / items:.2g} epochs" if items else ""
    return (
        f"{counted(count, item)} a step; {trained.section} {layout}: {_about(count, layout.dp, item)} a "
        f"data-parallel rank; micro-batches {_largest(config.engine)}, packed; "
        f"{counted(steps, 'step')} take {taken:,} {item}s{whole}"
    )


def _largest(engine: EngineConfig) -> str:
    shared = ", with a group's prompt once" if engine.shared_prompts else ""
    if engine.dynamic_batching:
        return f"as large as memory allows (engine.dynamic_batching){shared}"
    return f"of at most {engine.tokens_per_micro_batch} tokens{shared}"


def _at_once(config: TrainerConfig) -> str:
    rollout = config.rollout
    most = f", at most {rollout.max_num_seqs} samples at once, by the KV cache's use"
    drafts = f", drafts of {rollout.speculative_tokens} tokens up to {rollout.speculative_max_seqs} samples"
    return most * rollout.dynamic_batching + drafts * (rollout.speculative != "off")


def _about(count: int, parts: int, item: str = "sample") -> str:
    return counted(count // parts, item) if count % parts == 0 else f"about {count / parts:.1f} {item}s"
