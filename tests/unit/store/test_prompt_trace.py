"""Hits of a trace of prompts, in the store and in the file tier's index, with bounded capacity."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from tests.support.prompt_trace import prompt_trace
from tests.unit.store.store_fixture import StoreFixture, block_hash

from kvtier.tiers.filesystem.index import Index

NAMESPACE = "c" * 32
REQUESTS = 120


def usable(prompt: list[int], held: object) -> int:
    """How many chunks of the prompt are held, up to the first one that is not."""
    return next((i for i, chunk in enumerate(prompt) if chunk not in held), len(prompt))  # type: ignore[operator]


def plain_lru(trace: list[list[int]], capacity: int) -> int:
    """Hits of an LRU of single chunks, used in prefix order."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in trace:
        hits += usable(prompt, held)
        for chunk in prompt:
            held[chunk] = None
            held.move_to_end(chunk)
            if len(held) > capacity:
                held.popitem(last=False)
    return hits


def whole_suffixes(trace: list[list[int]], capacity: int) -> int:
    """Hits of a cache that evicts, chunk by chunk, the suffix that was not used for longest. A
    chunk was used when any prompt through it was."""
    used_at: dict[int, int] = {}
    above: dict[int, int | None] = {}
    hits = 0
    for now, prompt in enumerate(trace):
        hits += usable(prompt, used_at)
        for previous, chunk in zip([None, *prompt], prompt, strict=False):
            if chunk not in used_at and len(used_at) >= capacity:
                followed = {above[each] for each in used_at}
                victim = min((c for c in used_at if c not in followed), key=lambda c: used_at[c])
                at, parent = used_at.pop(victim), above.pop(victim)
                if parent in used_at:
                    used_at[parent] = max(used_at[parent], at)  # type: ignore[index]
            if previous is not None and previous not in used_at:
                break
            used_at[chunk], above[chunk] = now, previous
    return hits


@pytest.mark.parametrize("slots", [64, 160])
def test_the_store_hits_as_many_tokens_as_one_that_evicts_whole_suffixes(slots: int) -> None:
    fixture = StoreFixture(slots=slots, tiers=())
    fixture.engine()
    trace = prompt_trace(REQUESTS)
    hits = most = 0
    for prompt in trace:
        found = fixture.usable(*prompt)
        hits += found
        if found:
            ready = fixture.load(*prompt[:found])
            fixture.store.release_load("e", ready.load)
        for previous, chunk in zip([None, *prompt], prompt, strict=False):
            if not fixture.bits(chunk) & 1:
                fixture.put(chunk, previous=previous)
                fixture.settle()
                for notice in fixture.eviction_notices()[-2:]:
                    fixture.store.acknowledge_eviction(notice.token)
                fixture.pump()
        most = max(most, fixture.store.objects)
    assert most < slots
    assert hits >= 0.98 * whole_suffixes(trace, most)
    assert hits >= plain_lru(trace, most)


@pytest.mark.parametrize("capacity", [40, 120, 300])
def test_the_file_tier_hits_as_many(capacity: int) -> None:
    index, trace = Index(1 << 40), prompt_trace(REQUESTS)
    held: set[int] = set()
    chunk_of = {block_hash(chunk): chunk for prompt in trace for chunk in prompt}
    hits = 0
    for prompt in trace:
        found = usable(prompt, held)
        hits += found
        for previous, chunk in zip([None, *prompt], prompt, strict=False):
            key, before = block_hash(chunk), b"" if previous is None else block_hash(previous)
            if chunk in held:
                index.touch(NAMESPACE, key, before)
                continue
            if len(held) >= capacity:
                oldest = index.oldest()
                assert oldest is not None
                index.remove(*oldest)
                held.remove(chunk_of[oldest[1]])
            if previous is not None and previous not in held:
                break
            index.reserve(4096)
            index.publish(NAMESPACE, key, 4096, before)
            held.add(chunk)
    assert hits >= 0.98 * whole_suffixes(trace, capacity)
    assert hits >= plain_lru(trace, capacity)
