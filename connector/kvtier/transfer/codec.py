"""The byte layout of objects: which bytes of the engine's KV tensors form a block, in which order.

KV is opaque bytes here; nothing is converted. One *object shard* (one chunk of one
group on one rank) is

    block 0 of the object | block 1 | ... | block N-1
    each block:  page of layer 0 | page of layer 1 | ...   (layers in natural order of their names)
    each page:   its bytes in the order of the engine's memory, without padding

A group's object has all blocks of the chunk, or the last ones, where nothing needs the others
(sliding windows, linear states). A pipeline stage without a layer of a group has a shard of 0
bytes.

The order is block-major so that any run of blocks is one contiguous range of the slot: a load that
starts inside a chunk takes one transfer, like a whole one. If all layers of a block are contiguous
in the engine's memory already, the block is copied as it is.

A layer's page follows from the shape and strides of its tensor alone. The block dimension is the
first one, or the second behind a dimension of two (keys, values). If a tensor holds several kernel
blocks per block of the KV cache manager, the block dimension is split. A tensor that does not
match the page size of its group's specification is rejected with the reason.

A layer with a linear state registers one tensor of whole pages, or one tensor for each part of the
state. Each of these is a layer of its own here, called ``name[0]``, ``name[1]``, and so on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvtier.errors import KVTierError

CODEC_VERSION = 1


class CodecError(KVTierError):
    """The layout of the KV cache is not supported. The engine serves without tiers."""


class GroupSpec(Protocol):
    """The part of vLLM's ``KVCacheGroupSpec`` that is used.

    It has the layers of one block table, and a specification with ``block_size`` (tokens) and
    ``page_size_bytes``, or with ``kv_cache_specs`` by layer.
    """

    @property
    def layer_names(self) -> Sequence[str]: ...

    @property
    def kv_cache_spec(self) -> object: ...


class CacheConfig(Protocol):
    """The part of vLLM's ``KVCacheConfig`` that is used."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def kv_cache_groups(self) -> Sequence[GroupSpec]: ...


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The location of the pages of one layer.

    Page of block b: for every index of ``outer`` (sizes and byte strides, outermost first),
    ``run_bytes`` at ``offset + b * block_stride + sum(index * stride)``; all in bytes from the
    start of the tensor's storage. ``axes``: the page's dimensions outermost first, as (dimension
    of the tensor, size); dimension -1 is the kernel block inside a block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    block_dim: int
    kernel_blocks: int
    offset: int
    block_stride: int
    outer: tuple[tuple[int, int], ...]
    run_bytes: int
    axes: tuple[tuple[int, int], ...]
    registered: str
    """The engine's name of the layer, which registered the tensor as number ``part``."""
    part: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padding left out."""
        return self.run_bytes * math.prod(size for size, _ in self.outer)


@dataclass(frozen=True, slots=True)
class StridedSegment:
    """Consecutive layers at equal distances in one storage, which one strided view covers.

    ``layer``: name of the first layer. ``layer_stride``: bytes from one layer to the next.
    ``start``: byte of a block of the object at which the segment starts.
    """

    layer: str
    layers: int
    layer_stride: int
    offset: int
    block_stride: int
    outer: tuple[tuple[int, int], ...]
    run_bytes: int
    start: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, over all layers of the segment."""
        return self.layers * self.run_bytes * math.prod(size for size, _ in self.outer)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group, which has no layers if they are all on other pipeline stages.

    ``block_size``: in tokens. ``blocks_per_chunk``: blocks of one object. ``block_bytes``: one
    block, over all layers.
    """

    layers: tuple[LayerLayout, ...]
    segments: tuple[StridedSegment, ...]
    block_size: int
    blocks_per_chunk: int
    block_bytes: int

    @property
    def shard_bytes(self) -> int:
        """Bytes of one chunk on this rank."""
        return self.block_bytes * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class Codec:
    """The layout of all groups of one rank.

    ``word_bytes``: the largest power of two up to 8 that divides every offset, stride and length.
    ``text``: everything that decides what a byte of an object means, as canonical JSON.
    ``first_block``: the lowest block that holds KV. vLLM's block 0 never does.
    """

    groups: tuple[GroupLayout, ...]
    num_blocks: int
    word_bytes: int
    text: str
    first_block: int = 1

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of one chunk on this rank, by group."""
        return tuple(group.shard_bytes for group in self.groups)


