"""Every tier, held to the same suite."""

from pathlib import Path

import pytest

from kvtier.errors import TierUnavailableError
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.faulty_tier import Fault, FaultyTier
from kvtier.testing.tier_suite import TierSuite, flip, make_object
from kvtier.tiers.base import ObjectRef, Tier, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.scan import object_path
from kvtier.topology.models import FileSystemTierDocument


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


def test_a_fault_strikes_the_calls_it_names_and_no_other() -> None:
    tier = FaultyTier(DictTier())
    tier.set_fault(Fault("unavailable", ("write",), after=1, times=1))
    tier.write(*make_object(1))
    with pytest.raises(TierUnavailableError):
        tier.write(*make_object(2))
    tier.write(*make_object(2))
    assert tier.usage().objects == 2
