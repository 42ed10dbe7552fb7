"""The HTTP server's manners, and what it shows."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.ports import loopbacks

from kvtier.harness.engine_process import http_request
from kvtier.harness.tierd_testbed import wait_for
from kvtier.listening import EVERY_ADDRESS, listen
from kvtier.tierd import http as module
from kvtier.tierd.http import MAX_CLIENTS, MAX_REQUEST_BYTES, HttpServer, text_response
from kvtier.tierd.status import (
    SessionStatus,
    Snapshot,
    StatusCondition,
    TierSnapshot,
    VolumeSnapshot,
    metrics_text,
    status_json,
)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    def broken() -> module.HttpResponse:
        raise ValueError("no")

    found = HttpServer(
        "127.0.0.1", 0, {"/healthz": lambda: text_response(200, "ok"), "/broken": broken}
    )
    yield found
    found.close()


def raw(server: HttpServer, request: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def test_get_and_head_are_answered_and_nothing_else(server: HttpServer) -> None:
    port = server.address[1]
    assert http_request(port, "GET", "/healthz") == (200, "ok\n")
    assert http_request(port, "GET", "/healthz?verbose") == (200, "ok\n")
    assert http_request(port, "HEAD", "/healthz") == (200, "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert http_request(port, method, "/healthz")[0] == 405
    assert http_request(port, "GET", "/secret")[0] == 404
    assert http_request(port, "GET", "/broken")[0] == 500
    assert raw(server, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_request_without_end_is_cut_off(server: HttpServer) -> None:
    answer = raw(server, b"GET /healthz HTTP/1.1\r\nX: " + b"a" * MAX_REQUEST_BYTES)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


def test_clients_beyond_the_limit_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 600.0)
    server = HttpServer("127.0.0.1", 0, {"/healthz": lambda: text_response(200, "ok")})
    silent = [socket.create_connection(server.address, timeout=60) for _ in range(MAX_CLIENTS + 4)]
    wait_for(lambda: server.rejected == 4, "four are closed")
    for connection in silent:
        connection.close()

    def answers() -> bool:
        try:
            return http_request(server.address[1], "GET", "/healthz")[0] == 200
        except OSError:
            return False

    wait_for(answers, "others are answered again")
    server.close()


def test_a_silent_client_is_disconnected_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.1)
    server = HttpServer("127.0.0.1", 0, {"/healthz": lambda: text_response(200, "ok")})
    with socket.create_connection(server.address, timeout=60) as connection:
        assert connection.recv(100) == b""
    server.close()


def test_an_address_in_use_is_an_os_error(server: HttpServer) -> None:
    with pytest.raises(OSError, match=r"in use"):
        HttpServer("127.0.0.1", server.address[1], {})


def test_every_address_is_those_of_ipv4_and_of_ipv6() -> None:
    """Pods of a cluster with IPv6 only have no other."""
    server = HttpServer(EVERY_ADDRESS, 0, {"/healthz": lambda: text_response(200, "ok")})
    try:
        for host in loopbacks():
            assert http_request(server.address[1], "GET", "/healthz", 60, host)[0] == 200
    finally:
        server.close()


def test_without_ipv6_every_address_is_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def without_ipv6(address: Any, **options: Any) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "no such address")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with listen(EVERY_ADDRESS, 0) as listener:
        assert listener.family == socket.AF_INET
    with pytest.raises(OSError, match="no such address"):
        listen("::1", 0)


def test_closing_ends_the_thread(server: HttpServer) -> None:
    server.close()
    server._thread.join(60)
    assert not server._thread.is_alive()


SNAPSHOT = Snapshot(
    version="1",
    policy="n/p",
    epoch=4,
    applied_generation=9,
    live_refused_total=2,
    content_hash="0123abcd",
    prompt_tokens=400,
    prompt_tokens_total=900,
    tiers=(
        TierSnapshot(
            name="ram",
            kind="memory",
            state="Healthy",
            used_bytes=10,
            capacity_bytes=20,
            objects=3,
            volume_bytes=80,
            volume_available_bytes=40,
            hit_tokens=100,
            hit_tokens_total=300,
        ),
        TierSnapshot(
            "disk",
            "fileSystem",
            "Degraded",
            volumes=(VolumeSnapshot("nvme1", "BreakerOpen", 5, 9, 2, 1, "EIO", "hung", 80, 40),),
        ),
        TierSnapshot("far", "lmcache", "Unknown"),
    ),
    sessions=(SessionStatus("e", "worker", 0, 1, 4, True),),
    pool={"pool_bytes": 20, "free": 10},
    conditions=(StatusCondition("PoolSmaller", "why"),),
    events={
        ("tier_reads_failed", "disk", "corrupt"): 5,
        ("evictions", "", ""): 2,
        ("unregistered", "", "why"): 1,
    },
)


def test_status_shows_tiers_pool_conditions_and_generation() -> None:
    document = json.loads(status_json(SNAPSHOT))
    assert document["tiers"][0]["usedBytes"] == 10
    assert document["tiers"][2]["state"] == "Unknown"
    assert document["tiers"][1]["volumes"] == [
        {
            "name": "nvme1",
            "state": "BreakerOpen",
            "usedBytes": 5,
            "capacityBytes": 9,
            "objects": 2,
            "lateReads": 1,
            "lastError": "EIO",
            "cause": "hung",
            "volumeBytes": 80,
            "volumeAvailableBytes": 40,
        }
    ]
    assert document["tiers"][0]["volumes"] == []
    assert (document["contentHash"], document["promptTokens"]) == ("0123abcd", 400)
    assert document["tiers"][0]["hitTokens"] == 100
    assert document["pool"] == {"poolBytes": 20, "free": 10}
    assert document["conditions"] == [{"type": "PoolSmaller", "message": "why"}]
    assert (document["appliedGeneration"], document["epoch"], document["sessions"][0]["pid"]) == (
        9,
        4,
        1,
    )


def test_metrics_can_be_parsed_and_carry_the_names_that_are_promised() -> None:
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics_text(SNAPSHOT).decode())
        for sample in family.samples
    }
    assert samples["kvtier_tier_used_bytes", (("tier", "ram"),)] == 10
    assert samples["kvtier_tier_capacity_bytes", (("tier", "ram"),)] == 20
    assert samples["kvtier_tier_objects", (("tier", "ram"),)] == 3
    assert samples["kvtier_tier_state", (("state", "Healthy"), ("tier", "ram"))] == 1
    assert samples["kvtier_tier_state", (("state", "Unknown"), ("tier", "ram"))] == 0
    volume = (("tier", "disk"), ("volume", "nvme1"))
    assert samples["kvtier_volume_used_bytes", volume] == 5
    assert samples["kvtier_volume_state", (("state", "BreakerOpen"), *volume)] == 1
    assert samples["kvtier_pool_bytes", (("use", "free"),)] == 10
    assert samples["kvtier_sessions", (("role", "worker"),)] == 1
    failed = (("reason", "corrupt"), ("tier", "disk"))
    assert samples["kvtier_tier_reads_failed_total", failed] == 5
    assert samples["kvtier_unregistered_total", (("reason", "why"), ("tier", ""))] == 1
    assert samples["kvtier_evictions_total", ()] == 2
    assert samples["kvtier_condition", (("type", "PoolSmaller"),)] == 1
    assert samples["kvtier_condition", (("type", "PoolMissing"),)] == 0
    assert samples["kvtier_tier_volume_available_bytes", (("tier", "ram"),)] == 40
    assert ("kvtier_tier_volume_available_bytes", (("tier", "far"),)) not in samples
    info = (("policy", "p"), ("policy_namespace", "n"), ("version", "1"))
    assert samples["kvtier_tierd_info", info] == 1
    assert samples["kvtier_live_generation", ()] == 9
    assert samples["kvtier_prompt_tokens_total", ()] == 900
    assert samples["kvtier_loaded_tokens_total", (("tier", "ram"),)] == 300
    assert samples["kvtier_live_refused_total", ()] == 2
    assert samples["kvtier_epoch", ()] == 4


def test_the_token_may_come_in_a_header_that_proxies_keep(tmp_path: Path) -> None:
    """The API server's proxy removes ``Authorization``. A wrong one is not made up for."""
    token = tmp_path / "token"
    token.write_text("t")
    routes = {"/status": lambda: text_response(200, "ok")}
    server = HttpServer("127.0.0.1", 0, routes, module.BearerToken(token))

    def status(*headers: str) -> bytes:
        lines = "".join(f"{each}\r\n" for each in headers)
        return raw(server, f"GET /status HTTP/1.1\r\n{lines}\r\n".encode())[9:12]

    try:
        assert status("KVTier-Authorization: Bearer t") == b"200"
        assert status("kvtier-authorization: bearer t") == b"200"
        assert status("KVTier-Authorization: Bearer x") == b"401"
        assert status("KVTier-Authorization: t") == b"401"
        assert status("Authorization: Bearer x", "KVTier-Authorization: Bearer t") == b"401"
        assert status() == b"401"
    finally:
        server.close()
