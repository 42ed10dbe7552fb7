"""Strided views over the KV tensors, one per band of a codec, in words instead of elements.

A view has the shape (blocks, layers, *outer, words): indexing its first dimension gives the bytes of a band of one
block in the order of the object. Words are the largest integers that every offset divides into, so that a gather moves
8 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.transfer.codec import Band, Codec, layer_tensors

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_dtype(nbytes: int) -> torch.dtype:
    """The integer type of ``nbytes`` (1, 2, 4 or 8) bytes."""
    return _WORDS[nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class BandView:
    """``cache``: the band of every block, as above. ``start``, ``words``: its place in a block of the object, in
    words.
    """

    cache: torch.Tensor
    start: int
    words: int


def band_views(kv_caches: Mapping[str, object], codec: Codec) -> tuple[tuple[BandView, ...], ...]:
    """The views of every group's bands. They alias the engine's memory."""
    tensors = layer_tensors(kv_caches, codec)
    return tuple(
        tuple(_view(tensors[band.layer], band, codec.num_blocks, codec.word_bytes) for band in group.bands)
        for group in codec.groups
    )


def _view(tensor: torch.Tensor, band: Band, num_blocks: int, word: int) -> BandView:
    size = (num_blocks, band.layers, *(count for count, _ in band.outer), band.run_bytes // word)
    layer_stride = band.layer_stride or band.run_bytes
    stride = (band.block_stride // word, layer_stride // word, *(step // word for _, step in band.outer), 1)
    cache = torch.empty(0, dtype=word_dtype(word), device=tensor.device)
    cache.set_(tensor.untyped_storage(), band.offset // word, size, stride)
    return BandView(cache, band.start // word, band.band_bytes // word)


def staged(staging: torch.Tensor, view: BandView, blocks: int, block_words: int) -> torch.Tensor:
    """The part of ``staging`` (1-d, words, ``blocks`` whole blocks in object order) that belongs to a band, shaped
    like ``view.cache``.
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


def gather(views: tuple[BandView, ...], index: torch.Tensor, staging: torch.Tensor, block_words: int) -> None:
    """Blocks ``index`` of the cache into ``staging``, in object order."""
    for view in views:
        target = staged(staging, view, len(index), block_words)
        torch.index_select(view.cache, 0, index, out=target)


def scatter(views: tuple[BandView, ...], index: torch.Tensor, staging: torch.Tensor, block_words: int) -> None:
    """``staging`` into blocks ``index`` of the cache."""
    for view in views:
        view.cache.index_copy_(0, index, staged(staging, view, len(index), block_words))
