from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtier.store.context import Timer
from kvtier.store.cost_model import Batch
from kvtier.store.executor import IoCall
from kvtier.store.secondary_tier import SecondaryTier
from kvtier.store.selection import LoadDeadline
from kvtier.store.state import Entry, Slot, SlotClass
from kvtier.store.types import EngineInfo


class Reservation:
    """One open reservation. ``answered``: ranks that are through with the slot; ``doomed``: it will not be
    committed."""

    __slots__ = ("answered", "doomed", "group", "key", "namespace", "number", "persistent", "slot")

    def __init__(
        self, number: int, engine: EngineState, group: int, key: bytes, slot: Slot, doomed: bool
    ) -> None:
        self.number = number
        self.namespace = engine.namespace
        self.persistent = engine.persistent
        self.group = group
        self.key = key
        self.slot = slot
        self.doomed = doomed
        self.answered: set[int] = set()


class LoadRecord:
    """One announced load: its pinned entries, and the ranks that may be reading them."""

    __slots__ = ("entries", "ranks")

    def __init__(self, entries: list[Entry], ranks: set[int]) -> None:
        self.entries = entries
        self.ranks = ranks


MAX_PARALLEL = 1 << 30
"""Reads of a promotion that may be under way where the selection does not say: all; threads are the limit."""


class PromotionOwner(Protocol):
    """What a promotion tells about its keys. Implemented by ``Promotions``."""

    def arrived(self, promotion: Promotion, position: int, entry: Entry, tier_index: int) -> None:
        """The key at this position is in RAM, pinned; it came from the tier with this index."""
        ...

    def lost(self, promotion: Promotion, position: int, reason: str) -> None:
        """The key at this position cannot be loaded."""
        ...


class Promotion:
    """One promotion of one engine. ``entries[i]`` is pinned where not None; keys from ``limit`` on are given up;
    ``reads`` has what is under way, by position, ``ahead`` what is not begun, by tier; at most ``parallel`` of a tier are
    under way at a time. ``there``: how many keys are there in order. ``clock`` counts from ``started_at``."""

    __slots__ = (
        "_owner", "ahead", "batches", "checks", "clock", "ended", "ends", "engine", "entries", "groups", "keys", "limit", "number",
        "parallel", "reads", "sources", "started_at", "there", "tiers", "timer",
    )  # fmt: skip

    def __init__(
        self,
        owner: PromotionOwner,
        engine: EngineState,
        number: int,
        keys: list[bytes],
        entries: list[Entry | None],
    ) -> None:
        self._owner = owner
        self.engine = engine
        self.number = number
        self.keys = keys
        self.groups: Sequence[int] = ()
        self.entries = entries
        self.sources: list[int] = []
        self.tiers = [0] * len(entries)
        self.limit = len(entries)
        self.reads: dict[int, Read] = {}
        self.checks: set[int] = set()
        """Positions of what is in RAM and is being verified."""
        self.ahead: dict[int, deque[int]] = {}
        self.batches: dict[int, Batch] = {}
        self.parallel = MAX_PARALLEL
        self.clock = LoadDeadline(0.0)
        self.ends: tuple[int, ...] = ()
        self.started_at = 0.0
        self.there = 0
        self.timer: Timer | None = None
        self.ended = False

    def advance(self) -> bool:
        """Takes in what has arrived in order; True if that is more than before."""
        before = self.there
        while self.there < self.limit and self.entries[self.there] is not None:
            self.there += 1
        return self.there > before

    def deadline(self) -> float:
        """Until when to wait, as things stand."""
        arrived = self.ends[self.there - 1] if self.there and self.ends else 0
        return self.started_at + self.clock.seconds(arrived)

    def arrived(self, position: int, entry: Entry, tier_index: int) -> None:
        """A read for this promotion has ended well."""
        self._owner.arrived(self, position, entry, tier_index)

    def lost(self, position: int, reason: str) -> None:
        """A read for this promotion has failed for good."""
        self._owner.lost(self, position, reason)


class ProbeRead:
    """Waits for the reads by which a tier that was judged too slow is measured again. Nobody waits for it."""

    def arrived(self, position: int, entry: Entry, tier_index: int) -> None:
        """The object stays in RAM for as long as it is nobody's victim."""

    def lost(self, position: int, reason: str) -> None:
        """The tier's model knows."""


class Waiter(Protocol):
    """Who wants a key."""

    def arrived(self, position: int, entry: Entry, tier_index: int) -> None:
        """The key at this position is in RAM; it came from the tier with this index."""
        ...

    def lost(self, position: int, reason: str) -> None:
        """The key at this position cannot come."""
        ...


class Read:
    """One key on its way. ``slot`` and ``job`` are None while it waits for a slot; ``tried``: bits of the tiers that
    failed."""

    __slots__ = (
        "batch", "created_at", "due_at", "job", "key", "kind", "late", "lower", "namespace", "payload_bytes",
        "shard_bytes", "slot", "timer", "tried", "waiters",
    )  # fmt: skip

    def __init__(
        self,
        namespace: str,
        key: bytes,
        kind: SlotClass,
        shard_bytes: tuple[int, ...],
        payload_bytes: int,
        lower: SecondaryTier,
        now: float,
    ) -> None:
        self.namespace = namespace
        self.key = key
        self.kind = kind
        self.shard_bytes = shard_bytes
        self.payload_bytes = payload_bytes
        self.lower = lower
        self.created_at = now
        self.batch: Batch | None = None
        """What its tier's model counts it in."""
        self.due_at: float | None = None
        """Past this it has taken longer than expected; None where nothing is expected."""
        self.slot: Slot | None = None
        self.job: IoCall | None = None
        self.timer: Timer | None = None
        self.late = False
        self.tried = 0
        self.waiters: dict[tuple[Waiter, int], None] = {}


class EngineState:
    """One open engine. ``granted[g]``: its free slots of group g by offset, in the order they were granted."""

    __slots__ = (
        "granted",
        "info",
        "kinds",
        "loads",
        "name",
        "namespace",
        "persistent",
        "prefixes",
        "promotions",
        "reservations",
    )

    def __init__(self, info: EngineInfo, kinds: tuple[SlotClass, ...]) -> None:
        self.info = info
        self.name = info.engine
        self.namespace = info.namespace
        self.persistent = info.persistent
        self.kinds = kinds
        self.prefixes = tuple(bytes((g,)) for g in range(len(kinds)))
        self.granted: tuple[dict[int, Slot], ...] = tuple({} for _ in kinds)
        self.reservations: dict[int, Reservation] = {}
        self.promotions: dict[int, Promotion] = {}
        self.loads: dict[int, LoadRecord] = {}

    def key(self, group: int, block_hash: bytes) -> bytes | None:
        """The key as tiers have it; None where the engine has no such group."""
        return self.prefixes[group] + block_hash if 0 <= group < len(self.prefixes) else None
