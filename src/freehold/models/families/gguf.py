"""Reads models from GGUF metadata and tensor names (llama.cpp, `gguf-py/gguf/constants.py`).

llama.cpp's converter changes some tensors: it adds 1 to Gemma's norms, stores Mamba2's time constants as -exp, folds
Falcon-H1's multipliers into the weights, and permutes some families' queries and keys, and Qwen3.5's value heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from freehold.models.families.gguf_fields import GgufFields
from freehold.models.families.rotary import rotary_of, yarn_magnitude
from freehold.models.families.rules import (
    ABSENT,
    ATTENTION_BIASES,
    EXPERT_BIASES,
    MAMBA_NORM,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    QKV_BIASES,
    SHARED_ROUTER,
    SINKS,
    TAPS_BIAS,
    Rule,
)
from freehold.models.spec import (
    Activation,
    GatedDelta,
    Latent,
    LayerSpec,
    Mamba2,
    ModelSpec,
    Rotary,
    Routing,
    ShortConv,
)
from freehold.models.tensor import StoredTensor


def _gate_or_up(stored: StoredTensor, match: re.Match[str]) -> StoredTensor:
    """Return one half of a tensor that holds both, gate first."""
    half = stored.rows // 2
    return stored.between(half, stored.rows) if match[2] == "up" else stored.between(0, half)


def _flat(stored: StoredTensor, match: re.Match[str]) -> StoredTensor:
    """Flatten a vector with a dimension for heads or groups."""
    return StoredTensor(stored.format, 1, stored.rows * stored.columns, stored.data.reshape(1, -1))


RULES = (
    Rule(r"embedding\.weight", "token_embd.weight"),
    Rule(r"norm\.weight", "output_norm.weight"),
    Rule(r"norm\.weight", "token_embd_norm.weight"),
    Rule(r"head\.weight", "output.weight"),
    Rule(r"mixer_norm\.weight", "attn_norm.weight"),
    Rule(r"mixer_post_norm\.weight", "post_attention_norm.weight"),
    Rule(r"ffn_norm\.weight", "ffn_norm.weight"),
    Rule(r"ffn_post_norm\.weight", "post_ffw_norm.weight"),
    Rule(r"attention\.([qkv])\.(\w+)", r"attn_\1.\2"),
    Rule(r"attention\.output\.(\w+)", r"attn_output.\1"),
    Rule(r"attention\.([qk]_norm)\.weight", r"attn_\1.weight"),
    Rule(r"attention\.sinks", "attn_sinks.weight"),
    Rule(r"latent\.q\.weight", "attn_q.weight"),
    Rule(r"latent\.q_down\.weight", "attn_q_a.weight"),
    Rule(r"latent\.q_norm\.weight", "attn_q_a_norm.weight"),
    Rule(r"latent\.q_up\.weight", "attn_q_b.weight"),
    Rule(r"latent\.kv_down\.weight", "attn_kv_a_mqa.weight"),
    Rule(r"latent\.kv_norm\.weight", "attn_kv_a_norm.weight"),
    Rule(r"latent\.kv_up\.weight", "attn_kv_b.weight"),
    Rule(r"latent\.output\.weight", "attn_output.weight"),
    Rule(r"conv\.input\.weight", "shortconv.in_proj.weight"),
    Rule(r"conv\.output\.weight", "shortconv.out_proj.weight"),
    Rule(r"conv\.taps\.weight", "shortconv.conv.weight"),
    Rule(r"mamba\.input\.weight", "ssm_in.weight"),
    Rule(r"mamba\.output\.weight", "ssm_out.weight"),
    Rule(r"mamba\.taps\.(\w+)", r"ssm_conv1d.\1"),
    Rule(r"mamba\.decay", "ssm_a", _flat),
    Rule(r"mamba\.skip", "ssm_d", _flat),
    Rule(r"mamba\.step_bias", "ssm_dt.bias"),
    Rule(r"mamba\.norm\.weight", "ssm_norm.weight", _flat),
    Rule(r"ffn\.(gate|up|down)\.(\w+)", r"ffn_\1.\2"),
    Rule(r"experts\.router\.(weight|bias)", r"ffn_gate_inp.\1"),
    Rule(r"experts\.router\.correction", "exp_probs_b.bias"),
    Rule(r"experts\.(\d+)\.(gate|up|down)\.(\w+)", r"ffn_\2_exps.\3", is_stacked=True),
    Rule(r"experts\.(\d+)\.(gate|up)\.weight", "ffn_gate_up_exps.weight", _gate_or_up, True),
    Rule(r"shared\.(gate|up|down)\.weight", r"ffn_\1_shexp.weight"),
    Rule(r"shared\.router\.weight", "ffn_gate_inp_shexp.weight"),
)


@dataclass(frozen=True)
class GgufFamily:
    """`layers` reads the layers of a file, `model` everything else. `rules` precede `RULES`. `scales_weights`: the
    converter multiplied weights, so that adapters don't fit. `parts`: as in `ModelSpec`."""

    layers: Callable[[GgufFields], Sequence[LayerSpec]]
    rules: Callable[[GgufFields], Sequence[Rule]] = field(default=lambda fields: ())
    model: Callable[[GgufFields], dict[str, Any]] = field(default=lambda fields: {})
    scales_weights: bool = False
    parts: tuple[str, ...] = (PRE_NORMS,)

    def spec(self, fields: GgufFields) -> ModelSpec:
        usual: dict[str, Any] = {
            "architecture": fields.architecture,
            "hidden_size": fields.int("embedding_length"),
            "vocab_size": fields.vocab_size,
            "context_length": fields.context_length,
            "norm_epsilon": float(fields.get("attention.layer_norm_rms_epsilon", 1e-5)),
            "tied_embeddings": "output.weight" not in fields.shapes,
            "parts": self.parts,
        }
        return ModelSpec(**{**usual, **self.model(fields), "layers": tuple(self.layers(fields))})


