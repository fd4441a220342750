"""Writes a small model as llama.cpp's converter would: its names, from the `gguf` package, and what it changes."""

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from freehold.models.families.config import HfConfig

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3", "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "minicpm3": "minicpm3", "lfm2": "lfm2",
    "mamba2": "mamba2", "falcon_h1": "falcon-h1", "granitemoehybrid": "granitehybrid", "olmo3": "olmo2",
    "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "falcon_h1", "granitemoehybrid")


def write_gguf(folder: Path, path: Path, kind: gguf.GGMLQuantizationType | None = None) -> None:
    """`folder`: a model saved by transformers. `kind`: the format of matrices whose rows can have it."""
    config = HfConfig(folder, PreTrainedConfig.get_config_dict(folder)[0])
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    architecture = ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields(config, architecture).items():
        _add(writer, f"{architecture}.{name}", value)
    _add(writer, "tokenizer.ggml.model", "gpt2")
    by_name = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[architecture], config.layer_count)
    for name, tensor in changed(config, tensors).items():
        stem, suffix = (name, "") if name.endswith(("A_log", "mamba.D", "mixer.D", "sinks")) else name.rsplit(".", 1)
        found = names.get_name(stem) or names.get_name(name)
        assert found, f"{name} has no name in a GGUF file"
        full = found if found.endswith(("ssm_a", "ssm_d")) else f"{found}.{suffix or 'weight'}"
        values = np.ascontiguousarray(tensor.numpy().astype(np.float32))
        if kind is not None and values.ndim >= 2 and values.shape[-1] % 256 == 0:
            writer.add_tensor(full, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(full, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def fields(config: HfConfig, architecture: str) -> dict:
    """The metadata that the converter writes."""
    found = {
        "context_length": config.context_length,
        "vocab_size": config.int("vocab_size"),
        "embedding_length": config.int("hidden_size"),
        "block_count": config.layer_count,
        "feed_forward_length": config.int("intermediate_size"),
        "attention.head_count": config.int("num_attention_heads"),
        "attention.head_count_kv": config.int("num_key_value_heads"),
        "attention.key_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(
            config.get("rms_norm_eps") or config.get("norm_eps") or config.get("layer_norm_epsilon")
        ),
    }
    for name, source in {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        "attention.value_length": "v_head_dim",
        "shortconv.l_cache": "conv_L_cache",
        "residual_scale": "residual_multiplier",
        "embedding_scale": "embedding_multiplier",
        "logit_scale": "logits_scaling",
        "attention.scale": "attention_multiplier",
    }.items():
        if architecture != "falcon-h1" and config.get(source) is not None:
            found[name] = config.get(source)
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    found["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type", "default") != "default":
        found["rope.scaling.type"], found["rope.scaling.factor"] = rope["rope_type"], float(rope["factor"])
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings", 512)
    if count := config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"):
        found["expert_count"] = count
    return found | _of_family(config, rope)


def _of_family(config: HfConfig, rope: dict) -> dict:
    kind, heads = config.architecture, config.int("num_key_value_heads")
    if kind == "gpt_oss":
        return {"expert_feed_forward_length": config.int("intermediate_size")}
    if kind in ("deepseek_v2", "deepseek_v3", "minicpm3"):
        found = {"attention.key_length": config.int("qk_nope_head_dim") + config.int("qk_rope_head_dim")}
        if kind == "minicpm3":
            scales = config.get("dim_model_base") / config.int("hidden_size")
            return found | {"embedding_scale": float(config.get("scale_emb")), "logit_scale": 1 / scales,
                            "residual_scale": config.get("scale_depth") / config.layer_count**0.5}  # fmt: skip
        groups = config.get("topk_method", "group") != "greedy"
        return found | {
            "expert_gating_func": 2 if kind == "deepseek_v3" else 1,
            "expert_weights_norm": kind == "deepseek_v3",
            "expert_weights_scale": float(config.get("routed_scaling_factor")),
            "expert_group_count": config.int("n_group") if groups else 1,
            "expert_group_used_count": config.int("topk_group"),
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    if kind == "lfm2":
        attends = [layer in config.get("full_attn_idxs") for layer in range(config.layer_count)]
        return {"attention.head_count_kv": [heads if one else 0 for one in attends]}
    if kind == "granitemoehybrid":
        attends = [one == "full_attention" for one in config.layer_types([])]
        return _mamba(config, "mamba_") | {
            "attention.head_count_kv": [heads if one else 0 for one in attends],
            "expert_feed_forward_length": config.int("intermediate_size"),
            "expert_shared_feed_forward_length": config.int("shared_intermediate_size"),
            "rope.scaling.finetuned": False,
        }
    if kind == "falcon_h1":
        return _mamba(config, "mamba_")
    if kind == "olmo3":
        return {"attention.sliding_window_pattern": [one == "sliding_attention" for one in config.layer_types([])]}
    if kind in ("qwen3_next", "qwen3_5_text"):
        heads = config.int("linear_num_value_heads")
        return {
            "ssm.conv_kernel": config.int("linear_conv_kernel_dim"),
            "ssm.state_size": config.int("linear_key_head_dim"),
            "ssm.group_count": config.int("linear_num_key_heads"),
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * config.int("linear_value_head_dim"),
            "rope.dimension_count": config.head_size // 4,
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size", 0),
        }
    if kind == "mamba2":
        return {
            "ssm.conv_kernel": config.int("conv_kernel"),
            "ssm.inner_size": config.int("num_heads") * config.int("head_dim"),
            "ssm.state_size": config.int("state_size"),
            "ssm.time_step_rank": config.int("num_heads"),
            "ssm.group_count": config.int("n_groups"),
        }
    return {}


def _mamba(config: HfConfig, prefix: str) -> dict:
    heads = config.int(f"{prefix}n_heads")
    return {
        "ssm.conv_kernel": config.int(f"{prefix}d_conv"),
        "ssm.inner_size": heads * config.int(f"{prefix}d_head"),
        "ssm.state_size": config.int(f"{prefix}d_state"),
        "ssm.time_step_rank": heads,
        "ssm.group_count": config.int(f"{prefix}n_groups"),
    }


def changed(config: HfConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names as transformers has them; experts of a layer in one tensor."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        found |= _converted(config, name, tensor)
    return _stacked(found)


def _converted(config: HfConfig, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    kind = config.architecture
    if name.endswith("A_log"):
        tensor = -tensor.exp()[:, None]
    if name.endswith((".D", "mixer.D")):
        return {name: tensor[:, None]}
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        tensor = tensor[:, 0]
    if "gemma" in kind and "norm" in name:
        tensor = tensor + 1
    if kind in ("qwen3_next", "qwen3_5_text"):
        return _delta(config, name, tensor)
    if kind in PERMUTED and ("q_proj" in name or "k_proj" in name):
        tensor = tensor.reshape(-1, 2, config.head_size // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if kind == "falcon_h1":
        tensor = _multiplied(config, name, tensor)
    if kind == "granitemoehybrid" and "input_linear" in name:
        gate, up = tensor.chunk(2, dim=-2)
        experts = "block_sparse_moe" in name
        parts = ("mlp.experts.gate_proj", "mlp.experts.up_proj") if experts else (
            "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")  # fmt: skip
        layer = name.split(".")[2]
        return {f"model.layers.{layer}.{part}.weight": half for part, half in zip(parts, (gate, up), strict=True)}
    if kind == "gpt_oss" and "gate_up_proj" in name:
        suffix = "bias" if name.endswith("bias") else "weight"
        layer = name.split(".")[2]
        tensor = tensor if suffix == "bias" else tensor.swapaxes(1, 2)
        return {f"model.layers.{layer}.mlp.experts.{part}_proj.{suffix}": tensor[:, at::2]
                for at, part in enumerate(("gate", "up"))}  # fmt: skip
    if kind == "gpt_oss" and "experts.down_proj" in name:
        suffix = "bias" if name.endswith("bias") else "weight"
        tensor = tensor if suffix == "bias" else tensor.swapaxes(1, 2)
        return {f"model.layers.{name.split('.')[2]}.mlp.experts.down_proj.{suffix}": tensor}
    return {name: tensor}


def _delta(config: HfConfig, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Qwen3-Next: one tensor of queries, keys and values, another of gates. Qwen3.5: value heads in turns."""
    keys, heads = config.int("linear_num_key_heads"), config.int("linear_num_value_heads")
    key_size, value_size = config.int("linear_key_head_dim"), config.int("linear_value_head_dim")
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: tensor + 1}
    if "in_proj_qkvz" in name:
        wide = heads // keys * value_size
        parts = tensor.reshape(keys, -1, tensor.shape[-1]).split([key_size, key_size, wide, wide], dim=1)
        q, k, v, z = (part.reshape(-1, tensor.shape[-1]) for part in parts)
        return {name.replace("qkvz", "qkv"): torch.cat([q, k, v]), name.replace("qkvz", "z"): z}
    if config.architecture == "qwen3_next" or "linear_attn" not in name or name.endswith("norm.weight"):
        return {name: tensor}

    def in_turns(values: torch.Tensor, size: int) -> torch.Tensor:
        return values.reshape(keys, heads // keys, size, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        before = 2 * keys * key_size
        return {name: torch.cat([tensor[:before], in_turns(tensor[before:], value_size)])}
    if "out_proj" in name:
        return {name: in_turns(tensor.T.contiguous(), value_size).T}
    return {name: in_turns(tensor, value_size if "in_proj_z" in name else 1)}


def _multiplied(config: HfConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    gate, down = config.get("mlp_multipliers")
    into, attention = config.get("ssm_in_multiplier"), config.get("attention_in_multiplier")
    factors = {
        "embed_tokens": config.get("embedding_multiplier"), "lm_head": config.get("lm_head_multiplier"),
        "q_proj": attention, "k_proj": attention * config.get("key_multiplier"), "v_proj": attention,
        "o_proj": config.get("attention_out_multiplier"), "mamba.out_proj": config.get("ssm_out_multiplier"),
        "gate_proj": gate, "down_proj": down,
    }  # fmt: skip
    for part, factor in factors.items():
        if part in name:
            return tensor * factor
    if "mamba.in_proj" in name:
        inner = config.int("mamba_n_heads") * config.int("mamba_d_head")
        shared = config.int("mamba_n_groups") * config.int("mamba_d_state")
        sizes = torch.tensor([inner, inner, shared, shared, config.int("mamba_n_heads")])
        return tensor * into * torch.tensor(config.get("ssm_multipliers")).repeat_interleave(sizes)[:, None]
    return tensor


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """experts.0.up_proj, experts.1.up_proj ... -> experts.up_proj [experts, rows, columns]"""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".experts.")
        if len(parts) == 2 and parts[1][0].isdigit():
            number, rest = parts[1].split(".", 1)
            stacks.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
