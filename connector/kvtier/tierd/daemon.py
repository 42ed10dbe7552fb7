"""tierd as a process: its start, its loop and its end.

Start: join the run directory, take the lock of the one running tierd, raise the epoch and listen.
The pool is allocated on another thread, because a hundred gigabytes take a while; processes that
attach wait for it with heartbeats. Then the store opens, fenced while workers of earlier epochs
have not drained.

End: on SIGTERM or, if an engine started it, when no session is left. Pending stores are written for
at most ``DRAIN_SECONDS``, sessions get ``Bye``, and the run directory is removed if no other
process uses it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from kvtier import __version__
from kvtier.config.loader import load
from kvtier.config.models import Daemon, Topology
from kvtier.errors import KVTierError, TierKeyMissingError
from kvtier.namespace import derive_namespace
from kvtier.processes import Liveness, ProcessIdentity, liveness_of
from kvtier.store.context import StoreRuntime
from kvtier.store.executor import ThreadExecutor
from kvtier.store.recovery import PoolRecovery
from kvtier.store.store import TierStore, executor_lanes
from kvtier.store.types import StoreCounters
from kvtier.tierd import tier_factory
from kvtier.tierd.channel import SEND_QUEUE_MESSAGES
from kvtier.tierd.dispatcher import Dispatcher
from kvtier.tierd.fencing import (
    UNVERIFIABLE_TIMEOUT_SECONDS,
    OrphanedReadsFile,
    ReadLogFile,
    SessionFiles,
    StartupFence,
    find_orphaned_reads,
)
from kvtier.tierd.garbage import BoundedCollections
from kvtier.tierd.host_pool import PoolAllocation, describe_namespace
from kvtier.tierd.http import BearerToken
from kvtier.tierd.live_config import LiveConfigWatcher
from kvtier.tierd.liveness import PEERS_NAME, PeerLiveness, open_directory
from kvtier.tierd.reporting import Reporter, SnapshotInputs
from kvtier.tierd.run_directory import SESSIONS_NAME, FileLock, RunDirectory
from kvtier.tierd.server import Pool, ServerLoop
from kvtier.tierd.sessions import SessionDependencies, SessionTimeouts
from kvtier.tierd.status import Snapshot
from kvtier.tierd.tier_factory import WrapTier, build_tiers, memory_document
from kvtier.tierd.wire import HEARTBEAT_SECONDS, SOCKET_NAME
from kvtier.tiers.base import Tier
from kvtier.tiers.volume_set import VolumeSet

DRAIN_SECONDS = 3.0
STALLED_SECONDS = 1.25
"""Without a completed store for this long, tierd stops waiting for pending ones: the storage hangs
or is too slow."""
CLOSE_SECONDS = 0.75
"""For all tiers together to release their storage. With the limits above, tierd ends within three
seconds beside a hung mount."""
LINGER_SECONDS = 5.0
"""How long a tierd that an engine started waits for a session after the last one was lost: an
engine reattaches within four seconds."""
LOCK_SECONDS = 2.0
"""How long to retry the daemon's lock, which checks for a running tierd hold for a moment."""
_FLUSH_MILLISECONDS = 300
_SPAWNER_GONE_SECONDS = 5.0
_SWEEP_SECONDS = 60.0

