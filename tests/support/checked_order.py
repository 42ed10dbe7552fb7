"""Checks the eviction order of a store against the rules, whatever is called."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.prefix_order import KEPT_SHARE
from kvtier.store.arc_policy import ArcPolicy
from kvtier.store.memory_tier import EvictionOrder
from kvtier.store.state import Entry
from kvtier.store.store import TierStore


@dataclass(slots=True)
class _Use:
    """When an object was used last, and whether it was used again, or what followed it was.

    ``unclear``: an object before it was missing since then. Such an object is evicted early, and
    late again once that one has arrived.
    """

    at: int
    often: bool = False
    unclear: bool = False


class CheckedOrder:
    """An eviction order that checks its victims by reading all objects.

    A victim is in no use. None is evicted before an object that follows it, unless something in use
    follows every object that is left. If nothing is found, everything is in use. Of the ends of
    prefixes the least recently used one goes first (``recency``: not so for ARC), except that an
    eighth is kept for those that were used again. Retained ones go after the others while they are
    at most a half. Awaited ones go after all others, the one with the highest rank first.
    """

    def __init__(self, inner: EvictionOrder[Entry], recency: bool = True) -> None:
        self._inner = inner
        self._recency = recency
        self._parked: dict[Entry, bool] = {}
        self._uses: dict[Entry, _Use] = {}
        self._retained: set[Entry] = set()
        self._awaited: dict[Entry, int] = {}
        self._now = 0

    def admit(self, item: Entry) -> None:
        self._enter(item)
        self._inner.admit(item)

    def hit(self, item: Entry) -> None:
        if item in self._parked:
            self._now += 1
            self._uses[item] = _Use(self._now, often=True)
        self._inner.hit(item)

    def follow(self, item: Entry) -> None:
        self._inner.follow(item)
        self._note_missing()

    def park(self, item: Entry) -> None:
        if item in self._parked:
            self._parked[item] = True
        self._inner.park(item)

    def offer(self, item: Entry) -> None:
        if item in self._parked:
            self._parked[item] = False
        else:
            self._enter(item)
        self._inner.offer(item)

    def leave(self, item: Entry) -> None:
        self._leave(item)
        self._inner.leave(item)

    def forget(self, item: Entry) -> None:
        self._leave(item)
        self._inner.forget(item)

    def _enter(self, item: Entry) -> None:
        self._now += 1
        self._parked[item] = False
        self._uses[item] = _Use(self._now)
        self._note_missing()

    def _leave(self, item: Entry) -> None:
        """What the object followed is as recently used as it was."""
        if item not in self._parked:
            return
        del self._parked[item]
        self._retained.discard(item)
        self._awaited.pop(item, None)
        use = self._uses.pop(item)
        for before, mine in self._uses.items():
            follows = (before.namespace, before.key) == (item.namespace, item.previous)
            if follows and use.often >= mine.often and (use.often > mine.often or use.at > mine.at):
                mine.at, mine.often = max(mine.at, use.at), use.often
                mine.unclear = mine.unclear or use.unclear
        self._note_missing()

    def _note_missing(self) -> None:
        held = {(each.namespace, each.key) for each in self._parked}
        missing = True
        while missing:
            missing = False
            for each, use in self._uses.items():
                before = (each.namespace, each.previous)
                if each.previous and not use.unclear and before not in held:
                    use.unclear = missing = True
            held -= {(each.namespace, each.key) for each, use in self._uses.items() if use.unclear}

    def _check_recency(self, found: Entry, ends: list[Entry]) -> None:
        free = [each for each, parked in self._parked.items() if not parked]
        retained = self._retained.intersection(free)
        if retained.intersection(ends) and not retained.issuperset(ends):
            too_many = 2 * len(retained) > len(free)
            assert (found in retained) == too_many, "a retained object is evicted before others"
        ends = [each for each in ends if (each in retained) == (found in retained)]
        mine = self._uses[found]
        if not self._recency or mine.unclear or self._before(found) & {found}:
            return
        clear = not any(use.unclear for use in self._uses.values())
        often = sum(self._uses[each].often for each in free if each not in retained)
        kept = often * KEPT_SHARE <= len(free)
        for each in ends:
            use = self._uses[each]
            if use.unclear or use.at >= mine.at or each in self._before(each):
                continue
            spared = use.often and not mine.often and (kept or not clear) and found not in retained
            assert spared, "an object is evicted before one that was used less recently"

    def _check_awaited(self, found: Entry, ends: list[Entry]) -> None:
        if found in self._awaited:
            assert self._awaited.keys() >= set(ends), "an awaited object is evicted before others"
            last = max(self._awaited[each] for each in ends)
            assert self._awaited[found] == last, "not the last one of the queue"

    def victim(self, urgent: bool = True) -> Entry | None:
        followers: dict[tuple[str, bytes], list[Entry]] = {}
        for each in self._parked:
            if each.previous:
                followers.setdefault((each.namespace, each.previous), []).append(each)
        free = [each for each, parked in self._parked.items() if not parked]
        ends = [each for each in free if (each.namespace, each.key) not in followers]
        found = self._inner.victim(urgent)
        if found is None:
            left = free if urgent else set(ends) - self._awaited.keys()
            assert not left, "objects that are not in use are not evicted"
            return None
        assert found in free, "an object in use is evicted"
        assert urgent or found not in self._awaited, "an awaited object is evicted without need"
        if ends:
            in_order = found in ends or self._closes_ring(found)
            assert in_order, "an object is evicted before one that follows it"
            self._check_awaited(found, [*ends, found])
            if found not in self._awaited:
                self._check_recency(found, [each for each in ends if each not in self._awaited])
        else:
            before = self._before(found)
            assert all(
                self._parked[each] or each in before
                for each in followers[found.namespace, found.key]
            ), "an object is evicted before one that follows it and is not in use"
        self._leave(found)
        return found

    def next_of(self, tenant: bytes) -> Entry | None:
        found = self._inner.next_of(tenant)
        own = [
            each for each, parked in self._parked.items() if each.account == tenant and not parked
        ]
        followed = {(each.namespace, each.previous) for each in self._parked if each.previous}
        ends = [each for each in own if (each.namespace, each.key) not in followed]
        if found is None:
            assert not ends, "not an end of the tenant's own"
        else:
            in_order = found in ends or (found in own and self._closes_ring(found))
            assert in_order, "not an end of the tenant's own"
            self._check_awaited(found, [*ends, found])
        return found

    def count_of(self, tenant: bytes) -> tuple[int, int]:
        found = self._inner.count_of(tenant)
        if tenant:
            own = [parked for each, parked in self._parked.items() if each.account == tenant]
            assert found == (len(own), own.count(False))
        return found

    def retain(self, item: Entry, retained: bool) -> None:
        if retained and item in self._parked:
            self._retained.add(item)
        else:
            self._retained.discard(item)
        self._inner.retain(item, retained)

    def await_item(self, item: Entry, rank: int) -> None:
        self._awaited.pop(item, None)
        if rank and item in self._parked:
            self._awaited[item] = rank
        self._inner.await_item(item, rank)

    def rank_of_next(self) -> int:
        return self._inner.rank_of_next()

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

    def _closes_ring(self, item: Entry) -> bool:
        """Whether all that follows an object is before it as well. The order ignores the message
        that closes such a ring, so that one of its objects is an end."""
        name = (item.namespace, item.key)
        following = {each for each in self._parked if (each.namespace, each.previous) == name}
        return bool(following) and following <= self._before(item)

    def __len__(self) -> int:
        assert len(self._inner) == sum(not parked for parked in self._parked.values())
        return len(self._inner)


def check_order(store: TierStore) -> None:
    """Checks all victims of this store from here on. Call before anything is stored."""
    resident = store._resident
    new_order = resident._new_order

    def checked_order(order: EvictionOrder[Entry]) -> CheckedOrder:
        return CheckedOrder(order, recency=not isinstance(order, ArcPolicy))

    resident._new_order = lambda: checked_order(new_order())
    for size, order in list(resident._orders.items()):
        checked = resident._orders[size] = checked_order(order)
        for entry in resident.entries():
            if entry.slot.segment.kind.slot_bytes == size:
                checked._parked[entry] = entry.pins > 0
                checked._uses[entry] = _Use(0, unclear=True)
