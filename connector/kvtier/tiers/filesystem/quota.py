"""The byte quota of a directory: the leader's ledger, the grants of a process, and its record.

A process writes only within *grants*: bytes that the leader has charged before the process learns
of them. ``Ledger`` is the leader's arithmetic. ``ByteGrants`` holds the grants of this process in
memory. ``Writer`` is this process's directory and record among the directory's writers.

The charge is the base (everything in the directory that belongs to no grant) plus every grant that
is not settled, in full. It is never less than what is in the directory plus what writers may still
add, whatever they do and whenever they die:

* Offering a grant charges it before the writer can know of it.
* Settling replaces the grant by the bytes that its writer reports as files. A writer that was
  fenced is settled as if it had used the whole grant.
* A count of the directory replaces the base. Files come and go while it runs. The count may have
  missed what was published after it started, so it removes from every grant only the part that the
  writer had reported before. What it may have counted twice stays charged twice until the next one.

A grant that has no room for a request is closed, and settled once no write in it is in flight.

A writer rewrites its record at least every ``HEARTBEAT_SECONDS``. Its fields on disk: ``beat``;
``ask`` (number of the latest request) with ``bytes`` and ``least``; ``used``, the bytes in files of
every grant; ``settled``, the grants that ended with their used bytes, until the ledger accounts for
them; ``closed``; ``full`` and ``recount``, counters that are incremented when the file system is
full and when the ledger may be wrong; ``log``, how many blocks its log of announcements has had.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.election import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    UNREADABLE,
    new_holder,
)
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import (
    RECORD,
    WORKING_PREFIX,
    Modes,
    grant_name,
    make_directory,
    offer_name,
    term_path,
    writers_path,
)

MAX_GRANT_BYTES = 1 << 30
"""About half a second of the fastest disk, so requesting the next grant costs little beside it."""
GRANT_FRACTION = 8
"""The first grants of all writers together take at most this part of the capacity. Each writer
requests its next one when half of the last is used."""
OVERHEAD_BYTES = 16 * 1024
"""Set aside for each writer: its directory, its record and the file of a health check."""
SPARE_WRITERS = 4
"""For writers that registered since the leader listed them, and for the leader's own files."""
_OVERHEAD_FRACTION = 8


def limit_bytes(capacity_bytes: int, writers: int) -> int:
    """What may be charged: the capacity without the bytes set aside."""
    return capacity_bytes - min(
        OVERHEAD_BYTES * (writers + SPARE_WRITERS), capacity_bytes // _OVERHEAD_FRACTION
    )


