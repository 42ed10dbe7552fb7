"""The API client: deadlines, retries, Retry-After, rotating tokens, with a small HTTP server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from kvtier.errors import ConfigurationError
from kvtier_operator.kube.client import ApiClient, Limits, open_api
from kvtier_operator.kube.credentials import (
    TOKEN_SECONDS,
    Credentials,
    from_kubeconfig,
    in_cluster,
)
from kvtier_operator.kube.resources import CONFIG_MAPS, ApiError

BODY = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "n"}}
QUICK = Limits(deadline_seconds=60, attempt_seconds=30, first_pause_seconds=0.01)
Answer = Callable[[web.Request, int], Awaitable[web.StreamResponse]]


def credentials(
    server: str,
    read_token: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.monotonic,
) -> Credentials:
    def read() -> Any:
        configuration = Configuration()
        configuration.host = server
        configuration.api_key["BearerToken"] = f"Bearer {read_token()}"
        return configuration

    async def load() -> Any:
        return read()

    return Credentials(read(), load, TOKEN_SECONDS, clock)


class Server:
    """Answers every request by ``answer(request, number)`` and records the requests."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[web.Request] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        await request.read()
        return await self.answer(request, len(self.requests))


def run_scenario(
    answer: Answer,
    scenario: Callable[[ApiClient, Server], Awaitable[None]],
    limits: Limits = QUICK,
    options: dict[str, Any] | None = None,
    **access: Any,
) -> None:
    async def run() -> None:
        server = Server(answer)
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            given = credentials(f"http://127.0.0.1:{port}", **access)
            async with open_api(given) as api:
                await scenario(
                    ApiClient(api, given, limits, jitter=lambda: 0.5, **(options or {})), server
                )
        finally:
            await runner.cleanup()

    asyncio.run(run())


def status(code: int, reason: str = "Reason", **headers: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "reason": reason, "message": "why"}, status=code, headers=headers
    )


async def ok(request: web.Request, number: int) -> web.Response:
    return web.json_response(BODY)


def test_reads_and_applies_are_repeated_and_the_last_error_is_raised() -> None:
    async def failing(request: web.Request, number: int) -> web.Response:
        return status(503, "ServiceUnavailable")

    async def scenario(client: ApiClient, server: Server) -> None:
        for call in (client.get(CONFIG_MAPS, "n", "a"), client.apply(CONFIG_MAPS, BODY)):
            server.requests.clear()
            with pytest.raises(ApiError) as caught:
                await call
            assert (caught.value.status, caught.value.reason, caught.value.message) == (
                503,
                "ServiceUnavailable",
                "why",
            )
            assert len(server.requests) == QUICK.attempts

    run_scenario(failing, scenario)


def test_a_creation_is_repeated_only_where_nothing_was_done() -> None:
    async def first_fails(request: web.Request, number: int) -> web.Response:
        return (
            status(500)
            if number == 1
            else status(429)
            if number == 2
            else web.json_response(BODY, status=201)
        )

    async def scenario(client: ApiClient, server: Server) -> None:
        with pytest.raises(ApiError):
            await client.create(CONFIG_MAPS, "n", BODY)
        assert len(server.requests) == 1
        assert await client.create(CONFIG_MAPS, "n", BODY) == BODY
        assert len(server.requests) == 3

    run_scenario(first_fails, scenario)


def test_a_conflict_is_the_callers_at_once() -> None:
    async def conflict(request: web.Request, number: int) -> web.Response:
        return status(409, "Conflict")

    async def scenario(client: ApiClient, server: Server) -> None:
        with pytest.raises(ApiError) as caught:
            await client.apply(CONFIG_MAPS, BODY)
        assert (caught.value.status, len(server.requests)) == (409, 1)

    run_scenario(conflict, scenario)


def test_retry_after_is_honoured() -> None:
    async def busy(request: web.Request, number: int) -> web.Response:
        return (
            status(429, "TooManyRequests", **{"Retry-After": "1"})
            if number == 1
            else web.json_response(BODY)
        )

    async def scenario(client: ApiClient, server: Server) -> None:
        began = time.monotonic()
        await client.get(CONFIG_MAPS, "n", "a")
        assert time.monotonic() - began >= 1

    run_scenario(busy, scenario)


