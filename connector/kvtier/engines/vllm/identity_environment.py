"""Every environment variable of vLLM: part of the identity, or why it does not shape KV. And the
plugins of vLLM, which may bring models, kernels and a platform.

vLLM has settings that are no field of its configuration, ``VLLM_MARLIN_INPUT_DTYPE`` for example.
A variable that these tables do not list is part of the identity as soon as it is set, so that
engines with and without an unknown setting do not share.

A test compares the tables with the vLLM that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Any

from kvtier.engines.common.model_identity import is_multimodal, plain

_SHAPING_NAMES = """
    VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT
    VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG
    VLLM_HUMMING_USE_F16_ACCUM VLLM_CPU_INT4_W4A8 VLLM_B12X_MOE_FP4_FORCE_A16
    VLLM_DISABLED_KERNELS VLLM_XPU_INC_WNA16_BACKEND
    VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
    VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
    VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY
    VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_DEEPEPLL_NVFP4_DISPATCH
    VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION
    VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2
    VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
    VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM
    VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_FP8_MFMA_PAGE_ATTN
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB
    VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT
    VLLM_KIMI_K3_AUX_ATTN_RES_STREAM
"""
SHAPING = frozenset(_SHAPING_NAMES.split())
"""Types and precision of what is computed, and layouts that the shape of a tensor does not show."""
SHAPING_MEDIA = frozenset({"VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR"})
"""For multimodal models: which frames stand for a video, whose hash covers the file."""
SHAPING_OF_OTHERS = frozenset(
    {
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "DNNL_DEFAULT_FPMATH_MODE",
    }
)
"""Variables of libraries that lower the precision of matrix products. Part of the identity if they
are set."""
UNUSED: Mapping[str, str] = MappingProxyType(
    {
        "chooses kernels, which differ in rounding only": """
            VLLM_TRITON_USE_TD VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TUNED_CONFIG_FOLDER
            VLLM_USE_TRITON_AWQ VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS VLLM_USE_LAYERNAME
            VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL VLLM_ENABLE_HPC_OPS
            VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_MOE_SKIP_PADDING
            VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_MARLIN_USE_ATOMIC_ADD
            VLLM_HUMMING_MOE_GEMM_TYPE VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS
            VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_KIMI_K3_GEMM_AR VLLM_ENABLE_GEMM_RS
            VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_SHARED_EXPERTS_STREAM
            VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD
            VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_LINEAR
            VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
            VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_AITER_MLA_DCP_VERIFY
            VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_USE_AITER_MHA
            VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_TRITON_ROPE
            VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS
            VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_SKINNY_GEMM
            VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_CPU_ATTN_SPLIT_KV
            VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_XPU_FORCE_N_CONTIG_WEIGHT
            VLLM_USE_V2_MODEL_RUNNER VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES
            VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK
            VLLM_FORCE_AOT_LOAD VLLM_USE_MEGA_AOT_ARTIFACT VLLM_DISABLE_COMPILE_CACHE
            VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
            VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_DEEP_GEMM_WARMUP
            VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_ENABLE_CUDAGRAPH_GC
            VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_ALLREDUCE_USE_SYMM_MEM
            VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC
            VLLM_USE_NCCL_SYMM_MEM VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE
            VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_DIRECT_DCP_KV_GATHER
            VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM VLLM_HAS_FLASHINFER_CUBIN
            VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP
            VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL
            VLLM_REPLICATE_EMBED""",
        "the codec's layout, or the groups of the planner": """
            VLLM_KV_CACHE_LAYOUT VLLM_MLA_DISABLE VLLM_PP_LAYER_PARTITION
            VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE""",
        "the fingerprint of the weights, or the digest of the model's files": """
            VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH VLLM_TEST_FORCE_LOAD_FORMAT
            VLLM_FASTSAFETENSORS_QUEUE_SIZE S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL
            VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN""",
        "such requests have an adapter, whose digest is part of the keys": """
            VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
            VLLM_ALLOW_RUNTIME_LORA_UPDATING""",
        "max_model_len, where rotary factors depend on it": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "concerns tokens that are sampled; keys cover tokens": """
            VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_XGRAMMAR_CACHE_MB
            VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_V1_USE_OUTLINES_CACHE
            VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_MAX_N_SEQUENCES
            VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
            VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS""",
        "decides which tokens a prompt has; keys cover tokens": """
            VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_MAX_COMPLETION_PROMPTS
            VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
            VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE
            VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
            VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENABLE_RESPONSES_API_STORE""",
        "decides which media are accepted; keys cover their content": """
            VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT
            VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
            VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
            VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT
            VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S
            VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_EMBED_DECODE_BYTES
            VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_IMAGE_PIXELS""",
        "concerns memory, and no values": """
            VLLM_CPU_KVCACHE_SPACE VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
            VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
            VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_DEEPEP_BUFFER_SIZE_MB
            VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_ENABLE_STARTUP_PLAN
            VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
            VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY
            VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS""",
        "concerns processes and communication, and no values": """
            VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP VLLM_NCCL_SO_PATH
            LD_LIBRARY_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_DISABLE_PYNCCL
            VLLM_SKIP_P2P_CHECK LOCAL_RANK CUDA_VISIBLE_DEVICES CUDA_HOME
            VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH
            VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
            VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_WORKER_MULTIPROC_METHOD
            VLLM_ENABLE_V1_MULTIPROCESSING VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_USE_SPINLOOP_EXT
            VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION
            VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_PROCESS_NAME_PREFIX VLLM_DISTRIBUTED_USE_SPLIT_GROUP
            VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV
            VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
            VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND
            VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
            VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
            VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_XPU_PP_MICROBATCH VLLM_DP_RANK
            VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT
            VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
            VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION
            VLLM_XLA_USE_SPMD VLLM_TPU_USING_PATHWAYS VLLM_NIXL_SIDE_CHANNEL_HOST
            VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT
            VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S
            VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT
            VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_STORE_TIER_LOG
            VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
            VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_PREFERRED_SEGMENT
            MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS
            VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES""",
        "concerns the API server, reports or a cache of vLLM": """
            VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_API_KEY VLLM_DEBUG_LOG_API_SERVER_RESPONSE
            VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE
            VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL
            VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR
            VLLM_LOG_STATS_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
            VLLM_DISABLE_LOG_LOGO VLLM_TRACE_FUNCTION VLLM_GPU_SYNC_CHECK VLLM_GC_DEBUG
            VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_WORKSPACE VLLM_DEBUG_MFU_METRICS
            VLLM_PATTERN_MATCH_DEBUG VLLM_CUSTOM_SCOPES_FOR_PROFILING
            VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_RINGBUFFER_WARNING_INTERVAL
            VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_SERVER_DEV_MODE
            VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_ENABLE_COHERE_API VLLM_USE_RUST_FRONTEND
            VLLM_USE_RUST_BENCH VLLM_RUST_FRONTEND_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR""",
        "concerns code, whose version is part of the identity": """
            VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED
            VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
            VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
            VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE VLLM_SKIP_VERSION_SUFFIX""",
        "the plugins that are loaded": "VLLM_PLUGINS",
    }
)
"""Variables that do not shape KV by themselves, by the reason."""


PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Entry points of plugins that run in the engine."""
OWN_MODULES = ("kvtier.", "vllm.")
"""Plugins that shape no KV, or have the version of vLLM."""


