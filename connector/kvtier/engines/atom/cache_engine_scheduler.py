"""The scheduler side of the CacheEngine path: AtomScheduler with lookups in place of a replica.

A prompt is looked up when ATOM first asks about it. All that follows is as with tierd: the decision
after the allocation, hand-off at boundaries, the frontier and its roll-back, deferred blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.engines.atom.lookup_connection import LookupConnection
from kvtier.engines.atom.metadata import (
    AtomJob,
    AtomLoad,
    AtomSave,
    AtomStepMetadata,
    CacheLoad,
    CacheSave,
)
from kvtier.engines.atom.scheduler import SAVES, AtomLimits, AtomScheduler
from kvtier.engines.atom.sequence_state import AtomSequence, SequenceState
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId, SaveOperationId
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import Planner

RATE_WEIGHT = 0.3
PROBE_SECONDS = 30.0
"""After this time without a load one is tried, though it was slower than computing."""


@dataclass(slots=True)
class _Loading:
    keys: tuple[bytes, ...]
    tokens: int
    began: float


class CacheEngineScheduler(AtomScheduler):
    """The scheduler side of one engine."""

    def __init__(
        self,
        connection: LookupConnection,
        session: TierdSession,
        planner: Planner,
        limits: AtomLimits,
        load_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(session, planner, limits, clock)
        self._connection = connection
        self._load_seconds = load_seconds
        self._clock = clock
        self._loading: dict[int, _Loading] = {}
        self._seconds_per_token: float | None = None
        self._loaded_at = 0.0

    def get_num_new_matched_tokens(self, seq: AtomSequence) -> tuple[int, bool]:
        """As AtomScheduler's, after a lookup that waits at most for the configured time."""
        state = self._state(seq)
        if self.session.inbox:
            self._process_messages()
        if not self.loads.blocked(state):
            end = self._planner.chunks(state.request.num_tokens)
            if self._planner.tokens(end) >= self.loads.min_load_tokens:
                self._connection.look_up(state.keys(self._planner.hashes_per_chunk)[:end])
        if self._connection.paused:
            return 0, False
        return super().get_num_new_matched_tokens(seq)

    def should_park_for_load_after_alloc(self, seq: AtomSequence) -> bool:
        """As AtomScheduler's, unless loads have been slower than computing."""
        state = self._state(seq)
        if self._connection.paused:
            return False
        if not self._worth_it(state):
            self.loads.counts["slower_than_computing"] += 1
            return False
        return super().should_park_for_load_after_alloc(seq)

    def should_park_partial_prefill_for_load(self, seq: AtomSequence) -> bool:
        """As AtomScheduler's, unless loads have failed meanwhile."""
        state = self._find(seq)
        if state is not None and self._connection.paused:
            self.loads.drop_handoff(state, "paused")
        return super().should_park_partial_prefill_for_load(seq)

    def _worth_it(self, state: SequenceState) -> bool:
        prefill, rate = self.timer.estimate(), self._seconds_per_token
        if prefill is None or rate is None or self._clock() - self._loaded_at > PROBE_SECONDS:
            return True
        computed = state.computed_tokens_now
        end = max(computed, self.loads.may_hit(state))
        return end == computed or rate * (end - computed) <= prefill.seconds(computed, end)

    def build_connector_meta(self) -> AtomStepMetadata:
        """As AtomScheduler's, with the keys that the ranks need."""
        self._connection.begin_step()
        return self._with_keys(super().build_connector_meta())

    def build_load_meta(self) -> AtomStepMetadata:
        """As AtomScheduler's, with the keys that the ranks need."""
        return self._with_keys(super().build_load_meta())

    def _with_keys(self, metadata: AtomStepMetadata) -> AtomStepMetadata:
        """Must not raise: ATOM waits for a report of every load."""
        metadata.requests = [self._keyed(each) for each in metadata.requests]
        return metadata

    def _keyed(self, job: AtomJob) -> AtomJob:
        if isinstance(job, AtomLoad):
            keys = self._connection.keys_at(job.job.slots)
            tokens = self._planner.tokens(len(job.job.runs))
            self._loading[job.job.load] = _Loading(keys, tokens, self._clock())
            load = replace(job.job, timeout_seconds=self._load_seconds)
            return CacheLoad(job.operation, load, keys, job.job.generations[: len(keys)])
        if isinstance(job, AtomSave):
            found = self._connection.reserved(job.job.reservation)
            if found is None:
                return CacheSave(job.operation, job.job)
            return CacheSave(job.operation, job.job, found.key, found.store)
        return job

    def process_completions(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """As AtomScheduler's. Failed loads are looked up again, and ended saves free their room."""
        for succeeded, operations in (
            (True, output.finished_loading),
            (False, output.failed_loading),
        ):
            for operation in operations:
                if isinstance(operation, LoadOperationId):
                    self._cache_load_ended(operation.generation, succeeded)
        for operation in output.finished_saving:
            if isinstance(operation, SaveOperationId) and operation.req_id == SAVES:
                self._connection.store_ended(operation.generation)
        return super().process_completions(output)

    def _cache_load_ended(self, load_id: int, succeeded: bool) -> None:
        loading = self._loading.pop(load_id, None)
        if loading is None:
            return  # Reported before.
        self._connection.load_ended(loading.keys, succeeded)
        now = self._clock()
        self._loaded_at = now
        rate = (now - loading.began) / max(1, loading.tokens)
        if not succeeded:
            return
        known = self._seconds_per_token
        self._seconds_per_token = rate if known is None else known + RATE_WEIGHT * (rate - known)

    def get_statistics(self) -> dict[str, int]:
        """As AtomScheduler's, and the counts of lookups."""
        counts = {name: int(amount) for name, amount in self._connection.counts.items()}
        return {**super().get_statistics(), **counts}
