"""Leader election among the controller's replicas, with a Lease.

The election is that of ``kubernetes.aio.leaderelection``. Its lock is replaced, because in version
37 the library's own cannot create the Lease, its calls have no deadline, an error of the transport
ends the election and not the leader's work, expiry is judged by the wall clock, and nothing
releases the Lease. Independent of the library, ``remaining_seconds`` says how long this replica may still
write: it is asked before each write, and reaches zero before another replica can take over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio.client import V1Lease, V1LeaseSpec, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from kvtier_operator.settings import LeaderElection as LeaderElectionSettings

logger = logging.getLogger(__name__)

LEASE_NAME = "kvtier-controller"
CALL_SECONDS = 2.0
MARGIN_SECONDS = 1.0
"""Writing ends this long before the Lease can expire."""

OnChange = Callable[[bool], None]
"""Called with True when this replica becomes the leader, and with False when it no longer is."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Another replica takes over ``lease_seconds`` to ``lease_seconds + 2 * retry_seconds`` after
    the leader was killed, and within ``retry_seconds`` after it stopped. A leader that cannot renew
    gives up after ``deadline_seconds``.
    """

    lease_seconds: int = 10
    deadline_seconds: float = 6.0
    retry_seconds: float = 2.0


class Lock(LeaseLock):
    """The Lease ``name`` in ``namespace``. Each method's failure is a return value."""

    def __init__(
        self,
        api: Any,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, namespace, identity, api)
        self._clock = clock
        self._observed: tuple[Any, ...] = ()
        self._observed_at = float("-inf")
        self.renewed_at = float("-inf")
        """When the last successful renewal was sent."""

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """The Lease's record, or the error."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                found, answer = await super().get(name, namespace)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return False, ApiException(status=0, reason=type(error).__name__)
        if found and self.lease_reference is not None:
            spec = self.lease_reference.spec or V1LeaseSpec()
            observed = (spec.holder_identity, spec.renew_time, spec.lease_transitions)
            if observed != self._observed:
                self._observed, self._observed_at = observed, self._clock()
            if spec.holder_identity != self.identity:
                self.renewed_at = float("-inf")
        return found, answer

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        """Creates the Lease, held by this replica."""
        spec = self._held(V1LeaseSpec(), election_record)
        body = V1Lease(metadata=V1ObjectMeta(name=name), spec=spec)
        return await self._write(lambda: self.api_instance.create_namespaced_lease(namespace, body))

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        """Renews the Lease, or takes it over if it has expired by the monotonic clock."""
        if self.lease_reference is None:
            return False
        spec = self.lease_reference.spec or V1LeaseSpec()
        if spec.holder_identity not in (None, "", self.identity):
            expires_at = self._observed_at + (spec.lease_duration_seconds or 0)
            if self._clock() < expires_at:
                return False
        self.lease_reference.spec = self._held(spec, updated_record)
        return await self._replace()

    async def release(self) -> None:
        """Lets another replica take over at once, if this one holds the Lease."""
        self.renewed_at = float("-inf")
        reference = self.lease_reference
        if (
            reference is None
            or reference.spec is None
            or reference.spec.holder_identity != self.identity
        ):
            return
        reference.spec.holder_identity = ""
        if not await self._replace():
            logger.warning("the Lease was not released; it expires by itself")
        self.renewed_at = float("-inf")

    def _held(self, spec: Any, record: Any) -> Any:
        now = datetime.now(UTC)
        if spec.holder_identity != self.identity:
            spec.acquire_time = now
            spec.lease_transitions = (spec.lease_transitions or 0) + 1
        spec.holder_identity = self.identity
        spec.lease_duration_seconds = int(record.lease_duration)
        spec.renew_time = now
        return spec

    async def _replace(self) -> bool:
        # It names the version that was read, so of two replicas one gets a conflict.
        body = self.lease_reference
        return await self._write(
            lambda: self.api_instance.replace_namespaced_lease(self.name, self.namespace, body)
        )

    async def _write(self, send: Callable[[], Awaitable[Any]]) -> bool:
        began = self._clock()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                self.lease_reference = await send()
        except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
            status = getattr(error, "status", 0)
            logger.info("the Lease was not written: %s %s", type(error).__name__, status)
            return False
        self.renewed_at = began
        return True


class Elector:
    """Runs work on one replica at a time. ``on_change`` is called at the start and end of a term."""

    def __init__(
        self,
        lock: Lock,
        timing: Timing = Timing(),
        on_change: OnChange = lambda leads: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = lock
        self._timing = timing
        self._on_change = on_change
        self._clock = clock
        self._elected = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def identity(self) -> str:
        """This replica's name in the Lease."""
        return str(self._lock.identity)

    def remaining_seconds(self) -> float:
        """For how long this replica may write without another election."""
        if not self._elected.is_set():
            return 0.0
        expires_at = self._lock.renewed_at + self._timing.lease_seconds - MARGIN_SECONDS
        return max(0.0, expires_at - self._clock())

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs ``work`` for as long as this replica leads, and again in its next term.

        Returns when ``work`` does, and raises what it raises. When it ends or is cancelled, the
        work has ended before the Lease is released.
        """
        quiet_library()
        campaign = asyncio.ensure_future(self._campaign())
        working: asyncio.Future[None] | None = None
        try:
            while working is None or working.cancelled():
                elected = asyncio.ensure_future(self._elected.wait())
                await _first(elected, campaign)
                self._lost.clear()
                logger.info("this replica is the leader", extra={"identity": self.identity})
                self._on_change(True)
                working = asyncio.ensure_future(work())
                lost = asyncio.ensure_future(self._lost.wait())
                await _first(working, lost, campaign)
                if not working.done():
                    logger.warning(
                        "this replica is no longer the leader", extra={"identity": self.identity}
                    )
                await _end(working, lost)
                self._on_change(False)
            working.result()
        finally:
            await _end(campaign, *([working] if working is not None else []))
            self._elected.clear()
            await self._lock.release()

    async def _campaign(self) -> None:
        timing = self._timing
        while True:
            config = Config(
                self._lock,
                timing.lease_seconds,
                timing.deadline_seconds,
                timing.retry_seconds,
                self._started,
                self._stopped,
            )
            await LeaderElection(config).run()

    async def _started(self) -> None:
        self._elected.set()

    async def _stopped(self) -> None:
        self._elected.clear()
        self._lost.set()


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Waits for the first; an error of the last one is raised."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if tasks[-1].done():
        tasks[-1].result()


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def elector_of(
    api: Any, namespace: str, chosen: LeaderElectionSettings, on_change: OnChange
) -> Elector:
    """The elector of this replica of the controller, with the settings' times."""
    timing = Timing(chosen.lease_seconds, chosen.renew_deadline_seconds, chosen.retry_seconds)
    return Elector(Lock(api, namespace, LEASE_NAME, replica_identity()), timing, on_change)


def replica_identity() -> str:
    """The pod's name, and something that differs between two processes with that name."""
    return f"{os.environ.get('HOSTNAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"


def quiet_library() -> None:
    """Keeps the library's log silent: the lock and the elector report the same."""
    logging.getLogger("kubernetes.aio.leaderelection").setLevel(logging.CRITICAL)
