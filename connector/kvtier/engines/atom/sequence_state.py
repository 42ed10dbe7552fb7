"""What the scheduler side knows about each of ATOM's sequences. The scheduler's thread only.

A state belongs to one ``Sequence`` object, not to its id: ATOM's callers may choose ids and use one
again.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvtier.engines.atom.token_keys import TokenChain
from kvtier.engines.atom.types import RequestId
from kvtier.engines.common.request_state import RequestState

FINISHED = "FINISHED"
ABORTED = "ABORTED"
RUNNING = "RUNNING"
WAITING = "WAITING"
PARKED = "WAITING_FOR_REMOTE_KVS"
"""Names of ATOM's states of a sequence."""


class AtomSequence(Protocol):
    """The part of ATOM's ``Sequence`` that is used."""

    id: RequestId
    status: Any
    token_ids: Tokens[int]
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    block_table: list[int]
    is_partial_prefill: bool


@dataclass(slots=True)
class PromptRequest:
    """A prompt in the form in which ``RequestState`` reads a request.

    ``num_tokens`` is one less than the prompt: its last token is always computed, because its
    output is the first sampled token.
    """

    request_id: str
    num_tokens: int
    chain: TokenChain
    lora_request: None = None

    @property
    def block_hashes(self) -> list[bytes]:
        """One hash per whole chunk of the prompt."""
        return self.chain.hashes


@dataclass(slots=True)
class TailPromotion:
    """A promotion for the end of a prompt. ``usable_keys``: None until tierd answers.

    ``keys`` chunks from ``first_chunk`` on, which are then in RAM at ``locations``. ``deadline``
    and ``sent_at``: by the scheduler's clock. ``sources``: where the chunks were, by tier.
    """

    promotion_id: int
    first_chunk: int
    keys: int
    epoch: int
    sent_at: float
    deadline: float
    sources: tuple[int, ...] = ()
    usable_keys: int | None = None
    ended_at: float = 0.0
    locations: tuple[int, ...] = ()


@dataclass(slots=True)
class Handoff:
    """A load that starts where the computed beginning of a prompt ends.

    Tokens before ``boundary`` are computed, those from there to ``end`` are loaded; both are chunk
    boundaries. ``promotion``: the one that brings them into RAM; None if they are there.
    """

    boundary: int
    end: int
    promotion: TailPromotion | None = None


@dataclass(slots=True)
class SequenceLoad:
    """A load that a worker may still execute. ``first_chunk`` and ``chunks``: what it covers.

    ``epoch``: of the session that was told of it."""

    load_id: int
    state: SequenceState
    first_chunk: int
    chunks: int
    epoch: int
    dispatched: bool = False
    cancelled: bool = False


class SequenceState(RequestState):
    """One sequence, from its first lookup until its blocks are free."""

    __slots__ = (
        "aborted",
        "allocated",
        "deferred",
        "finished",
        "handoff",
        "load",
        "seq",
        "standstill_steps",
        "tail_tried",
    )

    def __init__(self, seq: AtomSequence, number: int, chunk_tokens: int) -> None:
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        request = PromptRequest(
            f"{seq.id}#{number}",
            max(0, int(seq.num_prompt_tokens) - 1),
            TokenChain(prompt, chunk_tokens),
        )
        super().__init__(cast("Any", request))
        self.seq = seq
        self.skip_reason = skip_reason(seq)
        self.aborted = False
        """Whether the sequence was aborted, and its status says something else meanwhile."""
        self.standstill_steps = 0
        self.allocated = False
        """Whether the sequence has had blocks since its last preemption."""
        self.deferred = False
        """Whether ATOM was told to keep the blocks, and not yet that it may free them."""
        self.finished = False
        """Whether ATOM has reported the end of the sequence."""
        self.handoff: Handoff | None = None
        self.load: SequenceLoad | None = None
        self.tail_tried = False
        """Whether a promotion was requested since the last allocation."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return int(self.seq.num_prompt_tokens)

    @property
    def computed_tokens_now(self) -> int:
        """Prompt tokens whose KV is in the sequence's blocks: 0 while it has none."""
        if not self.seq.block_table:
            return 0
        return min(int(self.seq.num_cached_tokens), int(self.seq.num_prompt_tokens))

    @property
    def status(self) -> str:
        """The name of ATOM's status."""
        return str(getattr(self.seq.status, "name", self.seq.status))

    @property
    def busy(self) -> bool:
        """Whether copies may still access the sequence's blocks."""
        return self.load is not None or self.stores_in_flight > 0


def skip_reason(seq: AtomSequence) -> str:
    """Returns why token ids do not identify the sequence's KV; empty if they do."""
    if getattr(seq, "multimodal_data", None) is not None:
        return "multimodal"
    if getattr(seq, "has_per_req_cache", False):
        return "recurrent_state"
    return ""
