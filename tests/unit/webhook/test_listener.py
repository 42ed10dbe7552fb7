"""The admission server over real TLS: every response lets the pod start."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from tests.support.ports import loopbacks
from tests.unit.webhook.fixtures import Fixture, admission_review, body, pod, policy_document

from kvtier_operator.certs import certificates
from kvtier_operator.certs.serve import ServingCertificate
from kvtier_operator.injection.decision import Injected
from kvtier_operator.webhook import listener, review
from kvtier_operator.webhook.listener import AdmissionServer, parse_timeout
from kvtier_operator.webhook.metrics import WebhookMetrics

ISSUED = certificates.issue(("127.0.0.1",), time.time(), 3600)
LOOPBACK = {"host": "127.0.0.1", "port": 0, "drainSeconds": 0}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine abandons no decision; tests of the limits set their own."""
    monkeypatch.setattr(listener, "BUDGET_SECONDS", 60.0)
    monkeypatch.setattr(listener, "READ_SECONDS", 60.0)


class Running:
    """A running server and a client of it."""

    def __init__(
        self,
        server: AdmissionServer,
        metrics: WebhookMetrics,
        port: int,
        session: aiohttp.ClientSession,
    ):
        self.server, self.metrics, self.session = server, metrics, session
        self.address = f"https://127.0.0.1:{port}"

    async def post(self, path: str, content: bytes) -> tuple[int, Any]:
        async with self.session.post(self.address + path, data=content) as answer:
            return answer.status, json.loads(await answer.read())

    async def mutate(self, **metadata: Any) -> dict[str, Any]:
        status, answer = await self.post("/mutate", body(admission_review(pod(**metadata))))
        assert status == 200
        response: dict[str, Any] = answer["response"]
        assert response["uid"] == "question"
        assert response["allowed"]
        return response

    def counted(self, result: str, path: str = "/mutate") -> float:
        return (
            self.metrics.registry.get_sample_value(
                "kvtier_webhook_answers_total", {"path": path, "result": result}
            )
            or 0.0
        )


@asynccontextmanager
async def running(
    fixture: Fixture, decide: Callable[..., Any] | None = None, **options: Any
) -> AsyncIterator[Running]:
    metrics = WebhookMetrics(CollectorRegistry())
    serving = ServingCertificate(metrics.expires.set)
    serving.load(ISSUED.certificate, ISSUED.key)
    chosen = decide or (lambda policy, found, *_: Injected(dict(found)))
    server = AdmissionServer(fixture.settings, fixture.lister, serving, metrics, chosen, **options)
    port = await server.start()
    tls = ssl.create_default_context(cadata=ISSUED.authority.decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        yield Running(server, metrics, port, session)
    await server.stop()


def fixture() -> Fixture:
    made = Fixture(webhook=LOOPBACK)
    made.policy()
    return made


def test_a_pod_is_patched() -> None:
    async def go() -> None:
        async with running(
            fixture(), lambda policy, found, *_: Injected({**found, "spec": {}})
        ) as webhook:
            response = await webhook.mutate()
            assert json.loads(base64.b64decode(response["patch"])) == [
                {"op": "remove", "path": "/spec/containers"}
            ]
            assert webhook.counted("Attached") == 1
            assert "patch" not in await webhook.mutate(labels={})
            assert webhook.counted("Unchanged") == 1

    asyncio.run(go())


def test_a_failure_admits_the_pod_unchanged_and_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a fault")

    async def go() -> None:
        async with running(fixture(), fail) as webhook:
            assert "patch" not in await webhook.mutate()
            assert webhook.counted("Failed") == 1

    asyncio.run(go())
    assert "ZeroDivisionError" in caplog.text


def test_a_failure_of_the_lister_admits_the_pod_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("a fault")

    async def go() -> None:
        async with running(fixture()) as webhook:
            monkeypatch.setattr(webhook.server._lister, "governing", fail)
            assert "patch" not in await webhook.mutate()
            assert webhook.counted("Failed") == 1

    asyncio.run(go())


def _held_until(release: threading.Event) -> Any:
    """A decision that takes until then."""

    def decide(_policy: Any, found: Any, *_: Any) -> Any:
        release.wait(60)
        return Injected(dict(found))

    return decide


def test_a_decision_that_takes_too_long_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BUDGET_SECONDS", 0.1)
    release = threading.Event()
    wait = _held_until(release)

    async def go() -> None:
        async with running(fixture(), wait) as webhook:
            # More than there are threads: those that come later are not held up by those that hang.
            responses = await asyncio.gather(*(webhook.mutate() for _ in range(12)))
            assert all("patch" not in response for response in responses)
            assert webhook.counted("Abandoned") == 12
            # The loop is not held up either.
            async with webhook.session.get(webhook.address + "/healthz") as answer:
                assert answer.status == 200
            release.set()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("500ms", 0.5),
        ("1.5s", 1.5),
        ("", math.inf),
        ("1m0s", math.inf),
        ("x", math.inf),
    ],
)
def test_the_timeout_of_the_api_server_is_parsed(text: str, seconds: float) -> None:
    assert parse_timeout(text) == seconds


def test_a_shorter_timeout_of_the_api_server_is_honoured() -> None:
    release = threading.Event()
    wait = _held_until(release)

    async def go() -> None:
        async with running(fixture(), wait) as webhook:
            status, answer = await webhook.post(
                "/mutate?timeout=100ms", body(admission_review(pod()))
            )
            assert (status, answer["response"]["allowed"]) == (200, True)
            assert webhook.counted("Abandoned") == 1
            release.set()

    asyncio.run(go())


