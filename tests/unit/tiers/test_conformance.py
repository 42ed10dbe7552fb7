"""The conformance suite, for every tier and for the wrappers."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.dict_tier import DictTier

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierUntrustedError
from kvtier.testing.conformance import TierSuite
from kvtier.testing.damage import flip
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectRef, Tier, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.seal import Sealing
from kvtier.tiers.filesystem.walker import object_path
from kvtier.tiers.isolation_keys import make_key_set
from kvtier.tiers.volume_set import VolumeSet

DISKS = ("d0", "d1", "d2")


class TestFileSystemTier(TierSuite):
    direct = "Auto"

    def make(self, tmp_path: Path) -> Tier:
        document = FileSystemTierDocument(
            name="disk", path=str(tmp_path / "tier"), sharing="Pod", direct_io=self.direct
        )
        return FileSystemTier(document, TierLimits(1 << 30))

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        flip(Path(object_path(str(tmp_path / "tier"), ref.namespace, ref.key)), 5_000, 3)


class TestFileSystemTierBuffered(TestFileSystemTier):
    direct = "Never"


class TestFileSystemTierInMemory(TestFileSystemTier):
    """On tmpfs, where other sizes of block and, on older kernels, no direct I/O are met."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        if not os.path.ismount("/dev/shm"):
            pytest.skip("no file system in memory at /dev/shm")
        path = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
        yield path
        end = time.monotonic() + 30
        while path.exists():
            # A closed tier's thread may be in its last round, for longer than closing waits.
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
            assert time.monotonic() < end


class TestVolumeSet(TierSuite):
    """Three directories as one tier."""

    def make(self, tmp_path: Path) -> Tier:
        return VolumeSet(
            "disks",
            [
                FileSystemTier(
                    FileSystemTierDocument(name=name, path=str(tmp_path / name), sharing="Pod"),
                    TierLimits(1 << 30),
                )
                for name in DISKS
            ],
        )

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        paths = [Path(object_path(str(tmp_path / n), ref.namespace, ref.key)) for n in DISKS]
        flip(next(path for path in paths if path.exists()), 5_000, 3)


class TestFileSystemTierWithoutXxhash(TestFileSystemTier):
    """As in an engine's own image, which has BLAKE3 alone."""

    @pytest.fixture(autouse=True)
    def _without_xxhash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtier.tiers.checksum._HAS_XXHASH", False)


class TestFileSystemTierWithTags(TestFileSystemTier):
    encrypt = False

    def make(self, tmp_path: Path) -> Tier:
        keys = make_key_set({"key": b"k" * 32})
        assert keys is not None
        document = FileSystemTierDocument(
            name="disk", path=str(tmp_path / "tier"), sharing="Pod", direct_io=self.direct
        )
        sealing = Sealing(lambda: keys, self.encrypt)
        return FileSystemTier(document, TierLimits(1 << 30), sealing=sealing)


class TestFileSystemTierEncrypted(TestFileSystemTierWithTags):
    encrypt = True

    def test_a_damaged_object_is_detected_and_removed(self, tier: Tier, tmp_path: Path) -> None:
        """Damage cannot be told from another key's encryption: a miss, until it is replaced."""
        ref, payload, meta = make_object(5)
        tier.write(ref, payload, meta)
        self.damage(tier, ref, tmp_path)
        with pytest.raises(TierUntrustedError):
            tier.read(ref, buffer(payload.nbytes))
        assert not tier.contains(ref)
        tier.write(ref, payload, meta)
        assert tier.read(ref, buffer(payload.nbytes)) == meta


class TestDictTier(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return DictTier()

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        assert isinstance(tier, DictTier)
        data, meta = tier.objects[ref]
        tier.objects[ref] = (bytes([data[0] ^ 1]) + data[1:], meta)


class TestFaultyTierWithoutFaults(TestDictTier):
    def make(self, tmp_path: Path) -> Tier:
        return FaultyTier(DictTier())

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        assert isinstance(tier, FaultyTier)
        super().damage(tier.inner, ref, tmp_path)


class TestFaultyTierAroundFiles(TestFileSystemTier):
    def make(self, tmp_path: Path) -> Tier:
        return FaultyTier(super().make(tmp_path))
