"""One pass of prompts that are used once, as large as a tier, does not empty the tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.store.store_fixture import StoreFixture, block_hash
from tests.unit.tiers.test_file_tier import opened

from kvtier.prefix_order import KEPT_SHARE, PrefixOrder
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance

NAMESPACE = "c" * 32


def _fixture(prompts: int) -> StoreFixture:
    """A store of 64 slots in which prompts of five chunks were stored, and used again."""
    fixture = StoreFixture(slots=64, tiers=())
    fixture.engine()
    for prompt in range(prompts):
        fixture.put_prompt(*range(10 * prompt, 10 * prompt + 5))
    for prompt in range(prompts):
        ready = fixture.load(*range(10 * prompt, 10 * prompt + 5))
        fixture.store.release_load("e", ready.load)
    return fixture


def _scan(fixture: StoreFixture, chunks: int) -> None:
    for prompt in range(0, chunks, 8):
        fixture.put_prompt(*range(1_000 + prompt, 1_008 + prompt))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_scan_leaves_in_ram_what_was_used_again(passes: int) -> None:
    fixture = _fixture(1)
    _scan(fixture, 64 * passes)
    assert fixture.usable(*range(5)) == 5


def test_a_scan_takes_all_but_a_part_of_a_tier_that_is_full_of_used_objects() -> None:
    fixture = _fixture(8)
    before = sum(fixture.bits(chunk) & 1 for chunk in range(90))
    _scan(fixture, 64)
    prompts = [range(10 * prompt, 10 * prompt + 5) for prompt in range(8)]
    left = sum(fixture.usable(*prompt) for prompt in prompts)
    assert before == 40
    # The last one that was used, and the beginning of the one before.
    assert fixture.usable(*prompts[7]) == 5
    assert 5 <= left <= 8


def test_what_was_used_often_and_is_used_no_more_goes() -> None:
    fixture = _fixture(1)
    _scan(fixture, 640)
    assert fixture.usable(*range(5)) == 0


@pytest.mark.parametrize("share", [1, KEPT_SHARE, 2 * KEPT_SHARE])
def test_a_scan_of_the_index_keeps_the_share_of_used_objects(share: int) -> None:
    index, room = Index(1 << 40), 400
    used = [block_hash(number) for number in range(room // share)]
    for key in used:
        index.reserve(4_096)
        index.publish(NAMESPACE, key, 4_096)
        index.touch(NAMESPACE, key)
    for number in range(room):
        while index.count >= room:
            victim = index.oldest()
            assert victim is not None
            index.remove(*victim)
        index.reserve(4_096)
        index.publish(NAMESPACE, block_hash(10_000 + number), 4_096)
    kept = [index.contains(NAMESPACE, key) for key in used]
    assert sum(kept) == min(len(used), room // KEPT_SHARE)
    assert kept == sorted(kept)


def test_a_scan_of_a_file_tier_leaves_what_was_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tier's own threads evict as well, and how much depends on when they run.
    monkeypatch.setattr(DirectoryMaintenance, "start_loop", lambda _: None)
    prompt = [make_object(seed) for seed in range(2)]
    scan = [make_object(100 + seed) for seed in range(120)]
    with opened(tmp_path, TierLimits(1 << 30)) as tier:
        previous = b""
        for ref, payload, meta in prompt:
            tier.write(ref, payload, replace(meta, previous=previous))
            previous = ref.key
        for ref, payload, _ in prompt:
            tier.read(ref, buffer(payload.nbytes))
        for each in scan[:60]:
            tier.write(*each)
        tier.configure(TierLimits(tier.usage().used_bytes, 100, 90))
        tier.maintenance.run_once()
        for each in scan[60:]:
            tier.write(*each)
            tier.maintain()
        assert all(tier.contains(ref) for ref, _, _ in prompt)
        assert not all(tier.contains(ref) for ref, _, _ in scan)


def test_without_a_second_use_the_order_is_that_of_least_recent_use() -> None:
    order = PrefixOrder()
    nodes = [order.new() for _ in range(20)]
    for node in nodes:
        order.enter(node)
    order.use(nodes[0])
    gone = []
    while node := order.victim():
        gone.append(node)
        order.leave(node)
    assert gone == [*nodes[1:], nodes[0]]