def _plain(fields: GgufFields) -> list[LayerSpec]:
    window = fields.window() if fields.architecture == "mistral" else None
    return [LayerSpec((fields.attention(fields.rotary(), window=window),), fields.dense())] * len(fields.layers)


def _halves(fields: GgufFields) -> list[Rule]:
    """Undo llama.cpp's interleaving of the halves of each head in Llama's queries and keys."""

    def change(stored: StoredTensor, match: re.Match[str]) -> StoredTensor:
        half = fields.head_size // 2
        count = stored.columns if stored.rows == 1 else stored.rows
        order = np.arange(count).reshape(-1, half, 2).swapaxes(1, 2).ravel()
        return StoredTensor.of(stored.to_float32()[:, order]) if stored.rows == 1 else stored.reorder(order)

    return [Rule(r"attention\.([qk])\.(\w+)", r"attn_\1.\2", change)]


def _smollm3(fields: GgufFields) -> list[LayerSpec]:
    rotary, dense = fields.rotary(), fields.dense()
    return [LayerSpec((fields.attention(rotary if (layer + 1) % 4 else None),), dense) for layer in fields.layers]


def _qwen3_moe(fields: GgufFields) -> list[LayerSpec]:
    experts = fields.experts(Routing(fields.int("expert_used_count")))
    return [LayerSpec((fields.attention(fields.rotary()),), experts)] * len(fields.layers)


def _gemma(every: int) -> Callable[[GgufFields], list[LayerSpec]]:
    """Return a reader in which every `every`-th layer has full attention. Gemma 3's windows have their own rotary base
    and are not scaled."""

    def layers(fields: GgufFields) -> list[LayerSpec]:
        full = fields.rotary()
        local = full if every == 2 else fields.rotary(theta=fields.get("rope.freq_base_swa", 10_000.0), is_scaled=False)
        cap = float(fields.get("attn_logit_softcapping", 0.0))
        scale = _gemma_scale(fields)

        def layer(index: int) -> LayerSpec:
            is_full = (index + 1) % every == 0
            window = None if is_full else fields.window()
            rotary = full if is_full else local
            attention = fields.attention(rotary, window=window, scale=scale, soft_cap=cap)
            return LayerSpec((attention,), fields.dense(kind="gelu"))

        return [layer(index) for index in fields.layers]

    return layers


