"""The worker side of the CacheEngine path: one LMCache engine per rank, and rank 0 answers lookups.

Importing LMCache and opening its engine takes seconds, so that happens in the background. Until
then loads fail and stores are dropped, each with a report.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.engines.atom.cache_engine_config import CacheEngineOptions
from kvtier.engines.atom.metadata import AtomLoad, AtomSave, CacheLoad, CacheSave
from kvtier.engines.atom.rank import SHUTDOWN_SECONDS, AtomRank, RankCopies, RankIdentity
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.jobs import CacheJobs, LoadRequest, StoreRequest
from kvtier.errors import KVTierError
from kvtier.hashing import blake3_hex
from kvtier.lookup.client import LookupClient, greeting
from kvtier.lookup.index import CommitIndex
from kvtier.lookup.server import LookupServer
from kvtier.lookup.wire import RANK

logger = logging.getLogger(__name__)
NAMESPACE_DIGITS = 32


def identity_digest(identity: EngineIdentity) -> str:
    """What the processes of one engine compare before they talk to each other."""
    return blake3_hex(identity.text.encode(), NAMESPACE_DIGITS)


def _opener() -> Callable[..., Any]:
    """Imports LMCache, which takes seconds."""
    from kvtier.engines.lmcache.cache import open_cache

    return open_cache


class CacheEngineWorker(AtomRank):
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
        super().__init__(rank)
        self._options = options
        self._ranks = ranks
        self._model_identity = identity
        self._open_cache = open_cache
        self._copier: BlockCopier | None = None
        self._lock = threading.Lock()
        """Guards what follows, between the engine's thread and the one that opens LMCache."""
        self._jobs: CacheJobs | None = None
        self._client: LookupClient | None = None
        self._server: LookupServer | None = None
        self._closed = False
        self._opener: threading.Thread | None = None

    def _start(self, copies: RankCopies) -> None:
        self._copier = copier = BlockCopier(copies.engine, copies.scratch)
        self._opener = threading.Thread(
            target=self._open,
            args=(copier, copies.codec.text),
            name="kvtier-lmcache-open",
            daemon=True,
        )
        self._opener.start()

    def _open(self, copier: BlockCopier, codec_text: str) -> None:
        """The opener's thread."""
        try:
            self._open_engine(copier, codec_text)
        except KVTierError as error:
            self._turn_off(str(error))
        except Exception as error:  # LMCache raises whatever its back ends raise
            logger.exception("KVTier: LMCache cannot be opened")
            self._turn_off(f"{type(error).__name__}: {error}")

    def _open_engine(self, copier: BlockCopier, codec_text: str) -> None:
        rank, directory = self._identity, self._options.run_directory
        identity = self._model_identity()
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

    def _submit(
        self, loads: Sequence[AtomLoad], saves: Sequence[AtomSave], cancelled: Sequence[int]
    ) -> bool:
        jobs, copier = self._jobs, self._copier
        if jobs is None or copier is None:
            return False
        fence: object | None = None
        if loads or saves:
            try:
                fence = copier.fence()
            except RuntimeError as error:
                self._turn_off(f"cannot record a fence on the compute stream: {error}")
                return False
        jobs.cancel(cancelled)
        wanted = [each for each in loads if isinstance(each, CacheLoad)]
        known = [each for each in wanted if len(each.keys) >= len(each.job.runs)]
        self._completions.reject_loads((each.job for each in loads if each not in known), "gone")
        jobs.submit_loads([LoadRequest(each.job, each.keys, each.stores) for each in known], fence)
        named = [each for each in saves if isinstance(each, CacheSave) and each.key]
        self._completions.add_stores(each.job.reservation for each in saves if each not in named)
        jobs.submit_stores(
            [
                StoreRequest(each.job.reservation, each.key, each.store, each.job.run)
                for each in named
            ],
            fence,
        )
        return True

    def _poll(self) -> None:
        if self._jobs is not None:
            self._jobs.poll()

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
