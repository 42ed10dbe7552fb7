"""Damaged files: a read returns the requested object or misses."""

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.harness.file_writers import temporaries
from kvtier.processes import process_tag
from kvtier.testing.damage import DAMAGES, Damage, flip
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.format import HEADER_BYTES
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.filesystem.walker import TEMPORARY_PREFIX, object_path

FLIPS = 1_000
SHARDS = (20_001, 4_096)


def open_tier(root: Path, capacity_bytes: int = 1 << 30) -> FileSystemTier:
    tier = FileSystemTier(
        FileSystemTierDocument(name="disk", path=str(root), sharing="Pod"),
        TierLimits(capacity_bytes),
    )
    tier.open(lambda *_: None)
    return tier


def path_of(root: Path, ref: ObjectRef) -> Path:
    return Path(object_path(str(root), ref.namespace, ref.key))


def test_each_of_a_thousand_random_flips_is_detected(tmp_path: Path) -> None:
    tier, chance = open_tier(tmp_path), random.Random(20_26)
    in_header = 0
    for number in range(FLIPS):
        ref, payload, meta = make_object(number % 50, SHARDS)
        tier.write(ref, payload, meta)
        path = path_of(tmp_path, ref)
        size = path.stat().st_size
        # Every second flip in the header: it is the smaller part.
        offset = chance.randrange(HEADER_BYTES if number % 2 else size)
        in_header += offset < HEADER_BYTES
        flip(path, offset, chance.randrange(8))
        with pytest.raises(TierCorruptError):
            tier.read(ref, buffer(payload.nbytes))
        assert not tier.contains(ref)
        assert not path.exists()
    assert 400 < in_header < 800


def test_a_flip_of_any_header_byte_is_detected(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)
    path = path_of(tmp_path, ref)
    good, into = path.read_bytes(), buffer(payload.nbytes)
    for offset in range(HEADER_BYTES):
        flip(path, offset, offset % 8)
        with pytest.raises((TierCorruptError, TierMissError)):
            tier.read(ref, into)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(good)
    assert tier.read(ref, into) == meta


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_corrupt_and_removed(tmp_path: Path, damage: Damage) -> None:
    tier = open_tier(tmp_path)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)
    damage(path_of(tmp_path, ref))
    with pytest.raises(TierCorruptError):
        tier.read(ref, buffer(payload.nbytes))
    assert not tier.contains(ref)


def test_an_unreadable_file_is_unavailable_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not apply to root, so the call itself fails.
    tier = open_tier(tmp_path)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(TierUnavailableError, match="EACCES"):
            tier.read(ref, buffer(payload.nbytes))
    assert tier.read(ref, buffer(payload.nbytes)) == meta