EXIT_OK = 0
EXIT_CANNOT_SERVE = 1
EXIT_ANOTHER_LIVES = 3

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How a tierd runs. ``spawner``: the process that started it. ``wrap_tier`` wraps each
    secondary tier, for faults in tests. ``fencing`` and ``unverifiable_timeout_seconds`` differ
    from the defaults only in tests."""

    topology_directory: Path
    run_directory: Path | None = None
    spawned_by_engine: bool = False
    spawner: ProcessIdentity | None = None
    wrap_tier: WrapTier | None = None
    fencing: bool = True
    unverifiable_timeout_seconds: float = UNVERIFIABLE_TIMEOUT_SECONDS
    linger_seconds: float = LINGER_SECONDS
    drain_seconds: float = DRAIN_SECONDS
    structural: Path | None = None
    """The structural document, if not the one in the topology directory."""
    token_file: Path | None = None
    data_bytes: int | None = None
    owns_process: bool = False
    """Whether the process has no other purpose, so that its garbage collector may be bounded."""


class TierDaemon:
    """One tierd. Raises ``KVTierError`` or ``OSError`` if it cannot start."""

    def __init__(self, options: DaemonOptions, clock: Callable[[], float] = time.monotonic) -> None:
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
        self._loop: ServerLoop | None = None
        self._pool_start: PoolAllocation | None = None
        self._io: ThreadExecutor | None = None
        token = None if options.token_file is None else BearerToken(options.token_file)
        self._reporter = Reporter(structural, self._run_directory.path, clock, token)
        self._counters = StoreCounters()
        self._counters.declare(tier.name for tier in structural.tiers if tier.kind != "memory")
        self._epoch = 0
        self._parent = os.getppid()
        self._empty_since: float | None = None
        self._drain_until: float | None = None
        self._progress: tuple[int, float] = (0, 0.0)
        self._reads: ReadLogFile | None = None
        self._orphaned_reads: list[OrphanedReadsFile] = []
        self._collections: BoundedCollections | None = None
        self._built = build_tiers(self._topology, options.wrap_tier)
        self._live_config = LiveConfigWatcher(
            options.topology_directory, structural, options.structural is not None
        )
        self._live = self._topology.live
        self._key_generation = 0

    # For any thread.

    def stop(self) -> None:
        """Requests the end; a second request skips draining. Also for signal handlers."""
        self._stop_requests += 1
        if self._loop is not None:
            self._loop.wake()

    def drain(self) -> None:
        """Stops new stores and writes pending ones while loads continue; ``stop`` then ends tierd
        at once. Also for signal handlers."""
        self._draining = True
        if self._loop is not None:
            self._loop.wake()

    @property
    def snapshot(self) -> Snapshot:
        """The current status."""
        return self._reporter.snapshot

    # The loop's thread.

    def run(self) -> int:
        """Serves until ``stop`` or until no engine needs it; returns the exit status."""
        run = self._run_directory
        run.join()
        lock: FileLock | None = None
        try:
            lock = self._take_lock()
            if lock is None:
                _log.info("exiting: another tierd runs in %s", run.path)
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
        run.heartbeat(lock)
        self._reads = ReadLogFile(run.path, self._epoch, run.file_mode)
        self._orphaned_reads = find_orphaned_reads(run.path, self._reads.path)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
            socket.setsockopt(zmq.RCVHWM, 4096)
            socket.setsockopt(zmq.LINGER, _FLUSH_MILLISECONDS)
            path = run.path / SOCKET_NAME
            socket.bind(f"ipc://{path}")
            os.chmod(path, run.file_mode)
            open_directory(run.path / PEERS_NAME)
            files = SessionFiles(run.path / SESSIONS_NAME, run.file_mode)
            peers = self._peers = PeerLiveness(run.path, self._clock)
            fence = StartupFence(files, self._clock(), peers, options.unverifiable_timeout_seconds)
            loop = ServerLoop(
                socket,
                SessionDependencies(files, fence, derive_namespace, self._next_epoch, peers),
                SessionTimeouts(unverifiable_seconds=options.unverifiable_timeout_seconds),
                self._counters,
                self._live,
                self._clock,
            )
            self._loop = loop
            self._pool_start = PoolAllocation(run, self._topology.structural, loop.wake)
            self._live_config.poll()
            self._live_config.start()
            if self._built.keys is not None:
                self._built.keys.poll()
                self._built.keys.start()
            _log.info(
                "tierd %s serves run directory %s, epoch %d", __version__, run.path, self._epoch
            )
            self._run_loop(loop, lock, fence)
            self._count_dropped(loop)
            loop.close("tierd is stopping")
        finally:
            self._close_parts()
            socket.close(_FLUSH_MILLISECONDS)
            context.destroy(linger=_FLUSH_MILLISECONDS)

    def _run_loop(self, loop: ServerLoop, lock: FileLock, fence: StartupFence) -> None:
        last_heartbeat = last_sweep = 0.0
        while True:
            loop.run_once(HEARTBEAT_SECONDS)
            now = self._clock()
            if now - last_heartbeat >= HEARTBEAT_SECONDS:
                last_heartbeat = now
                self._run_directory.heartbeat(lock)
                self._release_orphaned_reads(loop)
            if now - last_sweep >= _SWEEP_SECONDS and self._peers is not None:
                last_sweep = now
                self._peers.sweep(
                    loop.sessions.locks() | {worker.process.lock for worker in fence.waiting}
                )
            self._open_store_when_allocated(loop, fence)
            self._apply_live(loop)
            self._apply_keys(loop)
            self._collect_garbage(loop, now)
            self._reporter.update(now, lambda: self._snapshot_inputs(loop, fence))
            if self._is_finished(loop, now):
                return

    def _open_store_when_allocated(self, loop: ServerLoop, fence: StartupFence) -> None:
        start = self._pool_start
        if start is None or not start.finished or loop.dispatcher is not None or loop.pool_error:
            return
        if start.pool is None:
            loop.pool_failed(start.error)
            return
        fenced = self._options.fencing and fence.is_active
        pool = start.pool
        self._io = ThreadExecutor(executor_lanes(self._topology), wake=loop.wake)
        store = TierStore(
            pool.bytes,
            pool.memory,
            self._built.tiers,
            self._topology.model_copy(update={"live": self._live}),
            StoreRuntime(
                self._io,
                self._clock,
                counters=self._counters,
                generations=pool.generations,
            ),
            PoolRecovery(
                fenced,
                start.table,
                self._reads,
                {each.path.name: each.places for each in self._orphaned_reads},
            ),
        )
        if fenced:
            _log.info(
                "fenced the pool: %d workers of earlier epochs have not drained", len(fence.waiting)
            )
        names = (
            memory_document(self._topology.structural).name,
            *(tier.name for tier in self._built.tiers),
        )
        dispatcher = Dispatcher(
            store, pool.bytes, loop.send, self._counters, self._describe_namespace
        )
        loop.pool_ready(
            dispatcher,
            Pool(str(pool.path), pool.bytes, names),
            (lambda: self._unfence(store)) if fenced else None,
        )

    def _collect_garbage(self, loop: ServerLoop, now: float) -> None:
        if loop.dispatcher is None or not self._options.owns_process:
            return
        if self._collections is None:
            self._collections = BoundedCollections(now)
        store = loop.dispatcher.store
        self._collections.run(now, not store.pinned_bytes and not store.pending_stores())

    def _release_orphaned_reads(self, loop: ServerLoop) -> None:
        if loop.dispatcher is None:
            return
        for each in [each for each in self._orphaned_reads if each.is_released()]:
            self._orphaned_reads.remove(each)
            loop.dispatcher.store.release_orphaned_reads(each.path.name)

    def _unfence(self, store: TierStore) -> None:
        _log.info("unfenced the pool: every worker of earlier epochs has drained or exited")
        store.unfence()

    def _describe_namespace(self, namespace: str, canonical: str) -> None:
        run, start = self._run_directory, self._pool_start
        if start is not None and start.table is not None:
            describe_namespace(run.path, run.file_mode, namespace, canonical)
        for lane, tier in _storages(self._built.tiers):
            describe = getattr(tier, "describe_namespace", None)
            if describe is not None and self._io is not None:
                self._io.submit(
                    f"maintain:{lane}",
                    partial(describe, namespace, canonical),
                    self._on_described,
                )

    def _on_described(self, _result: object, error: BaseException | None) -> None:
        if error is not None:
            self._counters.add("namespace_descriptions_failed")
            _log.warning("cannot write the description of a namespace: %s", error)

    def _apply_keys(self, loop: ServerLoop) -> None:
        """Tiers that were suspended without keys are tried at once when keys appear."""
        keys = self._built.keys
        if keys is None or loop.dispatcher is None or keys.generation == self._key_generation:
            return
        self._key_generation = keys.generation
        if keys.available:
            loop.dispatcher.store.check_suspended(TierKeyMissingError.reason)

    def _apply_live(self, loop: ServerLoop) -> None:
        live = self._live_config.live
        if live is not self._live:
            self._live = live
            loop.configure(live)

    # Ending.

    def _is_finished(self, loop: ServerLoop, now: float) -> bool:
        if self._draining:
            loop.stop_reservations()
            if self._stop_requests:
                return True
        if self._stop_requests > 1:
            return True
        if self._stop_requests == 1:
            loop.stop_sessions()
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
            # An engine may take minutes to attach, unless it has exited.
            spawner = self._options.spawner
            gone = (
                os.getppid() != self._parent
                if spawner is None
                else liveness_of(spawner) is Liveness.GONE
            )
            return gone and now - self._empty_since > _SPAWNER_GONE_SECONDS
        if not sessions.last_left_cleanly and (
            now - self._empty_since < self._options.linger_seconds or sessions.quarantined
        ):
            return False
        if self._drain_until is None:
            self._drain_until = now + self._options.drain_seconds
        return self._drained(loop, now)

    def _drained(self, loop: ServerLoop, now: float) -> bool:
        if self._drain_until is None or now >= self._drain_until:
            return True
        pending = 0 if loop.dispatcher is None else loop.dispatcher.store.pending_stores()
        if pending != self._progress[0]:
            self._progress = (pending, now)
        return not pending or now - self._progress[1] > STALLED_SECONDS

    def _count_dropped(self, loop: ServerLoop) -> None:
        pending = 0 if loop.dispatcher is None else loop.dispatcher.store.pending_stores()
        if pending:
            self._counters.add("stores_dropped_at_end", "", "", pending)
            _log.warning("dropped %d pending stores: the time for writing them has passed", pending)

    # Reporting.

    def _snapshot_inputs(self, loop: ServerLoop, fence: StartupFence) -> SnapshotInputs:
        start = self._pool_start
        return SnapshotInputs(
            epoch=self._epoch,
            live=self._live,
            live_config=self._live_config,
            built=self._built,
            pool=None if start is None else start.pool,
            pool_error="" if start is None else start.error,
            store=None if loop.dispatcher is None else loop.dispatcher.store,
            sessions=loop.sessions,
            hits=loop.hits,
            fenced=loop.fenced,
            draining=self._draining,
            awaited_workers=len(fence.waiting),
            counters=self._counters,
        )

    def _close_parts(self) -> None:
        self._live_config.stop()
        if self._built.keys is not None:
            self._built.keys.stop()
        self._reporter.close()
        if self._io is not None:
            self._io.close()
        _close_all(self._built.tiers)
        if self._reads is not None:
            self._reads.close()
        if self._pool_start is not None:
            self._pool_start.stop()
            if self._pool_start.pool is not None:
                self._pool_start.pool.close()
            if self._pool_start.table is not None:
                self._pool_start.table.close()


def _storages(tiers: Sequence[Tier]) -> Iterator[tuple[str, Tier]]:
    """The tiers, and the volumes of those that have several, each with the name of its lanes: one
    that hangs delays no other."""
    for tier in tiers:
        if isinstance(tier, VolumeSet):
            yield from ((f"{tier.name}/{volume.name}", volume) for volume in tier.volumes)
        else:
            yield tier.name, tier


def _close_all(tiers: Sequence[Tier]) -> None:
    """Closes the tiers in parallel, without waiting for one whose storage hangs."""

    def close(tier: Tier) -> None:
        try:
            tier.close()
        except KVTierError as error:
            _log.warning("cannot close tier %s: %s", tier.name, error)

    threads = [
        threading.Thread(target=close, args=(tier,), name=f"kvtier-close-{tier.name}", daemon=True)
        for _, tier in _storages(tiers)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
