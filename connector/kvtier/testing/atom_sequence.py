"""Sequences of the ATOM stand-in, with the attributes that connectors read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto


class Status(Enum):
    """ATOM's states of a sequence."""

    WAITING_FOR_REMOTE_KVS = auto()
    WAITING = auto()
    RUNNING = auto()
    ABORTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class StandInSequence:
    """One request. ``token_ids`` is the prompt and what was sampled.

    ``num_cached_tokens``: tokens whose KV the scheduler takes for computed; it advances during
    prefill only.
    """

    id: int
    token_ids: list[int]
    block_size: int
    max_tokens: int
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int = 0
    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    is_partial_prefill: bool = False
    is_prefill: bool = False
    leave_reason: str = ""
    multimodal_data: object = None
    has_per_req_cache: bool = False
    offload_loaded: bool = False
    offload_load_failed: bool = False
    offload_loaded_tokens: int | None = None
    offload_load_start_tokens: int | None = None
    counted_as_parked: bool = False
    awaits_aborted_load: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.token_ids)

    @property
    def output(self) -> list[int]:
        """What was sampled."""
        return self.token_ids[self.num_prompt_tokens :]

    def block_tokens(self, index: int) -> Sequence[int]:
        """The tokens of block ``index`` of the sequence."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]
