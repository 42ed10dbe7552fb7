"""Which range of the host pool a rank uses, and how its copy engine gets it.

tierd names the pool with its welcome, and a rank's range of it when the engine's namespace opens.
Registering a range takes seconds, so the mapping begins with the welcome. If tierd then names
another range, that one is mapped instead. Nothing is mapped while the lock of the copies is held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.engines.common.early_registration import Span
from kvtier.engines.common.worker_pool import HostPoolMapper, PoolReady
from kvtier.engines.common.worker_state import RankContext
from kvtier.tierd.wire import Welcome

logger = logging.getLogger(__name__)


class PoolAttachment:
    """The range of the pool that one rank uses. The transfer thread only, unless a method says
    otherwise. Errors of the mapper are in its results."""

    def __init__(
        self,
        context: RankContext,
        copies: threading.Lock,
        mapper: HostPoolMapper,
        on_mapped: Callable[[PoolReady], None],
        drain: Callable[[], None],
        on_attached: Callable[[], None],
    ) -> None:
        """``copies``: their lock. ``on_mapped``: called by the mapper's thread; has the transfer
        thread call ``on_pool``. ``drain``: ends all copies; called without the lock.
        ``on_attached``: called with it."""
        self._context = context
        self._counters = context.counters
        self._copies = copies
        self._mapper = mapper
        self._on_mapped = on_mapped
        self._drain = drain
        self._on_attached = on_attached
        self._told: tuple[int, Span] = (0, (0, 0))
        """Size of a pool, and the range of it that tierd has named."""

    @property
    def hangs(self) -> str:
        """Why no pool is mapped until the engine restarts, or empty. Any thread."""
        return self._mapper.hangs

    def span(self, pool_bytes: int) -> Span:
        """The bytes (begin, end) of a pool to map: those that tierd names, or has named for a pool
        of this size, or will probably name."""
        if self._context.shards.known:
            self._told = pool_bytes, self._context.shards.span(pool_bytes)
        told_bytes, told = self._told
        return told if told_bytes == pool_bytes else self._mapper.expected(pool_bytes)

    def is_usable(self, pool_bytes: int) -> bool:
        """Whether the layout of slots is known and the range is attached that its offsets are
        relative to. Any thread that holds the lock of the copies."""
        pool, shards = self._context.engine.pool, self._context.shards
        return pool is not None and shards.known and pool.span == shards.span(pool_bytes)

    def use(self, welcome: Welcome) -> None:
        """Attaches this rank's range of the pool, or detaches what is attached and begins to map
        it. Raises ``CopyError`` if the device cannot be synchronized."""
        if self._attach(welcome):
            return
        engine = self._context.engine
        if engine.pool is not None:
            self._drain()
            with self._copies:
                engine.detach()
                self._context.generations.words = None
        self._map(welcome)

    def on_pool(self, ready: PoolReady, welcome: Welcome | None) -> None:
        """Takes the result of a mapping. Without a session it is left for the next one."""
        if ready.problem:
            self._counters.add("pool_failures")
            logger.warning(
                "KVTier: serving without tiers: the host pool cannot be used: %s", ready.problem
            )
        if welcome is None or self._attach(welcome):
            return
        nbytes = welcome.pool_bytes
        wanted = Path(welcome.pool_path), nbytes, self.span(nbytes)
        if not ready.problem or (ready.path, ready.nbytes, ready.span) != wanted:
            # It was requested for a previous tierd, or before tierd had named the range.
            self._map(welcome)

    def close(self) -> None:
        """Unregisters the pool. No copy may run, and the copy engine must be closed."""
        self._mapper.close()

    def _attach(self, welcome: Welcome) -> bool:
        """Uses the mapped range if it is the one of this tierd."""
        path, nbytes = Path(welcome.pool_path), welcome.pool_bytes
        mapped = self._mapper.get(path, nbytes, self.span(nbytes))
        if mapped is None:
            return False
        engine = self._context.engine
        with self._copies:
            if engine.pool is not mapped.pool:
                engine.attach(mapped.pool)
            self._context.generations.words = mapped.words
            self._on_attached()
        return True

    def _map(self, welcome: Welcome) -> None:
        path, nbytes = Path(welcome.pool_path), welcome.pool_bytes
        self._mapper.map(path, nbytes, self.span(nbytes), self._on_mapped)
