"""What the worker sides of the ATOM adapter share: one object per rank, called by the model runner.

ATOM calls ``start_load_kv`` before the forward pass, when the kernels of the previous steps have
been launched, and ``get_finished`` after it. Copies start behind those kernels and end as
completions with the operation ids of their jobs. Every job is reported exactly once, also where
this rank copies nothing. Nothing here blocks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier.engines.atom.layout import byte_layout
from kvtier.engines.atom.metadata import AtomCancel, AtomLoad, AtomSave, AtomStepMetadata
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId, SaveOperationId
from kvtier.engines.common.worker_state import CompletionQueue, Counters
from kvtier.errors import KVTierError
from kvtier.transfer.codec import Codec
from kvtier.transfer.engine import CopyEngine
from kvtier.transfer.factory import cache_device, make_engine
from kvtier.transfer.startup_check import (
    Scratch,
    pageable_scratch,
    pinned_scratch,
    verify_round_trip,
)

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """``engine``: the name that the scheduler side uses too. ``rank``: of tensor parallelism.
    ``shard_writers``: as in the scheduler side's ``Hello``; empty if they are not known."""

    engine: str
    rank: int
    block_tokens: int
    chunk_tokens: int
    shard_writers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RankCopies:
    """A verified copy engine for what ATOM has registered. ``scratch``: returns host memory that
    the device can copy to."""

    engine: CopyEngine
    codec: Codec
    device: torch.device
    scratch: Scratch


class AtomRank(ABC):
    """The worker side of one rank. Subclasses move the bytes."""

    def __init__(self, identity: RankIdentity) -> None:
        self._identity = identity
        self._counters = Counters()
        self._completions = CompletionQueue(single_group=True)
        self._loads: dict[int, LoadOperationId] = {}
        self._saves: dict[int, SaveOperationId] = {}
        self._registered = False
        self.off_reason = "no KV cache is registered"
        """Why this rank copies nothing; empty if it does, or is about to."""

    # For subclasses.

    @abstractmethod
    def _start(self, copies: RankCopies) -> None:
        """Starts to serve. Whatever it raises turns KVTier off for this rank."""

    @abstractmethod
    def _submit(
        self, loads: Sequence[AtomLoad], saves: Sequence[AtomSave], cancelled: Sequence[int]
    ) -> bool:
        """Takes the jobs of a step; False: this rank copies nothing. May turn KVTier off."""

    @abstractmethod
    def _poll(self) -> None:
        """Ends what has ended."""

    @abstractmethod
    def _close(self) -> None:
        """Ends all jobs, within ``SHUTDOWN_SECONDS`` for each part."""

    # Called by ATOM.

    def register_kv_caches(self, kv_caches: Mapping[object, object], num_blocks: int) -> None:
        """Derives the layout, verifies it by a round trip, and attaches in the background.

        ``kv_caches``: layer to ATOM's ``KVCacheTensor``. Any failure turns KVTier off for this
        rank, with one log line.
        """
        if self._registered:
            self._turn_off("KV caches were registered a second time")
            return
        try:
            copies = self._copies(kv_caches, num_blocks)
            self.off_reason = ""
            self._start(copies)
            self._registered = True
        except KVTierError as error:
            self._turn_off(str(error))
        except Exception as error:  # a cache never stops an engine
            logger.exception("KVTier: unexpected error while starting")
            self._turn_off(f"{type(error).__name__}: {error}")

    def _copies(self, kv_caches: Mapping[object, object], num_blocks: int) -> RankCopies:
        rank = self._identity
        layout = byte_layout(kv_caches, num_blocks, rank.block_tokens, rank.chunk_tokens)
        device = cache_device(layout.tensors, layout.codec)
        engine = make_engine(layout.tensors, layout.codec)
        scratch = pageable_scratch if device.type == "cpu" else pinned_scratch
        verify_round_trip(layout.tensors, layout.codec, engine, scratch)
        return RankCopies(engine, layout.codec, device, scratch)

    def start_load_kv(self, metadata: object) -> None:
        """Submits the jobs of a step, behind the kernels that have been launched."""
        if not isinstance(metadata, AtomStepMetadata) or not metadata.requests:
            return
        loads = [each for each in metadata.requests if isinstance(each, AtomLoad)]
        saves = [each for each in metadata.requests if isinstance(each, AtomSave)]
        cancelled = [each.load for each in metadata.requests if isinstance(each, AtomCancel)]
        self._loads.update((each.job.load, each.operation) for each in loads)
        self._saves.update((each.job.reservation, each.operation) for each in saves)
        if not self._submit(loads, saves, cancelled):
            self._completions.reject_loads((each.job for each in loads), "off")
            self._completions.add_stores(each.job.reservation for each in saves)

    def get_finished(self) -> KVConnectorOutput:
        """Takes what has ended since the last call.

        A load that brought less than all of its chunks has failed: other ranks may have more.
        """
        self._poll()
        completed = self._completions.take()
        output = KVConnectorOutput()
        for result in completed.loads:
            load = self._loads.pop(result.load, None)
            if load is not None:
                whole = not result.reason and result.keys_loaded > 0
                (output.finished_loading if whole else output.failed_loading).add(load)
        for reservation in completed.stores_done:
            save = self._saves.pop(reservation, None)
            if save is not None:
                output.finished_saving.add(save)
        return output

    def counts(self) -> dict[str, int]:
        """Returns all counts since the start."""
        return self._counters.snapshot()

    def shutdown(self) -> None:
        """Ends all jobs, within ``SHUTDOWN_SECONDS`` for each part."""
        self.off_reason = self.off_reason or "shut down"
        self._close()

    def _turn_off(self, reason: str) -> None:
        self.off_reason = reason
        self._counters.add("off")
        logger.warning("KVTier: serving without tiers: %s", reason)
        self._close()
