"""Makes the snapshots that are shown, and keeps the HTTP server that shows them.

An address that cannot be bound is a condition and tried again: tierd's work does not depend on being asked about it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier import __version__
from kvtier.config.models import Daemon, Live, Structural
from kvtier.files import replace_file
from kvtier.store.store import TierStore
from kvtier.store.types import StoreCounters
from kvtier.tierd.host_pool import PoolFile
from kvtier.tierd.http import Guard, HttpResponse, HttpServer, Route, text_response
from kvtier.tierd.live_config import LiveFollower
from kvtier.tierd.run_directory import HTTP_NAME
from kvtier.tierd.sessions import Sessions
from kvtier.tierd.status import (
    METRICS_CONTENT_TYPE,
    Condition,
    Hits,
    SessionStatus,
    Snapshot,
    TierStatus,
    Tokens,
    metrics_text,
    status_json,
)
from kvtier.tierd.tier_factory import BuiltTiers

SNAPSHOT_SECONDS = 0.5
HTTP_RETRY_SECONDS = 10.0
UNHEALTHY_SECONDS = 5.0
"""Ten snapshots missed: the loop hangs, or this process does not run."""

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class SnapshotInputs:
    """Where a snapshot comes from. ``store`` is None until the pool is allocated."""

    epoch: int
    live: Live
    follower: LiveFollower
    built: BuiltTiers
    pool: PoolFile | None
    pool_error: str
    store: TierStore | None
    sessions: Sessions
    hits: Hits
    fenced: bool
    draining: bool
    awaited_workers: int
    counters: StoreCounters


def routes(snapshot: Callable[[], Snapshot], health: Route) -> dict[str, Route]:
    """What is served."""
    return {
        "/metrics": lambda: HttpResponse(200, METRICS_CONTENT_TYPE, metrics_text(snapshot())),
        "/status": lambda: HttpResponse(200, "application/json", status_json(snapshot())),
        "/healthz": health,
    }


class Reporter:
    """``turn`` and ``close`` are for the loop's thread; requests are answered on their own, from the last snapshot."""

    def __init__(
        self,
        structural: Structural,
        run_directory: Path,
        clock: Callable[[], float],
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard
        self._structural = structural
        self._run_directory = run_directory
        self._clock = clock
        self._http: HttpServer | None = None
        self._http_error = ""
        self._port_taken = ""
        self._next_http = 0.0
        self._next_snapshot = 0.0
        self._snapshot = Snapshot(version=__version__)
        self._snapshot_at = clock()

    def turn(self, now: float, facts: Callable[[], SnapshotInputs]) -> None:
        """Once per turn of the loop."""
        if now >= self._next_http and self._http is None:
            self._next_http = now + HTTP_RETRY_SECONDS
            self._start_http()
        if now >= self._next_snapshot:
            self._next_snapshot = now + SNAPSHOT_SECONDS
            self._snapshot = self._take(facts())
            self._snapshot_at = now

    @property
    def snapshot(self) -> Snapshot:
        """The last one. Any thread."""
        return self._snapshot

    def close(self) -> None:
        """Ends answering."""
        if self._http is not None:
            self._http.close()

    def _start_http(self) -> None:
        endpoint = self._structural.http
        try:
            server = self._bind(endpoint.host, endpoint.port)
        except OSError as error:
            if not self._http_error:
                _log.error(
                    "http on %s port %d: %s; tried again", endpoint.host, endpoint.port, error
                )
            self._http_error = f"{endpoint.host} port {endpoint.port} cannot be served: {error}"
            return
        self._http, self._http_error = server, ""
        host, port = server.address
        document = json.dumps({"host": host, "port": port, "pid": os.getpid()})
        try:
            replace_file(self._run_directory / HTTP_NAME, document.encode(), 0o644)
        except OSError as error:
            self._http_error = f"{HTTP_NAME} cannot be written: {error}"
            _log.error("%s", self._http_error)

    def _bind(self, host: str, port: int) -> HttpServer:
        """Raises ``OSError``."""
        found = routes(lambda: self._snapshot, self._health)
        self._port_taken = ""
        try:
            return HttpServer(host, port, found, self._guard)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or self._structural.daemon is not Daemon.SIDECAR:
                raise
        # Other pods of this node (with hostNetwork), or other containers of this pod, may have the port for as long as they live.
        server = HttpServer(host, 0, found, self._guard)
        self._port_taken = (
            f"{host} port {port} is taken; port {server.address[1]} is served instead"
        )
        _log.warning("http: %s", self._port_taken)
        return server

    def _health(self) -> HttpResponse:
        """Whether tierd works, never whether a tier does: a dead disk must not restart a pod."""
        age = self._clock() - self._snapshot_at
        if age > UNHEALTHY_SECONDS:
            return text_response(503, f"the loop has not gone round for {age:.1f} s")
        return text_response(200, "ok")

    def _take(self, facts: SnapshotInputs) -> Snapshot:
        store = facts.store
        pool = asdict(store.accounts()) if store is not None else {}
        if store is not None:
            pool["pinned"] = store.pinned_bytes
        if facts.pool is not None:
            pool["touched"] = facts.pool.touched_bytes
        policy = self._structural.policy
        recent, total = facts.hits.recent(self._clock()), facts.hits.total
        return Snapshot(
            version=__version__,
            policy=f"{policy.namespace}/{policy.name}",
            content_hash=self._structural.content_hash,
            epoch=facts.epoch,
            fenced=facts.fenced,
            started=store is not None,
            applied_generation=facts.live.generation,
            live_refused_total=facts.follower.refused_total,
            live_refusals=tuple(map(str, facts.follower.refusals)),
            tiers=self._tiers(store, recent, total),
            prompt_tokens=recent.prompt,
            prompt_tokens_total=total.prompt,
            sessions=_sessions(facts.sessions),
            quarantined_processes=facts.sessions.quarantined,
            awaited_workers=facts.awaited_workers,
            pending_stores=0 if store is None else store.pending_stores(),
            pool=pool,
            conditions=self._conditions(facts),
            events=dict(facts.counters.values),
        )

    def _tiers(
        self, store: TierStore | None, recent: Tokens, total: Tokens
    ) -> tuple[TierStatus, ...]:
        states = {state.name: state for state in store.tier_reports()} if store is not None else {}
        found = []
        bits = self._bits(store)
        for document in self._structural.tiers:
            index = bits.get(document.name, len(bits))
            state = states.get(document.name)
            if state is None:
                found.append(TierStatus(document.name, document.kind, "Unknown"))
                continue
            found.append(
                TierStatus(
                    name=document.name,
                    kind=document.kind,
                    state=state.state,
                    used_bytes=state.used_bytes,
                    capacity_bytes=state.capacity_bytes,
                    objects=state.objects,
                    pending_store_bytes=state.pending_store_bytes,
                    late_reads=state.late_reads,
                    last_error=state.last_error,
                    hit_tokens=recent.of(index),
                    hit_tokens_total=total.of(index),
                    cause=state.cause,
                )
            )
        return tuple(found)

    @staticmethod
    def _bits(store: TierStore | None) -> dict[str, int]:
        """Indices of tiers, as engines know them: those that were built, in order."""
        return (
            {}
            if store is None
            else {state.name: index for index, state in enumerate(store.tier_reports())}
        )

    def _conditions(self, facts: SnapshotInputs) -> tuple[Condition, ...]:
        found = list(facts.built.conditions)
        if facts.pool_error:
            found.append(Condition("PoolMissing", facts.pool_error))
        if facts.pool is not None and facts.pool.size.condition:
            found.append(Condition("PoolSmaller", facts.pool.size.condition))
        if self._http_error:
            found.append(Condition("HttpNotServed", self._http_error))
        if self._port_taken:
            found.append(Condition("HttpPortTaken", self._port_taken))
        if facts.follower.structural_changed:
            found.append(Condition("StructuralChanged", facts.follower.structural_changed))
        if facts.draining:
            found.append(
                Condition(
                    "Draining", "the pod ends: no more stores are taken, what is pending is written"
                )
            )
        if facts.follower.refusals:
            found.append(
                Condition("LiveValuesRefused", "; ".join(map(str, facts.follower.refusals)))
            )
        return tuple(found)


def _sessions(sessions: Sessions) -> tuple[SessionStatus, ...]:
    ready = {engine.engine for engine in sessions.engines() if engine.open}
    return tuple(
        SessionStatus(
            engine=session.hello.engine,
            role=session.hello.role,
            rank=session.hello.rank,
            pid=session.hello.pid,
            epoch=session.worker.epoch,
            ready=session.hello.engine in ready,
            engine_version=_engine_version(session.hello.identity),
        )
        for session in sessions.all()
    )


def _engine_version(identity: str) -> str:
    """Name and version of the engine, as a scheduler's identity says them; empty where it does not."""
    try:
        engine = json.loads(identity)["engine"]
        return f"{engine['name']} {engine['version']}"[:64]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
