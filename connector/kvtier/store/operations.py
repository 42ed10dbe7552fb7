"""Records of operations in progress: reservations, loads, promotions and reads, and the engines
they belong to.

Plain state without rules. ``transfers`` owns reservations and loads, ``promotion`` owns promotions,
``tier_reads`` owns reads, ``engines`` owns engines. Only the store's thread touches them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.keys import group_prefix
from kvtier.store.context import Timer
from kvtier.store.cost_model import Batch
from kvtier.store.executor import IoCall
from kvtier.store.selection import LoadDeadline
from kvtier.store.state import Entry, ObjectGeometry, Slot, SlotRequest
from kvtier.store.tier_group import SecondaryTier
from kvtier.store.types import NO_OWNER, EngineInfo

MAX_PARALLEL = 1 << 30
"""Concurrent reads of a promotion without a plan: unlimited here, because the tier's threads are
the limit."""


class KeyWaiter(Protocol):
    """Waits for one key: for a read from a secondary tier, or for the verification of a recovered
    object.

    Implementations are hashable. Exactly one of the methods is called, once, unless the waiter is
    removed before.
    """

    def arrived(self, entry: Entry, tier_index: int) -> None:
        """The key is in RAM, pinned during the call.

        ``tier_index`` is the tier that it came from.
        """
        ...

    def lost(self, reason: str) -> None:
        """The key cannot be provided."""
        ...


class Reservation:
    """One open reservation. ``acknowledged``: ranks that have delivered or aborted. A reservation
    that is ``cancelled`` is not committed. ``previous``: key of the chunk before it, or empty.
    ``account``: the account that its bytes belong to until then. ``tiers``: those that the requests
    which store it let it be stored in; 0: all."""

    __slots__ = (
        "account",
        "acknowledged",
        "cancelled",
        "group",
        "key",
        "namespace",
        "number",
        "owner",
        "persistent",
        "previous",
        "slot",
        "tiers",
    )

    def __init__(
        self, number: int, engine: EngineState, group: int, key: bytes, slot: Slot
    ) -> None:
        self.number = number
        self.namespace = engine.namespace
        self.persistent = engine.persistent
        self.group = group
        self.key = key
        self.previous = b""
        self.slot = slot
        self.owner = NO_OWNER
        self.account = b""
        self.tiers = 0
        self.cancelled = False
        self.acknowledged: set[int] = set()


class Promotion:
    """One promotion of one engine. Lists are indexed by the position of a key in the request.

    * ``entries``: pinned objects; None where a key has not arrived.
    * ``sources``: tier that each key is expected from. ``tiers``: tier that it came from.
    * ``limit``: keys from this position on have been given up.
    * ``arrived``: length of the prefix that is in RAM.
    * ``reads``: reads in progress by position; ``verifying``: positions of recovered objects that
      are being verified.
    * ``not_started``: positions still to be read, by tier. At most ``parallel`` reads per tier run
      at a time.
    * ``end_tokens``: prompt tokens that are covered once the key has arrived. Empty where the
      engine did not say.
    * ``deadline``: how long to wait, counted from ``started_at``.
    * ``copy_seconds``: how long the engine takes to copy one key; 0 if the promotion is answered at
      its end only. ``announced``: how many keys the engine was told of before the end.
    * ``load``: number of the load that has started before the end, 0 if none; ``on_end`` is called
      with the pinned objects when there are no more to come.
    """

    __slots__ = (
        "announced", "arrived", "batches", "copy_seconds", "deadline", "end_tokens", "ended",
        "engine", "entries", "groups", "keys", "limit", "load", "looked_up", "not_started",
        "number", "on_end", "owner", "parallel", "reads", "sources", "started_at", "tiers",
        "timer", "verifying",
    )  # fmt: skip

    def __init__(
        self, engine: EngineState, number: int, keys: list[bytes], entries: list[Entry | None]
    ) -> None:
        self.engine = engine
        self.number = number
        self.owner = NO_OWNER
        self.keys = keys
        self.groups: Sequence[int] = ()
        self.entries = entries
        self.sources: list[int] = []
        self.tiers = [0] * len(entries)
        self.limit = len(entries)
        self.arrived = 0
        self.reads: dict[int, Read] = {}
        self.verifying: set[int] = set()
        self.not_started: dict[int, deque[int]] = {}
        self.batches: dict[SecondaryTier, Batch] = {}
        self.parallel = MAX_PARALLEL
        self.end_tokens: tuple[int, ...] = ()
        self.deadline = LoadDeadline(0.0)
        self.started_at = 0.0
        self.timer: Timer | None = None
        self.ended = False
        self.copy_seconds = 0.0
        self.announced = 0
        self.load = 0
        self.on_end: Callable[[list[Entry]], None] | None = None
        self.looked_up = False
        """It only waits for a lookup; another takes its place if keys are found."""

    def advance(self) -> None:
        """Updates ``arrived``."""
        while self.arrived < self.limit and self.entries[self.arrived] is not None:
            self.arrived += 1

    def expires_at(self) -> float:
        """When to stop waiting. Each key that arrives in order may move it back."""
        tokens = self.end_tokens[self.arrived - 1] if self.arrived and self.end_tokens else 0
        return self.started_at + self.deadline.seconds(tokens)

    def stop_timer(self) -> None:
        """Cancels the pending timer, if any."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Read:
    """One key on its way from a secondary tier into a slot.

    * ``request``: set while the read waits for a slot. ``slot`` and ``call``: set once it has one.
    * ``batch``: the batch that the tier's cost model counts the read in.
    * ``due_at``: when the read is slower than expected; None without an estimate.
    * ``late``: the read has been charged to the tier as hung.
    * ``previous``: key of the chunk before it in its prefix, or empty.
    * ``failed_bits``: bits of the tiers that failed to provide the key.
    * ``owner``: of the request that it was started for. ``account``: the account that its slot
      belongs to.
    """

    __slots__ = (
        "account", "batch", "call", "created_at", "due_at", "failed_bits", "geometry", "key",
        "late", "namespace", "owner", "previous", "request", "secondary", "slot", "timer",
        "waiters",
    )  # fmt: skip

    def __init__(
        self,
        namespace: str,
        key: bytes,
        geometry: ObjectGeometry,
        secondary: SecondaryTier,
        now: float,
    ) -> None:
        self.namespace = namespace
        self.key = key
        self.geometry = geometry
        self.secondary = secondary
        self.created_at = now
        self.previous = b""
        self.owner = NO_OWNER
        self.account = b""
        self.batch: Batch | None = None
        self.due_at: float | None = None
        self.request: SlotRequest | None = None
        self.slot: Slot | None = None
        self.call: IoCall | None = None
        self.timer: Timer | None = None
        self.late = False
        self.failed_bits = 0
        self.waiters: dict[KeyWaiter, None] = {}

    def stop_timer(self) -> None:
        """Cancels the pending timer, if any."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class EngineState:
    """One open engine. ``granted[g]``: its unused credits for group g by offset, in the order of
    the grants."""

    __slots__ = (
        "geometries",
        "granted",
        "info",
        "loads",
        "name",
        "namespace",
        "persistent",
        "prefixes",
        "promotions",
        "reservations",
    )

    def __init__(self, info: EngineInfo, geometries: tuple[ObjectGeometry, ...]) -> None:
        self.info = info
        self.name = info.engine
        self.namespace = info.namespace
        self.persistent = info.persistent
        self.geometries = geometries
        self.prefixes = tuple(map(group_prefix, range(len(geometries))))
        self.granted: tuple[dict[int, Slot], ...] = tuple({} for _ in geometries)
        self.reservations: dict[int, Reservation] = {}
        self.promotions: dict[int, Promotion] = {}
        self.loads: dict[int, list[Entry]] = {}
        """Pinned objects of each load."""

    def previous(self, group: int, block_hash: bytes) -> bytes:
        """The key of a chunk that precedes another one of this group; empty if ``block_hash`` is
        empty, that is, if there is none or it is not known."""
        return self.prefixes[group] + block_hash if block_hash else b""

    def key(self, group: int, block_hash: bytes) -> bytes | None:
        """The key as tiers use it; None if the engine has no such group."""
        return self.prefixes[group] + block_hash if 0 <= group < len(self.prefixes) else None
