"""The janitor: what the leader of a directory does. It keeps the ledger, answers grant requests,
fences writers that are dead, and evicts.

One thread serves the writers, and one evicts (maintenance.py). They share the ledger, which any
thread may use, and values that are replaced as a whole. The order of its writes makes it safe to be
killed at any moment: a charge is in the ledger before what it stands for can happen, and the file
of a grant is removed only after the ledger accounts for the grant.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.announcements import (
    LogRole,
    log_blocks,
    log_bytes,
    reported_blocks,
)
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.election import (
    HEARTBEAT_SECONDS,
    UNREADABLE,
    InheritedState,
    LeadershipLostError,
    LeaseWatch,
    fence_directory,
    in_this_process,
    initial_ledger,
    is_dead,
    listdir_uncached,
    read_writer,
)
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import (
    DIRECTORY_BYTES,
    IDENTITY,
    LEDGER,
    SAVED_INDEX,
    grant_name,
    offer_name,
    term_path,
    writers_path,
)
from kvtier.tiers.filesystem.quota import Ledger, grant_bytes, limit_bytes
from kvtier.tiers.filesystem.walker import object_path

EVICTION_BATCH = 256
"""Objects removed at a time, between two rounds of serving writers."""
_ENOSPC_PERCENT = 5
"""What is evicted when the file system is full before the capacity is reached."""
_REVOKE_FRACTION = 8
_UNREMOVABLE = (errno.EPERM, errno.EACCES, errno.EBUSY, errno.EIO)
_NO_FILE = (errno.ENXIO, errno.ELOOP)
"""A pipe without a reader, or a symbolic link."""
_MAX_UNREMOVABLE = 8
"""Files that cannot be removed in one eviction. With more of them the file system itself fails."""
_RECENT_COUNT_SECONDS = 1.0
"""A count that ended so recently has found everything that can be found."""
_FILLED_COUNT_SECONDS = 10.0

BucketName = tuple[str, str, str]


def _has_directories(path: Path) -> bool:
    return any(entry.is_dir(follow_symlinks=False) for entry in os.scandir(path))


def _create_offer(path: Path, mode: int) -> None:
    """Creates an empty file. Raises ``OSError``."""
    # O_NONBLOCK: opening a pipe in its place would wait for a reader.
    flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        os.unlink(path)
        descriptor = os.open(path, flags, mode)
    os.close(descriptor)


@dataclass(slots=True)
class _WriterState:
    watch: LeaseWatch = field(default_factory=LeaseWatch)
    record: dict[str, Any] = field(default_factory=dict)
    answer: tuple[int, int] = (0, 0)
    offered: set[int] = field(default_factory=set)
    enospc_reports: int = 0
    recount_requests: int = 0


class Janitor:
    """The leader's work in one term. Raises ``LeadershipLostError`` and ``OSError``."""

    def __init__(self, directory: TierDirectory, holder: str, inherited: InheritedState) -> None:
        self.term = inherited.term
        self.ledger = Ledger(inherited.base_bytes)
        self.wanted_bytes = 0
        """What is to be evicted for grants, by the next ``evict_for_grants``."""
        self.heartbeat: Callable[[], None] = lambda: self.write_ledger(directory.clock())
        """Called while evicting, however long that takes."""
        self.needs_full_count = inherited.base_bytes is None
        """The index has no more candidates for eviction: only a complete count can find some."""
        self.evicted = 0
        self.fenced = 0
        self._directory = directory
        self._root = directory.root
        self._path = term_path(directory.root, inherited.term)
        self._index = directory.index
        self._recount_requested = inherited.base_bytes is None
        self._counted_at = float("-inf")
        self._counted_bucket: BucketName | None = None
        self._document = initial_ledger(inherited.term, holder)
        self._written_at = float("-inf")
        self._listed_at = float("-inf")
        self._revoked_at = float("-inf")
        self._dirty = True
        self._writers: dict[str, _WriterState] = {}
        self._settled_paths: list[Path] = []
        self._evicting = False
        """Between the high watermark and the low one."""
        self._exhausted: tuple[int, int] | None = None
        """Objects in the index, and generation of the ledger, when evicting freed too little."""
        for name, grants in inherited.grants.items():
            writer = self._writers[name] = _WriterState()
            for number, size_bytes in grants.items():
                self.ledger.charge(name, number, size_bytes)
                writer.answer = max(writer.answer, (number, size_bytes))

    # The ledger.

    @property
    def _capacity_bytes(self) -> int:
        """The capacity, or what the file system has for the directory if that is less."""
        capacity, space = self._directory.limits().capacity_bytes, self._directory.free_space
        allowed = None if space is None else space.allowed_bytes()
        return capacity if allowed is None else min(capacity, allowed)

    @property
    def limit_bytes(self) -> int:
        """What may be charged."""
        writers = len(self._writers)
        limit = limit_bytes(self._capacity_bytes, writers)
        if self._directory.announcements.enabled:
            limit -= log_bytes(self._directory.limits().capacity_bytes, writers)
        return max(limit, 0)

    def grant_bytes(self) -> int:
        """Size of a grant."""
        return grant_bytes(self._capacity_bytes, len(self._writers))

    def _follow_free_space(self) -> None:
        space, held = self._directory.free_space, self.ledger.held_bytes(self._reported_bytes())
        if space is not None and held is not None:
            space.follow(held)

    def write_ledger(self, now: float, *, released: bool = False) -> None:
        """Writes the ledger if it has changed or a heartbeat is due; then removes the files of the
        grants that it settles. ``released``: this leader resigns.
        """
        if not self._dirty and not released and now - self._written_at < HEARTBEAT_SECONDS:
            return
        document = self._document
        document["beat"] += 1
        document.update(
            released=released,
            base=self.ledger.base_bytes,
            charge=self.ledger.charge_bytes,
            capacity=self._directory.limits().capacity_bytes,
            quantum=self.grant_bytes(),
            writers={
                name: {"answer": writer.answer, "open": self.ledger.open_grants(name)}
                for name, writer in self._writers.items()
            },
        )
        if self._directory.announcements.enabled:
            document["logs"] = self._logs()
        try:
            record.rewrite(self._path / LEDGER, document)
        except OSError as error:
            if error.errno in UNREADABLE:
                raise LeadershipLostError from error
            raise
        self._written_at, self._dirty = now, False
        for path in self._settled_paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._settled_paths.clear()

    def _logs(self) -> list[int]:
        """What the ledger says about logs (``announcements.role_in_ledger``)."""
        each, leader = log_blocks(self._directory.limits().capacity_bytes, len(self._writers))
        written = self._directory.announcements.written(True, self._path)
        # A writer whose record has not been read says nothing yet.
        complete = all(
            not writer.record or reported_blocks(writer.record) is not None
            for writer in self._writers.values()
        )
        return [each, leader, written, int(complete)]

    def log_role(self, path: Path | None, name: str) -> LogRole:
        """The role of the leader, which is the writer of that name and directory."""
        each, leader = log_blocks(self._directory.limits().capacity_bytes, len(self._writers))
        others = {
            other: blocks
            for other, writer in self._writers.items()
            if other != name and (blocks := reported_blocks(writer.record)) is not None
        }
        return LogRole(
            path, self._path, True, each, leader, writers=others, count=len(self._writers)
        )

    # Writers.

    def serve_writers(self, now: float, *, supersede: str = "") -> bool:
        """Reads the writers' records, fences those that are dead, answers requests. True if there
        was work.

        ``supersede``: fences the other writers of this process than that one.
        """
        if now - self._listed_at >= HEARTBEAT_SECONDS or supersede:
            self._listed_at = now
            for name in listdir_uncached(writers_path(self._root)):
                self._writers.setdefault(name, _WriterState())
        self._follow_free_space()
        busy = False
        for name, writer in list(self._writers.items()):
            found = read_writer(self._root, name)
            replaced = bool(supersede) and name != supersede and in_this_process(name)
            if (
                writer.watch.expired(None if found is None else found.get("beat"), now)
                or is_dead(name)
                or replaced
            ):
                self._fence(name, writer, found, now)
                busy = True
            elif found is not None:
                busy = self._serve(name, writer, found, now) or busy
        self.write_ledger(now)
        return busy

    def _serve(self, name: str, writer: _WriterState, found: dict[str, Any], now: float) -> bool:
        writer.record = found
        self._settle(name, writer, found)
        for number in [
            each for each in writer.offered if each < found["ask"] or not found["bytes"]
        ]:
            writer.offered.discard(number)
            if self._withdraw_offer(name, number):
                self.ledger.cancel(name, number)
        if found["closed"]:
            self._fence(name, writer, found, now)
            return True
        if found["full"] != writer.enospc_reports:
            writer.enospc_reports = found["full"]
            self._want(self._index.usage().used_bytes * _ENOSPC_PERCENT // 100)
        if not found["bytes"] or found["ask"] <= writer.answer[0]:
            return False
        if self.ledger.base_bytes is not None:
            self._answer(name, writer, found, now)
        return True

    def _settle(self, name: str, writer: _WriterState, found: dict[str, Any]) -> None:
        if found["recount"] != writer.recount_requests:
            writer.recount_requests = found["recount"]
            self._recount_requested = True
        for text, used in found["settled"].items():
            number = int(text)
            size_bytes = self.ledger.grant_size(name, number)
            if size_bytes is not None and self.ledger.settle(name, number, used):
                writer.offered.discard(number)
                self._settled_paths.append(
                    writers_path(self._root) / name / grant_name(number, size_bytes)
                )
                self._dirty = True

    def _withdraw_offer(self, name: str, number: int) -> bool:
        """Withdraws an offer. False if the writer has taken it up."""
        try:
            os.unlink(self._path / offer_name(name, number))
        except FileNotFoundError:
            return False
        return True

    def _answer(self, name: str, writer: _WriterState, found: dict[str, Any], now: float) -> None:
        least, requested = found["least"], max(found["bytes"], self.grant_bytes())
        room = self._find_room(least, requested)
        if room < least and (self.wanted_bytes or self._may_find_room(name, least, now)):
            return
        size_bytes = min(requested, room) if room >= least else 0
        if size_bytes:
            # Charged before it exists.
            self.ledger.charge(name, found["ask"], size_bytes)
            writer.offered.add(found["ask"])
            path = self._path / offer_name(name, found["ask"])
            mode = self._directory.modes.file
            try:
                _create_offer(path, mode)
            except OSError as error:
                self.ledger.cancel(name, found["ask"])
                writer.offered.discard(found["ask"])
                if error.errno in GONE:
                    raise LeadershipLostError from error
                raise
        writer.answer = (found["ask"], size_bytes)
        self._dirty = True

    def _fence(
        self, name: str, writer: _WriterState, found: dict[str, Any] | None, now: float
    ) -> None:
        """Fences a writer: charges its grants in full, then removes its directory together with the
        files that it was writing.
        """
        if found is not None:
            self._settle(name, writer, found)
        for number in self.ledger.open_grants(name):
            if self._withdraw_offer(name, number):
                self.ledger.cancel(name, number)
            else:
                self.ledger.settle(name, number, None)
                self._recount_requested = True
        self._dirty = True
        self.write_ledger(now)
        if fence_directory(writers_path(self._root) / name):
            del self._writers[name]
            self.fenced += 1
        else:
            self._recount_requested = True

    def revoke_grants(self, now: float) -> None:
        """Asks all writers to return their grants."""
        if self.ledger.granted_bytes and now - self._revoked_at >= HEARTBEAT_SECONDS:
            self._revoked_at = now
            self._document["recall"] += 1
            self._dirty = True

    # Counting.

    @property
    def recount_requested(self) -> bool:
        """Whether the ledger may charge too much."""
        return self._recount_requested

    def request_recount(self) -> None:
        """Requests an early count, because the ledger may charge too much."""
        self._recount_requested = True

    def begin_count(self) -> None:
        """Starts a count of the directory."""
        self._counted_bucket = None
        self.needs_full_count = self._recount_requested = False
        self.ledger.begin_count(self._reported_bytes())

    def count_bucket(self, size_bytes: int, bucket: BucketName) -> None:
        """Accounts for a bucket that the count has read."""
        self.ledger.add_counted(size_bytes)
        self._counted_bucket = bucket

    def end_count(self, now: float) -> None:
        """Ends a complete count."""
        self._counted_bucket = None
        self.needs_full_count = False
        self._counted_at = now
        self.ledger.end_count()
        self._dirty = True

    def abort_count(self) -> None:
        """Ends a count that will not be completed."""
        self._counted_bucket = None
        self._recount_requested = True
        self.ledger.abort_count()

    def discard_count(self, now: float) -> None:
        """The count has ended but is not complete: some names could not be read."""
        self.abort_count()
        self._counted_at = now

    def _reported_bytes(self) -> dict[tuple[str, int], int]:
        """Bytes in files of every grant, as the writers reported them last."""
        return {
            (name, int(number)): used
            for name, writer in list(self._writers.items())
            for number, used in writer.record.get("used", {}).items()
        }

    # Eviction.

    def _surplus(self, target_bytes: int) -> int:
        return (self.ledger.charge_bytes or 0) - target_bytes

    def _find_room(self, least: int, requested: int) -> int:
        """The room that there is. If it is less than requested, objects are to be evicted."""
        limit = self.limit_bytes
        if least > limit:
            return 0
        if self._surplus(limit - requested) > 0:
            low = limit * self._directory.limits().low_watermark_percent // 100
            self._want(self._surplus(min(low, limit - least)))
        return -self._surplus(limit)

    def _want(self, surplus_bytes: int) -> None:
        if self._exhausted != (self._index.count, self.ledger.generation):
            self.wanted_bytes = max(self.wanted_bytes, surplus_bytes)

    def evict_for_grants(self) -> bool:
        """Evicts what grants wait for. True if there was something to evict."""
        wanted, self.wanted_bytes = self.wanted_bytes, 0
        if wanted <= 0:
            return False
        freed, _ = self._evict(wanted, None)
        if freed < wanted:
            self._exhausted = (self._index.count, self.ledger.generation)
        return True

    def _may_find_room(self, name: str, least: int, now: float) -> bool:
        """Whether to leave a request pending: other writers may return grants, or a count may find
        objects that are not indexed.
        """
        if least > self.limit_bytes:
            return False
        if now - self._counted_at > _RECENT_COUNT_SECONDS or self._index.unindexed:
            self.needs_full_count = True
            return True
        own = sum(
            self.ledger.grant_size(name, number) or 0 for number in self.ledger.open_grants(name)
        )
        self.revoke_grants(now)
        return self.ledger.granted_bytes > own

    def enforce_limits(self, now: float) -> bool:
        """Evicts one batch on the way from above the high watermark to the low one. True if there
        is more to evict at once.
        """
        if self.ledger.base_bytes is None:
            return False
        self._follow_free_space()
        limits, limit = self._directory.limits(), self.limit_bytes
        low = limit * limits.low_watermark_percent // 100
        if self._surplus(limit) > 0 and self.ledger.granted_bytes > limit // _REVOKE_FRACTION:
            self.revoke_grants(now)
        if not self._evicting and self._surplus(limit * limits.high_watermark_percent // 100) <= 0:
            return False
        self._evicting = self.evict(self._surplus(low), EVICTION_BATCH) > 0
        if self._surplus(low) <= 0:
            self._evicting = False
        elif not self._evicting and (
            now - self._counted_at > self._recent_count_seconds or self._index.unindexed
        ):
            self.needs_full_count = True
        return self._evicting

    @property
    def _recent_count_seconds(self) -> float:
        """While others fill the file system, nothing may be left to evict for days."""
        filled = self._capacity_bytes < self._directory.limits().capacity_bytes
        return _FILLED_COUNT_SECONDS if filled else _RECENT_COUNT_SECONDS

    def evict(self, surplus_bytes: int, at_most: int | None = None) -> int:
        """Removes objects, the ends of the least recently used prefixes first, until
        ``surplus_bytes`` are freed. Returns how many it tried to remove. The ledger's heartbeat
        continues however long that takes.
        """
        return self._evict(surplus_bytes, at_most)[1]

    def _evict(self, surplus_bytes: int, at_most: int | None) -> tuple[int, int]:
        """Bytes freed, and objects that it tried to remove."""
        freed = count = 0
        unremovable: set[tuple[str, bytes]] = set()
        while freed < surplus_bytes and (at_most is None or count < at_most):
            victim = self._index.oldest()
            if victim is None or victim in unremovable:
                break
            try:
                freed += self._remove(*victim)
            except OSError as error:
                unremovable.add(victim)
                if error.errno not in _UNREMOVABLE or len(unremovable) > _MAX_UNREMOVABLE:
                    raise
                # Make it the most recently used, so that it does not block the others.
                self._index.touch(*victim)
            count += 1
            self.heartbeat()
        return freed, count - len(unremovable)

    def _remove(self, namespace: str, key: bytes) -> int:
        path = object_path(str(self._root), namespace, key)
        generation, counted = self.ledger.generation, self._is_counted(namespace, path)
        freed = 0
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
            freed = size
        except OSError as error:
            if error.errno not in GONE:
                raise
        self._credit(freed, counted, generation)
        try:
            os.rmdir(os.path.dirname(path))
        except OSError:
            pass
        else:
            self._credit(DIRECTORY_BYTES, counted, generation)
            freed += DIRECTORY_BYTES
        self.evicted += 1
        self._directory.drop(namespace, key)
        if freed:
            self._directory.announcements.removed(namespace, key)
        return freed

    def _is_counted(self, namespace: str, path: str) -> bool:
        """Whether the running count has passed the object's bucket. To be asked before the object
        is removed: whether a count that comes by meanwhile sees it is not known."""
        first, second = path.rsplit("/", 3)[1:3]
        bucket = self._counted_bucket
        return bucket is not None and (namespace, first, second) <= bucket

    def _credit(self, size_bytes: int, counted: bool, generation: int) -> None:
        if not self.ledger.credit(size_bytes, counted, generation):
            self._recount_requested = True

    def credit_removal(self, size_bytes: int, generation: int) -> None:
        """A file of the directory was removed by this process, but not by this janitor.
        ``generation``: of the ledger before that."""
        if generation % 2 or not self.ledger.credit(size_bytes, False, generation):
            self._recount_requested = True

    def remove_namespace(self, namespace: str) -> None:
        """Removes the objects of a namespace, and its directories if nothing else is in them."""
        for key in self._index.keys(namespace):
            with contextlib.suppress(OSError):
                self._remove(namespace, key)
            self.heartbeat()
        top = self._root / namespace
        with contextlib.suppress(OSError):
            for middle in [
                entry.path for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)
            ]:
                with contextlib.suppress(OSError):
                    os.rmdir(middle)
            # A later scan removes the objects that are not indexed, by the age of this description.
            if not self._index.unindexed or not _has_directories(top):
                os.unlink(top / IDENTITY)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(top / SAVED_INDEX)
        with contextlib.suppress(OSError):
            os.rmdir(top)
        self._recount_requested = True
