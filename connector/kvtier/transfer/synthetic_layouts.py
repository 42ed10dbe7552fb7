"""Synthetic KV caches in every layout that engines are known to use.

Each is a set of tensors with the specification that describes them. The self-test, the benchmarks
and the tests copy between them and a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """Stands for a KV cache specification: ``block_size`` in tokens."""

    block_size: int
    page_size_bytes: int
    page_size_padded: int | None = None


@dataclass(frozen=True, slots=True)
class SyntheticGroup:
    """Stands for a KV cache group."""

    layer_names: tuple[str, ...]
    kv_cache_spec: SyntheticSpec


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticCache:
    """``caches``: layer name to tensor. Also serves as the KV cache configuration."""

    name: str
    caches: dict[str, torch.Tensor]
    num_blocks: int
    kv_cache_groups: tuple[SyntheticGroup, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of a made-up model."""

    layers: int = 3
    blocks: int = 12
    block: int = 16
    heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return 2 * self.heads * self.block * self.head_dim * self.dtype.itemsize

    @property
    def page_elements(self) -> int:
        """Elements of one block of one layer."""
        return 2 * self.heads * self.block * self.head_dim


def _noise(elements: int, geometry: CacheGeometry, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(elements)
    nbytes = elements * geometry.dtype.itemsize
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device=device)
    return noise.view(geometry.dtype)


def _layout(
    name: str, geometry: CacheGeometry, tensors: list[torch.Tensor], padded: int | None = None
) -> SyntheticCache:
    caches = {f"model.layers.{index}.attn": tensor for index, tensor in enumerate(tensors)}
    spec = SyntheticSpec(geometry.block, padded or geometry.page_bytes, padded)
    return SyntheticCache(name, caches, geometry.blocks, (SyntheticGroup(tuple(caches), spec),))


Build = Callable[[CacheGeometry, str], list[torch.Tensor]]


def _each(g: CacheGeometry, device: str, *shape: int) -> list[torch.Tensor]:
    """One storage per layer."""
    return [_noise(g.blocks * g.page_elements, g, device).view(shape) for _ in range(g.layers)]


def _one_storage(g: CacheGeometry, device: str) -> list[torch.Tensor]:
    shape = g.layers, g.blocks, g.heads, g.block, 2 * g.head_dim
    return list(_noise(g.layers * g.blocks * g.page_elements, g, device).view(shape))


def _interleaved(g: CacheGeometry, device: str) -> list[torch.Tensor]:
    shape = g.blocks, g.layers, g.heads, g.block, 2 * g.head_dim
    return list(_noise(g.layers * g.blocks * g.page_elements, g, device).view(shape).unbind(1))


def _crossed(g: CacheGeometry, device: str) -> list[torch.Tensor]:
    shape = g.blocks, g.heads, g.layers, 2, g.block, g.head_dim
    storage = _noise(g.layers * g.blocks * g.page_elements, g, device).view(shape)
    return [layer.permute(0, 2, 3, 1, 4) for layer in storage.unbind(2)]


def _padded(g: CacheGeometry, device: str) -> list[torch.Tensor]:
    row = g.heads * g.head_dim
    step = g.page_elements + _PADDING
    storages = [_noise(g.blocks * step, g, device) for _ in range(g.layers)]
    return [
        x.as_strided((g.blocks, 2, g.block, row), (step, g.page_elements // 2, row, 1))
        for x in storages
    ]


def _heads_first(g: CacheGeometry, device: str, *outer: int) -> list[torch.Tensor]:
    return [
        x.permute(0, 1, 3, 2, 4) for x in _each(g, device, *outer, g.heads, g.block, g.head_dim)
    ]


_PADDING = 64
_BUILDERS: dict[str, Build] = {
    "cpu: blocks, heads, tokens, keys and values; one storage": _one_storage,
    "layers interleaved inside each block": _interleaved,
    "blocks first, tokens before heads": lambda g, d: _each(
        g, d, g.blocks, 2, g.block, g.heads, g.head_dim
    ),
    "keys and values first": lambda g, d: _each(g, d, 2, g.blocks, g.block, g.heads, g.head_dim),
    "blocks first, heads before tokens by strides": lambda g, d: _heads_first(g, d, g.blocks, 2),
    "keys and values first, heads before tokens by strides": lambda g, d: _heads_first(
        g, d, 2, g.blocks
    ),
    "heads outside layers, in pieces": _crossed,
    "two kernel blocks a block": lambda g, d: _each(
        g, d, 2 * g.blocks, 2, g.block // 2, g.heads, g.head_dim
    ),
    "padded pages": _padded,
    "latent vectors, no heads": lambda g, d: _each(
        g, d, g.blocks, g.block, g.page_elements // g.block
    ),
}
LAYOUT_NAMES = tuple(_BUILDERS)


def make_cache(
    name: str, geometry: CacheGeometry | None = None, device: str = "cpu"
) -> SyntheticCache:
    """The cache of one known layout, filled with noise."""
    geometry = geometry or CacheGeometry()
    padded = (
        geometry.page_bytes + _PADDING * geometry.dtype.itemsize
        if _BUILDERS[name] is _padded
        else None
    )
    return _layout(name, geometry, _BUILDERS[name](geometry, device), padded)


def make_every_cache(
    geometry: CacheGeometry | None = None, device: str = "cpu"
) -> list[SyntheticCache]:
    """One cache per known layout."""
    return [make_cache(name, geometry, device) for name in LAYOUT_NAMES]