def build_codec(
    kv_caches: Mapping[str, object],
    cache_config: CacheConfig,
    chunk_tokens: int,
    backends: Mapping[str, str] | None = None,
    object_blocks: Sequence[int] = (),
) -> Codec:
    """Derives the layout of every group. Raises ``CodecError``.

    ``kv_caches``: layer name to tensor, as the engine registers them. ``chunk_tokens``: the
    effective chunk, a multiple of every group's block size. ``object_blocks``: blocks of an object
    by group; empty: all of the chunk. ``backends``: layer name to what else
    decides how a page is filled (attention backend, instruction set); it becomes part of the text.
    """
    num_blocks = int(cache_config.num_blocks)
    if num_blocks < 4:
        raise CodecError(
            f"the KV cache has {num_blocks} blocks; must be at least 4 to determine its layout"
        )
    count = len(cache_config.kv_cache_groups)
    if not count:
        raise CodecError("the engine has no KV cache group")
    if object_blocks and len(object_blocks) != count:
        raise CodecError(f"objects of {len(object_blocks)} groups: must be of {count} groups")
    groups = tuple(
        _group(kv_caches, group, num_blocks, chunk_tokens, index)
        for index, group in enumerate(cache_config.kv_cache_groups)
    )
    if not any(group.layers for group in groups):
        raise CodecError("this rank has no layer of any KV cache group")
    if object_blocks:
        groups = tuple(
            _cut(group, blocks, index)
            for index, (group, blocks) in enumerate(zip(groups, object_blocks, strict=True))
        )
    return Codec(
        groups, num_blocks, _word_bytes(groups), _text(groups, chunk_tokens, backends or {})
    )


def layer_tensors(kv_caches: Mapping[str, object], codec: Codec) -> dict[str, torch.Tensor]:
    """Returns the tensors of the codec's layers. Raises ``CodecError`` if one is not a tensor."""
    found: dict[str, torch.Tensor] = {}
    for group in codec.groups:
        for layer in group.layers:
            found[layer.name] = _tensors(kv_caches, layer.registered)[layer.part]
    return found


def _tensors(kv_caches: Mapping[str, object], name: str) -> list[torch.Tensor]:
    """The tensors of one registered layer: one, or those of its state."""
    registered = kv_caches.get(name)
    tensors = list(registered) if isinstance(registered, (list, tuple)) else [registered]
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise CodecError(f"{name}: no tensor is registered")
    return tensors


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """One tensor that the engine registered for layer ``layer``. ``part``: its number if it is one
    of several, else -1."""

    layer: str
    tensor: torch.Tensor
    part: int = -1

    @property
    def name(self) -> str:
        """The name that the codec uses."""
        return self.layer if self.part < 0 else f"{self.layer}[{self.part}]"


def layer_layout(
    registered: Registered, num_blocks: int, page_size_bytes: int, padded: bool = False
) -> LayerLayout:
    """Derives the layout of one layer's pages. Raises ``CodecError``.

    ``padded``: the page may be larger than what the tensor shows of it.
    """
    name, tensor = registered.name, registered.tensor
    shape, item = tuple(int(size) for size in tensor.shape), tensor.element_size()
    block_dim = _block_dim(name, shape, num_blocks)
    kernel_blocks = shape[block_dim] // num_blocks
    strides = [int(stride) * item for stride in tensor.stride()]
    page = [
        (dim, size, strides[dim]) for dim, size in enumerate(shape) if dim != block_dim and size > 1
    ]
    if kernel_blocks > 1:
        page.append((-1, kernel_blocks, strides[block_dim]))
    block_stride = strides[block_dim] * kernel_blocks
    payload = math.prod(size for _, size, _ in page) * item
    if payload > page_size_bytes or (payload < page_size_bytes and not padded):
        raise CodecError(
            f"{name}: shape {shape} has {payload} bytes per block, its specification "
            f"{page_size_bytes}"
        )
    _check_disjoint(
        name, [(size, stride) for _, size, stride in page] + [(num_blocks, block_stride)], item
    )
    page.sort(key=lambda entry: -entry[2])
    run_bytes, outer = item, [(size, stride) for _, size, stride in page]
    while outer and outer[-1][1] == run_bytes:
        run_bytes *= outer.pop()[0]
    return LayerLayout(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        block_dim=block_dim,
        kernel_blocks=kernel_blocks,
        offset=int(tensor.storage_offset()) * item,
        block_stride=block_stride,
        outer=tuple(_merge(outer)),
        run_bytes=run_bytes,
        axes=tuple((dim, size) for dim, size, _ in page),
        registered=registered.layer,
        part=max(registered.part, 0),
    )


