"""The worker side of the CacheEngine path: one LMCache engine per rank, and rank 0 answers lookups.

Importing LMCache and opening its engine takes seconds, so that happens in the background. Until
then loads fail and stores are dropped, each with a report.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.engines.atom.cache_engine_config import CacheEngineOptions
from kvtier.engines.atom.layout import allow_block_zero, byte_layout
from kvtier.engines.atom.metadata import AtomCancel, AtomStepMetadata, CacheLoad, CacheSave
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId, SaveOperationId
from kvtier.engines.atom.worker import RankIdentity
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.worker_state import CompletionQueue, Counters
from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.jobs import CacheJobs, LoadRequest, StoreRequest
from kvtier.errors import KVTierError
from kvtier.hashing import blake3_hex
from kvtier.lookup.client import LookupClient, greeting
from kvtier.lookup.index import CommitIndex
from kvtier.lookup.server import LookupServer
from kvtier.lookup.wire import RANK
from kvtier.transfer.factory import cache_device, make_engine
from kvtier.transfer.startup_check import pageable_scratch, pinned_scratch, verify_round_trip

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 2.0
NAMESPACE_DIGITS = 32


def identity_digest(identity: EngineIdentity) -> str:
    """What the processes of one engine compare before they talk to each other."""
    return blake3_hex(identity.text.encode(), NAMESPACE_DIGITS)


def _opener() -> Callable[..., Any]:
    """Imports LMCache, which takes seconds."""
    from kvtier.engines.lmcache.cache import open_cache

    return open_cache


class CacheEngineWorker:
    """The worker side of one rank."""

    def __init__(
        self,
        options: CacheEngineOptions,
        rank: RankIdentity,
        ranks: int,
        identity: Callable[[], EngineIdentity],
        open_cache: Callable[..., Any] | None = None,
    ) -> None:
        """``identity``: may read files; called on the thread that opens LMCache."""
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._identity = identity
        self._open_cache = open_cache
        self._counters = Counters()
        self._completions = CompletionQueue(single_group=True)
        self._loads: dict[int, LoadOperationId] = {}
        self._saves: dict[int, SaveOperationId] = {}
        self._copier: BlockCopier | None = None
        self._lock = threading.Lock()
        """Guards what follows, between the engine's thread and the one that opens LMCache."""
        self._jobs: CacheJobs | None = None
        self._client: LookupClient | None = None
        self._server: LookupServer | None = None
        self._closed = False
        self._opener: threading.Thread | None = None
        self.off_reason = "no KV cache is registered"
        """Why this rank copies nothing; empty if it does, or will once LMCache is open."""

    def register_kv_caches(self, kv_caches: Mapping[object, object], num_blocks: int) -> None:
        """Derives the layout, verifies it by a round trip, and opens LMCache in the background.

        Any failure turns KVTier off for this rank, with one log line.
        """
        if self._copier is not None:
            self._turn_off("KV caches were registered a second time")
            return
        try:
            codec_text = self._make_copier(kv_caches, num_blocks)
        except KVTierError as error:
            self._turn_off(str(error))
            return
        except Exception as error:  # a cache never stops an engine
            logger.exception("KVTier: unexpected error while starting")
            self._turn_off(f"{type(error).__name__}: {error}")
            return
        self.off_reason = ""
        self._opener = threading.Thread(
            target=self._open, args=(codec_text,), name="kvtier-lmcache-open", daemon=True
        )
        self._opener.start()

    def _make_copier(self, kv_caches: Mapping[object, object], num_blocks: int) -> str:
        rank = self._rank
        layout = byte_layout(kv_caches, num_blocks, rank.block_tokens, rank.chunk_tokens)
        device = cache_device(layout.tensors, layout.codec)
        engine = allow_block_zero(make_engine(layout.tensors, layout.codec))
        scratch = pageable_scratch if device.type == "cpu" else pinned_scratch
        verify_round_trip(layout.tensors, layout.codec, engine, scratch)
        self._copier = BlockCopier(engine, scratch)
        return layout.codec.text

    def _open(self, codec_text: str) -> None:
        """The opener's thread."""
        try:
            self._open_engine(codec_text)
        except KVTierError as error:
            self._turn_off(str(error))
        except Exception as error:  # LMCache raises whatever its back ends raise
            logger.exception("KVTier: LMCache cannot be opened")
            self._turn_off(f"{type(error).__name__}: {error}")

    def _open_engine(self, codec_text: str) -> None:
        copier, rank, directory = self._copier, self._rank, self._options.run_directory
        if copier is None:
            return
        identity = self._identity()
        if identity.ephemeral_reason and self._options.file.persistent:
            raise KVTierError(
                "lmcache_config.remote_url keeps objects beyond this engine, whose identity holds "
                f"for this start only: {identity.ephemeral_reason}"
            )
        text = f"{identity.text}\n{codec_text}\n{rank.rank}/{self._ranks}"
        if identity.ephemeral_reason:
            # What the identity does not cover may differ at the next start.
            text += f"\n{secrets.token_hex(16)}"
        namespace = blake3_hex(text.encode(), NAMESPACE_DIGITS)
        cache = (self._open_cache or _opener())(
            self._options.file.path, namespace, self._ranks, rank.rank, copier, rank.chunk_tokens
        )
        first = greeting(RANK, rank.engine, self._ranks, rank.rank, identity_digest(identity))
        client = LookupClient(directory, first)
        server = None
        if rank.rank == 0:
            ranks = self._ranks
            server = LookupServer(directory, first, lambda: CommitIndex(ranks, cache))
            try:
                server.start()
            except KVTierError:
                cache.close()
                raise
        jobs = CacheJobs(cache, self._completions, client, self._counters)
        with self._lock:
            closed = self._closed
            if not closed:
                self._jobs, self._client, self._server = jobs, client, server
                jobs.start()
                client.start()
        if closed:
            if server is not None:
                server.close(SHUTDOWN_SECONDS)
            cache.close()
            return
        logger.info(
            "KVTier: rank %d stores chunks of %d tokens and %d bytes through LMCache",
            rank.rank,
            rank.chunk_tokens,
            copier.shard_bytes,
        )

    @property
    def ready(self) -> bool:
        """Whether LMCache is open and the lookup server has accepted this rank."""
        client = self._client
        return client is not None and client.attached

    def start_load_kv(self, metadata: object) -> None:
        """Submits the jobs of a step, behind the kernels that have been launched."""
        if not isinstance(metadata, AtomStepMetadata) or not metadata.requests:
            return
        loads = [each for each in metadata.requests if isinstance(each, CacheLoad)]
        saves = [each for each in metadata.requests if isinstance(each, CacheSave)]
        cancelled = [each.load for each in metadata.requests if isinstance(each, AtomCancel)]
        self._loads.update((each.job.load, each.operation) for each in loads)
        self._saves.update((each.job.reservation, each.operation) for each in saves)
        fence = self._fence() if loads or saves else None
        jobs = self._jobs
        if jobs is None:
            self._completions.reject_loads((each.job for each in loads), "off")
            self._completions.add_stores(each.job.reservation for each in saves)
            return
        gone = [each for each in loads if len(each.keys) < len(each.job.runs)]
        self._completions.reject_loads((each.job for each in gone), "gone")
        unknown = [each for each in saves if not each.key]
        self._completions.add_stores(each.job.reservation for each in unknown)
        jobs.cancel(cancelled)
        jobs.submit_loads(
            [LoadRequest(each.job, each.keys, each.stores) for each in loads if each not in gone],
            fence,
        )
        jobs.submit_stores(
            [
                StoreRequest(each.job.reservation, each.key, each.store, each.job.run)
                for each in saves
                if each.key
            ],
            fence,
        )

    def _fence(self) -> object | None:
        if self._copier is None:
            return None
        try:
            return self._copier.fence()
        except RuntimeError as error:
            self._turn_off(f"cannot record a fence on the compute stream: {error}")
            return None

    def get_finished(self) -> KVConnectorOutput:
        """Takes what has ended since the last call, as AtomWorker does."""
        if self._jobs is not None:
            self._jobs.poll()
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
        """Ends all jobs, LMCache and the lookups, within ``SHUTDOWN_SECONDS`` each."""
        if self._copier is not None:
            self.off_reason = self.off_reason or "shut down"
        self._close()

    def _turn_off(self, reason: str) -> None:
        self.off_reason = reason
        self._counters.add("off")
        logger.warning("KVTier: serving without tiers: %s", reason)
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            jobs, self._jobs = self._jobs, None
            client, server = self._client, self._server
            self._client = self._server = None
        if client is not None:
            client.close(SHUTDOWN_SECONDS)
        if server is not None:
            server.close(SHUTDOWN_SECONDS)
        ended = jobs is not None and jobs.close(SHUTDOWN_SECONDS)
        copier = self._copier
        if ended and copier is not None:
            try:
                copier.close()
            except KVTierError as error:
                logger.warning("KVTier: %s", error)
