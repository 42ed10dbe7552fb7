"""The blocks of the requests of a step, and which of them are referenced when it is built.

vLLM frees the blocks that a sliding window has left, and overwrites the block with a layer's state,
before the worker reports the step that filled them. Their blocks are therefore referenced in the
step that completes a chunk, and stored once the step has been executed (``SchedulerStores``). The
scheduler's thread only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.engines.common.referenced_blocks import NULL_BLOCK
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.scheduler_stores import SchedulerStores
from kvtier.planner import GroupKind, Planner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

BlockTables = Callable[[RequestState], Sequence[Sequence[int]]]
"""From a request of the step to its block ids, by group."""
BoundaryState = tuple[int, int, int]
"""Group, block id, and the number of tokens that the state in the block covers."""


class BlockReferences:
    """References blocks of windows and states in vLLM's pool, through the engine's stores."""

    def __init__(self, planner: Planner, stores: SchedulerStores) -> None:
        self._planner = planner
        self._stores = stores
        self.windows = tuple(
            number
            for number, group in enumerate(planner.groups)
            if group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
        )
        """The groups with windows."""
        self._state_groups = tuple(
            number for number, group in enumerate(planner.groups) if group.kind is GroupKind.STATE
        )

    def add_windows(
        self, step: int, state: RequestState, ends: range, block_tables: BlockTables
    ) -> None:
        """References the blocks of windows that end within ``ends`` (tokens) at a chunk."""
        planner, size = self._planner, self._planner.chunk_tokens
        first = max(1, -(-ends.start // size))
        tables = block_tables(state)
        for chunk in range(first - 1, (ends.stop - 1) // size):
            for group in self.windows:
                if not planner.is_needed(group, chunk):
                    continue
                begin, stop = planner.object_range(group, chunk)
                ids = tables[group][begin:stop] if group < len(tables) else ()
                # Blocks that a local hit did not bring are not there either.
                if len(ids) == stop - begin and NULL_BLOCK not in ids:
                    self._stores.reference(step, state, group, chunk, ids)

    def add_states(
        self, step: int, state: RequestState, tokens: int, offers: Iterable[BoundaryState]
    ) -> None:
        """References the blocks with the states that vLLM offers, up to ``tokens`` tokens."""
        for group, block, boundary in offers:
            chunk, rest = divmod(boundary, self._planner.chunk_tokens)
            if group in self._state_groups and not rest and 0 < boundary <= tokens:
                self._stores.reference(step, state, group, chunk - 1, (block,))


def boundary_states(output: SchedulerOutput) -> Mapping[str, Sequence[BoundaryState]]:
    """Returns the states at block boundaries that the step computes, by request.

    The block tables do not say which block has which state.
    """
    block_state = getattr(output, "kv_connector_block_state", None)
    found: Mapping[str, Sequence[BoundaryState]] = (
        getattr(block_state, "boundary_state_offloads", None) or {}
    )
    return found


def step_block_tables(
    output: SchedulerOutput, states: Mapping[str, RequestState], groups: int
) -> BlockTables:
    """Returns the block tables of a step's requests, for an engine with ``groups`` groups.

    ``states``: by request id. Where the output has only new blocks, their tables are kept there.
    """
    block_state = getattr(output, "kv_connector_block_state", None)
    if block_state is not None:

        def from_output(state: RequestState) -> Sequence[Sequence[int]]:
            return block_state.get_block_ids(state.request_id) or ()

        return from_output
    # vLLM 0.24 passes only new blocks, so tables are tracked here.
    for new in output.scheduled_new_reqs:
        state = states.get(new.req_id)
        if state is not None:
            state.block_ids = [list(blocks) for blocks in new.block_ids]
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        state = states.get(request_id)
        if state is None:
            continue
        if request_id in resumed or not state.block_ids:
            state.block_ids = [[] for _ in range(groups)]
        if new_blocks is not None:
            for known, fresh in zip(state.block_ids, new_blocks, strict=True):
                known.extend(fresh)
    return lambda state: state.block_ids


def before_reset(pool: object, give_back: Callable[[], object]) -> None:
    """Calls ``give_back`` before each reset of the prefix cache.

    vLLM asks the pool before it calls the connector, and a pool with referenced blocks cannot be
    reset.
    """
    original = getattr(pool, "reset_prefix_cache", None)
    if original is None:
        return

    @functools.wraps(original)
    def reset_prefix_cache() -> bool:
        try:
            give_back()
        except Exception as error:  # the reset is vLLM's and goes on in any case
            logger.exception("KVTier: cannot give back blocks: %s", error)
        return bool(original())

    pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[attr-defined]
