"""The types around ``TierStore``: what goes in, what comes out, and what it needs from outside.

``TierStore`` (store/core.py) is a plain library and a state machine: every method is called by one owner (tierd's loop, a test,
the simulator) under no lock, returns at once, and never does I/O. Whatever may block goes through ``IoExecutor``;
results come back through ``pump``. Time comes from ``Clock``. The same calls in the same order with the same times give
the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

Clock = Callable[[], float]
"""Seconds, monotonic."""


class IoExecutor(Protocol):
    """Runs calls that may block, for ever if need be.

    ``submit(lane, call, done)``: runs ``call`` on a thread of ``lane`` and hands its result, or the exception it raised,
    to ``done(result, error)`` from within ``collect``. Lanes are independent ("read:<tier>", "write:<tier>", "hash"); within one, calls
    start in order as threads become free. ``queued(lane)`` and ``running(lane)`` count calls; a thread that hangs counts as running.
    """

    def submit(
        self,
        lane: str,
        call: Callable[[], object],
        done: Callable[[object, BaseException | None], None],
    ) -> None: ...

    def collect(self) -> int:
        """Calls ``done`` of everything that has finished; returns how many. Owner's thread only."""
        ...

    def running(self, lane: str) -> int: ...

    def queued(self, lane: str) -> int: ...


class PromotionOutcome(str, Enum):
    """How a promotion ended. Every promotion ends exactly once."""

    WHOLE = "whole"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One EngineCore and its workers, as their handshakes describe them.

    ``namespace``: 32 hex digits. ``slot_bytes[g]``: payload bytes (aligned) of an object of group g. ``shard_bytes[g][r]``: exact bytes of
    rank r's shard. ``persistent``: whether lower tiers may be used for this engine.
    """

    engine: str
    namespace: str
    slot_bytes: tuple[int, ...]
    shard_bytes: tuple[tuple[int, ...], ...]
    writer_ranks: tuple[int, ...] = (0,)
    persistent: bool = True


# What the store tells its owner. Taken with ``take_events``, in order.


@dataclass(frozen=True, slots=True)
class CreditsGranted:
    engine: str
    group: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PresenceChanged:
    """``bits`` are those that were set or cleared, not the new state. ``key``: group byte + block hash."""

    namespace: str
    key: bytes
    bits: int
    present: bool


@dataclass(frozen=True, slots=True)
class KeysEvicting:
    """Answer with ``TierStore.left(token)`` when every scheduler of the namespace knows, or after 100 ms (the store's own limit)."""

    namespace: str
    token: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class UsableTiersChanged:
    """``bits``: presence in these tiers counts; in the others it counts as absence, until this changes."""

    bits: int


@dataclass(frozen=True, slots=True)
class PromotionEnded:
    engine: str
    promotion: int
    outcome: PromotionOutcome
    usable: int
    tiers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadAnnounced:
    """Send to each of ``ranks``. ``slots`` may be shorter than what was asked for: the rest is gone."""

    engine: str
    load: int
    ranks: tuple[int, ...]
    slots: tuple[int, ...]
    tiers: tuple[int, ...]


StoreEvent = (
    CreditsGranted
    | PresenceChanged
    | KeysEvicting
    | UsableTiersChanged
    | PromotionEnded
    | LoadAnnounced
)


@dataclass(slots=True)
class Accounts:
    """Bytes of the host pool by what they are used for; they add up to ``pool_bytes`` at every quiescent point."""

    pool_bytes: int = 0
    free: int = 0
    granted: int = 0
    reserved: int = 0
    reading: int = 0
    committed: int = 0
    quarantined: int = 0
    evicting: int = 0
    unusable: int = 0
    """Rests of the pool that no slot fits into."""


@dataclass(slots=True)
class StoreCounters:
    """Everything that happened, by reason. Keys are (name, tier or "", reason or "")."""

    values: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def add(self, name: str, tier: str = "", reason: str = "", by: int = 1) -> None:
        """Adds ``by`` to one counter."""
        key = (name, tier, reason)
        self.values[key] = self.values.get(key, 0) + by


MEMORY_BIT = 1
UNVERIFIED_BIT = 1 << 16
"""In RAM since before this tierd, and to be verified before it is used: past every tier's bit."""
RAM_BITS = MEMORY_BIT | UNVERIFIED_BIT
