"""What the store knows about each lower tier: whether it may be used, how fast it is, what is under way there.

Nothing here reads or writes objects; reads.py and writes.py do, and report what happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.errors import TierError, TierMissError, TierNoSpaceError
from kvtier.store.breaker import NegativeCache, TierBreaker
from kvtier.store.contract import TiersUsable
from kvtier.store.estimates import TierModel
from kvtier.store.jobs import Job
from kvtier.store.presence import MEMORY_BIT, RAM_BITS, PresenceIndex
from kvtier.store.shared import Shared
from kvtier.store.timers import Timer
from kvtier.tiers.base import Tier, TierLimits
from kvtier.topology.models import Live, LiveTier

MIN_LATE_SECONDS = 1.0
LATE_FACTOR = 3.0
"""A read is late, and a missed deadline its fault, when it took more than ``max(3 x its estimate, 1 s)`` (DATAPATH
2)."""
AVERAGE_WEIGHT = 0.2
"""Share of the latest read in the running average: follows a change within about ten reads."""
MAINTAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier as it is reported. ``state``: Healthy, Degraded, BreakerOpen or Unknown (not opened yet).
    ``since_seconds``: time of the store's clock at which the breaker last changed."""

    name: str
    state: str
    used_bytes: int
    capacity_bytes: int
    objects: int
    pending_store_bytes: int
    last_error: str
    cause: str
    since_seconds: float
    late_reads: int


def reason_of(error: BaseException) -> str:
    """The word under which an error is counted."""
    return error.reason if isinstance(error, TierError) else "unexpected"


class LowerTier:
    """One lower tier. ``index``: its position in the document; ``late_reads``: reads that count as hung and have not
    returned."""

    def __init__(self, index: int, tier: Tier, settings: LiveTier, threads: int, threshold: int, now: float) -> None:
        self.index = index
        self.bit = MEMORY_BIT << index
        self.tier = tier
        self.name = tier.name
        self.settings = settings
        self.read_threads = threads
        self.breaker = TierBreaker(threshold, now)
        self.negative = NegativeCache()
        self.opened = False
        self.looked_at = now
        """When it was last found out, or is being, whether the tier works again."""
        self.next_look: Timer | None = None
        self.late_reads = 0
        self.pending_store_bytes = 0
        self.left_out = 0
        """Objects without room in the tier's index that have been counted."""
        self.average_read_seconds: float | None = None
        self.model = TierModel(threads)
        self.last_error = ""

    @property
    def usable(self) -> bool:
        """Whether the tier may be looked at, read and written."""
        return self.opened and not self.breaker.open

    @property
    def late_seconds(self) -> float:
        """A read that takes longer than this is late."""
        return max(MIN_LATE_SECONDS, LATE_FACTOR * (self.average_read_seconds or 0.0))

    def observe_read(self, seconds: float) -> None:
        """Takes one read, ended well, into the average."""
        old = self.average_read_seconds
        self.average_read_seconds = seconds if old is None else old + AVERAGE_WEIGHT * (seconds - old)


