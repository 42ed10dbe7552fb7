"""Which object goes when a slot is needed.

A policy orders the objects of one slot class. Objects in use (pinned) are *parked*: they stay known and are no victims.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class EvictionPolicy(Protocol[T]):
    """Order of eviction. Every object is admitted once, then parked and offered any number of times, then forgotten."""

    def admit(self, item: T) -> None:
        """The object is resident, and parked."""
        ...

    def hit(self, item: T) -> None:
        """The object was used again."""
        ...

    def park(self, item: T) -> None:
        """The object is in use and must not be a victim."""
        ...

    def offer(self, item: T) -> None:
        """The object may be a victim again; it was in use just now."""
        ...

    def forget(self, item: T) -> None:
        """The object is gone."""
        ...

    def victim(self) -> T | None:
        """The next object to go, which is parked by this call; None if all are in use."""
        ...

    def __len__(self) -> int:
        """How many objects could be victims."""
        ...


class Lru(Generic[T]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def admit(self, item: T) -> None:
        """The object is resident, and parked."""

    def hit(self, item: T) -> None:
        """The object was used again: it is the last to go. One that is parked will be when it is offered."""
        if item in self._order:
            self._order.move_to_end(item)

    def park(self, item: T) -> None:
        """The object is in use and must not be a victim."""
        self._order.pop(item, None)

    def offer(self, item: T) -> None:
        """The object may be a victim again, the last of all."""
        self._order[item] = None

    def forget(self, item: T) -> None:
        """The object is gone."""
        self._order.pop(item, None)

    def victim(self) -> T | None:
        """The least recently used object, parked."""
        return self._order.popitem(last=False)[0] if self._order else None

    def __len__(self) -> int:
        return len(self._order)
