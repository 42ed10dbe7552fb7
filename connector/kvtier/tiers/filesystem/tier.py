"""The file system tier: a directory within a budget.

    <root>/<namespace>/identity.json              why this namespace is one of its own, for people
    <root>/<namespace>/<2 hex>/<2 hex>/<key>.kv   one object (format.py)
    <root>/.../.tmp-<boot>-<pid space>-<pid>-<random>   being written

A file appears under its name whole, by a rename, or not at all. The budget is charged before a file is begun, so the directory never
exceeds it. What is read is verified before it is believed; what is not what it should be is removed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.errors import TierCorruptError, TierError, TierMissError, TierNoSpaceError, TierUnavailableError
from kvtier.tiers.base import ObjectMeta, ObjectRef, OnChange, Tier, TierCapabilities, TierLimits, TierUsage
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem import direct
from kvtier.tiers.filesystem.format import HEADER_BYTES, clear_padding, read_header, verify_payload, write_header
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.scan import TEMPORARY_PREFIX, ScanReport, object_path, process_tag, scan
from kvtier.topology.models import FileSystemTierDocument

TOUCH_SECONDS = 3600.0
"""A hit refreshes a file's time at most this often: enough for the order of eviction to outlive a restart, cheap enough for NFS."""
_EVICTION_ROUNDS = 3


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return True


def _ignore(_namespace: str, _key: bytes, _present: bool) -> None:
    return


