"""Adaptive replacement for the memory tier, which is used while it is ahead of LRU."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvtier.prefix_order import NONE
from kvtier.store.memory_tier import LruPolicy, no_tenant, nowhere

ItemT = TypeVar("ItemT")
IdentityT = TypeVar("IdentityT", bound=Hashable)
LEAD_SHARE = 0.01
"""ARC is used while it is ahead of LRU by more hits than this part of the resident objects: at the
start, and where both have the same hits, LRU is used."""
_MAX_EVICTIONS = 4
"""Of a trial for one use, after the tier has become smaller."""
_USES_AT_ONCE = 8
_MAX_USES = 1 << 14
"""Uses that wait to be tried. With many more hits than stores the oldest ones are left out."""


class ArcPolicy(LruPolicy[ItemT, IdentityT]):
    """Adaptive replacement: learns how much room to keep for objects that are used often.

    On a trace of conversations it has more hits than LRU in a small tier, and fewer in one that
    holds a fifth of all chunks (``benchmarks/eviction_order.py``), so tiers use ``TriedArcPolicy``.

    After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), with
    three differences. Only the ends of prefixes are evicted; when one that was used often goes, the
    object before it counts as used often. Parked objects are in neither list, because they cannot
    be evicted. And the size is not fixed, because slots move between classes: it is the number of
    resident objects. There are at most as many ghosts, which remember evicted objects by their
    identity.
    """

    def __init__(
        self,
        identify: Callable[[ItemT], IdentityT],
        previous: Callable[[ItemT], IdentityT | None],
        elsewhere: Callable[[IdentityT], bool] = nowhere,
        tenant: Callable[[ItemT], bytes] = no_tenant,
    ) -> None:
        super().__init__(identify, previous, elsewhere, tenant)
        self._is_often: dict[IdentityT, bool] = {}
        """Of all objects, those that are leaving included."""
        self._recent_ghosts: OrderedDict[IdentityT, None] = OrderedDict()
        self._often_ghosts: OrderedDict[IdentityT, None] = OrderedDict()
        self.target_recent = 0.0
        """Target for the number of resident objects that were used once."""

    def admit(self, item: ItemT) -> None:
        """Adds an object. A ghost of it shows which list was too short."""
        self._enter(item, self._came_back(self._identify(item)))

    def _came_back(self, identity: IdentityT) -> bool:
        recent, often = len(self._recent_ghosts), len(self._often_ghosts)
        came_back = True
        if identity in self._recent_ghosts:
            self.target_recent = min(
                float(len(self._is_often) + 1), self.target_recent + max(1.0, often / recent)
            )
            del self._recent_ghosts[identity]
        elif identity in self._often_ghosts:
            self.target_recent = max(0.0, self.target_recent - max(1.0, recent / often))
            del self._often_ghosts[identity]
        else:
            came_back = False
        self._is_often[identity] = came_back
        return came_back

    def hit(self, item: ItemT) -> None:
        """Notes a use of the object."""
        identity = self._identify(item)
        self._is_often[identity] = True
        super().hit(item)

    def leave(self, item: ItemT) -> None:
        """The object is being evicted."""
        identity = self._identify(item)
        node = self._nodes.get(identity)
        if node is not None and node in self._items:
            self._is_often[identity] = self._tree.is_often(node)
        super().leave(item)

    def _return(self, item: ItemT) -> None:
        self._enter(item, self._is_often[self._identify(item)])

    def forget(self, item: ItemT) -> None:
        """Removes the object."""
        self.leave(item)
        identity = self._identify(item)
        ghosts = self._often_ghosts if self._is_often.pop(identity) else self._recent_ghosts
        ghosts[identity] = None
        while len(self._recent_ghosts) + len(self._often_ghosts) > max(1, len(self._is_often)):
            longer = (
                self._recent_ghosts
                if len(self._recent_ghosts) >= len(self._often_ghosts)
                else self._often_ghosts
            )
            longer.popitem(last=False)

    def victim(self, urgent: bool = True) -> ItemT | None:
        """The end of a prefix of the list that exceeds its target, which is leaving."""
        tree = self._tree
        recent_first = tree.candidates[0] > self.target_recent or not tree.candidates[1]
        node = tree.oldest(often=not recent_first) or tree.oldest(often=recent_first)
        if tree.candidates[2]:
            node = tree.retained_victim(node)
        return self._take(node or (self._last_resort() if urgent else NONE))


class _TrialObject(Generic[IdentityT]):
    """What a trial knows of an object."""

    __slots__ = ("identity", "previous")

    def __init__(self, identity: IdentityT, previous: IdentityT | None) -> None:
        self.identity = identity
        self.previous = previous


class _Trial(Generic[IdentityT]):
    """An order without objects: what a tier with this order alone would hold."""

    def __init__(self, arc: bool) -> None:
        make = ArcPolicy if arc else LruPolicy
        self._order: LruPolicy[_TrialObject[IdentityT], IdentityT] = make(
            lambda each: each.identity, lambda each: each.previous
        )
        self._held: dict[IdentityT, _TrialObject[IdentityT]] = {}

    def use(self, identity: IdentityT, previous: IdentityT | None, room: int) -> bool:
        """The object is used or stored, in a tier with room for so many. Whether it was held."""
        found = self._held.get(identity)
        if found is not None:
            self._order.hit(found)
            return True
        for _ in range(min(len(self._held) - room + 1, _MAX_EVICTIONS)):
            victim = self._order.victim()
            if victim is None:
                break
            self._order.forget(victim)
            del self._held[victim.identity]
        self._held[identity] = found = _TrialObject(identity, previous)
        self._order.admit(found)
        return False

    def follow(self, identity: IdentityT, previous: IdentityT | None) -> None:
        """It has become known which object precedes this one."""
        found = self._held.get(identity)
        if found is not None and found.previous is None:
            found.previous = previous
            self._order.follow(found)

    def __len__(self) -> int:
        return len(self._held)


class TriedArcPolicy(ArcPolicy[ItemT, IdentityT]):
    """ARC while it has more hits than LRU, else LRU.

    Two orders without objects, one of each kind, are told of all uses and are as large as the tier.
    The one with more hits since the start says which rule finds the next victim. What both would
    hold takes about 500 bytes for each resident object, and four times the processor time of LRU: a
    few uses at a time, when an object is stored or evicted, so that a long prompt delays nothing.
    Tenants, retained objects and queued requests are left out of the comparison.
    """

    def __init__(
        self,
        identify: Callable[[ItemT], IdentityT],
        previous: Callable[[ItemT], IdentityT | None],
        elsewhere: Callable[[IdentityT], bool] = nowhere,
        tenant: Callable[[ItemT], bytes] = no_tenant,
    ) -> None:
        super().__init__(identify, previous, elsewhere, tenant)
        self._lru_trial: _Trial[IdentityT] = _Trial(arc=False)
        self._arc_trial: _Trial[IdentityT] = _Trial(arc=True)
        self._uses: deque[tuple[IdentityT, IdentityT | None]] = deque(maxlen=_MAX_USES)
        self.lead = 0
        """Hits of ARC less those of LRU."""

    def admit(self, item: ItemT) -> None:
        """Adds an object."""
        super().admit(item)
        self._uses.append((self._identify(item), self._previous(item)))
        self._try()

    def hit(self, item: ItemT) -> None:
        """Notes a use of the object."""
        super().hit(item)
        self._uses.append((self._identify(item), self._previous(item)))

    def follow(self, item: ItemT) -> None:
        """It has become known which object precedes this one."""
        super().follow(item)
        for trial in (self._lru_trial, self._arc_trial):
            trial.follow(self._identify(item), self._previous(item))

    def victim(self, urgent: bool = True) -> ItemT | None:
        """The next victim by the rule that has more hits, which is leaving."""
        self._try()
        if self.arc_leads:
            return super().victim(urgent)
        return LruPolicy.victim(self, urgent)

    @property
    def arc_leads(self) -> bool:
        """Whether victims are found by ARC."""
        return self.lead > LEAD_SHARE * len(self._is_often)

    def _try(self) -> None:
        room = len(self._is_often)
        for _ in range(min(len(self._uses), _USES_AT_ONCE)):
            identity, previous = self._uses.popleft()
            self.lead += self._arc_trial.use(identity, previous, room)
            self.lead -= self._lru_trial.use(identity, previous, room)
