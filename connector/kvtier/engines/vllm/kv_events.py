"""KV events for routers: which blocks the tiers hold, in vLLM's own event stream.

vLLM publishes the events that ``take`` returns with those of its GPU blocks, once per step. A block
is announced with the medium of its tier, and with the tier's name as its owner. It has the hash
that vLLM's own events give it, so a router needs to know nothing about chunks and keys.

tierd's index has one key per chunk, so an event needs the chunk's blocks, which only a request
knows. Each request's chunks are described when they are seen for the first time; what a tier holds
from before is announced when a request with the same prefix comes.

Events are differences: between what was announced of a described chunk, and what the replica says
in the moment of ``take``. Nothing is lost if many changes come between two steps, or if the queue
of changed keys is full: then all described chunks are compared again.

The scheduler's thread, except ``PresenceChanges``.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.config.models import Topology
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner
from kvtier.store.types import MEMORY_BIT, RAM_BITS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_DESCRIPTION_BYTES = 64 << 20
"""Of all descriptions: about 80,000 chunks of 64 tokens. What leaves the table is announced as
removed."""
HASH_BYTES = 80
CHUNK_BYTES = 500
"""What Python's objects take, for a hash and for the rest of a description."""
MAX_DESCRIBED_PER_STEP = 64
"""Chunks; takes about half a millisecond."""
MAX_DESCRIBED_AT_END = 512
"""Of a request that ends before all of its chunks were described."""
MAX_COMPARED_PER_STEP = 1_024
"""Chunks, over which ``take`` runs; the rest follows in the next step."""
MAX_WAITING_EVENTS = 4_096
MEDIUM_MEMORY = "CPU"
MEDIUM_SECONDARY = "STORAGE"
"""vLLM's names."""


class Place(NamedTuple):
    """Where blocks are, as events say it. ``locality``: relative to this engine."""

    medium: str
    owner: str | None
    locality: str


class EventGroupSpec(NamedTuple):
    """What events say of a KV cache group. ``kind``: vLLM's name of its type, None: not known."""

    kind: str | None = None
    sliding_window: int | None = None


@dataclass(slots=True)
class _Chunk:
    """One object of one group. ``announced``: presence bits, of one bit per place."""

    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]
    lora: Any
    extra_keys: list[tuple[Any, ...] | None] | None
    announced: int = 0

    @property
    def size(self) -> int:
        """Bytes that the description takes, roughly."""
        return CHUNK_BYTES + HASH_BYTES * len(self.hashes) + 4 * len(self.tokens)


class EventTypes(NamedTuple):
    """vLLM's classes. ``convert``: a block hash to its form in events. ``extra_keys``: what the
    hash of the block from one token to another covers beside its tokens."""

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    stored_fields: frozenset[str]
    removed_fields: frozenset[str]
    convert: Callable[[bytes], Any]
    extra_keys: Callable[[Request, int, int], tuple[Any, ...] | None]


def event_types() -> EventTypes:
    """Returns the classes of the vLLM that is installed. Raises ``ImportError``."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core import kv_cache_utils

    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)

    def extra_keys(request: Request, start: int, end: int) -> tuple[Any, ...] | None:
        found, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
        plain = untag([found]) if untag is not None else [found]
        return plain[0] if plain else None

    return EventTypes(
        BlockStored,
        BlockRemoved,
        frozenset(BlockStored.__struct_fields__),
        frozenset(BlockRemoved.__struct_fields__),
        kv_cache_utils.maybe_convert_block_hash,
        extra_keys,
    )


def places_of(topology: Topology) -> tuple[Place, ...]:
    """Returns where the blocks of each tier are."""
    places = []
    for tier in topology.structural.tiers:
        shared = tier.kind == "lmcache" or getattr(tier, "sharing", "") == "Cluster"
        memory = tier.kind == "memory"
        places.append(
            Place(
                MEDIUM_MEMORY if memory else MEDIUM_SECONDARY,
                None if memory else tier.name,
                "REMOTE" if shared else "LOCAL",
            )
        )
    return tuple(places)


def specs_of(kv_cache_config: KVCacheConfig) -> tuple[EventGroupSpec, ...]:
    """Returns what events say of the KV cache groups."""
    from vllm.v1 import kv_cache_interface as interface

    kind = getattr(interface, "get_kv_cache_spec_kind", None)
    window = getattr(interface, "get_kv_cache_spec_sliding_window", None)
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if kind is None or window is None:
        return tuple(EventGroupSpec() for _ in groups)
    return tuple(EventGroupSpec(kind(spec).value, window(spec)) for spec in groups)


def events_for(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    topology: Topology,
    planner: Planner,
    session: TierdSession,
) -> KVEvents | None:
    """Returns the events of an engine; None unless its ``kv_events_config`` enables them."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events:
        return None
    specs = specs_of(kv_cache_config)
    return KVEvents(planner, session, places_of(topology), specs, event_types())


