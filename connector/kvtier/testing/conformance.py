"""The conformance suite of tiers: a class of tests to inherit from.

class TestMyTier(TierSuite):
    def make(self, tmp_path): return MyTier(...)
    def damage(self, tier, ref, tmp_path): ...    # changes one stored byte, below the tier
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import TierCorruptError, TierError, TierMissError, TierNoSpaceError
from kvtier.testing.objects import NAMESPACE, buffer, in_pieces, make_object
from kvtier.tiers.base import ObjectRef, Tier, TierLimits, aligned
from kvtier.tiers.pieces import reader_of, scatter, shards_of, writer_of


class TierSuite:
    """Subclasses implement ``make`` and ``damage``."""

    small_capacity_bytes = 256 * 1024

    def make(self, tmp_path: Path) -> Tier:
        """A new, unopened tier over ``tmp_path``. The same path means the same storage."""
        raise NotImplementedError

    def damage(self, tier: Tier, ref: ObjectRef, tmp_path: Path) -> None:
        """Changes one stored byte of the object, below the tier."""
        raise NotImplementedError

    @pytest.fixture
    def changes(self) -> list[tuple[str, bytes, bool]]:
        """The changes that the tier announced."""
        return []

    @pytest.fixture
    def tier(self, tmp_path: Path, changes: list[tuple[str, bytes, bool]]) -> Tier:
        """An open tier."""
        tier = self.make(tmp_path)
        tier.open(lambda *change: changes.append(change))
        return tier

    @pytest.mark.parametrize(
        "shards", [(4_096,), (8_192, 8_192), (1,), (5_000, 4_096, 4_097), (1 << 20,)]
    )
    def test_a_written_object_is_read(self, tier: Tier, shards: tuple[int, ...]) -> None:
        ref, payload, meta = make_object(7, shards)
        tier.write(ref, payload, meta)
        into = buffer(payload.nbytes)
        assert tier.contains(ref)
        assert tier.read(ref, into) == meta
        start = 0
        for size in shards:
            assert into[start : start + size] == payload[start : start + size]
            start += aligned(size)

    @pytest.mark.parametrize("shards", [(8_192, 8_192), (5_000, 4_097), (1_100_000, 1_100_000)])
    def test_an_object_lies_in_one_buffer_or_in_pieces(
        self, tier: Tier, shards: tuple[int, ...]
    ) -> None:
        """Whether its shards lie in one buffer or apart makes no difference to what is stored."""
        for seed, apart in ((8, False), (9, True)):
            ref, payload, meta = make_object(seed, shards)
            stored = in_pieces(shards) if apart else payload
            scatter(payload, stored)
            writer_of(tier, stored)(ref, stored, meta)
            pieces, whole = in_pieces(shards), buffer(payload.nbytes)
            assert reader_of(tier, pieces)(ref, pieces) == meta
            assert tier.read(ref, whole) == meta
            found = zip(
                pieces.views,
                shards_of(whole, shards),
                shards_of(payload, shards),
                shards,
                strict=True,
            )
            for piece, view, wanted, size in found:
                assert piece == view
                assert piece[:size] == wanted[:size]

    def test_damage_is_found_in_pieces(self, tier: Tier, tmp_path: Path) -> None:
        shards = (8_192, 8_192)
        ref, payload, meta = make_object(10, shards)
        tier.write(ref, payload, meta)
        self.damage(tier, ref, tmp_path)
        pieces = in_pieces(shards)
        with pytest.raises(TierError):
            reader_of(tier, pieces)(ref, pieces)

    def test_an_unknown_object_is_a_miss(self, tier: Tier) -> None:
        ref, payload, _ = make_object(1)
        assert not tier.contains(ref)
        assert not tier.probe(ref)
        with pytest.raises(TierMissError):
            tier.read(ref, payload)

    def test_changes_are_announced(
        self, tier: Tier, changes: list[tuple[str, bytes, bool]]
    ) -> None:
        ref, payload, meta = make_object(2)
        tier.write(ref, payload, meta)
        tier.delete(ref)
        assert changes == [(ref.namespace, ref.key, True), (ref.namespace, ref.key, False)]
        assert not tier.contains(ref)
        assert tier.usage().objects == 0

    def test_writing_and_deleting_are_idempotent(self, tier: Tier) -> None:
        ref, payload, meta = make_object(3)
        tier.write(ref, payload, meta)
        tier.write(ref, payload, meta)
        assert tier.usage().objects == 1
        tier.delete(ref)
        tier.delete(ref)

    def test_the_limit_of_an_object_is_kept(self, tier: Tier) -> None:
        ref, payload, meta = make_object(8)
        tier.write(ref, payload, replace(meta, limited=True))
        assert tier.read(ref, payload).limited, "it could be written to other tiers"

    def test_an_object_of_another_size_is_corrupt(self, tier: Tier) -> None:
        ref, payload, meta = make_object(4, (8_192,))
        tier.write(ref, payload, meta)
        with pytest.raises(TierCorruptError):
            tier.read(ref, buffer(4_096))

    def test_a_damaged_object_is_detected_and_removed(
        self, tier: Tier, tmp_path: Path, changes: list[tuple[str, bytes, bool]]
    ) -> None:
        ref, payload, meta = make_object(5)
        tier.write(ref, payload, meta)
        self.damage(tier, ref, tmp_path)
        with pytest.raises(TierCorruptError):
            tier.read(ref, payload)
        assert not tier.contains(ref)
        assert changes[-1] == (ref.namespace, ref.key, False)
        with pytest.raises(TierMissError):
            tier.read(ref, payload)

    def test_namespaces_are_isolated(self, tier: Tier) -> None:
        ref, payload, meta = make_object(6)
        tier.write(ref, payload, meta)
        other = ObjectRef("f" * 32, ref.key)
        assert not tier.contains(other)
        with pytest.raises(TierMissError):
            tier.read(other, payload)
        assert list(tier.keys(ref.namespace)) == [ref.key]
        assert list(tier.keys(other.namespace)) == []

    def test_the_capacity_is_never_exceeded(self, tier: Tier) -> None:
        tier.configure(TierLimits(self.small_capacity_bytes, 90, 50))
        rejected = 0
        for seed in range(100):
            try:
                tier.write(*make_object(seed))
            except TierNoSpaceError:
                rejected += 1
            assert tier.usage().used_bytes <= self.small_capacity_bytes
        assert tier.usage().objects > 0 or rejected

    def test_an_object_larger_than_the_capacity_is_rejected(self, tier: Tier) -> None:
        tier.configure(TierLimits(self.small_capacity_bytes, 90, 50))
        tier.write(*make_object(0))
        with pytest.raises(TierNoSpaceError):
            tier.write(*make_object(1, (self.small_capacity_bytes + 1,)))
        # No eviction can make room for it, so nothing may be evicted.
        assert tier.contains(make_object(0)[0])

    def test_a_persistent_tier_keeps_objects_over_a_restart(
        self, tier: Tier, tmp_path: Path
    ) -> None:
        if not tier.capabilities.persistent:
            return
        for seed in range(5):
            tier.write(*make_object(seed))
        used = tier.usage()
        tier.close()
        again, found = self.make(tmp_path), []
        again.open(lambda *change: found.append(change))
        assert again.usage().objects == used.objects
        assert len(found) == 5
        ref, payload, meta = make_object(3)
        into = buffer(payload.nbytes)
        assert again.read(ref, into) == meta
        assert into == payload

    def test_concurrent_reads_and_writes(self, tier: Tier) -> None:
        objects = [make_object(seed) for seed in range(40)]
        failures: list[Exception] = []

        def work(offset: int) -> None:
            into = buffer(objects[0][1].nbytes)
            try:
                for number in range(len(objects)):
                    ref, payload, meta = objects[(number + offset) % len(objects)]
                    tier.write(ref, payload, meta)
                    tier.read(ref, into)
                    if into != payload:
                        raise ValueError(f"wrong bytes for {ref.key.hex()}")
            except (TierError, ValueError) as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(10 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        assert tier.usage().objects == len(objects)

    def test_concurrent_writes_deletes_and_reads_of_one_object(self, tier: Tier) -> None:
        ref, payload, meta = make_object(1)
        barrier = threading.Barrier(4)
        failures: list[Exception] = []

        def work(deleting: bool) -> None:
            # One buffer for each thread: a tier may clear the padding of its payload.
            mine, into = buffer(payload.nbytes), buffer(payload.nbytes)
            mine[:] = payload
            barrier.wait(60)
            for _ in range(20):
                try:
                    tier.write(ref, mine, meta)
                    if deleting:
                        tier.delete(ref)
                    tier.read(ref, into)
                    if into != payload:
                        raise ValueError("wrong bytes")
                except TierMissError:
                    continue
                except (TierError, ValueError) as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, args=(number == 0,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        tier.delete(ref)
        assert tier.usage().objects == 0

    def test_keys_that_stay_are_returned_once_whatever_changes_meanwhile(self, tier: Tier) -> None:
        objects = [make_object(seed) for seed in range(12)]
        for each in objects[:8]:
            tier.write(*each)
        keys = tier.keys(NAMESPACE)
        seen = [next(keys)]
        for gone, added in zip(objects[:4], objects[8:], strict=True):
            tier.delete(gone[0])
            tier.write(*added)
        seen.extend(keys)
        assert len(seen) == len(set(seen))
        assert {each[0].key for each in objects[4:8]} <= set(seen)
        assert set(seen) <= {each[0].key for each in objects}

    def test_touching_an_unknown_object_is_ignored(
        self, tier: Tier, changes: list[tuple[str, bytes, bool]]
    ) -> None:
        tier.touch(make_object(1)[0])
        assert tier.usage().objects == 0
        assert changes == []

    def test_check_passes_and_leaves_no_object(self, tier: Tier) -> None:
        before = tier.usage()
        tier.check()
        assert tier.usage() == before

    def test_maintaining_an_idle_tier_changes_nothing(self, tier: Tier) -> None:
        tier.write(*make_object(1))
        before = tier.usage()
        tier.maintain()
        assert tier.usage() == before
