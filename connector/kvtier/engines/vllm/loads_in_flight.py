"""Loads in flight on the scheduler side: from vLLM's admission until every rank has ended its
copies.

vLLM waits for a report of each load. So whatever happens, each has a job for the workers, and ends.
The scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.engines.common.jobs import ArrivedKeys, BlockRun, LoadJob, LoadResult
from kvtier.engines.common.request_state import PendingPromotion, RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.cost_estimates import CopyEstimator
from kvtier.engines.vllm.load_records import ActiveLoad, LoadCounts, have_blocks, target_runs
from kvtier.planner import PartRun, Planner
from kvtier.store.generations import unpack_locations
from kvtier.tierd.wire import Arriving, Load, LoadReleased, Promoted

LOAD_GRACE_SECONDS = 0.05
REPORT_GRACE_SECONDS = 1.0
"""A worker reports within this time after the limit of its load."""
MIN_LOAD_TIMEOUT_SECONDS = 1.0
"""The data of a load is in RAM, so a busy machine must not turn it into a failure."""
MIN_COPY_BYTES_PER_SECOND = 2 << 30
"""A load may take as long as copies at this rate, a fraction of what any GPU link delivers."""


def _each(wanted: Sequence[PartRun], values: Sequence[int]) -> tuple[int, ...]:
    """Of each part the value of its run."""
    each: tuple[int, ...] = ()
    for run, value in zip(wanted, values, strict=True):
        each += (value,) * run.chunks
    return each


class LoadsInFlight:
    """The loads in flight of one engine. ``new_id``: returns an id that is unique for its life."""

    def __init__(
        self,
        planner: Planner,
        session: TierdSession,
        new_id: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.counts = LoadCounts()
        self.loaded_tokens: Counter[int] = Counter()
        """By tier, since the engine started."""
        self.copies = CopyEstimator()
        self._planner = planner
        self._hashes_per_chunk = planner.hashes_per_chunk
        self._session = session
        self._new_id = new_id
        self._clock = clock
        self._active: dict[int, ActiveLoad] = {}
        self._jobs: list[LoadJob] = []
        self._cancelled_loads: list[int] = []
        self._arriving: dict[int, ActiveLoad] = {}
        """Loads that began before their promotion had ended, by promotion."""
        self._arrived: list[ArrivedKeys] = []

    def start(
        self,
        state: RequestState,
        tokens: int,
        block_tables: Sequence[Sequence[int]],
        promotion: PendingPromotion | None,
        promotion_ends_at: float,
    ) -> None:
        """Starts a load of ``tokens`` tokens after the request's local hit.

        ``block_tables``: the request's whole block tables, by group. ``promotion``: the one that
        prepared it, and until when it may take. vLLM waits for a report from now on, so a job is
        queued even if tierd cannot be reached.
        """
        now = self._clock()
        planner, session = self._planner, self._session
        end_tokens = state.computed_tokens + tokens
        wanted = planner.needed_runs(state.computed_tokens, end_tokens)
        keys = sum(run.chunks for run in wanted)
        first = planner.chunks(state.computed_tokens)
        load_id = self._new_id()
        runs = target_runs(wanted, block_tables)
        timeout = MIN_LOAD_TIMEOUT_SECONDS
        if promotion is not None:
            timeout = max(timeout, promotion_ends_at + LOAD_GRACE_SECONDS - now)
        sizes = session.slot_bytes
        if sizes:
            timeout += sum(sizes[run.group] * run.chunks for run in wanted) / (
                MIN_COPY_BYTES_PER_SECOND
            )
        if have_blocks(wanted, runs.blocks):
            locations = self._locations(state, promotion, wanted, keys, end_tokens)
            reason = ""
            arriving = promotion is not None and promotion.arriving and len(locations) < keys
        else:
            locations, arriving = [], False
            reason = "block_table"
        slots, generations = unpack_locations(locations)
        self._jobs.append(
            LoadJob(
                load_id,
                state.request_id,
                runs,
                timeout,
                session.epoch,
                slots,
                generations,
                arriving,
            )
        )
        state.load_id = load_id
        state.cached_match = None
        self._active[load_id] = active = ActiveLoad(
            load_id,
            state,
            first_chunk=first,
            end_chunk=-(-end_tokens // planner.chunk_tokens),
            chunk_tokens=_each(wanted, [run.tokens for run in wanted]),
            source_tiers=promotion.tiers if promotion is not None else (),
            ranks_unreported=planner.ranks,
            ranks_copying=planner.ranks,
            keys_loaded=keys,
            epoch=session.epoch,
            expires_at=now + timeout + REPORT_GRACE_SECONDS,
            failure=reason,
            object_bytes=_each(wanted, [sizes[run.group] for run in wanted]) if sizes else (),
            keys_named=len(slots),
        )
        if promotion is not None and arriving:
            active.promotion_id = promotion.promotion_id
            self._arriving[promotion.promotion_id] = active
        self.counts.offered_tokens += tokens
        message = Load(
            load=load_id,
            promotion=promotion.promotion_id if promotion is not None else 0,
            keys=state.wire_keys_of(wanted),
            owner=session.owner(state),
        )
        # The load does not depend on it: tierd is asked not to evict what is being copied.
        session.send(message)

    def _locations(
        self,
        state: RequestState,
        promotion: PendingPromotion | None,
        wanted: Sequence[PartRun],
        keys: int,
        end_tokens: int,
    ) -> list[int]:
        """Returns where the objects of ``wanted``, which are ``keys``, are, up to the first one
        that is no longer in RAM."""
        if promotion is not None:
            if promotion.end_tokens:
                same = (promotion.computed_tokens, promotion.end_tokens) == (
                    state.computed_tokens,
                    end_tokens,
                )
            else:
                same = bool(wanted) and promotion.first_chunk == wanted[0].chunk
            if same:
                return list(promotion.locations[: promotion.usable_keys][:keys])
        locations: list[int] = []
        for run in wanted:
            of_group = state.group_keys(run.group, self._hashes_per_chunk)
            found = self._session.replica.locations(of_group[run.chunk : run.chunk + run.chunks])
            locations += found
            if len(found) < run.chunks:
                break
        return locations

    def start_failing(self, state: RequestState, block_ids: Sequence[int]) -> None:
        """Queues a job that cannot succeed, after ``start`` raised: vLLM waits for a report.

        ``block_ids``: the block table of the first group.
        """
        if any(job.request_id == state.request_id for job in self._jobs):
            return
        first_block = state.computed_tokens // self._planner.groups[0].block_tokens
        run = BlockRun(0, 0, tuple(block_ids[first_block:]))
        self._jobs.append(
            LoadJob(self._new_id(), state.request_id, (run,), MIN_LOAD_TIMEOUT_SECONDS)
        )
        state.load_failed = True

    def take_jobs(self) -> tuple[list[LoadJob], list[int]]:
        """Returns the jobs and the cancelled load ids for the next step."""
        jobs, self._jobs = self._jobs, []
        cancelled, self._cancelled_loads = self._cancelled_loads, []
        return jobs, cancelled

    # Loads whose keys are still arriving in RAM.

    def on_arriving(self, message: Arriving) -> bool:
        """Further keys of a promotion have arrived. False if no load of it is in flight."""
        load = self._arriving.get(message.promotion)
        if load is not None:
            self._name_keys(load, message.first, message.tiers, message.locations)
        return load is not None

    def on_promoted(self, message: Promoted) -> bool:
        """A promotion has ended. False if no load of it is in flight."""
        load = self._arriving.pop(message.promotion, None)
        if load is not None:
            self.counts.promotions[message.outcome] += 1
            self._name_keys(load, 0, message.tiers, message.locations, last=True)
        return load is not None

    def on_session_lost(self) -> None:
        """tierd is lost: nothing arrives. The workers end the loads."""
        self._arriving.clear()
        self._arrived.clear()

    def _name_keys(
        self,
        load: ActiveLoad,
        first: int,
        tiers: Sequence[int],
        locations: Sequence[int],
        last: bool = False,
    ) -> None:
        """Tells the workers where further keys of a load are. ``first``: position of the first of
        ``locations``."""
        start, end = load.keys_named - first, len(load.chunk_tokens) - first
        new = locations[max(start, 0) : end]
        if start < 0 or (not new and not last):
            return
        load.source_tiers += tuple(tiers[start:end])
        load.keys_named += len(new)
        slots, generations = unpack_locations(new)
        self._arrived.append(ArrivedKeys(load.load_id, slots, generations, last))

    def take_arrived(self) -> tuple[ArrivedKeys, ...]:
        """Returns keys of loads in flight that have arrived, for the next step."""
        arrived, self._arrived = tuple(self._arrived), []
        return arrived

    def on_load_done(self, result: LoadResult) -> None:
        """Takes one rank's report of a load, or of the end of its copies."""
        load = self._active.get(result.load)
        if load is None:
            self.counts.failures["unknown_report"] += 1
            return
        if result.follows:
            if result.reason:
                self.counts.failures["unpinned"] += 1
        else:
            load.ranks_unreported -= 1
            load.keys_loaded = min(load.keys_loaded, result.keys_loaded)
            load.seconds = max(load.seconds, result.seconds)
            load.failure = load.failure or result.reason
            if load.ranks_unreported == 0:
                self._on_reported(load)
        if result.copying:
            return
        load.ranks_copying -= 1
        load.copy_seconds = max(load.copy_seconds, result.copy_seconds)
        if load.ranks_copying > 0:
            return
        del self._active[result.load]
        self._arriving.pop(load.promotion_id, None)
        if load.epoch == self._session.epoch:
            self._session.send(LoadReleased(load=result.load))
        if load.keys_loaded == len(load.chunk_tokens):
            self.copies.observe(sum(load.chunk_tokens), load.copy_seconds, self._clock())

    def _on_reported(self, load: ActiveLoad) -> None:
        """Every rank has reported, so vLLM resumes the request."""
        state = load.state
        if state.load_id == load.load_id:
            state.load_id = 0
        complete = load.keys_loaded == len(load.chunk_tokens)
        # What is of use as a whole only is recomputed from the start if it is not complete.
        useful = load.keys_loaded if complete or self._planner.prefix_only else 0
        for tier, (tokens, size) in load.by_tier(useful).items():
            name = self._session.tier_name(tier)
            self.counts.loaded_tokens[name] += tokens
            if load.object_bytes:
                self.counts.tier_bytes[name] += size
            self.loaded_tokens[tier] += tokens
        slowest = max(load.source_tiers[: len(load.chunk_tokens)], default=0)
        self.counts.note_load(self._session.tier_name(slowest), load.seconds)
        if complete:
            return
        self.counts.failures[load.failure.split(":")[0] or "partial"] += 1
        if self._planner.prefix_only:
            loaded_end = load.first_chunk + load.keys_loaded
            end = loaded_end - 1
        else:
            loaded_end = load.first_chunk
            # Less than half of what was offered.
            end = load.first_chunk + (load.end_chunk - load.first_chunk - 1) // 2
        state.load_failed = state.load_end is not None or end <= load.first_chunk
        state.load_end = end
        state.frontier.move_back(loaded_end)

    def cancel(self, load_id: int) -> None:
        """The request of this load has finished or was aborted."""
        self._cancelled_loads.append(load_id)

    def token_sources(self, state: RequestState) -> dict[int, int]:
        """Returns the tokens of a request's load in flight, by the tier where they were found."""
        load = self._active.get(state.load_id)
        sources: Counter[int] = Counter()
        if load is not None:
            for index, tokens in enumerate(load.chunk_tokens):
                sources[load.tier(index)] += tokens
        return dict(sources)

    def has_pending_work(self) -> bool:
        """Returns whether an engine without requests should keep stepping, so that loads end."""
        now = self._clock()
        return bool(self._jobs or self._cancelled_loads or self._arrived) or any(
            now < load.expires_at for load in self._active.values()
        )

    def take_counts(self) -> LoadCounts:
        """Returns what was counted since the last call."""
        counts, self.counts = self.counts, LoadCounts()
        return counts

    def __len__(self) -> int:
        """Loads that some rank has not reported."""
        return len(self._active)
