"""State of each secondary tier: whether it may be used, how fast it is, and what is in progress.

``SecondaryTiers`` opens, probes and maintains the tiers, and suspends one whose breaker opens. It
neither reads nor writes objects: ``tier_reads`` and ``write_through`` do, and report errors here.
Only the store's thread uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvtier.config.models import Live, LiveTier
from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierKeyMissingError,
    TierMissError,
    TierNoSpaceError,
    TierQuotaError,
)
from kvtier.store.context import StoreContext
from kvtier.store.executor import IoCall
from kvtier.store.presence import PresenceIndex
from kvtier.store.tier_group import FULL_SECONDS, SecondaryTier, TierGroup, TierPlace
from kvtier.store.tier_health import TierBreaker
from kvtier.store.types import RAM_BITS, Clock, UsableTiersChanged
from kvtier.tiers.base import ObjectRef, Tier
from kvtier.tiers.volume_set import VolumeSet

BURST_SECONDS = 1.0


class WriteBudget:
    """Token bucket that limits the bytes written to a tier per second, to spare flash.

    A full bucket holds what one second may bring. An object is admitted while the bucket is not
    empty, and may leave it in debt. So objects larger than one second's worth are written, and no
    interval sees more than rate x time + one second's worth + one object. The rate (bytes per
    second, None for no limit) is passed with each call, because it is a live value.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate: int | None = None
        self._left = 0.0
        self._at = 0.0

    def take(self, size_bytes: int, rate: int | None) -> bool:
        """Takes ``size_bytes`` from the budget; False if it is exhausted."""
        if self.seconds_until_free(rate) > 0:
            return False
        if rate is not None:
            self._left -= size_bytes
        return True

    def seconds_until_free(self, rate: int | None) -> float:
        """How long until ``take`` succeeds; 0 if it would at once."""
        now = self._clock()
        if rate is None:
            self._rate = None
            return 0.0
        full = rate * BURST_SECONDS
        if self._rate is None:
            self._left = full
        else:
            self._left = min(full, self._left + self._rate * (now - self._at))
        self._rate, self._at = rate, now
        # A thousandth of a second's worth more than nothing, so that rounding is no exhaustion.
        return (full / 1000 - self._left) / rate if self._left <= 0 else 0.0

    def give_back(self, size_bytes: int) -> None:
        """Returns bytes that were taken and are not written."""
        self._left += size_bytes


MAINTAIN_SECONDS = 5.0
DEFAULT_THREADS = 8


def _members(
    index: int, tier: Tier, threads: Mapping[str, int], live: Live, now: float
) -> Iterator[SecondaryTier]:
    settings = live.tiers.get(tier.name, LiveTier())
    for part in tier.volumes if isinstance(tier, VolumeSet) else (tier,):
        place = TierPlace(index, tier.name, "" if part is tier else part.name)
        breaker = TierBreaker(live.breaker.failure_threshold, now)
        count = threads.get(f"read:{place.lane}", DEFAULT_THREADS)
        found = SecondaryTier(place, part, settings, count, breaker, now)
        found.write_threads = threads.get(f"write:{place.lane}", DEFAULT_THREADS)
        yield found


def reason_of(error: BaseException) -> str:
    """The ``reason`` of counters for this error."""
    return error.reason if isinstance(error, TierError) else "unexpected"


