"""The webhook process in one event loop: caches, certificate from the Secret, responses, health,
graceful shutdown.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.support.memory_cluster import MemoryCluster, MemoryWatcher
from tests.support.ports import reserved_port
from tests.unit.webhook.fixtures import SERVING, admission_review, body, pod, policy_document

from kvtier_operator.certs import certificates
from kvtier_operator.kube.resources import NODES, PODS, POLICIES, SECRETS
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.server import WebhookOptions, serve, watches

ISSUED = certificates.issue(("127.0.0.1",), time.time(), 3600)
WAIT_SECONDS = 60
REQUEST_SECONDS = 5
"""A request that is not answered is sent again until ``WAIT_SECONDS``."""


class Running:
    """The process, seen from outside."""

    def __init__(
        self, settings: Settings, session: aiohttp.ClientSession, plain: aiohttp.ClientSession
    ) -> None:
        self._settings, self._session, self._plain = settings, session, plain

    async def ready(self) -> tuple[int, str]:
        address = f"http://127.0.0.1:{self._settings.monitoring.port}/readyz"
        async with self._plain.get(address) as answer:
            return answer.status, await answer.text()

    async def attached(self) -> bool:
        address = f"https://127.0.0.1:{self._settings.webhook.port}/mutate"
        async with self._session.post(address, data=body(admission_review(pod()))) as answer:
            return "patch" in json.loads(await answer.read())["response"]

    async def until(self, what: str, check: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                if await check():
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(
    cluster: MemoryCluster, **options: Any
) -> AsyncIterator[tuple[Running, asyncio.Event]]:
    ports = ExitStack()
    monitoring = {"host": "127.0.0.1", "port": ports.enter_context(reserved_port())}
    port = ports.enter_context(reserved_port())
    webhook = {"host": "127.0.0.1", "port": port, "drainSeconds": 0, **options}
    settings = Settings.model_validate({"monitoring": monitoring, "webhook": webhook})
    stop = asyncio.Event()
    frozen: list[bool] = []
    running = asyncio.ensure_future(
        # The tests' own process has to go on collecting its garbage.
        serve(
            settings,
            cluster,
            stop,
            options=WebhookOptions(MemoryWatcher, freeze=lambda: frozen.append(True)),
        )
    )
    tls = ssl.create_default_context(cadata=ISSUED.authority.decode())
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls),
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
        ) as session,
        aiohttp.ClientSession() as plain,
    ):
        yield Running(settings, session, plain), stop
    stop.set()
    async with asyncio.timeout(WAIT_SECONDS):
        await running
    ports.close()
    assert frozen == [True]


def cluster() -> MemoryCluster:
    made = MemoryCluster()
    made.put(SECRETS, secret())
    made.put(POLICIES, policy_document())
    return made


def secret() -> dict[str, Any]:
    material = certificates.KeyPair(ISSUED.certificate, ISSUED.key, ISSUED.authority)
    name = Settings().webhook.certificates.secret_name
    return {
        "metadata": {"namespace": "kvtier-system", "name": name},
        "data": certificates.secret_data(material),
    }


def test_the_webhook_is_ready_once_it_has_certificate_and_caches() -> None:
    async def go() -> None:
        made = MemoryCluster()
        made.put(POLICIES, policy_document())
        async with serving(made) as (running, _):

            async def waits() -> bool:
                return (await running.ready()) == (503, "webhook: no serving certificate\n")

            await running.until("no certificate", waits)
            made.put(SECRETS, secret())
            await running.until("attached", running.attached)
            assert (await running.ready())[0] == 200

    asyncio.run(go())


def test_objects_deleted_while_a_watch_was_down_are_dropped() -> None:
    async def go() -> None:
        made = cluster()
        async with serving(made) as (running, _):
            await running.until("attached", running.attached)
            made.down = True
            made.remove(POLICIES, SERVING, "chat")
            # The API server is away: what was known stays known, and pods are attached by it.
            assert await running.attached()
            assert (await running.ready())[0] == 200
            made.down = False

            async def forgotten() -> bool:
                return not await running.attached()

            await running.until("forgotten", forgotten)
            made.put(POLICIES, policy_document())
            await running.until("attached by the one made again", running.attached)

    asyncio.run(go())


def test_without_an_api_server_the_webhook_is_not_ready_and_pods_are_unchanged() -> None:
    async def go() -> None:
        made = cluster()
        made.down = True
        async with serving(made) as (running, _):

            async def waits() -> bool:
                status, text = await running.ready()
                return status == 503 and "kvtierpolicies" in text

            await running.until("not ready, with the kinds that are missing", waits)
            made.down = False
            await running.until("attached", running.attached)

    asyncio.run(go())


def test_a_stop_frees_the_ports() -> None:
    async def go() -> None:
        async with serving(cluster()) as (running, stop):
            await running.until("attached", running.attached)
            stop.set()

            async def refused() -> bool:
                try:
                    await running.attached()
                except aiohttp.ClientConnectorError:
                    return True
                return False

            await running.until("closed", refused)

    asyncio.run(go())


def test_a_port_in_use_ends_the_process_with_the_reason() -> None:
    async def go() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            options = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
            settings = Settings.model_validate(
                {"webhook": options, "monitoring": {"host": "127.0.0.1", "port": 0}}
            )
            with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
                await serve(
                    settings,
                    cluster(),
                    asyncio.Event(),
                    options=WebhookOptions(MemoryWatcher),
                )

    asyncio.run(go())


def test_only_group_pods_and_the_one_secret_are_watched() -> None:
    followed = {watch.kind: watch for watch in watches(Settings())}
    assert followed[PODS].labels == "leaderworkerset.sigs.k8s.io/group-key"
    assert (followed[SECRETS].namespaces, followed[SECRETS].fields) == (
        ("kvtier-system",),
        "metadata.name=kvtier-webhook-certificates",
    )
    mounted = Settings.model_validate(
        {"webhook": {"certificates": {"mode": "Mounted"}}, "watchNamespaces": ["a"]}
    )
    kinds = {watch.kind: watch for watch in watches(mounted)}
    assert SECRETS not in kinds
    assert kinds[POLICIES].namespaces == kinds[PODS].namespaces == ("a",)


def test_pods_and_nodes_are_trimmed() -> None:
    followed = {watch.kind: watch for watch in watches(Settings())}
    node = {
        "metadata": {"name": "n", "uid": "u", "resourceVersion": "1", "labels": {"a": "b"}},
        "spec": {"unschedulable": True, "podCIDR": "10.0.0.0/24"},
        "status": {
            "nodeInfo": {"kubeletVersion": "v1.37.2", "osImage": "x"},
            "allocatable": {"nvidia.com/gpu": "8", "memory": "1Ti"},
            "images": [{}],
        },
    }
    kept = followed[NODES].trim(node)
    assert (kept["metadata"]["labels"], kept["spec"]) == ({"a": "b"}, {"unschedulable": True})
    assert kept["status"] == {
        "nodeInfo": {"kubeletVersion": "v1.37.2"},
        "allocatable": {"nvidia.com/gpu": "8"},
    }
    member = {
        "metadata": {"name": "p", "namespace": "s", "labels": {"a": "b"}},
        "spec": {"containers": []},
        "status": {"phase": "Failed", "podIP": "10.0.0.1"},
    }
    assert followed[PODS].trim(member) == {
        "metadata": member["metadata"],
        "status": {"phase": "Failed"},
    }
