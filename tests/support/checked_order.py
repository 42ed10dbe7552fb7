"""Checks the eviction order of a store against the rules, whatever is called."""

from __future__ import annotations

from kvtier.store.memory_tier import EvictionOrder
from kvtier.store.state import Entry
from kvtier.store.store import TierStore


class CheckedOrder:
    """An eviction order that checks its victims by reading all objects.

    A victim is in no use. None is evicted before an object that follows it, unless something in use
    follows every object that is left. If nothing is found, everything is in use.
    """

    def __init__(self, inner: EvictionOrder[Entry]) -> None:
        self._inner = inner
        self._parked: dict[Entry, bool] = {}

    def admit(self, item: Entry) -> None:
        self._parked[item] = False
        self._inner.admit(item)

    def hit(self, item: Entry) -> None:
        self._inner.hit(item)

    def follow(self, item: Entry) -> None:
        self._inner.follow(item)

    def park(self, item: Entry) -> None:
        if item in self._parked:
            self._parked[item] = True
        self._inner.park(item)

    def offer(self, item: Entry) -> None:
        self._parked[item] = False
        self._inner.offer(item)

    def leave(self, item: Entry) -> None:
        self._parked.pop(item, None)
        self._inner.leave(item)

    def forget(self, item: Entry) -> None:
        self._parked.pop(item, None)
        self._inner.forget(item)

    def victim(self, urgent: bool = True) -> Entry | None:
        followers: dict[tuple[str, bytes], list[Entry]] = {}
        for each in self._parked:
            if each.previous:
                followers.setdefault((each.namespace, each.previous), []).append(each)
        free = [each for each, parked in self._parked.items() if not parked]
        ends = [each for each in free if (each.namespace, each.key) not in followers]
        found = self._inner.victim(urgent)
        if found is None:
            assert not (free if urgent else ends), "objects that are not in use are not evicted"
            return None
        assert found in free, "an object in use is evicted"
        if ends:
            assert found in ends, "an object is evicted before one that follows it"
        else:
            before = self._before(found)
            assert all(
                self._parked[each] or each in before
                for each in followers[found.namespace, found.key]
            ), "an object is evicted before one that follows it and is not in use"
        self._parked.pop(found)
        return found

    def next_of(self, tenant: bytes) -> Entry | None:
        found = self._inner.next_of(tenant)
        own = [
            each for each, parked in self._parked.items() if each.tenant == tenant and not parked
        ]
        followed = {(each.namespace, each.previous) for each in self._parked if each.previous}
        ends = [each for each in own if (each.namespace, each.key) not in followed]
        assert (found in ends) if ends else found is None, "not an end of the tenant's own"
        return found

    def count_of(self, tenant: bytes) -> tuple[int, int]:
        found = self._inner.count_of(tenant)
        if tenant:
            own = [parked for each, parked in self._parked.items() if each.tenant == tenant]
            assert found == (len(own), own.count(False))
        return found

    def retain(self, item: Entry, retained: bool) -> None:
        self._inner.retain(item, retained)

    def _before(self, item: Entry) -> set[Entry]:
        """What an object follows. Messages can say that two objects follow each other: then neither
        has to go first."""
        held = {(each.namespace, each.key): each for each in self._parked}
        found: set[Entry] = set()
        before = held.get((item.namespace, item.previous))
        while before is not None and before not in found:
            found.add(before)
            before = held.get((before.namespace, before.previous))
        return found

    def __len__(self) -> int:
        assert len(self._inner) == sum(not parked for parked in self._parked.values())
        return len(self._inner)


def check_order(store: TierStore) -> None:
    """Checks all victims of this store from here on. Call before anything is stored."""
    resident = store._resident
    new_order = resident._new_order
    resident._new_order = lambda: CheckedOrder(new_order())
    for size, order in list(resident._orders.items()):
        checked = resident._orders[size] = CheckedOrder(order)
        for entry in resident.entries():
            if entry.slot.segment.kind.slot_bytes == size:
                checked._parked[entry] = entry.pins > 0
