"""The contracts of ``TierStore``: what it needs, the events it emits, its accounts and counters,
and the presence bits.

``TierStore`` is a state machine. One owner calls every method, without locks; each returns at once
and does no I/O. Calls that may block run on an ``IoExecutor``, and ``TierStore.pump`` takes their
results. The time comes from a ``Clock``.

Presence bits: bit 0 stands for the memory tier, bit i for the i-th tier of the topology,
``UNVERIFIED_BIT`` for a recovered object that has not been verified. Replicas and engines use the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from kvtier.store import counters
from kvtier.tenants import is_tenant

MEMORY_BIT = 1
UNVERIFIED_BIT = 1 << 16
"""In RAM since before this tierd, and to be verified before use. Beyond the bits of all tiers."""
RAM_BITS = MEMORY_BIT | UNVERIFIED_BIT
MAX_QUEUED_REQUESTS = 1_024
"""Requests of an engine's queue, the first ones, whose prefixes are protected in RAM."""
Clock = Callable[[], float]
"""Seconds, monotonic."""


class IoExecutor(Protocol):
    """Runs calls that may block, possibly indefinitely.

    Lanes ("read:<tier>", "write:<tier>", "hash") are independent. Within a lane, calls start in
    order as threads become free.
    """

    def submit(
        self,
        lane: str,
        call: Callable[[], object],
        done: Callable[[object, BaseException | None], None],
    ) -> None:
        """Runs ``call`` on a thread of ``lane``. ``collect`` passes its result, or the exception
        that it raised, to ``done(result, error)``."""
        ...

    def collect(self) -> int:
        """Calls ``done`` for every call that has finished; returns how many.

        Owner's thread only.
        """
        ...

    def running(self, lane: str) -> int:
        """Calls of a lane that have started and not returned, hung ones included."""
        ...

    def queued(self, lane: str) -> int:
        """Calls of a lane that wait for a thread."""
        ...


