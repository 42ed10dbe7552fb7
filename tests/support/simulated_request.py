"""Requests in simulated time: the real store, simulated tiers, and an engine of known speed.

A request asks for its prompt's chunks as the scheduler side does, gets what the store brings, and
computes the rest. Its time to first token is the wait plus that computation: messages and engine
steps take no time, nor do copies unless a simulation gives them a speed, so that only selection and
deadline count. Requests do not delay one another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from tests.support.manual_executor import ManualCall, ManualClock, ManualExecutor
from tests.support.simulated_tier import SimulatedTier

from kvtier.config.models import (
    FileSystemTierDocument,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
    Topology,
)
from kvtier.store.context import StoreRuntime
from kvtier.store.cost_model import Prefill, PrefillModel, PrefixCost
from kvtier.store.executor import IoCall
from kvtier.store.store import TierStore
from kvtier.store.types import (
    EngineInfo,
    KeysEvicting,
    PromotionArriving,
    PromotionEnded,
    StoreCounters,
)
from kvtier.tiers.base import ObjectRef

NAMESPACE = "5" * 32
ENGINE = "simulated"
STEP_TOKENS = 2_048
"""Tokens of one step of chunked prefill."""


class Choice(Enum):
    """The strategy. ``SELECTION`` is compared with ``LOAD`` (always the whole hit) and
    ``RECOMPUTE`` (never).
    """

    SELECTION = "selection"
    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass(slots=True)
class SimulatedRequest:
    """One request. ``first_token_seconds``: infinite until it is known."""

    prompt_tokens: int
    keys: list[bytes]
    asked_at: float
    usable: int = 0
    waited_seconds: float = 0.0
    first_token_seconds: float = math.inf
    tiers: tuple[int, ...] = ()
    copied_at: float = 0.0
    """When the copies of what has arrived end."""
    announced: int = 0
    """Keys of which the engine was told before the end of the promotion."""
    predicted: int = 0
    recompute_seconds: float = field(default=math.inf)

    @property
    def over_recompute(self) -> float:
        """Time to first token as a multiple of recomputing everything."""
        return self.first_token_seconds / self.recompute_seconds


class Simulation:
    """One store with its tiers, and one engine. ``prefill``: its measured prefill cost."""

    def __init__(
        self,
        engine: Prefill,
        tiers: Sequence[SimulatedTier],
        *,
        chunk_tokens: int = 256,
        chunk_bytes: int = 32 << 20,
        slots: int = 1_024,
        threads: int = 8,
        load_timeout_seconds: int = 600,
        selection: Selection = Selection.COST,
        copy_bytes_per_second: float = math.inf,
        early: bool = True,
    ) -> None:
        """``copy_bytes_per_second``: of the link to the GPU. ``early``: the engine copies what has
        arrived before the promotion has ended."""
        self._copy_seconds = chunk_bytes / copy_bytes_per_second
        self._early = early
        self.engine = engine
        self.tiers = list(tiers)
        self.clock = ManualClock()
        self.prefill = PrefillModel()
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._io = ManualExecutor()
        self._limit_seconds = float(load_timeout_seconds)
        self._numbers = 0
        self._waiting: dict[int, SimulatedRequest] = {}
        live = Live(
            selection=selection,
            min_load_tokens=0,
            tiers={
                "ram": LiveTier(),
                **{t.name: LiveTier(load_timeout_seconds=load_timeout_seconds) for t in self.tiers},
            },
        )
        documents = [
            FileSystemTierDocument(name=t.name, path="/", sharing="Pod", read_threads=threads)
            for t in tiers
        ]
        structural = Structural(
            policy=PolicyIdentity(namespace="default", name="simulated"),
            content_hash="0",
            run_directory="/run/kvtier",
            tiers=[MemoryTierDocument(name="ram", capacity_bytes=slots * chunk_bytes), *documents],
            live=live,
        )
        topology = Topology(structural=structural, live=live)
        self.counters = StoreCounters()
        self.store = TierStore(
            slots * chunk_bytes,
            None,
            self.tiers,
            topology,
            StoreRuntime(self._io, self.clock, counters=self.counters),
        )
        self._running: list[tuple[ManualCall, SimulatedTier, ObjectRef]] = []
        self.store.open_engine(EngineInfo(ENGINE, NAMESPACE, (chunk_bytes,), ((chunk_bytes,),)))
        self.settle()

    # Prompts and requests.

    def keys(self, number: int, tokens: int) -> list[bytes]:
        """Names of the chunks of the number-th prompt, wherever they are."""
        count = tokens // self._chunk_tokens
        return [hashlib.sha256(b"%d/%d" % (number, chunk)).digest() for chunk in range(count)]

    def place(self, keys: Sequence[bytes], tiers: Sequence[int]) -> None:
        """Puts chunk i into the lower tier ``tiers[i]`` (1: the first)."""
        for key, tier in zip(keys, tiers, strict=True):
            self.tiers[tier - 1].put(NAMESPACE, b"\0" + key, self._chunk_bytes)
        self.settle()

    def prompt(self, tokens: int, tier: int = 1) -> list[bytes]:
        """A prompt that was never seen in this process, all of its chunks in one tier."""
        self._numbers += 1
        keys = self.keys(self._numbers, tokens)
        self.place(keys, [tier] * len(keys))
        return keys

    def ask(
        self, keys: list[bytes], prompt_tokens: int = 0, choice: Choice = Choice.SELECTION
    ) -> SimulatedRequest:
        """A request arrives. Its result is there once ``first_token_seconds`` is finite."""
        tokens = prompt_tokens or len(keys) * self._chunk_tokens
        request = SimulatedRequest(tokens, keys, self.clock.now)
        request.recompute_seconds = self.engine.seconds(0, tokens)
        if choice is Choice.RECOMPUTE:
            request.first_token_seconds = request.recompute_seconds
            self._observe(0, tokens)
            return request
        self._numbers += 1
        ends = tuple((i + 1) * self._chunk_tokens for i in range(len(keys)))
        shape = None
        if choice is Choice.SELECTION:
            copy_seconds = self._copy_seconds if self._early else 0.0
            shape = PrefixCost(0, ends, self.prefill.estimate(), copy_seconds=copy_seconds)
        self._waiting[self._numbers] = request
        self.store.promote(
            ENGINE, self._numbers, [(0, key) for key in keys], self._limit_seconds, shape
        )
        self.settle()
        return request

    def finish(self, request: SimulatedRequest) -> SimulatedRequest:
        """Lets time pass until the request has its first token."""
        while math.isinf(request.first_token_seconds):
            self.step()
        return request

    def run(
        self, keys: list[bytes], prompt_tokens: int = 0, choice: Choice = Choice.SELECTION
    ) -> SimulatedRequest:
        """One request from its arrival to its first token."""
        return self.finish(self.ask(keys, prompt_tokens, choice))

    def _observe(self, start: int, end: int) -> None:
        for begin in range(start, end, STEP_TOKENS):
            stop = min(end, begin + STEP_TOKENS)
            self.prefill.observe([(begin, stop)], self.engine.seconds(begin, stop))

    # Time.

    def step(self, until: float = math.inf) -> None:
        """Goes on to the next moment at which something happens, at most to ``until``."""
        wake = self.store.next_wake()
        soonest = min((tier.next_change() for tier in self.tiers), default=math.inf)
        now = self.clock.now
        target = min(until, now + soonest, max(wake, now) if wake is not None else math.inf)
        if math.isinf(target):
            raise RuntimeError("nothing will ever happen")
        ended = [(tier, ref) for tier in self.tiers for ref in tier.advance(target - now)]
        self.clock.now = target
        for tier, ref in ended:
            for entry in [e for e in self._running if e[1] is tier and e[2] == ref]:
                self._running.remove(entry)
                self._io.run(entry[0])
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.step(until)

    def quiet(self, limit_seconds: float = 1e5) -> None:
        """Lets time pass until no read is under way that will end."""
        until = self.clock.now + limit_seconds
        while self.clock.now < until and any(
            math.isfinite(tier.next_change()) for tier in self.tiers
        ):
            self.step(until)

    def settle(self) -> None:
        """Does everything that takes no time."""
        while True:
            self.store.pump()
            for event in self.store.take_events():
                if isinstance(event, KeysEvicting):
                    self.store.acknowledge_eviction(event.token)
                elif isinstance(event, PromotionArriving):
                    self._arriving(event)
                elif isinstance(event, PromotionEnded):
                    self._ended(event)
            others = [call for call in self._io.pending if not call.lane.startswith("read:")]
            for call in others:
                self._io.run(call)
            if not self._start_reads() and not others and not self._io_waits():
                return

    def _io_waits(self) -> bool:
        wake = self.store.next_wake()
        return wake is not None and wake <= self.clock.now

    def _start_reads(self) -> bool:
        started = False
        for tier in self.tiers:
            lane = f"read:{tier.name}"
            waiting = [call for call in self._io.pending if call.lane == lane and not call.started]
            free = self._threads - sum(entry[1] is tier for entry in self._running)
            for call in waiting:
                if free <= 0:
                    break
                started = True
                self._io.hold(call)
                job = call.call
                if not isinstance(job, IoCall) or job.started_at is None:
                    self._io.run(call)
                    continue
                ref = job.work.args[0] if isinstance(job.work, partial) else None
                if not isinstance(ref, ObjectRef):
                    raise TypeError("a read lane carries something that is no read")
                tier.start(ref, self.clock.now)
                self._running.append((call, tier, ref))
                free -= 1
        return started

    def _copy(self, request: SimulatedRequest, keys: int) -> None:
        """Copies of so many more keys follow those that were submitted before."""
        start = max(request.copied_at, self.clock.now)
        request.copied_at = start + keys * self._copy_seconds

    def _arriving(self, event: PromotionArriving) -> None:
        request = self._waiting[event.promotion]
        assert event.first == request.announced
        if not request.announced:
            keys = [(0, key) for key in request.keys[: event.predicted]]
            self.store.load(ENGINE, event.promotion, event.promotion, keys)
            request.predicted = event.predicted
        request.announced += len(event.locations)
        self._copy(request, len(event.locations))

    def _ended(self, event: PromotionEnded) -> None:
        request = self._waiting.pop(event.promotion)
        request.usable = event.usable
        request.tiers = event.tiers
        there = event.usable * self._chunk_tokens
        self._copy(request, event.usable - request.announced)
        request.waited_seconds = max(request.copied_at, self.clock.now) - request.asked_at
        rest = self.engine.seconds(there, request.prompt_tokens)
        request.first_token_seconds = request.waited_seconds + rest
        self._observe(there, request.prompt_tokens)
        if request.announced:
            self.store.release_load(ENGINE, event.promotion)
        elif event.usable:
            keys = [(0, key) for key in request.keys[: event.usable]]
            self.store.load(ENGINE, event.promotion, event.promotion, keys)
            self.store.release_load(ENGINE, event.promotion)
