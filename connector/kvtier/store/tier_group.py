"""The secondary tiers of a topology as the store uses them.

A tier with several volumes (``tiers/volume_set.py``) is one tier for engines and for the selection:
it has one presence bit. For reads, writes and failures each volume is a ``SecondaryTier`` of its
own, so that a disk that fails or hangs occupies its own threads and opens its own breaker, and the
others serve. Only the store's thread uses this module.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.config.models import LiveTier
from kvtier.store.context import Timer
from kvtier.store.cost_model import TierEstimate, TierModel
from kvtier.store.tier_health import NegativeCache, TierBreaker
from kvtier.store.types import MEMORY_BIT
from kvtier.tenants import UNLIMITED, share_bytes
from kvtier.tiers.base import ObjectRef, Tier, TierLimits
from kvtier.tiers.volume_set import VolumeSet

MIN_LATE_SECONDS = 1.0
LATE_FACTOR = 3.0
"""A read is late once it takes longer than ``max(LATE_FACTOR x average, MIN_LATE_SECONDS)``."""
MIN_LATE_WRITE_SECONDS = 30.0
"""The same for writes: a storage may write slowly, and no request waits for it."""
AVERAGE_WEIGHT = 0.2
"""Weight of the latest read or write in its running average, which follows a change within about
ten of them."""
OPEN_SECONDS = 60.0
"""A volume that is not open after this time gets no new objects until it is."""
REPORTED_TENANTS = 16
"""Of each tier."""
FULL_SECONDS = 30.0
"""A volume without room gets no new objects for this long: others of the tier may have room."""


def limits_of(live: LiveTier, volume: str = "", tenant_percent: int = 100) -> TierLimits:
    """The live values that a tier applies itself, or one volume of it."""
    capacity = live.volume_capacity_bytes.get(volume, live.capacity_bytes)
    return TierLimits(
        capacity_bytes=sys.maxsize if capacity is None else capacity,
        high_watermark_percent=live.high_watermark_percent,
        low_watermark_percent=live.low_watermark_percent,
        retention_seconds=live.retention_seconds,
        sync_data=live.sync_data,
        load_timeout_seconds=live.load_timeout_seconds,
        min_free_bytes=live.min_free_bytes,
        min_free_percent=live.min_free_percent,
        tenant_percent=tenant_percent,
    )


@dataclass(frozen=True, slots=True)
class TenantReport:
    """Tenants of one tier. ``count``: how many hold something. ``share_bytes``: what one may hold;
    0 without a limit. ``largest``: digest and bytes of those that hold the most."""

    count: int = 0
    share_bytes: int = 0
    largest: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, held: Mapping[bytes, int], share_bytes: int) -> TenantReport:
        """The report of what each tenant holds."""
        largest = heapq.nlargest(
            REPORTED_TENANTS, held.items(), key=lambda each: (each[1], each[0])
        )
        return cls(
            len(held),
            0 if share_bytes == UNLIMITED else share_bytes,
            tuple((tenant.hex(), size) for tenant, size in largest),
        )


@dataclass(frozen=True, slots=True)
class StoreTierState:
    """The state of one tier, or of one of its volumes, for reports. ``state``: Healthy, Degraded,
    BreakerOpen, or Unknown before the first open. A tier with volumes is Degraded while some of
    them are not Healthy. ``since_seconds``: when the breaker last changed, in seconds of the
    store's clock. ``volumes``: of a tier with several."""

    name: str
    state: str
    used_bytes: int
    capacity_bytes: int
    objects: int
    pending_store_bytes: int
    last_error: str = ""
    cause: str = ""
    since_seconds: float = 0.0
    late_reads: int = 0
    volume_bytes: int = 0
    volume_available_bytes: int = 0
    volumes: tuple[StoreTierState, ...] = ()
    tenants: TenantReport = TenantReport()


@dataclass(frozen=True, slots=True)
class TierPlace:
    """Which tier or volume this is: position in the topology, names of the tier and the volume."""

    index: int
    name: str
    volume: str = ""

    @property
    def lane(self) -> str:
        """Its part of the executor's lanes."""
        return f"{self.name}/{self.volume}" if self.volume else self.name


