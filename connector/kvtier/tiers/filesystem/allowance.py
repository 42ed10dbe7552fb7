"""What this process may write: the grants it holds, in memory. Called from any thread; no I/O.

Bytes are taken before a file is begun and spent when it has its name; what came to nothing is given back. A grant that has
no room for what is asked is closed, and settled once nothing is under way in it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class _Grant:
    number: int
    size_bytes: int
    used_bytes: int = 0
    taken_bytes: int = 0
    closed: bool = False

    @property
    def room_bytes(self) -> int:
        return 0 if self.closed else self.size_bytes - self.used_bytes - self.taken_bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of one grant, for one file."""

    number: int
    size_bytes: int
    life: int


class Allowance:
    """See the module's text."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._grants: dict[int, _Grant] = {}
        self._life = 0
        self._waiting: dict[int, int] = {}
        self._waiters = 0
        self.denials = 0

    # Threads that write.

    def take(self, size_bytes: int) -> Taken | None:
        """Bytes for a file; None if no grant has them."""
        with self._changed:
            for grant in self._grants.values():
                if grant.room_bytes >= size_bytes:
                    grant.taken_bytes += size_bytes
                    return Taken(grant.number, size_bytes, self._life)
                grant.closed = True
            return None

    def spend(self, taken: Taken, used_bytes: int) -> None:
        """``used_bytes`` of what was taken are in the directory, the rest is free again."""
        with self._changed:
            grant = self._grants.get(taken.number)
            if grant is not None and taken.life == self._life:
                grant.taken_bytes -= taken.size_bytes
                grant.used_bytes += used_bytes

    def valid(self, taken: Taken) -> bool:
        """Whether the grant still counts."""
        return taken.life == self._life

    def wait(self, seconds: float) -> None:
        """Until something changes, or the time is over."""
        with self._changed:
            self._changed.wait(seconds)

    def enter(self, size_bytes: int) -> int:
        """A thread waits for that much; the number to ``leave`` with."""
        with self._changed:
            self._waiters += 1
            self._waiting[self._waiters] = size_bytes
            return self._waiters

    def leave(self, waiter: int) -> None:
        """It waits no longer."""
        with self._changed:
            self._waiting.pop(waiter, None)

    # The keeper.

    def wanted(self) -> tuple[int, int]:
        """Bytes that threads wait for: together, and the largest."""
        with self._changed:
            return sum(self._waiting.values()), max(self._waiting.values(), default=0)

    def room_bytes(self) -> int:
        """What could be taken."""
        with self._changed:
            return sum(grant.room_bytes for grant in self._grants.values())

    def add(self, number: int, size_bytes: int) -> None:
        """A grant came."""
        with self._changed:
            self._grants[number] = _Grant(number, size_bytes)
            self._changed.notify_all()

    def deny(self) -> None:
        """There is no room for what threads wait for."""
        with self._changed:
            self.denials += 1
            self._changed.notify_all()

    def recall(self) -> None:
        """Nothing more is taken from the grants there are."""
        with self._changed:
            for grant in self._grants.values():
                grant.closed = True

    def revoke(self) -> None:
        """The grants are void: this writer was given up."""
        with self._changed:
            self._grants.clear()
            self._life += 1
            self._changed.notify_all()

    def take_settled(self) -> dict[int, int]:
        """Grants that are closed and in which nothing is under way, with what was used of them; they are forgotten."""
        with self._changed:
            ended = {
                grant.number: grant.used_bytes
                for grant in self._grants.values()
                if grant.closed and not grant.taken_bytes
            }
            for number in ended:
                del self._grants[number]
            return ended

    def used(self) -> dict[int, int]:
        """What is in files already, of every grant held."""
        with self._changed:
            return {grant.number: grant.used_bytes for grant in self._grants.values()}

    def idle(self) -> bool:
        """Whether nothing is under way."""
        with self._changed:
            return not any(grant.taken_bytes for grant in self._grants.values())
