"""Every field of vLLM's configuration: part of the identity, or why it does not shape KV.

The tables cover all supported releases, and tests compare them with each. A field that a later
release adds is part of the identity as soon as it differs from its default, so that engines with
and without an unknown setting do not share.

A field does not shape KV if engines that differ in it compute the same function of the prefix, up
to rounding: kernels, compilation and batch sizes change the order of additions. Settings that
change a type or a precision are part of the identity.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from kvtier.engines.common.model_identity import plain
from kvtier.namespace import canonical_json

logger = logging.getLogger(__name__)
METHODS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of speculative decoding that draft from tokens alone."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """What is known of one class of vLLM's configuration. Each mapping has names separated by
    spaces, and a text.

    ``values``: names of fields whose values are part of the identity. ``elsewhere``: fields that
    are part of it in another form, which the text says. ``refused``: fields of which only one value
    is served, or is kept beyond the engine. ``unused``: fields that do not shape KV, with the
    reason.
    """

    path: tuple[str, ...]
    """Attributes that lead to it from ``VllmConfig``."""
    values: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    refused: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    unused: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    def listed(self) -> set[str]:
        """All names."""
        found = set(self.values.split())
        for texts in (self.elsewhere, self.refused, self.unused):
            for names in texts:
                found.update(names.split())
        return found


_KERNEL = "chooses kernels, which differ in rounding only"
_SAMPLING = "concerns tokens that are sampled; keys cover tokens"
_INPUT = "decides which tokens a prompt has; keys cover tokens"
_MEMORY = "concerns memory, and no values"
_PROCESSES = "concerns processes and communication, and no values"
_WEIGHTS = "the fingerprint of the weights of each rank"
_LAYOUT = "the codec's layout"
_GROUPS = "the groups of the planner"
_CONFIGURATION = "the effective configuration of the model"

CONFIG_FIELDS: dict[str, ConfigFields] = {
    "VllmConfig": ConfigFields(
        (),
        values="additional_config",
        elsewhere={
            "model_config cache_config parallel_config attention_config mamba_config "
            "kernel_config diffusion_config offload_config speculative_config": "its own table",
            "lora_config": "its own table; the settings are part of the keys of adapters",
            "load_config": _WEIGHTS,
            "engram_config": _WEIGHTS,
            "quant_config": "quantization, quantization_config and the effective configuration",
        },
        unused={
            "scheduler_config": "decides when a token is computed; groups are part of the identity",
            "device_config": "the type of the device decides kernels and layout",
            "compilation_config optimization_level performance_mode": _KERNEL,
            "watermark_config structured_outputs_config reasoning_config": _SAMPLING,
            "aux_output_config observability_config logging_config profiler_config instance_id "
            "shutdown_timeout watchdog_config": "concerns reports and processes",
            "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config": (
                "concerns transfers; what is transferred has the same values"
            ),
            "weight_transfer_config": "weights that are updated have another fingerprint",
        },
    ),
    "ModelConfig": ConfigFields(
        ("model_config",),
        values="quantization_config model_class_overrides code_revision override_attention_dtype",
        elsewhere={
            "model revision hf_config_path config_format trust_remote_code": (
                "the digest of code and configuration, or the commit"
            ),
            "model_weights": _WEIGHTS,
            "hf_config hf_text_config hf_overrides": _CONFIGURATION,
            "model_impl": "implementation",
            "dtype": "dtype",
            "quantization": "quantization",
            "disable_sliding_window": "sliding_window_disabled",
            "max_model_len": "max_model_len, where rotary factors depend on it",
            "multimodal_config": "its own table",
            "word_embeddings_untied_by_checkpoint": _WEIGHTS,
        },
        unused={
            "runner convert pooler_config": (
                "concerns what is done with the last hidden state; where pooling makes attention "
                "non-causal, vLLM disables prefix caching and KVTier is off"
            ),
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
            "allowed_local_media_path allowed_media_domains renderer_num_workers": _INPUT,
            "seed max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask "
            "enable_trace_replay logits_processors generation_config "
            "override_generation_config": _SAMPLING,
            "spec_target_max_model_len": "bounds how far drafts go",
            "enable_prompt_embeds": "requests with prompt embeddings take no part",
            "enforce_eager disable_cascade_attn": _KERNEL,
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator": _MEMORY,
            "allow_deprecated_quantization": "allows a quantization, which is in the identity",
            "enable_return_routed_experts": "concerns reports",
            "served_model_name hf_token": "is a name or a credential",
            "is_submodel_config": "is derived from the model",
        },
    ),
    "CacheConfig": ConfigFields(
        ("cache_config",),
        values="mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode use_replayssm "
        "replayssm_buffer_len use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay "
        "enable_mamba_fine_grained_prefix_cache",
        elsewhere={
            "block_size mamba_block_size sliding_window": _GROUPS,
            "prefix_match_unit hash_block_size": "block_hash",
            "prefix_caching_hash_algo": "block_hash",
            "cache_dtype": "kv_cache_dtype",
            "kv_cache_dtype_skip_layers": "kv_cache_dtype_skip_layers",
            "kv_cache_layout mamba_page_size_padded skip_page_size_padded": _LAYOUT,
        },
        refused={
            "enable_prefix_caching": "KVTier is off without",
            "calculate_kv_scales": "scales that are drawn at the start keep objects in RAM",
        },
        unused={
            "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks": _MEMORY,
            "user_specified_block_size user_specified_mamba_block_size "
            "effective_attention_block_size cache_hit_alignment_tokens": (
                "is derived from block sizes, which are part of the identity"
            ),
            "is_attention_free": "is derived from the model",
            "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint": (
                "decides which blocks vLLM keeps, and not what is in them"
            ),
        },
    ),
    "ParallelConfig": ConfigFields(
        ("parallel_config",),
        values="worker_cls enable_hc_sp",
        elsewhere={
            "tensor_parallel_size pipeline_parallel_size": "parallel",
            "world_size rank": "parallel; each rank has its layout and fingerprint",
            "enable_expert_parallel expert_placement_strategy enable_ep_weight_filter "
            "is_moe_model": _WEIGHTS,
        },
        refused={
            "prefill_context_parallel_size decode_context_parallel_size": "KVTier is off above 1",
            "nnodes": "KVTier is off above 1",
            "enable_eplb": "weights that move keep objects in RAM",
        },
        unused={
            "dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
            "cp_kv_cache_interleave_size": "has an effect with context parallelism only",
            "eplb_config": "has an effect with enable_eplb only",
            "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port "
            "data_parallel_master_port data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb data_parallel_index dp_sync_interval "
            "elastic_ep_max_dp_size enable_elastic_ep": (
                "engines of one model share; experts that are divided among them are part of "
                "the fingerprint of the weights"
            ),
            "all2all_backend disable_custom_all_reduce enable_dbo ubatch_size "
            "dbo_decode_token_threshold dbo_prefill_token_threshold "
            "enable_batch_sharded_sampling": _KERNEL,
            "worker_extension_cls": (
                "adds calls; those that may change weights lead to another fingerprint"
            ),
            "max_parallel_loading_workers enable_shm_tensor_arena "
            "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env "
            "placement_group distributed_executor_backend master_addr master_port node_rank "
            "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "enable_fault_tolerance fault_tolerance_config sd_worker_cls": _PROCESSES,
        },
    ),
    "SpeculativeConfig": ConfigFields(
        ("speculative_config",),
        values="method kv_cache_dtype draft_tensor_parallel_size parallel_drafting "
        "index_share_for_mtp_iteration code_revision disable_lookahead_block_hashes",
        elsewhere={
            "model revision draft_model_config": "the draft's files and configuration",
            "quantization": "the draft's quantization",
            "max_model_len": "the draft's, where rotary factors depend on it",
            "draft_load_config": _WEIGHTS,
            "target_model_config target_parallel_config": "those of the engine",
        },
        unused={
            "enforce_eager moe_backend attention_backend disable_padded_drafter_batch "
            "use_local_argmax_reduction draft_parallel_config": _KERNEL,
            "tensor_parallel_size": "is for a warning only",
            "num_speculative_tokens num_speculative_tokens_per_batch_size prompt_lookup_max "
            "prompt_lookup_min suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
            "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
            "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
            "enable_adaptive_verification draft_sample_method dspark_draft_topk xpress_topc "
            "fly_window_size fly_entropy_threshold fly_entropy_top_k use_heterogeneous_vocab "
            "draft_lm_head_quantization": _SAMPLING,
            "disable_eagle_block_drop": "decides which blocks vLLM's own cache returns",
        },
    ),
    "LoRAConfig": ConfigFields(
        ("lora_config",),
        values="lora_dtype target_modules enable_tower_connector_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras",
        unused={
            "max_lora_rank max_loras max_cpu_loras": _MEMORY,
            "fully_sharded_loras specialize_active_lora": _KERNEL,
            "default_mm_loras": "such requests have an adapter, whose digest is part of the keys",
            "max_lora_cls_labels": "concerns what is done with the last hidden state",
        },
    ),
    "MultiModalConfig": ConfigFields(
        ("model_config", "multimodal_config"),
        values="media_io_kwargs video_pruning_method mm_device_do_normalize",
        elsewhere={
            "mm_processor_kwargs video_pruning_rate mm_encoder_attn_dtype": "model.multimodal",
            "mm_encoder_fp8_scale_path": "the content of the file",
            "mm_encoder_only": "KVTier is off where vLLM disables prefix caching",
        },
        unused={
            "language_model_only limit_per_prompt enable_mm_embeds interleave_mm_strings "
            "allow_missing_mm_embeddings": _INPUT,
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb": _MEMORY,
            "mm_hasher_algorithm": "keys cover the hashes, which differ",
            "mm_encoder_tp_mode mm_encoder_attn_backend": _KERNEL,
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin": "is for a file",
        },
    ),
    "AttentionConfig": ConfigFields(
        ("attention_config",),
        values="disable_flashinfer_q_quantization use_prefill_query_quantization "
        "indexer_kv_dtype indexer_sparse_logits use_fp4_indexer_cache hisparse_config "
        "use_non_causal",
        unused={
            "backend backend_per_kind minimax_m3_msa_decode_backend flash_attn_version "
            "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend "
            "sparse_mla_force_mqa flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
            "flex_attn_kv_block_size use_prefill_decode_attention trtllm_ragged_backend "
            "indexer_tp_shard_min_rows minimax_m3_indexer_cp": _KERNEL,
            "sparse_mla_prefill_workspace_factor": _MEMORY,
        },
    ),
    "PoolerConfig": ConfigFields(
        ("model_config", "pooler_config"),
        unused={
            "task pooling_type seq_pooling_type tok_pooling_type use_activation "
            "enable_flash_late_interaction dimensions enable_chunked_processing max_embed_len "
            "logit_mean logit_sigma step_tag_id returned_token_ids": (
                "concerns what is done with the last hidden state"
            ),
        },
    ),
    "MambaConfig": ConfigFields(
        ("mamba_config",),
        values="enable_stochastic_rounding stochastic_rounding_philox_rounds",
        unused={"backend ssu_algorithm": _KERNEL},
    ),
    "OffloadConfig": ConfigFields(
        ("offload_config",),
        refused={"prefetch": "weights that share buffers keep objects in RAM"},
        unused={"offload_backend uva": _MEMORY},
    ),
    "KernelConfig": ConfigFields(
        ("kernel_config",),
        values="moe_backend linear_backend linear_backend_per_quant enable_bf16x3_router_gemm",
        unused={
            "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
            "enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend monokernel": (
                _KERNEL
            ),
        },
    ),
    "DiffusionConfig": ConfigFields(
        ("diffusion_config",), values="canvas_length max_denoising_steps"
    ),
}  # fmt: skip
"""By name of the class."""


def settings_of(config: Any, reasons: list[str]) -> dict[str, object]:
    """Returns the values of ``CONFIG_FIELDS``, and of fields that it does not list and that differ
    from their default, by class.

    The draft and adapters are described by their own functions. Adds a reason for each value
    without a stable text.
    """
    found: dict[str, object] = {}
    for name, fields in CONFIG_FIELDS.items():
        part = _follow(config, fields.path)
        if part is None or name in ("SpeculativeConfig", "LoRAConfig"):
            continue
        values = values_of(name, part, reasons)
        if values:
            found[name] = values
    return found


def values_of(name: str, part: Any, reasons: list[str]) -> dict[str, object]:
    """Returns what of one part of the configuration is in the identity by value."""
    fields = CONFIG_FIELDS[name]
    wanted = [each for each in fields.values.split() if hasattr(part, each)]
    unlisted = _unlisted(part, fields.listed())
    if unlisted:
        logger.info(
            "KVTier: %s has settings that this release does not know, which become part of the "
            "identity: %s",
            name,
            ", ".join(unlisted),
        )
    return {
        each: plain(_mapping(getattr(part, each)), f"{name}.{each}", reasons)
        for each in (*wanted, *unlisted)
    }


def draft_settings(speculative: Any, reasons: list[str]) -> dict[str, object] | None:
    """Returns the settings of speculative decoding; None if it computes no KV of its own."""
    if str(getattr(speculative, "method", "")).strip("[]") in METHODS_WITHOUT_KV:
        return None
    return values_of("SpeculativeConfig", speculative, reasons)


def adapter_settings(config: Any) -> bytes:
    """Returns what decides the effect of an adapter apart from its files; empty without adapters.

    It is part of the keys of adapters' requests, not of the identity: requests without an adapter
    share with engines that know none.
    """
    lora = getattr(config, "lora_config", None)
    if lora is None:
        return b""
    reasons: list[str] = []
    text = canonical_json(values_of("LoRAConfig", lora, reasons)).encode()
    # Settings without a stable text are this engine's own.
    return text + os.urandom(16) if reasons else text


def encoder_scales(settings: Any, reasons: list[str]) -> dict[str, object]:
    """Returns what identifies the scales of a multimodal encoder with 8-bit attention.

    Without a file, they follow the inputs that this engine has seen.
    """
    if getattr(settings, "mm_encoder_attn_dtype", None) is None:
        return {}
    path = getattr(settings, "mm_encoder_fp8_scale_path", None)
    if path is None:
        reasons.append(
            "the scales of the multimodal encoder's attention depend on earlier inputs; set "
            "mm_encoder_fp8_scale_path"
        )
        return {}
    try:
        return {"mm_encoder_fp8_scales": str(blake3(Path(path).read_bytes()).hexdigest())}
    except OSError as error:
        reasons.append(f"the scales of the multimodal encoder in {path} cannot be read: {error}")
        return {}


def _follow(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name, None)
    return config


def _mapping(value: Any) -> Any:
    """Returns a part of the configuration as a mapping of its fields; other values unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return value


def _unlisted(part: Any, listed: set[str]) -> list[str]:
    """Returns the fields that are not ``listed`` and whose value is not their default."""
    if not dataclasses.is_dataclass(part):
        return []
    return [
        each.name
        for each in dataclasses.fields(part)
        if each.name not in listed
        and not each.name.startswith("_")
        and getattr(part, each.name, None) != _default(each)
    ]


def _default(each: dataclasses.Field[Any]) -> object:
    """Returns the default of a field, which may be described by pydantic."""
    default: Any = each.default
    factory: Any = each.default_factory
    if hasattr(default, "default_factory"):
        default, factory = default.default, default.default_factory
    if callable(factory):
        return factory()
    return None if default is dataclasses.MISSING else default
