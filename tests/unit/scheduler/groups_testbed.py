"""A scheduler side with three KV cache groups: full attention, window and linear states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from tests.unit.scheduler.scheduler_testbed import (
    BLOCK,
    CHUNK,
    SLOT_BYTES,
    FakeClient,
    FakePool,
    FakeRequest,
    SchedulerTestbed,
    topology,
)

from kvtier.config.models import Selection
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.metadata import StepMetadata
from kvtier.engines.vllm.scheduler import KVTierConnectorScheduler
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.tierd.wire import Credits, Ready

FULL, WINDOW, STATE = 0, 1, 2
GROUPS = (
    KVCacheGroup(GroupKind.FULL, BLOCK, "full"),
    KVCacheGroup(GroupKind.SLIDING, BLOCK, "window", CHUNK),
    KVCacheGroup(GroupKind.STATE, CHUNK, "state"),
)


class GroupsTestbed(SchedulerTestbed):
    """A scheduler side with three groups. Tables are made by the test; their blocks are numbered
    from 1000 for the window and from 2000 for the states."""

    def __init__(self, selection: Selection = Selection.WEIGHTED) -> None:
        super().__init__(topology(selection=selection))
        planner = Planner.build(GROUPS, CHUNK, BLOCK)
        self.scheduler = KVTierConnectorScheduler(
            TierdSession(
                topology(selection=selection),
                planner,
                "engine/dp0",
                lambda: EngineIdentity("{}"),
                self._client,
            ),
            planner,
            clock=lambda: self.now,
        )
        self.pool = FakePool()
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.client: FakeClient = self.clients[-1]
        self.client.welcome()
        self.client.sink(
            Ready(namespace="a" * 32, slot_bytes=(SLOT_BYTES,) * 3, persistent=True, weights=("w",))
        )
        self.client.delta(snapshot=True)
        for group in (FULL, WINDOW, STATE):
            slots = tuple((group * 100 + number) * SLOT_BYTES for number in range(20))
            self.client.sink(Credits(group=group, slots=slots))

    def tables_of(self, tokens: int, first_window_block: int = 0) -> tuple[list[int], ...]:
        """The tables of a request with ``tokens`` tokens, whose window begins at that block."""
        blocks, chunks = -(-tokens // BLOCK), -(-tokens // CHUNK)
        window = [0 if i < first_window_block else 1000 + i for i in range(blocks)]
        states = [0] * (chunks - 1) + [2000 + chunks - 1]
        return list(range(1, blocks + 1)), window, states

    def compute(
        self,
        request: FakeRequest,
        tokens: int,
        tables: tuple[list[int], ...],
        offers: Sequence[tuple[int, int, int]] = (),
    ) -> StepMetadata:
        """Builds a step in which ``tokens`` tokens of the request are computed."""
        name = request.request_id
        output = SimpleNamespace(
            num_scheduled_tokens={name: tokens} if tokens else {},
            preempted_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: tables,
                boundary_state_offloads={name: list(offers)},
            ),
        )
        self.built = self.scheduler.build_connector_meta(output)  # type: ignore[arg-type]
        request.num_computed_tokens += tokens
        return self.built

    def report(self, *arguments: object, **named: object) -> None:  # type: ignore[override]
        super().report(self.built.step, *arguments, **named)  # type: ignore[arg-type]

    def hold_groups(self, request: FakeRequest, held: dict[int, Iterable[int]], bits: int) -> None:
        """Adds chunks by group to the replica."""
        keys = {
            bytes([group]) + request.key(chunk)[1:]: bits
            for group, chunks in held.items()
            for chunk in chunks
        }
        self.client.delta(added=keys)