class SecondaryTiers:
    """All secondary tiers, their breakers and their maintenance.

    ``usable_bits``: presence bits of RAM and of the tiers that may be used. Schedulers are notified
    of changes, so that no request waits for keys that only a suspended tier has. The tier's keys
    stay in the index: the notification costs the same whatever their number. If one volume of a
    tier is suspended, the tier is listed again without its keys.

    ``groups``: the tiers in the order of the topology. ``all``: their members, one for each volume.
    """

    def __init__(
        self,
        context: StoreContext,
        index: PresenceIndex,
        tiers: Sequence[Tier],
        threads: Mapping[str, int],
        live: Live,
    ) -> None:
        self._suspend_handlers: list[Callable[[SecondaryTier], None]] = []
        self._available_handlers: list[Callable[[], None]] = []
        self._context = context
        self._index = index
        self._period_seconds = float(live.breaker.period_seconds)
        self.groups = [
            TierGroup(tier, list(_members(i + 1, tier, threads, live, context.clock())))
            for i, tier in enumerate(tiers)
        ]
        self.all = [member for group in self.groups for member in group.members]
        self._group_of = {member: group for group in self.groups for member in group.members}
        self.usable_bits = RAM_BITS
        self.asked_bits = 0
        """Of the usable tiers that are asked for keys that the index lacks."""
        self.configure(live)
        for secondary in self.all:
            self._submit_open(secondary)

    def on_suspend(self, handler: Callable[[SecondaryTier], None]) -> None:
        """Registers a handler for tiers whose breaker opens. It drops the tier's calls that have
        not started."""
        self._suspend_handlers.append(handler)

    def on_available(self, handler: Callable[[], None]) -> None:
        """Registers a handler that is called when a tier can be used, for the first time or
        again."""
        self._available_handlers.append(handler)

    def configure(self, live: Live) -> None:
        """Applies live settings. Tiers without settings retain theirs."""
        self._period_seconds = float(live.breaker.period_seconds)
        for secondary in self.all:
            secondary.breaker.failure_threshold = live.breaker.failure_threshold
            if secondary.next_check is not None:
                self._schedule_check(secondary, secondary.checked_at)
        for group in self.groups:
            settings = live.tiers.get(group.name)
            if settings is None:
                self._context.count("settings_missing", group.name)
            else:
                group.configure(settings, live.tenants.max_percent)

    def group_of(self, secondary: SecondaryTier) -> TierGroup:
        """The tier that this is, or is a volume of."""
        return self._group_of[secondary]

    def target(self, group: TierGroup, ref: ObjectRef) -> SecondaryTier:
        """The member that a new object belongs to."""
        return group.target(ref, self._context.clock())

    def holds(self, namespace: str, key: bytes) -> bool:
        """Whether the key is in RAM or in a usable tier, as far as the index knows."""
        return bool(self._index.bits(namespace, key) & self.usable_bits)

    def best_for(self, namespace: str, key: bytes, excluded_bits: int = 0) -> SecondaryTier | None:
        """The usable tier of highest weight that holds the key and is not among ``excluded_bits``;
        ties to the earlier."""
        bits = self._index.bits(namespace, key) & ~excluded_bits
        best: SecondaryTier | None = None
        now = self._context.clock()
        for group in self.groups:
            if bits & group.bit and (
                best is None or group.settings.load_weight > best.settings.load_weight
            ):
                best = group.holder(namespace, key, now) or best
        return best

    def note_error(
        self, secondary: SecondaryTier, namespace: str, key: bytes, error: BaseException
    ) -> None:
        """An operation on one object failed. Vanished objects and full tiers do not count against
        the tier."""
        now = self._context.clock()
        self._reason(secondary, error)
        if isinstance(error, TierMissError | TierCorruptError):
            secondary.negative.add(namespace, key, now)
        if isinstance(error, TierNoSpaceError) and not isinstance(error, TierQuotaError):
            secondary.full_until = now + FULL_SECONDS
        self._note_failure(secondary, error)

    def _reason(self, secondary: SecondaryTier, error: BaseException) -> str:
        """The ``reason`` of counters for this error. Also sets the tier's last error, and logs an
        unexpected one."""
        reason = reason_of(error)
        secondary.last_error = f"{reason}: {error}"
        self._context.unexpected.note(f"tier {secondary.name}", error)
        return reason

    def _note_failure(self, secondary: SecondaryTier, error: BaseException) -> None:
        if isinstance(error, TierMissError | TierNoSpaceError):
            return
        reason, now = reason_of(error), self._context.clock()
        opened = secondary.breaker.failure(reason, now)
        if isinstance(error, TierKeyMissingError):
            # Without keys no operation can succeed.
            opened = secondary.breaker.trip(reason, now) or opened
        if opened:
            self._suspend(secondary)

    def note_late_read(self, secondary: SecondaryTier) -> None:
        """A read that a deadline was missed for has taken too long and is still running."""
        now = self._context.clock()
        self._context.count("tier_late_reads", secondary.name)
        secondary.late_reads += 1
        secondary.last_error = f"late: a read has taken more than {secondary.late_seconds:.3g} s"
        opened = secondary.breaker.failure("late", now)
        if 2 * secondary.late_reads >= secondary.read_threads:
            opened = secondary.breaker.trip("hung", now) or opened
        if opened:
            self._suspend(secondary)

    def note_late_writes(self, secondary: SecondaryTier, number: int, *, stuck: bool) -> None:
        """So many more writes have taken too long and are still running. ``stuck``: no other write
        of this one runs, and some wait for it."""
        secondary.late_writes += number
        secondary.last_error = (
            f"late: a write has taken more than {secondary.late_write_seconds:.3g} s"
        )
        # Without another volume that takes them, they would only wait elsewhere.
        several = len(self.group_of(secondary).members) > 1
        hung = stuck or 2 * secondary.late_writes >= secondary.write_threads
        if several and hung and secondary.breaker.trip("hung", self._context.clock()):
            self._suspend(secondary)

    def _suspend(self, secondary: SecondaryTier) -> None:
        context = self._context
        context.count("breaker_opened", secondary.name, secondary.breaker.cause)
        self._set_serving(secondary, False)
        self._schedule_check(secondary, context.clock())
        self._announce_usable()
        for handler in self._suspend_handlers:
            handler(secondary)

    def _set_serving(self, secondary: SecondaryTier, serving: bool) -> None:
        if self.group_of(secondary).set_serving(secondary, serving):
            self._index.changes.relist(secondary.index)

    def _schedule_check(self, secondary: SecondaryTier, since: float) -> None:
        """Schedules a check one period after ``since``. A change of the period applies to a
        scheduled check as well."""
        if secondary.next_check is not None:
            secondary.next_check.cancel()
        secondary.checked_at = since
        secondary.next_check = self._context.timers.at(
            since + self._period_seconds, partial(self._probe, secondary)
        )

    def check_suspended(self, cause: str) -> None:
        """Checks tiers that are suspended for this cause now, not when their period has passed."""
        for secondary in self.all:
            waiting = secondary.next_check
            if secondary.breaker.open and secondary.breaker.cause == cause and waiting is not None:
                waiting.cancel()
                secondary.checked_at = self._context.clock()
                self._probe(secondary)

    def _probe(self, secondary: SecondaryTier) -> None:
        secondary.next_check = None
        if not secondary.opened:
            self._submit_open(secondary)
            return
        IoCall(self._context.clock, secondary.tier.check, partial(self._probed, secondary)).submit(
            self._context.io, f"check:{secondary.lane}"
        )

    def _probed(
        self, secondary: SecondaryTier, _result: object, error: BaseException | None
    ) -> None:
        context = self._context
        if isinstance(error, TierNoSpaceError):
            # A full tier answers, and can be read. Writes find out for themselves.
            error = None
        hung = (
            2 * secondary.late_reads >= secondary.read_threads
            or 2 * secondary.late_writes >= secondary.write_threads
        )
        if error is None and not hung:
            secondary.breaker.close(context.clock())
            context.count("breaker_closed", secondary.name)
            self._set_serving(secondary, True)
            self._resume()
            return
        reason = "hung" if error is None else self._reason(secondary, error)
        context.count("breaker_probe_failed", secondary.name, reason)
        self._schedule_check(secondary, context.clock())

    def _submit_open(self, secondary: SecondaryTier) -> None:
        def announce(namespace: str, key: bytes, present: bool) -> None:
            self._index.changes.put(namespace, key, secondary.index, present)

        call = partial(secondary.tier.open, announce)
        IoCall(self._context.clock, call, partial(self._open_ended, secondary)).submit(
            self._context.io, f"maintain:{secondary.lane}"
        )

    def _open_ended(
        self, secondary: SecondaryTier, _result: object, error: BaseException | None
    ) -> None:
        context = self._context
        if error is None:
            secondary.opened = True
            self._count_totals(secondary)
            secondary.breaker.close(context.clock())
            self._set_serving(secondary, True)
            context.timers.at(
                context.clock() + MAINTAIN_SECONDS, partial(self._maintain, secondary)
            )
            self._resume()
            return
        reason = self._reason(secondary, error)
        context.count("tier_open_failed", secondary.name, reason)
        secondary.breaker.trip(reason, context.clock())
        self._set_serving(secondary, False)
        self._schedule_check(secondary, context.clock())

    def _resume(self) -> None:
        self._announce_usable()
        for handler in self._available_handlers:
            handler()

    def _announce_usable(self) -> None:
        bits, asked = RAM_BITS, 0
        for group in self.groups:
            if group.usable:
                bits |= group.bit
                asked |= group.bit if group.tier.asks_on_miss else 0
        if (bits, asked) != (self.usable_bits, self.asked_bits):
            self.usable_bits, self.asked_bits = bits, asked
            self._context.emit(UsableTiersChanged(bits))

    def _maintain(self, secondary: SecondaryTier) -> None:
        context = self._context
        if secondary.breaker.open:
            context.timers.at(
                context.clock() + MAINTAIN_SECONDS, partial(self._maintain, secondary)
            )
            return
        IoCall(context.clock, secondary.tier.maintain, partial(self._maintained, secondary)).submit(
            context.io, f"maintain:{secondary.lane}"
        )

    def _maintained(
        self, secondary: SecondaryTier, _result: object, error: BaseException | None
    ) -> None:
        context = self._context
        if error is not None:
            reason = self._reason(secondary, error)
            secondary.last_error = f"maintenance: {reason}: {error}"
            context.count("tier_maintain_failed", secondary.name, reason)
            self._note_failure(secondary, error)
        self._count_totals(secondary)
        self._announce_usable()
        context.timers.at(context.clock() + MAINTAIN_SECONDS, partial(self._maintain, secondary))

    def _count_totals(self, secondary: SecondaryTier) -> None:
        total = secondary.tier.usage().unindexed_total
        if total > secondary.unindexed:
            self._context.count(
                "tier_objects_not_indexed", secondary.name, "", total - secondary.unindexed
            )
            secondary.unindexed = total
        for (name, reason), total in secondary.tier.counts().items():
            more = total - secondary.counted.get((name, reason), 0)
            if more > 0:
                self._context.count(name, secondary.name, reason, more)
                secondary.counted[name, reason] = total
