"""The status of a policy on a real API server, in some tests with a real tierd."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cluster.status_fixtures import (
    FakeTierdServer,
    StatusNamespace,
    run_story,
    running_controller,
    skipped,
)
from tests.support.controllers import condition, until
from tests.support.pods import status_document, tier_document

from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, environment
from kvtier_operator.kube.resources import POLICIES

RunScenario = Callable[[Callable[[StatusNamespace], Awaitable[None]]], None]
SHORT = {"attach": {"startTimeoutSeconds": 10}}


@pytest.fixture
def run(full_cluster: Any, full_api: Any, nodes: ModuleType) -> RunScenario:
    """Runs a scenario in a labelled namespace of its own."""
    return lambda scenario: run_story(scenario, full_cluster, full_api, nodes)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[TierdTestbed]:
    """A topology for a real tierd."""
    found = TierdTestbed(tmp_path, TierdOptions(file_bytes=64 << 20))
    yield found
    found.close()


def start_tierd(case: TierdTestbed, token: str) -> subprocess.Popen[bytes]:
    """A real tierd that wants this token."""
    file = case.directory / "token"
    file.write_text(token)
    command = [sys.executable, "-m", "kvtier.tierd", "--topology", str(case.topology_directory)]
    return subprocess.Popen(
        [*command, "--token-file", str(file)], env=environment(), stdin=subprocess.DEVNULL
    )


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(30)


async def started(case: TierdTestbed) -> int:
    """The port of its HTTP."""

    async def serves() -> int:
        try:
            return int(json.loads((case.run_directory / "http.json").read_text())["port"])
        except (OSError, ValueError):
            return 0

    return int(await until("tierd serves", serves))


def test_a_real_tierd_with_an_engine_is_attached_and_its_failures_are_reported(
    run: RunScenario, case: TierdTestbed
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        volume = {"hostPath": {"path": "/mnt/disk"}}
        disk = {
            "name": "disk",
            "fileSystem": {"capacity": "64Mi", "sharing": "Node", "volume": volume},
        }
        async with running_controller(
            where, {"allowedVolumes": [{"namespaces": ["*"], "hostPath": "/mnt"}]}
        ):
            await where.policy(tiers=[disk], **SHORT)
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            case.change(content_hash=written)
            tierd = start_tierd(case, await where.token())
            try:
                engine = case.engine_process()
                await where.deployment(where.injected(await started(case), written))
                (pod,) = await where.pods()
                await where.until("Attached", "False", "Starting")
                await where.run(pod["metadata"]["name"])
                found = await where.until("Ready", "True", "InForce")
                assert found["status"]["pods"] == {
                    "selected": 1, "attached": 1, "current": 1,
                    "outdated": 0, "skipped": 0, "tuned": 1,
                }  # fmt: skip
                tiers = {tier["name"]: tier for tier in found["status"]["tiers"]}
                assert (tiers["ram"]["state"], tiers["ram"]["capacityBytes"]) == (
                    "Healthy",
                    4 << 20,
                )
                assert tiers["disk"]["state"] == "Healthy"
                columns = await where.columns(wide=True)
                expected = {
                    "Ready": "True", "Reason": "InForce", "Pods": "1/1",
                    "Tiers": "ram,disk", "Live": 1,
                }  # fmt: skip
                assert {name: columns[name] for name in expected} == expected
                assert columns["Structural"] == written

                # The engine stores and loads, and reports the source of its prompt tokens.
                async def hits() -> bool:
                    return ((await where.columns())["Hit%"] or 0) > 0

                await until("hits are seen", hits)

                # A live change is not applied before the kubelet passes it on, and then it is.
                await where.policy(tiers=[disk], minLoadTokens=640, **SHORT)
                found = await where.until("Tuned", "False", "Applying")
                assert condition(found, "Ready")["reason"] == "Applying"
                case.retune(case.live.model_copy(update={"generation": 2}))
                await where.until("Tuned", "True", "Applied")

                # The engine exits while its container is ready: injected and not attached.
                await asyncio.to_thread(engine.stop)
                await where.until("Attached", "False", "NotAttached")
                assert {event["type"] for event in await where.events("NotAttached")} == {"Warning"}

                # Another version of the connector.
                case.engine(protocol="0.0.1/1")
                found = await where.until("EnginesCompatible", "False", "SessionsRefused")
                assert "a version mismatch" in condition(found, "EnginesCompatible")["message"]

                # Without an answer the state is unknown, which is not the same as not attached.
                end(tierd)
                found = await where.until("Attached", "Unknown", "Unreachable")
                assert "connection failed" in condition(found, "Attached")["message"]
            finally:
                end(tierd)

    run(scenario)


def test_skipped_and_missed_pods_are_listed_with_their_reasons(
    full_cluster: Any, full_api: Any, nodes: ModuleType
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        await where.policy()
        await where.bare(
            "configured", **skipped("AlreadyConfigured", "the command sets --kv-transfer-config")
        )
        await where.bare("missed")
        async with running_controller(where):
            found = await where.until("Attached", "False", "AlreadyConfigured")
            listed = {
                pod["name"]: (pod["reason"], pod["message"])
                for pod in found["status"]["skippedPods"]
            }
            assert listed["configured"] == (
                "AlreadyConfigured",
                "the command sets --kv-transfer-config",
            )
            assert listed["missed"][0] == "Missed"
            assert "do not match the webhook's namespaceSelector" in listed["missed"][1]
            assert found["status"]["pods"]["skipped"] == 2
            columns = await where.columns()
            assert (columns["Ready"], columns["Reason"], columns["Pods"]) == (
                "True",
                "AlreadyConfigured",
                "0/2",
            )
            about = {event["involvedObject"]["name"] for event in await where.events("Skipped")}
            assert about <= {"configured", "missed"}

    run_story(scenario, full_cluster, full_api, nodes, labels={})


def test_tiers_of_several_pods_are_combined_and_a_hostile_pod_does_no_harm(
    run: RunScenario,
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where) as controller:
            await where.policy(**SHORT)
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            tier = tier_document("ram", usedBytes=512 << 20, hitTokens=350)
            tierd.document = status_document(tier, generation=1, promptTokens=1000)
            await where.deployment(where.injected(tierd.port, written), replicas=3)
            for pod in await where.pods(3):
                await where.run(pod["metadata"]["name"])
            await where.until("Ready", "True", "InForce")

            async def counted() -> Any:
                status = (await where.client.get(POLICIES, where.namespace, "chat"))["status"]
                ram = status["tiers"][0]
                return ram if ram["reportingPods"] == 3 and ram.get("hitTokensPercent") else None

            ram = await until("three pods report", counted)
            assert (ram["usedBytes"], ram["capacityBytes"], ram["hitTokensPercent"]) == (
                3 * (512 << 20),
                3 << 30,
                35,
            )
            columns = await where.columns()
            assert (columns["Pods"], columns["Hit%"]) == ("3/3", 35)
            assert tierd.tokens == {f"Bearer {await where.token()}"}

            tierd.document = status_document(
                tier_document("ram", "BreakerOpen", lastError="input/output error"), generation=1
            )
            found = await where.until("Ready", "True", "BreakerOpen")
            assert "input/output error" in condition(found, "TiersHealthy")["message"]
            assert (await where.columns(wide=True))["Tiers"] == "ram(BreakerOpen)"
            await where.events("TierBreakerOpen")
            tierd.document = status_document(tier_document("ram", "Degraded"), generation=1)
            await where.until("TiersHealthy", "False", "Degraded")
            tierd.document = status_document(
                generation=1,
                conditions=[{"type": "EngineOff", "message": "group 3 has block size 7"}],
            )
            await where.until("EnginesCompatible", "False", "EngineUnsupported")
            tierd.document = status_document(generation=1, liveRefusals=["ram.loadWeight: 0"])
            await where.until("Tuned", "False", "LiveValuesRefused")
            for kind in ("PoolMissing", "TierNotServed"):
                tierd.document = status_document(
                    generation=1, conditions=[{"type": kind, "message": "no space"}]
                )
                await where.until("TiersHealthy", "False", kind)

            # Whatever it answers, the status stays valid and the other pods' numbers count.
            most = (1 << 63) - 1
            hostile = tier_document("ram", usedBytes=most, capacityBytes=most, hitTokens=most)
            tierd.document = status_document(
                hostile, generation=1, promptTokens=1, contentHash="<script>" * 9999
            )
            found = await where.until("Ready", "True", "Outdated")
            assert found["status"]["tiers"][0]["usedBytes"] <= most
            assert controller.queue.failures((where.namespace, "chat")) == 0
            tierd.body = b"[" * 200_000
            found = await where.until("Attached", "Unknown", "Unreachable")
            assert "malformed answer: not JSON" in condition(found, "Attached")["message"]

            async def none() -> bool:
                return (await where.columns())["Pods"] == "0/3"

            await until("no pod counts as attached", none)

    run(scenario)


def test_a_crashing_engine_and_a_crashing_sidecar_have_different_reasons(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            await where.policy(**SHORT)
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            tierd.document = status_document(generation=1, sessions="none")
            await where.deployment(where.injected(tierd.port, written))
            (pod,) = await where.pods()
            name = pod["metadata"]["name"]
            await where.run(name)
            now = where.nodes.now()
            ended = {
                "terminated": {
                    "exitCode": 1,
                    "reason": "Error",
                    "startedAt": now,
                    "finishedAt": now,
                }
            }
            crash = where.nodes.container_state(
                "vllm", {"waiting": {"reason": "CrashLoopBackOff"}}, restarts=3
            )
            where.nodes.set_status(
                where.api,
                where.namespace,
                name,
                {"containerStatuses": [{**crash, "lastState": ended}]},
            )
            found = await where.until("Attached", "False", "EngineCrashed")
            assert (
                "vllm keeps crashing: it exits with code 1"
                in condition(found, "Attached")["message"]
            )
            await where.events("EngineCrashed")
            await where.run(name)
            await tierd.stop()
            sidecar = where.nodes.container_state(
                "kvtier-tierd", {"waiting": {"reason": "CrashLoopBackOff"}}, restarts=3
            )
            payload = where.nodes.container_state("kvtier-payload", ended)
            where.nodes.set_status(
                where.api, where.namespace, name, {"initContainerStatuses": [payload, sidecar]}
            )
            await where.until("Attached", "False", "TierdFailed")
            await where.events("TierdFailed")

    run(scenario)


def test_of_two_policies_for_the_same_pods_the_newer_is_conflicted(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        older = await where.policy()
        body = {**older, "metadata": {"name": "older", "namespace": where.namespace}}
        await where.bare("pod", **skipped("AlreadyConfigured", "x"))
        async with running_controller(where):
            await where.until("Attached", "False", "AlreadyConfigured")
            await where.client.delete(POLICIES, where.namespace, "chat", uid=where.uid)
            await where.client.apply(
                POLICIES, {key: body[key] for key in ("apiVersion", "kind", "metadata", "spec")}
            )

            # Made in another second, so that one of them is the older one.
            await asyncio.sleep(1.1)
            await where.policy()
            found = await where.until("Ready", "True", "Conflicted")
            assert (
                "1 pod that the selector matches is governed by an older policy: older."
                in condition(found, "Attached")["message"]
            )
            assert (await where.columns())["Pods"] == "0/0"

    run(scenario)
