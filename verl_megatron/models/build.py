"""Construction of this rank's Megatron-Core model chunks from an architecture."""

import contextlib
import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from parallel import megatron
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head, is_language, padded_vocab
from verl_megatron.models.attention import PackedAttention
from verl_megatron.models.heads import LanguageHead, SharedTrunkValueHead, ValueHead
from verl_megatron.models.rope import TokenRotaryEmbedding, rope_frequencies
from verl_megatron.models.shared_prompt_attention import SharedPromptAttention

Spec = Literal["te", "local"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Numerics and execution options of a model, resolved from the settings and this machine."""

    dtype: torch.dtype
    spec: Spec
    fp8: bool = False  # for the layers' matrix products; transformer-engine only
    fp8_weights: bool = False  # weights of these products in fp8, too; frozen models only
    recompute: str = "none"  # none, selective, full
    shared_prompts: bool = False  # micro-batches of `pack_shared`; without context parallelism

    @property
    def token_multiple(self) -> int:
        """Multiple of which a rank's packed tokens must be; fp8 kernels need 16."""
        return 16 if self.fp8 else 1


def choose_spec(setting: str) -> Spec:
    """Choose the layer spec for `engine.transformer_impl`.

    "auto" is transformer-engine on GPUs where it is installed, and else local.
    """
    if setting != "auto":
        return cast(Spec, setting)
    return "te" if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") else "local"


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's sequence-parallel mark on the weight.

    Megatron's own wrapper rejects sequence parallelism, which needs nothing but this mark.
    """

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def _uneven_stages(arch: Architecture, layout: Layout) -> dict[str, Any]:
    """Return Megatron's options for `layout.stage_layers`; none where stages are equal."""
    stages = [len(layers) for layers in layout.layers_of(arch.num_layers).values()]
    assert len(set(stages[1 : layout.pp - 1])) <= 1, (
        "Megatron-Core lets only the first and the last stage differ"
    )
    if not layout.stage_layers:
        return {}
    return dict(
        num_layers_in_first_pipeline_stage=stages[0] * layout.vpp,
        num_layers_in_last_pipeline_stage=stages[layout.pp - 1] * layout.vpp,
    )


def transformer_config(arch: Architecture, layout: Layout, compute: Compute) -> TransformerConfig:
    """Build Megatron's TransformerConfig for the architecture under a layout."""
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": dict(recompute_granularity="selective"),
        "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    }
    # Scales come from the current tensors, reduced over the tensor-parallel ranks that split them. No wider
    # group is lent to Megatron's globals.
    fp8: dict[str, Any] = (
        dict(fp8="hybrid", fp8_recipe="tensorwise", tp_only_amax_red=True, fp8_param=compute.fp8_weights)
        if compute.fp8
        else {}
    )
    on_gpu = torch.cuda.is_available()
    _, attention_factor = rope_frequencies(arch)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        softmax_scale=attention_factor**2 / arch.head_dim**0.5,  # YaRN scales both queries and keys
        init_method_std=arch.initializer_range,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=compute.dtype,
        pipeline_dtype=compute.dtype,
        bf16=compute.dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required with variable lengths, even without experts
        # Gradients are summed over data-parallel ranks; losses are already divided by the global divisor.
        calculate_per_token_loss=True,
        batch_p2p_comm=layout.vpp == 1,
        batch_p2p_sync=False,  # PyTorch keeps the buffers of a send alive until it completes
        overlap_p2p_comm=layout.vpp > 1,
        bias_activation_fusion=on_gpu,
        apply_rope_fusion=on_gpu and compute.spec == "te",
        **_uneven_stages(arch, layout),
        **recompute[compute.recompute],
        **fp8,
    )


def layer_spec(arch: Architecture, compute: Compute) -> tuple[Any, Any]:
    """Return the spec of one layer and the class of the final norm."""
    layer: Any
    if compute.spec == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
        if compute.shared_prompts:
            layer.submodules.self_attention.submodules.core_attention = SharedPromptAttention
        return layer, TENorm
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arch.qk_norm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SharedPromptAttention if compute.shared_prompts else PackedAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def build_chunks(
    arch: Architecture, groups: ProcessGroups, compute: Compute, *, head: Head
) -> list[GPTModel]:
    """Build the model chunks of this rank, one per virtual stage, with initial weights.

    A head that is missing from the model folder keeps its initial weights.
    """
    layout, place = groups.layout, groups.coordinates
    config = transformer_config(arch, layout, compute)
    layer, final_norm = layer_spec(arch, compute)
    tied = arch.tied and is_language(head)
    chunks = []
    for chunk in range(layout.vpp):
        is_last = place.pp == layout.pp - 1 and chunk == layout.vpp - 1
        layers = layout.layers_of(arch.num_layers)[place.pp, chunk]
        with (
            warnings.catch_warnings(),
            megatron.megatron_globals(groups),
            # Else fp8 weights would also be stored transposed, and unrounded on the host.
            torch.set_grad_enabled(not compute.fp8_weights),
        ):
            warnings.simplefilter("ignore")
            block: Any = TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=final_norm)
            model = GPTModel(
                config,
                block,
                vocab_size=padded_vocab(arch.vocab_size, layout.tp),
                max_sequence_length=arch.max_positions,
                pre_process=place.pp == 0 and chunk == 0,
                post_process=is_last,
                position_embedding_type="rope",
                rotary_base=cast(int, arch.rope_theta),  # any number will do
                share_embeddings_and_output_weights=tied,
                pg_collection=megatron.collection(groups),
                vp_stage=chunk if layout.vpp > 1 else None,
            )
        frequencies, _ = rope_frequencies(arch)
        model.rotary_pos_emb.inv_freq = frequencies.to(torch.cuda.current_device())
        if compute.shared_prompts:
            cast(Any, model.rotary_pos_emb).__class__ = TokenRotaryEmbedding
        built: Any = model.decoder.layers
        assert [layer.layer_number - 1 for layer in built] == list(layers), (
            "Megatron numbers the layers of this stage differently"
        )
        if is_last:
            _replace_head(model, config, groups, head)
        # With fp8 weights all is on the GPU, and `cuda` would wrap each of them anew.
        chunks.append(model if compute.fp8_weights else model.cuda())
    return chunks


def _replace_head(model: Any, config: TransformerConfig, groups: ProcessGroups, head: Head) -> None:
    if not is_language(head):
        model.output_layer = ValueHead(config, groups.tp, bias=head == "token")
        return
    model.output_layer.__class__ = LanguageHead  # same weight and attributes, other forward pass
    if head == "lm_token":
        model.value_head = SharedTrunkValueHead(config, groups.tp, model.output_layer)


def drop_fp8_weights(chunk: torch.nn.Module) -> None:
    """Free transformer-engine's fp8 copies of the weights: two bytes per parameter, one after no-grad passes.

    The copies serve the micro-batches of one pass. Before the next pass the weights may change or move, and
    vLLM needs the memory.
    """
    for module in chunk.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


@contextlib.contextmanager
def frozen(chunks: list[GPTModel]):
    """Run the block with the chunks in evaluation mode and without gradients."""
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()
