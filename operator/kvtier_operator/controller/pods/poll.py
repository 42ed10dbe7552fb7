"""Polling of pods for their ``/status``: with the policy's token, and with bounded concurrency.

The pod reconciler says which pods to poll (``set_targets``) and reads the last answers
(``last_report``). Polling runs beside it, so that no reconcile waits for a pod. An attached pod
that answers is polled every ``pollSeconds``; a pod that is starting or does not answer is polled
more often at first.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import ipaddress
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from kvtier.config.host_ports import HOST_PORTS, host_ports
from kvtier_operator.api.names import POD_HTTP_PORT, STRUCTURAL_ANNOTATION
from kvtier_operator.api.pods import Pod
from kvtier_operator.controller.pods.reports import (
    MAX_BODY_BYTES,
    NO_REPORT,
    LastReport,
    MalformedReportError,
    PodReport,
    parse_report,
)
from kvtier_operator.kube.queue import Key
from kvtier_operator.render.documents import MAX_STRUCTURAL_BYTES
from kvtier_operator.settings import Settings

FIRST_RETRY_SECONDS = 2.0
MAX_FAILURES = 30
"""Failures are not counted beyond this."""


@dataclass(frozen=True, slots=True)
class PollTarget:
    """Where to poll one pod, identified by its uid. ``other_ports``: where it may also answer, with
    its uid, because the address is the node's.
    """

    uid: str
    address: str
    port: int
    other_ports: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        """URL of the pod's status."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/status"

    @property
    def candidates(self) -> tuple[PollTarget, ...]:
        """The target with each of its ports, in the order of their probability."""
        return tuple(replace(self, port=port) for port in (self.port, *self.other_ports))


def poll_target(pod: Pod) -> PollTarget | None:
    """Where to poll a pod; None while it has no address."""
    try:
        address = ipaddress.ip_address(pod.status.pod_ip)
    except ValueError:
        return None
    port = _port(pod.metadata.annotations.get(STRUCTURAL_ANNOTATION, ""))
    uid = pod.metadata.uid
    if pod.spec.host_network and port not in HOST_PORTS:
        # No other port of a node is polled: anyone who may edit pods can edit the annotation. An
        # earlier version wrote a port of the range into it.
        first, *others = host_ports(uid)
        return PollTarget(uid, str(address), first, tuple(others))
    return PollTarget(uid, str(address), port or POD_HTTP_PORT)


def _port(structural: str) -> int | None:
    """The port in a structural document; None if there is none, or if the text is longer than any
    that KVTier writes.
    """
    return _parse_port(structural) if len(structural) <= MAX_STRUCTURAL_BYTES else None


@functools.lru_cache(maxsize=1024)
def _parse_port(structural: str) -> int | None:
    """Cached, since all pods of a workload have the same text."""
    try:
        document = json.loads(structural)
    except (ValueError, RecursionError):
        return None
    http = document.get("http") if isinstance(document, dict) else None
    port = http.get("port") if isinstance(http, dict) else None
    valid = isinstance(port, int) and not isinstance(port, bool) and 0 <= port < 65_536
    return port if valid else None


@dataclass(slots=True)
class _PolledPod:
    policy: Key
    target: PollTarget
    last: LastReport = NO_REPORT
    due: float = 0.0
    in_flight: bool = False
    not_attached_polls: int = 0


