"""The file system tier: a directory with a byte capacity, which other processes may share.

A file is written under a temporary name in the writer's own directory, within bytes that the
leader's ledger has granted before (quota.py), and appears under its final name by a rename: as a
whole or not at all. So the directory never exceeds its capacity, and a writer that was fenced has
no directory from which its file could appear later. Object directories are created only where the
rename finds them missing, and are charged.

What is read is verified before it is used. A file that is proven to be corrupt is removed. One that
this process merely cannot use, such as an object without the right tag, is a miss and stays
(unusable.py).

Threads: see ``kvtier.tiers.base``. A background thread maintains the directory (maintenance.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierExpiredError,
    TierForeignError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
    TierUntrustedError,
    TierUnverifiableError,
)
from kvtier.files import volume_bytes
from kvtier.tiers.base import (
    ObjectFacts,
    ObjectMeta,
    ObjectRef,
    OnChange,
    Payload,
    Tier,
    TierCapabilities,
    TierLimits,
    TierUsage,
    aligned,
)
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.announcement_log import AnnouncementLog
from kvtier.tiers.filesystem.announcements import Announcements
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.format import HEADER_BYTES
from kvtier.tiers.filesystem.free_space import FreeSpace
from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS, Index
from kvtier.tiers.filesystem.index_saver import IndexSaver
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import DIRECTORY_BYTES, IDENTITY, Modes, make_directory
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.filesystem.object_files import ObjectFiles
from kvtier.tiers.filesystem.quota import ByteAllocation
from kvtier.tiers.filesystem.scan_scheduler import TOUCH_SECONDS
from kvtier.tiers.filesystem.seal import Sealing
from kvtier.tiers.filesystem.tenant_shares import TenantShares
from kvtier.tiers.filesystem.unusable import UnusableObjects
from kvtier.tiers.filesystem.walker import ScanReport, object_path

_log = logging.getLogger("kvtier.tiers.filesystem")
_RENAME_ATTEMPTS = 4
"""The leader removes empty directories at any moment, so creating and using one may have to be
repeated."""


def _ignore(_namespace: str, _key: bytes, _present: bool) -> None:
    return


class FileSystemTier(Tier):
    """A tier in a directory. ``gid``: group of the created files, None for the process's own.
    ``wall``: seconds since the epoch. ``clock``: monotonic seconds, for leases. ``max_objects``:
    how many objects are indexed at most (index.py). ``sealing``: how objects are tagged or
    encrypted, None for neither. ``pace``: what pauses of background threads are multiplied by, on
    an emulated machine; ``clock`` must run as much slower there.

    The constructor does no I/O; ``open`` reports what is wrong with the directory.
    """

    def __init__(
        self,
        document: FileSystemTierDocument,
        limits: TierLimits,
        gid: int | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        max_objects: int = MAX_INDEXED_OBJECTS,
        sealing: Sealing | None = None,
        pace: float = 1.0,
    ) -> None:
        self.name = document.name
        self.capabilities = TierCapabilities(
            persistent=True,
            shared=document.sharing != "Pod",
            indexed=True,
            expires=True,
            tenants=True,
            scattered=True,
        )
        self.report = ScanReport()
        self._probe_direct_again = False
        self._root = Path(document.path)
        self._root_path = str(self._root)
        self._direct_io = document.direct_io
        self._limits = limits
        self._modes = Modes(0o640, 0o750, None) if gid is None else Modes(0o660, 0o2770, gid)
        self._wall = wall
        self._clock = clock
        self._volume = (0, 0)
        self._index = Index(limits.capacity_bytes, max_objects, self._displaced)
        self._tenants = TenantShares(self._index, self._root, self._drop_unread, wall)
        self._tenants.configure(limits)
        self._reported_unindexed = False
        self._on_change: OnChange = _ignore
        self._files = ObjectFiles(self._modes, sealing)
        self._unusable = UnusableObjects(clock)
        self._described: set[str] = set()
        self._described_at = clock()
        self._free_space = FreeSpace(self._root, lambda: self._limits, clock)
        self._directory = TierDirectory(
            self._root,
            self._modes,
            self._index,
            lambda: self._limits,
            shared=self.capabilities.shared,
            on_change=self._changed,
            in_use=lambda: self._described,
            clock=clock,
            announcements=Announcements(self.capabilities.shared, clock),
            free_space=self._free_space,
            pace=pace,
        )
        self._announcements = self._directory.announcements
        self.maintenance = DirectoryMaintenance(self._directory)
        self.saver = IndexSaver(self._directory, self._files.keys, self._replace_file)
        self.announcement_log = AnnouncementLog(self._directory, self._files.keys)

    # Life cycle.

    def open(self, on_change: OnChange) -> None:
        """Joins the directory, scans it and reports every object.

        Raises ``TierKeyMissingError`` if objects are to be sealed and there are no keys, and
        ``TierUnavailableError`` if the directory cannot be used. If the file system is full
        or read-only, existing objects are served, and stores start when it accepts writes.
        """
        self._on_change = on_change
        self._files.keys()
        try:
            self.maintenance.join()
        except TierNoSpaceError as error:
            _log.warning("%s; serving existing objects without storing", error)
        self._probe_direct()
        self.announcement_log.skip()
        self._index.begin_ordering()
        if not (self.maintenance.verify_in_background() and self.saver.restore()):
            self.report = self.maintenance.scan_completely().result.report
            self.saver.restore_uses()
        self._index.order_discovered()
        self._report_unindexed()
        self.maintenance.start_loop()
        self.announcement_log.start()

    def _probe_direct(self) -> None:
        self._probe_direct_again = False
        try:
            works = self._direct_io != "Never" and io.direct_io_supported(self._root)
        except OSError as error:
            if error.errno not in io.NO_SPACE:
                raise io.tier_error(error, str(self._root)) from error
            works, self._probe_direct_again = False, True
        if self._direct_io == "Always" and not works:
            raise TierUnavailableError(
                f"{self._root}: directIO is Always, but the file system does not support direct I/O"
            )
        self._files.direct = works

    def close(self) -> None:
        """Stops evicting and writing; calls in flight end by themselves. Returns grants and
        leadership if the storage responds within seconds.
        """
        self.announcement_log.stop()
        self.maintenance.stop()

    def configure(self, limits: TierLimits) -> None:
        """Applies changed limits. A lowered capacity is reached within seconds, at the latest by
        the next ``maintain``.
        """
        lowered = limits.capacity_bytes < self._limits.capacity_bytes
        self._limits = limits
        self._index.set_capacity(limits.capacity_bytes)
        self._tenants.configure(limits)
        if lowered:
            # Grants sized for the old capacity may be all of the new one.
            self.maintenance.grants.revoke()
        self.maintenance.wake()

    def keys_changed(self) -> None:
        """The keys of the tier's objects have changed: what could not be used before is announced
        again, and judged when it is read. Any thread may call this.
        """
        self._announce(self._unusable.keys_changed())

    def _announce(self, usable_again: list[ObjectRef]) -> None:
        for ref in usable_again:
            if self._index.contains(ref.namespace, ref.key):
                self._on_change(ref.namespace, ref.key, True)

    # Queries without I/O.

    @property
    def direct(self) -> bool:
        """Whether files are read and written with direct I/O."""
        return self._files.direct

    @property
    def asks_on_miss(self) -> bool:
        """Whether other processes use the directory: what they have just stored, or could not
        announce, is not indexed."""
        return self.capabilities.shared and self._announcements.role.count > 1

    def contains(self, ref: ObjectRef) -> bool:
        """Whether the object is indexed, and not known to be unusable."""
        return self._index.contains(ref.namespace, ref.key) and ref not in self._unusable

    def keys(self, namespace: str) -> Iterator[bytes]:
        """A namespace's keys, each that is there all the while."""
        found = self._index.keys(namespace)
        if not self._unusable:
            return found
        return (key for key in found if ObjectRef(namespace, key) not in self._unusable)

    def usage(self) -> TierUsage:
        """What the directory is charged for."""
        return self._index.usage()

    def volume(self) -> tuple[int, int]:
        """Size and free bytes of its file system."""
        return self._volume

    def counts(self) -> Mapping[tuple[str, str], int]:
        """What was announced, which announcements of others were lost, and what was removed for
        tenants' shares or because it had expired."""
        return {**self._announcements.counts(), **self._tenants.counts()}

    def tenants(self) -> Mapping[bytes, int]:
        """Bytes of each tenant that has objects in the index."""
        return self._index.tenants()

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        """Makes the object the most recently used."""
        self._index.touch(ref.namespace, ref.key, previous)

    # Reading.

    def probe(self, ref: ObjectRef) -> bool:
        """Looks up an object that another process may have stored."""
        path = self._path(ref)
        try:
            status = os.stat(path)
        except OSError as error:
            if not self._is_gone(error):
                raise io.tier_error(error, path) from error
            try:
                if not self._files.revalidate(path):
                    return False
                status = os.stat(path)
            except OSError as again:
                if again.errno in GONE:
                    return False
                raise io.tier_error(again, path) from again
        if status.st_size <= HEADER_BYTES:
            return False
        if self._index.add(ref.namespace, ref.key, status.st_size):
            self._on_change(ref.namespace, ref.key, True)
        return ref not in self._unusable

    def read(self, ref: ObjectRef, into: Payload) -> ObjectMeta:
        """Reads and verifies the object; see the base class."""
        path, generation = self._path(ref), self._unusable.generation
        try:
            meta, modified = self._read_file(path, ref, into)
        except TierCorruptError:
            self._discard(ref, path)
            raise
        except (TierForeignError, TierUnverifiableError):
            self._set_unusable(ref, False, generation)
            raise
        except TierUntrustedError as error:
            self._set_unusable(ref, error.reason != "no_key", generation)
            raise
        except OSError as error:
            raise self._read_error(ref, path, error) from error
        now, facts = self._wall(), ObjectFacts(meta.tenant, meta.expires_at)
        if 0 < meta.expires_at <= now:
            with contextlib.suppress(TierError):
                self.delete(ref)
            raise TierExpiredError(f"{path} has expired")
        previous = self._index.used(ref.namespace, ref.key, meta.previous, facts)
        if now - modified > TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                # By the file system's clock, which all hosts can compare; this needs no ownership.
                os.utime(path)
        if not previous or previous == meta.previous:
            return meta
        return replace(meta, previous=previous)

    def _read_file(self, path: str, ref: ObjectRef, into: Payload) -> tuple[ObjectMeta, float]:
        try:
            return self._files.read(path, ref, into)
        except OSError as error:
            # An announced object, which a cache may know as missing since an earlier lookup.
            if error.errno not in GONE or not self._files.revalidate(path):
                raise
        return self._files.read(path, ref, into)

    def _read_error(self, ref: ObjectRef, path: str, error: OSError) -> TierError:
        # Opening a directory for direct I/O is EINVAL, a link ELOOP: neither is an object.
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.EINVAL) and not _is_file(path):
            self._discard(ref, path)
            return TierCorruptError(f"{path} is not a regular file")
        if self._is_gone(error):
            self._drop(ref)
            return TierMissError(str(io.tier_error(error, path)))
        if error.errno == errno.ENOENT:
            return TierUnavailableError(f"{self._root} does not exist")
        return io.tier_error(error, path)

    # Writing.

    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        """Writes under a temporary name and renames; see the base class."""
        replaces = self._unusable.replaceable(ref)
        if replaces is False:
            # Another release can use it.
            return
        if replaces is None:
            if self._index.contains(ref.namespace, ref.key):
                self._index.touch(ref.namespace, ref.key, meta.previous)
                return
            if self._index.unindexed and self.probe(ref):
                # Exists without being indexed. Writing it again would charge it twice until the
                # next count.
                return
        size = HEADER_BYTES + payload.nbytes
        try:
            write = self._files.writer(ref, payload, meta, self._limits.sync_data)
        except ValueError as error:
            raise TierUnavailableError(f"{self._path(ref)}: {error}") from error
        with self._tenants.claimed(ref, meta, size) as claim:
            self._index.reserve(size)
            try:
                if replaces:
                    self._replace_file(self._path(ref), size, write)
                else:
                    self._publish(self._path(ref), size, write)
            except TierError:
                self._index.release(size)
                raise
            except OSError as error:
                self._index.release(size)
                raise self._write_error(error) from error
            facts = ObjectFacts(meta.tenant, meta.expires_at)
            is_new = self._index.publish(ref.namespace, ref.key, size, meta.previous, facts, claim)
        self._announcements.published(ref.namespace, ref.key, size, meta.previous)
        if self._unusable.discard(ref) or is_new:
            self._on_change(ref.namespace, ref.key, True)

    def _replace_file(self, path: str, size_bytes: int, write: Callable[[str], None]) -> None:
        """Publishes a file in place of the one at ``path``, if there is one."""
        generation, before = self.maintenance.generation(), 0
        with contextlib.suppress(FileNotFoundError):
            before = os.lstat(path).st_size
        self._publish(path, size_bytes, write)
        if before:
            self.maintenance.record_removal(before, generation)

    def _write_error(self, error: OSError) -> TierError:
        mapped = io.tier_error(error, str(self._root))
        if isinstance(mapped, TierNoSpaceError) and error.errno != errno.EROFS:
            # The file system is fuller than the capacity says: objects are evicted for later ones.
            with contextlib.suppress(TierError):
                self.maintenance.on_enospc()
        if isinstance(mapped, TierMissError):
            return TierUnavailableError(f"{self._root} or a directory below it does not exist")
        return mapped

    def _publish(self, path: str, size_bytes: int, write: Callable[[str], None]) -> None:
        """Calls ``write`` with a temporary path for a file of ``size_bytes``, and renames it to
        ``path``. Raises ``TierError`` and ``OSError``; then ``path`` is unchanged.
        """
        with self._free_space.admit(size_bytes):
            self._publish_admitted(path, size_bytes, write)

    def _publish_admitted(self, path: str, size_bytes: int, write: Callable[[str], None]) -> None:
        allocation = self.maintenance.acquire_bytes(size_bytes)
        temporary = self.maintenance.writer.new_working_path()
        used = size_bytes
        try:
            write(temporary)
            self._rename(allocation, temporary, path)
        except BaseException as error:
            try:
                os.unlink(temporary)
                used = 0
            except FileNotFoundError:
                used = 0
            except OSError:
                # It still exists, and stays charged until a count or the end of this writer.
                pass
            if (
                isinstance(error, OSError)
                and error.errno in GONE
                and not os.path.isdir(os.path.dirname(temporary))
            ):
                self._raise_fenced()
            raise
        finally:
            self.maintenance.grants.commit(allocation, used)

    def _raise_fenced(self) -> None:
        if not os.path.isdir(self._root):
            raise OSError(errno.ESTALE, "the directory of the tier does not exist", str(self._root))
        self.maintenance.wake()
        raise TierNoSpaceError(
            f"{self._root}: the leader fenced this process and revoked its grants"
        )

    def _rename(self, allocation: ByteAllocation, temporary: str, path: str) -> None:
        for attempt in range(_RENAME_ATTEMPTS):
            if not self.maintenance.may_publish(allocation):
                raise TierNoSpaceError(
                    f"{self._root}: the grant expired before the file was complete"
                )
            try:
                os.rename(temporary, path)
                return
            except OSError as error:
                if (
                    error.errno not in GONE
                    or attempt == _RENAME_ATTEMPTS - 1
                    or not os.path.exists(temporary)
                ):
                    raise
            self._make_directories(Path(path).parent)

    def _make_directories(self, directory: Path) -> None:
        """Creates the missing directories below the root, which must exist."""
        below = directory.relative_to(self._root).parts
        allocation = self.maintenance.acquire_bytes(len(below) * DIRECTORY_BYTES)
        made = 0
        try:
            for count in range(1, len(below) + 1):
                with contextlib.suppress(FileNotFoundError):
                    made += make_directory(self._root.joinpath(*below[:count]), self._modes)
        finally:
            self.maintenance.grants.commit(allocation, made * DIRECTORY_BYTES)

    def delete(self, ref: ObjectRef) -> None:
        """Removes the file; see the base class."""
        path, generation = self._path(ref), self.maintenance.generation()
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._is_gone(error):
                raise io.tier_error(error, path) from error
        else:
            self.maintenance.record_removal(size, generation)
            self._announcements.removed(ref.namespace, ref.key)
        self._drop(ref)

    # Maintenance.

    def maintain(self) -> None:
        """Enforces the limits if this process is the leader, and notices what others changed."""
        if self.maintenance.stopping:
            return
        self.maintenance.enforce_limits()
        if self.maintenance.janitor is not None and not self.maintenance.verifying:
            self.saver.save_due()
        self._report_unindexed()
        self._tenants.maintain(self.maintenance.janitor is not None)
        self._volume = volume_bytes(self._root) or self._volume
        self._announce(self._unusable.take_expired())
        if self._probe_direct_again:
            self._probe_direct()
        if self._clock() - self._described_at > TOUCH_SECONDS:
            self._described_at = self._clock()
            for namespace in list(self._described):
                # An idle engine uses its namespace too. Leaders on other hosts see it by this time.
                with contextlib.suppress(OSError):
                    os.utime(self._root / namespace / IDENTITY)

    def check(self) -> None:
        """Writes, reads and removes one small object outside every namespace, in bytes that are set
        aside for it.
        """
        if not self.maintenance.writer.registered:
            self.maintenance.run_once()
        path = self.maintenance.writer.new_working_path()
        try:
            self._files.check(path)
        except OSError as error:
            raise io.tier_error(error, path) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def describe_namespace(self, namespace: str, text: str) -> None:
        """Writes, once, why the namespace is separate. ``text``: its canonical JSON. May block."""
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
                # An engine uses the namespace: its retention starts again.
                with contextlib.suppress(PermissionError):
                    os.utime(path)
            else:
                self._publish(str(path), aligned(len(data)), write)
                self._index.add_extra(len(data))
        except OSError as error:
            raise io.tier_error(error, str(path)) from error
        self._described.add(namespace)

    # Helpers.

    def _drop_unread(self, namespace: str, key: bytes) -> None:
        """Removes the file of an object that is no longer needed."""
        self.delete(ObjectRef(namespace, key))

    def _changed(self, namespace: str, key: bytes, present: bool) -> None:
        self._unusable.discard(ObjectRef(namespace, key))
        self._on_change(namespace, key, present)

    def _displaced(self, namespace: str, key: bytes) -> None:
        self._on_change(namespace, key, False)

    def _report_unindexed(self) -> None:
        if self._index.unindexed and not self._reported_unindexed:
            self._reported_unindexed = True
            _log.warning(
                "%s has more objects than the index holds (%d): %d objects are not served",
                self._root,
                self._index.max_objects,
                self._index.unindexed,
            )

    def _is_gone(self, error: OSError) -> bool:
        """Whether the object's file does not exist, while the tier's directory does."""
        return error.errno in GONE and os.path.isdir(self._root)

    def _path(self, ref: ObjectRef) -> str:
        return object_path(self._root_path, ref.namespace, ref.key)

    def _set_unusable(self, ref: ObjectRef, replaceable: bool, generation: int) -> None:
        if self._unusable.add(ref, replaceable, generation):
            self._on_change(ref.namespace, ref.key, False)

    def _discard(self, ref: ObjectRef, path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
            # Its size is not certain, so it stays charged until the next count.
            self.maintenance.request_recount()
            self._announcements.removed(ref.namespace, ref.key)
        self._drop(ref)

    def _drop(self, ref: ObjectRef) -> None:
        self._directory.drop(ref.namespace, ref.key)


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return True
