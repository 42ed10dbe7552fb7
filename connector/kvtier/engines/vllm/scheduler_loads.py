"""Loads, as the scheduler side sees them: what to offer, when to wait, and how it ended (DATAPATH 1 and 2).

Cases of ``offer``, in this order:

1. the request failed a load, is excluded, or tierd is not there: 0
2. it waits for a promotion: None until that has ended or the clock is out
3. its promotion has ended: what is pinned, if that is enough
4. the last answer still holds: the same again
5. a store of it is in flight: None, for a bounded time
6. everything usable is in RAM: that
7. the chosen prefix needs a lower tier: promote and None; or what RAM has, where too many wait or the clock is out
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvtier.config.models import Selection
from kvtier.engines.vllm.metadata import BlockRun, LoadJob, LoadResult
from kvtier.engines.vllm.scheduler_requests import CachedMatch, PendingPromotion, RequestState
from kvtier.engines.vllm.scheduler_speed import CopySpeed
from kvtier.engines.vllm.tierd_session import Clock, TierdSession
from kvtier.planner import Planner
from kvtier.store.cost_model import Prefill
from kvtier.store.selection import LOSS_SHARE, choose_prefix
from kvtier.store.types import MEMORY_BIT, RAM_BITS
from kvtier.tierd.wire import Cancel, Load, Promote, Promoted

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Requests that may wait for promotions at a time; further ones get what RAM has."""
CLOCK_SLACK_SECONDS = 0.1
"""tierd ends a promotion within its budget; this much later it is given up without tierd."""
WORKER_SLACK_SECONDS = 0.05
MIN_LIMIT_SECONDS = 1.0
"""A worker's limit for a load: what it copies lies in RAM, and a busy machine must not turn that into a failure."""
LEAST_BYTES_PER_SECOND = 2 << 30
"""Copying is given the time it takes at this rate, a fraction of any link a GPU is on."""
REFRESH_SECONDS = 0.05
"""How long an answer is given again although keys were added since."""
STORE_WAIT_SECONDS = 1.0
VERIFY_SECONDS = 5
"""The longest wait for what has to be verified in RAM alone; a gigabyte takes a tenth of a second."""
PINNED_SECONDS = 30.0
"""A request that is not admitted gives its pinned slots back after this long; tierd itself takes them after 60 s."""