def test_the_liveness_check_fails_when_every_thread_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "BUDGET_SECONDS", 0.05)
    release, now = threading.Event(), [0.0]
    wait = _held_until(release)

    async def go() -> None:
        async with running(fixture(), wait, clock=lambda: now[0]) as webhook:
            await asyncio.gather(*(webhook.mutate() for _ in range(4)))
            assert webhook.server.stuck() == ""
            now[0] = 31.0
            assert "4 decisions have hung" in webhook.server.stuck()
            async with webhook.session.get(webhook.address + "/healthz") as answer:
                assert answer.status == 503
            release.set()
            await asyncio.to_thread(webhook.server._threads.shutdown)
            await asyncio.sleep(0)
            assert webhook.server.stuck() == ""

    asyncio.run(go())


def test_requests_beyond_the_limit_are_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_operator.webhook.listener.MAX_CONCURRENT_REQUESTS", 0)

    async def go() -> None:
        async with running(fixture()) as webhook:
            assert "patch" not in await webhook.mutate()
            assert webhook.counted("Abandoned") == 1

    asyncio.run(go())


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"null", b"x" * (review.MAX_BODY_BYTES + 1)]
)
def test_a_malformed_request_is_a_400(path: str, content: bytes) -> None:
    async def go() -> None:
        async with running(fixture()) as webhook:
            status, answer = await webhook.post(path, content)
            assert status == 400
            assert answer["error"]
            assert webhook.counted("Malformed", path) == 1
            await webhook.mutate()

    asyncio.run(go())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "nonsense"])
def test_a_body_with_a_wrong_content_encoding_does_no_harm(encoding: str) -> None:
    async def go() -> None:
        async with running(fixture()) as webhook:
            headers = {"Content-Encoding": encoding}
            content = b"\x00garbage" * 100
            async with webhook.session.post(
                webhook.address + "/mutate", data=content, headers=headers
            ) as answer:
                assert answer.status == 400
            await webhook.mutate()

    asyncio.run(go())


def test_the_size_limit_applies_to_the_decompressed_body() -> None:
    async def go() -> None:
        async with running(fixture()) as webhook:
            headers = {"Content-Encoding": "gzip"}
            content = gzip.compress(b" " * (review.MAX_BODY_BYTES * 4))
            async with webhook.session.post(
                webhook.address + "/mutate", data=content, headers=headers
            ) as answer:
                assert answer.status == 400
            await webhook.mutate()

    asyncio.run(go())


def test_a_body_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_operator.webhook.listener.READ_SECONDS", 0.1)

    async def go() -> None:
        async with running(fixture()) as webhook:

            async def slow() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.sleep(5)

            async with webhook.session.post(webhook.address + "/mutate", data=slow()) as answer:
                assert answer.status == 400

    asyncio.run(go())


def test_pods_are_unchanged_until_the_caches_are_synced() -> None:
    async def go() -> None:
        made = fixture()
        made.cache.complete = False
        async with running(made) as webhook:
            assert "patch" not in await webhook.mutate()
            assert webhook.counted("NotReady") == 1
            async with webhook.session.get(webhook.address + "/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "caches are not synced\n")
            made.cache.complete = True
            async with webhook.session.get(webhook.address + "/readyz") as answer:
                assert answer.status == 200

    asyncio.run(go())


def test_a_policy_is_denied_or_allowed() -> None:
    async def go() -> None:
        async with running(fixture()) as webhook:
            _, answer = await webhook.post(
                "/validate", body(admission_review(policy_document(chunkTokens=7)))
            )
            assert not answer["response"]["allowed"]
            message = answer["response"]["status"]["message"]
            assert message.startswith("spec.chunkTokens: Invalid value: 7: must be")
            _, answer = await webhook.post(
                "/validate", body(admission_review(policy_document("other")))
            )
            assert answer["response"]["allowed"]
            assert 'policy "chat" selects the same pods' in answer["response"]["warnings"][0]
            assert (
                webhook.counted("Denied", "/validate"),
                webhook.counted("Allowed", "/validate"),
            ) == (1, 1)

    asyncio.run(go())


def test_the_webhook_is_reached_by_ipv4_and_by_ipv6() -> None:
    """By default, as in a pod. Those of a cluster with IPv6 only have no other address."""

    async def go() -> None:
        every = Fixture(webhook={"port": 0, "drainSeconds": 0})
        every.policy()
        async with running(every) as webhook:
            port = int(webhook.address.rsplit(":", 1)[1])
            tls = ssl.create_default_context(cadata=ISSUED.authority.decode())
            for host in loopbacks():
                _, writer = await asyncio.open_connection(
                    host, port, ssl=tls, server_hostname="127.0.0.1"
                )
                writer.close()

    asyncio.run(go())


def test_tls_1_2_is_required() -> None:
    async def go() -> None:
        async with running(fixture()) as webhook:
            port = int(webhook.address.rsplit(":", 1)[1])
            old = ssl.create_default_context(cadata=ISSUED.authority.decode())
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=old)

    asyncio.run(go())


def test_a_shutdown_answers_requests_in_flight() -> None:
    started, release = threading.Event(), threading.Event()

    def wait(policy: Any, found: Any, *_: Any) -> Any:
        started.set()
        release.wait(60)
        return Injected({**found, "spec": {}})

    async def go() -> None:
        async with running(fixture(), wait) as webhook:
            in_flight = asyncio.ensure_future(webhook.mutate())
            await asyncio.to_thread(started.wait, 60)
            stopping = asyncio.ensure_future(webhook.server.stop())
            await asyncio.sleep(0)
            assert webhook.server.why_not_ready() == "shutting down"
            release.set()
            assert "patch" in await in_flight
            await stopping

    asyncio.run(go())
