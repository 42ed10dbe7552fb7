"""Takes status snapshots and serves them over HTTP.

``Reporter`` belongs to the loop's thread; HTTP requests are answered on other threads from the last
snapshot. An address that cannot be bound is a condition and is retried: tierd's work does not
depend on its status page.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier import __version__
from kvtier.config.host_ports import HOST_POD_VARIABLE
from kvtier.config.models import Daemon, Live, LiveTier, Structural
from kvtier.files import replace_file, volume_bytes
from kvtier.store.store import TierStore
from kvtier.store.tier_group import StoreTierState, limits_of
from kvtier.store.types import StoreCounters
from kvtier.tierd.host_pool import PoolFile
from kvtier.tierd.http import Authorizer, HttpResponse, HttpServer, Route, bind, text_response
from kvtier.tierd.live_config import LiveConfigWatcher
from kvtier.tierd.run_directory import HTTP_NAME
from kvtier.tierd.sessions import Sessions
from kvtier.tierd.status import (
    METRICS_CONTENT_TYPE,
    HitCounters,
    SessionStatus,
    Snapshot,
    StatusCondition,
    TierSnapshot,
    TokenCounts,
    VolumeSnapshot,
    metrics_text,
    status_json,
)
from kvtier.tierd.tier_factory import BuiltTiers, key_condition

SNAPSHOT_SECONDS = 0.5
HTTP_RETRY_SECONDS = 10.0
UNHEALTHY_SECONDS = 5.0
"""Ten missed snapshots: the loop hangs, or the process is suspended."""

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class SnapshotInputs:
    """What a snapshot is taken from. ``store`` is None until the pool is allocated."""

    epoch: int
    live: Live
    live_config: LiveConfigWatcher
    built: BuiltTiers
    pool: PoolFile | None
    pool_error: str
    store: TierStore | None
    sessions: Sessions
    hits: HitCounters
    fenced: bool
    draining: bool
    awaited_workers: int
    counters: StoreCounters


def routes(snapshot: Callable[[], Snapshot], health: Route) -> dict[str, Route]:
    """The HTTP routes."""
    return {
        "/metrics": lambda: HttpResponse(200, METRICS_CONTENT_TYPE, metrics_text(snapshot())),
        "/status": lambda: HttpResponse(200, "application/json", status_json(snapshot())),
        "/healthz": health,
    }


class Reporter:
    """``update`` and ``close`` are for the loop's thread."""

    def __init__(
        self,
        structural: Structural,
        run_directory: Path,
        clock: Callable[[], float],
        authorizer: Authorizer | None = None,
    ) -> None:
        self._authorizer = authorizer
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

    def update(self, now: float, inputs: Callable[[], SnapshotInputs]) -> None:
        """Once per loop iteration: binds the address and takes a snapshot when due."""
        if now >= self._next_http and self._http is None:
            self._next_http = now + HTTP_RETRY_SECONDS
            self._start_http()
        if now >= self._next_snapshot:
            self._next_snapshot = now + SNAPSHOT_SECONDS
            self._snapshot = self._handle(inputs())
            self._snapshot_at = now

    @property
    def snapshot(self) -> Snapshot:
        """The last snapshot. For any thread."""
        return self._snapshot

    def close(self) -> None:
        """Stops serving."""
        if self._http is not None:
            self._http.close()

    def _start_http(self) -> None:
        endpoint = self._structural.http
        try:
            server = self._bind(endpoint.host, endpoint.port)
        except OSError as error:
            if not self._http_error:
                _log.error(
                    "cannot listen on %s port %d: %s; retrying", endpoint.host, endpoint.port, error
                )
            self._http_error = f"cannot listen on {endpoint.host} port {endpoint.port}: {error}"
            return
        self._http, self._http_error = server, ""
        host, port = server.address
        document = json.dumps({"host": host, "port": port, "pid": os.getpid()})
        try:
            replace_file(self._run_directory / HTTP_NAME, document.encode(), 0o644)
        except OSError as error:
            self._http_error = f"cannot write {HTTP_NAME}: {error}"
            _log.error("%s", self._http_error)

    def _bind(self, host: str, port: int) -> HttpServer:
        """Raises ``OSError``."""
        found = routes(lambda: self._snapshot, self._health)
        self._port_taken = ""
        try:
            return bind(self._structural.http, found, self._authorizer)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or self._structural.daemon is not Daemon.SIDECAR:
                raise
        # Other pods of the node (with hostNetwork) or other containers of the pod may hold the port
        # indefinitely.
        server = HttpServer(host, 0, found, self._authorizer)
        wanted = f"{host} port {port} is" if port else f"all ports of this pod on {host} are"
        self._port_taken = f"{wanted} in use: listening on port {server.address[1]} instead"
        _log.warning("http: %s", self._port_taken)
        return server

    def _health(self) -> HttpResponse:
        """Whether tierd works, not whether its tiers do: a dead disk must not restart a pod."""
        age = self._clock() - self._snapshot_at
        if age > UNHEALTHY_SECONDS:
            return text_response(503, f"the event loop has not run for {age:.1f} s")
        return text_response(200, "ok")

    def _handle(self, inputs: SnapshotInputs) -> Snapshot:
        store = inputs.store
        pool = asdict(store.accounts()) if store is not None else {}
        if store is not None:
            pool["pinned"] = store.pinned_bytes
            pool["pinned_by_requests"] = store.pinned_by_requests
        if inputs.pool is not None:
            pool["touched"] = inputs.pool.touched_bytes
        policy = self._structural.policy
        run_volume = volume_bytes(self._run_directory) or (0, 0)
        recent, total = inputs.hits.recent(self._clock()), inputs.hits.total
        return Snapshot(
            version=__version__,
            number=self._snapshot.number + 1,
            pod_uid=os.environ.get(HOST_POD_VARIABLE, ""),
            policy=f"{policy.namespace}/{policy.name}",
            content_hash=self._structural.content_hash,
            epoch=inputs.epoch,
            fenced=inputs.fenced,
            started=store is not None,
            applied_generation=inputs.live.generation,
            live_refused_total=inputs.live_config.refused_total,
            live_refusals=tuple(map(str, inputs.live_config.refusals)),
            tiers=self._tiers(store, inputs.live, recent, total),
            prompt_tokens=recent.prompt,
            prompt_tokens_total=total.prompt,
            sessions=_sessions(inputs.sessions),
            quarantined_processes=inputs.sessions.quarantined,
            awaited_workers=inputs.awaited_workers,
            pending_stores=0 if store is None else store.pending_stores(),
            pool=pool,
            pool_parts=1 if store is None else store.layout.parts,
            run_volume_bytes=run_volume[0],
            run_volume_available_bytes=run_volume[1],
            conditions=self._conditions(inputs),
            events=dict(inputs.counters.values),
        )

    def _tiers(
        self, store: TierStore | None, live: Live, recent: TokenCounts, total: TokenCounts
    ) -> tuple[TierSnapshot, ...]:
        states = {state.name: state for state in store.tier_states()} if store is not None else {}
        found = []
        bits = self._bits(store)
        for document in self._structural.tiers:
            index = bits.get(document.name, len(bits))
            state = states.get(document.name)
            if state is None:
                found.append(TierSnapshot(document.name, document.kind, "Unknown"))
                continue
            limits = limits_of(live.tiers.get(document.name, LiveTier()))
            found.append(
                TierSnapshot(
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
                    volume_bytes=state.volume_bytes,
                    volume_available_bytes=state.volume_available_bytes,
                    min_free_bytes=sum(
                        limits.min_free(each.volume_bytes) for each in state.volumes or (state,)
                    ),
                    volumes=tuple(_volume(each) for each in state.volumes),
                    tenants=state.tenants.count,
                    tenant_share_bytes=state.tenants.share_bytes,
                    largest_tenants=state.tenants.largest,
                )
            )
        return tuple(found)

    @staticmethod
    def _bits(store: TierStore | None) -> dict[str, int]:
        """Index by tier name, as engines count them: the tiers that were built, in order."""
        return (
            {}
            if store is None
            else {state.name: index for index, state in enumerate(store.tier_states())}
        )

    def _conditions(self, inputs: SnapshotInputs) -> tuple[StatusCondition, ...]:
        found = list(inputs.built.conditions)
        if inputs.pool_error:
            found.append(StatusCondition("PoolMissing", inputs.pool_error))
        if inputs.pool is not None and inputs.pool.size.condition:
            found.append(StatusCondition("PoolSmaller", inputs.pool.size.condition))
        about_keys = key_condition(inputs.built.keys)
        if about_keys is not None:
            found.append(about_keys)
        if inputs.store is not None:
            found += disk_conditions(inputs.store.tier_states(), inputs.live)
        if self._http_error:
            found.append(StatusCondition("HttpNotServed", self._http_error))
        if self._port_taken:
            found.append(StatusCondition("HttpPortTaken", self._port_taken))
        if inputs.live_config.structural_changed:
            found.append(
                StatusCondition("StructuralChanged", inputs.live_config.structural_changed)
            )
        if inputs.draining:
            found.append(
                StatusCondition(
                    "Draining",
                    "the pod is terminating: new stores are rejected, and pending stores are "
                    "written to secondary tiers",
                )
            )
        if inputs.live_config.refusals:
            found.append(
                StatusCondition(
                    "LiveValuesRefused", "; ".join(map(str, inputs.live_config.refusals))
                )
            )
        return tuple(found)


