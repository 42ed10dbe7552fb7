"""The janitor of a directory: keeps the ledger, answers writers, ends those that are gone, evicts.

Used by the keeper, one thread at a time. The order of writing makes every moment a good one to be killed at: a charge is in the
record before what it stands for can happen, and a grant is struck off only after the record has what became of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import record
from kvtier.tiers.filesystem.election import (
    BEAT_SECONDS,
    BROKEN,
    Inherited,
    Watch,
    first_record,
    in_this_process,
    listdir_uncached,
    read_writer,
    remove_fenced,
    surely_gone,
)
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import (
    DIRECTORY_BYTES,
    LEDGER,
    Modes,
    grant_name,
    offer_name,
    seat_path,
    writers_path,
)
from kvtier.tiers.filesystem.quota import Ledger, grant_bytes, limit_bytes
from kvtier.tiers.filesystem.walker import object_path

EVICTION_SLICE = 256
"""Objects removed at a time, between two looks at what writers wish for."""
_FULL_PERCENT = 5
"""What is given up when the file system is full before the capacity is reached."""
_RECALL_FRACTION = 8
_STUCK = (errno.EPERM, errno.EACCES, errno.EBUSY, errno.EIO)
_MAX_STUCK = (
    8  # files that cannot be removed, in one go; more of them are the file system's failure
)
_FRESH_SECONDS = 1.0
"""A count that ended so recently has found what there is to find."""

Removed = Callable[[str, bytes], None]
Position = tuple[str, str, str]


def _has_directories(path: Path) -> bool:
    return any(entry.is_dir(follow_symlinks=False) for entry in os.scandir(path))


class LeadershipLostError(Exception):
    """Somebody else is the janitor now."""


@dataclass(slots=True)
class _Writer:
    watch: Watch = field(default_factory=Watch)
    record: dict[str, Any] = field(default_factory=dict)
    answer: tuple[int, int] = (0, 0)
    offered: set[int] = field(default_factory=set)
    full: int = 0
    recount: int = 0


class Janitor:
    """See the module's text. ``removed`` is told of every object evicted. ``clock``: monotonic seconds. Raises ``LeadershipLostError`` and ``OSError``."""

    def __init__(
        self,
        root: Path,
        holder: str,
        inherited: Inherited,
        limits: Callable[[], TierLimits],
        index: Index,
        modes: Modes,
        removed: Removed,
        clock: Callable[[], float],
    ) -> None:
        self.fence = inherited.fence
        self.ledger = Ledger(inherited.base_bytes)
        self.recount_wanted = inherited.base_bytes is None
        self.hungry = inherited.base_bytes is None
        """Nothing is left to evict that the index knows: a count at full speed is needed."""
        self.counted_at = float("-inf")
        self.evicted = 0
        self.fenced = 0
        self.position: Position | None = None
        """The last bucket that the count under way has finished."""
        self._root = root
        self._seat = seat_path(root, inherited.fence)
        self._limits = limits
        self._index = index
        self._modes = modes
        self._removed = removed
        self._clock = clock
        self._document = first_record(inherited.fence, holder)
        self._written_at = float("-inf")
        self._listed_at = float("-inf")
        self._recalled_at = float("-inf")
        self._dirty = True
        self._writers: dict[str, _Writer] = {}
        self._struck: list[Path] = []
        self._victims: deque[tuple[str, bytes, int]] = deque()
        for name, grants in inherited.grants.items():
            writer = self._writers[name] = _Writer()
            for number, size_bytes in grants.items():
                self.ledger.offer(name, number, size_bytes)
                writer.answer = max(writer.answer, (number, size_bytes))

    # The record.

    @property
    def limit_bytes(self) -> int:
        """What may be charged."""
        return limit_bytes(self._limits().capacity_bytes, len(self._writers))

    def quantum_bytes(self) -> int:
        """Size of a grant."""
        return grant_bytes(self._limits().capacity_bytes, len(self._writers))

    def announce(self, now: float, *, released: bool = False) -> None:
        """Writes the record if it says something new, or a beat is due; then strikes off what it says."""
        if not self._dirty and not released and now - self._written_at < BEAT_SECONDS:
            return
        document = self._document
        document["beat"] += 1
        document.update(
            released=released,
            base=self.ledger.base_bytes,
            charge=self.ledger.charge_bytes,
            capacity=self._limits().capacity_bytes,
            quantum=self.quantum_bytes(),
            writers={
                name: {"answer": writer.answer, "open": self.ledger.open_grants(name)}
                for name, writer in self._writers.items()
            },
        )
        try:
            record.rewrite(self._seat / LEDGER, document)
        except OSError as error:
            if error.errno in BROKEN:
                raise LeadershipLostError from error
            raise
        self._written_at, self._dirty = now, False
        for path in self._struck:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._struck.clear()

    # Writers.

    def serve(self, now: float, *, supersede: str = "") -> bool:
        """Reads what writers say, ends those that are gone, answers wishes. True if there was something to do.

        ``supersede``: other writers of this process than that one are ended.
        """
        if now - self._listed_at >= BEAT_SECONDS or supersede:
            self._listed_at = now
            for name in listdir_uncached(writers_path(self._root)):
                self._writers.setdefault(name, _Writer())
        busy = False
        for name, writer in list(self._writers.items()):
            found = read_writer(self._root, name)
            replaced = bool(supersede) and name != supersede and in_this_process(name)
            if (
                writer.watch.expired(None if found is None else found.get("beat"), now)
                or surely_gone(name)
                or replaced
            ):
                self._end(name, writer, found, now)
                busy = True
            elif found is not None:
                busy = self._hear(name, writer, found, now) or busy
        self.announce(now)
        return busy

    def _hear(self, name: str, writer: _Writer, found: dict[str, Any], now: float) -> bool:
        writer.record = found
        self._settle(name, writer, found)
        for number in [
            each for each in writer.offered if each < found["ask"] or not found["bytes"]
        ]:
            writer.offered.discard(number)
            if self._withdrawn(name, number):
                self.ledger.cancel(name, number)
        if found["closed"]:
            self._end(name, writer, found, now)
            return True
        if found["full"] != writer.full:
            writer.full = found["full"]
            self.evict(self._index.usage().used_bytes * _FULL_PERCENT // 100)
        if not found["bytes"] or found["ask"] <= writer.answer[0]:
            return False
        if self.ledger.base_bytes is not None:
            self._answer(name, writer, found, now)
        return True

    def _settle(self, name: str, writer: _Writer, found: dict[str, Any]) -> None:
        if found["recount"] != writer.recount:
            writer.recount = found["recount"]
            self.recount_wanted = True
        for text, used in found["settled"].items():
            number = int(text)
            size_bytes = self.ledger.size(name, number)
            if size_bytes is not None and self.ledger.settle(name, number, used):
                writer.offered.discard(number)
                self._struck.append(
                    writers_path(self._root) / name / grant_name(number, size_bytes)
                )
                self._dirty = True

    def _withdrawn(self, name: str, number: int) -> bool:
        """Takes an offer back; False if it was taken up."""
        try:
            os.unlink(self._seat / offer_name(name, number))
        except FileNotFoundError:
            return False
        return True

    def _answer(self, name: str, writer: _Writer, found: dict[str, Any], now: float) -> None:
        least, wish = found["least"], max(found["bytes"], self.quantum_bytes())
        room = self._room_for(least, wish)
        if room < least and self._may_find_room(name, least, now):
            return
        size_bytes = min(wish, room) if room >= least else 0
        if size_bytes:
            # Charged before it exists.
            self.ledger.offer(name, found["ask"], size_bytes)
            writer.offered.add(found["ask"])
            path = self._seat / offer_name(name, found["ask"])
            try:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, self._modes.file))
            except OSError as error:
                self.ledger.cancel(name, found["ask"])
                writer.offered.discard(found["ask"])
                if error.errno in GONE:
                    raise LeadershipLostError from error
                raise
        writer.answer = (found["ask"], size_bytes)
        self._dirty = True

    def _end(self, name: str, writer: _Writer, found: dict[str, Any] | None, now: float) -> None:
        """Ends a writer: its grants are charged in full, then its directory is removed, with what it was writing."""
        if found is not None:
            self._settle(name, writer, found)
        for number in self.ledger.open_grants(name):
            if self._withdrawn(name, number):
                self.ledger.cancel(name, number)
            else:
                self.ledger.settle(name, number, None)
                self.recount_wanted = True
        self._dirty = True
        self.announce(now)
        if remove_fenced(writers_path(self._root) / name):
            del self._writers[name]
            self.fenced += 1
        else:
            self.recount_wanted = True

    def begin_count(self) -> None:
        """A count of the directory begins."""
        self.position = None
        self.hungry = self.recount_wanted = False
        self.ledger.begin_count(self._reported())

    def end_count(self, now: float) -> None:
        """It has ended."""
        self.position = None
        self.hungry = False
        self.counted_at = now
        self.ledger.end_count()
        self._dirty = True

    def abort_count(self) -> None:
        """It will not be finished."""
        self.position = None
        self.recount_wanted = True
        self.ledger.abort_count()

    def _reported(self) -> dict[tuple[str, int], int]:
        """What is in files of every grant, by the writers' latest word."""
        return {
            (name, int(number)): used
            for name, writer in self._writers.items()
            for number, used in writer.record.get("used", {}).items()
        }

    # Room.

    def _surplus(self, target_bytes: int) -> int:
        return (self.ledger.charge_bytes or 0) - target_bytes

    def _room_for(self, least: int, wish: int) -> int:
        limit = self.limit_bytes
        if least > limit:
            return 0
        if self._surplus(limit - wish) > 0:
            low = limit * self._limits().low_watermark_percent // 100
            self.evict(self._surplus(min(low, limit - least)))
        return -self._surplus(limit)

    def _may_find_room(self, name: str, least: int, now: float) -> bool:
        """Whether a wish is better left open: others may give back, a count may find objects that the index does not know."""
        if least > self.limit_bytes:
            return False
        if now - self.counted_at > _FRESH_SECONDS or self._index.left_out:
            self.hungry = True
            return True
        own = sum(self.ledger.size(name, number) or 0 for number in self.ledger.open_grants(name))
        self.recall(now)
        return self.ledger.granted_bytes > own

    def recall(self, now: float) -> None:
        """Asks writers to give back what they hold."""
        if self.ledger.granted_bytes and now - self._recalled_at >= BEAT_SECONDS:
            self._recalled_at = now
            self._document["recall"] += 1
            self._dirty = True

    def enforce(self, now: float) -> bool:
        """One slice of the way from above the high watermark to the low one. True if there is more to do at once."""
        limits, limit = self._limits(), self.limit_bytes
        if self.ledger.base_bytes is None:
            return False
        low = limit * limits.low_watermark_percent // 100
        if self._surplus(limit) > 0 and self.ledger.granted_bytes > limit // _RECALL_FRACTION:
            self.recall(now)
        if not self._victims and self._surplus(limit * limits.high_watermark_percent // 100) <= 0:
            return False
        self.evict(self._surplus(low), EVICTION_SLICE)
        if self._surplus(low) <= 0:
            self._victims.clear()
            return False
        if not self._victims and (now - self.counted_at > _FRESH_SECONDS or self._index.left_out):
            self.hungry = True
        return bool(self._victims)

    def evict(self, surplus_bytes: int, at_most: int | None = None) -> int:
        """Removes the least recently used objects until that much is freed: the bytes freed. However long that takes, the record goes on
        showing that this janitor lives."""
        freed = count = stuck = 0
        while freed < surplus_bytes and (at_most is None or count < at_most):
            if not self._victims:
                self._victims.extend(self._index.oldest(surplus_bytes - freed))
                if not self._victims:
                    break
            namespace, key, value = self._victims.popleft()
            if self._index.unchanged(namespace, key, value):
                try:
                    freed += self._remove(namespace, key)
                except OSError as error:
                    stuck += 1
                    if error.errno not in _STUCK or stuck > _MAX_STUCK:
                        raise
                    # To the young end: what cannot be removed must not stand before everything that can.
                    self._index.touch(namespace, key)
                count += 1
                self.announce(self._clock())
        return freed

    def _remove(self, namespace: str, key: bytes) -> int:
        path = object_path(str(self._root), namespace, key)
        freed = 0
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
            freed = size
        except OSError as error:
            if error.errno not in GONE:
                raise
        self.credit(namespace, path, freed)
        bucket = os.path.dirname(path)
        try:
            os.rmdir(bucket)
        except OSError:
            pass
        else:
            self.credit(namespace, path, DIRECTORY_BYTES)
            freed += DIRECTORY_BYTES
        self.evicted += 1
        self._removed(namespace, key)
        return freed

    def credit(self, namespace: str, path: str, size_bytes: int) -> None:
        """A file of that bucket is gone."""
        first, second = path.rsplit("/", 3)[1:3]
        counted = self.position is not None and (namespace, first, second) <= self.position
        self.ledger.removed(size_bytes, counted)

    def remove_namespace(self, namespace: str) -> None:
        """Removes everything of ours in a namespace, and its directories where nothing else is in them."""
        for key in self._index.keys(namespace):
            with contextlib.suppress(OSError):
                self._remove(namespace, key)
            self.announce(self._clock())
        top = self._root / namespace
        with contextlib.suppress(OSError):
            for middle in [
                entry.path for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)
            ]:
                with contextlib.suppress(OSError):
                    os.rmdir(middle)
            # What the index had no room for goes after a later pass, by the age of the same description.
            if not self._index.left_out or not _has_directories(top):
                os.unlink(top / "identity.json")
        with contextlib.suppress(OSError):
            os.rmdir(top)
        self.recount_wanted = True
