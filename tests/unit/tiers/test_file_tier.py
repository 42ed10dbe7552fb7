"""The file tier beyond the conformance suite: names, order of use, modes, mounts, concurrency."""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.tier_files import bytes_below, files_below

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.harness.file_writers import bytes_at_once
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import ObjectMeta, ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.io import tier_error
from kvtier.tiers.filesystem.walker import object_path

HOUR = 3_600.0


def make(
    root: Path,
    limits: TierLimits | None = None,
    gid: int | None = None,
    direct_io: str = "Auto",
    sharing: str = "Pod",
) -> FileSystemTier:
    document = FileSystemTierDocument(
        name="disk", path=str(root), sharing=sharing, direct_io=direct_io
    )
    return FileSystemTier(document, limits or TierLimits(1 << 30), gid=gid)


@contextmanager
def opened(root: Path, *arguments: object, **options: object) -> Iterator[FileSystemTier]:
    tier = make(root, *arguments, **options)
    tier.open(lambda *_: None)
    try:
        yield tier
    finally:
        tier.close()


def path_of(root: Path, ref: ObjectRef) -> Path:
    return Path(object_path(str(root), ref.namespace, ref.key))


def object_bytes(root: Path) -> int:
    return bytes_below(root, ".kv")


# What a directory may hold.


def test_foreign_names_are_ignored(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with opened(tmp_path) as tier:
        tier.write(ref, payload, meta)
    strangers = [
        tmp_path / "lost+found" / "#123",
        tmp_path / "notes.txt",
        tmp_path / NAMESPACE / "zz" / "00" / "x.kv",
        tmp_path / NAMESPACE / "readme",
        path_of(tmp_path, ref).with_name("not-hex.kv"),
        path_of(tmp_path, ref).with_name("abc.kv"),
        tmp_path / ("A" * 32) / "00" / "00" / "00.kv",
    ]
    for each in strangers:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(b"mine")
    os.mkfifo(path_of(tmp_path, ref).with_name("pipe"))
    found: list[tuple[str, bytes, bool]] = []
    tier = make(tmp_path)
    tier.open(lambda *change: found.append(change))
    assert found == [(NAMESPACE, ref.key, True)]
    assert tier.read(ref, buffer(payload.nbytes)) == meta
    assert all(each.read_bytes() == b"mine" for each in strangers)
    tier.close()


@pytest.mark.parametrize("size", [0, 1, 4_096, 8_191, 12_289])
def test_a_file_that_cannot_be_an_object_is_not_announced(tmp_path: Path, size: int) -> None:
    ref, payload, meta = make_object(1)
    path = path_of(tmp_path, ref)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))
    found: list[object] = []
    tier = make(tmp_path)
    tier.open(lambda *change: found.append(change))
    assert found == []
    assert not tier.contains(ref)
    tier.write(ref, payload, meta)
    assert tier.read(ref, buffer(payload.nbytes)) == meta
    tier.close()