def _gemma_scale(fields: GgufFields) -> float:
    """Return the score scale. Both 27B models divide by the head size they would have without `key_length`."""
    largest = {"gemma2": 46, "gemma3": 62}[fields.architecture]
    size = fields.int("embedding_length") // fields.head_count if len(fields.layers) == largest else fields.head_size
    return size**-0.5


def _gemma_model(fields: GgufFields) -> dict[str, Any]:
    return {
        "embedding_multiplier": fields.int("embedding_length") ** 0.5,
        "logit_cap": float(fields.get("final_logit_softcapping", 0.0)),
    }


def _gpt_oss(fields: GgufFields) -> list[LayerSpec]:
    routing = Routing(fields.int("expert_used_count"), scores="chosen", normalize=False)
    experts, rotary = fields.experts(routing, Activation("clamped", 1.702, 7.0)), _gpt_oss_rotary(fields)
    return [
        LayerSpec((fields.attention(rotary, window=None if layer % 2 else fields.window()),), experts)
        for layer in fields.layers
    ]


def _gpt_oss_rotary(fields: GgufFields) -> Rotary:
    """Return the rotary embedding: its YaRN does not round the interpolation bounds."""
    rope = {
        "rope_type": "yarn",
        "factor": fields.get("rope.scaling.factor", 32.0),
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length", 4096),
        "truncate": False,
    }
    return rotary_of(rope, fields.head_size, float(fields.get("rope.freq_base", 150_000.0)), fields.context_length)


def _latent(fields: GgufFields) -> list[LayerSpec]:
    """Read DeepSeek V2, V3 and MiniCPM3, with keys and values of all heads in one tensor."""
    turned, rank = fields.int("rope.dimension_count"), fields.int("attention.kv_lora_rank")
    head = int(fields.get("attention.key_length_mla") or fields.int("attention.key_length"))
    value = int(fields.get("attention.value_length_mla") or fields.int("attention.value_length"))
    is_deepseek = fields.architecture == "deepseek2"
    factor, slope = (
        float(fields.get("rope.scaling.factor", 1.0)),
        float(fields.get("rope.scaling.yarn_log_multiplier", 0)),
    )
    latent = Latent(
        head_count=fields.head_count,
        rank=rank,
        plain_size=head - turned,
        value_size=value,
        rotary=replace(fields.rotary(turned), magnitude=1.0),
        scale=head**-0.5 * yarn_magnitude(factor, 10 * slope) ** 2,
        is_interleaved=is_deepseek,
        query_rank=fields.get("attention.q_lora_rank"),
    )
    if not is_deepseek:
        multiplier = float(fields.get("residual_scale", 1.4 / len(fields.layers) ** 0.5))
        return [LayerSpec((latent,), fields.dense(), (multiplier,), multiplier)] * len(fields.layers)
    is_sigmoid = int(fields.get("expert_gating_func", 1)) == 2
    routing = Routing(
        fields.int("expert_used_count"),
        scores="sigmoid" if is_sigmoid else "softmax",
        normalize=bool(fields.get("expert_weights_norm", False)),
        factor=float(fields.get("expert_weights_scale", 1.0)),
        group_count=int(fields.get("expert_group_count", 1)),
        groups_used=int(fields.get("expert_group_used_count", 1)),
        group_by_two=is_sigmoid,
    )
    dense = fields.int("leading_dense_block_count")
    return [
        LayerSpec((latent,), fields.dense() if layer < dense else fields.experts(routing)) for layer in fields.layers
    ]


def _minicpm3_model(fields: GgufFields) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(fields.get("embedding_scale", 12.0)),
        "logit_multiplier": 1 / float(fields.get("logit_scale", fields.int("embedding_length") / 256)),
    }


