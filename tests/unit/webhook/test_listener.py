"""The admission server over real TLS: every answer lets a pod start, whatever happens."""

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
from tests.unit.webhook.world import World, body, pod, policy_document, question

from kvtier_operator.certs import certificates
from kvtier_operator.certs.serve import ServingCertificate
from kvtier_operator.injection.decision import Injected
from kvtier_operator.webhook import review
from kvtier_operator.webhook.listener import AdmissionServer, patience
from kvtier_operator.webhook.metrics import WebhookMetrics

ISSUED = certificates.issue(("127.0.0.1",), time.time(), 3600)
LOOPBACK = {"host": "127.0.0.1", "port": 0, "drainSeconds": 0}


class Asked:
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
        status, answer = await self.post("/mutate", body(question(pod(**metadata))))
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
    world: World, decide: Callable[..., Any] | None = None, **options: Any
) -> AsyncIterator[Asked]:
    metrics = WebhookMetrics(CollectorRegistry())
    serving = ServingCertificate(metrics.expires.set)
    serving.take(ISSUED.certificate, ISSUED.key)
    chosen = decide or (lambda policy, found, *_: Injected(dict(found)))
    server = AdmissionServer(world.settings, world.knowledge, serving, metrics, chosen, **options)
    port = await server.start()
    tls = ssl.create_default_context(cadata=ISSUED.authority.decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        yield Asked(server, metrics, port, session)
    await server.stop()


def world() -> World:
    made = World(webhook=LOOPBACK)
    made.policy()
    return made


def test_a_pod_is_patched() -> None:
    async def go() -> None:
        async with running(
            world(), lambda policy, found, *_: Injected({**found, "spec": {}})
        ) as asked:
            response = await asked.mutate()
            assert json.loads(base64.b64decode(response["patch"])) == [
                {"op": "remove", "path": "/spec/containers"}
            ]
            assert asked.counted("Attached") == 1
            assert "patch" not in await asked.mutate(labels={})
            assert asked.counted("Unchanged") == 1

    asyncio.run(go())


def test_a_failure_admits_the_pod_unchanged_and_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a fault")

    async def go() -> None:
        async with running(world(), fail) as asked:
            assert "patch" not in await asked.mutate()
            assert asked.counted("Failed") == 1

    asyncio.run(go())
    assert "ZeroDivisionError" in caplog.text


def test_a_failure_while_asking_the_caches_admits_the_pod_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("a fault")

    async def go() -> None:
        async with running(world()) as asked:
            monkeypatch.setattr(asked.server._knowledge, "governing", fail)
            assert "patch" not in await asked.mutate()
            assert asked.counted("Failed") == 1

    asyncio.run(go())


def test_a_decision_that_takes_too_long_is_abandoned() -> None:
    release = threading.Event()

    def wait(policy: Any, found: Any, *_: Any) -> Any:
        release.wait(20)
        return Injected(dict(found))

    async def go() -> None:
        async with running(world(), wait, budget_seconds=0.1) as asked:
            # More than there are threads: those that come later are not held up by those that hang.
            responses = await asyncio.gather(*(asked.mutate() for _ in range(12)))
            assert all("patch" not in response for response in responses)
            assert asked.counted("Abandoned") == 12
            # The loop is not held up either.
            async with asked.session.get(asked.address + "/healthz") as answer:
                assert answer.status == 200
            release.set()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("2s", 2.0),
        ("500ms", 0.5),
        ("1.5s", 1.5),
        ("", math.inf),
        ("1m0s", math.inf),
        ("x", math.inf),
    ],
)
def test_how_long_the_api_server_waits_is_read_from_what_it_says(said: str, seconds: float) -> None:
    assert patience(said) == seconds


def test_an_api_server_that_waits_less_is_answered_earlier() -> None:
    release = threading.Event()

    def wait(policy: Any, found: Any, *_: Any) -> Any:
        release.wait(20)
        return Injected(dict(found))

    async def go() -> None:
        async with running(world(), wait) as asked:
            status, answer = await asked.post("/mutate?timeout=100ms", body(question(pod())))
            assert (status, answer["response"]["allowed"]) == (200, True)
            assert asked.counted("Abandoned") == 1
            release.set()

    asyncio.run(go())


