"""Hit tokens with bounded capacity, compared with evicting whole suffixes and with plain LRU.

Replays a trace of prompts against the orders that the memory tier (LRU and ARC) and the file tier
(its index) evict by. A hit is a chunk of a prompt that is held together with all chunks before it.
The peer evicts whole suffixes by LRU; it is written for this benchmark alone. Plain LRU evicts
chunk by chunk. Without ``--trace`` the trace is made from a seed.

``--trace`` takes JSON lines with ``hash_ids``, as the traces of Mooncake (FAST '25) have: ids of
consecutive blocks of 512 tokens. Further lines give the hits of the prompts that follow a scan: one
pass of unique prompts, as large as the tier, in the middle of the trace. Then the hits of a file
tier of one volume and of several, which evict independently of each other, down to the low
watermark; their last column is the ratio. The last lines say what the orders cost: seconds of one
core, and bytes for each object that is held.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from pathlib import Path

from kvtier.store.arc_policy import TriedArcPolicy
from kvtier.store.memory_tier import LruPolicy
from kvtier.tiers.filesystem.index import Index

sys.path.insert(0, str(Path(__file__).parent))
from common import NAMESPACE, bytes_per_object, options, progress, report

Trace = list[list[int]]
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
SCANNED_SHARE = 0.1
AFTER_SCAN = 200
VOLUMES = 4
HIGH_WATERMARK, LOW_WATERMARK = 0.95, 0.85
SCAN_PROMPT = 32


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument("--requests", type=int, default=4_000, help="of the trace that is made")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="capacities, in distinct chunks"
    )


def made_trace(requests: int) -> Trace:
    """Conversations over shared system prompts, and documents that are used once."""
    draw, fresh = random.Random(1), count()
    systems = [[next(fresh) for _ in range(draw.randint(1, 12))] for _ in range(10)]
    conversations: Trace = []
    trace = []
    for _ in range(requests):
        what = draw.random()
        if what < 0.15:
            trace.append([next(fresh) for _ in range(draw.randint(8, 60))])
            continue
        if what < 0.4 or not conversations:
            prompt = list(draw.choice(systems))
        else:
            back = min(int(draw.expovariate(0.05)), len(conversations) - 1)
            prompt = conversations.pop(-1 - back)
        prompt = prompt + [next(fresh) for _ in range(draw.randint(1, 6))]
        if len(prompt) < 80:
            conversations.append(prompt)
        trace.append(prompt)
    return trace


def plain_lru(trace: Trace, capacity: int) -> int:
    """Hits of an LRU of chunks that are used in prefix order."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in trace:
        hits += usable(prompt, held.__contains__)
        for chunk in prompt:
            if chunk in held:
                held.move_to_end(chunk)
                continue
            if len(held) >= capacity:
                held.popitem(last=False)
            held[chunk] = None
    return hits


def whole_suffixes(trace: Trace, capacity: int) -> int:
    """Hits of a cache that evicts the suffix whose last use, by a whole request, is the oldest."""
    used_at: dict[int, int] = {}
    above: dict[int, int | None] = {}
    followers: dict[int, int] = {}
    ends: list[tuple[int, int, int]] = []
    order = count()
    hits = 0

    def evict() -> None:
        while True:
            at, _, chunk = heapq.heappop(ends)
            if used_at.get(chunk) == at and not followers[chunk]:
                break
        del used_at[chunk], followers[chunk]
        parent = above.pop(chunk)
        if parent in used_at:
            followers[parent] -= 1
            used_at[parent] = max(used_at[parent], at)
            if not followers[parent]:
                heapq.heappush(ends, (used_at[parent], next(order), parent))

    for now, prompt in enumerate(trace):
        hits += usable(prompt, used_at.__contains__)
        previous = None
        for chunk in prompt:
            if chunk not in used_at:
                if previous is not None and previous not in used_at:
                    break
                if len(used_at) >= capacity:
                    evict()
                if previous is not None and previous not in used_at:
                    break
                above[chunk], followers[chunk] = previous, 0
                if previous is not None:
                    followers[previous] += 1
            used_at[chunk] = now
            if not followers[chunk]:
                heapq.heappush(ends, (now, next(order), chunk))
            previous = chunk
    return hits


def usable(prompt: list[int], holds: Callable[[int], bool]) -> int:
    """How many chunks of the prompt are held, up to the first one that is not."""
    return next((i for i, chunk in enumerate(prompt) if not holds(chunk)), len(prompt))


def replay_policy(trace: Trace, capacity: int, make: type[LruPolicy[int, int]]) -> int:
    """Hits of an order of the memory tier."""
    above: dict[int, int] = {}
    held: set[int] = set()
    policy = make(lambda chunk: chunk, above.get)
    hits = 0
    for prompt in trace:
        found = usable(prompt, held.__contains__)
        hits += found
        for chunk in prompt[:found]:
            policy.hit(chunk)
        for previous, chunk in zip([None, *prompt], prompt, strict=False):
            if chunk in held:
                continue
            if len(held) >= capacity:
                victim = policy.victim()
                if victim is not None:
                    policy.forget(victim)
                    held.discard(victim)
            if previous is not None and previous not in held:
                break
            if previous is not None:
                above[chunk] = previous
            held.add(chunk)
            policy.admit(chunk)
    return hits


