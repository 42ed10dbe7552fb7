"""Giving a tier up for a while, and remembering single objects that were bad.

Pure state: time is passed in. What counts as a failure is decided by the caller (DATAPATH 2).

How many bytes a tier may be given in a second: a token bucket, which spares flash.

Full, it holds what one second may bring. An object is taken for as long as there is anything in it, and may leave a debt: so objects that
are larger than a second's worth are written all the same, and over any time no more is than rate x time + one second's worth + one
object.

What the store knows about each lower tier: whether it may be used, how fast it is, what is under way there.

Nothing here reads or writes objects; reads.py and writes.py do, and report what happened.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.config.models import Live, LiveTier
from kvtier.errors import TierError, TierMissError, TierNoSpaceError
from kvtier.store.context import StoreContext, Timer
from kvtier.store.cost_model import TierModel
from kvtier.store.executor import IoCall
from kvtier.store.presence import PresenceIndex
from kvtier.store.types import MEMORY_BIT, RAM_BITS, Clock, UsableTiersChanged
from kvtier.tiers.base import Tier, TierLimits

NEGATIVE_SECONDS = 30.0
"""How long a corrupt or vanished object is not asked for again (DATAPATH 2)."""
MAX_NEGATIVE = 65_536


class TierBreaker:
    """Closed: the tier is used. Open: it is not. ``cause`` and ``since`` belong to the state it is in."""

    def __init__(self, failure_threshold: int, now: float) -> None:
        self.failure_threshold = failure_threshold
        self.open = False
        self.cause = ""
        self.since = now
        self.failures = 0

    def success(self) -> None:
        """The tier did what it was asked: the row of failures ends."""
        self.failures = 0

    def failure(self, cause: str, now: float) -> bool:
        """The tier failed; True if this opened the breaker."""
        self.failures += 1
        if self.open or self.failures < self.failure_threshold:
            return False
        return self.trip(cause, now)

    def trip(self, cause: str, now: float) -> bool:
        """Opens the breaker at once; True if it was closed."""
        if self.open:
            return False
        self.open, self.cause, self.since = True, cause, now
        return True

    def close(self, now: float) -> None:
        """A probe succeeded."""
        self.open, self.cause, self.since, self.failures = False, "", now, 0


class NegativeCache:
    """Objects of one tier that are not to be asked for until a time; the oldest are forgotten beyond
    ``MAX_NEGATIVE``."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def add(self, namespace: str, key: bytes, now: float) -> None:
        """The object turned out corrupt or vanished."""
        self._until.pop((namespace, key), None)
        self._until[namespace, key] = now + NEGATIVE_SECONDS
        if len(self._until) > MAX_NEGATIVE:
            self._until.popitem(last=False)

    def discard(self, namespace: str, key: bytes) -> None:
        """The object was written anew."""
        self._until.pop((namespace, key), None)

    def has(self, namespace: str, key: bytes, now: float) -> bool:
        """Whether the object is not to be asked for."""
        if not self._until:
            return False
        until = self._until.get((namespace, key))
        if until is None:
            return False
        if until <= now:
            del self._until[namespace, key]
            return False
        return True


BURST_SECONDS = 1.0


