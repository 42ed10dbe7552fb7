"""The status snapshot, its JSON and its metrics, and the counters of hit tokens.

The loop replaces the snapshot as a whole and HTTP threads read the current one, so reading never
disturbs the data path. Schedulers count hits, which are tokens that were loaded, not promised, and
send totals with their heartbeats; ``HitCounters`` adds up the differences in intervals of a few
seconds, for the share of each tier in the last five minutes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvtier.store.counters import COUNTERS, UNREGISTERED

WINDOW_SECONDS = 300.0
INTERVAL_SECONDS = 5.0
MAX_ENGINES = 256
"""Engines remembered, including detached ones, which continue from their last totals when they
reattach."""


@dataclass(slots=True)
class _Interval:
    started_at: float
    prompt: int = 0
    loaded: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """``loaded[i]``: how many of the ``prompt`` tokens were loaded from tier i."""

    prompt: int = 0
    loaded: tuple[int, ...] = ()

    def of(self, tier: int) -> int:
        """Tokens that were loaded from a tier."""
        return self.loaded[tier] if tier < len(self.loaded) else 0


class HitCounters:
    """Token counts of all engines: ``recent`` over the last five minutes, ``total`` since tierd
    started."""

    def __init__(self) -> None:
        self._reported: dict[str, TokenCounts] = {}
        self._intervals: deque[_Interval] = deque()
        self._prompt = 0
        self._loaded: list[int] = []

    def record(
        self,
        engine: str,
        prompt: int,
        loaded: tuple[int, ...],
        now: float,
        started_later: bool = False,
    ) -> None:
        """Records a scheduler's totals. An engine's first totals are the baseline, because they may
        date from before this tierd, unless the engine ``started_later``."""
        before = self._reported.pop(engine, TokenCounts() if started_later else None)
        if len(self._reported) >= MAX_ENGINES:
            del self._reported[next(iter(self._reported))]
        self._reported[engine] = TokenCounts(prompt, loaded)
        if before is None or (before.prompt, before.loaded) == (prompt, loaded):
            return
        interval = self._current_interval(now)
        increase = max(0, prompt - before.prompt)
        interval.prompt += increase
        self._prompt += increase
        for tier, tokens in enumerate(loaded):
            increase = max(0, tokens - before.of(tier))
            for counts in (interval.loaded, self._loaded):
                counts.extend([0] * (tier + 1 - len(counts)))
                counts[tier] += increase

    def _current_interval(self, now: float) -> _Interval:
        if not self._intervals or now - self._intervals[-1].started_at >= INTERVAL_SECONDS:
            self._intervals.append(_Interval(now))
        return self._intervals[-1]

    def recent(self, now: float) -> TokenCounts:
        """Over the last five minutes."""
        while self._intervals and now - self._intervals[0].started_at > WINDOW_SECONDS:
            self._intervals.popleft()
        loaded: list[int] = []
        for interval in self._intervals:
            loaded.extend([0] * (len(interval.loaded) - len(loaded)))
            for tier, tokens in enumerate(interval.loaded):
                loaded[tier] += tokens
        return TokenCounts(sum(interval.prompt for interval in self._intervals), tuple(loaded))

    @property
    def total(self) -> TokenCounts:
        """Since this tierd started."""
        return TokenCounts(self._prompt, tuple(self._loaded))


STATES = ("Healthy", "Degraded", "BreakerOpen", "Unknown")
CONDITIONS = (
    "CapacityExceedsDisk", "Draining", "HttpNotServed", "HttpPortTaken", "LiveValuesRefused",
    "MinFreeReached", "PoolMissing", "PoolSmaller",
    "StorageGroupMissing", "StructuralChanged", "TierNotServed", "TierdNotRunning",
    "TopologyNotAccepted",
)  # fmt: skip
"""Types of ``StatusCondition``. Each is a series of ``kvtier_condition`` from the start."""
METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class VolumeSnapshot:
    """One volume of a tier that has several. ``volume_bytes``: size of its file system."""

    name: str
    state: str
    used_bytes: int
    capacity_bytes: int
    objects: int
    late_reads: int
    last_error: str
    cause: str
    volume_bytes: int
    volume_available_bytes: int


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier, in the order of the structural document."""

    name: str
    kind: str
    state: str
    used_bytes: int = 0
    capacity_bytes: int = 0
    objects: int = 0
    pending_store_bytes: int = 0
    late_reads: int = 0
    last_error: str = ""
    cause: str = ""
    volume_bytes: int = 0
    """Size of the file system that the tier is on; 0 while it is unknown."""
    volume_available_bytes: int = 0
    min_free_bytes: int = 0
    """What stays free on the file system, whatever uses it."""
    volumes: tuple[VolumeSnapshot, ...] = ()
    hit_tokens: int = 0
    """Prompt tokens that were loaded from it in the last five minutes."""
    hit_tokens_total: int = 0
    tenants: int = 0
    """Tenants that hold objects."""
    tenant_share_bytes: int = 0
    """What one of them may hold; 0: all of it."""
    largest_tenants: tuple[tuple[str, int], ...] = ()
    """Digest and bytes of those that hold the most."""

    @property
    def largest_bytes(self) -> int:
        """Bytes of the tenant that holds the most."""
        return self.largest_tenants[0][1] if self.largest_tenants else 0


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One session."""

    engine: str
    role: str
    rank: int
    pid: int
    epoch: int
    ready: bool
    engine_version: str = ""


@dataclass(frozen=True, slots=True)
class StatusCondition:
    """A condition that may need action. ``type``: an identifier for programs. ``message``: a
    sentence for people."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that /status and /metrics report. ``pool``: bytes by use; ``events``: counters by
    (name, tier, reason). ``pod_uid``: empty unless the pod shares the node's network."""

    version: str = ""
    number: int = 0
    """How many snapshots this process has taken: two documents with one number are one snapshot."""
    pod_uid: str = ""
    policy: str = ""
    content_hash: str = ""
    epoch: int = 0
    fenced: bool = False
    started: bool = False
    applied_generation: int = 0
    live_refused_total: int = 0
    live_refusals: tuple[str, ...] = ()
    tiers: tuple[TierSnapshot, ...] = ()
    prompt_tokens: int = 0
    """Of the last five minutes."""
    prompt_tokens_total: int = 0
    sessions: tuple[SessionStatus, ...] = ()
    quarantined_processes: int = 0
    awaited_workers: int = 0
    pending_stores: int = 0
    pool: dict[str, int] = field(default_factory=dict)
    pool_parts: int = 1
    """In how many parts the pool is laid out, of which a rank of an engine registers one."""
    run_volume_bytes: int = 0
    """Size of the volume of the run directory, which holds the pool."""
    run_volume_available_bytes: int = 0
    conditions: tuple[StatusCondition, ...] = ()
    events: dict[tuple[str, str, str], int] = field(default_factory=dict)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _camel_keys(mapping: dict[str, object]) -> dict[str, object]:
    return {_camel(name): value for name, value in mapping.items()}


