"""Hits of conversations that come back all at once, with and without knowledge of the queue.

In each round every conversation sends its whole prompt again, and all of them wait in one queue.
They are served one after the other: a request uses what is held of its prefix and stores the rest.
The orders are those of the memory tier, LRU and ARC. With knowledge of the queue the last chunk
that is held of each prompt is awaited until the request is served. The oracle knows all rounds and
evicts the end of the prefix that is used the furthest in the future (Belady). The rounds in which
prompts grow come first; the hits are those of the last rounds, in which they are the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from common import options, progress, report
from kvtier.store.arc_policy import TriedArcPolicy
from kvtier.store.memory_tier import LruPolicy

CHUNKS = 24
"""Of a prompt in the end."""
GROWTH = 4
"""Chunks by which it grows in each round until then."""
SAME_ROUNDS = 3
SHARES = (0.3, 0.6, 0.8, 0.9, 0.96)
Policy = LruPolicy[int, int]


class Conversations:
    """The prompts of each round. Chunks are numbered through all conversations."""

    def __init__(self, conversations: int) -> None:
        self.distinct = conversations * CHUNKS
        lengths = [*range(GROWTH, CHUNKS + 1, GROWTH), *(CHUNKS,) * SAME_ROUNDS]
        self.rounds = [
            [range(first * CHUNKS, first * CHUNKS + length) for first in range(conversations)]
            for length in lengths
        ]

    @staticmethod
    def previous(chunk: int) -> int | None:
        """The chunk before this one in its prompt."""
        return chunk - 1 if chunk % CHUNKS else None


def usable(prompt: range, held: set[int]) -> int:
    """How many chunks of the prompt are held, up to the first one that is not."""
    return next((i for i, chunk in enumerate(prompt) if chunk not in held), len(prompt))


def share(hits: list[int], asked: list[int]) -> float:
    """The part of the last rounds that was held; the first of the equal ones counts as growth."""
    return sum(hits[1 - SAME_ROUNDS :]) / sum(asked[1 - SAME_ROUNDS :])


class Memory:
    """A memory tier of ``capacity`` chunks."""

    def __init__(self, policy: Policy, capacity: int, known: bool) -> None:
        self._policy, self._capacity, self._known = policy, capacity, known
        self._held: set[int] = set()
        self.operations = 0
        self.seconds = 0.0

    def round(self, prompts: list[range]) -> int:
        """Serves a queue; returns how many chunks were held."""
        started = time.process_time()
        awaited = []
        for rank, prompt in enumerate(prompts, start=1):
            count = usable(prompt, self._held) if self._known else 0
            awaited.append(prompt[count - 1] if count else -1)
            if count:
                self._policy.await_item(prompt[count - 1], rank)
        hits = 0
        for prompt, last in zip(prompts, awaited, strict=True):
            count = usable(prompt, self._held)
            hits += count
            for chunk in prompt[:count]:
                self._policy.hit(chunk)
            if last >= 0:
                self._policy.await_item(last, 0)
            self._store(prompt, count)
            self.operations += len(prompt)
        self.seconds += time.process_time() - started
        return hits

    def _store(self, prompt: range, count: int) -> None:
        for chunk in prompt[count:]:
            before = Conversations.previous(chunk)
            if before is not None and before not in self._held:
                return
            if len(self._held) >= self._capacity:
                victim = self._policy.victim()
                if victim is None:
                    raise SystemExit("nothing can be evicted")
                self._policy.forget(victim)
                self._held.remove(victim)
                if victim == before:
                    return
            self._policy.admit(chunk)
            self._held.add(chunk)


def oracle(conversations: Conversations, capacity: int) -> float:
    """Belady's rule over the ends of prefixes. What is used the furthest in the future may be the
    chunk itself: then it is not stored."""
    held: dict[int, int] = {}
    """By conversation, how many of its chunks."""
    hits, asked = [], []
    for prompts in conversations.rounds:
        found = 0
        for number, prompt in enumerate(prompts):
            found += min(held.get(number, 0), len(prompt))
            held[number] = max(held.get(number, 0), len(prompt))
            excess = sum(held.values()) - capacity
            # This conversation is used again the furthest in the future, after those before it in
            # the next round and the later ones in this round.
            for back in range(len(prompts)):
                if excess <= 0:
                    break
                other = (number - back) % len(prompts)
                gone = min(excess, held.get(other, 0))
                held[other] = held.get(other, 0) - gone
                excess -= gone
        hits.append(found)
        asked.append(sum(map(len, prompts)))
    return share(hits, asked)


def replay(
    conversations: Conversations, capacity: int, make: Callable[..., Policy], known: bool
) -> tuple[float, Memory]:
    """The share of hits of one order."""
    memory = Memory(make(lambda chunk: chunk, Conversations.previous), capacity, known)
    hits = [memory.round(prompts) for prompts in conversations.rounds]
    return share(hits, [sum(map(len, prompts)) for prompts in conversations.rounds]), memory


def main() -> None:
    """Runs the benchmark."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--conversations", type=int, default=48)
        parser.add_argument("--shares", type=float, nargs="+", default=SHARES)

    given = options(__doc__ or "", more)
    conversations = Conversations(given.conversations)
    rows, ratios = [], []
    seconds = operations = 0.0
    for part in given.shares:
        capacity = max(1, int(part * conversations.distinct))
        progress(f"{capacity} chunks")
        best = oracle(conversations, capacity)
        row: list[object] = [f"{part:.0%}"]
        for make in (LruPolicy, TriedArcPolicy):
            for known in (False, True):
                hits, memory = replay(conversations, capacity, make, known)
                row.append(f"{hits:.3f}")
                if known:
                    seconds, operations = seconds + memory.seconds, operations + memory.operations
                    ratios.append(hits / best)
        rows.append((*row, f"{best:.3f}"))
    progress("")
    rows.append(("us/chunk", "-", f"{1e6 * seconds / operations:.1f}", "-", "-", "-"))
    report(
        given.json,
        f"Hit chunks of {given.conversations} conversations that come back all at once, by the "
        "part of all chunks that RAM holds",
        ("RAM holds", "LRU", "LRU, queue known", "ARC", "ARC, queue known", "oracle"),
        rows,
        min(ratios),
        "hits with the queue known / those of the oracle, the lowest; 0.9 is wanted",
    )


if __name__ == "__main__":
    main()
