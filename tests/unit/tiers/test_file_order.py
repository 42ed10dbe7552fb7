"""Which objects of a file tier are evicted first, with real files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.tiers.test_file_tier import HOUR, object_bytes, opened, path_of

from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import scan_scheduler


def test_a_prompt_that_was_hit_in_full_loses_its_end_to_a_later_one(tmp_path: Path) -> None:
    prompt = [make_object(seed) for seed in range(40)]
    later = [make_object(100 + seed) for seed in range(12)]
    with opened(tmp_path, TierLimits(1 << 30)) as tier:
        for objects in (prompt, later):
            previous = b""
            for ref, payload, meta in objects:
                tier.write(ref, payload, replace(meta, previous=previous))
                previous = ref.key
            if objects is prompt:
                # A hit in full, in the order of the prompt.
                for ref, payload, _ in prompt:
                    tier.read(ref, buffer(payload.nbytes))
        tier.configure(TierLimits(tier.usage().used_bytes, 90, 75))
        tier.maintain()
        kept = [tier.contains(ref) for ref, _, _ in prompt]
        assert all(tier.contains(ref) for ref, _, _ in later)
    assert 0 < sum(kept) < 40
    assert kept == sorted(kept, reverse=True)


def test_a_read_tells_what_precedes_the_object(tmp_path: Path) -> None:
    (first, *rest), second = make_object(1), make_object(2)
    with opened(tmp_path) as tier:
        tier.write(first, *rest)
        tier.write(second[0], second[1], replace(second[2], previous=first.key))
        assert tier.read(second[0], buffer(8_192)).previous == first.key
        assert tier.read(first, buffer(8_192)).previous == b""


def test_order_of_use_survives_a_restart_in_a_directory_that_is_scanned_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = []
    for seed in range(24):
        ref, *rest = make_object(seed)
        # Each in a directory of its own.
        objects.append((ObjectRef(ref.namespace, bytes((0, seed)) + ref.key[2:]), *rest))
    with opened(tmp_path) as tier:
        for number, each in enumerate(objects):
            tier.write(*each)
            # In another order than that of the names.
            stamp = path_of(tmp_path, each[0]).stat().st_mtime - HOUR * (1 + number * 7 % 24)
            os.utime(path_of(tmp_path, each[0]), (stamp, stamp))
    monkeypatch.setattr(scan_scheduler, "_STEP_ENTRIES", 2)
    with opened(tmp_path) as again:
        again.configure(TierLimits(object_bytes(tmp_path), 90, 50))
        again.maintain()
        kept = {number * 7 % 24 for number, each in enumerate(objects) if again.contains(each[0])}
    assert kept == set(range(len(kept)))
    assert 0 < len(kept) < 24


def test_a_prompt_loses_its_end_after_a_restart(tmp_path: Path) -> None:
    prompt = [make_object(seed * 13 % 40) for seed in range(40)]
    with opened(tmp_path) as tier:
        for number, each in enumerate(prompt):
            tier.write(*each)
            stamp = 1_700_000_000 // 60 * 60 + 0.01 * number
            os.utime(path_of(tmp_path, each[0]), (stamp, stamp))
    with opened(tmp_path) as again:
        again.configure(TierLimits(object_bytes(tmp_path), 90, 50))
        again.maintain()
        kept = [again.contains(each[0]) for each in prompt]
    assert 0 < sum(kept) < 40
    assert kept == sorted(kept, reverse=True)
