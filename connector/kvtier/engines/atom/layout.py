"""The byte layout of ATOM's KV cache: opaque bytes per layer and block.

ATOM registers per layer a ``KVCacheTensor`` with keys and values, scales where the cache is
quantized, and the cache of an indexer. Their shapes follow the attention kernels (x-packed keys,
token-major latents), but in every contiguous tensor the bytes of a block follow those of the block
before. So each tensor becomes rows of bytes, one row per block, and nothing is interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvtier.transfer.codec import Codec, CodecError, build_codec

TENSORS = ("k_cache", "v_cache", "k_scale", "v_scale", "index_cache")
"""Attributes of ATOM's ``KVCacheTensor`` that hold KV."""


@dataclass(frozen=True, slots=True)
class _Rows:
    block_size: int
    kv_cache_specs: Mapping[str, _Row]


@dataclass(frozen=True, slots=True)
class _Row:
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class _Group:
    layer_names: tuple[str, ...]
    kv_cache_spec: _Rows


@dataclass(frozen=True, slots=True)
class _Cache:
    num_blocks: int
    kv_cache_groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """``tensors``: rows of bytes by name, views of ATOM's memory. ``codec``: their layout."""

    tensors: dict[str, torch.Tensor]
    codec: Codec


def byte_layout(
    kv_caches: Mapping[object, object], num_blocks: int, block_tokens: int, chunk_tokens: int
) -> ByteLayout:
    """Returns the layout of what ATOM registers. Raises ``CodecError``.

    ``kv_caches``: layer to ``KVCacheTensor``. ``num_blocks``: of the scheduler; the tensors may
    have another first dimension. ``block_tokens``: tokens of one block.
    """
    tensors: dict[str, torch.Tensor] = {}
    forms: dict[str, str] = {}
    for layer, cache in kv_caches.items():
        for attribute in TENSORS:
            tensor = getattr(cache, attribute, None)
            if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
                continue
            name = f"layer.{layer}.{attribute}"
            tensors[name] = rows_of(name, tensor, num_blocks)
            per_block = list(tensor.shape[1:])
            forms[name] = f"{str(tensor.dtype).removeprefix('torch.')} {per_block}"
    if not tensors:
        raise CodecError("ATOM has registered no KV cache")
    specs = {name: _Row(int(rows.shape[1])) for name, rows in tensors.items()}
    group = _Group(tuple(tensors), _Rows(block_tokens, specs))
    codec = build_codec(tensors, _Cache(num_blocks, (group,)), chunk_tokens, forms)
    # ATOM's block 0 holds KV as every other block does.
    return ByteLayout(tensors, replace(codec, first_block=0))


def rows_of(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns the bytes of ``tensor`` as ``num_blocks`` rows, without a copy.

    Raises ``CodecError`` if its blocks are not consecutive bytes.
    """
    if not tensor.is_contiguous():
        raise CodecError(f"{name}: strides {tuple(tensor.stride())} are not contiguous")
    size = tensor.numel() * tensor.element_size()
    if num_blocks < 1 or size % num_blocks:
        raise CodecError(
            f"{name}: shape {tuple(tensor.shape)} has {size} bytes, must be a multiple of "
            f"{num_blocks} blocks"
        )
    return tensor.reshape(-1).view(torch.uint8).view(num_blocks, size // num_blocks)