def test_when_every_decision_hangs_for_long_the_process_is_no_longer_alive() -> None:
    release, now = threading.Event(), [0.0]

    def wait(policy: Any, found: Any, *_: Any) -> Any:
        release.wait(20)
        return Injected(dict(found))

    async def go() -> None:
        async with running(world(), wait, budget_seconds=0.05, clock=lambda: now[0]) as asked:
            await asyncio.gather(*(asked.mutate() for _ in range(4)))
            assert asked.server.stuck() == ""
            now[0] = 31.0
            assert "4 decisions have hung" in asked.server.stuck()
            async with asked.session.get(asked.address + "/healthz") as answer:
                assert answer.status == 503
            release.set()
            await asyncio.to_thread(asked.server._threads.shutdown)
            await asyncio.sleep(0)
            assert asked.server.stuck() == ""

    asyncio.run(go())


def test_more_questions_than_can_be_held_are_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_operator.webhook.listener.MAX_OPEN", 0)

    async def go() -> None:
        async with running(world()) as asked:
            assert "patch" not in await asked.mutate()
            assert asked.counted("Abandoned") == 1

    asyncio.run(go())


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"null", b"x" * (review.MAX_BODY_BYTES + 1)]
)
def test_what_is_malformed_is_a_400(path: str, content: bytes) -> None:
    async def go() -> None:
        async with running(world()) as asked:
            status, answer = await asked.post(path, content)
            assert status == 400
            assert answer["error"]
            assert asked.counted("Malformed", path) == 1
            await asked.mutate()

    asyncio.run(go())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "nonsense"])
def test_a_body_that_is_not_encoded_as_it_says_harms_nobody(encoding: str) -> None:
    async def go() -> None:
        async with running(world()) as asked:
            headers = {"Content-Encoding": encoding}
            content = b"\x00garbage" * 100
            async with asked.session.post(
                asked.address + "/mutate", data=content, headers=headers
            ) as answer:
                assert answer.status == 400
            await asked.mutate()

    asyncio.run(go())


def test_a_body_that_grows_when_it_is_decoded_is_bounded() -> None:
    async def go() -> None:
        async with running(world()) as asked:
            headers = {"Content-Encoding": "gzip"}
            content = gzip.compress(b" " * (review.MAX_BODY_BYTES * 4))
            async with asked.session.post(
                asked.address + "/mutate", data=content, headers=headers
            ) as answer:
                assert answer.status == 400
            await asked.mutate()

    asyncio.run(go())


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_operator.webhook.listener.READ_SECONDS", 0.1)

    async def go() -> None:
        async with running(world()) as asked:

            async def slow() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.sleep(5)

            async with asked.session.post(asked.address + "/mutate", data=slow()) as answer:
                assert answer.status == 400

    asyncio.run(go())


def test_nothing_is_decided_before_the_cluster_is_known() -> None:
    async def go() -> None:
        made = world()
        made.cache.complete = False
        async with running(made) as asked:
            assert "patch" not in await asked.mutate()
            assert asked.counted("NotReady") == 1
            async with asked.session.get(asked.address + "/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "caches are not synced yet\n")
            made.cache.complete = True
            async with asked.session.get(asked.address + "/readyz") as answer:
                assert answer.status == 200

    asyncio.run(go())


def test_a_policy_is_refused_and_accepted() -> None:
    async def go() -> None:
        async with running(world()) as asked:
            _, answer = await asked.post(
                "/validate", body(question(policy_document(chunkTokens=7)))
            )
            assert not answer["response"]["allowed"]
            assert (
                "spec.chunkTokens: Invalid value: 7: must be"
                in answer["response"]["status"]["message"]
            )
            _, answer = await asked.post("/validate", body(question(policy_document("other"))))
            assert answer["response"]["allowed"]
            assert "policy chat selects the same pods" in answer["response"]["warnings"][0]
            assert (
                asked.counted("Refused", "/validate"),
                asked.counted("Accepted", "/validate"),
            ) == (1, 1)

    asyncio.run(go())


def test_only_tls_from_1_2_on_is_spoken() -> None:
    async def go() -> None:
        async with running(world()) as asked:
            port = int(asked.address.rsplit(":", 1)[1])
            old = ssl.create_default_context(cadata=ISSUED.authority.decode())
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=old)

    asyncio.run(go())


def test_a_stop_lets_questions_at_hand_be_answered() -> None:
    begun, release = threading.Event(), threading.Event()

    def wait(policy: Any, found: Any, *_: Any) -> Any:
        begun.set()
        release.wait(20)
        return Injected({**found, "spec": {}})

    async def go() -> None:
        async with running(world(), wait) as asked:
            question_at_hand = asyncio.ensure_future(asked.mutate())
            await asyncio.to_thread(begun.wait, 20)
            stopping = asyncio.ensure_future(asked.server.stop())
            await asyncio.sleep(0)
            assert asked.server.why_not_ready() == "stopping"
            release.set()
            assert "patch" in await question_at_hand
            await stopping

    asyncio.run(go())
