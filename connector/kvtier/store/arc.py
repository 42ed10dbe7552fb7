"""Adaptive replacement: recently used and often used objects compete for room, and what went too early decides.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), with two differences that come from
where it is used. Objects in use (parked) are in neither list, as they cannot go; and the size is not fixed, because slots move
between classes: it is the number of objects that are resident at the moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Arc(Generic[T]):
    """An ``EvictionPolicy`` that one long scan does not empty.

    ``name`` gives what stays the same when an object comes back as another item: the ghosts of what went are kept by it, at
    most as many as there are resident objects.
    """

    def __init__(self, name: Callable[[T], Hashable]) -> None:
        self._name = name
        self._recent: OrderedDict[T, None] = OrderedDict()
        self._often: OrderedDict[T, None] = OrderedDict()
        self._is_often: dict[T, bool] = {}
        self._recent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._often_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self.target_recent = 0.0
        """How many of the resident objects should be such that were used once."""

    def admit(self, item: T) -> None:
        """The object is resident, and parked. One that went lately shows which list was too short."""
        name = self._name(item)
        recent, often = len(self._recent_ghosts), len(self._often_ghosts)
        came_back = True
        if name in self._recent_ghosts:
            self.target_recent = min(float(len(self._is_often) + 1), self.target_recent + max(1.0, often / recent))
            del self._recent_ghosts[name]
        elif name in self._often_ghosts:
            self.target_recent = max(0.0, self.target_recent - max(1.0, recent / often))
            del self._often_ghosts[name]
        else:
            came_back = False
        self._is_often[item] = came_back

    def hit(self, item: T) -> None:
        """The object was used again."""
        self._is_often[item] = True
        if item in self._recent:
            del self._recent[item]
            self._often[item] = None
        elif item in self._often:
            self._often.move_to_end(item)

    def park(self, item: T) -> None:
        """The object is in use and must not be a victim."""
        self._recent.pop(item, None)
        self._often.pop(item, None)

    def offer(self, item: T) -> None:
        """The object may be a victim again, the last of its list."""
        (self._often if self._is_often[item] else self._recent)[item] = None

    def forget(self, item: T) -> None:
        """The object is gone."""
        self.park(item)
        ghosts = self._often_ghosts if self._is_often.pop(item) else self._recent_ghosts
        ghosts[self._name(item)] = None
        while len(self._recent_ghosts) + len(self._often_ghosts) > max(1, len(self._is_often)):
            longer = self._recent_ghosts if len(self._recent_ghosts) >= len(self._often_ghosts) else self._often_ghosts
            longer.popitem(last=False)

    def victim(self) -> T | None:
        """The oldest object of the list that is longer than it should be, parked."""
        if self._recent and (len(self._recent) > self.target_recent or not self._often):
            return self._recent.popitem(last=False)[0]
        return self._often.popitem(last=False)[0] if self._often else None

    def __len__(self) -> int:
        return len(self._recent) + len(self._often)
