"""LMCache's interfaces for opaque bytes: the GPU connector, the keys, and the metadata.

LMCache's own connectors interpret KV: layers, heads, tokens. This one gives it objects of bytes, so
that the layouts of every attention kernel pass through ``CacheEngine.store`` and ``retrieve``.

Nothing here raises into LMCache: it would keep the memory of the objects that it had allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import TokenDatabase

from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.objects import (
    ObjectShape,
    chunk_hash,
    object_ref,
    seal_object,
    shard_of,
    spoil_object,
    verify_object,
)
from kvtier.engines.lmcache.transfers import LoadTransfer, StoreTransfer
from kvtier.errors import TierError
from kvtier.transfer.engine import CopyError

KEYS_OPTION = "kvtier.keys"
"""Where ``request_configs`` carries the keys of the chunks, in prefix order."""
_log = logging.getLogger("kvtier.lmcache")


def metadata_for(namespace: str, ranks: int, rank: int, shape: ObjectShape) -> LMCacheMetadata:
    """Returns LMCache's description of one rank's objects."""
    return LMCacheMetadata(
        model_name=f"kvtier-{namespace}",
        world_size=ranks,
        local_world_size=ranks,
        worker_id=rank,
        local_worker_id=rank,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, shape.chunk_tokens, 1, shape.bytes_per_token),
        chunk_size=shape.chunk_tokens,
        role="worker",
        engine_id=f"kvtier-{namespace}-{rank}",
    )


class KeyDatabase(TokenDatabase):  # type: ignore[misc]
    """Turns chunks into LMCache's keys. The chunks' own keys come with each call.

    LMCache's hashes depend on the process's hash seed and have 64 bits; ours are 32 bytes, and are
    verified in the header of each object.
    """

    def __init__(self, metadata: LMCacheMetadata, chunk_tokens: int) -> None:
        # Not the base class's: it would choose a hash of vLLM's.
        self.metadata = metadata
        self.chunk_size = chunk_tokens
        self.save_only_first_rank = False

    def key(self, number: int) -> CacheEngineKey:
        """Returns LMCache's key of an object."""
        return self._make_key_by_hash(number)

    def process_tokens(
        self,
        tokens: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        mask: torch.Tensor | None = None,
        make_key: bool = True,
        request_configs: dict[str, Any] | None = None,
    ) -> Iterable[tuple[int, int, CacheEngineKey | int]]:
        """Yields (start, end, key) of the whole chunks whose tokens are not masked.

        Raises ``ValueError`` for a mask that ends inside a chunk.
        """
        keys: Sequence[bytes] = (request_configs or {}).get(KEYS_OPTION, ())
        size = self.chunk_size
        masked = 0 if mask is None else int(mask.numel()) - int(mask.sum())
        if masked % size:
            raise ValueError(f"{masked} masked tokens: must be a multiple of {size}")
        for index in range(masked // size, min(len(keys), len(tokens) // size)):
            number = chunk_hash(keys[index])
            yield index * size, (index + 1) * size, self.key(number) if make_key else number


class BytesConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Moves whole chunks between GPU blocks and objects.

    Calls of ``store`` and ``retrieve`` pass ``transfer=``, which says which blocks and gets the
    outcome.
    """

    def __init__(self, shape: ObjectShape, copier: BlockCopier, namespace: str) -> None:
        self._shape = shape
        self._copier = copier
        self._namespace = namespace

    def get_shape(self, num_tokens: int) -> torch.Size:
        """The shape of an object of so many tokens."""
        return torch.Size((1, 1, num_tokens, self._shape.bytes_per_token))

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """As ``batched_from_gpu``, for one object."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """As ``batched_to_gpu``, for one object."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Fills the object of a ``StoreTransfer``; if that fails, with bytes that do not verify."""
        transfer: StoreTransfer = kwargs["transfer"]
        for memory_obj in memory_objs:
            content = _content(memory_obj)
            spoil_object(content)
            if transfer.copied or len(memory_objs) != 1:
                transfer.failure = "several_objects"
                continue
            try:
                self._check(content)
                shard = shard_of(content, self._shape)
                if not transfer.gate.run(
                    partial(self._copier.store, transfer.run, shard, transfer.fence)
                ):
                    transfer.failure = "out_of_time"
                    continue
                ref = object_ref(self._namespace, transfer.key, transfer.store)
                seal_object(content, self._shape, ref)
                transfer.copied = True
            except (CopyError, ValueError) as error:
                _log.warning("KVTier: cannot store a chunk: %s", error)
                transfer.failure = "copy_failed"

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        """Copies verified objects of a ``LoadTransfer``, up to the first one that is not."""
        transfer: LoadTransfer = kwargs["transfer"]
        found = sorted(zip(starts or (), memory_objs or (), strict=True), key=lambda each: each[0])
        for start, memory_obj in found:
            index = start // self._shape.chunk_tokens
            if index != transfer.loaded or transfer.failure:
                return
            content = _content(memory_obj)
            ref = object_ref(self._namespace, transfer.keys[index], transfer.stores[index])
            try:
                self._check(content)
                verify_object(content, self._shape, ref)
            except (TierError, ValueError) as error:
                _log.warning("KVTier: an object of LMCache does not verify: %s", error)
                transfer.damaged.append(index)
                transfer.failure = "damaged"
                return
            shard, run = shard_of(content, self._shape), transfer.runs[index]
            try:
                if not transfer.gate.run(partial(self._copier.load, run, shard, transfer.fence)):
                    transfer.failure = "out_of_time"
                    return
            except (CopyError, ValueError) as error:
                _log.warning("KVTier: cannot load a chunk: %s", error)
                transfer.failure = "copy_failed"
                return
            transfer.loaded = index + 1

    def _check(self, content: memoryview) -> None:
        if len(content) != self._shape.object_bytes:
            size = self._shape.object_bytes
            raise ValueError(f"object of {len(content)} bytes: must have {size}")


def _content(memory_obj: Any) -> memoryview:
    """The bytes of an LMCache object, without a copy. Raises ``ValueError``."""
    tensor = memory_obj.tensor
    if tensor is None or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError("an object of LMCache is not contiguous bytes")
    return memoryview(tensor.view(-1).numpy())