class KVEvents:
    """The events of one engine. ``places``: by tier. ``specs``: by KV cache group."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        places: Sequence[Place],
        specs: Sequence[EventGroupSpec],
        types: EventTypes,
    ) -> None:
        self.unannounced: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Of events, since they were last collected."""
        self._planner = planner
        self._session = session
        self._changes = session.follow_presence(self._is_described)
        self._places = tuple(places)
        self._specs = tuple(specs)
        self._types = types
        self._named_owners = "ownership" in types.stored_fields
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        """Those that no request has had for the longest time come first."""
        self._bytes = 0
        self._compare: Iterator[bytes] | None = None
        """The rest of all described chunks, after changes were lost."""
        self._waiting: deque[Any] = deque()
        """Events to be returned first."""
        self._described = 0
        self._failed = False

    def _is_described(self, key: bytes) -> bool:
        """Any thread."""
        return key in self._chunks

    # Descriptions.

    def begin_step(self) -> None:
        """Starts a step."""
        self._described = 0

    def describe(self, state: RequestState, chunks: int, at_end: bool = False) -> None:
        """Describes a request's first ``chunks`` chunks, as far as they are not yet. Never
        raises."""
        if self._failed:
            return
        try:
            self._describe_chunks(state, chunks, at_end)
        except Exception as error:  # noqa: BLE001 - loads and stores need no events
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Events end; everything else goes on."""
        self._failed = True
        self.unannounced["error"] += 1
        self._changes.stop()
        self._compare = None
        self._waiting.clear()
        logger.error("KVTier: no more KV events until a restart", exc_info=error)

    def _describe_chunks(self, state: RequestState, chunks: int, at_end: bool) -> None:
        limit = MAX_DESCRIBED_AT_END if at_end else MAX_DESCRIBED_PER_STEP - self._described
        stop = min(chunks, state.described_chunks + max(0, limit))
        for chunk in range(state.described_chunks, stop):
            for group in range(len(self._planner.groups)):
                keys = state.group_keys(group, self._planner.hashes_per_chunk)
                if chunk < len(keys):
                    self._describe(state, group, chunk, keys[chunk])
        self._described += max(0, stop - state.described_chunks)
        state.described_chunks = max(stop, state.described_chunks)
        if at_end and stop < chunks:
            self.unannounced["not_described"] += chunks - stop

    def _describe(self, state: RequestState, group: int, chunk: int, key: bytes) -> None:
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return
        request, planner = state.request, self._planner
        size = planner.groups[group].block_tokens
        first, stop = planner.object_range(group, chunk)
        hashes, per_block = request.block_hashes, size // planner.hash_tokens
        if per_block < 1 or not planner.is_needed(group, chunk):
            return
        extra_keys = None
        if getattr(request, "mm_features", None) or request.lora_request or _salt(request):
            extra_keys = [
                self._types.extra_keys(request, block * size, (block + 1) * size)
                for block in range(first, stop)
            ]
        described = _Chunk(
            group,
            tuple(hashes[(block + 1) * per_block - 1] for block in range(first, stop)),
            hashes[first * per_block - 1] if first else None,
            array("i", request.all_token_ids[first * size : stop * size]),
            request.lora_request,
            extra_keys if extra_keys and any(extra_keys) else None,
        )
        self._chunks[key] = described
        self._bytes += described.size
        # Its presence may have been announced before it was described.
        self._changes.keys.append(key)
        while self._bytes > MAX_DESCRIPTION_BYTES:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, chunk = self._chunks.popitem(last=False)
        self._bytes -= chunk.size
        if not chunk.announced:
            return
        self.unannounced["table_full"] += 1
        events: list[Any] = []
        self._removed({(chunk.group, chunk.announced): [chunk]}, events)
        for event in events:
            if len(self._waiting) < MAX_WAITING_EVENTS:
                self._waiting.append(event)
            else:
                self.unannounced["queue_full"] += 1

    def announce_again(self) -> None:
        """vLLM has told the routers that every block is gone. The tiers' blocks are not."""
        if self._failed:
            return
        for chunk in self._chunks.values():
            chunk.announced = 0
        self._changes.all_changed = True

    # Events.

    @property
    def pending(self) -> bool:
        """Whether ``take`` may return something."""
        if self._failed:
            # The I/O thread may still note a change.
            return False
        changes = self._changes
        return bool(self._waiting or changes.keys or changes.all_changed or self._compare)

    def take(self) -> list[Any]:
        """Returns the events since the last call, a bounded number of them. Never raises."""
        if self._failed:
            return []
        try:
            return self._take()
        except Exception as error:  # noqa: BLE001 - loads and stores need no events
            self._fail(error)
            return []

    def _take(self) -> list[Any]:
        events: list[Any] = list(self._waiting)
        self._waiting.clear()
        changes = self._changes
        if changes.all_changed:
            changes.all_changed = False
            self._compare = iter(list(self._chunks))
        keys = changes.take(MAX_COMPARED_PER_STEP)
        if self._compare is not None:
            more = list(islice(self._compare, MAX_COMPARED_PER_STEP - len(keys)))
            if len(more) < MAX_COMPARED_PER_STEP - len(keys):
                self._compare = None
            keys += more
        removed: dict[tuple[int, int], list[_Chunk]] = {}
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            present = self._present(key)
            gone, new = chunk.announced & ~present, present & ~chunk.announced
            if gone:
                removed.setdefault((chunk.group, gone), []).append(chunk)
            if new:
                self._stored(chunk, new, events)
            chunk.announced = present
        self._removed(removed, events)
        return events

    def _present(self, key: bytes) -> int:
        bits = self._session.replica.get(key)
        found = MEMORY_BIT if bits & RAM_BITS else 0
        secondary = bits & ~RAM_BITS
        if secondary and not self._named_owners:
            # Events of this vLLM cannot tell one tier from another.
            secondary = MEMORY_BIT << 1
        return found | secondary

    def _stored(self, chunk: _Chunk, bits: int, events: list[Any]) -> None:
        convert, group = self._types.convert, self._planner.groups[chunk.group]
        spec = self._specs[chunk.group] if chunk.group < len(self._specs) else EventGroupSpec()
        lora = chunk.lora
        for place in self._places_of(bits):
            values = {
                "block_hashes": [convert(block_hash) for block_hash in chunk.hashes],
                "parent_block_hash": convert(chunk.parent) if chunk.parent is not None else None,
                "token_ids": chunk.tokens.tolist(),
                "block_size": group.block_tokens,
                "lora_id": lora.adapter_id if lora is not None else None,
                "lora_name": lora.name if lora is not None else None,
                "medium": place.medium,
                "extra_keys": chunk.extra_keys,
                "group_idx": chunk.group,
                "kv_cache_spec_kind": spec.kind,
                "kv_cache_spec_sliding_window": spec.sliding_window,
                "locality": place.locality,
                "ownership": place.owner,
            }
            fields = self._types.stored_fields
            events.append(
                self._types.stored(**{name: values[name] for name in values if name in fields})
            )
            self.counts["stored"] += 1

    def _removed(self, chunks: dict[tuple[int, int], list[_Chunk]], events: list[Any]) -> None:
        """``chunks``: by group and by the bits that they have lost."""
        convert, fields = self._types.convert, self._types.removed_fields
        for (group, bits), gone in chunks.items():
            hashes = [convert(block_hash) for chunk in gone for block_hash in chunk.hashes]
            for place in self._places_of(bits):
                values = {
                    "block_hashes": hashes,
                    "medium": place.medium,
                    "group_idx": group,
                    "locality": place.locality,
                    "ownership": place.owner,
                }
                events.append(
                    self._types.removed(**{name: values[name] for name in values if name in fields})
                )
                self.counts["removed"] += 1

    def _places_of(self, bits: int) -> Iterable[Place]:
        return (place for i, place in enumerate(self._places) if bits >> i & 1)


def _salt(request: Request) -> str | None:
    salt: str | None = getattr(request, "cache_salt", None)
    return salt
