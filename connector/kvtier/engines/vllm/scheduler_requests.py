"""What the scheduler side remembers about each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from kvtier import keys as keys_
from kvtier.engines.vllm.lora import Adapters
from kvtier.planner import Frontier

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtier.planner import Planner

GROUP = 0
"""The one full-attention group that the planner serves."""


@dataclass(frozen=True, slots=True)
class CachedMatch:
    """The last answer to "how many tokens can be loaded", and what it was derived from.

    ``computed``: the local hit it starts at. ``chunks``: of which it consists. Valid while ``removals`` (and ``changes``, looked at
    now and then) stand and the session is the same.
    """

    computed: int
    tokens: int
    first_chunk: int
    chunks: int
    removals: int
    changes: int
    epoch: int
    at: float


@dataclass(slots=True)
class PendingPromotion:
    """A promotion that a request waits for. ``deadline`` is this side's own clock; ``usable``: keys in pinned slots, None while
    tierd has not answered."""

    promotion: int
    first_chunk: int
    keys: int
    deadline: float
    epoch: int
    usable: int | None = None
    ended_at: float = 0.0
    tiers: tuple[int, ...] = ()


class RequestState:
    """One request, from its first question to its end. The scheduler's thread only."""

    __slots__ = (
        "_adapter",
        "_bare",
        "_keys",
        "answer",
        "asked_at",
        "blocks",
        "computed",
        "counted",
        "excluded",
        "failed",
        "frontier",
        "load",
        "promoted",
        "request",
        "scheduled",
        "stores",
        "stores_waited_since",
        "wait",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.counted = False
        """Whether its prompt is among those that were scheduled."""
        self.frontier = Frontier()
        self.answer: CachedMatch | None = None
        self.asked_at: float | None = None
        """When its clock began: the first question of this life of its blocks."""
        self.computed = 0
        """The local hit of the last question."""
        self.scheduled = False
        """Whether it was in a step since the last question: then its clock and its blocks begin anew at the next one."""
        self.promoted = False
        """Whether tierd was asked to promote for it in this life of its blocks."""
        self.wait: PendingPromotion | None = None
        self.load = 0
        """The load in flight, 0 if none."""
        self.failed = False
        """A load failed: nothing is offered to it again."""
        self.excluded = skip_reason(request)
        """Why it takes no part, empty if it does."""
        self.stores = 0
        """Its stores in flight."""
        self.stores_waited_since: float | None = None
        self.blocks: list[int] = []
        """Block table as far as known; only used where vLLM does not offer it with the scheduler's output."""
        self._adapter: bytes | None = None
        self._keys: list[bytes] = []
        self._bare: list[bytes] = []

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    def ready(self, adapters: Adapters) -> bool:
        """Whether its keys can be named; False for one that is excluded, or whose adapter's digest is not known yet."""
        if self.excluded:
            return False
        lora = self.request.lora_request
        if lora is None:
            return True
        # Asked every time: an adapter may be replaced in place under a running request.
        state = adapters.state(lora)
        if isinstance(state, bytes):
            self._adapter = state
            return True
        if state != "unknown" or self._adapter is not None:
            self.excluded = f"adapter_{state}"
        return False

    def keys(self, planner: Planner) -> list[bytes]:
        """Keys of the chunks that vLLM has hashed, in order. Grows with the request; never shrinks while tokens stay."""
        stride = planner.hashes_per_chunk
        hashes = self.request.block_hashes
        whole = len(hashes) // stride
        known = len(self._keys)
        if known == whole:
            return self._keys
        if known > whole:
            # A streaming session dropped tokens it had hashed.
            del self._keys[whole:]
            del self._bare[whole:]
            return self._keys
        adapter = self._adapter
        fresh = hashes[(known + 1) * stride - 1 : whole * stride : stride]
        if adapter is not None:
            fresh = [blake3(block_hash + adapter).digest() for block_hash in fresh]
        prefix = keys_.group_prefix(GROUP)
        self._bare += fresh
        self._keys += [prefix + block_hash for block_hash in fresh]
        return self._keys

    def named(self, first: int, count: int) -> tuple[tuple[int, bytes], ...]:
        """(group, hash) of ``count`` chunks from ``first`` on, as messages carry them."""
        return tuple((GROUP, block_hash) for block_hash in self._bare[first : first + count])

    def lose_blocks(self) -> None:
        """It was preempted, or its load failed wholly: nothing of it is computed, and its next question begins a new life."""
        self.frontier.lose_blocks()
        self.blocks = []
        self.scheduled = False
        self.asked_at = None
        self.promoted = False
        self.answer = None
        self.stores_waited_since = None


def skip_reason(request: Request) -> str:
    """Why a request takes no part: its hashes do not say what its KV was computed from."""
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        # A streaming session replaces tokens that were sampled; its hashes are not rolled back with them.
        return "streaming_session"
    return ""