class WriteBudget:
    """The budget of one tier. Owner's thread only. The rate (bytes a second, None for no limit) is named with each question, because it
    is a live value."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate: int | None = None
        self._left = 0.0
        self._at = 0.0

    def take(self, size_bytes: int, rate: int | None) -> bool:
        """Whether so many bytes may be written now; then they are taken."""
        now = self._clock()
        if rate is None:
            self._rate = None
            return True
        full = rate * BURST_SECONDS
        if self._rate is None:
            self._left = full
        else:
            self._left = min(full, self._left + self._rate * (now - self._at))
        self._rate, self._at = rate, now
        if self._left <= 0:
            return False
        self._left -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """What was taken is not written after all."""
        self._left += size_bytes


MIN_LATE_SECONDS = 1.0
LATE_FACTOR = 3.0
"""A read is late, and a missed deadline its fault, when it took more than ``max(3 x its estimate, 1 s)`` (DATAPATH
2)."""
AVERAGE_WEIGHT = 0.2
"""Share of the latest read in the running average: follows a change within about ten reads."""
MAINTAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TierSnapshot:
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


class SecondaryTier:
    """One lower tier. ``index``: its position in the document; ``late_reads``: reads that count as hung and have not
    returned."""

    def __init__(
        self, index: int, tier: Tier, settings: LiveTier, threads: int, threshold: int, now: float
    ) -> None:
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
        self.average_read_seconds = (
            seconds if old is None else old + AVERAGE_WEIGHT * (seconds - old)
        )


class SecondaryTiers:
    """All lower tiers, their breakers and their upkeep. Owner's thread only.

    ``on_open`` is called when a breaker opens: nothing that has not begun may begin at that tier. ``on_usable`` is called
    when a tier can be used, for the first time or again.
    ``usable_bits``: of RAM and the tiers that may be used. Schedulers are told when they change, so that nobody waits a step for
    what lies only in a tier that is given up; the tier's keys stay in the index, and announcing that costs nothing however many they are.
    """

    def __init__(
        self,
        shared: StoreContext,
        index: PresenceIndex,
        tiers: Sequence[Tier],
        threads: Sequence[int],
        live: Live,
    ) -> None:
        self.on_open: Callable[[SecondaryTier], None] | None = None
        self.on_usable: Callable[[], None] | None = None
        self._shared = shared
        self._index = index
        self._period_seconds = float(live.breaker.period_seconds)
        now = shared.clock()
        self.all = [
            SecondaryTier(
                i + 1,
                tier,
                live.tiers.get(tier.name, LiveTier()),
                threads[i],
                live.breaker.failure_threshold,
                now,
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
                    capacity_bytes=sys.maxsize
                    if settings.capacity_bytes is None
                    else settings.capacity_bytes,
                    high_watermark_percent=settings.high_watermark_percent,
                    low_watermark_percent=settings.low_watermark_percent,
                    retention_seconds=settings.retention_seconds,
                    sync_data=settings.sync_data,
                )
            )

    def best_for(self, namespace: str, key: bytes, tried: int = 0) -> SecondaryTier | None:
        """The tier of highest weight that may be used, holds the key, and is not among the bits ``tried``; ties to the
        earlier."""
        bits = self._index.bits(namespace, key) & ~tried
        best: SecondaryTier | None = None
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

    def note_error(
        self, lower: SecondaryTier, namespace: str, key: bytes, error: BaseException
    ) -> None:
        """An operation on one object ended with an error. Vanished objects and full tiers are no failures of the
        tier."""
        now = self._shared.clock()
        reason = self._reason(lower, error)
        if reason in ("corrupt", "vanished", "unverifiable"):
            lower.negative.add(namespace, key, now)
        self._note_failure(lower, error)

    def _reason(self, lower: SecondaryTier, error: BaseException) -> str:
        """The word under which an error of this tier is counted, which shall be seen wherever it is looked for."""
        reason = reason_of(error)
        lower.last_error = f"{reason}: {error}"
        self._shared.unexpected.note(f"tier {lower.name}", error)
        return reason

    def _note_failure(self, lower: SecondaryTier, error: BaseException) -> None:
        if isinstance(error, TierMissError | TierNoSpaceError):
            return
        if lower.breaker.failure(reason_of(error), self._shared.clock()):
            self._opened(lower)

    def note_late(self, lower: SecondaryTier) -> None:
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

    def _opened(self, lower: SecondaryTier) -> None:
        shared = self._shared
        shared.count("breaker_opened", lower.name, lower.breaker.cause)
        self._look_after_period(lower, shared.clock())
        self._announce_usable()
        if self.on_open is not None:
            self.on_open(lower)

    def _look_after_period(self, lower: SecondaryTier, since: float) -> None:
        """Has the tier looked at one period after ``since``; a period that is changed meanwhile holds for this one, too."""
        if lower.next_look is not None:
            lower.next_look.cancel()
        lower.looked_at = since
        lower.next_look = self._shared.timers.at(
            since + self._period_seconds, partial(self._probe, lower)
        )

    def _probe(self, lower: SecondaryTier) -> None:
        lower.next_look = None
        if not lower.opened:
            self._submit_open(lower)
            return
        IoCall(self._shared.clock, lower.tier.check, partial(self._probed, lower)).submit(
            self._shared.io, f"check:{lower.name}"
        )

    def _probed(self, lower: SecondaryTier, _result: object, error: BaseException | None) -> None:
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

    def _submit_open(self, lower: SecondaryTier) -> None:
        def announce(namespace: str, key: bytes, present: bool) -> None:
            self._index.changes.put(namespace, key, lower.index, present)

        call = partial(lower.tier.open, announce)
        IoCall(self._shared.clock, call, partial(self._open_ended, lower)).submit(
            self._shared.io, f"maintain:{lower.name}"
        )

    def _open_ended(
        self, lower: SecondaryTier, _result: object, error: BaseException | None
    ) -> None:
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
            self._shared.emit(UsableTiersChanged(bits))

    def _maintain(self, lower: SecondaryTier) -> None:
        shared = self._shared
        if lower.breaker.open:
            shared.timers.at(shared.clock() + MAINTAIN_SECONDS, partial(self._maintain, lower))
            return
        IoCall(shared.clock, lower.tier.maintain, partial(self._maintained, lower)).submit(
            shared.io, f"maintain:{lower.name}"
        )

    def _maintained(
        self, lower: SecondaryTier, _result: object, error: BaseException | None
    ) -> None:
        shared = self._shared
        if error is not None:
            reason = self._reason(lower, error)
            lower.last_error = f"maintenance: {reason}: {error}"
            shared.count("tier_maintain_failed", lower.name, reason)
            self._note_failure(lower, error)
        self._count_left_out(lower)
        shared.timers.at(shared.clock() + MAINTAIN_SECONDS, partial(self._maintain, lower))

    def _count_left_out(self, lower: SecondaryTier) -> None:
        total = lower.tier.usage().left_out_total
        if total > lower.left_out:
            self._shared.count("tier_objects_not_indexed", lower.name, "", total - lower.left_out)
            lower.left_out = total

    def state(self, lower: SecondaryTier) -> TierSnapshot:
        """The tier as it is reported."""
        if lower.breaker.open:
            state = "BreakerOpen"
        elif not lower.opened:
            state = "Unknown"
        else:
            state = "Degraded" if lower.breaker.failures or lower.late_reads else "Healthy"
        usage = lower.tier.usage()
        return TierSnapshot(
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
