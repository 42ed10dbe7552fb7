"""``kvtier-operator controller`` as a process: health, shutdown, and recovery from SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.controller_process import STOP_SECONDS, Process
from tests.support import controllers
from tests.support.controllers import belongings, file_tier, policy, until

from kvtier_operator.kube.client import connect
from kvtier_operator.kube.resources import POLICIES

EXPORT = file_tier("shared", {"nfs": {"server": "nas.example", "path": "/kv/chat"}})
POLICY_COUNT = 6


def test_the_command_reconciles_policies_serves_health_and_stops_within_seconds(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "process")
            await client.apply(POLICIES, policy(namespace))
            running = Process(kubernetes_cluster, tmp_path, namespace)
            running.start()
            try:

                async def reported() -> bool:
                    found = await client.get(POLICIES, namespace, "chat")
                    return (found.get("status") or {}).get("observedGeneration") == 1

                await until("the policy has a status", reported)
                assert running.ask("/healthz") == (200, "ok\n")
                assert running.ask("/readyz") == (200, "ok\n")
                metrics = running.ask("/metrics")[1]
                for line in (
                    'kvtier_operator_policies{condition="Accepted",status="True"} 1.0',
                    'kvtier_operator_api_calls_total{code="201",kind="ConfigMap",verb="apply"} 1.0',
                    'kvtier_operator_watch_restarts_total{kind="KVTierPolicy",reason="Start"} 1.0',
                    "kvtier_operator_reconcile_duration_seconds_count",
                    "kvtier_operator_queue_depth",
                    "kvtier_operator_certificate_expiry_timestamp_seconds",
                    "process_resident_memory_bytes",
                    'kvtier_operator_policy_selected_pods{policy="chat",policy_namespace="'
                    + namespace
                    + '"} 0.0',
                ):
                    assert line in metrics
                applied = next(
                    line
                    for line in running.lines()
                    if line["message"].startswith("applied ConfigMap")
                )
                assert (applied["policy"], applied["namespace"], applied["level"]) == (
                    "chat",
                    namespace,
                    "info",
                )
                assert applied["reconcile"] >= 1
                began = time.monotonic()
                assert running.end(signal.SIGTERM) == 0
                assert time.monotonic() - began < STOP_SECONDS
                assert running.lines()[-1]["message"] == "stopped"
            finally:
                if running.process is not None and running.process.poll() is None:
                    running.end()
                await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_controller_that_is_killed_repeatedly_reaches_the_same_objects(
    kubernetes_cluster: Any, tmp_path: Path
) -> None:
    """The kills happen at any point of start, listing, planning and applying."""
    seed = int(os.environ.get("KVTIER_TEST_SEED", "0")) or random.randrange(1, 1 << 30)
    chance = random.Random(seed)

    async def life(kills: int, home: Path) -> dict[str, Any]:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "killed")
            running = Process(kubernetes_cluster, home, namespace)
            names = [f"p{number}" for number in range(POLICY_COUNT)]
            try:
                for name in names:
                    await client.apply(POLICIES, policy(namespace, name, tiers=[EXPORT]))
                for _ in range(kills):
                    running.start()
                    await asyncio.sleep(0.7 + 1.3 * chance.random())
                    running.end()
                for name in names:
                    body = policy(
                        namespace,
                        name,
                        tiers=[EXPORT],
                        minLoadTokens=99,
                        attach={"mode": "ConfigMapOnly"},
                    )
                    await client.apply(POLICIES, body)
                for _ in range(kills):
                    running.start()
                    await asyncio.sleep(0.7 + 1.3 * chance.random())
                    running.end()
                running.start()

                async def done() -> bool:
                    status, metrics = await asyncio.to_thread(running.ask, "/metrics")
                    looked = "kvtier_operator_reconcile_duration_seconds_count 0.0" not in metrics
                    at_rest = (
                        status == 200 and "kvtier_operator_queue_depth 0.0" in metrics and looked
                    )
                    return at_rest and all(
                        (each.get("status") or {}).get("observedGeneration") == 2
                        for each in await client.list(POLICIES, namespace)
                    )

                await until("every policy is reported about", done)
                assert running.end(signal.SIGTERM) == 0
                return await belongings(client, namespace)
            finally:
                if running.process is not None and running.process.poll() is None:
                    running.end()
                await controllers.drop_namespace(client, namespace)

    def without_counts(found: dict[str, Any]) -> dict[str, Any]:
        """Undisturbed, the first generation may or may not have been seen before the change."""
        text = json.dumps(found)
        for number in ("1", "2"):
            text = text.replace(f'\\"generation\\": {number}', '\\"generation\\": N')
            text = text.replace(f'"liveGeneration": {number}', '"liveGeneration": 0')
        document: dict[str, Any] = json.loads(text)
        return document

    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    expected = asyncio.run(life(0, tmp_path / "undisturbed"))
    found = asyncio.run(life(3, tmp_path / "killed"))
    assert without_counts(found) == without_counts(expected), f"KVTIER_TEST_SEED={seed}"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["version"], 0, "0."),
        (["settings", "--settings", "none.yaml"], 0, "createVolumes: false"),
        (["controller", "--settings", "broken.yaml"], 2, "unknwon"),
        (["controller", "--settings", "none.yaml", "--kubeconfig", "missing"], 2, "missing"),
        (["controller", "--settings", "none.yaml"], 2, "KUBERNETES_SERVICE_HOST"),
    ],
    ids=["version", "settings", "bad settings", "no kubeconfig", "outside of a cluster"],
)
def test_the_command_reports_errors_and_its_exit(
    tmp_path: Path, arguments: list[str], status: int, text: str
) -> None:
    (tmp_path / "broken.yaml").write_text("unknwon: 1\n")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_operator.main", *arguments],
        cwd=tmp_path,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr
