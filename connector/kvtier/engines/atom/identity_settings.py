"""Fields of ATOM's ``Config`` that shape KV.

Like the variables (``identity_environment.py``), they change from version to version: ``fake_eplb``
replaces the router's decisions, ``moe_backend`` chooses other experts' kernels. So every field that
does not have its default is part of the identity, except those that the identity describes in
another form, those that are refused (``config.py``), and those that are known to concern processes,
reports, memory or the schedule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvtier.engines.common.model_identity import plain

_DESCRIBED = """
    model trust_remote_code hf_config max_model_len tensor_parallel_size kv_cache_block_size
    kv_cache_dtype index_cache_dtype torch_dtype quant_config enable_expert_parallel
    online_quant_config hf_overrides speculative_config kv_transfer_config
"""
_REFUSED = """
    decode_context_parallel_size dcp_config pipeline_parallel_size prefill_context_parallel_size
    enable_rapidserve runner_qualname
"""
_OTHER = """
    max_num_batched_tokens long_prefill_token_threshold attn_prefill_chunk_size
    state_checkpoint_interval_tokens scheduler_delay_factor max_num_seqs gpu_memory_utilization
    enforce_eager compilation_config graph_bs generation_config parallel_config bos_token_id
    eos_token_id stop_token_ids num_kvcache_blocks enable_prefix_caching enable_chunked_prefill
    port master_addr torch_profiler_dir asyncio_mode mark_trace dp_load_balance kv_events_config
    dspark enable_tbo enable_tbo_decode eplb_enable eplb_config plugin_config
    disagg_is_decode disagg_prefill_max_num_seqs disagg_constrained
"""
NOT_SHAPING = frozenset(f"{_DESCRIBED} {_REFUSED} {_OTHER}".split())
PLACES = ("_addr", "_dir", "_host", "_port", "_shm_name")
"""Ends of the names of fields that say where something is. They may differ at each start."""


def shaping_settings(config: Any, reasons: list[str]) -> dict[str, object]:
    """Returns the fields that shape KV and do not have their defaults, in JSON's types.

    ``reasons`` gets one for every value without a stable text.
    """
    found: dict[str, object] = {}
    if not dataclasses.is_dataclass(config):
        return {
            name: _plain(value, name, reasons)
            for name, value in sorted(vars(config).items())
            if _shapes_kv(name)
        }
    for field in sorted(dataclasses.fields(config), key=lambda each: each.name):
        if _shapes_kv(field.name) and hasattr(config, field.name):
            value = getattr(config, field.name)
            if value != _default(field):
                found[field.name] = _plain(value, field.name, reasons)
    return found


def _shapes_kv(name: str) -> bool:
    return name not in NOT_SHAPING and not name.startswith("_") and not name.endswith(PLACES)


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _plain(value: object, name: str, reasons: list[str]) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return plain(value, name, reasons)