class SecondaryTier:
    """One secondary tier, or one volume of it, with threads and a breaker of its own.

    ``index``: position of the tier in the topology, the same for all its volumes. ``name``: of the
    tier, for counters. ``volume``: name of the volume; empty if the tier has none. ``late_reads``,
    ``late_writes``: hung calls that have not returned.
    """

    def __init__(
        self,
        place: TierPlace,
        tier: Tier,
        settings: LiveTier,
        threads: int,
        breaker: TierBreaker,
        now: float,
    ) -> None:
        self.index = place.index
        self.bit = MEMORY_BIT << place.index
        self.tier = tier
        self.name = place.name
        self.volume = place.volume
        self.lane = place.lane
        self.settings = settings
        self.read_threads = threads
        self.breaker = breaker
        self.negative = NegativeCache()
        self.opened = False
        self.created_at = now
        self.full_until = now
        """Until when other volumes of the tier take its new objects, because it had no room."""
        self.checked_at = now
        """When the last check of a suspended tier started."""
        self.next_check: Timer | None = None
        self.late_reads = 0
        self.late_writes = 0
        self.write_threads = threads
        self.pending_store_bytes = 0
        self.unindexed = 0
        """Objects without room in the tier's index, as counted so far."""
        self.counted: dict[tuple[str, str], int] = {}
        """The tier's own totals, as counted so far."""
        self.average_read_seconds: float | None = None
        self.average_write_seconds: float | None = None
        self.tenant_share_bytes = UNLIMITED
        self.model = TierModel(threads)
        self.last_error = ""

    @property
    def usable(self) -> bool:
        """Whether the tier may be read and written."""
        return self.opened and not self.breaker.open

    @property
    def late_seconds(self) -> float:
        """A read that takes longer than this is late."""
        return max(MIN_LATE_SECONDS, LATE_FACTOR * (self.average_read_seconds or 0.0))

    @property
    def late_write_seconds(self) -> float:
        """A write that takes longer than this is late."""
        return max(MIN_LATE_WRITE_SECONDS, LATE_FACTOR * (self.average_write_seconds or 0.0))

    def observe_read(self, seconds: float) -> None:
        """Adds the duration of a successful read to the average."""
        self.average_read_seconds = _average(self.average_read_seconds, seconds)

    def observe_write(self, seconds: float) -> None:
        """Adds the duration of a successful write to the average."""
        self.average_write_seconds = _average(self.average_write_seconds, seconds)

    @property
    def state(self) -> str:
        """As in ``StoreTierState``."""
        if self.breaker.open:
            return "BreakerOpen"
        if not self.opened:
            return "Unknown"
        late = self.late_reads or self.late_writes
        return "Degraded" if self.breaker.failures or late else "Healthy"

    def report(self) -> StoreTierState:
        """The state for reports."""
        usage = self.tier.usage()
        return StoreTierState(
            self.volume or self.name,
            self.state,
            usage.used_bytes,
            usage.capacity_bytes,
            usage.objects,
            self.pending_store_bytes,
            self.last_error,
            self.breaker.cause,
            self.breaker.since,
            self.late_reads,
            *self.tier.volume(),
            tenants=TenantReport.of(self.tier.tenants(), self.tenant_share_bytes),
        )


def _average(old: float | None, seconds: float) -> float:
    return seconds if old is None else old + AVERAGE_WEIGHT * (seconds - old)


