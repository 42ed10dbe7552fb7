"""Writes tiny models with several KV cache groups, with seeded random weights.

Each is a family that vLLM's CPU engine runs. The standard deviation of the weights is 0.2, as in
``kvtier.harness.tiny_model``: greedy output of smaller ones falls into a loop, which hides wrong
KV. ``transformers`` knows the families' parameters, and is a dependency of vLLM.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 64
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
STATE_ENGINE: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
    "block_size": 64,
}
"""vLLM disables prefix caching of linear states by default, and with more tokens per step fails on
its own."""


@dataclass(frozen=True, slots=True)
class HybridModel:
    """One family: the type of its configuration, what differs from the common values, and the
    options that its engine needs.

    ``chunk_tokens``: of the topology. ``embedding_scale``: where the output uses the weights of the
    embedding, large ones make the model repeat its input, which hides wrong KV. ``environment``: of
    the engine.
    """

    model_type: str
    values: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int = 64
    embedding_scale: float = 1.0
    environment: dict[str, str] = field(default_factory=dict)


MODELS: dict[str, HybridModel] = {
    "gpt-oss": HybridModel(
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma3": HybridModel(
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
        embedding_scale=0.01,
    ),
    "gemma4": HybridModel(
        # Layers with other head sizes: vLLM gives the two kinds other block sizes, 64 and 32.
        "gemma4_text",
        {
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
            "tie_word_embeddings": True,
        },
        embedding_scale=0.01,
    ),
    "llama4": HybridModel(
        # Chunked local attention, for which vLLM keeps one group unless it is told otherwise.
        "llama4_text",
        {
            "attention_chunk_size": 128,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": ["chunked_attention", FULL, "chunked_attention", FULL],
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "use_qk_norm": False,
        },
        environment={"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"},
    ),
    "olmo3": HybridModel(
        "olmo3",
        {"sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    ),
    "granite": HybridModel(
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
        },
        STATE_ENGINE,
    ),
    "nemotron-h": HybridModel(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "chunk_size": 32,
            "attention_head_dim": 32,
        },
        STATE_ENGINE,
    ),
    "falcon-h1": HybridModel(
        "falcon_h1",
        {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 256, "attn_layer_indices": None},
        STATE_ENGINE,
    ),
    "qwen3-next": HybridModel(
        "qwen3_next",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": ["linear_attention"] * 3 + [FULL],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        {"enable_prefix_caching": True, "dtype": "bfloat16"},
    ),
}


def write_hybrid(name: str, directory: Path, **changes: Any) -> Path:
    """Writes the model called ``name`` into ``directory``; returns the directory.

    ``changes``: values of its configuration that differ.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = MODELS[name]
    config = AutoConfig.for_model(model.model_type, **{**_COMMON, **model.values, **changes})
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config).to(torch.float32)
        with torch.no_grad():
            made.get_input_embeddings().weight.mul_(model.embedding_scale)
    finally:
        torch.random.set_rng_state(state)
    made.save_pretrained(directory)
    return directory
