"""Reads and verifies every object of a directory (``kvtier verify``).

It takes no part in the protocol of the directory. Removes corrupt objects if it is asked to, and
nothing else: an object that is not proven by the given keys may be another's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import (
    TierCorruptError,
    TierForeignError,
    TierMissError,
    TierUntrustedError,
)
from kvtier.tiers.base import ObjectRef
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.format import HEADER_BYTES, read_fixed
from kvtier.tiers.filesystem.seal import open_object
from kvtier.tiers.filesystem.walker import (
    ObjectFile,
    ScanReport,
    has_foreign_header,
    object_path,
    unlinked,
    walk,
)
from kvtier.tiers.isolation_keys import KeySet


@dataclass(frozen=True, slots=True)
class FailedObject:
    """An object that failed verification. ``corrupt``: proven; else it could not be read, or it is
    ``untrusted``: its tag is not proven by the keys.
    """

    path: str
    reason: str
    corrupt: bool = False
    deleted: bool = False
    untrusted: bool = False


@dataclass(slots=True)
class VerifyReport:
    """Counts of ``verify``. ``objects`` were verified. ``unproven``: those among them whose tag was
    not checked, because no keys were given. ``not_verified``: by reason, those that this process
    could not verify: "no_key" (encrypted, and no keys were given), "unverifiable" (xxhash is not
    installed), "other_version".
    """

    objects: int = 0
    size_bytes: int = 0
    vanished: int = 0
    unproven: int = 0
    not_verified: Counter[str] = field(default_factory=Counter)
    bad: list[FailedObject] = field(default_factory=list)

    @property
    def corrupt(self) -> int:
        """How many objects are proven to be corrupt."""
        return sum(each.corrupt for each in self.bad)

    @property
    def untrusted(self) -> int:
        """How many objects are not proven by the given keys."""
        return sum(each.untrusted for each in self.bad)

    @property
    def seen(self) -> int:
        """Objects so far."""
        return self.objects + self.vanished + self.not_verified.total() + len(self.bad)


def objects_of(root: Path, now: float) -> list[ObjectFile]:
    """Every object, by name and size."""
    return [
        found for bucket in walk(root, now, ScanReport(), clean=False) for found in bucket.objects
    ]


def verify(
    root: Path,
    objects: list[ObjectFile],
    keys: KeySet | None = None,
    *,
    delete: bool,
    progress: Callable[[VerifyReport], None] = lambda _: None,
) -> VerifyReport:
    """Reads and verifies objects; ``delete`` removes corrupt ones. Objects that are removed while
    it runs count as vanished. ``keys``: every object must have a tag of one of them; None: tags are
    not checked, and encrypted objects are not verified.
    """
    verifier = _Verifier(root, keys)
    report = VerifyReport()
    for found in objects:
        path = object_path(str(root), found.namespace, found.key)
        try:
            sealed = verifier.verify(path, found)
        except TierCorruptError as error:
            if has_foreign_header(path):
                report.not_verified[TierForeignError.reason] += 1
            else:
                deleted = delete and unlinked(path)
                report.bad.append(FailedObject(path, str(error), corrupt=True, deleted=deleted))
        except TierUntrustedError as error:
            if keys is None:
                report.not_verified[error.reason] += 1
            else:
                reason = f"{error.reason}: {error}"
                report.bad.append(FailedObject(path, reason, untrusted=True))
        except TierMissError as error:
            report.not_verified[error.reason] += 1
        except OSError as error:
            # If the directory itself is gone, the object was not removed from it.
            if error.errno in io.GONE and os.path.isdir(root):
                report.vanished += 1
            else:
                report.bad.append(FailedObject(path, str(error.strerror or error)))
        else:
            report.objects += 1
            report.size_bytes += found.size_bytes
            report.unproven += sealed and keys is None
        progress(report)
    return report


class _Verifier:
    """Verifies one object after another, in the same memory."""

    def __init__(self, root: Path, keys: KeySet | None) -> None:
        self._keys = keys
        self._header = memoryview(mmap.mmap(-1, HEADER_BYTES))
        self._buffer = memoryview(mmap.mmap(-1, HEADER_BYTES))
        self._direct = False
        with contextlib.suppress(OSError):
            self._direct = io.direct_io_supported(root)

    def verify(self, path: str, found: ObjectFile) -> bool:
        """Returns whether the object says that it is sealed. Raises ``TierError``, ``OSError``."""
        size = found.size_bytes - HEADER_BYTES
        ref = ObjectRef(found.namespace, found.key)
        # Before memory is allocated for it: a foreign file may have any size.
        start = io.read_start(path, HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
        fixed = read_fixed(memoryview(start), ref, size)
        if self._buffer.nbytes < size:
            self._buffer = memoryview(mmap.mmap(-1, size))
        payload = self._buffer[:size]
        io.read_file(path, self._header, payload, self._direct)
        open_object(self._header, payload, ref, self._keys)
        return bool(fixed.seal.key_id)
