"""Which range of the host pool a rank uses, and how its copy engine gets it.

tierd names the pool with its welcome, and the range of it that holds a rank's shards when the
engine's namespace opens. Registering a range takes seconds, so the mapping begins with the welcome:
with the range that tierd has named before for a pool of this size, or will probably name. If it
names another one, that one is mapped instead.

At most one range is attached. The copy engine and the generation words change with the lock of the
copies held, and only when no copy runs. Nothing is mapped, and no file is looked at, with that lock
held.
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
    otherwise. No method raises an error of the mapper: the result of a mapping has the reason."""

    def __init__(
        self,
        context: RankContext,
        copies: threading.Lock,
        mapper: HostPoolMapper,
        on_mapped: Callable[[PoolReady], None],
        drain: Callable[[], None],
        on_attached: Callable[[], None],
    ) -> None:
        """``copies``: the lock of the copies. ``on_mapped``: called by the mapper's thread; the
        transfer thread then calls ``on_pool``. ``drain``: called without the lock; afterwards no
        copy runs. ``on_attached``: called with the lock held."""
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
        """Why no pool is mapped until the engine restarts; empty unless the device's driver hangs.
        Any thread."""
        return self._mapper.hangs

    def span(self, pool_bytes: int) -> Span:
        """The range (begin and end, in bytes) of a pool of ``pool_bytes`` to map: what tierd names,
        or has named for a pool of this size, or will probably name."""
        if self._context.shards.known:
            self._told = pool_bytes, self._context.shards.span(pool_bytes)
        told_bytes, told = self._told
        return told if told_bytes == pool_bytes else self._mapper.expected(pool_bytes)

    def is_usable(self, pool_bytes: int) -> bool:
        """Whether the layout of slots is known, and the range of a pool of ``pool_bytes`` attached
        to which tierd's offsets of shards are relative. For callers that hold the lock of the
        copies; any thread."""
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
        """Takes the result of a mapping. ``welcome``: of this session; None: there is none, and the
        mapping is left for the next one."""
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