def _block_dim(name: str, shape: tuple[int, ...], num_blocks: int) -> int:
    if len(shape) < 2:
        raise CodecError(f"{name}: shape {shape} must have at least two dimensions")
    if shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        return 0
    if shape[0] == 2 and shape[1] >= num_blocks and shape[1] % num_blocks == 0:
        return 1
    raise CodecError(f"{name}: no dimension of shape {shape} has {num_blocks} blocks")


def _check_disjoint(name: str, dims: Iterable[tuple[int, int]], item: int) -> None:
    extent = item
    for size, stride in sorted(dims, key=lambda entry: entry[1]):
        if stride < extent:
            raise CodecError(
                f"{name}: elements overlap (stride of {stride} bytes, extent of {extent})"
            )
        extent = stride * (size - 1) + extent


def _merge(outer: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for size, stride in outer:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Returns a sort key that puts ``layers.2`` before ``layers.10``."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def _group(
    kv_caches: Mapping[str, object],
    group: GroupSpec,
    num_blocks: int,
    chunk_tokens: int,
    index: int,
) -> GroupLayout:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise CodecError(f"group {index} does not support KV transfer")
    block_size = int(getattr(group.kv_cache_spec, "block_size", 0))
    if block_size <= 0 or chunk_tokens % block_size:
        raise CodecError(
            f"group {index}: chunk of {chunk_tokens} tokens must be a multiple of its block size, "
            f"{block_size}"
        )
    layers: list[LayerLayout] = []
    tensors: list[torch.Tensor] = []
    seen: set[tuple[int, int, int]] = set()
    for name in sorted(group.layer_names, key=natural_key):
        spec = _layer_spec(group.kv_cache_spec, name)
        for registered, page_bytes, padded in _pages(kv_caches, name, spec, num_blocks):
            tensor = registered.tensor
            layout = layer_layout(registered, num_blocks, page_bytes, padded)
            place = (tensor.untyped_storage().data_ptr(), layout.offset, layout.block_stride)
            if place in seen:  # a layer that shares the KV of another one
                continue
            seen.add(place)
            layers.append(layout)
            tensors.append(tensor)
    segments = _segments(layers, tensors)
    return GroupLayout(
        layers=tuple(layers),
        segments=segments,
        block_size=block_size,
        blocks_per_chunk=chunk_tokens // block_size,
        block_bytes=sum(layer.page_bytes for layer in layers),
    )


def _pages(
    kv_caches: Mapping[str, object], name: str, spec: object, num_blocks: int
) -> list[tuple[Registered, int, bool]]:
    """The tensors of one layer, each with the size of its page and whether that may be padded.

    A page of a linear state (``shapes`` in its specification) has the parts of the state one after
    the other. It is registered as it is, or as one tensor for each part.
    """
    tensors, page_bytes = _tensors(kv_caches, name), int(getattr(spec, "page_size_bytes", 0))
    padded = getattr(spec, "page_size_padded", None) is not None
    shapes = getattr(spec, "shapes", None)
    if shapes is None:
        if not isinstance(kv_caches.get(name), torch.Tensor):
            raise CodecError(f"{name}: a list of {len(tensors)} tensors: must be one tensor")
        return [(Registered(name, tensors[0]), page_bytes, padded)]
    dtypes = tuple(getattr(spec, "dtypes", ()))
    sizes = [
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=False)
    ]
    if isinstance(kv_caches.get(name), torch.Tensor):
        shown = tensors[0].numel() * tensors[0].element_size() // max(1, num_blocks)
        if len(sizes) == len(shapes) and sum(sizes) <= shown:
            return [(Registered(name, tensors[0]), page_bytes, True)]
    if not len(tensors) == len(sizes) == len(shapes) or sum(sizes) > page_bytes:
        raise CodecError(
            f"{name}: {len(tensors)} tensors of a state of {sizes} bytes in pages of {page_bytes} "
            "bytes: must be one of whole pages, or one for each part, all within the page"
        )
    return [
        (Registered(name, tensor, part), size, False)
        for part, (tensor, size) in enumerate(zip(tensors, sizes, strict=True))
    ]


