"""A tier in simulated time: the test plans the duration and the result of each read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.errors import TierCorruptError, TierError, TierMissError, TierUnavailableError
from kvtier.tiers.base import (
    ObjectMeta,
    ObjectRef,
    OnChange,
    Tier,
    TierCapabilities,
    TierLimits,
    TierUsage,
)

FAILURES: dict[str, type[TierError]] = {
    "unavailable": TierUnavailableError,
    "corrupt": TierCorruptError,
    "vanished": TierMissError,
}
OUTCOMES = ("good", "lie", *FAILURES)
"""``lie``: the tier claims success and delivers something of another shape."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The plan of one read: its latency, its maximum bandwidth, and its result."""

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    hangs: bool = False
    outcome: str = "good"


Planner = Callable[[int, float], ReadPlan]
"""number of the read, time -> its plan."""


@dataclass(slots=True)
class _Running:
    ref: ObjectRef
    plan: ReadPlan
    latency_left: float
    bytes_left: float


class SimulatedTier(Tier):
    """Delivers ``bytes_per_second`` as a whole, shared equally by the reads that are past their
    latency, or (``in_order``) given to the one that started first. All values
    may change while reads run.
    """

    capabilities = TierCapabilities(persistent=True, shared=False, indexed=True)

    def __init__(
        self,
        name: str,
        bytes_per_second: float,
        plan: Planner | None = None,
        latency_seconds: float = 0.0,
        in_order: bool = False,
    ) -> None:
        self.name = name
        self.bytes_per_second = bytes_per_second
        self.latency_seconds = latency_seconds
        self.in_order = in_order
        self.plan = plan
        self.held: dict[ObjectRef, int] = {}
        self.reads = 0
        self._running: dict[ObjectRef, _Running] = {}
        self._announce: OnChange | None = None

    # Time.

    def start(self, ref: ObjectRef, now: float) -> None:
        """A read has got a thread."""
        plan = (
            self.plan(self.reads, now) if self.plan is not None else ReadPlan(self.latency_seconds)
        )
        self.reads += 1
        self._running[ref] = _Running(ref, plan, plan.latency_seconds, float(self.held.get(ref, 0)))

    def _rates(self) -> dict[ObjectRef, float]:
        moving = [r for r in self._running.values() if not r.plan.hangs and r.latency_left <= 0]
        rates = {}
        left = self.bytes_per_second
        if self.in_order:
            for read in moving:
                rates[read.ref] = min(left, read.plan.bytes_per_second)
                left -= rates[read.ref]
            return rates
        moving.sort(key=lambda read: read.plan.bytes_per_second)
        for i, read in enumerate(moving):
            rates[read.ref] = min(left / (len(moving) - i), read.plan.bytes_per_second)
            left -= rates[read.ref]
        return rates

    def next_change(self) -> float:
        """Seconds until something ends, a latency or a read; infinite if nothing does."""
        rates = self._rates()
        soonest = math.inf
        for ref, read in self._running.items():
            if not read.plan.hangs and read.latency_left > 0:
                soonest = min(soonest, read.latency_left)
            elif rates.get(ref, 0.0) > 0:
                soonest = min(soonest, read.bytes_left / rates[ref])
        return soonest

    def advance(self, seconds: float) -> list[ObjectRef]:
        """Lets time pass, not beyond ``next_change``; returns the reads that have ended."""
        rates = self._rates()
        ended = []
        for ref, read in self._running.items():
            if read.plan.hangs:
                continue
            if read.latency_left > 0:
                read.latency_left -= seconds
                if read.latency_left < 1e-12:
                    read.latency_left = 0.0
            else:
                read.bytes_left -= rates[ref] * seconds
            if read.latency_left <= 0 and read.bytes_left <= 1e-6 * max(1, self.held.get(ref, 0)):
                ended.append(ref)
        return ended

    def release(self) -> None:
        """Hung reads continue."""
        for read in self._running.values():
            read.plan = ReadPlan(
                bytes_per_second=read.plan.bytes_per_second, outcome=read.plan.outcome
            )

    # The contract.

    def put(self, namespace: str, key: bytes, size_bytes: int) -> None:
        """As if another process had stored it."""
        self.held[ObjectRef(namespace, key)] = size_bytes
        if self._announce is not None:
            self._announce(namespace, key, True)

    def claim(self, namespace: str, key: bytes, present: bool) -> None:
        """Announces something that need not be true."""
        if self._announce is not None:
            self._announce(namespace, key, present)

    def open(self, on_change: OnChange) -> None:
        """Reports what is there."""
        self._announce = on_change
        for ref in self.held:
            on_change(ref.namespace, ref.key, True)

    def close(self) -> None:
        """Nothing to do."""

    def configure(self, limits: TierLimits) -> None:
        """Nothing is limited."""

    def contains(self, ref: ObjectRef) -> bool:
        """Whether the object is there."""
        return ref in self.held

    def keys(self, namespace: str) -> Iterator[bytes]:
        """Keys of a namespace."""
        return iter([ref.key for ref in self.held if ref.namespace == namespace])

    def usage(self) -> TierUsage:
        """Payload bytes."""
        return TierUsage(sum(self.held.values()), 1 << 60, len(self.held))

    def probe(self, ref: ObjectRef) -> bool:
        """The same as ``contains``."""
        return ref in self.held

    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        """The end of a read; moves no bytes."""
        running = self._running.pop(ref, None)
        outcome = running.plan.outcome if running is not None else "good"
        if outcome in FAILURES:
            raise FAILURES[outcome](f"{self.name}: {outcome} as planned")
        size = self.held.get(ref)
        if size is None:
            raise TierMissError(f"{ref.key.hex()} is not here")
        return ObjectMeta((size // 2 or 1,) if outcome == "lie" else (size,), "none", (b"",))

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Keeps the size."""
        self.put(ref.namespace, ref.key, meta.payload_bytes)

    def delete(self, ref: ObjectRef) -> None:
        """Forgets the object."""
        if self.held.pop(ref, None) is not None:
            self.claim(ref.namespace, ref.key, False)

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        """Order of use is not kept."""

    def maintain(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Always well."""