def test_an_object_in_the_wrong_bucket_is_removed(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with opened(tmp_path) as tier:
        tier.write(ref, payload, meta)
    path = path_of(tmp_path, ref)
    wrong = path.parent.parent / "fe" / path.name
    wrong.parent.mkdir()
    path.rename(wrong)
    with opened(tmp_path) as tier:
        assert not tier.contains(ref)
        assert tier.report.ignored == 1
    os.utime(wrong, (1.0, 1.0))
    with opened(tmp_path) as tier:
        assert not wrong.exists()
        assert tier.usage().objects == 0


def test_a_directory_that_cannot_be_listed_hides_its_own_objects_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, payload, meta = make_object(1)
    first, second = (ObjectRef(NAMESPACE, bytes([0, spread, spread])) for spread in (1, 2))
    with opened(tmp_path) as tier:
        tier.write(first, payload, meta)
        tier.write(second, payload, meta)
    hidden = str(path_of(tmp_path, first).parent)
    listing = os.scandir

    def refuse(path: object) -> object:
        if str(path) == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", hidden)
        return listing(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with opened(tmp_path) as again:
            assert not again.contains(first)
            assert again.read(second, buffer(payload.nbytes)) == meta


def test_a_path_that_is_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("no directory")
    with pytest.raises(TierUnavailableError):
        make(tmp_path / "tier").open(lambda *_: None)


def test_a_root_whose_parent_is_missing_is_a_tier_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(TierError):
        make(tmp_path / "mount" / "tier").open(lambda *_: None)
    assert not (tmp_path / "mount").exists()


# Order and budget.


def test_the_size_of_the_file_system_is_known_after_maintenance(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.maintain()
        size, available = tier.volume()
        volume = os.statvfs(tmp_path)
        assert size == volume.f_blocks * volume.f_frsize
        assert 0 < available <= size


def test_least_recently_used_objects_are_evicted_first(tmp_path: Path) -> None:
    objects = [make_object(seed) for seed in range(20)]
    with opened(tmp_path, TierLimits(1 << 30)) as tier:
        for each in objects:
            tier.write(*each)
        tier.touch(objects[0][0])
        tier.read(objects[1][0], buffer(8_192))
        tier.configure(TierLimits(tier.usage().used_bytes, 90, 50))
        tier.maintain()
        kept = [number for number, each in enumerate(objects) if tier.contains(each[0])]
    assert {0, 1} <= set(kept)
    assert kept[2:] == list(range(20 - len(kept) + 2, 20))
    assert len(kept) < 20


def test_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    objects = [make_object(seed) for seed in range(10)]
    with opened(tmp_path) as tier:
        for number, each in enumerate(objects):
            tier.write(*each)
            stamp = path_of(tmp_path, each[0]).stat().st_mtime - 100 * HOUR + 60 * number
            os.utime(path_of(tmp_path, each[0]), (stamp, stamp))
        tier.read(objects[0][0], buffer(8_192))
    with opened(tmp_path) as again:
        again.configure(TierLimits(object_bytes(tmp_path), 90, 50))
        again.maintain()
        kept = [number for number, each in enumerate(objects) if again.contains(each[0])]
    assert 0 in kept
    assert 9 in kept
    assert 1 not in kept


def test_a_hit_refreshes_the_time_of_a_file_once_an_hour_at_most(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with opened(tmp_path) as tier:
        tier.write(ref, payload, meta)
        path = path_of(tmp_path, ref)
        written = path.stat().st_mtime
        recent, old = written - HOUR / 2, written - 2 * HOUR
        os.utime(path, (recent, recent))
        tier.read(ref, buffer(payload.nbytes))
        assert path.stat().st_mtime == pytest.approx(recent)
        os.utime(path, (old, old))
        tier.read(ref, buffer(payload.nbytes))
        assert path.stat().st_mtime > recent


def test_files_being_written_count_against_the_capacity(tmp_path: Path) -> None:
    capacity = 1 << 20
    largest, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            largest[0] = max(largest[0], bytes_at_once(tmp_path))

    def work(first: int) -> None:
        for seed in range(first, first + 25):
            try:
                tier.write(*make_object(seed, (60_000,)))
            except TierNoSpaceError:
                continue

    with opened(tmp_path, TierLimits(capacity, 90, 60)) as tier:
        threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(4)]
        watcher = threading.Thread(target=watch)
        for thread in (watcher, *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        stop.set()
        watcher.join(60)
        assert tier.usage().objects > 0
        assert tier.usage().used_bytes <= capacity
        assert object_bytes(tmp_path) <= capacity
    assert largest[0] <= capacity


def test_usage_falls_to_what_it_was_when_everything_is_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        objects = [make_object(seed) for seed in range(10)]
        for each in objects:
            tier.write(*each)
        full = tier.usage().used_bytes
        for each in objects:
            tier.delete(each[0])
        assert full - tier.usage().used_bytes >= 10 * (4_096 + 8_192)
        assert tier.usage().objects == 0


# Descriptions, modes, other writers.


def test_a_namespace_is_described_once_and_charged(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        before = tier.usage().used_bytes
        tier.describe_namespace(NAMESPACE, '{"model": "a"}')
        assert tier.usage().used_bytes > before
        described = tier.usage()
        tier.describe_namespace(NAMESPACE, '{"model": "a"}')
        assert tier.usage() == described
    assert (tmp_path / NAMESPACE / "identity.json").read_text() == '{"model": "a"}'
    with opened(tmp_path) as again:
        again.describe_namespace(NAMESPACE, '{"model": "another"}')
    assert (tmp_path / NAMESPACE / "identity.json").read_text() == '{"model": "a"}'


@pytest.mark.parametrize(
    ("gid", "file_mode", "directory_mode"), [(None, 0o640, 0o750), (12_345, 0o660, 0o2770)]
)
def test_files_have_the_configured_group_and_modes(
    tmp_path: Path, gid: int | None, file_mode: int, directory_mode: int
) -> None:
    if gid is not None and os.geteuid() != 0:
        pytest.skip("giving files to another group needs root")
    root, (ref, payload, meta) = tmp_path / "tier", make_object(1)
    before = os.umask(0o027)
    try:
        with opened(root, gid=gid) as tier:
            tier.write(ref, payload, meta)
    finally:
        os.umask(before)
    path = path_of(root, ref)
    assert stat.S_IMODE(path.stat().st_mode) == file_mode
    assert stat.S_IMODE(path.parent.stat().st_mode) == directory_mode
    if gid is not None:
        assert path.stat().st_gid == path.parent.stat().st_gid == gid


def test_a_probe_finds_an_object_of_another_process(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with opened(tmp_path, sharing="Node") as mine, opened(tmp_path, sharing="Node") as other:
        assert not mine.probe(ref)
        other.write(ref, payload, meta)
        assert mine.probe(ref)
        assert mine.contains(ref)
        assert mine.read(ref, buffer(payload.nbytes)) == meta


def test_a_removed_file_is_a_miss_and_is_announced(tmp_path: Path) -> None:
    changes: list[tuple[str, bytes, bool]] = []
    tier, (ref, payload, meta) = make(tmp_path), make_object(1)
    tier.open(lambda *change: changes.append(change))
    tier.write(ref, payload, meta)
    path_of(tmp_path, ref).unlink()
    with pytest.raises(TierMissError):
        tier.read(ref, buffer(payload.nbytes))
    assert changes == [(NAMESPACE, ref.key, True), (NAMESPACE, ref.key, False)]
    tier.close()


def test_a_missing_file_is_no_miss_if_the_root_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **options)

    ref, payload, meta = make_object(1)
    with opened(tmp_path) as tier:
        tier.write(ref, payload, meta)
        path_of(tmp_path, ref).rename(tmp_path / "away")
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            with pytest.raises(TierUnavailableError):
                tier.read(ref, buffer(payload.nbytes))
        assert tier.contains(ref)


# Direct I/O.


def test_a_mount_without_direct_io_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def without(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return really(path, flags, *rest, **more)

    ref, payload, meta = make_object(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", without)
        with opened(tmp_path) as tier:
            assert not tier.direct
            tier.write(ref, payload, meta)
            assert tier.read(ref, buffer(payload.nbytes)) == meta
        with pytest.raises(TierUnavailableError, match="directIO is Always"):
            make(tmp_path, direct_io="Always").open(lambda *_: None)


def test_unaligned_memory_goes_through_the_page_cache(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    odd = memoryview(bytearray(payload.nbytes + 1))[1:]
    odd[:] = payload
    with opened(tmp_path) as tier:
        tier.write(ref, odd, meta)
        into = memoryview(bytearray(payload.nbytes + 1))[1:]
        assert tier.read(ref, into) == meta
        assert into == payload


def test_short_reads_and_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, reading = os.pwritev, os.preadv

    def short(call: Callable[..., int]) -> Callable[..., int]:
        return lambda descriptor, buffers, offset: call(
            descriptor, [memoryview(buffers[0])[:4_096]], offset
        )

    ref, payload, meta = make_object(1, (70_000, 9_000))
    into = buffer(payload.nbytes)
    with opened(tmp_path) as tier, monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", short(writing))
        patch.setattr(os, "preadv", short(reading))
        tier.write(ref, payload, meta)
        assert tier.read(ref, into) == meta
    assert into == payload


@pytest.mark.parametrize("sync_data", [False, True])
def test_sync_data_syncs_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync_data: bool
) -> None:
    calls: list[str] = []
    syncing, renaming, this = os.fdatasync, os.rename, threading.get_ident()
    ref, payload, meta = make_object(1)

    def sync(descriptor: int) -> None:
        if threading.get_ident() == this:
            calls.append("sync")
        syncing(descriptor)

    def rename(source: str, target: str) -> None:
        if str(target).endswith(".kv"):
            calls.append("rename")
        renaming(source, target)

    with opened(tmp_path, TierLimits(1 << 30, sync_data=sync_data)) as tier:
        monkeypatch.setattr(os, "fdatasync", sync)
        monkeypatch.setattr(os, "rename", rename)
        tier.write(ref, payload, meta)
    assert "rename" in calls
    assert ("sync" in calls[: calls.index("rename")]) == sync_data


# Errors.


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, TierMissError),
        (errno.ENOSPC, TierNoSpaceError),
        (errno.EDQUOT, TierNoSpaceError),
        (errno.EIO, TierUnavailableError),
        (errno.EACCES, TierUnavailableError),
        (errno.EROFS, TierNoSpaceError),
        (errno.ESTALE, TierUnavailableError),
        (errno.ENOTCONN, TierUnavailableError),
        (errno.ETIMEDOUT, TierUnavailableError),
    ],
)
def test_os_errors_are_mapped_to_tier_errors(number: int, kind: type[TierError]) -> None:
    error = tier_error(OSError(number, os.strerror(number)), "/some/file")
    assert type(error) is kind
    assert errno.errorcode[number] in str(error)
    assert "/some/file" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_write_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    changes: list[object] = []
    tier, (ref, payload, meta) = make(tmp_path), make_object(1, (70_000,))
    tier.open(lambda *change: changes.append(change))
    tier.write(*make_object(2))
    changes.clear()
    before, files = tier.usage().used_bytes, object_bytes(tmp_path)
    writing, calls = os.pwritev, [0]

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if buffers[-1].nbytes < 60_000:
            return writing(descriptor, buffers, offset)
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(number, os.strerror(number))
        return writing(descriptor, [memoryview(buffers[0])[:4_096]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises((TierUnavailableError, TierNoSpaceError)):
            tier.write(ref, payload, meta)
    assert calls[0] == 2
    assert not tier.contains(ref)
    assert tier.usage().used_bytes <= before
    assert object_bytes(tmp_path) <= files
    assert max(files_below(tmp_path).values(), default=0) <= 60_000
    tier.write(ref, payload, meta)
    assert tier.read(ref, buffer(payload.nbytes)) == meta
    tier.close()


def test_a_read_error_half_way_is_unavailable_and_the_object_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, payload, meta = make_object(1)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path) as tier:
        tier.write(ref, payload, meta)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            with pytest.raises(TierUnavailableError, match="EIO"):
                tier.read(ref, buffer(payload.nbytes))
        assert tier.read(ref, buffer(payload.nbytes)) == meta


def test_wrong_shards_fail_their_checksum_in_a_complete_file(tmp_path: Path) -> None:
    ref, payload, meta = make_object(1)
    with opened(tmp_path) as tier:
        tier.write(ref, payload, ObjectMeta(meta.shard_bytes, meta.checksum_kind, (bytes(16),)))
        with pytest.raises(TierCorruptError, match="shard 0"):
            tier.read(ref, buffer(payload.nbytes))


def test_a_closed_tier_writes_nothing(tmp_path: Path) -> None:
    tier = make(tmp_path)
    tier.open(lambda *_: None)
    tier.write(*make_object(1))
    before = object_bytes(tmp_path)
    tier.close()
    with pytest.raises(TierUnavailableError):
        tier.write(*make_object(2))
    assert object_bytes(tmp_path) == before


def test_after_a_restart_a_read_tells_what_an_object_follows(tmp_path: Path) -> None:
    """The index of a new process does not know it; without it, the beginning of a prompt, which
    was stored first, would be evicted first."""
    (first, payload, meta), (second, _, _) = make_object(1), make_object(2)
    with opened(tmp_path) as tier:
        tier.write(first, payload, meta)
        tier.write(second, payload, replace(meta, previous=first.key))
    with opened(tmp_path) as tier:
        assert tier._index.previous(NAMESPACE, second.key) == b""
        assert tier.read(second, buffer(payload.nbytes)).previous == first.key
        assert tier._index.oldest() == (NAMESPACE, second.key)