class TierGroup:
    """A secondary tier of the topology: one ``SecondaryTier``, or one for each of its volumes.
    ``tier``: the tier as a whole."""

    def __init__(self, tier: Tier, members: Sequence[SecondaryTier]) -> None:
        self.tier = tier
        self.members = tuple(members)
        self.index, self.bit, self.name = members[0].index, members[0].bit, members[0].name
        self._volumes = tier if isinstance(tier, VolumeSet) else None

    @property
    def settings(self) -> LiveTier:
        """The live values."""
        return self.members[0].settings

    @property
    def usable(self) -> bool:
        """Whether some volume may be used."""
        return any(member.usable for member in self.members)

    def configure(self, settings: LiveTier, tenant_percent: int) -> None:
        """Applies live settings, and the share that one tenant may hold. A volume that they lack
        keeps its capacity: the policy may have removed it for new pods."""
        for member in self.members:
            member.settings = settings
            limits = limits_of(settings, member.volume, tenant_percent)
            if member.volume and member.volume not in settings.volume_capacity_bytes:
                limits = replace(limits, capacity_bytes=member.tier.usage().capacity_bytes)
            member.tier.configure(limits)
            if member.tier.capabilities.tenants:
                member.tenant_share_bytes = share_bytes(limits.capacity_bytes, tenant_percent)

    def holder(self, namespace: str, key: bytes, now: float) -> SecondaryTier | None:
        """The usable member that holds a key which the presence index has for this tier."""
        for member in self.members:
            if (
                member.usable
                and (self._volumes is None or member.tier.contains(ObjectRef(namespace, key)))
                and not member.negative.has(namespace, key, now)
            ):
                return member
        return None

    def target(self, ref: ObjectRef, now: float) -> SecondaryTier:
        """The member that a new object belongs to. A volume that fails has no share."""
        if self._volumes is None:
            return self.members[0]
        members = range(len(self.members))
        working = [each for each in members if self._works(self.members[each], now)]
        room = [each for each in working if now >= self.members[each].full_until]
        return self.members[self._volumes.place(ref, room or working)]

    @staticmethod
    def _works(member: SecondaryTier, now: float) -> bool:
        if member.opened or member.breaker.open:
            return member.usable
        return now - member.created_at <= OPEN_SECONDS

    def set_serving(self, member: SecondaryTier, serving: bool) -> bool:
        """Hides or shows the objects of a volume. True if some became hidden or visible."""
        if self._volumes is None:
            return False
        return self._volumes.set_serving(self.members.index(member), serving)

    def load(self, now: float) -> tuple[TierEstimate | None, int, int, int]:
        """Estimate, threads, and queued reads and bytes of all usable members together.

        Keys are spread evenly, so a load ends with the slowest volume.
        """
        members = [member for member in self.members if member.usable] or self.members[:1]
        known = [
            estimate for member in members if (estimate := member.model.estimate(now)) is not None
        ]
        estimate = None
        if known:
            estimate = TierEstimate(
                max(each.latency_seconds for each in known),
                len(members) * min(each.bytes_per_second for each in known),
                max(each.spread for each in known),
            )
        return (
            estimate,
            sum(max(1, member.read_threads - member.late_reads) for member in members),
            sum(member.model.queued_reads for member in members),
            sum(member.model.queued_bytes for member in members),
        )

    def report(self) -> StoreTierState:
        """The state of the whole tier, with that of each volume."""
        volumes = tuple(member.report() for member in self.members)
        if self._volumes is None:
            return volumes[0]
        states = {each.state for each in volumes}
        state = states.pop() if len(states) == 1 else "Degraded"
        worst = next((each for each in volumes if each.state != "Healthy"), volumes[0])
        error = next((each for each in (worst, *volumes) if each.last_error), None)
        return StoreTierState(
            name=self.name,
            state=state,
            used_bytes=sum(each.used_bytes for each in volumes),
            capacity_bytes=sum(each.capacity_bytes for each in volumes),
            objects=sum(each.objects for each in volumes),
            pending_store_bytes=sum(each.pending_store_bytes for each in volumes),
            last_error="" if error is None else f"volume {error.name}: {error.last_error}",
            cause=worst.cause if state == "BreakerOpen" else "",
            since_seconds=worst.since_seconds,
            late_reads=sum(each.late_reads for each in volumes),
            volume_bytes=sum(each.volume_bytes for each in volumes),
            volume_available_bytes=sum(each.volume_available_bytes for each in volumes),
            volumes=volumes,
            tenants=TenantReport.of(
                self.tier.tenants(),
                min(UNLIMITED, sum(member.tenant_share_bytes for member in self.members)),
            ),
        )
