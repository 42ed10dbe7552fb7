"""The file tier's conformance suite on real file systems: ext4, xfs, a FUSE mount; and whether direct I/O is found where it works."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.scorecard.mount import faulty_mount, unavailable
from kvtier.scorecard.small_disks import NoDiskError, mounted
from kvtier.testing.conformance import TierSuite
from kvtier.testing.damage import flip
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectRef, Tier, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.walker import object_path

XFS_BYTES = 320 << 20
"""xfs makes no file system below 300 MiB; the image is sparse."""
EXT4_BYTES = 64 << 20


class Mounted(TierSuite):
    """The suite over ``place``."""

    @pytest.fixture
    def tmp_path(self, place: Path) -> Iterator[Path]:
        """A directory for each test: the tier of the one before may still be at work in its own."""
        path = Path(tempfile.mkdtemp(dir=place))
        yield path
        shutil.rmtree(path, ignore_errors=True)

    def make(self, tmp_path: Path) -> Tier:
        document = FileSystemTierDocument(name="disk", path=str(tmp_path / "tier"), sharing="Node")
        return FileSystemTier(document, TierLimits(32 << 20))

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        flip(Path(object_path(str(tmp_path / "tier"), ref.namespace, ref.key)), 5_000, 3)

    def test_direct_io_is_detected_and_used(self, tier: Tier) -> None:
        assert isinstance(tier, FileSystemTier)
        assert tier.direct
        ref, payload, meta = make_object(1)
        tier.write(ref, payload, meta)
        assert tier.read(ref, buffer(payload.nbytes)) == meta


def small_disk(kind: str, size_bytes: int) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=f"kvtier-{kind}-"))
    try:
        with mounted(directory, kind, size_bytes) as disk:
            yield disk.path
    except NoDiskError as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(directory)


class TestOnExt4(Mounted):
    @pytest.fixture(scope="class")
    def place(self) -> Iterator[Path]:
        yield from small_disk("ext4", EXT4_BYTES)


class TestOnXfs(Mounted):
    @pytest.fixture(scope="class")
    def place(self) -> Iterator[Path]:
        yield from small_disk("xfs", XFS_BYTES)


class TestOnFuse(Mounted):
    @pytest.fixture(scope="class")
    def place(self) -> Iterator[Path]:
        if unavailable():
            pytest.skip(unavailable())
        directory = Path(tempfile.mkdtemp(prefix="kvtier-fuse-"))
        try:
            with faulty_mount(directory) as mount:
                yield mount.path
        except OSError as error:
            pytest.skip(f"no FUSE mount can be made here: {error}")
        finally:
            shutil.rmtree(directory)