def _tier_json(tier: TierSnapshot) -> dict[str, object]:
    document = _camel_keys(asdict(tier))
    document["volumes"] = [_camel_keys(asdict(volume)) for volume in tier.volumes]
    document["largestTenants"] = [
        {"tenant": tenant, "usedBytes": size} for tenant, size in tier.largest_tenants
    ]
    return document


def status_json(snapshot: Snapshot) -> bytes:
    """The body of ``/status``. Counters that are 0 are left out: operators poll it."""
    document: dict[str, object] = {
        "version": snapshot.version,
        "snapshot": snapshot.number,
        "podUid": snapshot.pod_uid,
        "policy": snapshot.policy,
        "contentHash": snapshot.content_hash,
        "epoch": snapshot.epoch,
        "started": snapshot.started,
        "fenced": snapshot.fenced,
        "awaitedWorkers": snapshot.awaited_workers,
        "quarantinedProcesses": snapshot.quarantined_processes,
        "appliedGeneration": snapshot.applied_generation,
        "liveRefusedTotal": snapshot.live_refused_total,
        "liveRefusals": list(snapshot.live_refusals),
        "pendingStores": snapshot.pending_stores,
        "promptTokens": snapshot.prompt_tokens,
        "promptTokensTotal": snapshot.prompt_tokens_total,
        "tiers": [_tier_json(tier) for tier in snapshot.tiers],
        "sessions": [_camel_keys(asdict(session)) for session in snapshot.sessions],
        "pool": _camel_keys(dict(snapshot.pool)),
        "poolParts": snapshot.pool_parts,
        "conditions": [asdict(condition) for condition in snapshot.conditions],
        "counters": [
            {"name": name, "tier": tier, "reason": reason, "value": value}
            for (name, tier, reason), value in sorted(snapshot.events.items())
            if value
        ],
    }
    return json.dumps(document, indent=2).encode() + b"\n"


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from self._tier_metrics()
        yield from self._process_metrics()
        yield from self._event_metrics()

    def _tier_metrics(self) -> Iterable[Metric]:
        tiers = self._snapshot.tiers
        for name, text, field_name in (
            ("used_bytes", "Bytes used by a tier.", "used_bytes"),
            ("capacity_bytes", "Bytes a tier may use.", "capacity_bytes"),
            ("objects", "Objects in a tier.", "objects"),
            ("pending_store_bytes", "Bytes of pending stores to a tier.", "pending_store_bytes"),
            ("late_reads_running", "Reads that hang now, by tier.", "late_reads"),
            ("tenants", "Tenants that hold objects in a tier.", "tenants"),
            ("largest_tenant_bytes", "Bytes of the tenant that holds the most.", "largest_bytes"),
            (
                "tenant_share_bytes",
                "Bytes that one tenant may hold in a tier; 0 without a limit.",
                "tenant_share_bytes",
            ),
        ):
            gauge = GaugeMetricFamily(f"kvtier_tier_{name}", text, labels=["tier"])
            for tier in tiers:
                gauge.add_metric([tier.name], getattr(tier, field_name))
            yield gauge
        size = GaugeMetricFamily(
            "kvtier_tier_volume_size_bytes", "Size of a tier's file system.", labels=["tier"]
        )
        available = GaugeMetricFamily(
            "kvtier_tier_volume_available_bytes",
            "Bytes that are free on a tier's file system.",
            labels=["tier"],
        )
        min_free = GaugeMetricFamily(
            "kvtier_tier_min_free_bytes",
            "Bytes that stay free on a tier's file system, whatever uses it.",
            labels=["tier"],
        )
        state = GaugeMetricFamily(
            "kvtier_tier_state",
            "State of a tier: 1 for the current state, else 0.",
            labels=["tier", "state"],
        )
        loaded = CounterMetricFamily(
            "kvtier_loaded_tokens",
            "Prompt tokens loaded from a tier instead of computed.",
            labels=["tier"],
        )
        for tier in tiers:
            loaded.add_metric([tier.name], tier.hit_tokens_total)
            if tier.volume_bytes:
                size.add_metric([tier.name], tier.volume_bytes)
                available.add_metric([tier.name], tier.volume_available_bytes)
                min_free.add_metric([tier.name], tier.min_free_bytes)
            for name in STATES:
                state.add_metric([tier.name, name], float(tier.state == name))
        yield from (size, available, min_free, state, loaded)
        yield from self._volume_metrics()

    def _volume_metrics(self) -> Iterable[Metric]:
        labels = ["tier", "volume"]
        volumes = [(tier.name, each) for tier in self._snapshot.tiers for each in tier.volumes]
        for name, text, field_name in (
            ("used_bytes", "Bytes used by a volume of a tier.", "used_bytes"),
            ("capacity_bytes", "Bytes a volume of a tier may use.", "capacity_bytes"),
            ("size_bytes", "Size of the file system of a volume.", "volume_bytes"),
            ("available_bytes", "Bytes free on a volume's file system.", "volume_available_bytes"),
        ):
            gauge = GaugeMetricFamily(f"kvtier_volume_{name}", text, labels=labels)
            for tier, volume in volumes:
                gauge.add_metric([tier, volume.name], getattr(volume, field_name))
            yield gauge
        state = GaugeMetricFamily(
            "kvtier_volume_state",
            "State of a volume of a tier: 1 for the current state, else 0.",
            labels=[*labels, "state"],
        )
        for tier, volume in volumes:
            for each in STATES:
                state.add_metric([tier, volume.name, each], float(volume.state == each))
        yield state

    def _process_metrics(self) -> Iterable[Metric]:
        snapshot = self._snapshot
        info = GaugeMetricFamily(
            "kvtier_tierd_info",
            "Version and policy of tierd; always 1.",
            labels=["version", "policy_namespace", "policy"],
        )
        namespace, _, policy = snapshot.policy.partition("/")
        info.add_metric([snapshot.version, namespace, policy], 1)
        yield info
        pool = GaugeMetricFamily(
            "kvtier_pool_bytes", "Bytes of the host pool, by use.", labels=["use"]
        )
        for use, size in snapshot.pool.items():
            pool.add_metric([use], size)
        yield pool
        sessions = GaugeMetricFamily(
            "kvtier_sessions", "Attached engine processes, by role.", labels=["role"]
        )
        for role in ("scheduler", "worker"):
            sessions.add_metric([role], sum(session.role == role for session in snapshot.sessions))
        yield sessions
        conditions = GaugeMetricFamily(
            "kvtier_condition",
            "Conditions that may need action: 1 if the condition holds, else 0.",
            labels=["type"],
        )
        holding = {condition.type for condition in snapshot.conditions}
        for name in sorted({*CONDITIONS, *holding}):
            conditions.add_metric([name], float(name in holding))
        yield conditions
        for name, text, number in (
            (
                "kvtier_run_volume_size_bytes",
                "Size of the volume of the run directory, which holds the pool.",
                snapshot.run_volume_bytes,
            ),
            (
                "kvtier_run_volume_available_bytes",
                "Bytes that are free on the volume of the run directory.",
                snapshot.run_volume_available_bytes,
            ),
            (
                "kvtier_live_generation",
                "Generation of the live values in effect.",
                snapshot.applied_generation,
            ),
            ("kvtier_epoch", "Latest epoch that tierd has assigned.", snapshot.epoch),
            (
                "kvtier_fenced",
                "1 while tierd waits for workers of earlier epochs, else 0.",
                int(snapshot.fenced),
            ),
            (
                "kvtier_quarantined_processes",
                "Processes whose slots are in quarantine.",
                snapshot.quarantined_processes,
            ),
        ):
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric([], number)
            yield gauge

    def _event_metrics(self) -> Iterable[Metric]:
        snapshot = self._snapshot
        refused = CounterMetricFamily("kvtier_live_refused", "Rejected live values.")
        refused.add_metric([], snapshot.live_refused_total)
        prompts = CounterMetricFamily("kvtier_prompt_tokens", "Prompt tokens scheduled by engines.")
        prompts.add_metric([], snapshot.prompt_tokens_total)
        yield from (refused, prompts)
        families: dict[str, CounterMetricFamily] = {}
        for (name, tier, reason), value in sorted(snapshot.events.items()):
            row = COUNTERS.get(name, UNREGISTERED)
            if name not in families:
                families[name] = CounterMetricFamily(
                    f"kvtier_{name}", row.help, labels=list(row.labels)
                )
            labels = {"tier": tier, "reason": reason}
            families[name].add_metric([labels[each] for each in row.labels], value)
        yield from families.values()


def metrics_text(snapshot: Snapshot) -> bytes:
    """The body of ``/metrics``. Its own registry contains nothing but the snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)
