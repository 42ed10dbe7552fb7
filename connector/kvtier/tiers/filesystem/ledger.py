"""What a directory is charged for. Arithmetic only: no I/O, no clock, no locks; the janitor's.

The charge is ``base`` (what is there and belongs to no grant) and every grant that is not settled, in full. It is never below what is in the
directory plus what writers may still put there, whatever they do and whenever they die:

* offering a grant charges it before the writer can know of it;
* settling replaces it by what the writer says became files; one that was cut off is settled as if all of it had;
* a count of the directory replaces ``base``. While it runs, files appear and go. What the count may have missed is what was
  published after it began, so for every grant only that part is dropped which its writer had reported before. What it may have seen twice stays
  charged twice, until the next count.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class _Grant:
    size_bytes: int
    counted_bytes: int = 0


@dataclass(slots=True)
class _Count:
    reported: dict[tuple[str, int], int]
    seen_bytes: int = 0
    settled_bytes: int = 0


def limit_bytes(capacity_bytes: int, writers: int) -> int:
    """What may be charged: the capacity without what is set aside."""
    return capacity_bytes - min(OVERHEAD_BYTES * (writers + SPARE_WRITERS), capacity_bytes // _OVERHEAD_FRACTION)


def grant_bytes(capacity_bytes: int, writers: int) -> int:
    """Size of a grant: a sixteenth of the capacity for one or two writers, less for more, at most ``MAX_GRANT_BYTES``."""
    return max(min(MAX_GRANT_BYTES, capacity_bytes // (GRANT_FRACTION * max(2, writers))), 1)


class Ledger:
    """See the module's text. ``base_bytes``: None until a first count, or a predecessor, says it; nothing is granted before."""

    def __init__(self, base_bytes: int | None) -> None:
        self._base = base_bytes
        self._grants: dict[tuple[str, int], _Grant] = {}
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
        self._grants[writer, number] = _Grant(size_bytes)

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
            self._count.settled_bytes += max(used - self._count.reported.get((writer, number), 0), 0)
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