def replay_index(trace: Trace, capacity: int) -> int:
    """Hits of a file tier's index."""
    index = Index(1 << 60)
    hits = held = 0
    for prompt in trace:
        keys = [chunk.to_bytes(33, "big", signed=True) for chunk in prompt]
        found = next((i for i, k in enumerate(keys) if not index.contains(NAMESPACE, k)), len(keys))
        hits += found
        for previous, key in zip([b"", *keys], keys[:found], strict=False):
            index.touch(NAMESPACE, key, previous)
        for previous, key in zip([b"", *keys], keys, strict=False):
            if index.contains(NAMESPACE, key):
                continue
            if held >= capacity:
                oldest = index.oldest()
                if oldest is not None:
                    index.remove(*oldest)
                    held -= 1
            if previous and not index.contains(NAMESPACE, previous):
                break
            index.reserve(4096)
            index.publish(NAMESPACE, key, 4096, previous)
            held += 1
    return hits


def replay_volumes(trace: Trace, capacity: int, volumes: int) -> int:
    """Hits of the indexes of a file tier with so many volumes, each of which evicts by itself from
    its high watermark down to its low one."""
    indexes = [Index(1 << 60) for _ in range(volumes)]
    held = [0] * volumes
    above: dict[tuple[int, bytes], bytes] = {}
    hits = 0

    def volume_of(key: bytes) -> int:
        return blake2b(key, digest_size=1).digest()[0] % volumes

    def has(key: bytes) -> bool:
        return indexes[volume_of(key)].contains(NAMESPACE, key)

    for prompt in trace:
        keys = [chunk.to_bytes(33, "big", signed=True) for chunk in prompt]
        nearest = [b""] * volumes
        for key in keys:
            above[volume_of(key), key] = nearest[volume_of(key)]
            nearest[volume_of(key)] = key
        found = next((i for i, key in enumerate(keys) if not has(key)), len(keys))
        hits += found
        for key in keys[:found]:
            volume = volume_of(key)
            indexes[volume].touch(NAMESPACE, key, above[volume, key])
        for previous, key in zip([b"", *keys], keys, strict=False):
            if has(key):
                continue
            if previous and not has(previous):
                break
            volume = volume_of(key)
            indexes[volume].reserve(4096)
            indexes[volume].publish(NAMESPACE, key, 4096, above[volume, key])
            held[volume] += 1
            if held[volume] * volumes < HIGH_WATERMARK * capacity:
                continue
            while held[volume] * volumes > LOW_WATERMARK * capacity:
                oldest = indexes[volume].oldest()
                if oldest is None:
                    break
                indexes[volume].remove(*oldest)
                held[volume] -= 1
    return hits


def after_scan(trace: Trace, capacity: int) -> list[tuple[object, ...]]:
    """Hits of ``AFTER_SCAN`` prompts after a scan, and of the same ones without the scan."""
    middle = len(trace) // 2
    start, window = trace[:middle], trace[middle : middle + AFTER_SCAN]
    scan = [
        [-number - offset - 1 for offset in range(SCAN_PROMPT)]
        for number in range(0, capacity, SCAN_PROMPT)
    ]
    replays: list[Callable[[Trace], int]] = [
        lambda given: plain_lru(given, capacity),
        lambda given: whole_suffixes(given, capacity),
        lambda given: replay_policy(given, capacity, LruPolicy),
        lambda given: replay_policy(given, capacity, TriedArcPolicy),
        lambda given: replay_index(given, capacity),
    ]
    rows: list[tuple[object, ...]] = []
    for name, before in (("no scan", start), ("scan", start + scan)):
        progress(f"{name}, {capacity} chunks")
        hits = [replay(before + window) - replay(before) for replay in replays]
        rows.append((name, *hits, f"{hits[2] / max(hits[0], 1):.3f}"))
    return rows


def main() -> None:
    """Replays the trace at each capacity."""
    chosen = options(__doc__ or "", add_options)
    if chosen.trace is None:
        trace = made_trace(chosen.requests)
    else:
        lines = chosen.trace.read_text().splitlines()
        trace = [json.loads(line)["hash_ids"] for line in lines]
    distinct = len({chunk for prompt in trace for chunk in prompt})
    rows, ratios = [], []
    seconds = 0.0
    for share in chosen.shares:
        capacity = max(1, int(share * distinct))
        progress(f"{capacity} chunks")
        peer, plain = whole_suffixes(trace, capacity), plain_lru(trace, capacity)
        lru, arc = (replay_policy(trace, capacity, make) for make in (LruPolicy, TriedArcPolicy))
        started = time.process_time()
        files = replay_index(trace, capacity)
        seconds += time.process_time() - started
        ratios.append(min(lru, files) / max(peer, 1))
        rows.append((capacity, plain, peer, lru, arc, files, f"{lru / max(plain, 1):.3f}"))
    rows += after_scan(trace, max(1, int(SCANNED_SHARE * distinct)))
    capacity = max(1, int(SCANNED_SHARE * distinct))
    single, several = (replay_volumes(trace, capacity, volumes) for volumes in (1, VOLUMES))
    rows.append(("1 volume", "-", "-", "-", "-", single, "-"))
    rows.append((f"{VOLUMES} volumes", "-", "-", "-", "-", several, f"{several / single:.3f}"))
    progress("")
    each = seconds / len(chosen.shares) / sum(map(len, trace))
    rows.append(("µs/chunk", "-", "-", "-", "-", f"{1e6 * each:.1f}", "-"))
    rows.append(("bytes/object", "-", "-", "-", "-", f"{bytes_per_object(200_000):.0f}", "-"))
    report(
        chosen.json,
        f"Hit chunks of {len(trace)} prompts with {distinct} distinct chunks",
        ("capacity", "plain LRU", "suffixes", "RAM LRU", "RAM ARC", "files", "RAM / plain"),
        rows,
        min(ratios),
        "hits of RAM LRU and of files / evicting whole suffixes, the lowest; 0.98 is wanted",
    )


if __name__ == "__main__":
    main()