def test_every_call_ends_by_its_deadline() -> None:
    async def hangs(request: web.Request, number: int) -> web.Response:
        await asyncio.sleep(30)
        return status(500)

    async def scenario(client: ApiClient, server: Server) -> None:
        began = time.monotonic()
        with pytest.raises(ApiError) as caught:
            await client.get(CONFIG_MAPS, "n", "a")
        assert (caught.value.status, caught.value.reason) == (0, "Timeout")
        assert time.monotonic() - began < 25

    run_scenario(
        hangs, scenario, Limits(deadline_seconds=0.5, attempt_seconds=0.2, first_pause_seconds=0.01)
    )


def test_the_number_of_calls_at_once_is_bounded() -> None:
    async def scenario(client: ApiClient, server: Server) -> None:
        await asyncio.gather(*(client.get(CONFIG_MAPS, "n", "a") for _ in range(12)))
        assert most == 3

    now = most = 0
    together = asyncio.Event()

    async def counting(request: web.Request, number: int) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            together.set()
        await together.wait()
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response(BODY)

    run_scenario(counting, scenario, Limits(concurrency=3))


def test_a_token_is_reread_every_minute_and_at_once_after_a_401() -> None:
    tokens = iter(["one", "two", "three"])
    clock = [0.0]

    async def picky(request: web.Request, number: int) -> web.Response:
        return status(401) if number == 3 else web.json_response(BODY)

    async def scenario(client: ApiClient, server: Server) -> None:
        for seconds in (0.0, 61.0, 62.0):
            clock[0] = seconds
            await client.get(CONFIG_MAPS, "n", "a")
        headers = [request.headers["Authorization"] for request in server.requests]
        assert headers == ["Bearer one", "Bearer two", "Bearer two", "Bearer three"]

    run_scenario(picky, scenario, read_token=lambda: next(tokens), clock=lambda: clock[0])


def test_a_token_that_cannot_be_read_for_a_moment_stays_the_last_one() -> None:
    clock = [0.0]

    def read() -> str:
        if clock[0]:
            raise OSError("the kubelet is replacing it")
        return "one"

    async def scenario() -> None:
        access = credentials("http://none", read_token=read, clock=lambda: clock[0])
        assert await access.authorization() == "Bearer one"
        clock[0] = 100.0
        assert await access.authorization() == "Bearer one"

    asyncio.run(scenario())


def test_a_deletion_names_what_was_seen_and_one_that_is_gone_is_no_error() -> None:
    bodies: list[Any] = []

    async def gone(request: web.Request, number: int) -> web.Response:
        bodies.append(json.loads(await request.read()))
        return status(404 if number == 1 else 409)

    async def scenario(client: ApiClient, server: Server) -> None:
        await client.delete(CONFIG_MAPS, "n", "a", uid="u")
        await client.delete(CONFIG_MAPS, "n", "a", uid="u")
        with pytest.raises(ApiError):
            await client.delete(CONFIG_MAPS, "n", "a", uid="u", resource_version="7")
        assert bodies[0]["preconditions"] == {"uid": "u"}
        assert bodies[2]["preconditions"] == {"uid": "u", "resourceVersion": "7"}

    run_scenario(gone, scenario)


def test_lists_are_read_page_by_page_and_their_items_say_what_they_are() -> None:
    async def pages(request: web.Request, number: int) -> web.Response:
        more = {"continue": "next"} if number == 1 else {}
        assert request.query.get("continue") == (None if number == 1 else "next")
        return web.json_response(
            {"metadata": {"resourceVersion": "5", **more}, "items": [{"metadata": {"name": "a"}}]}
        )

    async def scenario(client: ApiClient, server: Server) -> None:
        found = await client.list(CONFIG_MAPS, "n", labels="a=b")
        assert [(each["kind"], each["apiVersion"]) for each in found] == [("ConfigMap", "v1")] * 2
        assert server.requests[0].query["labelSelector"] == "a=b"

    run_scenario(pages, scenario)


def test_every_attempt_is_observed() -> None:
    seen: list[tuple[str, str, int]] = []

    async def second(request: web.Request, number: int) -> web.Response:
        return status(500) if number == 1 else web.json_response(BODY)

    async def scenario(client: ApiClient, server: Server) -> None:
        client.observer = lambda verb, kind, code, seconds: seen.append((verb, kind, code))
        await client.get(CONFIG_MAPS, "n", "a")
        assert seen == [("get", "ConfigMap", 500), ("get", "ConfigMap", 200)]

    run_scenario(second, scenario)


