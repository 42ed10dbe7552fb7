"""What is remembered of a policy between reconciles. A restart loses it, and nothing but a repeated look comes of that.

Asking pods for their ``/status``: a bounded number at a time, with the policy's token, and with answers taken for
data (``reports``).

``look_after`` says whom to ask (``follow``) and reads what was answered last (``said``); the asking goes on beside it, so
that no reconcile waits for a pod. A pod that is attached and answers is asked every ``pollSeconds``; one that is starting
or does not answer more often at first, then as often.
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

from kvtier_operator.api.names import POD_HTTP_PORT, STRUCTURAL_ANNOTATION
from kvtier_operator.controller import objects
from kvtier_operator.controller.events import Recorder
from kvtier_operator.controller.lookups import Lookups
from kvtier_operator.controller.pods.reports import (
    MAX_BODY_BYTES,
    NOTHING_SAID,
    LastReport,
    MalformedError,
    Report,
    read,
)
from kvtier_operator.kube.resources import Object
from kvtier_operator.render.documents import MAX_STRUCTURAL_BYTES
from kvtier_operator.settings import Settings


@dataclass(slots=True)
class PolicyMemory:
    """``written_at``: when the status last changed (seconds since 1970; None: not known). ``generation`` and
    ``changed_at``: the newest generation of the policy that was seen, and since when; 0 for one that was in force before this
    process. ``pod_states``: the state of each pod by uid at the last look, for Events; None before the first.
    """

    written_at: float | None = None
    generation: int | None = None
    changed_at: float = 0.0
    pod_states: dict[str, str] | None = None

    def see(self, generation: int, reported: int | None, now: float) -> None:
        """Takes note of a generation. ``reported``: the one that the status in force is about."""
        if self.generation is None:
            self.changed_at = 0.0 if reported in (None, generation) else now
        elif self.generation != generation:
            self.changed_at = now
        self.generation = generation


PolicyKey = tuple[str, str]
"""Namespace and name of a policy."""
HOST_PORTS = range(20_000, 30_000)
"""With hostNetwork tierd takes one of these; another is not asked: the address is the node's, and annotations can be
edited by whoever edits pods."""
FIRST_AGAIN_SECONDS = 2.0
MAX_FAILURES = 30
"""Counted no further."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask: one life of one pod."""

    uid: str
    address: str
    port: int

    @property
    def url(self) -> str:
        """Of its status."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/status"


@dataclass(slots=True)
class _Followed:
    policy: PolicyKey
    target: Target
    said: LastReport = NOTHING_SAID
    due: float = 0.0
    asking: bool = False
    unattached: int = 0


def target(pod: Object) -> Target | None:
    """Whom to ask about a pod; None while it has no address."""
    address = objects.status(pod).get("podIP")
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return None
    port = _written_port(str(objects.annotated(pod).get(STRUCTURAL_ANNOTATION) or ""))
    if port is None or (objects.spec(pod).get("hostNetwork") and port not in HOST_PORTS):
        port = POD_HTTP_PORT
    return Target(objects.uid(pod), str(parsed), port)


def _written_port(structural: str) -> int | None:
    """The port in a structural document; None where there is none, or the text is longer than any that KVTier writes."""
    return _read_port(structural) if len(structural) <= MAX_STRUCTURAL_BYTES else None


@functools.lru_cache(maxsize=1024)
def _read_port(structural: str) -> int | None:
    """Kept, since the pods of a workload have the same text."""
    try:
        document = json.loads(structural)
    except (ValueError, RecursionError):
        return None
    http = document.get("http") if isinstance(document, dict) else None
    port = http.get("port") if isinstance(http, dict) else None
    valid = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65_536
    return port if valid else None


class PodReports:
    """What the pods said last, and what is remembered between reconciles. For one event loop.

    ``on_change``: called with a policy's namespace and name when an answer of one of its pods changes its status.
    ``clock``: monotonic. ``answered`` and ``unanswered`` count polls since the start.
    """

    def __init__(
        self,
        settings: Settings,
        on_change: Callable[[PolicyKey], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings.controller
        self._on_change = on_change
        self._clock = clock
        self._jitter = jitter
        self._followed: dict[str, _Followed] = {}
        self._by_policy: dict[PolicyKey, set[str]] = {}
        self._tokens: dict[PolicyKey, str | None] = {}
        self._memories: dict[PolicyKey, PolicyMemory] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self.lookups = Lookups(clock)
        self.recorder = Recorder(clock)
        self.answered = 0
        self.unanswered = 0

    def follow(self, policy: PolicyKey, targets: Sequence[Target], token: str | None) -> None:
        """From here on the pods of ``policy`` that are asked are these, with this token."""
        if self._tokens.get(policy) != token:
            self._tokens[policy] = token
            for uid in self._by_policy.get(policy, ()):
                self._schedule(self._followed[uid], 0.0)
        before = self._by_policy.get(policy, set())
        now_followed = {each.uid for each in targets}
        for uid in before - now_followed:
            self._followed.pop(uid, None)
        for each in targets:
            known = self._followed.get(each.uid)
            if known is None:
                known = self._followed[each.uid] = _Followed(policy, each)
                self._schedule(known, 0.0)
            elif known.target != each or known.policy != policy:
                # Another policy governs it, or its address changed.
                self._by_policy.get(known.policy, set()).discard(each.uid)
                known.policy, known.target = policy, each
                self._schedule(known, 0.0)
        self._by_policy[policy] = now_followed

    @property
    def followed(self) -> int:
        """How many pods are asked."""
        return len(self._followed)

    def said(self, uid: str) -> LastReport:
        """What a pod said last."""
        known = self._followed.get(uid)
        return NOTHING_SAID if known is None else known.said

    def memory(self, policy: PolicyKey) -> PolicyMemory:
        """What is remembered of a policy between reconciles."""
        return self._memories.setdefault(policy, PolicyMemory())

    def forget(self, policy: PolicyKey) -> None:
        """The policy is gone."""
        for uid in self._by_policy.pop(policy, ()):
            self._followed.pop(uid, None)
        self._tokens.pop(policy, None)
        self._memories.pop(policy, None)

    async def run(self, stop: asyncio.Event) -> None:
        """Polls until ``stop`` is set; ended or cancelled, it leaves nothing that runs."""
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_seconds)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Answers are read as they come: a small one must not unfold into a large one.
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
            left = [stopping, changed, *self._asking]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await session.close()

    def _start_due(self, session: aiohttp.ClientSession) -> float | None:
        """Begins what is due and fits; in how many seconds the next is due, None: when something changes."""
        now = self._clock()
        while self._heap and len(self._asking) < self._settings.poll_concurrency:
            due, _, uid = self._heap[0]
            known = self._followed.get(uid)
            if known is None or known.due != due or known.asking:
                heapq.heappop(self._heap)
                continue
            if due > now:
                return due - now
            heapq.heappop(self._heap)
            known.asking = True
            task = asyncio.ensure_future(self._ask(session, known))
            self._asking.add(task)
            task.add_done_callback(self._asked)
        return None

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._changed.set()

    async def _ask(self, session: aiohttp.ClientSession, known: _Followed) -> None:
        asked = known.target
        try:
            said = LastReport(await _fetch(session, asked, self._tokens.get(known.policy)))
            self.answered += 1
        except _UnansweredError as error:
            said = replace(
                known.said, failures=min(known.said.failures + 1, MAX_FAILURES), why=str(error)
            )
            self.unanswered += 1
        finally:
            known.asking = False
        if self._followed.get(asked.uid) is not known:
            return
        if known.target != asked:
            self._schedule(known, 0.0)
            return
        before, known.said = known.said, said
        calm = said.failures == 0 and said.report is not None and said.report.attached
        known.unattached = 0 if calm else min(known.unattached + 1, 16)
        period = self._settings.poll_seconds
        if not calm:
            period = min(period, FIRST_AGAIN_SECONDS * 2.0 ** (known.unattached - 1))
        self._schedule(known, period * (0.9 + 0.2 * self._jitter()))
        if _matters(before) != _matters(said):
            self._on_change(known.policy)

    def _schedule(self, known: _Followed, after_seconds: float) -> None:
        known.due = self._clock() + after_seconds
        if not known.asking:
            heapq.heappush(self._heap, (known.due, next(self._order), known.target.uid))
            self._changed.set()


class _UnansweredError(Exception):
    """In words that stay the same while the cause does, because they stand in a status."""


async def _fetch(session: aiohttp.ClientSession, asked: Target, token: str | None) -> Report:
    headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(asked.url, headers=headers, allow_redirects=False) as response:
            if response.status in (401, 403):
                given = (
                    "the policy's token is not accepted (yet)"
                    if token
                    else "the policy's token is missing"
                )
                raise _UnansweredError(f"HTTP {response.status}: {given}")
            if response.status != 200:
                raise _UnansweredError(f"HTTP {response.status}")
            body = b""
            async for piece in response.content.iter_chunked(64 << 10):
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _UnansweredError(f"malformed answer: more than {MAX_BODY_BYTES} bytes")
        return read(body)
    except MalformedError as error:
        raise _UnansweredError(f"malformed answer: {error}") from error
    except TimeoutError as error:
        raise _UnansweredError("no answer in time") from error
    except aiohttp.ClientConnectorError as error:
        raise _UnansweredError("no connection") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _UnansweredError(f"malformed answer: {type(error).__name__}") from error


def _matters(said: LastReport) -> object:
    """What of an answer may change a status at once; bytes and tokens wait, except that there are any hits."""
    report = said.report
    if report is None:
        return (min(said.failures, 4), said.why)
    return (
        min(said.failures, 4),
        report.attached,
        report.schedulers + report.workers + report.unready > 0,
        report.sessions_refused > 0,
        report.applied_generation,
        report.live_refusals,
        report.content_hash,
        report.engines,
        report.conditions,
        tuple((tier.name, tier.state, bool(tier.hit_tokens)) for tier in report.tiers),
    )
