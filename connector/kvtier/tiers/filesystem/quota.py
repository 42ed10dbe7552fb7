"""What a directory is charged for. Arithmetic only: no I/O, no clock, no locks; the janitor's.

The charge is ``base`` (what is there and belongs to no grant) and every grant that is not settled, in full. It is never below what is in the
directory plus what writers may still put there, whatever they do and whenever they die:

* offering a grant charges it before the writer can know of it;
* settling replaces it by what the writer says became files; one that was cut off is settled as if all of it had;
* a count of the directory replaces ``base``. While it runs, files appear and go. What the count may have missed is what was
  published after it began, so for every grant only that part is dropped which its writer had reported before. What it may have seen twice stays
  charged twice, until the next count.

What this process may write: the grants it holds, in memory. Called from any thread; no I/O.

Bytes are taken before a file is begun and spent when it has its name; what came to nothing is given back. A grant that has
no room for what is asked is closed, and settled once nothing is under way in it.

One writer of a directory: its own directory there, its record, its grants. Used by the keeper, one thread at a time.

The record, rewritten at least every ``BEAT_SECONDS``: ``beat``; ``ask`` (number of the latest wish) with ``bytes`` and ``least``; ``used``, what is in
files of every grant; ``settled``, grants that ended and what was used of them, until the janitor has them in its books; ``closed``; ``full`` and
``recount``, counted up when the file system is full and when the books may be wrong.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.election import (
    BEAT_SECONDS,
    BROKEN,
    LEASE_SECONDS,
    new_holder,
    remove_fenced,
)
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import (
    RECORD,
    WORKING_PREFIX,
    Modes,
    grant_name,
    make_directory,
    offer_name,
    seat_path,
    writers_path,
)

MAX_GRANT_BYTES = 1 << 30
"""About half a second of the fastest disk: asking for the next one costs nothing beside it."""
GRANT_FRACTION = 8
"""The first grants of all writers together take at most this part of the capacity; each asks for its next one when half is used."""
OVERHEAD_BYTES = 16 * 1024
"""Set aside per writer: its directory, its record, the probe of a health check."""
SPARE_WRITERS = 4
"""Writers that may have come since the janitor looked, and the janitor's own files."""
_OVERHEAD_FRACTION = 8


@dataclass(slots=True)
class _LedgerGrant:
    size_bytes: int
    counted_bytes: int = 0


@dataclass(slots=True)
class _Count:
    reported: dict[tuple[str, int], int]
    seen_bytes: int = 0
    settled_bytes: int = 0


def limit_bytes(capacity_bytes: int, writers: int) -> int:
    """What may be charged: the capacity without what is set aside."""
    return capacity_bytes - min(
        OVERHEAD_BYTES * (writers + SPARE_WRITERS), capacity_bytes // _OVERHEAD_FRACTION
    )


