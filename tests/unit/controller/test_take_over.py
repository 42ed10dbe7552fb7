"""A replica that takes over first reconciles what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry
from tests.support import controllers
from tests.support.memory_cluster import MemoryCluster, MemoryWatcher

from kvtier_operator.controller.controller import WORKERS, Controller, ControllerOptions
from kvtier_operator.kube.queue import Key
from kvtier_operator.kube.resources import POLICIES

COUNT = 30
LAST = f"p{COUNT - 1:02d}"
WAIT_SECONDS = 60


class Election:
    """An elector that lets the replica lead when it is told to."""

    def __init__(self) -> None:
        self.won = asyncio.Event()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        await self.won.wait()
        await work()


def policy(name: str, generation: int = 1) -> dict[str, Any]:
    """A policy of a generation. Its status is about the first."""
    body = controllers.policy("serving", name, minLoadTokens=64 * generation)
    body["metadata"] |= {"uid": f"u-{name}", "generation": generation}
    return {**body, "status": {"observedGeneration": 1}}


class Replica:
    """One of two replicas. ``order``: the policies that it has reconciled."""

    def __init__(self) -> None:
        policies = [(POLICIES, policy(f"p{number:02d}")) for number in range(COUNT)]
        self.cluster = MemoryCluster(policies)
        self.election = Election()
        self.order: list[str] = []
        self.on_first: Callable[[], object] = lambda: None
        self.may_end: Callable[[], bool] = lambda: True
        self.controller = Controller(
            controllers.settings(),
            self.cluster,
            CollectorRegistry(),
            elector=self.election,  # type: ignore[arg-type]
            options=ControllerOptions(make_watcher=MemoryWatcher),
        )
        self.controller._reconciler.reconcile = self._reconcile  # type: ignore[method-assign]

    async def _reconcile(self, key: Key) -> float | None:
        self.order.append(key[1])
        if len(self.order) == 1:
            self.on_first()
        await self.until("the reconcile ends", self.may_end)
        return None

    def knows(self, name: str) -> int:
        """The generation of a policy in the replica's cache."""
        found = self.controller.cache.get(POLICIES, "serving", name)
        return int(found["metadata"]["generation"]) if found is not None else 0

    async def runs(self, scenario: Callable[[], Awaitable[None]]) -> None:
        stop = asyncio.Event()
        task = asyncio.ensure_future(self.controller.run(stop))
        try:
            await self.until("all policies are known", lambda: len(self.controller.queue) == COUNT)
            await self.controller.cache.wait_synced()
            await scenario()
        finally:
            stop.set()
            await task

    async def until(self, what: str, check: Callable[[], bool]) -> None:
        async def checked() -> bool:
            return check()

        await controllers.until(what, checked, WAIT_SECONDS)


def test_a_policy_that_changed_before_the_take_over_is_the_first() -> None:
    async def main() -> None:
        replica = Replica()

        async def scenario() -> None:
            replica.cluster.put(POLICIES, policy(LAST, 2))
            await replica.until("the change is known", lambda: replica.knows(LAST) == 2)
            replica.election.won.set()
            await replica.until("something is reconciled", lambda: len(replica.order) > WORKERS)

        await replica.runs(scenario)
        assert replica.order[0] == LAST

    asyncio.run(main())


def test_a_policy_that_changes_after_the_take_over_does_not_wait_for_all_others() -> None:
    async def main() -> None:
        replica = Replica()
        replica.on_first = lambda: replica.cluster.put(POLICIES, policy(LAST, 2))
        replica.may_end = lambda: replica.knows(LAST) == 2

        async def scenario() -> None:
            replica.election.won.set()
            await replica.until("it is reconciled", lambda: LAST in replica.order)

        await replica.runs(scenario)
        assert replica.order.index(LAST) <= WORKERS

    asyncio.run(main())


def test_every_policy_is_reconciled_after_a_take_over() -> None:
    async def main() -> None:
        replica = Replica()

        async def scenario() -> None:
            replica.election.won.set()
            await replica.until("all are reconciled", lambda: len(set(replica.order)) == COUNT)

        await replica.runs(scenario)

    asyncio.run(main())