def _lfm2(fields: GgufFields) -> list[LayerSpec]:
    conv = ShortConv(fields.int("embedding_length"), fields.int("shortconv.l_cache"))
    heads = fields.each("attention.head_count_kv")
    return [
        LayerSpec((fields.attention(fields.rotary(), layer) if heads[layer] else conv,), fields.dense(layer))
        for layer in fields.layers
    ]


def _mamba(fields: GgufFields) -> Mamba2:
    heads = fields.int("ssm.time_step_rank")
    return Mamba2(
        head_count=heads,
        head_size=fields.int("ssm.inner_size") // heads,
        state_size=fields.int("ssm.state_size"),
        group_count=int(fields.get("ssm.group_count", 1)),
        taps=fields.int("ssm.conv_kernel"),
    )


def _mamba2(fields: GgufFields) -> list[LayerSpec]:
    return [LayerSpec((_mamba(fields),), None)] * len(fields.layers)


def _falcon_h1(fields: GgufFields) -> list[LayerSpec]:
    layer = LayerSpec((_mamba(fields), fields.attention(fields.rotary())), fields.dense(), (1.0, 1.0))
    return [layer] * len(fields.layers)


def _granite(fields: GgufFields) -> list[LayerSpec]:
    heads, multiplier = fields.each("attention.head_count_kv"), float(fields.get("residual_scale", 1.0))
    is_rotated = bool(fields.get("rope.scaling.finetuned", False))

    def layer(index: int) -> LayerSpec:
        rotary = fields.rotary() if is_rotated else None
        attention = fields.attention(
            rotary, index, scale=float(fields.get("attention.scale") or fields.head_size**-0.5)
        )
        routing = Routing(int(fields.get("expert_used_count", 0)), scores="chosen", normalize=False)
        ffn = fields.experts(routing) if fields.get("expert_count") else fields.dense(index)
        return LayerSpec((attention if heads[index] else _mamba(fields),), ffn, (multiplier,), multiplier)

    return [layer(index) for index in fields.layers]


def _granite_model(fields: GgufFields) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(fields.get("embedding_scale", 1.0)),
        "logit_multiplier": 1 / float(fields.get("logit_scale", 1.0)),
    }


def _olmo2(fields: GgufFields) -> list[LayerSpec]:
    """Read OLMo 2 and 3. OLMo 3 adds windows, which are not scaled for long contexts."""
    pattern = fields.get("attention.sliding_window_pattern") or [False] * len(fields.layers)
    full, local = fields.rotary(), fields.rotary(is_scaled=False)
    return [
        LayerSpec(
            (fields.attention(local if slides else full, window=fields.window() if slides else None, wide_norms=True),),
            fields.dense(),
        )
        for slides in pattern
    ]


def _delta(fields: GgufFields) -> list[LayerSpec]:
    """Read Qwen3-Next and Qwen3.5, with or without experts. For the latter, the converter sorted the value heads so
    that neighbours belong to different key heads."""
    heads, keys = fields.int("ssm.time_step_rank"), fields.int("ssm.group_count")
    delta = GatedDelta(
        key_head_count=keys,
        value_head_count=heads,
        key_size=fields.int("ssm.state_size"),
        value_size=fields.int("ssm.inner_size") // heads,
        taps=fields.int("ssm.conv_kernel"),
        tiled_heads=fields.architecture != "qwen3next" and heads != keys,
    )
    attention = fields.attention(fields.rotary(), output_gate=True)
    has_experts = bool(fields.get("expert_count"))
    ffn = fields.experts(Routing(fields.int("expert_used_count"))) if has_experts else fields.dense()
    return [LayerSpec((delta if fields.has("ssm_a", layer) else attention,), ffn) for layer in fields.layers]


