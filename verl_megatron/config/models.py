"""Settings of Megatron-Core models: weights, layout, compute and optimizer."""

from dataclasses import dataclass

from verl_megatron.config.section import COUNT, POSITIVE, SHARE, Section, setting

SCORERS = ("reward", "reference", "teacher")  # models that may have a world; the first names a shared one


@dataclass(kw_only=True)
class ModelConfig(Section):
    """A trainable model: its weights, parallel layout and learning rate."""

    path: str = setting("", "folder, hub name or URL of the model to start from")
    layout: str = setting(
        "tp1", "such as tp2pp2 or tp4pp2vpp2sp; dp is the number of ranks divided by the rest"
    )
    stage_layers: list[int] = setting([], "number of layers per pipeline stage; empty: equal stages")
    devices: str = setting("", "ranks such as 0-3 or cuda:0-3; empty: all")
    # AdamW changes every weight by about lr.
    lr: float = setting(1e-6, "peak learning rate, reached after the warm-up", within="[0, 1]")


@dataclass(kw_only=True)
class CriticConfig(ModelConfig):
    """The critic: a model of its own, or a value head on the actor's trunk."""

    path: str = setting("", "folder, hub name or URL; empty: start from the actor's weights")
    lr: float = setting(1e-5, "peak learning rate, reached after the warm-up", within="[0, 1]")
    share_trunk: bool = setting(
        False, "a value head beside the actor's output layer instead of a model; path may name its weights"
    )
    trunk_gradient: bool = setting(True, "share_trunk: the value loss trains the trunk, too")
    value_coef: float = setting(0.1, "share_trunk: coefficient of the value loss", within=SHARE)


@dataclass(kw_only=True)
class ReferenceConfig(Section):
    """The reference: the initial weights of the actor, frozen. Without devices it is where the actor is."""

    layout: str = setting("tp1", "layout of a reference on ranks of its own, as actor.layout")
    devices: str = setting(
        "",
        "ranks that only score, after those that train; empty, or those of the actor: there, with its layout",
    )
    dtype: str = setting(
        "auto",
        "fp8: the layers' weights take one byte each and their products are in fp8; auto: as engine.dtype",
        choices=("auto", "fp8"),
    )


@dataclass(kw_only=True)
class TeacherConfig(Section):
    """Frozen model of on-policy distillation."""

    path: str = setting("", "folder, hub name or URL, with the actor's tokenizer; empty: no teacher")
    layout: str = setting("tp1", "layout of the teacher, as actor.layout")
    devices: str = setting("", "ranks of the teacher, as reward.devices")
    dtype: str = setting("auto", "dtype of the teacher, as reference.dtype", choices=("auto", "fp8"))


@dataclass(kw_only=True)
class EngineConfig(Section):
    """Compute settings of all Megatron-Core models, and the optimizer (AdamW) of the trainable ones.

    fp8 is bfloat16 with the matrix products of the layers in fp8. Both keep float32 master weights. Frozen
    models can have their weights in fp8, too: reference.dtype, teacher.dtype and reward.dtype.
    """

    dtype: str = setting(
        "auto",
        "bfloat16, fp8 or float32; auto: bfloat16 on GPUs, float32 on CPUs",
        choices=("auto", "bfloat16", "fp8", "float32"),
    )
    transformer_impl: str = setting(
        "auto",
        "layer spec: te (transformer-engine) or local; auto: te on GPUs if it is installed",
        choices=("auto", "te", "local"),
    )
    recompute: str = setting(
        "none",
        "activation recomputation: none, selective (attention), full (whole layers)",
        choices=("none", "selective", "full"),
    )
    tokens_per_micro_batch: int = setting(
        8192, "maximum packed tokens of a micro-batch, per context-parallel rank", within=POSITIVE
    )
    dynamic_batching: bool = setting(
        False, "fit the micro-batches of trained models to the free memory, by probes in the first iteration"
    )
    shared_prompts: bool = setting(
        False, "samples of a prompt share its tokens in a micro-batch: it is computed once; no cp"
    )
    distributed_optimizer: bool = setting(True, "shard the optimizer state over the dp and cp ranks")
    sharding: str = setting(
        "replicated",
        "weights and gradients over the dp ranks: replicated, or full: sharded, gathered layer by layer",
        choices=("replicated", "full"),
    )
    lr_decay_style: str = setting(
        "constant",
        "learning-rate schedule after the warm-up",
        choices=("constant", "linear", "cosine"),
    )
    lr_warmup_steps: int = setting(0, "optimizer steps of linear learning-rate warm-up", within=COUNT)
    min_lr_ratio: float = setting(
        0.0, "final learning rate / lr, reached one step after the last", within="[0, 1]"
    )
    weight_decay: float = setting(0.01, "decoupled weight decay, as in AdamW", within="[0, 1000]")
    clip_grad: float = setting(1.0, "maximum global gradient norm; 0: no clipping", within=SHARE)
    adam_betas: list[float] = setting(
        [0.9, 0.95], "decay rates of the first and second moment", within="[0, 1)"
    )
    # Smaller values underflow to a division by 0 in float32.
    adam_eps: float = setting(1e-8, "added to the square root of the second moment", within="[1e-30, 1]")
