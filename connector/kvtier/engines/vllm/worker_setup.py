"""What a worker finds out once, when the engine registers its KV caches: effective chunk, attention backends, who this
process is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvtier.transfer.codec import CodecError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def effective_chunk_tokens(kv_cache_config: KVCacheConfig, chunk_tokens: int) -> int:
    """Smallest common multiple of the groups' block sizes that is at least ``chunk_tokens`` (DATAPATH 6).

    Raises ``CodecError`` for a group without a block size.
    """
    sizes = [int(getattr(group.kv_cache_spec, "block_size", 0)) for group in kv_cache_config.kv_cache_groups]
    if not sizes or min(sizes) <= 0:
        raise CodecError(f"the KV cache groups have block sizes {sizes}; each must be positive")
    common = math.lcm(*sizes)
    return -(-chunk_tokens // common) * common


def backend_texts(vllm_config: VllmConfig, layer_names: Sequence[str]) -> dict[str, str]:
    """By layer: everything beside shape and dtype that decides how its pages are filled.

    The CPU backend packs keys for the instruction set it finds (AMX or vectors) into tensors of one shape; two machines
    that differ in it must not share. Unknown parts are left out rather than guessed.
    """
    context: Mapping[str, object] = getattr(vllm_config.compilation_config, "static_forward_context", {}) or {}
    texts: dict[str, str] = {}
    for name in layer_names:
        layer = context.get(name)
        backend = getattr(layer, "attn_backend", None)
        parts = [str(getattr(backend, "__name__", "")), str(getattr(layer, "isa", ""))]
        texts[name] = " ".join(part for part in parts if part)
    return texts


def cpu_text() -> str:
    """The instruction set that torch uses on this machine, and whether it has tile multiplication."""
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return f"{torch.backends.cpu.get_cpu_capability()}{' AMX' if tiles is not None and tiles() else ''}"


def reports_failed_requests() -> bool:
    """Whether this vLLM takes a failed load by request (0.32 does, 0.24 does not); needed for models with several
    groups.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")