class PromotionOutcome(str, Enum):
    """How a promotion ended. Every promotion ends exactly once."""

    WHOLE = "whole"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABSENT = "absent"
    """No tier has the first key."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One EngineCore and its workers, as described by their handshakes.

    ``namespace``: 32 hex digits. ``slot_bytes[g]``: aligned payload bytes of an object of group g.
    ``writer_ranks[g]``: the ranks that write an object of group g, and ``shard_bytes[g]`` the exact
    bytes of their shards, in the same order. ``persistent``: whether secondary tiers may be used
    for this engine. ``parts``: in how many parts of the pool its objects can lie, with one shard in
    each; then every group has so many shards of one aligned size. 1: they are one range.
    """

    engine: str
    namespace: str
    slot_bytes: tuple[int, ...]
    shard_bytes: tuple[tuple[int, ...], ...]
    writer_ranks: tuple[tuple[int, ...], ...] = ((0,),)
    persistent: bool = True
    parts: int = 1


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whom the objects of a request belong to, and what it asks for them; part of messages.

    ``tenant``: its digest (``kvtier.tenants``), empty without one. ``retain_seconds``: for how long
    the objects are evicted after others. ``pin``: they stay in RAM for as long as they live, or for
    an hour. ``ttl_seconds``: how long what the request stores is used; 0: no limit. ``tiers``: bits
    of the only tiers that the request lets them be stored in, the memory tier's included; 0: all.
    """

    tenant: bytes = b""
    retain_seconds: int = 0
    pin: bool = False
    ttl_seconds: int = 0
    tiers: int = 0

    @property
    def keeps(self) -> bool:
        """Whether objects that are there already are to stay longer."""
        return self.pin or self.retain_seconds > 0


NO_OWNER = Owner()


def wider(tiers: int, others: int) -> int:
    """The tiers that one of two requests lets an object be stored in; 0: all."""
    return tiers | others if tiers and others else 0


MAX_LIFE_SECONDS = 366 * 86_400
"""Longer times are shortened to this."""
_TIER_BITS = UNVERIFIED_BIT - 1


def checked_owner(owner: Owner) -> Owner | None:
    """The owner that a message names, with times within bounds; None if it cannot be one."""
    if not is_tenant(owner.tenant):
        return None
    tiers = max(owner.tiers, 0) & _TIER_BITS
    if owner.tiers and not tiers:
        # 0 would be all tiers.
        tiers = MEMORY_BIT
    retain = min(max(owner.retain_seconds, 0), MAX_LIFE_SECONDS)
    life = min(max(owner.ttl_seconds, 0), MAX_LIFE_SECONDS)
    if (retain, life, tiers) == (owner.retain_seconds, owner.ttl_seconds, owner.tiers):
        return owner
    return msgspec.structs.replace(owner, retain_seconds=retain, ttl_seconds=life, tiers=tiers)


@dataclass(frozen=True, slots=True)
class PromotionOptions:
    """``look_up``: keys that no index has are looked up in tiers that other processes write to.
    ``owner``: of the request that the objects are brought into RAM for."""

    look_up: bool = False
    owner: Owner = NO_OWNER


NO_OPTIONS = PromotionOptions()


@dataclass(frozen=True, slots=True)
class ChunkId:
    """One chunk of one group of an engine. ``previous``: block hash of the chunk before it; empty
    if it is the first or that is not known."""

    group: int
    block_hash: bytes
    previous: bytes = b""


# Events. ``TierStore.take_events`` returns them in order.


@dataclass(frozen=True, slots=True)
class CreditsGranted:
    """Free slots for one group of an engine, by offset."""

    engine: str
    group: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PresenceChanged:
    """``bits`` were set (``present``) or cleared. ``key``: group byte + block hash. ``location``:
    with ``MEMORY_BIT`` set, the slot and its generation (``generations.pack_location``)."""

    namespace: str
    key: bytes
    bits: int
    present: bool
    location: int = 0


@dataclass(frozen=True, slots=True)
class KeysEvicting:
    """These keys are being evicted from RAM. The owner calls ``TierStore.acknowledge_eviction``
    once every scheduler of the namespace has dropped them; after 100 ms the eviction proceeds
    without."""

    namespace: str
    token: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class UsableTiersChanged:
    """``bits``: the tiers that may be used. Presence in other tiers counts as absence until the
    next event."""

    bits: int


@dataclass(frozen=True, slots=True)
class PromotionEnded:
    """A promotion has ended. ``usable``: length of the pinned prefix. ``tiers``: the tier that each
    of its keys came from. ``locations``: where each of them is."""

    engine: str
    promotion: int
    outcome: PromotionOutcome
    usable: int
    tiers: tuple[int, ...]
    locations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromotionArriving:
    """Before the end of a promotion: keys have arrived, and the rest of the first ``predicted``
    keys is expected to arrive while what has arrived is copied. ``first``: position of the first
    one in ``tiers`` and ``locations``; earlier ones were announced before."""

    engine: str
    promotion: int
    predicted: int
    first: int
    tiers: tuple[int, ...]
    locations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadExtended:
    """A load that began before its promotion had ended now pins its first ``keys`` keys."""

    engine: str
    load: int
    keys: int


StoreEvent = (
    CreditsGranted
    | PresenceChanged
    | KeysEvicting
    | UsableTiersChanged
    | PromotionEnded
    | PromotionArriving
    | LoadExtended
)


@dataclass(slots=True)
class Accounts:
    """Bytes of the host pool by use.

    Between two calls of the store they add up to ``pool_bytes``.
    """

    pool_bytes: int = 0
    free: int = 0
    granted: int = 0
    reserved: int = 0
    reading: int = 0
    committed: int = 0
    quarantined: int = 0
    evicting: int = 0
    unusable: int = 0
    """Room that no slot fits into."""


@dataclass(slots=True)
class StoreCounters:
    """Counters. Keys are (name, tier or "", reason or "")."""

    values: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def add(self, name: str, tier: str = "", reason: str = "", by: int = 1) -> None:
        """Adds ``by`` to one counter."""
        key = (name, tier, reason)
        value = self.values.get(key)
        if value is None:
            counters.check(name, tier, reason)
            value = 0
        self.values[key] = value + by

    def declare(self, tiers: Iterable[str]) -> None:
        """Adds every label set that can occur with these secondary tiers, with value 0."""
        for key in counters.label_sets(tiers):
            self.values.setdefault(key, 0)