def test_outside_of_a_pod_the_error_names_the_required_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--kubeconfig"):
        in_cluster(tmp_path, {})
    with pytest.raises(ConfigurationError, match="automountServiceAccountToken"):
        in_cluster(
            tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        )


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: a
contexts: [{{name: a, context: {context}}}]
clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:1'}}}}]
users: [{{name: u, user: {user}}}]
"""
HERE = "{cluster: c, user: u}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "must be a kubeconfig"),
        ("- 1", "must be a kubeconfig"),
        ("a: [1\n: x", "must be a kubeconfig"),
        ("\0", "must be a kubeconfig"),
        (KUBECONFIG.format(context="5", user="{token: x}"), "must be a kubeconfig"),
        (KUBECONFIG.format(context="{cluster: no, user: u}", user="{}"), "must be a kubeconfig"),
        (KUBECONFIG.format(context=HERE, user="{client-certificate: /no}"), "must be a kubeconfig"),
        (KUBECONFIG.format(context=HERE, user="{}"), "no credentials"),
        (
            KUBECONFIG.format(
                context=HERE,
                user="{exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-plugin,"
                " interactiveMode: Never}}",
            ),
            "exec plug-in that is installed here",
        ),
    ],
)
def test_an_unusable_kubeconfig_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=said) as caught:
        asyncio.run(from_kubeconfig(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_in_a_pod_the_account_is_used_and_followed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text("")
    access = in_cluster(
        tmp_path, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    )
    assert access.server == "https://[fd00::1]:443"

    async def scenario() -> None:
        assert await access.authorization() == "Bearer first"
        (tmp_path / "token").write_text("second\n")
        assert await access.authorization() == "Bearer first"
        access.expire()
        assert await access.authorization() == "Bearer second"

    asyncio.run(scenario())


def test_uids_are_listed_page_by_page_and_again_from_the_start_if_the_snapshot_expires() -> None:
    async def pages(request: web.Request, number: int) -> web.Response:
        assert "PartialObjectMetadataList" in request.headers["Accept"]
        if number == 2:
            return status(410, "Expired")
        more = {"continue": "next"} if number in (1, 3) else {}
        items = [{"metadata": {"uid": f"u{number}", "name": "a"}}] if number != 5 else None
        metadata = {"resourceVersion": str(number), **more}
        return web.json_response({"metadata": metadata, "items": items})

    async def scenario(client: ApiClient, server: Server) -> None:
        assert await client.identities(CONFIG_MAPS, "n") == (frozenset({"u3", "u4"}), 4)
        assert await client.identities(CONFIG_MAPS, "n") == (frozenset(), 5)

    run_scenario(pages, scenario)


def test_an_unserved_group_has_no_kinds() -> None:
    async def groups(request: web.Request, number: int) -> web.Response:
        if request.path == "/apis/kvtier.io/v1alpha1":
            return web.json_response({"resources": [{"name": "kvtierpolicies"}]})
        return status(404)

    async def scenario(client: ApiClient, server: Server) -> None:
        assert await client.served("kvtier.io", "v1alpha1") == {"kvtierpolicies"}
        assert await client.served("other.io", "v1") == frozenset()

    run_scenario(groups, scenario)


def test_without_the_lease_nothing_is_written_and_reads_go_on() -> None:
    remaining = [10.0]

    async def slow(request: web.Request, number: int) -> web.Response:
        if request.method != "GET":
            await asyncio.sleep(5)
        return web.json_response(BODY)

    async def scenario(client: ApiClient, server: Server) -> None:
        remaining[0] = 0.1
        with pytest.raises(ApiError) as caught:
            await client.apply(CONFIG_MAPS, BODY)
        assert caught.value.reason == "Timeout"
        remaining[0] = 0.0
        server.requests.clear()
        for call in (
            client.apply(CONFIG_MAPS, BODY),
            client.create(CONFIG_MAPS, "n", BODY),
            client.patch(CONFIG_MAPS, "n", "a", {}),
            client.delete(CONFIG_MAPS, "n", "a", uid="u"),
        ):
            with pytest.raises(ApiError) as caught:
                await call
            assert caught.value.reason == "NotLeader"
        assert server.requests == []
        assert await client.get(CONFIG_MAPS, "n", "a") == BODY

    limits = Limits(deadline_seconds=60, attempts=1)
    run_scenario(slow, scenario, limits, options={"write_seconds": lambda: remaining[0]})