def _cut(group: GroupLayout, blocks: int, index: int) -> GroupLayout:
    """The group with objects of ``blocks`` blocks."""
    if not 1 <= blocks <= group.blocks_per_chunk:
        raise CodecError(
            f"group {index}: objects of {blocks} blocks: must be 1 to {group.blocks_per_chunk}"
        )
    return replace(group, blocks_per_chunk=blocks)


def _layer_spec(spec: object, name: str) -> object:
    by_layer = getattr(spec, "kv_cache_specs", None)
    if isinstance(by_layer, Mapping):
        if name not in by_layer:
            raise CodecError(f"{name}: missing from the group's specification")
        return by_layer[name]
    return spec


def _segments(
    layers: Sequence[LayerLayout], tensors: Sequence[torch.Tensor]
) -> tuple[StridedSegment, ...]:
    segments: list[StridedSegment] = []
    start, first = 0, 0
    while first < len(layers):
        count, stride = _uniform(layers, tensors, first)
        layer = layers[first]
        segment = StridedSegment(
            layer.name,
            count,
            stride,
            layer.offset,
            layer.block_stride,
            layer.outer,
            layer.run_bytes,
            start,
        )
        segments.append(segment)
        start += segment.bytes_per_block
        first += count
    return tuple(segments)


def _uniform(
    layers: Sequence[LayerLayout], tensors: Sequence[torch.Tensor], first: int
) -> tuple[int, int]:
    """Returns how many layers from ``first`` on are at equal distances in one storage, and the
    distance in bytes."""
    head, storage = layers[first], tensors[first].untyped_storage().data_ptr()
    count, stride = 1, 0
    while first + count < len(layers):
        layer = layers[first + count]
        distance = layer.offset - layers[first + count - 1].offset
        same = (layer.block_stride, layer.outer, layer.run_bytes) == (
            head.block_stride,
            head.outer,
            head.run_bytes,
        )
        if (
            not same
            or tensors[first + count].untyped_storage().data_ptr() != storage
            or distance <= 0
        ):
            break
        if count > 1 and distance != stride:
            break
        stride = distance
        count += 1
    return count, stride if count > 1 else 0


def _word_bytes(groups: Sequence[GroupLayout]) -> int:
    word = 8
    for group in groups:
        for layer in group.layers:
            word = math.gcd(
                word,
                layer.offset,
                layer.block_stride,
                layer.run_bytes,
                *(s for _, s in layer.outer),
            )
    return word


def _text(groups: Sequence[GroupLayout], chunk_tokens: int, backends: Mapping[str, str]) -> str:
    """Returns the codec's text, which does not depend on where pages are in this process."""
    described = []
    for group in groups:
        runs: list[dict[str, object]] = []
        for layer in group.layers:
            form: dict[str, object] = {
                "dtype": layer.dtype,
                "page_bytes": layer.page_bytes,
                "shape": [
                    "B" if dim == layer.block_dim else size for dim, size in enumerate(layer.shape)
                ],
                "kernel_blocks": layer.kernel_blocks,
                "axes": [list(axis) for axis in layer.axes],
                "backend": backends.get(layer.registered, ""),
            }
            if runs and all(runs[-1][key] == value for key, value in form.items()):
                names = runs[-1]["layers"]
                if isinstance(names, list):
                    names.append(layer.name)
            else:
                runs.append({**form, "layers": [layer.name]})
        described.append(
            {
                "block_tokens": group.block_size,
                "blocks_per_chunk": group.blocks_per_chunk,
                "block_bytes": group.block_bytes,
                "layer_count": len(group.layers),
                "layers": runs,
            }
        )
    return json.dumps(
        {
            "codec": CODEC_VERSION,
            "order": "block,layer,page",
            "chunk_tokens": chunk_tokens,
            "groups": described,
        },
        sort_keys=True,
        separators=(",", ":"),
    )