class PodPoller:
    """Polls pods and holds their last answers. For one event loop.

    ``on_change``: called with the policy when an answer of one of its pods may change its status.
    ``clock``: monotonic. ``answered`` and ``unanswered`` count polls since the start.
    """

    def __init__(
        self,
        settings: Settings,
        on_change: Callable[[Key], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings.controller
        self._on_change = on_change
        self._clock = clock
        self._jitter = jitter
        self._pods: dict[str, _PolledPod] = {}
        self._by_policy: dict[Key, set[str]] = {}
        self._tokens: dict[Key, str | None] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._polls: set[asyncio.Task[None]] = set()
        self.answered = 0
        self.unanswered = 0

    def set_targets(self, policy: Key, targets: Sequence[PollTarget], token: str | None) -> None:
        """Polls exactly these pods for ``policy`` from here on, with this token."""
        if self._tokens.get(policy) != token:
            self._tokens[policy] = token
            for uid in self._by_policy.get(policy, ()):
                self._schedule(self._pods[uid], 0.0)
        before = self._by_policy.get(policy, set())
        uids = {each.uid for each in targets}
        for uid in before - uids:
            self._pods.pop(uid, None)
        for target in targets:
            pod = self._pods.get(target.uid)
            if pod is None:
                pod = self._pods[target.uid] = _PolledPod(policy, target)
                self._schedule(pod, 0.0)
            elif pod.target != target or pod.policy != policy:
                # Another policy governs it, or its address changed.
                self._by_policy.get(pod.policy, set()).discard(target.uid)
                pod.policy, pod.target = policy, target
                self._schedule(pod, 0.0)
        self._by_policy[policy] = uids

    @property
    def polled_pods(self) -> int:
        """Number of pods that are polled."""
        return len(self._pods)

    def last_report(self, uid: str) -> LastReport:
        """The result of polling a pod."""
        pod = self._pods.get(uid)
        return NO_REPORT if pod is None else pod.last

    def forget(self, policy: Key) -> None:
        """Stops polling for a policy, because it is gone."""
        for uid in self._by_policy.pop(policy, ()):
            self._pods.pop(uid, None)
        self._tokens.pop(policy, None)

    async def run(self, stop: asyncio.Event) -> None:
        """Polls until ``stop`` is set. When it returns or is cancelled, no task of it is left."""
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_seconds)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # A small compressed answer must not expand into a large one.
            auto_decompress=False,
            headers={
                "User-Agent": "kvtier-operator",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
            },
        )
        stopping = asyncio.ensure_future(stop.wait())
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            while not stop.is_set():
                wait = self._start_due(session)
                await asyncio.wait(
                    {stopping, changed}, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                if changed.done():
                    self._changed.clear()
                    changed = asyncio.ensure_future(self._changed.wait())
        finally:
            tasks = [stopping, changed, *self._polls]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await session.close()

    def _start_due(self, session: aiohttp.ClientSession) -> float | None:
        """Starts polls that are due, up to the concurrency limit. Returns the seconds until the
        next one is due; None if the next start depends on a change.
        """
        now = self._clock()
        while self._heap and len(self._polls) < self._settings.poll_concurrency:
            due, _, uid = self._heap[0]
            pod = self._pods.get(uid)
            if pod is None or pod.due != due or pod.in_flight:
                heapq.heappop(self._heap)
                continue
            if due > now:
                return due - now
            heapq.heappop(self._heap)
            pod.in_flight = True
            task = asyncio.ensure_future(self._poll(session, pod))
            self._polls.add(task)
            task.add_done_callback(self._poll_done)
        return None

    def _poll_done(self, task: asyncio.Task[None]) -> None:
        self._polls.discard(task)
        self._changed.set()

    async def _poll(self, session: aiohttp.ClientSession, pod: _PolledPod) -> None:
        target = pod.target
        try:
            result = LastReport(await _fetch_any(session, target, self._tokens.get(pod.policy)))
            self.answered += 1
        except _PollError as error:
            failures = min(pod.last.failures + 1, MAX_FAILURES)
            result = replace(pod.last, failures=failures, error=str(error))
            self.unanswered += 1
        finally:
            pod.in_flight = False
        if self._pods.get(target.uid) is not pod:
            return
        if pod.target != target:
            self._schedule(pod, 0.0)
            return
        previous, pod.last = pod.last, result
        attached = result.failures == 0 and result.report is not None and result.report.attached
        pod.not_attached_polls = 0 if attached else min(pod.not_attached_polls + 1, 16)
        period = self._settings.poll_seconds
        if not attached:
            period = min(period, FIRST_RETRY_SECONDS * 2.0 ** (pod.not_attached_polls - 1))
        self._schedule(pod, period * (0.9 + 0.2 * self._jitter()))
        if _significant(previous) != _significant(result):
            self._on_change(pod.policy)

    def _schedule(self, pod: _PolledPod, after_seconds: float) -> None:
        pod.due = self._clock() + after_seconds
        if not pod.in_flight:
            heapq.heappush(self._heap, (pod.due, next(self._order), pod.target.uid))
            self._changed.set()


class _PollError(Exception):
    """The pod gave no valid answer. The message is part of a status, so it stays the same while the
    cause does.
    """


class _PollTimeoutError(_PollError):
    """The pod did not answer in time."""


async def _fetch_any(
    session: aiohttp.ClientSession, target: PollTarget, token: str | None
) -> PodReport:
    """The answer from the first of the target's ports at which the pod itself answers."""
    if not target.other_ports:
        return await _fetch(session, target, token)
    failure: _PollError | None = None
    for candidate in target.candidates:
        try:
            report = await _fetch(session, candidate, token)
        except _PollTimeoutError:
            # The node does not answer, and would not at the other ports.
            raise
        except _PollError as error:
            failure = failure or error
            continue
        if report.pod_uid == target.uid:
            return report
    raise failure or _PollError("another pod answers at the ports of this one")


async def _fetch(
    session: aiohttp.ClientSession, target: PollTarget, token: str | None
) -> PodReport:
    headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(target.url, headers=headers, allow_redirects=False) as response:
            if response.status in (401, 403):
                cause = (
                    "the pod does not accept the policy's token (yet)"
                    if token
                    else "the policy's token is missing"
                )
                raise _PollError(f"HTTP {response.status}: {cause}")
            if response.status != 200:
                raise _PollError(f"HTTP {response.status}")
            body = b""
            async for piece in response.content.iter_chunked(64 << 10):
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _PollError(f"malformed answer: more than {MAX_BODY_BYTES} bytes")
        return parse_report(body)
    except MalformedReportError as error:
        raise _PollError(f"malformed answer: {error}") from error
    except TimeoutError as error:
        raise _PollTimeoutError("timeout") from error
    except aiohttp.ClientConnectorError as error:
        raise _PollError("connection failed") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _PollError(f"malformed answer: {type(error).__name__}") from error


def _significant(last: LastReport) -> object:
    """The part of an answer that may change a status at once. Bytes and tokens wait, except for the
    first hits.
    """
    report = last.report
    if report is None:
        return (min(last.failures, 4), last.error)
    return (
        min(last.failures, 4),
        report.attached,
        report.schedulers + report.workers + report.unready > 0,
        report.sessions_refused > 0,
        report.applied_generation,
        report.live_errors,
        report.content_hash,
        report.engines,
        report.conditions,
        tuple((tier.name, tier.state, bool(tier.hit_tokens)) for tier in report.tiers),
    )
