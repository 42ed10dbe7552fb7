"""Walking a directory a little at a time: the index learns what other processes did, the janitor counts.

A pass reads every directory once, in the order of names. It may take as long as it likes: what it finds is taken over bucket by
bucket, and what it did not meet is looked for by name before it is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiers.base import OnChange
from kvtier.tiers.filesystem.direct import GONE
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.layout import DIRECTORY_BYTES, IDENTITY
from kvtier.tiers.filesystem.scan import Bucket, Found, ScanReport, object_path, scan

Counted = Callable[[int, tuple[str, str, str]], None]


@dataclass(slots=True)
class PassResult:
    """What a pass found. ``newest``: per namespace, when anything in it was used last, by the file system's clock."""

    report: ScanReport = field(default_factory=ScanReport)
    newest: dict[str, float] = field(default_factory=dict)
    other_bytes: int = 0


class Pass:
    """One walk. ``counted`` is told of bytes met, with the bucket; None where nobody counts. ``touched_after``: objects used later than this,
    by their file's time, move to the young end. ``shared``: others write here, and what they made or used after that may displace what was used
    longest ago.

    Used by one thread at a time. ``step`` raises ``OSError`` if the root cannot be read.
    """

    def __init__(
        self,
        root: Path,
        index: Index,
        on_change: OnChange,
        now: float,
        counted: Counted | None,
        touched_after: float,
        shared: bool = False,
    ) -> None:
        self.result = PassResult()
        self.began_at = now
        self._root = root
        self._index = index
        self._on_change = on_change
        self._counted = counted
        self._touched_after = touched_after
        self._shared = shared
        self._new: list[Found] = []
        self._costs = self._run(now)
        index.begin_pass()

    def step(self, budget: int) -> bool:
        """Looks at about ``budget`` names; True at the end."""
        spent = 0
        for cost in self._costs:
            spent += cost
            if spent >= budget:
                self._take_over()
                return False
        return True

    def _run(self, now: float) -> Iterator[int]:
        result = self.result
        for bucket in scan(self._root, now, result.report, sweep=self._counted is not None):
            result.other_bytes += bucket.other_bytes
            if bucket.second:
                self._objects(bucket)
            else:
                self._above(bucket)
            yield bucket.entries
        self._take_over()
        yield 1
        for number, (namespace, key) in enumerate(self._index.unmet()):
            self._missing(namespace, key)
            if number % 64 == 63:
                yield 64

    def _above(self, bucket: Bucket) -> None:
        if not bucket.first:
            newest = 0.0
            try:
                newest = os.lstat(f"{bucket.path}/{IDENTITY}").st_mtime
            except OSError:
                try:
                    # Without a description: when something was last made or removed here.
                    newest = os.lstat(bucket.path).st_mtime
                except OSError:
                    newest = self.began_at
            self.result.newest[bucket.namespace] = newest
        self._count(bucket)

    def _objects(self, bucket: Bucket) -> None:
        newest = self.result.newest
        for found in bucket.objects:
            newest[found.namespace] = max(newest.get(found.namespace, 0.0), found.used_at)
            if not self._index.meet(found.namespace, found.key):
                self._new.append(found)
            elif found.used_at > self._touched_after:
                self._index.touch(found.namespace, found.key)
        self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        if self._counted is None:
            return
        size = DIRECTORY_BYTES + bucket.other_bytes + sum(found.size_bytes for found in bucket.objects)
        if bucket.empty and bucket.second:
            try:
                os.rmdir(bucket.path)
            except OSError:
                pass
            else:
                size = 0
        self._counted(size, (bucket.namespace, bucket.first, bucket.second))

    def _take_over(self) -> None:
        """New objects, oldest first, so that they take their places in the order of use. A file system's clock ticks some hundred times
        a second; among equals the key decides, so that all processes see one order."""
        self._new.sort(key=lambda found: (found.used_at, found.key))
        for found in self._new:
            # What only this process writes was indexed when it was written; it left for what was used later.
            take = self._index.add if self._shared and found.used_at > self._touched_after else self._index.find
            if take(found.namespace, found.key, found.size_bytes):
                self._on_change(found.namespace, found.key, True)
        self._new.clear()

    def _missing(self, namespace: str, key: bytes) -> None:
        try:
            os.lstat(object_path(str(self._root), namespace, key))
        except OSError as error:
            if error.errno in GONE and self._index.remove(namespace, key):
                self._on_change(namespace, key, False)
