"""Strided views of the engine's KV tensors, through which torch and numpy copy blocks.

There is one view per segment (layers at equal distances in one storage). It has the shape (blocks,
layers, *outer, words), so indexing its first dimension gives the bytes of a segment of one block in
the order of the object. Words are the largest integers that divide every offset, so that a gather
moves up to 8 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.transfer.codec import Codec, StridedSegment, layer_tensors

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_dtype(nbytes: int) -> torch.dtype:
    """Returns the integer type of ``nbytes`` (1, 2, 4 or 8) bytes."""
    return _WORDS[nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentView:
    """A strided view of one segment.

    ``cache``: has the shape that the module describes. ``start``, ``words``: offset and size of the
    segment in a block of the object, in words.
    """

    cache: torch.Tensor
    start: int
    words: int


def segment_views(
    kv_caches: Mapping[str, object], codec: Codec
) -> tuple[tuple[SegmentView, ...], ...]:
    """Returns the views of every group's segments, which alias the engine's memory."""
    tensors = layer_tensors(kv_caches, codec)
    return tuple(
        tuple(
            _view(tensors[segment.layer], segment, codec.num_blocks, codec.word_bytes)
            for segment in group.segments
        )
        for group in codec.groups
    )


def _view(tensor: torch.Tensor, segment: StridedSegment, num_blocks: int, word: int) -> SegmentView:
    size = (
        num_blocks,
        segment.layers,
        *(count for count, _ in segment.outer),
        segment.run_bytes // word,
    )
    layer_stride = segment.layer_stride or segment.run_bytes
    stride = (
        segment.block_stride // word,
        layer_stride // word,
        *(step // word for _, step in segment.outer),
        1,
    )
    cache = torch.empty(0, dtype=word_dtype(word), device=tensor.device)
    cache.set_(tensor.untyped_storage(), segment.offset // word, size, stride)
    return SegmentView(cache, segment.start // word, segment.bytes_per_block // word)


def staging_view(
    staging: torch.Tensor, view: SegmentView, blocks: int, block_words: int
) -> torch.Tensor:
    """Returns the part of ``staging`` that belongs to a segment, shaped like ``view.cache``.

    ``staging``: one dimension of words, ``blocks`` whole blocks in object order.
    """
    inner = tuple(view.cache.shape[1:])
    strides = []
    step = 1
    for size in reversed(inner):
        strides.append(step)
        step *= size
    return staging.as_strided(
        (blocks, *inner), (block_words, *reversed(strides)), staging.storage_offset() + view.start
    )


def gather(
    views: tuple[SegmentView, ...], index: torch.Tensor, staging: torch.Tensor, block_words: int
) -> None:
    """Copies the blocks ``index`` of the cache to ``staging``, in object order."""
    for view in views:
        target = staging_view(staging, view, len(index), block_words)
        torch.index_select(view.cache, 0, index, out=target)


def scatter(
    views: tuple[SegmentView, ...], index: torch.Tensor, staging: torch.Tensor, block_words: int
) -> None:
    """Copies ``staging`` to the blocks ``index`` of the cache."""
    for view in views:
        view.cache.index_copy_(0, index, staging_view(staging, view, len(index), block_words))
