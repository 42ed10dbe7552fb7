"""What both processes have: log lines, health and metrics over HTTP, settings."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest
from tests.support.ports import loopbacks
from tests.support.processes import ended_while_importing

from kvtier import __version__
from kvtier_operator import runtime
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.controller.metrics import PolicyMetrics
from kvtier_operator.kube.resources import CONFIG_MAPS
from kvtier_operator.kube.watcher import REASONS
from kvtier_operator.runtime import RESTART_REASONS, ApiMetrics, new_registry
from kvtier_operator.settings import MonitoringSettings


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_json_with_what_it_is_about_and_what_it_adds(stream: io.StringIO) -> None:
    runtime.configure(runtime.LogFormat.JSON, stream=stream)
    with runtime.about(namespace="n", policy="chat", reconcile=7):
        logging.getLogger("x").warning("took %d s", 3, extra={"reason": "Slow"})
    logging.getLogger("x").info("afterwards")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "x",
        "message": "took 3 s",
        "namespace": "n",
        "policy": "chat",
        "reconcile": 7,
        "reason": "Slow",
    }
    assert "policy" not in second


def test_an_error_is_one_line_with_its_traceback(stream: io.StringIO) -> None:
    runtime.configure(runtime.LogFormat.JSON, stream=stream)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["error"]


def test_debug_lines_are_those_of_the_operator_and_not_of_its_libraries(
    stream: io.StringIO,
) -> None:
    """The Kubernetes client logs the bodies of responses at that level, tokens included."""
    try:
        runtime.configure(runtime.LogFormat.TEXT, runtime.LogLevel.DEBUG, stream)
        logging.getLogger("kubernetes.aio.client.rest").debug("response body: a token")
        logging.getLogger("kopf.objects").debug("an object")
        logging.getLogger("kvtier_operator.kube.queue").debug("ours")
        (line,) = stream.getvalue().splitlines()
        assert line.endswith("ours")
        runtime.configure(runtime.LogFormat.TEXT, runtime.LogLevel.ERROR, stream)
        logging.getLogger("kvtier_operator.kube.queue").warning("a warning")
        logging.getLogger("kopf").warning("a warning")
        logging.getLogger("kvtier").error("an error")
        assert "a warning" not in stream.getvalue()
        assert "an error" in stream.getvalue()
    finally:
        for name in runtime.OWN_LOGGERS:
            logging.getLogger(name).setLevel(logging.NOTSET)


def test_the_context_of_a_log_line_does_not_leak_into_other_tasks(stream: io.StringIO) -> None:
    runtime.configure(runtime.LogFormat.TEXT, stream=stream)

    async def look(policy: str) -> None:
        with runtime.about(policy=policy):
            await asyncio.sleep(0)
            logging.getLogger("x").info("looked")

    async def both() -> None:
        await asyncio.gather(look("a"), look("b"))

    asyncio.run(both())
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == [
        "policy=a",
        "policy=b",
    ]


def test_probes_and_scrapes_arrive_by_ipv4_and_by_ipv6() -> None:
    """By default, as in a pod. Those of a cluster with IPv6 only have no other address."""

    async def scenario() -> None:
        settings = MonitoringSettings(port=0)
        serving = runtime.serve(settings, new_registry(), runtime.Health())
        async with serving as port, aiohttp.ClientSession() as session:
            for host in loopbacks():
                at = f"[{host}]" if ":" in host else host
                async with session.get(f"http://{at}:{port}/healthz") as answer:
                    assert answer.status == 200

    asyncio.run(scenario())


def test_health_and_metrics_are_served_and_say_what_is_wrong() -> None:
    async def scenario() -> None:
        registry, state = new_registry(), runtime.Health()
        calls = ApiMetrics(registry)
        calls.call("get", "Pod", 200, 0.01)
        calls.restart(CONFIG_MAPS, "Expired")
        problem = {"caches": ""}
        state.live("loop", lambda: "")
        state.ready("caches", lambda: problem["caches"])
        async with (
            runtime.serve(MonitoringSettings(host="127.0.0.1", port=0), registry, state) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        ):

            async def ask(path: str) -> tuple[int, str]:
                async with session.get(path) as answer:
                    return answer.status, await answer.text()

            assert await ask("/healthz") == (200, "ok\n")
            assert await ask("/readyz") == (200, "ok\n")
            problem["caches"] = "pods: not listed yet"
            assert await ask("/readyz") == (503, "caches: pods: not listed yet\n")
            assert await ask("/healthz") == (200, "ok\n"), "no reason to restart"
            text = (await ask("/metrics"))[1]
            assert 'kvtier_operator_api_calls_total{code="200",kind="Pod",verb="get"} 1.0' in text
            assert (
                'kvtier_operator_watch_restarts_total{kind="ConfigMap",reason="Expired"} 1.0'
                in text
            )
            assert "_created" not in text

    asyncio.run(scenario())


def test_the_first_error_of_a_call_is_an_increase() -> None:
    registry = new_registry()
    metrics = ApiMetrics(registry)
    metrics.call("apply", "ConfigMap", 200, 0.01)
    metrics.restart(CONFIG_MAPS, "Start")
    value = registry.get_sample_value
    labels = {"verb": "apply", "kind": "ConfigMap", "code": "403"}
    restarts = {"kind": "ConfigMap", "reason": "Stopped"}
    assert value("kvtier_operator_api_calls_total", labels) == 0
    assert value("kvtier_operator_watch_restarts_total", restarts) == 0
    metrics.call("apply", "ConfigMap", 403, 0.01)
    metrics.restart(CONFIG_MAPS, "Stopped")
    assert value("kvtier_operator_api_calls_total", labels) == 1
    assert value("kvtier_operator_watch_restarts_total", restarts) == 1
    assert set(REASONS.values()) <= set(RESTART_REASONS)


def test_policies_are_counted_by_condition_and_their_pods_while_the_policy_exists() -> None:
    condition = {"type": "Ready", "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    statuses = {
        ("n", name): PolicyStatus.model_validate(
            {
                "conditions": [{**condition, "status": verdict}],
                "pods": {"selected": 3, "attached": 2},
            }
        )
        for name, verdict in (("a", "True"), ("b", "True"), ("c", "False"))
    }
    registry = new_registry()
    PolicyMetrics(registry, lambda: 4, statuses.items)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("kvtier_operator_policies", condition="Ready", status="True") == 2
    assert value("kvtier_operator_policies", condition="Ready", status="False") == 1
    labels = {"policy_namespace": "n", "policy": "a"}
    assert value("kvtier_operator_policy_attached_pods", **labels) == 2
    assert value("kvtier_operator_policy_condition", **labels, condition="Ready") == 1
    assert (
        value("kvtier_operator_policy_condition", **(labels | {"policy": "c"}), condition="Ready")
        == 0
    )
    assert value("kvtier_operator_policies", condition="Attached", status="False") == 0
    assert value("kvtier_operator_queue_depth") == 4
    del statuses["n", "a"]
    assert value("kvtier_operator_policies", condition="Ready", status="True") == 1
    assert value("kvtier_operator_policy_attached_pods", **labels) is None


def test_a_sigterm_during_the_imports_ends_the_command() -> None:
    """Without a handler the first process of a container ignores SIGTERM, and its pod stays for its
    grace period.
    """
    assert ended_while_importing("kvtier_operator.entry", "kvtier_operator.main") == 0


def test_the_command_is_the_one_that_can_be_ended_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_operator.entry", "version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == __version__