class FileSystemTier(Tier):
    """See the module's text. ``gid``: group of the files made, None for the process's own. ``wall``: seconds since the epoch.

    Raises nothing in the constructor; ``open`` says what is wrong with the directory.
    """

    def __init__(
        self,
        document: FileSystemTierDocument,
        limits: TierLimits,
        gid: int | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = document.name
        self.capabilities = TierCapabilities(persistent=True, shared=document.sharing != "Pod", indexed=True)
        self.report = ScanReport()
        self.direct = False
        self._root = Path(document.path)
        self._direct_io = document.direct_io
        self._limits = limits
        self._gid = gid
        self._file_mode, self._directory_mode = (0o640, 0o750) if gid is None else (0o660, 0o2770)
        self._wall = wall
        self._index = Index(limits.capacity_bytes)
        self._on_change: OnChange = _ignore
        self._headers = threading.local()
        self._described: set[str] = set()
        self._evicting = threading.Lock()
        self._closed = False
        self._tag = process_tag()

    # Life.

    def open(self, on_change: OnChange) -> None:
        """Probes the mount, scans, reports every object. Raises ``TierUnavailableError`` if the directory cannot be used."""
        self._on_change = on_change
        try:
            self._make(self._root)
            works = self._direct_io != "Never" and direct.direct_works(self._root)
            if self._direct_io == "Always" and not works:
                raise TierUnavailableError(f"{self._root}: direct I/O does not work here, and directIO is Always")
            self.direct = works
            found = sorted(scan(self._root, self._wall(), self.report), key=lambda each: each.used_at)
        except OSError as error:
            raise direct.tier_error(error, str(self._root)) from error
        self._index.charge(self.report.other_bytes + self.report.temporaries_kept_bytes)
        for each in found:
            if self._index.add(each.namespace, each.key, each.size_bytes):
                on_change(each.namespace, each.key, True)

    def close(self) -> None:
        """Nothing is evicted or written any more; calls under way end by themselves."""
        self._closed = True

    def configure(self, limits: TierLimits) -> None:
        """Takes over changed limits; a lowered capacity is reached by the next ``maintain``."""
        self._limits = limits
        self._index.set_capacity(limits.capacity_bytes)

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
            raise direct.tier_error(error, self._path(ref)) from error
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
            direct.read_file(path, header, into, self.direct)
            meta = read_header(header, ref, into.nbytes)
            verify_payload(into, meta)
        except TierCorruptError:
            self._discard(ref, path)
            raise
        except OSError as error:
            raise self._read_error(ref, path, error) from error
        self._index.touch(ref.namespace, ref.key)
        self._refresh(path)
        return meta

    def _read_error(self, ref: ObjectRef, path: str, error: OSError) -> TierError:
        # Opening a directory for direct I/O is EINVAL, a link ELOOP: neither is an object that could come back.
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.EINVAL) and not _is_file(path):
            self._discard(ref, path)
            return TierCorruptError(f"{path} is not a file")
        if error.errno == errno.ENOENT:
            if not self._root.is_dir():
                return TierUnavailableError(f"{self._root} has vanished")
            self._forget(ref)
        return direct.tier_error(error, path)

    def _refresh(self, path: str) -> None:
        with contextlib.suppress(OSError):
            if self._wall() - os.stat(path).st_mtime > TOUCH_SECONDS:
                os.utime(path, (self._wall(), self._wall()))

    def write(self, ref: ObjectRef, payload: memoryview, meta: ObjectMeta) -> None:
        """Writes under a temporary name and renames; see the base class."""
        if self._index.contains(ref.namespace, ref.key):
            self._index.touch(ref.namespace, ref.key)
            return
        size = HEADER_BYTES + payload.nbytes
        header = self._header()
        try:
            write_header(header, ref, meta)
        except ValueError as error:
            raise TierUnavailableError(f"{self._path(ref)}: {error}") from error
        self._make_room(size)
        try:
            self._write(ref, header, payload, meta)
        except TierError:
            self._index.release(size)
            raise
        except OSError as error:
            self._index.release(size)
            raise self._write_error(error) from error
        if self._index.publish(ref.namespace, ref.key, size):
            self._on_change(ref.namespace, ref.key, True)

    def _write(self, ref: ObjectRef, header: memoryview, payload: memoryview, meta: ObjectMeta) -> None:
        if payload.readonly:
            payload = memoryview(bytearray(payload))
        clear_padding(payload, meta)
        path = self._path(ref)
        directory = os.path.dirname(path)
        self._make(Path(directory))
        temporary = f"{directory}/{TEMPORARY_PREFIX}{self._tag}-{os.urandom(6).hex()}"
        try:
            direct.write_file(
                temporary,
                header,
                payload,
                direct=self.direct,
                mode=self._file_mode,
                gid=self._gid,
                sync=self._limits.sync_data,
            )
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _write_error(self, error: OSError) -> TierError:
        mapped = direct.tier_error(error, str(self._root))
        if isinstance(mapped, TierNoSpaceError):
            # The file system is fuller than the budget says: give up a twentieth of what is there, for the next ones.
            self._evict(int(self._index.usage().used_bytes * 0.95))
        if isinstance(mapped, TierMissError):
            return TierUnavailableError(f"{self._root} has vanished, or a directory below it")
        return mapped

    def _make_room(self, size: int) -> None:
        if self._closed:
            raise TierUnavailableError(f"{self.name} is closed")
        for _ in range(_EVICTION_ROUNDS):
            if self._index.reserve(size):
                return
            self._evict(self._low_watermark() - size)
        raise TierNoSpaceError(
            f"{self.name}: {size} bytes do not fit beside {self._index.usage().used_bytes} of {self._limits.capacity_bytes}"
        )

    def _low_watermark(self) -> int:
        return self._limits.capacity_bytes * self._limits.low_watermark_percent // 100

    def _evict(self, target_bytes: int) -> None:
        """Down to ``target_bytes``, oldest first. One thread evicts at a time; others wait, as they need the room."""
        with self._evicting:
            for namespace, key in self._index.victims(max(target_bytes, 0)):
                try:
                    self.delete(ObjectRef(namespace, key))
                except TierError:
                    return

    def delete(self, ref: ObjectRef) -> None:
        """Removes the file; see the base class."""
        try:
            os.unlink(self._path(ref))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise direct.tier_error(error, self._path(ref)) from error
        self._forget(ref)

    def maintain(self) -> None:
        """Evicts from the high to the low watermark, and from above the capacity."""
        if self._closed:
            return
        high = self._limits.capacity_bytes * self._limits.high_watermark_percent // 100
        if self._index.usage().used_bytes > high:
            self._evict(self._low_watermark())

    def check(self) -> None:
        """Writes, reads and removes one small object outside every namespace."""
        meta = ObjectMeta((4096,), preferred().kind, (preferred().digest(memoryview(bytes(4096))),))
        ref = ObjectRef(f"{0:032x}", os.urandom(8))
        page = memoryview(mmap.mmap(-1, 4096))
        header = self._header()
        path = f"{self._root}/.probe-{self._tag}-{ref.key.hex()}"
        try:
            write_header(header, ref, meta)
            direct.write_file(path, header, page, direct=self.direct, mode=self._file_mode, gid=self._gid, sync=False)
            direct.read_file(path, header, page, self.direct)
            verify_payload(page, read_header(header, ref, 4096))
        except OSError as error:
            raise direct.tier_error(error, path) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def describe_namespace(self, namespace: str, text: str) -> None:
        """Writes, once, why the namespace is one of its own. ``text``: its canonical JSON. May block."""
        if namespace in self._described:
            return
        directory = self._root / namespace
        path, data = directory / "identity.json", text.encode()
        temporary = directory / f"{TEMPORARY_PREFIX}{self._tag}-{os.urandom(6).hex()}"
        try:
            self._make(directory)
            if not path.exists():
                temporary.write_bytes(data)
                os.rename(temporary, path)
                self._index.charge(len(data))
        except OSError as error:
            raise direct.tier_error(error, str(path)) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._described.add(namespace)

    # Helpers.

    def _path(self, ref: ObjectRef) -> str:
        return object_path(str(self._root), ref.namespace, ref.key)

    def _header(self) -> memoryview:
        """This thread's page-aligned header buffer."""
        buffer: memoryview | None = getattr(self._headers, "buffer", None)
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, HEADER_BYTES))
            self._headers.buffer = buffer
        return buffer

    def _make(self, directory: Path) -> None:
        """Makes the directories between root and ``directory``; the root's parent has to be there."""
        try:
            os.mkdir(directory, self._directory_mode)
        except FileExistsError:
            return
        except FileNotFoundError:
            if directory == self._root:
                raise
            self._make_parent(directory)
            self._make(directory)
            return
        if self._gid is not None:
            os.chown(directory, -1, self._gid)
            os.chmod(directory, self._directory_mode)

    def _make_parent(self, directory: Path) -> None:
        if directory.parent == self._root and not self._root.is_dir():
            # The mount is gone: writing beside it, into whatever is below, would fill the wrong disk.
            raise OSError(errno.ESTALE, "the tier's directory has vanished", str(self._root))
        self._make(directory.parent)

    def _discard(self, ref: ObjectRef, path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
        self._forget(ref)

    def _forget(self, ref: ObjectRef) -> None:
        if self._index.remove(ref.namespace, ref.key):
            self._on_change(ref.namespace, ref.key, False)
