"""Start-up check of the codec: what is copied into the KV tensors equals what was copied out.

The engine registers its KV tensors before it serves, so no request runs during the check. Patterns
are written through the tensors as the engine sees them, copied out, and copied in to *other*
blocks. Then those blocks must hold the patterns, again as the engine sees them, and the blocks
beside them must be unchanged. The check restores everything that it touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from kvtier.transfer.codec import Codec, LayerLayout, layer_tensors
from kvtier.transfer.engine import Copy, CopyEngine, CopyError, CopyHandle, Direction
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.strided_views import word_dtype

ROUND_TRIP_SECONDS = 20.0
"""Timeout of one copy. A slower device is of no use."""
_POLL_SECONDS = 0.0005
Scratch = Callable[[int], HostPool]


class RoundTripError(CopyError):
    """The round trip changed bytes. KVTier must stay off for this engine."""


def pageable_scratch(nbytes: int) -> HostPool:
    """Returns ordinary host memory as a pool."""
    return HostPool(np.zeros(nbytes, dtype=np.uint8))


def pinned_scratch(nbytes: int) -> HostPool:
    """Returns page-locked host memory as a pool."""
    return HostPool(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy())


def verify_round_trip(
    kv_caches: Mapping[str, object],
    codec: Codec,
    engine: CopyEngine,
    scratch: Scratch = pageable_scratch,
) -> None:
    """Checks every group that has layers on this rank. Raises ``RoundTripError`` or ``CopyError``.

    Call it on the thread that launches the engine's kernels, before the transfer thread starts. It
    uses blocks at the end of the cache, never block 0 (vLLM's null block).
    """
    tensors = layer_tensors(kv_caches, codec)
    for group_index, group in enumerate(codec.groups):
        if not group.layers:
            continue
        count = min(group.blocks_per_chunk, (codec.num_blocks - 2) // 2, 3)
        sources = tuple(codec.num_blocks - 1 - 2 * i for i in range(count))
        targets = tuple(block - 1 for block in reversed(sources))
        touched = sorted(
            {near for block in sources + targets for near in (block - 1, block, block + 1)}
        )
        touched = [block for block in touched if 0 <= block < codec.num_blocks]
        layers = [(layer, tensors[layer.name]) for layer in group.layers]
        saved = {
            (layer.name, block): _page(tensor, layer, block).clone()
            for layer, tensor in layers
            for block in touched
        }
        engine.attach(scratch(group.shard_bytes))
        try:
            _round_trip(engine, group_index, layers, sources, targets, group.blocks_per_chunk)
            expected_same = [block for block in touched if block not in sources + targets]
            for layer, tensor in layers:
                for block in expected_same:
                    if not torch.equal(_page(tensor, layer, block), saved[layer.name, block]):
                        raise RoundTripError(
                            f"{layer.name}: a copy into a neighboring block changed block {block}"
                        )
        finally:
            engine.synchronize()
            engine.detach()
            for layer, tensor in layers:
                for block in touched:
                    _page(tensor, layer, block).copy_(saved[layer.name, block])


def _round_trip(
    engine: CopyEngine,
    group: int,
    layers: list[tuple[LayerLayout, torch.Tensor]],
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    blocks_per_chunk: int,
) -> None:
    generator = torch.Generator().manual_seed(20_240_117)
    patterns: dict[tuple[str, int], torch.Tensor] = {}
    for layer, tensor in layers:
        for block in sources:
            page = _page(tensor, layer, block)
            noise = torch.randint(
                0,
                256,
                (page.numel() * page.element_size(),),
                dtype=torch.uint8,
                generator=generator,
            )
            patterns[layer.name, block] = noise.view(page.dtype).reshape(page.shape).to(page.device)
            page.copy_(patterns[layer.name, block])
    for layer, tensor in layers:
        for block in sources:
            if not torch.equal(_page(tensor, layer, block), patterns[layer.name, block]):
                raise RoundTripError(
                    f"{layer.name}: block {block} shares bytes with another layer or block"
                )
    first = blocks_per_chunk - len(sources)
    _wait(
        engine, engine.submit([Copy(group, 0, first, sources)], Direction.TO_HOST, engine.fence())
    )
    for layer, tensor in layers:
        for block in sources + targets:
            _page(tensor, layer, block).zero_()
    _wait(
        engine, engine.submit([Copy(group, 0, first, targets)], Direction.TO_DEVICE, engine.fence())
    )
    for layer, tensor in layers:
        for source, target in zip(sources, targets, strict=True):
            if not torch.equal(_page(tensor, layer, target), patterns[layer.name, source]):
                raise RoundTripError(
                    f"{layer.name}: the bytes copied in are not what was copied out"
                )


def _page(tensor: torch.Tensor, layer: LayerLayout, block: int) -> torch.Tensor:
    """Returns the engine's view of one block as integers, because a NaN does not equal itself."""
    bits = tensor.view(word_dtype(tensor.element_size()))
    return bits.narrow(layer.block_dim, block * layer.kernel_blocks, layer.kernel_blocks)


def _wait(engine: CopyEngine, handle: CopyHandle) -> None:
    deadline = time.monotonic() + ROUND_TRIP_SECONDS
    while not engine.done(handle):
        if time.monotonic() > deadline:
            raise RoundTripError(
                f"a copy of {handle.total_bytes} bytes took longer than {ROUND_TRIP_SECONDS:.0f} s"
            )
        time.sleep(_POLL_SECONDS)
