"""Polling of pods, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from tests.support.memory_cluster import MemoryCluster
from tests.support.pods import injected_pod, running, status_document

from kvtier.config.host_ports import HOST_PORTS, host_ports
from kvtier_operator.api.pods import decode_pod
from kvtier_operator.controller.events import EventRecorder
from kvtier_operator.controller.pods.poll import PodPoller, PollTarget, poll_target
from kvtier_operator.controller.pods.reports import MAX_BODY_BYTES, LastReport
from kvtier_operator.settings import Settings

KEY = ("serving", "chat")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
WAIT_SECONDS = 60.0


def chosen(**controller: Any) -> Settings:
    return Settings.model_validate(
        {"controller": {"pollSeconds": 0.05, "pollTimeoutSeconds": 20, **controller}}
    )


@contextlib.asynccontextmanager
async def pod(handler: Handler) -> AsyncIterator[PollTarget]:
    """A pod that answers with ``handler``."""
    application = web.Application()
    application.router.add_get("/status", handler)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield PollTarget(f"uid-{runner.addresses[0][1]}", "127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def polling(settings: Settings, changes: list[Any] | None = None) -> AsyncIterator[PodPoller]:
    stop = asyncio.Event()
    poller = PodPoller(settings, (changes if changes is not None else []).append)
    task = asyncio.ensure_future(poller.run(stop))
    try:
        yield poller
    finally:
        stop.set()
        await task


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not check():  # noqa: ASYNC110  (what is checked has no event)
            await asyncio.sleep(0.01)


async def polled(handler: Handler, token: str | None = "secret", **controller: Any) -> LastReport:
    """The result of polling a pod with that handler."""
    async with pod(handler) as target, polling(chosen(**controller)) as poller:
        poller.set_targets(KEY, [target], token)
        await until(lambda: poller.last_report(target.uid) != LastReport())
        return poller.last_report(target.uid)


async def healthy(request: web.Request) -> web.Response:
    if request.headers.get("Authorization") != "Bearer secret":
        return web.Response(status=401)
    return web.json_response(status_document())


def test_a_pod_is_polled_with_the_policys_token() -> None:
    found = asyncio.run(polled(healthy))
    assert found.report is not None
    assert found.report.attached


def test_a_rejected_or_missing_token_is_a_failure_with_its_cause() -> None:
    wrong, none = asyncio.run(polled(healthy, "wrong")), asyncio.run(polled(healthy, None))
    assert (wrong.report, wrong.error) == (
        None,
        "HTTP 401: the pod does not accept the policy's token (yet)",
    )
    assert (none.report, none.error) == (None, "HTTP 401: the policy's token is missing")


def test_a_pod_that_does_not_answer_in_time_is_a_timeout() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    assert asyncio.run(polled(never, pollTimeoutSeconds=0.2)).error == "timeout"


def test_a_pod_that_sends_without_end_is_a_timeout() -> None:
    async def drips(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.05)
        return response

    assert asyncio.run(polled(drips, pollTimeoutSeconds=0.4)).error == "timeout"


def test_a_closed_port_is_a_failed_connection() -> None:
    async def scenario() -> LastReport:
        async with polling(chosen()) as poller:
            poller.set_targets(KEY, [PollTarget("uid", "127.0.0.1", 1)], None)
            await until(lambda: poller.last_report("uid").failures >= 2)
            return poller.last_report("uid")

    assert asyncio.run(scenario()).error == "connection failed"


@pytest.mark.parametrize("compressed", [False, True])
def test_an_answer_that_is_too_long_is_not_read_to_its_end_even_if_it_is_compressed(
    compressed: bool,
) -> None:
    sent = 0

    async def floods(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if compressed:
            bomb = gzip.compress(b" " * (64 << 20))
            return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                await response.write(b" " * (64 << 10))
                sent += 64 << 10
        return response

    found = asyncio.run(polled(floods))
    assert found.error.startswith("malformed answer")
    assert sent < 32 * MAX_BODY_BYTES


def test_a_redirect_is_not_followed() -> None:
    followed = False

    async def elsewhere(request: web.Request) -> web.Response:
        nonlocal followed
        if request.query:
            followed = True
        return web.Response(status=302, headers={"Location": "/status?followed"})

    assert asyncio.run(polled(elsewhere)).error == "HTTP 302"
    assert not followed


def test_garbage_instead_of_http_is_a_malformed_answer() -> None:
    async def scenario() -> LastReport:
        async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\x00\x01\x02 no http\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(garbage, "127.0.0.1", 0)
        target = PollTarget("uid", "127.0.0.1", server.sockets[0].getsockname()[1])
        async with server, polling(chosen()) as poller:
            poller.set_targets(KEY, [target], None)
            await until(lambda: poller.last_report("uid").failures)
            return poller.last_report("uid")

    assert asyncio.run(scenario()).error.startswith("malformed answer")


def test_polls_are_bounded_by_poll_concurrency() -> None:
    most = now = answered = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal most, now, answered
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        answered += 1
        return web.json_response(status_document())

    async def scenario() -> None:
        async with pod(slow) as target, polling(chosen(pollConcurrency=3)) as poller:
            poller.set_targets(
                KEY,
                [PollTarget(f"uid-{index}", target.address, target.port) for index in range(20)],
                None,
            )
            await until(lambda: answered >= 40)

    asyncio.run(scenario())
    assert most <= 3


def test_the_last_answer_is_kept_while_failures_are_counted() -> None:
    calls = 0

    async def dies(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response(status_document()) if calls == 1 else web.Response(status=500)

    async def scenario() -> LastReport:
        async with pod(dies) as target, polling(chosen()) as poller:
            poller.set_targets(KEY, [target], None)
            await until(lambda: poller.last_report(target.uid).failures >= 2)
            return poller.last_report(target.uid)

    found = asyncio.run(scenario())
    assert found.report is not None
    assert found.error == "HTTP 500"


def test_a_policy_is_reconciled_when_a_state_changes_and_not_when_bytes_do() -> None:
    used, state = 0, "Healthy"

    async def answers(request: web.Request) -> web.Response:
        nonlocal used
        used += 1000
        tier = {"name": "ram", "state": state, "usedBytes": used, "capacityBytes": 1 << 30}
        return web.json_response(status_document(tier))

    async def scenario() -> tuple[int, int]:
        nonlocal state
        changes: list[Any] = []
        async with pod(answers) as target, polling(chosen(), changes) as poller:
            poller.set_targets(KEY, [target], None)
            await until(lambda: used >= 10_000)
            quiet = len(changes)
            state = "BreakerOpen"
            await until(lambda: len(changes) > quiet)
            return quiet, len(changes)

    assert asyncio.run(scenario()) == (1, 2)


def test_a_pod_that_is_no_target_is_not_polled() -> None:
    calls = 0

    async def counts(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response(status_document())

    async def scenario() -> int:
        async with pod(counts) as target, polling(chosen()) as poller:
            poller.set_targets(KEY, [target], None)
            await until(lambda: calls > 1)
            poller.set_targets(KEY, [], None)
            await asyncio.sleep(0.1)
            before = calls
            await asyncio.sleep(0.3)
            assert poller.last_report(target.uid) == LastReport()
            poller.set_targets(KEY, [target], None)
            await until(lambda: calls > before)
            poller.forget(KEY)
            return calls - before

    assert asyncio.run(scenario()) >= 1


def test_a_changed_token_is_used_at_once() -> None:
    async def scenario() -> None:
        async with pod(healthy) as target, polling(chosen(pollSeconds=600)) as poller:
            poller.set_targets(KEY, [target], "old")
            await until(lambda: poller.last_report(target.uid).failures)
            poller.set_targets(KEY, [target], "secret")
            await until(lambda: poller.last_report(target.uid).report is not None)

    asyncio.run(scenario())


LONG = json.dumps({"http": {"port": 9411}, "more": "x" * (16 << 10)})
"""Longer than any that KVTier writes. A thousand of 256 KiB, which the API server accepts, would
stay in memory.
"""


def test_the_port_is_the_one_in_the_pods_structure() -> None:
    assert poll_target(decode_pod(running(injected_pod(port=9411)))) == PollTarget(
        "uid-of-chat-1", "10.1.2.3", 9411
    )


@pytest.mark.parametrize(
    "annotation", ["", "no json", "[]", json.dumps({"http": {"port": "x"}}), "[" * 9000, LONG]
)
def test_a_structure_without_a_port_means_the_default_port(annotation: str) -> None:
    pod_object = running(injected_pod())
    pod_object["metadata"]["annotations"]["kvtier.io/structural"] = annotation
    found = poll_target(decode_pod(pod_object))
    assert found is not None
    assert found.port == 9400


def test_on_the_nodes_address_only_ports_of_kvtier_are_polled() -> None:
    for port in (0, 22, 9400, 10250, HOST_PORTS.start):
        pod_object = running(injected_pod(port=port))
        pod_object["spec"]["hostNetwork"] = True
        found = poll_target(decode_pod(pod_object))
        assert found is not None
        polled = tuple(each.port for each in found.candidates)
        # A pod of an earlier version declares a port of the range.
        derived = host_ports(pod_object["metadata"]["uid"])
        assert polled == ((port,) if port in HOST_PORTS else derived)


def test_a_pod_on_the_nodes_network_is_found_at_its_port_and_told_from_its_neighbours() -> None:
    def answers_as(uid: str) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response({**status_document(), "podUid": uid})

        return handler

    async def closed(request: web.Request) -> web.Response:
        return web.Response(status=401)

    async def scenario(*handlers: Handler) -> LastReport:
        async with contextlib.AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(pod(each)) for each in handlers]
            ports = [1, *(server.port for server in servers)]
            target = PollTarget("own", "127.0.0.1", ports[0], tuple(ports[1:]))
            poller = await stack.enter_async_context(polling(chosen()))
            poller.set_targets(KEY, [target], "secret")
            await until(lambda: poller.last_report("own") != LastReport())
            return poller.last_report("own")

    found = asyncio.run(scenario(closed, answers_as("neighbour"), answers_as("own")))
    assert found.report is not None
    assert found.report.pod_uid == "own"
    lost = asyncio.run(scenario(answers_as("neighbour"), answers_as("")))
    assert (lost.report, lost.error) == (None, "connection failed")


def test_the_ports_of_a_pod_are_few_in_range_and_stable() -> None:
    uid = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
    assert host_ports(uid) == (21_268, 21_269, 21_270, 21_271)
    for number in range(2_000):
        ports = host_ports(str(number))
        assert len(set(ports)) == 4
        assert all(port in HOST_PORTS for port in ports)


def test_an_ipv6_address_is_in_brackets_and_a_pod_without_address_is_not_polled() -> None:
    found = poll_target(decode_pod(running(injected_pod(), address="fd00::7")))
    assert found is not None
    assert found.url == "http://[fd00::7]:9400/status"
    for wrong in ("", "evil.example", "10.0.0.1/../../"):
        assert poll_target(decode_pod(running(injected_pod(), address=wrong))) is None


def test_polls_and_events_are_counted_in_metrics() -> None:
    from prometheus_client import CollectorRegistry

    from kvtier_operator.controller.metrics import PodMetrics

    async def scenario() -> CollectorRegistry:
        registry = CollectorRegistry()
        async with pod(healthy) as target, polling(chosen()) as poller:
            PodMetrics(registry, poller, EventRecorder(MemoryCluster(), lambda: 0.0))
            poller.set_targets(KEY, [target, PollTarget("closed", "127.0.0.1", 1)], "secret")
            await until(lambda: poller.answered and poller.unanswered)
        return registry

    registry = asyncio.run(scenario())
    assert registry.get_sample_value("kvtier_operator_polled_pods") == 2
    for result in ("answered", "unanswered"):
        assert (
            registry.get_sample_value("kvtier_operator_polls_total", {"result": result}) or 0
        ) >= 1
    assert registry.get_sample_value("kvtier_operator_events_total", {"result": "posted"}) == 0


@pytest.mark.parametrize("in_flight", [False, True], ids=["while idle", "during a poll"])
def test_a_cancelled_poller_leaves_no_task(in_flight: bool) -> None:
    async def never(request: web.Request) -> web.Response:
        requests.append(request)
        await asyncio.sleep(60)
        return web.Response()

    requests: list[web.Request] = []

    async def scenario() -> None:
        async with pod(never) as found:
            before = asyncio.all_tasks()
            poller = PodPoller(chosen(), lambda key: None)
            task = asyncio.ensure_future(poller.run(asyncio.Event()))
            if in_flight:
                poller.set_targets(KEY, [found], "secret")
                await until(lambda: requests)
            else:
                await until(lambda: len(asyncio.all_tasks() - before) > 1)
            ours = asyncio.all_tasks() - before
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # The server's side of a connection belongs to the server.
            assert not [
                each for each in ours if not each.done() and "aiohttp/web" not in repr(each)
            ]

    asyncio.run(scenario())
