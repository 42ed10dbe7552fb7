"""What the scheduler side knows about each request. The scheduler's thread only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from kvtier import keys
from kvtier.engines.common.hints import NO_HINTS, RequestHints
from kvtier.engines.common.lora import AdapterDigests
from kvtier.planner import Frontier, Part
from kvtier.presence_table import Words, hash_many
from kvtier.store.types import RAM_BITS

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NOTHING_HASHED: Words = np.empty(0, np.int64)
_CONTENT_DIGEST = re.compile(r"[0-9a-f]{64}([0-9a-f]{64})?")
"""A digest of 256 or 512 bits, which vLLM computes of media."""
ALL_TIERS = -1
"""Every presence bit."""


@dataclass(frozen=True, slots=True)
class CachedMatch:
    """The last result of a lookup, and the state it was derived from.

    ``computed_tokens``: the local hit that the match extends. The match holds while the session's
    ``epoch`` and the replica's ``removals`` are the same; new keys (``changes``) are picked up
    after a refresh interval.
    """

    computed_tokens: int
    tokens: int
    removals: int
    changes: int
    epoch: int
    matched_at: float


@dataclass(slots=True)
class PendingPromotion:
    """A promotion that a request waits for.

    ``deadline`` is measured by the scheduler's clock. ``usable_keys``: keys in pinned slots, None
    until tierd answers. ``tiers``: the tier that each key came from. ``locations``: where each is.
    ``arriving``: tierd has answered before the end; keys beyond the end of ``locations`` follow.
    ``lookup_deadline``: if the request waits for a lookup only, until when, unless ``lookup_key``,
    the first key that is looked up, has been found; else 0.

    With several groups ``keys`` are those that a prefix of ``end_tokens`` tokens needs after a
    local hit of ``computed_tokens``; they are of use together only. Both are 0 with one group.
    """

    promotion_id: int
    first_chunk: int
    keys: int
    deadline: float
    epoch: int
    usable_keys: int | None = None
    ended_at: float = 0.0
    tiers: tuple[int, ...] = ()
    locations: tuple[int, ...] = ()
    computed_tokens: int = 0
    end_tokens: int = 0
    lookup_deadline: float = 0.0
    lookup_key: bytes = b""
    arriving: bool = False


class RequestState:
    """One request, from its first lookup until vLLM finishes it."""

    __slots__ = (
        "_adapter_digest",
        "_group_keys",
        "_hashed",
        "_hashes",
        "block_ids",
        "cached_match",
        "computed_tokens",
        "described_chunks",
        "frontier",
        "hints",
        "load_end",
        "load_failed",
        "load_id",
        "lookup_started_at",
        "pending_promotion",
        "promotion_tried",
        "prompt_counted",
        "query_counted",
        "request",
        "request_id",
        "scheduled",
        "skip_reason",
        "store_wait_started_at",
        "stores_in_flight",
        "tier_bits",
    )

    def __init__(self, request: Request, hints: RequestHints = NO_HINTS) -> None:
        self.request = request
        self.hints = hints
        self.tier_bits = ALL_TIERS
        """Presence bits of the tiers that take part."""
        self.request_id = str(request.request_id)
        self.skip_reason = initial_skip_reason(request)
        """Why the request is neither loaded nor stored; empty if it is."""
        self.frontier = Frontier()
        self.prompt_counted = False
        """Whether the prompt is part of the heartbeat's total."""
        self.query_counted = False
        """Whether the lookup that led to its admission is counted."""
        self.scheduled = False
        """Whether the request was in a step since its last lookup. If so, the next lookup means
        that it was preempted."""
        self.computed_tokens = 0
        """The local hit of the last lookup."""
        self.lookup_started_at: float | None = None
        """When the first lookup since the last preemption happened; load timeouts count from it."""
        self.cached_match: CachedMatch | None = None
        self.pending_promotion: PendingPromotion | None = None
        self.promotion_tried = False
        """Whether a promotion was requested since the last preemption."""
        self.load_id = 0
        """The load in flight, 0 if none."""
        self.load_failed = False
        """Nothing else is loaded for the request. vLLM repeats the lookup after a failed load,
        which would match and fail again without end."""
        self.load_end: int | None = None
        """After a first failed load, one more may be offered, up to this chunk: it is shorter than
        what the failed one had loaded."""
        self.described_chunks = 0
        """How many of its chunks the events for routers know."""
        self.stores_in_flight = 0
        self.store_wait_started_at: float | None = None
        self.block_ids: list[list[int]] = []
        """The block tables by group, tracked only where vLLM does not pass them with the
        scheduler's output."""
        self._adapter_digest: bytes | None = None
        self._hashes: list[bytes] = []
        self._hashed = _NOTHING_HASHED
        """For the replica, of the first chunks."""
        self._group_keys: dict[int, list[bytes]] = {}

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return int(self.request.num_prompt_tokens)

    def is_cacheable(self, adapters: AdapterDigests) -> bool:
        """Returns whether the request has keys.

        False if it is skipped, or while the digest of its LoRA adapter is being computed or
        compared with the files.
        """
        if self.skip_reason:
            return False
        lora = self.request.lora_request
        if lora is None:
            return True
        # Checked every time: an adapter may be replaced in place under a running request.
        digest = adapters.digest(lora)
        if isinstance(digest, bytes):
            self._adapter_digest = digest
            return True
        if digest not in ("unknown", "checked"):
            self.skip_reason = "adapter_replaced" if digest == "replaced" else "adapter_unreadable"
        return False

    def visible(self, bits: int) -> int:
        """Returns the presence bits of an object as far as the request may use it, 0 if not.

        It may if one of its tiers holds the object, and tierd would not read it from another one.
        """
        allowed = self.tier_bits
        return bits if bits & allowed and (bits & RAM_BITS or bits & -bits & allowed) else 0

    def visible_many(self, bits: Words) -> Words:
        """``visible`` of each."""
        allowed = self.tier_bits
        if allowed == ALL_TIERS:
            return bits
        first = np.where(bits & RAM_BITS, allowed, bits & -bits)
        return np.where((bits & allowed != 0) & (first & allowed != 0), bits, 0)

    def hashes(self, hashes_per_chunk: int) -> list[bytes]:
        """Returns the keys of the chunks that vLLM has hashed, in prefix order, without a group.

        The list grows with the request.
        """
        hashes, known = self.request.block_hashes, self._hashes
        chunks, first = len(hashes) // hashes_per_chunk, len(known)
        if first == chunks:
            return known
        if first > chunks:
            # A streaming session dropped tokens that it had hashed.
            del known[chunks:]
            self._hashed = self._hashed[:chunks]
            for of_group in self._group_keys.values():
                del of_group[chunks:]
            return known
        end = chunks * hashes_per_chunk
        fresh = hashes[(first + 1) * hashes_per_chunk - 1 : end : hashes_per_chunk]
        adapter = self._adapter_digest
        if adapter is not None:
            fresh = [blake3(block_hash + adapter).digest() for block_hash in fresh]
        known += fresh
        return known

    def hashed(self, begin: int, end: int) -> Words:
        """Returns ``hash_many`` of the keys from ``begin`` to before ``end``, of which ``hashes``
        has told."""
        known = self._hashed
        if len(known) < end:
            fresh = hash_many(self._hashes[len(known) : end])
            known = self._hashed = np.concatenate((known, fresh))
        return known[begin:end]

    def keys(self, hashes_per_chunk: int) -> list[bytes]:
        """Returns the keys of the chunks that vLLM has hashed, in prefix order, of group 0."""
        return self.group_keys(0, hashes_per_chunk)

    def group_keys(self, group: int, hashes_per_chunk: int) -> list[bytes]:
        """Returns the keys of the chunks that vLLM has hashed, in prefix order, of one group.

        The list grows with the request.
        """
        hashes = self.hashes(hashes_per_chunk)
        known = self._group_keys.setdefault(group, [])
        if len(known) < len(hashes):
            prefix = keys.group_prefix(group)
            known += [prefix + block_hash for block_hash in hashes[len(known) :]]
        return known

    def wire_keys(self, first_chunk: int, count: int) -> tuple[tuple[int, bytes], ...]:
        """Returns the keys of ``count`` chunks of group 0 as (group, hash), the form that messages
        have."""
        return self.wire_keys_of_chunks([(0, first_chunk, first_chunk + count)])

    def wire_keys_of(self, parts: Sequence[Part]) -> tuple[tuple[int, bytes], ...]:
        """Returns the keys of the objects that ``parts`` belong to, as (group, hash)."""
        hashes = self._hashes
        return tuple((part.group, hashes[part.chunk]) for part in parts)

    def wire_keys_of_chunks(
        self, chunks: Iterable[tuple[int, int, int]]
    ) -> tuple[tuple[int, bytes], ...]:
        """Returns the keys of (group, first chunk, first chunk after them), as (group, hash)."""
        hashes = self._hashes
        keys: list[tuple[int, bytes]] = []
        for group, begin, end in chunks:
            keys += zip(repeat(group), hashes[begin:end], strict=False)
        return tuple(keys)

    def drop_blocks(self) -> None:
        """vLLM freed the request's blocks (a preemption, or a load that failed completely).

        Nothing of the request is computed, and its next lookup starts with a fresh time limit.
        """
        self.frontier.lose_blocks()
        self.block_ids = []
        self.scheduled = False
        self.lookup_started_at = None
        self.promotion_tried = False
        self.query_counted = False
        self.cached_match = None
        self.store_wait_started_at = None


def initial_skip_reason(request: Request) -> str:
    """Returns why a request's block hashes do not identify its KV; empty if they do."""
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        # A streaming session replaces tokens that were sampled; its hashes are not rolled back.
        return "streaming_session"
    if any(_named_by_client(each) for each in getattr(request, "mm_features", None) or ()):
        # The same name may stand for another image after a restart, or for another client.
        return "media_id"
    return ""


def _named_by_client(feature: object) -> bool:
    """Returns whether a client has named an image, a video or audio (``uuid``), instead of a digest
    of its content by vLLM."""
    name = getattr(feature, "mm_hash", None) or getattr(feature, "identifier", None)
    return not (isinstance(name, str) and _CONTENT_DIGEST.fullmatch(name))


def reads_no_cache(request: Request) -> bool:
    """Returns whether vLLM computes the whole prompt, so that nothing may be loaded.

    Prompt log-probabilities and pooling over all tokens need the output at every position.
    """
    return bool(getattr(request, "skip_reading_prefix_cache", False))