def grant_bytes(capacity_bytes: int, writers: int) -> int:
    """Size of a grant: 1/16 of the capacity for one or two writers, less for more, and at most
    ``MAX_GRANT_BYTES``.
    """
    return max(min(MAX_GRANT_BYTES, capacity_bytes // (GRANT_FRACTION * max(2, writers))), 1)


@dataclass(slots=True)
class _LedgerGrant:
    size_bytes: int
    counted_bytes: int = 0


@dataclass(slots=True)
class _Count:
    reported: dict[tuple[str, int], int]
    seen_bytes: int = 0
    settled_bytes: int = 0


_M = TypeVar("_M", bound=Callable[..., Any])


def _alone(method: _M) -> _M:
    """No other thread changes the ledger meanwhile. The lock is held during arithmetic only."""

    @functools.wraps(method)
    def call(self: Ledger, *arguments: Any, **more: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **more)

    return cast("_M", call)


class Ledger:
    """What a directory is charged for. Arithmetic only: no I/O, no clock. Any thread may call any
    method.

    ``base_bytes``: None until a count or a predecessor provides it; until then nothing is granted.
    """

    def __init__(self, base_bytes: int | None) -> None:
        self._lock = threading.RLock()
        self._base_bytes = base_bytes
        self._grants: dict[tuple[str, int], _LedgerGrant] = {}
        self._count: _Count | None = None
        self.generation = 0
        """Incremented whenever a count starts or ends. Odd while a count runs."""

    @property
    def base_bytes(self) -> int | None:
        """Bytes in the directory that belong to no grant."""
        return self._base_bytes

    @property
    @_alone
    def granted_bytes(self) -> int:
        """All grants, less what a count has found of them."""
        return sum(grant.size_bytes - grant.counted_bytes for grant in self._grants.values())

    @property
    @_alone
    def charge_bytes(self) -> int | None:
        """What counts as used. None until the base is known."""
        return None if self._base_bytes is None else self._base_bytes + self.granted_bytes

    @_alone
    def held_bytes(self, reported: Mapping[tuple[str, int], int]) -> int | None:
        """What the directory holds: the base, and the bytes that writers ``reported`` for each
        grant. None until the base is known.
        """
        if self._base_bytes is None:
            return None
        return self._base_bytes + sum(
            max(min(reported.get(name, 0), grant.size_bytes) - grant.counted_bytes, 0)
            for name, grant in self._grants.items()
        )

    @_alone
    def open_grants(self, writer: str) -> list[int]:
        """Numbers of a writer's grants that are charged."""
        return [number for holder, number in self._grants if holder == writer]

    @_alone
    def grant_size(self, writer: str, number: int) -> int | None:
        """Size of a grant in bytes. None if it is not charged."""
        grant = self._grants.get((writer, number))
        return None if grant is None else grant.size_bytes

    # Grants.

    @_alone
    def charge(self, writer: str, number: int, size_bytes: int) -> None:
        """Charges a grant."""
        self._grants[writer, number] = _LedgerGrant(size_bytes)

    @_alone
    def cancel(self, writer: str, number: int) -> None:
        """Drops a grant that its writer cannot have used."""
        self._grants.pop((writer, number), None)

    @_alone
    def settle(self, writer: str, number: int, used_bytes: int | None) -> bool:
        """Ends a grant of which ``used_bytes`` became files; None: all of it. False if it was not
        charged.
        """
        grant = self._grants.pop((writer, number), None)
        if grant is None:
            return False
        used = grant.size_bytes if used_bytes is None else max(used_bytes, 0)
        if self._base_bytes is not None:
            self._base_bytes += max(used - grant.counted_bytes, 0)
        if self._count is not None:
            self._count.settled_bytes += max(
                used - self._count.reported.get((writer, number), 0), 0
            )
        return True

    @_alone
    def credit(self, size_bytes: int, counted: bool, generation: int | None = None) -> bool:
        """A file was removed. ``counted``: the running count had already passed it.

        ``generation``: the generation before the removal. If a count has started or ended since,
        that may or may not have seen the file: nothing is credited, and False is returned.
        """
        if generation is not None and generation != self.generation:
            return False
        if self._base_bytes is not None:
            self._base_bytes = max(self._base_bytes - size_bytes, 0)
        if self._count is not None and counted:
            self._count.seen_bytes -= size_bytes
        return True

    # Counts.

    @_alone
    def begin_count(self, reported: dict[tuple[str, int], int]) -> None:
        """A count starts. ``reported``: for each grant, the bytes that its writer reported as files
        before this moment.
        """
        self.abort_count()
        self.generation += 1
        self._count = _Count({grant: reported.get(grant, 0) for grant in self._grants})

    @_alone
    def add_counted(self, size_bytes: int) -> None:
        """The count found a file or a directory."""
        if self._count is not None:
            self._count.seen_bytes += size_bytes

    @_alone
    def abort_count(self) -> None:
        """The count will not be completed."""
        if self._count is not None:
            self._count = None
            self.generation += 1

    @_alone
    def end_count(self) -> None:
        """The count has found everything that existed from its start to now."""
        count = self._count
        if count is None:
            return
        self._count = None
        self.generation += 1
        self._base_bytes = max(count.seen_bytes, 0) + count.settled_bytes
        for name, grant in self._grants.items():
            grant.counted_bytes = min(count.reported.get(name, 0), grant.size_bytes)


@dataclass(slots=True)
class _HeldGrant:
    number: int
    size_bytes: int
    used_bytes: int = 0
    allocated_bytes: int = 0
    closed: bool = False

    @property
    def free_bytes(self) -> int:
        return 0 if self.closed else self.size_bytes - self.used_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True)
class ByteAllocation:
    """Bytes of one grant, for one file. ``epoch``: of the grants it belongs to."""

    number: int
    size_bytes: int
    epoch: int


class ByteGrants:
    """The grants that this process holds. Thread-safe; no I/O.

    A thread allocates bytes before it creates a file, and commits what it used once the file has
    its name; the rest becomes free again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._grants: dict[int, _HeldGrant] = {}
        self._epoch = 0
        self._requests: dict[int, int] = {}
        self._request_count = 0
        self.denials = 0

    # Threads that write.

    def allocate(self, size_bytes: int) -> ByteAllocation | None:
        """Bytes for a file. None if no grant has enough."""
        with self._changed:
            for grant in self._grants.values():
                if grant.free_bytes >= size_bytes:
                    grant.allocated_bytes += size_bytes
                    return ByteAllocation(grant.number, size_bytes, self._epoch)
                grant.closed = True
            return None

    def commit(self, allocation: ByteAllocation, used_bytes: int) -> None:
        """``used_bytes`` of the allocation are in the directory; the rest is free again."""
        with self._changed:
            grant = self._grants.get(allocation.number)
            if grant is not None and allocation.epoch == self._epoch:
                grant.allocated_bytes -= allocation.size_bytes
                grant.used_bytes += used_bytes

    def is_valid(self, allocation: ByteAllocation) -> bool:
        """Whether the allocation's grant is still charged."""
        return allocation.epoch == self._epoch

    def request(self, size_bytes: int) -> int:
        """A thread waits for that many bytes. Returns an id for ``withdraw``."""
        with self._changed:
            self._request_count += 1
            self._requests[self._request_count] = size_bytes
            return self._request_count

    def withdraw(self, request: int) -> None:
        """Withdraws a thread's request."""
        with self._changed:
            self._requests.pop(request, None)

    def wait(self, seconds: float) -> None:
        """Waits until the grants change, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    # Maintenance.

    def requested_bytes(self) -> tuple[int, int]:
        """Bytes that threads wait for: the sum, and the largest."""
        with self._changed:
            return sum(self._requests.values()), max(self._requests.values(), default=0)

    def free_bytes(self) -> int:
        """Bytes that can be allocated."""
        with self._changed:
            return sum(grant.free_bytes for grant in self._grants.values())

    def used_bytes(self) -> dict[int, int]:
        """Bytes in files, by the number of each grant held."""
        with self._changed:
            return {grant.number: grant.used_bytes for grant in self._grants.values()}

    def add(self, number: int, size_bytes: int) -> None:
        """Adds a grant."""
        with self._changed:
            self._grants[number] = _HeldGrant(number, size_bytes)
            self._changed.notify_all()

    def deny(self) -> None:
        """The capacity has no room for the request."""
        with self._changed:
            self.denials += 1
            self._changed.notify_all()

    def revoke(self) -> None:
        """Closes all grants: no bytes are allocated from them any longer."""
        with self._changed:
            for grant in self._grants.values():
                grant.closed = True

    def invalidate(self) -> None:
        """Drops all grants and their allocations, because this writer was fenced."""
        with self._changed:
            self._grants.clear()
            self._epoch += 1
            self._changed.notify_all()

    def pop_settled(self) -> dict[int, int]:
        """Removes closed grants without a write in flight. Returns used bytes by number."""
        with self._changed:
            settled = {
                grant.number: grant.used_bytes
                for grant in self._grants.values()
                if grant.closed and not grant.allocated_bytes
            }
            for number in settled:
                del self._grants[number]
            return settled


class Writer:
    """This process among the writers of a directory: its own directory there, its record and its
    grants. One thread at a time, except ``new_working_path``. I/O raises ``OSError``.
    """

    def __init__(self, root: Path, modes: Modes, grants: ByteGrants) -> None:
        self.name = ""
        self.server_time = 0.0
        """The file system's clock at the latest heartbeat, in seconds since its epoch."""
        self.revocations = 0
        self.announced: int | None = None
        """Blocks of this writer's log of announcements; None: it does not announce."""
        self._root = root
        self._modes = modes
        self._grants = grants
        self._path = root
        self._written_at = float("-inf")
        self._dirty = False
        self._revocation: tuple[int, object] | None = None
        self._document: dict[str, Any] = {}

    @property
    def registered(self) -> bool:
        """Whether this writer has a directory, as far as it knows."""
        return bool(self.name)

    @property
    def path(self) -> Path | None:
        """This writer's directory; None if it has none."""
        return self._path if self.registered else None

    def lease_valid(self, now: float) -> bool:
        """Whether the lease holds at ``now``. If not, the leader may have fenced this writer."""
        return self.registered and now - self._written_at < LEASE_SECONDS

    def new_working_path(self) -> str:
        """A unique path for a file that is being written. Any thread."""
        return f"{self._path}/{WORKING_PREFIX}{os.urandom(6).hex()}"

    def register(self, now: float) -> None:
        """Creates the writer's directory under a new name."""
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
        self._path, self.name, self._written_at, self._revocation = path, name, now, None

    def unregister(self) -> None:
        """This writer was fenced, or has released its directory. Its grants are void."""
        self.name = ""
        self.revocations += 1
        self._grants.invalidate()

    # The record.

    def request_grant(self, size_bytes: int, least_bytes: int) -> None:
        """Requests a grant, unless a request is pending."""
        if self._document["bytes"]:
            return
        self._document.update(ask=self._document["ask"] + 1, bytes=size_bytes, least=least_bytes)
        self._dirty = True

    def report_enospc(self) -> None:
        """Reports that the file system is full."""
        self._increment("full")

    def request_recount(self) -> None:
        """Reports that the ledger may be wrong."""
        self._increment("recount")

    def _increment(self, counter: str) -> None:
        self._document[counter] = self._document.get(counter, 0) + 1
        self._dirty = True

    def settle(self) -> None:
        """Reports grants that have ended."""
        for number, used in self._grants.pop_settled().items():
            self._document["settled"][str(number)] = used
            self._dirty = True

    def write_record(self, now: float) -> None:
        """Writes the record if it has changed or a heartbeat is due."""
        if not self._dirty and now - self._written_at < HEARTBEAT_SECONDS:
            return
        self._document["beat"] += 1
        self._document["used"] = {
            str(number): used for number, used in self._grants.used_bytes().items()
        }
        if self.announced is not None:
            self._document["log"] = self.announced
        try:
            self.server_time = record.rewrite(self._path / RECORD, self._document)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            self.unregister()
            return
        self._written_at, self._dirty = now, False

    # The ledger.

    def apply_ledger(self, term: int, ledger: dict[str, Any]) -> None:
        """Applies what the leader's ledger has for this writer."""
        entry = ledger.get("writers", {}).get(self.name)
        if entry is None:
            return
        settled = self._document["settled"]
        # A number that was answered and is no longer open is accounted for in the ledger.
        for number in [
            each
            for each in settled
            if int(each) not in entry["open"] and int(each) <= entry["answer"][0]
        ]:
            del settled[number]
            self._dirty = True
        number, size_bytes = entry["answer"]
        if self._document["bytes"] and number == self._document["ask"]:
            self._document["bytes"] = 0
            self._dirty = True
            if not size_bytes:
                self._grants.deny()
            else:
                self._take_up(term, number, size_bytes)
        revocation = (term, ledger.get("recall"))
        if (
            self._revocation is not None
            and self._revocation[0] == term
            and self._revocation != revocation
        ):
            self._grants.revoke()
        self._revocation = revocation

    def _take_up(self, term: int, number: int, size_bytes: int) -> None:
        # The rename checks the fencing token: a leader whose term has ended has no directory.
        offer = term_path(self._root, term) / offer_name(self.name, number)
        try:
            os.rename(offer, self._path / grant_name(number, size_bytes))
        except OSError as error:
            if error.errno not in GONE:
                raise
            return
        self._grants.add(number, size_bytes)

    def close(self, now: float) -> None:
        """Returns all grants. Files still being written are settled when this writer is fenced."""
        if not self.registered:
            return
        self._grants.revoke()
        self.settle()
        # The leader charges grants with a write in flight in full: it finds them open.
        self._document["closed"] = True
        self._dirty = True
        self.write_record(now)