def disk_conditions(states: Iterable[StoreTierState], live: Live) -> list[StatusCondition]:
    """What is wrong with the sizes of the tiers' file systems."""
    too_large, filled = [], []
    parts = [(whole, each) for whole in states for each in whole.volumes or (whole,)]
    for tier, state in parts:
        settings = live.tiers.get(tier.name, LiveTier())
        size, free = state.volume_bytes, state.volume_available_bytes
        if not size or settings.capacity_bytes is None:
            continue
        limits = limits_of(settings, state.name if tier.volumes else "")
        name = f"tier {tier.name}" + (f", volume {state.name}" if tier.volumes else "")
        min_free = limits.min_free(size)
        # Up to the high watermark nothing is evicted, so that is what the disk must have room for.
        held = limits.capacity_bytes * limits.high_watermark_percent // 100
        if held > size - min_free:
            too_large.append(
                f"{name}: capacity {_gib(limits.capacity_bytes)} exceeds its file "
                f"system of {_gib(size)}, of which minFree keeps {_gib(min_free)} free"
            )
        if limits.keeps_free and free < min_free:
            filled.append(
                f"{name}: less than minFree ({_gib(min_free)} of {_gib(size)}) is free: "
                "no objects are stored"
            )
    found = []
    for kind, messages in (("CapacityExceedsDisk", too_large), ("MinFreeReached", filled)):
        if messages:
            found.append(StatusCondition(kind, "; ".join(messages)))
    return found


def _volume(state: StoreTierState) -> VolumeSnapshot:
    return VolumeSnapshot(
        name=state.name,
        state=state.state,
        used_bytes=state.used_bytes,
        capacity_bytes=state.capacity_bytes,
        objects=state.objects,
        late_reads=state.late_reads,
        last_error=state.last_error,
        cause=state.cause,
        volume_bytes=state.volume_bytes,
        volume_available_bytes=state.volume_available_bytes,
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


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
    """Name and version of the engine from a scheduler's identity; empty if it has none."""
    try:
        engine = json.loads(identity)["engine"]
        return f"{engine['name']} {engine['version']}"[:64]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
