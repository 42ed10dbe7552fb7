"""The worker side of the ATOM adapter with tierd: shards go to and from the host pool."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvtier.config.models import Daemon, Structural
from kvtier.engines.atom.metadata import AtomLoad, AtomSave
from kvtier.engines.atom.rank import SHUTDOWN_SECONDS, AtomRank, RankCopies, RankIdentity
from kvtier.engines.common.worker_pool import HostPoolMapper
from kvtier.engines.common.worker_state import (
    RankContext,
    RankShards,
    SlotGenerations,
    WorkerClientFactory,
    connect_worker,
)
from kvtier.engines.common.worker_thread import TransferThread
from kvtier.processes import own_identity
from kvtier.store.pool_layout import expected_span
from kvtier.tierd.liveness import hold_peer_lock
from kvtier.tierd.wire import PROTOCOL, Hello
from kvtier.transfer.codec import Codec
from kvtier.transfer.factory import register_pool, unregister_pool

logger = logging.getLogger(__name__)


class AtomWorker(AtomRank):
    """The worker side of one rank."""

    def __init__(
        self,
        structural: Structural,
        identity: RankIdentity,
        client: WorkerClientFactory | None = None,
    ) -> None:
        super().__init__(identity)
        self._run_directory = Path(structural.run_directory)
        self._make_client = client or partial(
            connect_worker, private=structural.daemon is Daemon.ENGINE
        )
        self._thread: TransferThread | None = None
        self._codec: Codec | None = None

    def _start(self, copies: RankCopies) -> None:
        identity, codec, device = self._identity, copies.codec, copies.device
        self._codec = codec
        self._thread = TransferThread(
            RankContext(
                copies.engine,
                RankShards(codec.shard_bytes),
                self._completions,
                self._counters,
                time.monotonic,
                SlotGenerations(),
            ),
            partial(self._make_client, self._run_directory, self._hello),
            HostPoolMapper(
                lambda pool, cancelled: register_pool(pool, device, cancelled),
                unregister_pool,
                expect=lambda size: expected_span(size, identity.shard_writers, identity.rank),
            ),
        )
        self._thread.start()
        logger.info(
            "KVTier: rank %d uses chunks of %d tokens, the %s copy engine and shards of %s bytes",
            identity.rank,
            identity.chunk_tokens,
            copies.engine.kind,
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

    def _submit(
        self, loads: Sequence[AtomLoad], saves: Sequence[AtomSave], cancelled: Sequence[int]
    ) -> bool:
        thread = self._thread
        if thread is None:
            return False
        fence: object | None = None
        if loads or saves:
            try:
                fence = thread.fence()
            except RuntimeError as error:
                self._turn_off(f"cannot record a fence on the compute stream: {error}")
                return False
        if loads or cancelled:
            thread.submit_loads(tuple(each.job for each in loads), tuple(cancelled), fence)
        if saves:
            thread.submit_stores(tuple(each.job for each in saves), fence)
        return True

    def _poll(self) -> None:
        if self._thread is not None:
            self._thread.poll()

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