def _delta_rules(fields: GgufFields) -> list[Rule]:
    """Return the rules. Qwen3-Next stores strength and time step rows in one tensor, grouped by key head."""

    def half(second: bool) -> Callable[[StoredTensor, re.Match[str]], StoredTensor]:
        def change(stored: StoredTensor, match: re.Match[str]) -> StoredTensor:
            rows = np.arange(stored.rows).reshape(fields.int("ssm.group_count"), 2, -1)
            return stored.reorder(rows[:, int(second)].ravel())

        return change

    return [
        *_POST_NORM,
        Rule(r"delta\.qkv\.weight", "attn_qkv.weight"),
        Rule(r"delta\.gate\.weight", "attn_gate.weight"),
        Rule(r"delta\.strength\.weight", "ssm_beta.weight"),
        Rule(r"delta\.strength\.weight", "ssm_ba.weight", half(second=False)),
        Rule(r"delta\.step\.weight", "ssm_alpha.weight"),
        Rule(r"delta\.step\.weight", "ssm_ba.weight", half(second=True)),
        Rule(r"delta\.taps\.weight", "ssm_conv1d.weight"),
        Rule(r"delta\.decay", "ssm_a", _flat),
        Rule(r"delta\.step_bias", "ssm_dt.bias"),
        Rule(r"delta\.norm\.weight", "ssm_norm.weight"),
        Rule(r"delta\.output\.weight", "ssm_out.weight"),
    ]


_NO_PRE_NORM = (Rule(r"mixer_norm\.weight", ABSENT), Rule(r"ffn_norm\.weight", ABSENT))
_POST_NORM = (Rule(r"ffn_norm\.weight", "post_attention_norm.weight"), Rule(r"mixer_post_norm\.weight", ABSENT))

# By `general.architecture`.
GGUF_FAMILIES = {
    "llama": GgufFamily(_plain, _halves),
    "mistral": GgufFamily(_plain),
    "qwen2": GgufFamily(_plain, parts=(PRE_NORMS, QKV_BIASES)),
    "qwen3": GgufFamily(_plain, parts=(PRE_NORMS, QK_NORMS)),
    "qwen3moe": GgufFamily(_qwen3_moe, parts=(PRE_NORMS, QK_NORMS)),
    "smollm3": GgufFamily(_smollm3, _halves),
    "gemma2": GgufFamily(_gemma(2), model=_gemma_model, parts=(PRE_NORMS, POST_NORMS)),
    "gemma3": GgufFamily(_gemma(6), model=_gemma_model, parts=(PRE_NORMS, POST_NORMS, QK_NORMS)),
    "gpt-oss": GgufFamily(
        _gpt_oss, lambda fields: _POST_NORM, parts=(PRE_NORMS, ATTENTION_BIASES, EXPERT_BIASES, SINKS)
    ),
    "deepseek2": GgufFamily(_latent),
    "minicpm3": GgufFamily(_latent, model=_minicpm3_model),
    "lfm2": GgufFamily(_lfm2, parts=(PRE_NORMS, QK_NORMS)),
    "mamba2": GgufFamily(_mamba2, parts=(PRE_NORMS, MAMBA_NORM, TAPS_BIAS)),
    "falcon-h1": GgufFamily(_falcon_h1, _halves, scales_weights=True, parts=(PRE_NORMS, TAPS_BIAS)),
    "granitehybrid": GgufFamily(_granite, _halves, _granite_model, parts=(PRE_NORMS, MAMBA_NORM, TAPS_BIAS)),
    "olmo2": GgufFamily(_olmo2, lambda fields: _NO_PRE_NORM, parts=(POST_NORMS, QK_NORMS)),
    "qwen3next": GgufFamily(_delta, _delta_rules, parts=(PRE_NORMS, QK_NORMS, SHARED_ROUTER)),
    "qwen35": GgufFamily(_delta, _delta_rules, parts=(PRE_NORMS, QK_NORMS, SHARED_ROUTER)),
    "qwen35moe": GgufFamily(_delta, _delta_rules, parts=(PRE_NORMS, QK_NORMS, SHARED_ROUTER)),
}


def gguf_family_of(name: str, where: object) -> GgufFamily:
    """Return a family. Raises ValueError for an unsupported one; `where` the name was found."""
    if name not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise ValueError(f"{where}: model type '{name}' is not supported ({known} are)")
    return GGUF_FAMILIES[name]
