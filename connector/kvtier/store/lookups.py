"""Looks up, in the tiers themselves, keys that no index has: another process may have stored them.

The keys of a prefix are asked for from the first unknown one on, one at first and then twice as
many at a time, until one is not there. A lookup ends within the ``lookupTimeoutMilliseconds`` of
each tier asked, and within the time that the caller allows; what is not answered by then counts as
absent. An answer that comes later still enters the index.

A tier is not asked while too many of its lookups have not returned, and for a key that was absent
just now. One whose lookups take longer than a request may wait is tried again from time to time.
Only the store's thread uses this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.store.context import StoreContext, Timer
from kvtier.store.executor import IoCall
from kvtier.store.presence import PresenceIndex
from kvtier.store.secondary_tier import SecondaryTiers, reason_of
from kvtier.store.tier_group import SecondaryTier
from kvtier.tiers.base import ObjectRef

LOOKUP_THREADS = 4
MAX_CALLS = 32
"""Calls of one tier that have not returned."""
MAX_LATE = LOOKUP_THREADS // 2
"""Calls of one tier that were given up and still run: with more of them the tier hangs."""
MAX_KEYS_AT_ONCE = 16
ABSENT_SECONDS = 1.0
"""How long a key that was absent is not asked for again. Announcements arrive by then."""
MAX_ABSENT = 4_096
RETRY_SECONDS = 30.0
"""How often a tier is tried whose lookups are too slow."""
_AVERAGE_WEIGHT = 0.2


class _TierPace:
    """How fast the lookups of one tier are. ``calls``: that have not returned; ``late``: of these,
    the ones that no request waits for."""

    __slots__ = ("asked_at", "average_seconds", "calls", "late")

    def __init__(self) -> None:
        self.calls = 0
        self.late = 0
        self.average_seconds = 0.0
        self.asked_at = float("-inf")

    def observe(self, seconds: float) -> None:
        self.average_seconds += _AVERAGE_WEIGHT * (seconds - self.average_seconds)


class _KeyLookup:
    """One key of a lookup in one tier. ``call``: set once it is submitted. ``late``: it was given
    up and runs."""

    __slots__ = ("call", "late", "lookup", "ref", "secondary")

    def __init__(self, lookup: _Lookup, secondary: SecondaryTier, ref: ObjectRef) -> None:
        self.lookup = lookup
        self.secondary = secondary
        self.ref = ref
        self.call: IoCall | None = None
        self.late = False


class _Lookup:
    """One lookup, which has come to the key at ``position``. ``waiting``: calls for the present
    keys that have not returned, in the order in which they were made."""

    __slots__ = (
        "asked", "done", "ended", "keys", "namespace", "position", "timers", "waiting", "width",
    )  # fmt: skip

    def __init__(self, namespace: str, keys: Sequence[bytes], done: Callable[[], None]) -> None:
        self.namespace = namespace
        self.keys = keys
        self.done = done
        self.position = 0
        self.width = 1
        self.asked: list[SecondaryTier] = []
        self.waiting: dict[_KeyLookup, None] = {}
        self.timers: list[Timer] = []
        self.ended = False


class TierLookups:
    """All lookups."""

    def __init__(self, context: StoreContext, index: PresenceIndex, tiers: SecondaryTiers) -> None:
        self._context = context
        self._index = index
        self._tiers = tiers
        self._paces = {secondary: _TierPace() for secondary in tiers.all}
        self._absent: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def begin(
        self, namespace: str, keys: Sequence[bytes], seconds: float, done: Callable[[], None]
    ) -> bool:
        """Looks up ``keys``, which no usable tier's index has, and calls ``done`` within
        ``seconds``. False, without a call, if no tier is to be asked."""
        now = self._context.clock()
        if not keys or seconds <= 0 or self._absent.get((namespace, keys[0]), now) > now:
            return False
        lookup = _Lookup(namespace, keys, done)
        for secondary in self._tiers.all:
            if not secondary.usable or not secondary.tier.asks_on_miss:
                continue
            limit = min(seconds, secondary.settings.lookup_timeout_milliseconds / 1e3)
            reason = self._skip_reason(secondary, limit, now)
            if reason:
                self._context.count("tier_lookups", secondary.name, reason)
                continue
            lookup.asked.append(secondary)
            lookup.timers.append(
                self._context.timers.at(now + limit, partial(self._time_out, lookup, secondary))
            )
        if not lookup.asked:
            return False
        self._ask(lookup)
        return True

    def _skip_reason(self, secondary: SecondaryTier, limit: float, now: float) -> str:
        pace = self._paces[secondary]
        if pace.calls >= MAX_CALLS or pace.late >= MAX_LATE:
            return "busy"
        if pace.average_seconds > limit and now - pace.asked_at < RETRY_SECONDS:
            return "too_slow"
        return ""

    def _ask(self, lookup: _Lookup) -> None:
        """Asks every tier for the next keys."""
        context = self._context
        for key in lookup.keys[lookup.position : lookup.position + lookup.width]:
            for secondary in lookup.asked:
                pace = self._paces[secondary]
                pace.asked_at = context.clock()
                pace.calls += 1
                one = _KeyLookup(lookup, secondary, ObjectRef(lookup.namespace, key))
                lookup.waiting[one] = None
                work = partial(secondary.tier.probe, one.ref)
                one.call = IoCall(context.clock, work, partial(self._returned, one))
        for one in list(lookup.waiting):
            if one.call is not None:
                one.call.submit(context.io, f"lookup:{one.secondary.lane}")

    def _returned(self, one: _KeyLookup, result: object, error: BaseException | None) -> None:
        lookup, secondary, call = one.lookup, one.secondary, one.call
        pace = self._paces[secondary]
        pace.calls -= 1
        pace.late -= one.late
        if call is not None:
            pace.observe(call.seconds(self._context.clock()))
        if error is not None:
            self._context.count("tier_lookups_failed", secondary.name, reason_of(error))
            self._tiers.note_error(secondary, one.ref.namespace, one.ref.key, error)
        elif result:
            self._context.count("tier_lookups", secondary.name, "found")
            # Asked at this moment, so that a later announcement of the tier comes after it.
            if secondary.tier.contains(one.ref):
                self._index.change(one.ref.namespace, one.ref.key, secondary.bit, True)
        else:
            self._context.count("tier_lookups", secondary.name, "absent")
        lookup.waiting.pop(one, None)
        if not lookup.ended and not lookup.waiting:
            self._go_on(lookup)

    def _go_on(self, lookup: _Lookup) -> None:
        """The present keys are answered, or given up."""
        end = min(lookup.position + lookup.width, len(lookup.keys))
        for position in range(lookup.position, end):
            key = lookup.keys[position]
            if not self._index.bits(lookup.namespace, key) & self._tiers.usable_bits:
                self._note_absent(lookup.namespace, key)
                end = 0
                break
        if not end or end == len(lookup.keys) or not lookup.asked:
            self._end(lookup)
            return
        lookup.position = end
        lookup.width = min(2 * lookup.width, MAX_KEYS_AT_ONCE)
        self._ask(lookup)

    def _note_absent(self, namespace: str, key: bytes) -> None:
        self._absent.pop((namespace, key), None)
        self._absent[namespace, key] = self._context.clock() + ABSENT_SECONDS
        if len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def _time_out(self, lookup: _Lookup, secondary: SecondaryTier) -> None:
        """This tier is not waited for any longer."""
        if lookup.ended:
            return
        lookup.asked.remove(secondary)
        for one in [each for each in lookup.waiting if each.secondary is secondary]:
            del lookup.waiting[one]
            self._context.count("tier_lookups", secondary.name, "timed_out")
            pace = self._paces[secondary]
            if one.call is not None and one.call.revoke():
                pace.calls -= 1
            else:
                one.late = True
                pace.late += 1
        if not lookup.waiting:
            self._go_on(lookup)

    def _end(self, lookup: _Lookup) -> None:
        lookup.ended = True
        for timer in lookup.timers:
            timer.cancel()
        lookup.done()
