"""Under which conditions chunks may be stored: the session's, the workers' and the request's.

Each reason is a word by which dropped stores are counted. The scheduler's thread only.
"""

from __future__ import annotations

from kvtier.engines.common.hints import NO_HINTS
from kvtier.engines.common.referenced_blocks import ReferencedBlocks
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.tierd_session import TierdSession

PASSING_REASONS = ("weights_unknown", "replica_incomplete", "worker_not_attached")
"""Why nothing can be stored for a step or two. After a reset of the prefix cache the workers take
the fingerprint of the weights in the step that computes the next prompt."""


class StoreConditions:
    """The conditions of one engine. Nothing raises."""

    def __init__(self, session: TierdSession, blocks: ReferencedBlocks) -> None:
        self.worker_epoch: int | None = None
        """The tierd epoch of the workers' last report; None before the first one of a session."""
        self._session = session
        self._blocks = blocks

    def may_be_stored(self, state: RequestState) -> bool:
        """Whether chunks of this request may be stored at all, as far as it says itself."""
        # In every step for every request, so without the property of ``RequestState``.
        if state.request.num_prompt_tokens < self._session.live.min_store_tokens:
            return False
        return state.hints is NO_HINTS or not self._request_blocked_reason(state)

    def blocked_reason(self, state: RequestState | None = None) -> str:
        """Returns why no chunk, or none of this request, can be stored; empty if some can."""
        if state is not None and (reason := self._request_blocked_reason(state)):
            return reason
        if self._blocks.pool is None:
            return "no_block_pool"
        session = self._session
        if session.suspended:
            return "weights_stale" if session.stale_weights else "weights_unknown"
        if not session.namespace_open:
            return "not_attached"
        if not session.replica_ready:
            return "replica_incomplete"
        if self.worker_epoch is not None and self.worker_epoch != session.epoch:
            return "worker_not_attached"
        if state is not None and state.prompt_tokens < session.live.min_store_tokens:
            return "short_prompt"
        return ""

    def _request_blocked_reason(self, state: RequestState) -> str:
        hints, session = state.hints, self._session
        if hints.invalid:
            return "invalid_hints"
        if hints.skip_store:
            return "skip_store"
        return "" if hints.tiers is None or session.can_store_in(hints.tiers) else "tiers"
