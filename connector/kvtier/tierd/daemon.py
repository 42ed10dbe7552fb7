"""tierd as a process: starting, reporting, ending.

Start: join the run directory, take the lock of the one living tierd, raise the epoch, listen; allocate the pool on a thread meanwhile
(a hundred gigabytes take a while) and keep those who say hello waiting with heartbeats; then open the store, fenced while
workers of an earlier epoch have not drained.

End: on SIGTERM, or, where an engine started it, when nobody is attached any more: stores that are pending are written for at most
``DRAIN_SECONDS``, sessions are told, the run directory is removed if nobody else is in it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from kvtier import __version__
from kvtier.config.loader import load
from kvtier.config.models import Daemon, Topology
from kvtier.errors import KVTierError
from kvtier.namespace import derive_namespace
from kvtier.processes import Liveness, ProcessIdentity, liveness_of
from kvtier.store.context import StoreRuntime
from kvtier.store.executor import ThreadExecutor
from kvtier.store.recovery import PoolRecovery
from kvtier.store.store import TierStore, executor_lanes
from kvtier.store.types import StoreCounters
from kvtier.tierd import tier_factory
from kvtier.tierd.channel import SEND_MESSAGES
from kvtier.tierd.dispatcher import Dispatcher
from kvtier.tierd.fencing import (
    BLIND_SECONDS,
    OrphanedReadsFile,
    ReadsFile,
    SessionFiles,
    StartupFence,
    find_orphaned_reads,
)
from kvtier.tierd.host_pool import PoolStart, describe_namespace
from kvtier.tierd.http import Token
from kvtier.tierd.live_config import LiveFollower
from kvtier.tierd.liveness import PEERS_NAME, PeerLiveness, open_directory
from kvtier.tierd.reporting import Reporter, SnapshotInputs
from kvtier.tierd.run_directory import SESSIONS_NAME, FileLock, RunDirectory
from kvtier.tierd.server import Loop, Pool
from kvtier.tierd.sessions import Sessions
from kvtier.tierd.status import Snapshot
from kvtier.tierd.tier_factory import WrapTier, build_tiers, memory_document
from kvtier.tierd.wire import BEAT_SECONDS, SOCKET_NAME
from kvtier.tiers.base import Tier

DRAIN_SECONDS = 3.0
STALLED_SECONDS = 1.25
"""Without any store written for so long, what is pending is not waited for any more: the storage hangs, or is too slow to matter."""
CLOSE_SECONDS = 0.75
"""For all tiers together to give back what they hold of their storage. With the above, and what is said to sessions, a tierd beside a
hung mount has ended within three seconds."""
LINGER_SECONDS = 5.0
"""A tierd that an engine started waits this long for a session after the last one vanished: an engine that lost tierd for a moment
comes back within four seconds."""
LOCK_SECONDS = 2.0
"""How long the lock may be taken: whoever only looks whether a tierd lives holds it for a moment."""
_FLUSH_MILLISECONDS = 300
_SPAWNER_GONE_SECONDS = 5.0
_SWEEP_SECONDS = 60.0

EXIT_OK = 0
EXIT_CANNOT_SERVE = 1
EXIT_ANOTHER_LIVES = 3

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class Options:
    """How a tierd is run. ``fencing`` and ``blind_seconds`` are as they must be; tests show what happens otherwise.
    ``wrap_tier`` puts something around each lower tier (faults, in tests)."""

    topology_directory: Path
    run_directory: Path | None = None
    spawned_by_engine: bool = False
    spawner: ProcessIdentity | None = None
    wrap_tier: WrapTier | None = None
    fencing: bool = True
    blind_seconds: float = BLIND_SECONDS
    linger_seconds: float = LINGER_SECONDS
    drain_seconds: float = DRAIN_SECONDS
    structural: Path | None = None
    """The structural document, where it is not the one in the topology directory."""
    token_file: Path | None = None
    data_bytes: int | None = None


class TierDaemon:
    """One tierd. ``run`` until ``stop`` or until it is not needed any more. Raises ``KVTierError`` or ``OSError`` where it cannot start."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._topology: Topology = load(options.topology_directory, structural=options.structural)
        structural = self._topology.structural
        if options.data_bytes is not None:
            tier_factory.limit_data(structural, options.data_bytes)
        self._run_directory = RunDirectory(
            options.run_directory or Path(structural.run_directory),
            shared=structural.daemon is Daemon.SIDECAR,
        )
        self._stop_requests = 0
        self._peers: PeerLiveness | None = None
        self._draining = False
        self._loop: Loop | None = None
        self._pool_start: PoolStart | None = None
        self._io: ThreadExecutor | None = None
        token = None if options.token_file is None else Token(options.token_file)
        self._reporter = Reporter(structural, self._run_directory.path, clock, token)
        self._counters = StoreCounters()
        self._epoch = 0
        self._parent = os.getppid()
        self._empty_since: float | None = None
        self._drain_until: float | None = None
        self._progress: tuple[int, float] = (0, 0.0)
        self._reads: ReadsFile | None = None
        self._hung: list[OrphanedReadsFile] = []
        self._built = build_tiers(self._topology, options.wrap_tier)
        self._follower = LiveFollower(
            options.topology_directory, structural, options.structural is not None
        )
        self._live = self._topology.live

    # Any thread.

    def stop(self) -> None:
        """Asks for a bounded shutdown; a second time for one without draining. Also for signal handlers."""
        self._stop_requests += 1
        if self._loop is not None:
            self._loop.wake()

    def drain(self) -> None:
        """Takes no more stores and writes what is pending, but goes on serving loads; ``stop`` then ends it at once. Also for
        signal handlers."""
        self._draining = True
        if self._loop is not None:
            self._loop.wake()

    @property
    def snapshot(self) -> Snapshot:
        """What is shown at present."""
        return self._reporter.snapshot

    # The loop's thread.

    def run(self) -> int:
        """Serves until it is told, or need not go on; returns the exit status."""
        run = self._run_directory
        run.join()
        lock: FileLock | None = None
        try:
            lock = self._take_lock()
            if lock is None:
                _log.info("another tierd lives in %s", run.path)
                return EXIT_ANOTHER_LIVES
            self._epoch = run.read_epoch()
            self._next_epoch()
            self._serve(lock)
            return EXIT_OK
        finally:
            if lock is not None:
                lock.close()
            if run.leave():
                _log.info("removed %s", run.path)

    def _take_lock(self) -> FileLock | None:
        deadline = self._clock() + LOCK_SECONDS
        while True:
            lock = self._run_directory.try_daemon_lock()
            if lock is not None or self._clock() > deadline:
                return lock
            time.sleep(0.02)

    def _next_epoch(self) -> int:
        self._run_directory.write_epoch(self._epoch + 1)
        self._epoch += 1
        return self._epoch

    def _serve(self, lock: FileLock) -> None:
        run, options = self._run_directory, self._options
        run.beat(lock)
        self._reads = ReadsFile(run.path, self._epoch, run.file_mode)
        self._hung = find_orphaned_reads(run.path, self._reads.path)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
            socket.setsockopt(zmq.RCVHWM, 4096)
            socket.setsockopt(zmq.LINGER, _FLUSH_MILLISECONDS)
            path = run.path / SOCKET_NAME
            socket.bind(f"ipc://{path}")
            os.chmod(path, run.file_mode)
            open_directory(run.path / PEERS_NAME)
            files = SessionFiles(run.path / SESSIONS_NAME, run.file_mode)
            peers = self._peers = PeerLiveness(run.path, self._clock)
            fence = StartupFence(files, self._clock(), peers, options.blind_seconds)
            loop = Loop(
                socket,
                fence,
                lambda host: Sessions(
                    host,
                    files,
                    fence,
                    derive_namespace,
                    self._next_epoch,
                    peers,
                    self._counters,
                    blind_seconds=options.blind_seconds,
                ),
                self._counters,
                self._live,
                self._clock,
            )
            self._loop = loop
            self._pool_start = PoolStart(run, self._topology.structural, loop.wake)
            self._follower.poll()
            self._follower.start()
            _log.info("tierd %s serves %s, epoch %d", __version__, run.path, self._epoch)
            self._go_round(loop, lock, fence)
            self._count_dropped(loop)
            loop.close("tierd stops")
        finally:
            self._close_parts()
            socket.close(_FLUSH_MILLISECONDS)
            context.destroy(linger=_FLUSH_MILLISECONDS)

    def _go_round(self, loop: Loop, lock: FileLock, fence: StartupFence) -> None:
        last_beat = last_sweep = 0.0
        while True:
            loop.turn(BEAT_SECONDS)
            now = self._clock()
            if now - last_beat >= BEAT_SECONDS:
                last_beat = now
                self._run_directory.beat(lock)
                self._check_hung(loop)
            if now - last_sweep >= _SWEEP_SECONDS and self._peers is not None:
                last_sweep = now
                self._peers.sweep(
                    loop.sessions.locks() | {worker.process.lock for worker in fence.waiting}
                )
            self._begin_when_allocated(loop, fence)
            self._apply_live(loop)
            self._reporter.turn(now, lambda: self._facts(loop, fence))
            if self._over(loop, now):
                return

    def _begin_when_allocated(self, loop: Loop, fence: StartupFence) -> None:
        start = self._pool_start
        if start is None or not start.finished or loop.exchange is not None or loop.no_pool:
            return
        if start.pool is None:
            loop.give_up(start.error)
            return
        fenced = self._options.fencing and fence.closed
        pool = start.pool
        self._io = ThreadExecutor(executor_lanes(self._topology), wake=loop.wake)
        store = TierStore(
            pool.bytes,
            pool.memory,
            self._built.tiers,
            self._topology.model_copy(update={"live": self._live}),
            StoreRuntime(self._io, self._clock, counters=self._counters),
            PoolRecovery(
                fenced,
                start.table,
                self._reads,
                {each.path.name: each.places for each in self._hung},
            ),
        )
        if fenced:
            _log.info("fenced: waiting for %d workers of earlier epochs", len(fence.waiting))
            loop.unfence_with(lambda: self._unfence(store))
        names = (
            memory_document(self._topology.structural).name,
            *(tier.name for tier in self._built.tiers),
        )
        exchange = Dispatcher(
            store, pool.bytes, loop.send, self._counters, self._describe_namespace
        )
        loop.begin(exchange, Pool(str(pool.path), pool.bytes, names))

    def _check_hung(self, loop: Loop) -> None:
        if loop.exchange is None:
            return
        for each in [each for each in self._hung if each.over()]:
            self._hung.remove(each)
            loop.exchange.store.release_orphaned_reads(each.path.name)

    def _unfence(self, store: TierStore) -> None:
        _log.info("every worker of earlier epochs has drained or is gone")
        store.unfence()

    def _describe_namespace(self, namespace: str, canonical: str) -> None:
        run, start = self._run_directory, self._pool_start
        if start is not None and start.table is not None:
            describe_namespace(run.path, run.file_mode, namespace, canonical)
        for tier in self._built.tiers:
            describe = getattr(tier, "describe_namespace", None)
            if describe is not None and self._io is not None:
                self._io.submit(
                    f"maintain:{tier.name}",
                    partial(describe, namespace, canonical),
                    self._described,
                )

    def _described(self, _result: object, error: BaseException | None) -> None:
        if error is not None:
            self._counters.add("namespace_descriptions_failed")
            _log.warning("a namespace's description could not be written: %s", error)

    def _apply_live(self, loop: Loop) -> None:
        live = self._follower.live
        if live is not self._live:
            self._live = live
            loop.configure(live)

    # Ending.

    def _over(self, loop: Loop, now: float) -> bool:
        if self._draining:
            loop.stop_reserving()
            if self._stop_requests:
                return True
        if self._stop_requests > 1:
            return True
        if self._stop_requests == 1:
            loop.stop_accepting()
            if self._drain_until is None:
                self._drain_until = now + self._options.drain_seconds
            return self._drained(loop, now)
        if not self._options.spawned_by_engine:
            return False
        sessions = loop.sessions
        if len(sessions) or loop.waiting_for_pool:
            self._empty_since = self._drain_until = None
            return False
        if self._empty_since is None:
            self._empty_since = now
        if not sessions.had_any:
            # The engine may take minutes before it says hello; one that is gone never will.
            spawner = self._options.spawner
            gone = (
                os.getppid() != self._parent
                if spawner is None
                else liveness_of(spawner) is Liveness.GONE
            )
            return gone and now - self._empty_since > _SPAWNER_GONE_SECONDS
        if not sessions.left_in_order and (
            now - self._empty_since < self._options.linger_seconds or sessions.quarantined
        ):
            return False
        if self._drain_until is None:
            self._drain_until = now + self._options.drain_seconds
        return self._drained(loop, now)

    def _drained(self, loop: Loop, now: float) -> bool:
        if self._drain_until is None or now >= self._drain_until:
            return True
        pending = 0 if loop.exchange is None else loop.exchange.store.pending_stores()
        if pending != self._progress[0]:
            self._progress = (pending, now)
        return not pending or now - self._progress[1] > STALLED_SECONDS

    def _count_dropped(self, loop: Loop) -> None:
        dropped = 0 if loop.exchange is None else loop.exchange.store.pending_stores()
        if dropped:
            self._counters.add("stores_dropped_at_end", "", "", dropped)
            _log.warning(
                "%d pending stores are dropped: there is no time left to write them", dropped
            )

    # Reporting.

    def _facts(self, loop: Loop, fence: StartupFence) -> SnapshotInputs:
        start = self._pool_start
        return SnapshotInputs(
            epoch=self._epoch,
            live=self._live,
            follower=self._follower,
            built=self._built,
            pool=None if start is None else start.pool,
            pool_error="" if start is None else start.error,
            store=None if loop.exchange is None else loop.exchange.store,
            sessions=loop.sessions,
            hits=loop.hits,
            fenced=loop.fenced,
            draining=self._draining,
            awaited_workers=len(fence.waiting),
            counters=self._counters,
        )

    def _close_parts(self) -> None:
        self._follower.stop()
        self._reporter.close()
        if self._io is not None:
            self._io.close()
        _close_all(self._built.tiers)
        if self._reads is not None:
            self._reads.leave()
        if self._pool_start is not None:
            self._pool_start.stop()
            if self._pool_start.pool is not None:
                self._pool_start.pool.close()
            if self._pool_start.table is not None:
                self._pool_start.table.close()


def _close_all(tiers: Sequence[Tier]) -> None:
    """Closes the tiers side by side. One whose storage hangs is left to itself."""

    def close(tier: Tier) -> None:
        try:
            tier.close()
        except KVTierError as error:
            _log.warning("tier %s: %s", tier.name, error)

    threads = [
        threading.Thread(target=close, args=(tier,), name=f"kvtier-close-{tier.name}", daemon=True)
        for tier in tiers
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