def test_a_file_of_another_object_is_corrupt(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    first, second = make_object(1), make_object(2)
    tier.write(*first)
    tier.write(*second)
    shutil.copy(path_of(tmp_path, first[0]), path_of(tmp_path, second[0]))
    with pytest.raises(TierCorruptError, match="another object"):
        tier.read(second[0], buffer(second[1].nbytes))


def test_a_file_of_another_namespace_is_corrupt(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    ref, payload, meta = make_object(1)
    other = ObjectRef("e" * 32, ref.key)
    tier.write(ref, payload, meta)
    tier.write(other, payload, meta)
    shutil.copy(path_of(tmp_path, other), path_of(tmp_path, ref))
    with pytest.raises(TierCorruptError, match="another object"):
        tier.read(ref, buffer(payload.nbytes))
    assert tier.read(other, buffer(payload.nbytes)) == meta


def test_a_missing_directory_is_unavailable_and_not_recreated(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    tier = open_tier(root)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)
    shutil.rmtree(root)
    with pytest.raises(TierUnavailableError):
        tier.read(ref, buffer(payload.nbytes))
    with pytest.raises(TierUnavailableError):
        tier.write(*make_object(2))
    assert not root.exists()


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)
    bucket = path_of(tmp_path, ref).parent
    boot, space, _ = process_tag().split("-")
    dead = bucket / f"{TEMPORARY_PREFIX}{boot}-{space}-4194305-00ff00ff00ff"
    alive = bucket / f"{TEMPORARY_PREFIX}{boot}-{space}-1-00ff00ff00ff"
    elsewhere = bucket / f"{TEMPORARY_PREFIX}{boot}-12345-77-00ff00ff00ff"
    for each in (dead, alive, elsewhere):
        each.write_bytes(bytes(8_192))
    again = open_tier(tmp_path)
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()
    assert list(again.keys(NAMESPACE)) == [ref.key]
    assert again.usage().used_bytes >= tier.usage().used_bytes + 2 * 8_192


def test_a_directory_over_its_capacity_is_reduced_before_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tier's own threads would reduce it before the first look.
    monkeypatch.setattr(DirectoryMaintenance, "start_loop", lambda _: None)
    tier = open_tier(tmp_path)
    for seed in range(20):
        tier.write(*make_object(seed))
        # Among files of one minute the latest goes first: it may be the end of a prompt.
        os.utime(path_of(tmp_path, make_object(seed)[0]), (1_000_000 + 60 * seed,) * 2)
    again = open_tier(tmp_path, capacity_bytes=100_000)
    assert again.usage().used_bytes > 100_000
    again.maintain()
    assert again.usage().used_bytes <= 75_000
    stored = list(tmp_path.rglob("*.kv"))
    assert sum(path.stat().st_size for path in stored) <= 75_000
    assert not again.contains(make_object(0)[0])
    assert again.contains(make_object(19)[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real ext4 file system of 4 MiB."""
    import subprocess

    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
        pytest.skip("mkfs.ext4 is missing (Debian package e2fsprogs)")
    image, mount = tmp_path / "image", tmp_path / "mnt"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 20)
    tools = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True, env=tools)
    done = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mount)], capture_output=True, text=True, env=tools
    )
    if done.returncode:
        pytest.skip(f"loop mounts do not work here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True, env=tools)


def test_a_disk_smaller_than_the_capacity_drops_a_store_and_evicts(small_disk: Path) -> None:
    root = small_disk / "tier"
    tier = open_tier(root, capacity_bytes=1 << 30)
    outcomes: list[str] = []
    for seed in range(300):
        ref, payload, meta = make_object(seed, (60_000,))
        try:
            tier.write(ref, payload, meta)
            outcomes.append("stored")
            assert tier.read(ref, buffer(payload.nbytes)) == meta
        except TierError as error:
            outcomes.append(error.reason)
    assert outcomes.count("no_space") > 0
    assert outcomes[-20:].count("stored") > 0
    assert set(outcomes) == {"stored", "no_space"}
    assert temporaries(root) == []


def fill(directory: Path) -> Path:
    """Fills the disk: no block is free, not even for a directory."""
    other = directory / "others"
    descriptor = os.open(other, os.O_CREAT | os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, bytes(4096))
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (directory / f"other-{number}").mkdir()
    return other


def test_a_tier_that_starts_on_a_full_disk_serves_existing_objects(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = small_disk / "tier"
    first = open_tier(root)
    for seed in range(10):
        first.write(*make_object(seed))
    first.close()
    others = fill(small_disk)
    again = open_tier(root)
    assert "serving existing objects without storing" in caplog.text
    for seed in range(10):
        ref, payload, meta = make_object(seed)
        assert again.contains(ref)
        assert again.read(ref, buffer(payload.nbytes)) == meta
    others.unlink()
    again.maintain()
    again.write(*make_object(20))
    assert again.direct or not first.direct
    again.close()


def test_a_tier_on_a_disk_full_of_its_objects_makes_room_for_its_records(
    small_disk: Path,
) -> None:
    root = small_disk / "tier"
    first = open_tier(root)
    for seed in range(20):
        first.write(*make_object(seed))
    first.close()
    fill(small_disk)
    again = open_tier(root)
    with pytest.raises(TierNoSpaceError):
        again.write(*make_object(30))
    again.write(*make_object(31))
    assert 15 <= again.usage().objects <= 20
    assert again.maintenance.janitor is not None
    again.close()


def test_a_read_only_disk_serves_existing_objects_also_after_a_restart(
    small_disk: Path,
) -> None:
    import subprocess

    root = small_disk / "tier"
    tier = open_tier(root)
    ref, payload, meta = make_object(1)
    tier.write(ref, payload, meta)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(TierNoSpaceError, match="EROFS"):
        tier.write(*make_object(2))
    with pytest.raises(TierNoSpaceError):
        tier.check()
    assert tier.read(ref, buffer(payload.nbytes)) == meta
    tier.close()
    again = open_tier(root)
    assert again.read(ref, buffer(payload.nbytes)) == meta
    with pytest.raises(TierNoSpaceError, match="EROFS"):
        again.maintain()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    again.write(*make_object(2))
    assert again.usage().objects == 2
    again.close()