@dataclass(slots=True)
class ActiveLoad:
    """A load in flight. ``chunk_tokens[i]``: tokens that key i brings. ``ranks_left``: ranks that have not reported."""

    load: int
    state: RequestState
    first_chunk: int
    chunk_tokens: tuple[int, ...]
    ranks_left: int
    keys_loaded: int
    found: tuple[int, ...] = ()
    """Tiers in which the keys were before they were promoted."""
    tiers: tuple[int, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class LoadCounts:
    """Since the last ``take``; leave through vLLM's statistics."""

    offered_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    promotions: Counter[str] = field(default_factory=Counter)
    load_seconds: list[float] = field(default_factory=list)


class SchedulerLoads:
    """All loads of one engine. The scheduler's thread only. Numbers of loads and promotions are unique in the engine's life."""

    def __init__(
        self,
        planner: Planner,
        link: TierdSession,
        clock: Clock,
        prefill: Callable[[], Prefill | None] = lambda: None,
    ) -> None:
        self._prefill = prefill
        self._copies = CopySpeed()
        self._planner = planner
        self._link = link
        self._clock = clock
        self._numbers = count(1)
        self._waiting: dict[int, RequestState] = {}
        """Promotions that tierd has not answered."""
        self._active: dict[int, ActiveLoad] = {}
        self._jobs: list[LoadJob] = []
        self._cancelled: list[int] = []
        self.counts = LoadCounts()
        self.loaded_tokens: Counter[int] = Counter()
        """By tier, since the engine started."""
        link.promoted = self._promoted

    # Questions.

    def offer(self, state: RequestState, computed: int) -> int | None:
        """Tokens beyond ``computed`` that can be loaded; None: ask again. No call to anyone."""
        now = self._clock()
        if state.failed or state.excluded or not self._link.usable:
            self.give_up_waiting(state)
            return 0
        if state.asked_at is None:
            state.asked_at = now
        if state.wait is not None and state.wait.epoch != self._link.epoch:
            state.wait = None
        if state.wait is not None:
            waited = self._waited(state, state.wait, computed, now)
            if waited != 0:
                return waited
        answer = state.answer
        if (
            answer is not None
            and answer.computed == computed
            and answer.removals == self._link.replica.removals
            and answer.epoch == self._link.epoch
            and (answer.changes == self._link.changes or now - answer.at < REFRESH_SECONDS)
        ):
            return answer.tokens
        if not self._planner.starts_at_block(computed):
            return self._answer(state, computed, 0, now)
        return self._look_up(state, computed, now)

    def _waited(
        self, state: RequestState, wait: PendingPromotion, computed: int, now: float
    ) -> int | None:
        """What became of a promotion: tokens, None to wait on, 0 if there is nothing of it and it is over."""
        if wait.usable is None:
            if now < wait.deadline:
                return None
            self.counts.promotions["out_of_time"] += 1
            self.give_up_waiting(state)
            return 0
        tokens = self._planner.tokens(wait.first_chunk + wait.usable) - computed
        too_few = tokens < max(1, self._link.live.min_load_tokens)
        if (
            too_few
            or wait.first_chunk != self._planner.chunks(computed)
            or now - wait.ended_at > PINNED_SECONDS
        ):
            self.give_up_waiting(state)
            return 0
        return tokens

    def _look_up(self, state: RequestState, computed: int, now: float) -> int | None:
        planner, link = self._planner, self._link
        first = planner.chunks(computed)
        end = min(len(state.keys(planner)), planner.chunks(state.request.num_tokens))
        bits = self._present(state, first, end)
        ram = 0
        for chunk_bits in bits:
            if not chunk_bits & MEMORY_BIT:
                break
            ram += 1
        least = max(1, link.live.min_load_tokens)
        in_ram = planner.tokens(first + ram) - computed if ram else 0
        if ram < len(bits):
            promoted = self._promote(state, computed, first, bits, now)
            if promoted:
                return None
        if in_ram < least or not self._ram_is_worth_it(computed, in_ram, now):
            return self._answer(state, computed, 0, now)
        if state.stores and not self._stores_took_too_long(state, now):
            # It was preempted while it was being stored; a moment later the rest of it is there as well.
            return None
        return self._answer(state, computed, in_ram, now, first, ram)

    def _present(self, state: RequestState, first: int, end: int) -> list[int]:
        """Bits of the chunks from ``first`` on, up to the first that nobody has who may be used."""
        replica, found = self._link.replica, []
        get, usable = replica.get_bits, replica.usable_bits
        for key in state.keys(self._planner)[first:end]:
            chunk_bits = get(key, 0) & usable
            if not chunk_bits:
                break
            found.append(chunk_bits)
        return found

    def _ram_is_worth_it(self, computed: int, tokens: int, now: float) -> bool:
        prefill = self._prefill() if self._link.live.selection is Selection.COST else None
        if prefill is None or self._copies.beats(
            tokens, prefill.seconds(computed, computed + tokens), now
        ):
            return True
        self.counts.promotions["ram_slower_than_recomputing"] += 1
        return False

    def _stores_took_too_long(self, state: RequestState, now: float) -> bool:
        if state.stores_waited_since is None:
            state.stores_waited_since = now
        return now - state.stores_waited_since > STORE_WAIT_SECONDS

    def _answer(
        self,
        state: RequestState,
        computed: int,
        tokens: int,
        now: float,
        first: int = 0,
        chunks: int = 0,
    ) -> int:
        link = self._link
        state.answer = CachedMatch(
            computed, tokens, first, chunks, link.replica.removals, link.changes, link.epoch, now
        )
        return tokens

    def _promote(
        self, state: RequestState, computed: int, first: int, bits: Sequence[int], now: float
    ) -> bool:
        """Chooses a prefix; True if tierd was asked to bring it into RAM, or to verify what is there."""
        planner, link = self._planner, self._link
        asked_at = state.asked_at if state.asked_at is not None else now
        if state.promoted:
            return False  # One try per life of its blocks: a tier that fails at once would be asked in every step.
        if len(self._waiting) >= MAX_WAITING:
            self.counts.promotions["too_many_waiting"] += 1
            return False
        sources = [0 if b & RAM_BITS else (b & -b).bit_length() - 1 for b in bits]
        weights = [link.tier(index).load_weight for index in range(max(sources) + 1)]
        tokens = [planner.chunk_tokens] * len(bits)
        tokens[0] -= computed - planner.tokens(first)
        chosen = choose_prefix(link.live.selection, sources, weights, tokens).chosen
        if chosen is None or chosen.tokens < max(1, link.live.min_load_tokens):
            return False
        if all(b & MEMORY_BIT for b in bits[: chosen.keys]):
            return False
        limit = max(
            (link.tier(t).load_timeout_seconds for t in chosen.tiers if t), default=VERIFY_SECONDS
        )
        budget = limit - (now - asked_at)
        prefill = self._prefill() if link.live.selection is Selection.COST else None
        if prefill is not None:
            # What tierd's own clock comes to at most; it holds here too, should tierd not answer.
            end = planner.tokens(first + chosen.keys)
            budget = min(
                budget, (1 + LOSS_SHARE) * prefill.seconds(computed, end) - (now - asked_at)
            )
        if budget <= 0:
            return False
        if state.stores and not self._stores_took_too_long(state, now):
            return True
        number = next(self._numbers)
        if not link.send(
            self._promotion(number, state, computed, first, chosen.keys, budget, now - asked_at)
        ):
            return False
        state.answer = None
        state.promoted = True
        state.wait = PendingPromotion(
            number, first, chosen.keys, now + budget + CLOCK_SLACK_SECONDS, link.epoch
        )
        self._waiting[number] = state
        return True

    def _promotion(
        self,
        number: int,
        state: RequestState,
        computed: int,
        first: int,
        keys: int,
        budget_seconds: float,
        waited_seconds: float,
    ) -> Promote:
        """Under ``Cost`` tierd decides, so it is told what computing the prompt would cost."""
        named = state.named(first, keys)
        if self._link.live.selection is not Selection.COST:
            return Promote(promotion=number, keys=named, budget_seconds=budget_seconds)
        prefill = self._prefill() or Prefill(0.0, 0.0)
        return Promote(
            promotion=number,
            keys=named,
            budget_seconds=budget_seconds,
            start_tokens=computed,
            ends=tuple(self._planner.tokens(first + i + 1) for i in range(keys)),
            alpha=prefill.alpha,
            beta=prefill.beta,
            waited_seconds=waited_seconds,
        )

    def _promoted(self, message: Promoted) -> None:
        state = self._waiting.pop(message.promotion, None)
        if state is None or state.wait is None or state.wait.promotion != message.promotion:
            return  # Given up before; tierd has our word for it.
        self.counts.promotions[message.outcome] += 1
        state.wait.usable = min(message.usable, state.wait.keys)
        state.wait.ended_at = self._clock()
        state.wait.tiers = message.tiers

    def give_up_waiting(self, state: RequestState) -> None:
        """Nobody waits for its promotion any more, and what it pinned may go."""
        wait, state.wait = state.wait, None
        if wait is None:
            return
        self._waiting.pop(wait.promotion, None)
        self._link.send(Cancel(promotion=wait.promotion))

    # Loads.

    def begin(self, state: RequestState, computed: int, tokens: int, blocks: Sequence[int]) -> None:
        """vLLM has taken ``tokens`` tokens after ``computed`` and allocated ``blocks`` (the request's whole table).

        It waits for a report from now on, so a job goes out whatever else fails.
        """
        now = self._clock()
        planner = self._planner
        parts = planner.needed(computed, computed + tokens)
        first = planner.chunks(computed)
        wait, state.wait = state.wait, None
        number = next(self._numbers)
        runs = tuple(
            BlockRun(part.group, part.first, tuple(blocks[part.block : part.block + part.blocks]))
            for part in parts
        )
        limit = MIN_LIMIT_SECONDS
        if wait is not None:
            self._waiting.pop(wait.promotion, None)
            limit = max(limit, wait.deadline - CLOCK_SLACK_SECONDS + WORKER_SLACK_SECONDS - now)
        limit += sum(self._link.slot_bytes) * len(parts) / LEAST_BYTES_PER_SECOND
        self._jobs.append(LoadJob(number, state.request_id, runs, limit))
        state.load = number
        state.answer = None
        block_tokens = planner.groups[0].block_tokens
        chunk_tokens = tuple(part.blocks * block_tokens for part in parts)
        found = wait.tiers if wait is not None else ()
        self._active[number] = ActiveLoad(
            number, state, first, chunk_tokens, planner.ranks, len(parts), found
        )
        self.counts.offered_tokens += tokens
        message = Load(
            load=number,
            promotion=wait.promotion if wait is not None else 0,
            keys=state.named(first, len(parts)),
            ranks=tuple(range(planner.ranks)),
        )
        if not self._link.send(message):
            self.counts.failures["not_sent"] += 1

    def ended(self, result: LoadResult) -> None:
        """One rank's report of the end of a load."""
        active = self._active.get(result.load)
        if active is None:
            self.counts.failures["unknown_report"] += 1
            return
        active.ranks_left -= 1
        if result.keys_loaded <= active.keys_loaded:
            active.keys_loaded = result.keys_loaded
            active.tiers = result.tiers
        active.reason = active.reason or result.reason
        if active.ranks_left > 0:
            return
        del self._active[result.load]
        state = active.state
        if state.load == result.load:
            state.load = 0
        for index, tokens in enumerate(active.chunk_tokens[: active.keys_loaded]):
            tier = active.tiers[index] if index < len(active.tiers) else 0
            self.counts.loaded_tokens[self._link.tier_name(tier)] += tokens
            self.loaded_tokens[tier] += tokens
        self.counts.load_seconds.append(result.seconds)
        if active.keys_loaded == len(active.chunk_tokens):
            self._copies.observe(sum(active.chunk_tokens), result.seconds)
        if active.keys_loaded < len(active.chunk_tokens):
            state.failed = True
            state.frontier.move_back(active.first_chunk + active.keys_loaded)
            self.counts.failures[active.reason.split(":")[0] or "partial"] += 1

    def request_over(self, state: RequestState) -> None:
        """The request is finished or aborted."""
        self.give_up_waiting(state)
        if state.load:
            self._cancelled.append(state.load)

    def session_lost(self) -> None:
        """tierd is gone: nobody waits any longer. Loads in flight are ended by the worker."""
        waiting, self._waiting = self._waiting, {}
        for state in waiting.values():
            state.wait = None
            self.counts.promotions["lost"] += 1

    def reset(self) -> None:
        """tierd cancels all promotions."""
        for state in list(self._waiting.values()):
            self.give_up_waiting(state)

    def take(self) -> tuple[list[LoadJob], list[int]]:
        """Jobs and cancellations for the next step."""
        jobs, self._jobs = self._jobs, []
        cancelled, self._cancelled = self._cancelled, []
        return jobs, cancelled

    @property
    def in_flight(self) -> int:
        """Loads that have not been reported by every rank."""
        return len(self._active)

    def sources(self, state: RequestState) -> dict[int, int]:
        """Tokens of a request's load in flight by the index of the tier where they were found."""
        active = self._active.get(state.load)
        if active is None:
            return {}
        found: Counter[int] = Counter()
        for index, tokens in enumerate(active.chunk_tokens):
            found[active.found[index] if index < len(active.found) else 0] += tokens
        return dict(found)

    def fail(self, state: RequestState, blocks: Sequence[int]) -> None:
        """A job that cannot succeed, for a request whose report is owed and whose load could not be described."""
        if any(job.request_id == state.request_id for job in self._jobs):
            return
        begin = state.computed // self._planner.groups[0].block_tokens
        self._jobs.append(
            LoadJob(
                next(self._numbers),
                state.request_id,
                (BlockRun(0, 0, tuple(blocks[begin:])),),
                MIN_LIMIT_SECONDS,
            )
        )
        state.failed = True
