"""KV caches in the layouts that engines use, for the self-test and for tests: tensors, and the specification that goes
with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Spec:
    """Stands for a KV cache specification: ``block_size`` in tokens."""

    block_size: int
    page_size_bytes: int
    page_size_padded: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Stands for a KV cache group."""

    layer_names: tuple[str, ...]
    kv_cache_spec: Spec


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """``caches``: layer name to tensor. Also serves as the KV cache configuration."""

    name: str
    caches: dict[str, torch.Tensor]
    num_blocks: int
    kv_cache_groups: tuple[Group, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Geometry:
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


def _noise(elements: int, geometry: Geometry, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    nbytes = elements * geometry.dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(geometry.dtype).to(device)


def _layout(name: str, geometry: Geometry, tensors: list[torch.Tensor], padded: int | None = None) -> Layout:
    caches = {f"model.layers.{index}.attn": tensor for index, tensor in enumerate(tensors)}
    spec = Spec(geometry.block, padded or geometry.page_bytes, padded)
    return Layout(name, caches, geometry.blocks, (Group(tuple(caches), spec),))


def every_layout(geometry: Geometry | None = None, device: str = "cpu") -> list[Layout]:
    """One cache per known layout, filled with noise."""
    g = geometry or Geometry()
    page, count = g.page_elements, g.layers * g.blocks * g.page_elements

    def each(elements: int = g.blocks * page) -> list[torch.Tensor]:
        return [_noise(elements, g, device) for _ in range(g.layers)]

    one = _noise(count, g, device).view(g.layers, g.blocks, g.heads, g.block, 2 * g.head_dim)
    interleaved = _noise(count, g, device).view(g.blocks, g.layers, g.heads, g.block, 2 * g.head_dim)
    crossed = _noise(count, g, device).view(g.blocks, g.heads, g.layers, 2, g.block, g.head_dim)
    padded = page + 64
    wide = [_noise(g.blocks * padded, g, device) for _ in range(g.layers)]
    kernel = 2 * g.blocks, 2, g.block // 2, g.heads, g.head_dim
    return [
        _layout("cpu: blocks, heads, tokens, keys and values; one storage", g, list(one)),
        _layout("layers interleaved inside each block", g, [interleaved[:, layer] for layer in range(g.layers)]),
        _layout(
            "blocks first, tokens before heads", g, [t.view(g.blocks, 2, g.block, g.heads, g.head_dim) for t in each()]
        ),
        _layout("keys and values first", g, [t.view(2, g.blocks, g.block, g.heads, g.head_dim) for t in each()]),
        _layout(
            "blocks first, heads before tokens by strides",
            g,
            [t.view(g.blocks, 2, g.heads, g.block, g.head_dim).permute(0, 1, 3, 2, 4) for t in each()],
        ),
        _layout(
            "keys and values first, heads before tokens by strides",
            g,
            [t.view(2, g.blocks, g.heads, g.block, g.head_dim).permute(0, 1, 3, 2, 4) for t in each()],
        ),
        _layout(
            "heads outside layers, in pieces",
            g,
            [crossed[:, :, layer].permute(0, 2, 3, 1, 4) for layer in range(g.layers)],
        ),
        _layout("two kernel blocks a block", g, [t.view(kernel) for t in each()]),
        _layout(
            "padded pages",
            g,
            [
                t.as_strided((g.blocks, 2, g.block, g.heads * g.head_dim), (padded, page // 2, g.heads * g.head_dim, 1))
                for t in wide
            ],
            padded * g.dtype.itemsize,
        ),
        _layout("latent vectors, no heads", g, [t.view(g.blocks, g.block, page // g.block) for t in each()]),
    ]