class LowerTiers:
    """All lower tiers, their breakers and their upkeep. Owner's thread only.

    ``on_open`` is called when a breaker opens: nothing that has not begun may begin at that tier. ``on_usable`` is called
    when a tier can be used, for the first time or again.
    ``usable_bits``: of RAM and the tiers that may be used. Schedulers are told when they change, so that nobody waits a step for
    what lies only in a tier that is given up; the tier's keys stay in the index, and announcing that costs nothing however many they are.
    """

    def __init__(
        self, shared: Shared, index: PresenceIndex, tiers: Sequence[Tier], threads: Sequence[int], live: Live
    ) -> None:
        self.on_open: Callable[[LowerTier], None] | None = None
        self.on_usable: Callable[[], None] | None = None
        self._shared = shared
        self._index = index
        self._period_seconds = float(live.breaker.period_seconds)
        now = shared.clock()
        self.all = [
            LowerTier(
                i + 1, tier, live.tiers.get(tier.name, LiveTier()), threads[i], live.breaker.failure_threshold, now
            )
            for i, tier in enumerate(tiers)
        ]
        self.usable_bits = RAM_BITS
        self.configure(live)
        for lower in self.all:
            self._submit_open(lower)

    def configure(self, live: Live) -> None:
        """Takes over live settings. Tiers that the document does not name keep theirs."""
        self._period_seconds = float(live.breaker.period_seconds)
        for lower in self.all:
            lower.breaker.failure_threshold = live.breaker.failure_threshold
            if lower.next_look is not None:
                self._look_after_period(lower, lower.looked_at)
            settings = live.tiers.get(lower.name)
            if settings is None:
                self._shared.count("settings_missing", lower.name)
                continue
            lower.settings = settings
            lower.tier.configure(
                TierLimits(
                    capacity_bytes=sys.maxsize if settings.capacity_bytes is None else settings.capacity_bytes,
                    high_watermark_percent=settings.high_watermark_percent,
                    low_watermark_percent=settings.low_watermark_percent,
                    retention_seconds=settings.retention_seconds,
                    sync_data=settings.sync_data,
                )
            )

    def best_for(self, namespace: str, key: bytes, tried: int = 0) -> LowerTier | None:
        """The tier of highest weight that may be used, holds the key, and is not among the bits ``tried``; ties to the
        earlier."""
        bits = self._index.bits(namespace, key) & ~tried
        best: LowerTier | None = None
        now = self._shared.clock()
        for lower in self.all:
            if (
                bits & lower.bit
                and lower.usable
                and (best is None or lower.settings.load_weight > best.settings.load_weight)
                and not lower.negative.has(namespace, key, now)
            ):
                best = lower
        return best

    def note_error(self, lower: LowerTier, namespace: str, key: bytes, error: BaseException) -> None:
        """An operation on one object ended with an error. Vanished objects and full tiers are no failures of the
        tier."""
        now = self._shared.clock()
        reason = self._reason(lower, error)
        if reason in ("corrupt", "vanished", "unverifiable"):
            lower.negative.add(namespace, key, now)
        self._note_failure(lower, error)

    def _reason(self, lower: LowerTier, error: BaseException) -> str:
        """The word under which an error of this tier is counted, which shall be seen wherever it is looked for."""
        reason = reason_of(error)
        lower.last_error = f"{reason}: {error}"
        self._shared.unexpected.note(f"tier {lower.name}", error)
        return reason

    def _note_failure(self, lower: LowerTier, error: BaseException) -> None:
        if isinstance(error, TierMissError | TierNoSpaceError):
            return
        if lower.breaker.failure(reason_of(error), self._shared.clock()):
            self._opened(lower)

    def note_late(self, lower: LowerTier) -> None:
        """A read made somebody miss a deadline, has taken too long itself, and is still running."""
        now = self._shared.clock()
        self._shared.count("tier_late_reads", lower.name)
        lower.late_reads += 1
        lower.last_error = f"late: a read has taken more than {lower.late_seconds:.3g} s"
        opened = lower.breaker.failure("late", now)
        if 2 * lower.late_reads >= lower.read_threads:
            opened = lower.breaker.trip("hung", now) or opened
        if opened:
            self._opened(lower)

    def _opened(self, lower: LowerTier) -> None:
        shared = self._shared
        shared.count("breaker_opened", lower.name, lower.breaker.cause)
        self._look_after_period(lower, shared.clock())
        self._announce_usable()
        if self.on_open is not None:
            self.on_open(lower)

    def _look_after_period(self, lower: LowerTier, since: float) -> None:
        """Has the tier looked at one period after ``since``; a period that is changed meanwhile holds for this one, too."""
        if lower.next_look is not None:
            lower.next_look.cancel()
        lower.looked_at = since
        lower.next_look = self._shared.timers.at(since + self._period_seconds, partial(self._probe, lower))

    def _probe(self, lower: LowerTier) -> None:
        lower.next_look = None
        if not lower.opened:
            self._submit_open(lower)
            return
        Job(self._shared.clock, lower.tier.check, partial(self._probed, lower)).submit(
            self._shared.io, f"check:{lower.name}"
        )

    def _probed(self, lower: LowerTier, _result: object, error: BaseException | None) -> None:
        shared = self._shared
        if isinstance(error, TierNoSpaceError):
            # It answers, and what it holds can be read; stores find out for themselves.
            error = None
        if error is None and 2 * lower.late_reads < lower.read_threads:
            lower.breaker.close(shared.clock())
            shared.count("breaker_closed", lower.name)
            self._usable_now()
            return
        reason = "hung" if error is None else self._reason(lower, error)
        shared.count("breaker_probe_failed", lower.name, reason)
        self._look_after_period(lower, shared.clock())

    def _submit_open(self, lower: LowerTier) -> None:
        def announce(namespace: str, key: bytes, present: bool) -> None:
            self._index.changes.put(namespace, key, lower.index, present)

        call = partial(lower.tier.open, announce)
        Job(self._shared.clock, call, partial(self._open_ended, lower)).submit(
            self._shared.io, f"maintain:{lower.name}"
        )

    def _open_ended(self, lower: LowerTier, _result: object, error: BaseException | None) -> None:
        shared = self._shared
        if error is None:
            lower.opened = True
            self._count_left_out(lower)
            lower.breaker.close(shared.clock())
            shared.timers.at(shared.clock() + MAINTAIN_SECONDS, partial(self._maintain, lower))
            self._usable_now()
            return
        reason = self._reason(lower, error)
        shared.count("tier_open_failed", lower.name, reason)
        lower.breaker.trip(reason, shared.clock())
        self._look_after_period(lower, shared.clock())

    def _usable_now(self) -> None:
        self._announce_usable()
        if self.on_usable is not None:
            self.on_usable()

    def _announce_usable(self) -> None:
        bits = RAM_BITS
        for lower in self.all:
            bits |= lower.bit if lower.usable else 0
        if bits != self.usable_bits:
            self.usable_bits = bits
            self._shared.emit(TiersUsable(bits))

    def _maintain(self, lower: LowerTier) -> None:
        shared = self._shared
        if lower.breaker.open:
            shared.timers.at(shared.clock() + MAINTAIN_SECONDS, partial(self._maintain, lower))
            return
        Job(shared.clock, lower.tier.maintain, partial(self._maintained, lower)).submit(
            shared.io, f"maintain:{lower.name}"
        )

    def _maintained(self, lower: LowerTier, _result: object, error: BaseException | None) -> None:
        shared = self._shared
        if error is not None:
            reason = self._reason(lower, error)
            lower.last_error = f"maintenance: {reason}: {error}"
            shared.count("tier_maintain_failed", lower.name, reason)
            self._note_failure(lower, error)
        self._count_left_out(lower)
        shared.timers.at(shared.clock() + MAINTAIN_SECONDS, partial(self._maintain, lower))

    def _count_left_out(self, lower: LowerTier) -> None:
        total = lower.tier.usage().left_out_total
        if total > lower.left_out:
            self._shared.count("tier_objects_not_indexed", lower.name, "", total - lower.left_out)
            lower.left_out = total

    def state(self, lower: LowerTier) -> TierState:
        """The tier as it is reported."""
        if lower.breaker.open:
            state = "BreakerOpen"
        elif not lower.opened:
            state = "Unknown"
        else:
            state = "Degraded" if lower.breaker.failures or lower.late_reads else "Healthy"
        usage = lower.tier.usage()
        return TierState(
            lower.name,
            state,
            usage.used_bytes,
            usage.capacity_bytes,
            usage.objects,
            lower.pending_store_bytes,
            lower.last_error,
            lower.breaker.cause,
            lower.breaker.since,
            lower.late_reads,
        )
