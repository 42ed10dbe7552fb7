"""The worker side of the ATOM adapter: one object per rank, called by the model runner's thread.

Nothing here blocks. ATOM calls ``start_load_kv`` before the forward pass, when the kernels of the
previous steps have been launched, and ``get_finished`` after it. Copies start behind those kernels
and end as completions with the operation ids of their jobs. Every job is reported exactly once,
also where this rank copies nothing.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.config.models import Daemon, Structural
from kvtier.engines.atom.layout import allow_block_zero, byte_layout
from kvtier.engines.atom.metadata import AtomCancel, AtomLoad, AtomSave, AtomStepMetadata
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId, SaveOperationId
from kvtier.engines.common.worker_pool import HostPoolMapper
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Counters,
    RankContext,
    RankShards,
    SlotGenerations,
    WorkerClient,
)
from kvtier.engines.common.worker_thread import TransferThread
from kvtier.errors import KVTierError
from kvtier.processes import own_identity
from kvtier.tierd.client import ClientOptions, TierdClient
from kvtier.tierd.liveness import hold_peer_lock
from kvtier.tierd.wire import PROTOCOL, Hello, Message
from kvtier.transfer.codec import Codec
from kvtier.transfer.factory import cache_device, make_engine, register_pool, unregister_pool
from kvtier.transfer.startup_check import pageable_scratch, pinned_scratch, verify_round_trip

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 2.0
ClientFactory = Callable[
    [Path, Callable[[], Hello], Callable[[Message], None], Callable[[str], None]], WorkerClient
]


def connect(
    run_directory: Path,
    hello: Callable[[], Hello],
    sink: Callable[[Message], None],
    on_lost: Callable[[str], None],
    *,
    private: bool = False,
) -> WorkerClient:
    """Returns the real client."""
    options = ClientOptions(require_private=private)
    return TierdClient(run_directory, hello, sink, on_lost, options=options)


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """``engine``: the name that the scheduler side uses too. ``rank``: of tensor parallelism."""

    engine: str
    rank: int
    block_tokens: int
    chunk_tokens: int


class AtomWorker:
    """The worker side of one rank."""

    def __init__(
        self,
        structural: Structural,
        identity: RankIdentity,
        client: ClientFactory | None = None,
    ) -> None:
        self._run_directory = Path(structural.run_directory)
        self._identity = identity
        self._make_client = client or partial(connect, private=structural.daemon is Daemon.ENGINE)
        self._counters = Counters()
        self._completions = CompletionQueue(single_group=True)
        self._thread: TransferThread | None = None
        self._codec: Codec | None = None
        self._loads: dict[int, LoadOperationId] = {}
        self._saves: dict[int, SaveOperationId] = {}
        self.off_reason = "no KV cache is registered"
        """Why this rank copies nothing; empty if it does."""

    def register_kv_caches(self, kv_caches: Mapping[object, object], num_blocks: int) -> None:
        """Derives the layout, verifies it by a round trip, and attaches to tierd in the background.

        ``kv_caches``: layer to ATOM's ``KVCacheTensor``. Any failure turns KVTier off for this
        rank, with one log line.
        """
        if self._thread is not None:
            self._turn_off("KV caches were registered a second time")
            return
        try:
            self._start(kv_caches, num_blocks)
        except KVTierError as error:
            self._turn_off(str(error))
        except Exception as error:  # a cache never stops an engine
            logger.exception("KVTier: unexpected error while starting")
            self._turn_off(f"{type(error).__name__}: {error}")

    def _start(self, kv_caches: Mapping[object, object], num_blocks: int) -> None:
        identity = self._identity
        layout = byte_layout(kv_caches, num_blocks, identity.block_tokens, identity.chunk_tokens)
        codec = layout.codec
        device = cache_device(layout.tensors, codec)
        engine = allow_block_zero(make_engine(layout.tensors, codec))
        scratch = pageable_scratch if device.type == "cpu" else pinned_scratch
        verify_round_trip(layout.tensors, codec, engine, scratch)
        self._codec = codec
        self._thread = TransferThread(
            RankContext(
                engine,
                RankShards(codec.shard_bytes),
                self._completions,
                self._counters,
                time.monotonic,
                SlotGenerations(),
            ),
            partial(self._make_client, self._run_directory, self._hello),
            HostPoolMapper(
                lambda pool, cancelled: register_pool(pool, device, cancelled), unregister_pool
            ),
        )
        self.off_reason = ""
        self._thread.start()
        logger.info(
            "KVTier: rank %d uses chunks of %d tokens, the %s copy engine and shards of %s bytes",
            identity.rank,
            identity.chunk_tokens,
            engine.kind,
            ", ".join(str(size) for size in codec.shard_bytes),
        )

    def _hello(self) -> Hello:
        codec, thread, process = self._codec, self._thread, own_identity()
        return Hello(
            protocol=PROTOCOL,
            role="worker",
            engine=self._identity.engine,
            rank=self._identity.rank,
            pid=process.pid,
            pid_namespace=process.pid_namespace,
            process_start=process.start,
            drained_epoch=thread.drained_epoch if thread is not None else 0,
            codec=codec.text if codec is not None else "",
            shard_bytes=codec.shard_bytes if codec is not None else (),
            lock=hold_peer_lock(self._run_directory),
        )

    def start_load_kv(self, metadata: object) -> None:
        """Submits the jobs of a step, behind the kernels that have been launched."""
        if not isinstance(metadata, AtomStepMetadata) or not metadata.requests:
            return
        loads = [each for each in metadata.requests if isinstance(each, AtomLoad)]
        saves = [each for each in metadata.requests if isinstance(each, AtomSave)]
        cancelled = tuple(e.load for e in metadata.requests if isinstance(e, AtomCancel))
        self._loads.update((each.job.load, each.operation) for each in loads)
        self._saves.update((each.job.reservation, each.operation) for each in saves)
        fence = self._fence() if loads or saves else None
        thread = self._thread
        if thread is None:
            self._completions.reject_loads((each.job for each in loads), "off")
            self._completions.add_stores(each.job.reservation for each in saves)
            return
        if loads or cancelled:
            thread.submit_loads(tuple(each.job for each in loads), cancelled, fence)
        if saves:
            thread.submit_stores(tuple(each.job for each in saves), fence)

    def _fence(self) -> object | None:
        if self._thread is None:
            return None
        try:
            return self._thread.fence()
        except RuntimeError as error:
            self._turn_off(f"cannot record a fence on the compute stream: {error}")
            return None

    def get_finished(self) -> KVConnectorOutput:
        """Takes what has ended since the last call.

        A load that brought less than all of its chunks has failed: other ranks may have more.
        """
        if self._thread is not None:
            self._thread.poll()
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
        """Drains the copies and detaches from tierd, within ``SHUTDOWN_SECONDS``."""
        if self._thread is not None:
            self.off_reason = "shut down"
        self._close()

    def _turn_off(self, reason: str) -> None:
        self._close()
        self.off_reason = reason
        self._counters.add("off")
        logger.warning("KVTier: serving without tiers: %s", reason)

    def _close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(SHUTDOWN_SECONDS)


def tensor_rank() -> int:
    """Returns this process's rank of tensor parallelism, 0 without ATOM's process groups."""
    try:
        groups = importlib.import_module("aiter.dist.parallel_state")
    except ImportError:
        return 0
    return int(groups.get_tp_group().rank_in_group)
