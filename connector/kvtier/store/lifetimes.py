"""How long objects stay in RAM at the wish of requests: retained, pinned, or until they expire.

* A *retained* object is evicted after those that are not, for a time (``kvtier.prefix_order``).
* A *pinned* object is not evicted for a time, within a limit for all pinned bytes and one for those
  of a tenant. Another slot class may still take its segment over, as the pool must serve every
  model of the pod.
* An object with a *time to live* is not used after it, and is removed. The time is one of the wall
  clock, so that it holds after a restart and in files.

A wish is granted to the object's own bytes only: it never shortens what another request was
promised. Only the store's thread uses this module.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvtier.store.context import StoreContext, Timer
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.state import Entry
from kvtier.store.types import Owner
from kvtier.tenants import UNLIMITED

PIN_SECONDS = 3_600.0
"""How long a pin lasts after the last request that asked for it, if there is no time to live."""
RETRY_SECONDS = 1.0
"""An expired object that is being copied is removed after that."""
MAX_OUTDATED = 1_024


class Lifetimes:
    """The wishes that hold for objects in RAM. ``expire(entry)`` removes an object that nothing
    uses."""

    def __init__(self, context: StoreContext, resident: ResidentObjects, pool_bytes: int) -> None:
        self._context = context
        self._resident = resident
        self._pool_bytes = pool_bytes
        self._max_pinned_percent = 0
        self._due: list[tuple[float, int, Entry]] = []
        self._sequence = 0
        self._timer: Timer | None = None
        self._expire: Callable[[Entry], None] = self._ignore
        self.pinned_by: dict[bytes, int] = {}
        """Pinned bytes of each tenant, without a tenant included."""
        resident.on_removed(self._removed)

    @staticmethod
    def _ignore(_entry: Entry) -> None:
        return

    def on_expired(self, handler: Callable[[Entry], None]) -> None:
        """Registers what removes an object whose time has passed."""
        self._expire = handler

    def configure(self, max_pinned_percent: int) -> None:
        """Applies the limit for pinned bytes. What exceeds a lowered one is no longer pinned, the
        pins that end first going last."""
        self._max_pinned_percent = max_pinned_percent
        exceeded = any(size > self._limit_of(tenant) for tenant, size in self.pinned_by.items())
        if not exceeded and self.pinned_bytes <= self._limit_bytes:
            return
        pinned = [entry for entry in self._resident.entries() if entry.pinned_until]
        for entry in sorted(pinned, key=lambda each: -each.pinned_until):
            tenant = self.pinned_by.get(entry.account, 0)
            if self.pinned_bytes > self._limit_bytes or tenant > self._limit_of(entry.account):
                self._unpin(entry, "limit")

    @property
    def pinned_bytes(self) -> int:
        """Bytes that requests have pinned."""
        return sum(self.pinned_by.values())

    @property
    def _limit_bytes(self) -> int:
        return self._pool_bytes * self._max_pinned_percent // 100

    def _limit_of(self, tenant: bytes) -> int:
        share = self._resident.accounts.limit_bytes if tenant else UNLIMITED
        return min(self._limit_bytes, share * self._max_pinned_percent // 100)

    # Wishes.

    def stored(self, entry: Entry, owner: Owner) -> None:
        """A request has stored this object."""
        if owner.ttl_seconds > 0:
            entry.expires_at = int(self._context.wall()) + owner.ttl_seconds
        self.used(entry, owner)

    def stored_again(self, entry: Entry, owner: Owner) -> None:
        """A request would have stored this object, which is there. It would have lived longer for
        it, perhaps."""
        if entry.expires_at:
            until = int(self._context.wall()) + owner.ttl_seconds
            entry.expires_at = max(entry.expires_at, until) if owner.ttl_seconds > 0 else 0
        self.used(entry, owner)

    def used(self, entry: Entry, owner: Owner) -> None:
        """A request with these wishes uses an object in RAM."""
        now = self._context.clock()
        if owner.retain_seconds > 0:
            entry.retained_until = max(entry.retained_until, now + owner.retain_seconds)
            self._resident.retain(entry, True)
        if owner.pin:
            self._pin(entry, now + (owner.ttl_seconds if owner.ttl_seconds > 0 else PIN_SECONDS))
        if entry.expires_at or entry.retained_until or entry.pinned_until:
            self._schedule(entry)

    def _pin(self, entry: Entry, until: float) -> None:
        if entry.pinned_until:
            entry.pinned_until = max(entry.pinned_until, until)
            return
        if entry.unverified is not None or entry.evicting:
            self._context.count("pins_refused", "", "not_in_ram")
            return
        size, tenant = entry.slot_bytes, entry.account
        if self.pinned_bytes + size > self._limit_bytes:
            self._context.count("pins_refused", "", "tier_limit")
            return
        if self.pinned_by.get(tenant, 0) + size > self._limit_of(tenant):
            self._context.count("pins_refused", "", "tenant_limit")
            return
        self._context.count("pins")
        self.pinned_by[tenant] = self.pinned_by.get(tenant, 0) + size
        entry.pinned_until = until
        self._resident.keep(entry, True)

    def _unpin(self, entry: Entry, reason: str) -> None:
        self._context.count("pins_ended", "", reason)
        self._forget_pin(entry)
        self._resident.keep(entry, False)

    def _forget_pin(self, entry: Entry) -> None:
        entry.pinned_until = 0.0
        left = self.pinned_by[entry.account] - entry.slot_bytes
        if left:
            self.pinned_by[entry.account] = left
        else:
            del self.pinned_by[entry.account]

    def _removed(self, entry: Entry) -> None:
        """The object leaves RAM."""
        if entry.pinned_until:
            self._context.count("pins_ended", "", "reclaimed")
            self._forget_pin(entry)

    # Time.

    def restored(self, entry: Entry) -> None:
        """An object has come into RAM that may have a time to live."""
        if entry.expires_at:
            self._schedule(entry)

    def _due_at(self, entry: Entry) -> float:
        times = [at for at in (entry.retained_until, entry.pinned_until) if at]
        if entry.expires_at:
            left = max(entry.expires_at - self._context.wall(), 0.0)
            times.append(self._context.clock() + left)
        return min(times, default=0.0)

    def _schedule(self, entry: Entry, earliest: float = 0.0) -> None:
        due = max(self._due_at(entry), earliest)
        if not due or (entry.due_at and entry.due_at <= due):
            return
        entry.due_at = due
        if len(self._due) > MAX_OUTDATED + 2 * len(self._resident):
            self._due = [item for item in self._due if self._holds(item)]
            heapq.heapify(self._due)
        self._sequence += 1
        heapq.heappush(self._due, (due, self._sequence, entry))
        self._arm()

    def _holds(self, item: tuple[float, int, Entry]) -> bool:
        due, _, entry = item
        return entry.due_at == due and self._is_resident(entry)

    def _is_resident(self, entry: Entry) -> bool:
        return self._resident.get(entry.namespace, entry.key) is entry

    def _arm(self) -> None:
        due = self._due[0][0]
        if self._timer is not None and self._timer.call is not None:
            if self._timer.when <= due:
                return
            self._timer.cancel()
        self._timer = self._context.timers.at(due, self._run)

    def _run(self) -> None:
        self._timer = None
        now = self._context.clock()
        while self._due and self._due[0][0] <= now:
            item = heapq.heappop(self._due)
            if self._holds(item):
                item[2].due_at = 0.0
                self._end(item[2], now)
        if self._due:
            self._arm()

    def _end(self, entry: Entry, now: float) -> None:
        """Ends what is over for an object."""
        if entry.retained_until and entry.retained_until <= now:
            entry.retained_until = 0.0
            self._resident.retain(entry, False)
        if entry.pinned_until and entry.pinned_until <= now:
            self._unpin(entry, "expired")
        earliest = 0.0
        if self._resident.is_expired(entry):
            if entry.pinned_until:
                self._unpin(entry, "expired")
            if not entry.pins and not entry.evicting and not self._context.fenced:
                self._context.count("objects_expired")
                self._expire(entry)
                return
            earliest = now + RETRY_SECONDS
        self._schedule(entry, earliest)
