"""Prefill of ATOM in simulated time: the real store, a simulated disk, and the real scheduler side.

The stand-in of ATOM's scheduler makes the steps; a step takes as long as its tokens cost, and a
load as long as its bytes take on the GPU's link. Nothing else takes time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.atom_tiers import topology
from tests.support.simulated_request import ENGINE, NAMESPACE, Simulation
from tests.support.simulated_tier import SimulatedTier

from kvtier.config.models import Selection
from kvtier.engines.atom.metadata import AtomLoad, AtomSave
from kvtier.engines.atom.scheduler import AtomLimits, AtomScheduler
from kvtier.engines.atom.token_keys import chain
from kvtier.engines.atom.types import KVConnectorOutput
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.types import PromotionEnded
from kvtier.testing.atom_blocks import StandInBlocks
from kvtier.testing.atom_scheduler import SchedulerOptions, StandInScheduler
from kvtier.testing.atom_sequence import StandInSequence, Status
from kvtier.tierd.wire import (
    PROTOCOL,
    Cancel,
    Delta,
    Load,
    LoadReleased,
    Message,
    Promote,
    Promoted,
    Ready,
    Welcome,
)

BLOCK, CHUNK, STEP = 16, 256, 8_192
LINK_BYTES_PER_SECOND = 50e9


class HandoffSimulation(Simulation):
    """One engine of known speed, and one disk."""

    def __init__(self, engine: Prefill, disk: SimulatedTier, chunk_bytes: int) -> None:
        self._deliver: Callable[[Message], None] = lambda message: None
        self.epoch = 1
        self._sequence = 0
        self._link_seconds = chunk_bytes / LINK_BYTES_PER_SECOND
        super().__init__(engine, [disk], chunk_tokens=CHUNK, chunk_bytes=chunk_bytes, slots=600)
        group = KVCacheGroup(GroupKind.FULL, BLOCK)
        session = TierdSession(
            topology(512, Selection.COST),
            Planner.build([group], CHUNK, CHUNK),
            ENGINE,
            lambda: EngineIdentity("{}"),
            self._connect,
        )
        limits = AtomLimits(num_blocks=8_192, step_tokens=STEP, min_save_tokens=1 << 30)
        planner = Planner.build([group], CHUNK, CHUNK)
        self.connector = AtomScheduler(session, planner, limits, self.clock)
        self.blocks = StandInBlocks(8_192, BLOCK)
        options = SchedulerOptions(max_batched_tokens=STEP)
        self.scheduler = StandInScheduler(self.blocks, options, self.connector)
        self.connector.start()

    # The client of the session.

    def _connect(self, _directory: object, _hello: object, sink: Any, *_: object) -> Any:
        self._deliver = sink
        return self

    def start(self) -> None:
        """tierd welcomes the engine at once."""
        self._deliver(
            Welcome(
                protocol=PROTOCOL,
                epoch=1,
                session=1,
                pool_path="/pool",
                pool_bytes=1 << 40,
                tiers=("ram", "disk"),
                settings="",
            )
        )
        self._deliver(Ready(namespace=NAMESPACE, slot_bytes=(self._chunk_bytes,), persistent=True))
        self.show()

    def show(self) -> None:
        """The scheduler side learns what the store has now."""
        self._sequence += 1
        added = tuple(self.store.presence(NAMESPACE))
        self._deliver(Delta(sequence=self._sequence, added=added, snapshot=self._sequence == 1))

    def send(self, message: Message) -> bool:
        """Passes a message of the scheduler side to the store."""
        if isinstance(message, Promote):
            prefill = Prefill(message.alpha, message.beta)
            cost = PrefixCost(
                message.start_tokens, message.ends, prefill if prefill.usable else None
            )
            keys = message.keys
            self.store.promote(ENGINE, message.promotion, keys, message.budget_seconds, cost)
        elif isinstance(message, Cancel):
            self.store.cancel(ENGINE, message.promotion)
        elif isinstance(message, Load):
            self.store.load(ENGINE, message.load, message.promotion, message.keys)
        elif isinstance(message, LoadReleased):
            self.store.release_load(ENGINE, message.load)
        self.settle()
        return True

    def _ended(self, event: PromotionEnded) -> None:
        self._deliver(
            Promoted(
                promotion=event.promotion,
                usable=event.usable,
                outcome=event.outcome.value,
                tiers=event.tiers,
                locations=event.locations,
            )
        )

    # Requests.

    def on_disk(self, number: int, tokens: int) -> list[int]:
        """A new prompt whose chunks are on the disk."""
        prompt = self.new(number, tokens)
        keys = chain(prompt, CHUNK)
        self.place(keys, [1] * len(keys))
        self.show()
        return prompt

    def new(self, number: int, tokens: int) -> list[int]:
        """A prompt that no tier holds."""
        return [number * 100_000 + position for position in range(tokens)]

    def prefill_seconds(self, prompt: list[int]) -> float:
        """Seconds until the prompt's first token."""
        began_at = self.clock.now
        seq = StandInSequence(int(began_at * 1e6), prompt, BLOCK, max_tokens=1)
        self.scheduler.add(seq)
        output = KVConnectorOutput()
        while seq.status is not Status.FINISHED:
            batch = self.scheduler.schedule()
            if batch is None:
                raise RuntimeError("the sequence is gone")
            copying = 0.0
            for each in batch.connector_meta_output.requests:
                if isinstance(each, AtomLoad):
                    output.finished_loading.add(each.operation)
                    copying += self._link_seconds * len(each.job.runs)
                elif isinstance(each, AtomSave):
                    raise TypeError("nothing is saved in this simulation")
            for tokens, start in zip(batch.tokens, batch.starts, strict=True):
                self.pass_time(self.engine.seconds(start, start + tokens))
            if copying:
                self.pass_time(copying)
            self.scheduler.update_from_completions(output)
            output = KVConnectorOutput()
            if batch.sequences:
                self.scheduler.postprocess(batch, {id(seq): 0})
        seconds = self.clock.now - began_at
        self.blocks.clear_index()
        self.quiet()
        return seconds
