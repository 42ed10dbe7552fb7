"""Leader election against a Lease in memory, with a clock that tests set."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException

from kvtier_operator.kube.election import MARGIN_SECONDS, Elector, Lock, Timing

TIMING = Timing(lease_seconds=5, deadline_seconds=2.0, retry_seconds=1.0)


class Leases:
    """What the lock calls of the API. ``error`` is raised by each call while it is set."""

    def __init__(self) -> None:
        self.lease: Any = None
        self.version = 0
        self.error: Exception | None = None
        self.hangs = False

    async def read_namespaced_lease(self, name: str, namespace: str) -> Any:
        await self._fail()
        if self.lease is None:
            raise ApiException(status=404, reason="NotFound", body='{"code": 404}')
        return copy.deepcopy(self.lease)

    async def create_namespaced_lease(self, namespace: str, body: Any) -> Any:
        await self._fail()
        return self._keep(body)

    async def replace_namespaced_lease(self, name: str, namespace: str, body: Any) -> Any:
        await self._fail()
        if body.metadata.resource_version != str(self.version):
            raise ApiException(status=409, reason="Conflict")
        return self._keep(body)

    def _keep(self, body: Any) -> Any:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease.metadata.resource_version = str(self.version)
        return copy.deepcopy(self.lease)

    async def _fail(self) -> None:
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lock(leases: Leases, identity: str, clock: Callable[[], float]) -> Lock:
    made = Lock(ApiClient(Configuration()), "n", "l", identity, clock)
    made.api_instance = leases
    return made


class Record:
    lease_duration = "5"


async def acquire(candidate: Lock) -> bool:
    found, _ = await candidate.get("l", "n")
    return await (
        candidate.update("l", "n", Record()) if found else candidate.create("l", "n", Record())
    )


def test_a_lease_is_acquired_only_after_it_was_not_renewed_for_its_duration() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        first, second = lock(leases, "a", clock), lock(leases, "b", clock)
        assert await acquire(first)
        assert not await acquire(second)
        clock.now += 4.9
        assert await acquire(first)
        clock.now += 4.9
        assert not await acquire(second), "it was renewed"
        clock.now += 4.9
        assert not await acquire(second)
        clock.now += 0.2
        assert await acquire(second)
        assert leases.lease.spec.holder_identity == "b"
        assert leases.lease.spec.lease_transitions == 2
        assert not await acquire(first)
        assert first.renewed_at == float("-inf")

    asyncio.run(scenario())


def test_a_released_lease_is_free_at_once() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        first, second = lock(leases, "a", clock), lock(leases, "b", clock)
        assert await acquire(first)
        await second.release()
        assert leases.lease.spec.holder_identity == "a", "only the holder releases"
        await first.release()
        assert await acquire(second)

    asyncio.run(scenario())


def test_errors_of_any_kind_are_failures_and_end_nothing() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        candidate = lock(leases, "a", clock)
        assert await acquire(candidate)
        for error in (OSError("refused"), TimeoutError(), ApiException(status=500)):
            leases.error = error
            found, _ = await candidate.get("l", "n")
            assert not found
            assert not await candidate.update("l", "n", Record())
        leases.error = None
        assert await acquire(candidate)

    asyncio.run(scenario())


def test_writing_ends_before_the_lease_can_expire_even_if_calls_hang() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        candidate = Elector(lock(leases, "a", clock), TIMING, clock=clock)
        began = asyncio.Event()

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        running = asyncio.ensure_future(candidate.run(work))
        async with asyncio.timeout(60):
            await began.wait()
        leases.hangs = True
        assert candidate.remaining_seconds() == TIMING.lease_seconds - MARGIN_SECONDS
        clock.now += TIMING.lease_seconds - MARGIN_SECONDS
        assert candidate.remaining_seconds() == 0.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert candidate.remaining_seconds() == 0.0

    asyncio.run(scenario())


def test_an_error_of_the_work_is_raised_and_the_lease_is_released() -> None:
    async def scenario() -> str:
        leases, clock = Leases(), Clock()
        terms: list[bool] = []
        candidate = Elector(lock(leases, "a", clock), TIMING, terms.append, clock)

        async def work() -> None:
            raise RuntimeError("a fault")

        try:
            async with asyncio.timeout(60):
                await candidate.run(work)
        except RuntimeError as error:
            assert terms == [True, False]
            assert leases.lease.spec.holder_identity == ""
            return str(error)
        return ""

    assert asyncio.run(scenario()) == "a fault"
