"""A stand-in for ATOM's scheduler: what a connector of its KV transfer interface experiences.

It makes the same calls in the same order, with the same state at each of them:

* Completed loads move to the head of the queue, then running prefills may be parked.
* Prefill goes first: running partial prefills, then the queue. A step has prefill or decode only.
* A waiting sequence is offered to the connector before its blocks are allocated, and decided on
  after that. A parked sequence keeps its blocks and later computes the rest of its prompt.
* A sequence whose load failed computes from where it stood; an aborted one is released when its
  load has ended.
* Blocks that the connector asks to keep are freed when it reports the id of the sequence.
* Out of blocks, the youngest running sequence whose blocks the connector does not need is
  preempted.

Sampling, speculation, pipeline parallelism and recurrent state are left out. In one respect it is
better than its model: when a preempted sequence is admitted again, no step ends between its prompt
and its sampled tokens, after which they would not be computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvtier.testing.atom_blocks import StandInBlocks
from kvtier.testing.atom_sequence import StandInSequence, Status

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """``max_batched_tokens``: prompt tokens of one step. ``alignment``: of steps that are cut."""

    max_num_seqs: int = 8
    max_batched_tokens: int = 256
    long_prefill_threshold: int = 0
    alignment: int = ALIGNMENT


@dataclass(slots=True)
class StandInBatch:
    """One step. ``starts[i]``: computed tokens of sequence i before it, for prefill."""

    sequences: list[StandInSequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    prefill: bool = True
    connector_meta_output: Any = None


class StandInScheduler:
    """The scheduler of one engine. ``connector``: an ATOM scheduler-side connector, or None."""

    def __init__(self, blocks: StandInBlocks, options: SchedulerOptions, connector: Any) -> None:
        self.block_manager = blocks
        self.options = options
        self.kv_connector = connector
        self.waiting: deque[StandInSequence] = deque()
        self.running: deque[StandInSequence] = deque()
        self.rejected: list[StandInSequence] = []
        self.deferred_free_blocks: dict[Any, StandInSequence] = {}
        self.parked = 0
        self.preemptions = 0
        self._loaded: list[Any] = []
        self._failed: list[Any] = []

    # The engine's side.

    def add(self, seq: StandInSequence) -> None:
        """A request arrives."""
        self.waiting.append(seq)

    def abort(self, seq: StandInSequence) -> None:
        """The client is gone. The sequence ends at its next turn."""
        if seq in self.running or seq in self.waiting:
            seq.status = Status.ABORTED

    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        left = self.waiting or self.running or self.rejected or self.deferred_free_blocks
        return not left

    def schedule(self) -> StandInBatch | None:
        """Builds a step; None if there is nothing to do. It may have no sequences."""
        self._move_loaded_to_the_head()
        self._park_running()
        if not self.running and not self.waiting:
            return None
        batch = StandInBatch()
        budget = self._resume_partial(batch)
        self._admit(batch, budget)
        if not batch.sequences:
            batch.prefill = False
            self._decode(batch)
        if self.kv_connector is not None:
            batch.connector_meta_output = self.kv_connector.build_connector_meta()
        return batch

    # Loads.

    def _move_loaded_to_the_head(self) -> None:
        ended = set(self._loaded) | set(self._failed)
        ready = [
            seq
            for seq in self.waiting
            if seq.status is Status.WAITING_FOR_REMOTE_KVS and seq.id in ended
        ]
        others = [seq for seq in self.waiting if seq not in ready]
        self.waiting = deque([*ready, *others])

    def _park_running(self) -> None:
        if self.kv_connector is None:
            return
        kept: deque[StandInSequence] = deque()
        parked: list[StandInSequence] = []
        for seq in self.running:
            if not self.kv_connector.should_park_partial_prefill_for_load(seq):
                kept.append(seq)
                continue
            seq.is_partial_prefill = False
            self._park(seq)
            parked.append(seq)
        self.running = kept
        self.waiting.extendleft(reversed(parked))

    def _park(self, seq: StandInSequence) -> None:
        seq.status = Status.WAITING_FOR_REMOTE_KVS
        if not seq.counted_as_parked:
            seq.counted_as_parked = True
            self.parked += 1

    def _unpark(self, seq: StandInSequence) -> None:
        if seq.counted_as_parked:
            seq.counted_as_parked = False
            self.parked -= 1

    def _load_is_over(self, seq: StandInSequence) -> bool:
        """Takes the end of a parked sequence's load; returns False while there is none."""
        if seq.id in self._failed:
            self._failed.remove(seq.id)
            seq.status = Status.WAITING
            seq.offload_loaded, seq.offload_load_failed = False, True
            seq.offload_loaded_tokens = seq.num_cached_tokens
            seq.offload_load_start_tokens = None
            return True
        if seq.id not in self._loaded:
            return False
        self._loaded.remove(seq.id)
        seq.status = Status.WAITING
        end, start = seq.offload_loaded_tokens, seq.offload_load_start_tokens
        if end is not None and end > seq.num_cached_tokens:
            if start is not None and start < end:
                self.block_manager.publish_loaded_prefix(seq, start, end)
            seq.num_cached_tokens = end
        seq.offload_load_start_tokens = None
        seq.offload_loaded = True
        return True

    def update_from_completions(self, output: Any) -> None:
        """Takes the aggregated report of the workers."""
        if self.kv_connector is not None:
            output = self.kv_connector.process_completions(output)
        for ids, queue in (
            (output.finished_loading, self._loaded),
            (output.failed_loading, self._failed),
        ):
            for request_id in ids:
                seq = self.deferred_free_blocks.get(request_id)
                if seq is not None and seq.awaits_aborted_load:
                    self._release_aborted(seq)
                else:
                    queue.append(request_id)
        for request_id in output.finished_saving:
            seq = self.deferred_free_blocks.get(request_id)
            if seq is not None:
                self._release_deferred(seq)

    # Prefill.

    def _chunk(self, wanted: int, budget: int, empty: bool) -> int:
        chunk = min(wanted, budget)
        if chunk >= wanted:
            return chunk
        unit = max(self.block_manager.block_size, self.options.alignment)
        return chunk - chunk % unit or (chunk if empty else 0)

    def _resume_partial(self, batch: StandInBatch) -> int:
        budget = self.options.max_batched_tokens
        for seq in self.running:
            if not seq.is_partial_prefill or len(batch.sequences) >= self.options.max_num_seqs:
                continue
            wanted = self._limited(seq.num_tokens - seq.num_cached_tokens)
            chunk = self._chunk(wanted, budget, not batch.sequences)
            if chunk <= 0:
                break
            budget -= chunk
            self._add(batch, seq, chunk)
        return budget

    def _limited(self, wanted: int) -> int:
        threshold = self.options.long_prefill_threshold
        return min(wanted, threshold) if threshold > 0 else wanted

    def _add(
        self, batch: StandInBatch, seq: StandInSequence, chunk: int, resumed: bool = False
    ) -> None:
        seq.is_prefill = True
        batch.sequences.append(seq)
        if not resumed and seq.num_prompt_tokens <= seq.num_cached_tokens + chunk:
            chunk = seq.num_tokens - seq.num_cached_tokens
        batch.tokens.append(chunk)
        batch.starts.append(seq.num_cached_tokens)

    def _admit(self, batch: StandInBatch, budget: int) -> None:
        blocked: list[StandInSequence] = []
        while self.waiting and budget > 0 and len(batch.sequences) < self.options.max_num_seqs:
            seq = self.waiting.popleft()
            if seq.status is Status.ABORTED:
                self._reject_aborted(seq)
                continue
            if len(self.running) >= self.options.max_num_seqs:
                self.waiting.appendleft(seq)
                break
            if seq.status is Status.WAITING_FOR_REMOTE_KVS and not self._load_is_over(seq):
                blocked.append(seq)
                continue
            resumed = bool(seq.block_table) and (seq.offload_loaded or seq.offload_load_failed)
            if resumed:
                wanted = seq.num_prompt_tokens - seq.num_cached_tokens
                chunk = self._chunk(wanted, budget, not batch.sequences)
                if chunk <= 0:
                    self.waiting.appendleft(seq)
                    break
                self._unpark(seq)
            else:
                admitted = self._admit_new(seq, batch, budget)
                if admitted is None:
                    self.waiting.appendleft(seq)
                    break
                if not admitted:
                    blocked.append(seq)
                    continue
                chunk = admitted
            budget -= chunk
            seq.status = Status.RUNNING
            self.running.append(seq)
            self._add(batch, seq, chunk, resumed)
        self.waiting.extend(blocked)

    def _admit_new(self, seq: StandInSequence, batch: StandInBatch, budget: int) -> int | None:
        """Returns the tokens to compute; 0 if the sequence is parked, None if it has to wait."""
        connector = self.kv_connector
        may_load = connector is not None and connector.get_num_new_matched_tokens(seq)[1]
        if may_load and len(self.running) + self.parked >= self.options.max_num_seqs:
            return None
        cached = self.block_manager.can_allocate(seq)
        if cached < 0:
            return None
        wanted = self._limited(seq.num_tokens - cached * self.block_manager.hash_block_size)
        chunk = self._chunk(wanted, budget, not batch.sequences)
        if chunk <= 0:
            return None
        self.block_manager.allocate(seq, cached)
        if connector is None:
            return chunk
        connector.update_state_after_alloc(seq)
        if may_load and connector.should_park_for_load_after_alloc(seq):
            self._park(seq)
            return 0
        chunk = int(connector.adjust_prefill_chunk_after_alloc(seq, chunk))
        if chunk <= 0:
            raise RuntimeError(f"the connector leaves {chunk} tokens to compute")
        return chunk

    # Decode and preemption.

    def _decode(self, batch: StandInBatch) -> None:
        partial: list[StandInSequence] = []
        while self.running and len(batch.sequences) < self.options.max_num_seqs:
            seq = self.running.popleft()
            if seq.is_partial_prefill:
                partial.append(seq)
                continue
            if not self._make_room(seq):
                break
            if seq.status is Status.WAITING:
                continue
            self.block_manager.may_append(seq)
            seq.is_prefill = False
            batch.sequences.append(seq)
            batch.tokens.append(1)
            batch.starts.append(seq.num_tokens - 1)
        self.running.extendleft(reversed(batch.sequences))
        self.running.extend(partial)

    def _make_room(self, seq: StandInSequence) -> bool:
        """Preempts until there is room; returns False if that is impossible in this step."""
        while not self.block_manager.can_append(seq):
            victim = next(
                (each for each in reversed(self.running) if self._may_preempt(each)), None
            )
            if victim is not None:
                self.running.remove(victim)
                self._preempt(victim)
            elif self._may_preempt(seq):
                self._preempt(seq)
                return True
            else:
                self.running.appendleft(seq)
                return False
        return True

    def _may_preempt(self, seq: StandInSequence) -> bool:
        return self.kv_connector is None or not self.kv_connector.should_defer_free(seq)

    def _preempt(self, seq: StandInSequence) -> None:
        self.preemptions += 1
        seq.status = Status.WAITING
        seq.is_partial_prefill = False
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    # After a step.

    def postprocess(self, batch: StandInBatch, sampled: dict[int, int]) -> list[StandInSequence]:
        """Takes what a step has computed. ``sampled``: one token by ``id`` of the object."""
        for seq, tokens, start in zip(batch.sequences, batch.tokens, batch.starts, strict=True):
            if batch.prefill:
                self.block_manager.index_computed(seq, start, start + tokens)
                seq.num_cached_tokens += tokens
                seq.is_partial_prefill = seq.num_cached_tokens < seq.num_prompt_tokens
        finished = []
        for seq in batch.sequences:
            if seq.is_partial_prefill:
                continue
            aborted = seq.status is Status.ABORTED
            seq.token_ids.append(sampled[id(seq)])
            if aborted or len(seq.output) >= seq.max_tokens:
                seq.leave_reason = "aborted" if aborted else "max_tokens"
                finished.append(seq)
        for seq in finished:
            seq.status = Status.FINISHED
            self._free_finished(seq)
            self.running.remove(seq)
        return finished

    def _free_finished(self, seq: StandInSequence) -> None:
        connector = self.kv_connector
        if connector is not None:
            connector.request_finished(seq)
            if connector.should_defer_free(seq):
                self._defer(seq)
                return
        self.block_manager.deallocate(seq)

    def _defer(self, seq: StandInSequence) -> None:
        if self.deferred_free_blocks.setdefault(seq.id, seq) is not seq:
            raise RuntimeError(f"two sequences with the id {seq.id} wait for their copies")

    def _reject_aborted(self, seq: StandInSequence) -> None:
        seq.status, seq.leave_reason = Status.FINISHED, "aborted"
        self.rejected.append(seq)
        if not seq.counted_as_parked:
            return
        self._defer(seq)
        over = seq.offload_loaded or seq.offload_load_failed
        for queue in (self._loaded, self._failed):
            if seq.id in queue:
                queue.remove(seq.id)
                over = True
        if over:
            self._release_aborted(seq)
        else:
            seq.awaits_aborted_load = True

    def _release_aborted(self, seq: StandInSequence) -> None:
        seq.awaits_aborted_load = False
        self._unpark(seq)
        self._release_deferred(seq)

    def _release_deferred(self, seq: StandInSequence) -> None:
        connector = self.kv_connector
        if seq.awaits_aborted_load or connector.should_defer_free(seq):
            return
        connector.request_finished(seq)
        self.deferred_free_blocks.pop(seq.id, None)
        self.block_manager.deallocate(seq)