def grant_bytes(capacity_bytes: int, writers: int) -> int:
    """Size of a grant: a sixteenth of the capacity for one or two writers, less for more, at most ``MAX_GRANT_BYTES``."""
    return max(min(MAX_GRANT_BYTES, capacity_bytes // (GRANT_FRACTION * max(2, writers))), 1)


class Ledger:
    """See the module's text. ``base_bytes``: None until a first count, or a predecessor, says it; nothing is granted before."""

    def __init__(self, base_bytes: int | None) -> None:
        self._base = base_bytes
        self._grants: dict[tuple[str, int], _LedgerGrant] = {}
        self._count: _Count | None = None
        self.generation = 0
        """Changes whenever a count begins or ends. Odd: one is running."""

    @property
    def base_bytes(self) -> int | None:
        """What is there and belongs to no grant."""
        return self._base

    @property
    def granted_bytes(self) -> int:
        """All grants, less what a count has found of them."""
        return sum(grant.size_bytes - grant.counted_bytes for grant in self._grants.values())

    @property
    def charge_bytes(self) -> int | None:
        """What counts as used; None if that is not known yet."""
        return None if self._base is None else self._base + self.granted_bytes

    def open_grants(self, writer: str) -> list[int]:
        """Numbers of a writer's grants that are charged."""
        return [number for holder, number in self._grants if holder == writer]

    def size(self, writer: str, number: int) -> int | None:
        """Size of a grant in bytes."""
        grant = self._grants.get((writer, number))
        return None if grant is None else grant.size_bytes

    def offer(self, writer: str, number: int, size_bytes: int) -> None:
        """Charges a grant."""
        self._grants[writer, number] = _LedgerGrant(size_bytes)

    def cancel(self, writer: str, number: int) -> None:
        """A grant that its writer can not have used."""
        self._grants.pop((writer, number), None)

    def settle(self, writer: str, number: int, used_bytes: int | None) -> bool:
        """A grant has ended; ``used_bytes`` of it became files, all of it if None. False if it was not charged."""
        grant = self._grants.pop((writer, number), None)
        if grant is None:
            return False
        used = grant.size_bytes if used_bytes is None else max(used_bytes, 0)
        if self._base is not None:
            self._base += max(used - grant.counted_bytes, 0)
        if self._count is not None:
            self._count.settled_bytes += max(
                used - self._count.reported.get((writer, number), 0), 0
            )
        return True

    def removed(self, size_bytes: int, counted: bool) -> None:
        """A file was removed by the janitor. ``counted``: the count that is running had passed it."""
        if self._base is not None:
            self._base = max(self._base - size_bytes, 0)
        if self._count is not None and counted:
            self._count.seen_bytes -= size_bytes

    def begin_count(self, reported: dict[tuple[str, int], int]) -> None:
        """A count begins. ``reported``: what of each grant was in files before this moment, by its writer's word."""
        self.abort_count()
        self.generation += 1
        self._count = _Count({grant: reported.get(grant, 0) for grant in self._grants})

    def saw(self, size_bytes: int) -> None:
        """The count has met a file or a directory."""
        if self._count is not None:
            self._count.seen_bytes += size_bytes

    def abort_count(self) -> None:
        """The count will not be finished."""
        if self._count is not None:
            self._count = None
            self.generation += 1

    def end_count(self) -> None:
        """The count has met everything that was there from its beginning to now."""
        count = self._count
        if count is None:
            return
        self._count = None
        self.generation += 1
        self._base = max(count.seen_bytes, 0) + count.settled_bytes
        for name, grant in self._grants.items():
            grant.counted_bytes = min(count.reported.get(name, 0), grant.size_bytes)


@dataclass(slots=True)
class _HeldGrant:
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


class ByteGrants:
    """See the module's text."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._grants: dict[int, _HeldGrant] = {}
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
            self._grants[number] = _HeldGrant(number, size_bytes)
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


class Writer:
    """See the module's text. Methods that do I/O raise ``OSError``."""

    def __init__(self, root: Path, modes: Modes, allowance: ByteGrants) -> None:
        self.name = ""
        self.server_time = 0.0
        """The file system's clock at the latest beat, seconds since its epoch."""
        self.revocations = 0
        self._root = root
        self._modes = modes
        self._allowance = allowance
        self._path = root
        self._beat_at = float("-inf")
        self._dirty = False
        self._recall: tuple[int, object] | None = None
        self._document: dict[str, Any] = {}

    @property
    def registered(self) -> bool:
        """Whether this writer has its directory, as far as it knows."""
        return bool(self.name)

    def alive(self, now: float) -> bool:
        """Whether the lease is good at ``now``: beyond it, others may have given this writer up."""
        return self.registered and now - self._beat_at < LEASE_SECONDS

    def working_path(self) -> str:
        """A new name for a file to be written. Any thread."""
        return f"{self._path}/{WORKING_PREFIX}{os.urandom(6).hex()}"

    def register(self, now: float) -> None:
        """Makes the writer's directory, a new one each time."""
        name = new_holder()
        path = writers_path(self._root) / name
        make_directory(path, self._modes)
        self._document = {
            "beat": 0,
            "ask": 0,
            "bytes": 0,
            "least": 0,
            "used": {},
            "settled": {},
            "closed": False,
            "full": 0,
            "recount": 0,
        }
        record.create(path / RECORD, self._document, self._modes)
        self._path, self.name, self._beat_at, self._recall = path, name, now, None

    def revoked(self) -> None:
        """This writer was given up by the janitor: its grants are void, and it is nobody until it registers anew."""
        self.name = ""
        self.revocations += 1
        self._allowance.revoke()

    def ask(self, size_bytes: int, least_bytes: int) -> None:
        """Wishes for a grant, unless a wish is open."""
        if self._document["bytes"]:
            return
        self._document.update(ask=self._document["ask"] + 1, bytes=size_bytes, least=least_bytes)
        self._dirty = True

    def note(self, what: str) -> None:
        """Counts ``full`` or ``recount`` up."""
        self._document[what] = self._document.get(what, 0) + 1
        self._dirty = True

    def settle(self) -> None:
        """Puts ended grants into the record."""
        for number, used in self._allowance.take_settled().items():
            self._document["settled"][str(number)] = used
            self._dirty = True

    def flush(self, now: float) -> None:
        """Writes the record if it says something new, or a beat is due."""
        if not self._dirty and now - self._beat_at < BEAT_SECONDS:
            return
        self._document["beat"] += 1
        self._document["used"] = {
            str(number): used for number, used in self._allowance.used().items()
        }
        try:
            self.server_time = record.rewrite(self._path / RECORD, self._document)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
            self.revoked()
            return
        self._beat_at, self._dirty = now, False

    def collect(self, fence: int, ledger: dict[str, Any]) -> None:
        """Takes what the janitor's record has for this writer."""
        mine = ledger.get("writers", {}).get(self.name)
        if mine is None:
            return
        settled = self._document["settled"]
        # A number that was answered and is not open any more is in the janitor's books.
        for number in [
            each
            for each in settled
            if int(each) not in mine["open"] and int(each) <= mine["answer"][0]
        ]:
            del settled[number]
            self._dirty = True
        number, size_bytes = mine["answer"]
        if self._document["bytes"] and number == self._document["ask"]:
            self._document["bytes"] = 0
            self._dirty = True
            if not size_bytes:
                self._allowance.deny()
            else:
                self._accept(fence, number, size_bytes)
        recall = (fence, ledger.get("recall"))
        if self._recall is not None and self._recall[0] == fence and self._recall != recall:
            self._allowance.recall()
        self._recall = recall

    def _accept(self, fence: int, number: int, size_bytes: int) -> None:
        # The rename is the check of the fencing number: a janitor that was deposed has no directory any more.
        offer = seat_path(self._root, fence) / offer_name(self.name, number)
        try:
            os.rename(offer, self._path / grant_name(number, size_bytes))
        except OSError as error:
            if error.errno not in GONE:
                raise
            return
        self._allowance.add(number, size_bytes)

    def close(self, now: float) -> None:
        """Gives everything back. What is still being written settles by being cut off."""
        if not self.registered:
            return
        self._allowance.recall()
        self.settle()
        # Grants with a file under way have to be charged in full: the janitor does so with what it finds open.
        self._document["closed"] = True
        self._dirty = True
        self.flush(now)

    def remove(self) -> None:
        """Removes the writer's directory where there is no janitor to do so."""
        with contextlib.suppress(OSError):
            remove_fenced(self._path)