def listed() -> set[str]:
    """Returns all names."""
    return {
        *SHAPING,
        *SHAPING_MEDIA,
        *SHAPING_OF_OTHERS,
        *(name for names in UNUSED.values() for name in names.split()),
    }


def environment_settings(
    model: object,
    reasons: list[str],
    *,
    variables: Mapping[str, Callable[[], Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Returns the values of variables that shape KV, as vLLM reads them, and of those that are set
    and that the tables do not list.

    ``variables``: vLLM's own, with what reads each. Adds a reason for each value without a stable
    text.
    """
    if variables is None:
        from vllm import envs

        variables = envs.environment_variables
    environment = os.environ if environment is None else environment
    shaping = SHAPING | SHAPING_MEDIA if is_multimodal(model) else SHAPING
    found: dict[str, object] = {
        name: plain(_read(variables[name], name, environment), name, reasons)
        for name in sorted(shaping)
        if name in variables
    }
    known = listed()
    unlisted = [name for name in variables if name not in known]
    for name in (*sorted(SHAPING_OF_OTHERS), *sorted(unlisted)):
        if name in environment:
            found[name] = environment[name]
    return found


def plugin_versions(
    found: Iterable[metadata.EntryPoint], allowed: Collection[str] | None, reasons: list[str]
) -> dict[str, str]:
    """Returns the versions of the packages of vLLM's plugins.

    ``found``: entry points of ``PLUGIN_GROUPS``. ``allowed``: names of those that are loaded, None:
    all. Adds a reason for each plugin of unknown version.
    """
    versions: dict[str, str] = {}
    for each in found:
        if each.value.startswith(OWN_MODULES) or (allowed is not None and each.name not in allowed):
            continue
        package = each.dist
        if package is None or not package.version:
            reasons.append(f"the version of vLLM's plugin {each.name} is unknown")
            continue
        versions[str(package.name)] = str(package.version)
    return versions


def installed_plugins(reasons: list[str]) -> dict[str, str]:
    """Returns the versions of the packages of the plugins that this vLLM loads."""
    from vllm import envs

    found = [each for group in PLUGIN_GROUPS for each in metadata.entry_points(group=group)]
    return plugin_versions(found, envs.VLLM_PLUGINS, reasons)


def _read(read: Callable[[], Any], name: str, environment: Mapping[str, str]) -> Any:
    """Returns a variable as vLLM understands it, or its text if vLLM rejects it."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - vLLM reports a value that it does not allow
        return environment.get(name, "")
