"""``kvtier top``: tiers of running engines, from their own reports."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support import pods
from tests.unit.commands.test_why import Answers, Forbidding, installed

from kvtier.cli.cluster import top
from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.reports import failed, parsed
from kvtier.cli.cluster.top import TopView, read_cluster
from kvtier.cli.inputs import CommandError
from kvtier.cli.main import main
from kvtier.tenants import tenant_id
from kvtier_operator.controller.pods.reports import NO_REPORT, LastReport
from kvtier_operator.kube.resources import PODS, SECRETS

TIERS = [
    pods.tier_document("ram", usedBytes=1 << 29, hitTokens=40, lastError=""),
    pods.tier_document("disk", "BreakerOpen", capacityBytes=10 << 30, lastError="EIO: read"),
]
DOCUMENT = pods.status_document(*TIERS, promptTokens=100)


def view(cluster: Forbidding, answer: LastReport, policy: str | None = None) -> TopView:
    reader = ClusterReader(cluster, "serving")
    return asyncio.run(read_cluster(reader, Answers(answer), policy))


def report() -> LastReport:
    return parsed(json.dumps(DOCUMENT).encode())


def test_each_engine_has_a_line_for_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = installed(
        (PODS, pods.running(pods.injected_pod("a-with-a-name-that-is-rather-long" * 2))),
        (PODS, pods.running(pods.bare_pod("without"))),
    )
    found = view(cluster, report())
    assert [row.state for row in found.rows] == ["Attached"]
    top.show(found)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[1]) > 100, "a pipe is not cut to 80 columns"
    assert lines[1].split()[3:] == [
        "Attached",
        "ram",
        "Healthy",
        "512",
        "MiB",
        "1.0",
        "GiB",
        "50%",
        "40%",
    ]
    assert lines[2].split() == ["disk", "BreakerOpen", "0", "B", "10.0", "GiB", "0%", "-"]
    assert lines[3].endswith(": tier disk: EIO: read")


def test_json_has_bytes_and_no_rounded_values() -> None:
    found = view(installed((PODS, pods.running(pods.injected_pod("a")))), report())
    (engine,) = top.to_json(found)["engines"]
    assert engine["policy"] == "chat"
    assert engine["tiers"][0] == {
        "name": "ram",
        "state": "Healthy",
        "usedBytes": 1 << 29,
        "capacityBytes": 1 << 30,
        "hitTokens": 40,
        "lastError": None,
        "tenants": 0,
        "tenantShareBytes": None,
        "largestTenants": [],
    }


POLICY_TENANT = tenant_id("serving/chat", "Policy").hex()
SALTED = tenant_id("salt-of-a-customer", "CacheSalt").hex()


def tenants_view() -> TopView:
    """An engine whose RAM is shared by seven tenants, one of which is the policy itself."""
    others = [f"{number:016x}" for number in range(1, 6)]
    held = [(SALTED, 300 << 20), (POLICY_TENANT, 200 << 20), *((each, 1 << 20) for each in others)]
    document = pods.status_document(
        pods.tier_document(
            tenants=40,
            tenantShareBytes=256 << 20,
            largestTenants=[{"tenant": each, "usedBytes": used} for each, used in held],
        ),
        pods.tier_document("disk", tenants=1, largestTenants=[{"tenant": SALTED, "usedBytes": 5}]),
    )
    cluster = installed((PODS, pods.running(pods.injected_pod("a"))))
    return view(cluster, parsed(json.dumps(document).encode()))


def test_the_accounts_of_tenants_are_shown_by_tier(capsys: pytest.CaptureFixture[str]) -> None:
    top.show(tenants_view())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(number for number, line in enumerate(lines) if "TENANT" in line)
    rows = lines[start + 1 :]
    assert rows[0] == ["a", "ram", SALTED[:8], "300", "MiB", "256", "MiB", "117%"]
    assert rows[1] == ["a", "ram", "policy", "chat", "200", "MiB", "256", "MiB", "78%"]
    assert rows[top.MAX_TENANTS] == ["a", "ram", "and", "35", "more"]
    assert rows[top.MAX_TENANTS + 1] == ["a", "disk", SALTED[:8], "5", "B", "-", "-"]


def test_the_accounts_of_tenants_are_in_the_json() -> None:
    (engine,) = top.to_json(tenants_view())["engines"]
    ram, disk = engine["tiers"]
    assert (ram["tenants"], ram["tenantShareBytes"]) == (40, 256 << 20)
    assert ram["largestTenants"][:2] == [
        {"tenant": SALTED, "policy": None, "usedBytes": 300 << 20},
        {"tenant": POLICY_TENANT, "policy": "chat", "usedBytes": 200 << 20},
    ]
    assert len(ram["largestTenants"]) == 7
    assert disk["tenantShareBytes"] is None


def test_tenants_of_a_report_are_read_as_untrusted_data() -> None:
    """Only digests of the right form, and at most sixteen of them."""
    bad = [
        {"tenant": "[red]x[/red]", "usedBytes": 1},
        {"tenant": SALTED.upper(), "usedBytes": 1},
        {"tenant": 7, "usedBytes": 1},
        {"tenant": SALTED, "usedBytes": -1},
    ]
    many = [{"tenant": f"{number:016x}", "usedBytes": number} for number in range(100)]
    tier = pods.tier_document(tenants="x", tenantShareBytes=-5, largestTenants=[*bad, *many])
    found = parsed(json.dumps(pods.status_document(tier)).encode()).report
    assert found is not None
    (read,) = found.tiers
    assert (read.tenants, read.tenant_share_bytes) == (0, 0)
    assert read.largest_tenants[0] == (SALTED, 0)
    assert len(read.largest_tenants) == 16 - 3
    (none,) = parsed(
        json.dumps(pods.status_document(pods.tier_document(largestTenants="x"))).encode()
    ).report.tiers  # type: ignore[union-attr]
    assert none.largest_tenants == ()


def test_an_engine_that_does_not_answer_stays_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = view(installed((PODS, pods.running(pods.injected_pod("a")))), failed("HTTP 503: gone"))
    top.show(found)
    out = capsys.readouterr().out
    assert "Unreachable" in out
    assert "a: HTTP 503: gone" in out


def test_without_the_right_to_the_token_it_is_named() -> None:
    cluster = installed((PODS, pods.running(pods.injected_pod("a"))))
    cluster.forbidden = frozenset({SECRETS})
    (missing,) = view(cluster, NO_REPORT).not_checked
    assert missing.endswith("the right to get secrets in namespace serving is missing")


def test_one_policy_and_an_unknown_one() -> None:
    cluster = installed((PODS, pods.running(pods.injected_pod("a"))))
    assert len(view(cluster, report(), "chat").rows) == 1
    with pytest.raises(CommandError, match="KVTierPolicy other does not exist"):
        view(cluster, report(), "other")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (500 << 30, "500 GiB")],
)
def test_sizes(number: int, text: str) -> None:
    assert top.size(number) == text


class StatusServer(BaseHTTPRequestHandler):
    """``/status`` of a tierd with the token ``t``."""

    body: ClassVar[bytes] = json.dumps(DOCUMENT).encode()

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer t"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if allowed:
            self.wfile.write(self.body)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StatusServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_engine_without_a_cluster(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("t\n")
    assert main(["top", "--url", url, "--token-file", str(token), "-o", "json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert (engine["name"], engine["state"]) == (url, "Attached")
    assert main(["top", "--url", url, "--once"]) == 0
    assert "HTTP 401: give the token with --token-file" in capsys.readouterr().out


@pytest.mark.parametrize("bad", ["file:///etc/passwd", "127.0.0.1:9400", "http://"])
def test_only_web_addresses_are_read(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", bad]) == 2
    assert "must have the form http://HOST:PORT" in capsys.readouterr().err


def test_a_body_that_is_no_report(url: str, tmp_path: Path) -> None:
    StatusServer.body = b"[]"
    try:
        found = asyncio.run(top.read_urls([url], "t"))
    finally:
        StatusServer.body = json.dumps(DOCUMENT).encode()
    assert found.rows[0].message == "malformed answer: not a JSON object"


def test_a_live_view_survives_a_failed_refresh_and_ends_after_several() -> None:
    reads = 0

    async def read() -> TopView:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise CommandError("gone")
        return TopView(())

    with pytest.raises(CommandError, match="gone"):
        asyncio.run(top.follow(read, 0.0))
    assert reads == 1 + top.MAX_REFRESH_FAILURES
