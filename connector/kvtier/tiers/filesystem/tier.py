"""Putting a whole file in its place: written in the writer's own directory, within a grant, then renamed.

A writer that was given up has no directory any more, so what it was writing cannot appear afterwards. The rename finds out whether the place's
directory is there; only where it is not, directories are made, and charged.

The file system tier: a directory within a budget, which other processes may use as well (layout.py).

A file appears under its name whole, by a rename, or not at all, and only within bytes that the directory's ledger granted before it was
begun (keeper.py, ledger.py), so the directory never exceeds its capacity. What is read is verified before it is believed; what is not what it
should be is removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.tiers.base import (
    ObjectMeta,
    ObjectRef,
    OnChange,
    Tier,
    TierCapabilities,
    TierLimits,
    TierUsage,
    aligned,
)
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    clear_padding,
    read_header,
    verify_payload,
    write_header,
)
from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS, Index
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import DIRECTORY_BYTES, IDENTITY, Modes, make_directory
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.filesystem.passes import TOUCH_SECONDS
from kvtier.tiers.filesystem.quota import Taken
from kvtier.tiers.filesystem.walker import ScanReport, object_path

_ATTEMPTS = 4
"""Directories are removed when they are empty, by the janitor, at any moment: making and using one may have to be done again."""


def place(
    keeper: DirectoryMaintenance,
    root: Path,
    path: str,
    size_bytes: int,
    modes: Modes,
    write: Callable[[str], None],
) -> None:
    """Has ``write`` make a file of ``size_bytes`` under a temporary name, and renames it to ``path`` below ``root``.

    Raises ``TierError`` and ``OSError``; then nothing is at ``path`` that was not there before.
    """
    taken = keeper.obtain(size_bytes)
    temporary = keeper.writer.working_path()
    used = size_bytes
    try:
        write(temporary)
        _rename(keeper, taken, root, temporary, path, modes)
    except BaseException as error:
        try:
            os.unlink(temporary)
            used = 0
        except FileNotFoundError:
            used = 0
        except OSError:
            # It is still there, and stays charged until a count or the end of this writer.
            pass
        if (
            isinstance(error, OSError)
            and error.errno in GONE
            and not os.path.isdir(os.path.dirname(temporary))
        ):
            _lost(keeper, root)
        raise
    finally:
        keeper.allowance.spend(taken, used)


def _lost(keeper: DirectoryMaintenance, root: Path) -> None:
    if not os.path.isdir(root):
        raise OSError(errno.ESTALE, "the tier's directory has vanished", str(root))
    keeper.wake()
    raise TierNoSpaceError(f"{root}: this process was taken for dead, and its grant has ended")


def _rename(
    keeper: DirectoryMaintenance, taken: Taken, root: Path, temporary: str, path: str, modes: Modes
) -> None:
    for attempt in range(_ATTEMPTS):
        if not keeper.may_rename(taken):
            raise TierNoSpaceError(f"{root}: the grant ended before the file was whole")
        try:
            os.rename(temporary, path)
            return
        except OSError as error:
            if error.errno not in GONE or attempt == _ATTEMPTS - 1 or not os.path.exists(temporary):
                raise
        _make_directories(keeper, root, Path(path).parent, modes)


def _make_directories(
    keeper: DirectoryMaintenance, root: Path, directory: Path, modes: Modes
) -> None:
    """Makes what is missing between ``root``, which must be there, and ``directory``."""
    below = directory.relative_to(root).parts
    taken = keeper.obtain(len(below) * DIRECTORY_BYTES)
    made = 0
    try:
        for count in range(1, len(below) + 1):
            with contextlib.suppress(FileNotFoundError):
                made += make_directory(root.joinpath(*below[:count]), modes)
    finally:
        keeper.allowance.spend(taken, made * DIRECTORY_BYTES)


_log = logging.getLogger("kvtier.tiers.filesystem")


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return True


def _ignore(_namespace: str, _key: bytes, _present: bool) -> None:
    return


class FileSystemTier(Tier):
    """See the module's text. ``gid``: group of the files made, None for the process's own. ``wall``: seconds since the epoch. ``clock``: monotonic
    seconds, for leases. ``max_objects``: how many are indexed at most (index.py).

    Raises nothing in the constructor; ``open`` says what is wrong with the directory.
    """

    def __init__(
        self,
        document: FileSystemTierDocument,
        limits: TierLimits,
        gid: int | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        max_objects: int = MAX_INDEXED_OBJECTS,
    ) -> None:
        self.name = document.name
        self.capabilities = TierCapabilities(
            persistent=True, shared=document.sharing != "Pod", indexed=True
        )
        self.report = ScanReport()
        self.direct = False
        self._probe_again = False
        self._root = Path(document.path)
        self._direct_io = document.direct_io
        self._limits = limits
        self._modes = Modes(0o640, 0o750, None) if gid is None else Modes(0o660, 0o2770, gid)
        self._wall = wall
        self._index = Index(limits.capacity_bytes, max_objects, self._displaced)
        self._max_objects = max_objects
        self._said_left_out = False
        self._on_change: OnChange = _ignore
        self._headers = threading.local()
        self._described: set[str] = set()
        self._clock = clock
        self._noted_at = clock()
        self.keeper = DirectoryMaintenance(
            self._root,
            self._index,
            lambda: self._limits,
            self._modes,
            shared=self.capabilities.shared,
            on_change=self._changed,
            clock=clock,
            in_use=lambda: self._described,
        )

    # Life.

    def open(self, on_change: OnChange) -> None:
        """Probes the mount, scans, reports every object. Raises ``TierUnavailableError`` if the directory cannot be used. Where the file
        system has no room left, not even for a record, or is read-only, what is there is served, and stores begin when it takes them."""
        self._on_change = on_change
        try:
            self.keeper.start()
        except TierNoSpaceError as error:
            _log.warning("%s; what is there is served, and nothing stored", error)
        self._probe_direct()
        self.report = self.keeper.first_pass().result.report
        self._say_left_out()
        self.keeper.run()

    def _probe_direct(self) -> None:
        self._probe_again = False
        try:
            works = self._direct_io != "Never" and io.direct_io_supported(self._root)
        except OSError as error:
            if error.errno not in io.NO_SPACE:
                raise io.tier_error(error, str(self._root)) from error
            works, self._probe_again = False, True
        if self._direct_io == "Always" and not works:
            raise TierUnavailableError(
                f"{self._root}: direct I/O does not work here, and directIO is Always"
            )
        self.direct = works

    def close(self) -> None:
        """Nothing is evicted or written any more; calls under way end by themselves. Grants and office go back, if the storage answers
        within seconds."""
        self.keeper.stop()

    def configure(self, limits: TierLimits) -> None:
        """Takes over changed limits. A lowered capacity is reached within seconds, and by the next ``maintain`` at the latest."""
        lowered = limits.capacity_bytes < self._limits.capacity_bytes
        self._limits = limits
        self._index.set_capacity(limits.capacity_bytes)
        if lowered:
            # What was granted by the measure of the old capacity may be all of the new one.
            self.keeper.allowance.recall()
        self.keeper.wake()

    def _changed(self, namespace: str, key: bytes, present: bool) -> None:
        self._on_change(namespace, key, present)

    def _displaced(self, namespace: str, key: bytes) -> None:
        self._on_change(namespace, key, False)

    def _say_left_out(self) -> None:
        if self._index.left_out and not self._said_left_out:
            self._said_left_out = True
            _log.warning(
                "%s holds more objects than the %d that are indexed; %d are not served until there is room for them",
                self._root,
                self._max_objects,
                self._index.left_out,
            )

    # Answers from memory.

    def contains(self, ref: ObjectRef) -> bool:
        """Whether the index has the object."""
        return self._index.contains(ref.namespace, ref.key)

    def keys(self, namespace: str) -> Iterator[bytes]:
        """Snapshot of a namespace's keys."""
        return iter(self._index.keys(namespace))

    def usage(self) -> TierUsage:
        """What the directory is charged for."""
        return self._index.usage()

    def touch(self, ref: ObjectRef) -> None:
        """Moves the object to the young end."""
        self._index.touch(ref.namespace, ref.key)

    # I/O.

    def probe(self, ref: ObjectRef) -> bool:
        """Asks the file system for an object that another process may have made."""
        try:
            status = os.stat(self._path(ref))
        except FileNotFoundError:
            return False
        except OSError as error:
            if self._is_gone(error):
                return False
            raise io.tier_error(error, self._path(ref)) from error
        if status.st_size <= HEADER_BYTES:
            return False
        if self._index.add(ref.namespace, ref.key, status.st_size):
            self._on_change(ref.namespace, ref.key, True)
        return True

    def read(self, ref: ObjectRef, into: memoryview) -> ObjectMeta:
        """Reads and verifies; see the base class."""
        path = self._path(ref)
        header = self._header()
        try:
            modified = io.read_file(path, header, into, self.direct)
            meta = read_header(header, ref, into.nbytes)
            verify_payload(into, meta)
        except TierCorruptError:
            self._discard(ref, path)
            raise
        except OSError as error:
            raise self._read_error(ref, path, error) from error
        self._index.touch(ref.namespace, ref.key)
        if self._wall() - modified > TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                # By the file system's clock, which all who share it can compare; and this needs no ownership.
                os.utime(path)
        return meta

    def _read_error(self, ref: ObjectRef, path: str, error: OSError) -> TierError:
        # Opening a directory for direct I/O is EINVAL, a link ELOOP: neither is an object that could come back.
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.EINVAL) and not _is_file(path):
            self._discard(ref, path)
            return TierCorruptError(f"{path} is not a file")
        if self._is_gone(error):
            self._forget(ref)
            return TierMissError(str(io.tier_error(error, path)))
        if error.errno == errno.ENOENT:
            return TierUnavailableError(f"{self._root} has vanished")
        return io.tier_error(error, path)

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Writes under a temporary name and renames; see the base class."""
        if self._index.contains(ref.namespace, ref.key):
            self._index.touch(ref.namespace, ref.key)
            return
        if self._index.left_out and self.probe(ref):
            # There, only not indexed. Written again it would be charged twice until the next count.
            return
        size = HEADER_BYTES + payload.nbytes
        header = self._header()
        try:
            write_header(header, ref, meta)
        except ValueError as error:
            raise TierUnavailableError(f"{self._path(ref)}: {error}") from error
        self._index.reserve(size)
        try:
            place(
                self.keeper,
                self._root,
                self._path(ref),
                size,
                self._modes,
                self._writing(header, payload, meta),
            )
        except TierError:
            self._index.release(size)
            raise
        except OSError as error:
            self._index.release(size)
            raise self._write_error(error) from error
        if self._index.publish(ref.namespace, ref.key, size):
            self._on_change(ref.namespace, ref.key, True)

    def _writing(
        self, header: memoryview, payload: memoryview, meta: ObjectMeta
    ) -> Callable[[str], None]:
        if payload.readonly:
            payload = memoryview(bytearray(payload))
        clear_padding(payload, meta)

        def write(temporary: str) -> None:
            io.write_file(
                temporary,
                header,
                payload,
                direct=self.direct,
                mode=self._modes.file,
                gid=self._modes.gid,
                sync=self._limits.sync_data,
            )

        return write

    def _write_error(self, error: OSError) -> TierError:
        mapped = io.tier_error(error, str(self._root))
        if isinstance(mapped, TierNoSpaceError) and error.errno != errno.EROFS:
            # The file system is fuller than the budget says: a part of what is there goes, for the next ones.
            with contextlib.suppress(TierError):
                self.keeper.full()
        if isinstance(mapped, TierMissError):
            return TierUnavailableError(f"{self._root} has vanished, or a directory below it")
        return mapped

    def delete(self, ref: ObjectRef) -> None:
        """Removes the file; see the base class."""
        path, generation = self._path(ref), self.keeper.generation()
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._is_gone(error):
                raise io.tier_error(error, path) from error
        else:
            if generation >= 0:
                self.keeper.removed.append((ref.namespace, path, size, generation))
        self._forget(ref)

    def maintain(self) -> None:
        """Keeps the limits, if this process is the directory's janitor; hears what other processes did."""
        if self.keeper.stopping:
            return
        self.keeper.maintain()
        self._say_left_out()
        if self._probe_again:
            self._probe_direct()
        if self._clock() - self._noted_at > TOUCH_SECONDS:
            self._noted_at = self._clock()
            for namespace in list(self._described):
                # An engine that has nothing to store or load uses its namespace, too; janitors of other hosts see it by this.
                with contextlib.suppress(OSError):
                    os.utime(self._root / namespace / IDENTITY)

    def check(self) -> None:
        """Writes, reads and removes one small object outside every namespace. Room for it is set aside."""
        meta = ObjectMeta((4096,), preferred().kind, (preferred().digest(memoryview(bytes(4096))),))
        ref = ObjectRef(f"{0:032x}", os.urandom(8))
        page = memoryview(mmap.mmap(-1, 4096))
        header = self._header()
        if not self.keeper.writer.registered:
            self.keeper.turn()
        path = self.keeper.writer.working_path()
        try:
            write_header(header, ref, meta)
            io.write_file(
                path,
                header,
                page,
                direct=self.direct,
                mode=self._modes.file,
                gid=self._modes.gid,
                sync=False,
            )
            io.read_file(path, header, page, self.direct)
            verify_payload(page, read_header(header, ref, 4096))
        except OSError as error:
            raise io.tier_error(error, path) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def describe_namespace(self, namespace: str, text: str) -> None:
        """Writes, once, why the namespace is one of its own. ``text``: its canonical JSON. May block."""
        if namespace in self._described:
            return
        path, data = self._root / namespace / IDENTITY, text.encode()

        def write(temporary: str) -> None:
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._modes.file
            )
            with os.fdopen(descriptor, "wb") as file:
                if self._modes.gid is not None:
                    os.fchown(descriptor, -1, self._modes.gid)
                    os.fchmod(descriptor, self._modes.file)
                file.write(data)

        try:
            if path.exists():
                # An engine uses the namespace: its retention begins anew.
                with contextlib.suppress(PermissionError):
                    os.utime(path)
            else:
                place(self.keeper, self._root, str(path), aligned(len(data)), self._modes, write)
                self._index.charge(len(data))
        except OSError as error:
            raise io.tier_error(error, str(path)) from error
        self._described.add(namespace)

    # Helpers.

    def _is_gone(self, error: OSError) -> bool:
        """Whether it is the object's file that is there no longer, and not the tier."""
        return error.errno in io.GONE and os.path.isdir(self._root)

    def _path(self, ref: ObjectRef) -> str:
        return object_path(str(self._root), ref.namespace, ref.key)

    def _header(self) -> memoryview:
        """This thread's page-aligned header buffer."""
        buffer: memoryview | None = getattr(self._headers, "buffer", None)
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, HEADER_BYTES))
            self._headers.buffer = buffer
        return buffer

    def _discard(self, ref: ObjectRef, path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
            # How long it was is not certain, so nothing is taken off the books before they are counted.
            self.keeper.doubt()
        self._forget(ref)

    def _forget(self, ref: ObjectRef) -> None:
        if self._index.remove(ref.namespace, ref.key):
            self._on_change(ref.namespace, ref.key, False)
