"""The exact messages of conditions about pods, on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from tests.cluster.status_fixtures import (
    QUICK,
    FakeTierdServer,
    StatusNamespace,
    run_story,
    running_controller,
)
from tests.support.controllers import condition, until
from tests.support.pods import status_document, tier_document

from kvtier_operator.kube.resources import POLICIES

RunScenario = Callable[[Callable[[StatusNamespace], Awaitable[None]]], None]
Sentence = tuple[str, str, str]
"""Status, reason, message."""

NO_POD = "The selector matches no running pod."
IN_FORCE = "The policy is in force."
RECOMPUTED = "Engines recompute what the tier cannot serve."
LATER = "the kubelet updates mounted ConfigMaps within about two minutes."
ENGINE_OFF = {"conditions": [{"type": "EngineGroups", "message": "group 3 has block size 7"}]}


@pytest.fixture
def run(full_cluster: Any, full_api: Any, nodes: ModuleType) -> RunScenario:
    """Runs a scenario in a labelled namespace of its own."""
    return lambda scenario: run_story(scenario, full_cluster, full_api, nodes)


async def expect_messages(where: StatusNamespace, expected: Mapping[str, Sentence]) -> None:
    """Waits until the conditions are these; the failure shows those that are not."""
    wrong: dict[str, Any] = {}

    async def all_of_them() -> bool:
        found = await where.client.get(POLICIES, where.namespace, "chat")
        held = {kind: tuple(condition(found, kind).values()) for kind in expected}
        wrong.clear()
        wrong.update({kind: held[kind] for kind in expected if held[kind] != expected[kind]})
        return not wrong

    try:
        await until("every condition is as expected", all_of_them, 40)
    except AssertionError as error:
        raise AssertionError(f"{error}; these are {wrong}") from None


def test_messages_from_no_pod_to_unreachable_pods(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            await where.policy()
            await expect_messages(
                where,
                {
                    "Ready": ("True", "NoPods", f"{IN_FORCE} Attached: {NO_POD}"),
                    "Attached": ("Unknown", "NoPods", NO_POD),
                    "UpToDate": ("Unknown", "NoPods", "No pod has tiers."),
                    "Tuned": ("Unknown", "NoPods", "No pod is attached."),
                    "EnginesCompatible": ("Unknown", "NoPods", NO_POD),
                    "TiersHealthy": ("Unknown", "NoPods", NO_POD),
                },
            )
            found = await where.client.get(POLICIES, where.namespace, "chat")
            written = found["status"]["structuralHash"]
            tierd.document = status_document(generation=1)
            await where.deployment(where.injected(tierd.port, written), replicas=2)
            one, two = (pod["metadata"]["name"] for pod in await where.pods(2))
            starting = f"0 of 2 pods attached; {one}, {two}: container vllm is starting."
            await expect_messages(
                where,
                {
                    "Ready": ("True", "Starting", f"{IN_FORCE} Attached: {starting}"),
                    "Attached": ("False", "Starting", starting),
                    "EnginesCompatible": ("Unknown", "NotReported", "No engine has attached yet."),
                    "TiersHealthy": ("Unknown", "NotReported", "No pod reports the state of ram."),
                },
            )
            await where.run(one)
            half = f"1 of 2 pods attached; starting: {two}."
            await expect_messages(
                where,
                {
                    "Ready": ("True", "Starting", f"{IN_FORCE} {half}"),
                    "Attached": ("True", "Starting", half),
                    "Tuned": (
                        "True",
                        "Applied",
                        "1 of 1 attached pod has applied live generation 1.",
                    ),
                },
            )
            await where.run(two)
            await expect_messages(
                where,
                {
                    "Ready": ("True", "InForce", IN_FORCE),
                    "Attached": ("True", "Attached", "2 of 2 pods attached."),
                    "UpToDate": (
                        "True",
                        "Current",
                        f"Every pod with tiers has structure {written}.",
                    ),
                    "Tuned": (
                        "True",
                        "Applied",
                        "2 of 2 attached pods have applied live generation 1.",
                    ),
                    "EnginesCompatible": (
                        "True",
                        "Compatible",
                        "Every engine that attached is compatible.",
                    ),
                    "TiersHealthy": (
                        "True",
                        "Healthy",
                        "Every tier of every reporting pod is healthy.",
                    ),
                },
            )
            await where.policy(minLoadTokens=640)
            waiting = f"0 of 2 attached pods have applied live generation 2; {LATER}"
            await expect_messages(
                where,
                {
                    "Ready": ("True", "Applying", f"{IN_FORCE} Tuned: {waiting}"),
                    "Tuned": ("False", "Applying", waiting),
                },
            )
            await where.policy(minLoadTokens=640, chunkTokens=512)
            found = await where.until("UpToDate", "False", "Outdated")
            newer = found["status"]["structuralHash"]
            assert newer != written
            late = (
                f"2 of 2 pods have an older structure than {newer}: {one}, {two}. "
                "Replace the pods to update them."
            )
            await expect_messages(
                where,
                {
                    "Ready": ("True", "Outdated", f"{IN_FORCE} UpToDate: {late}"),
                    "UpToDate": ("False", "Outdated", late),
                },
            )
            await tierd.stop()
            unreachable = f"0 of 2 pods attached; {one}, {two} cannot be polled: connection failed."
            await expect_messages(
                where,
                {
                    "Ready": ("True", "Unreachable", f"{IN_FORCE} Attached: {unreachable}"),
                    "Attached": ("Unknown", "Unreachable", unreachable),
                },
            )

    run(scenario)


def test_messages_of_a_pod_are_reported_with_its_name(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            await where.policy(attach={"startTimeoutSeconds": 10})
            found = await where.until("Attached", "Unknown", "NoPods")
            await where.deployment(where.injected(tierd.port, found["status"]["structuralHash"]))
            (pod,) = await where.pods()
            name = pod["metadata"]["name"]
            await where.run(name)
            await expect_messages(where, {"Ready": ("True", "InForce", IN_FORCE)})

            async def reports(
                kind: str, reason: str, message: str, *tiers: Any, **more: Any
            ) -> None:
                tierd.document = status_document(*tiers, **{"generation": 1, **more})
                ready = ("True", reason, f"{IN_FORCE} {kind}: {message}")
                await expect_messages(where, {kind: ("False", reason, message), "Ready": ready})

            unhealthy = f"ram is Degraded in {name}: no space left. {RECOMPUTED}"
            await reports(
                "TiersHealthy",
                "Degraded",
                unhealthy,
                tier_document("ram", "Degraded", lastError="no space left"),
            )
            unhealthy = f"ram is BreakerOpen in {name}. {RECOMPUTED}"
            await reports(
                "TiersHealthy", "BreakerOpen", unhealthy, tier_document("ram", "BreakerOpen")
            )
            for kind in ("PoolMissing", "TierNotServed"):
                reported = [{"type": kind, "message": "no space for 1 GiB"}]
                await reports(
                    "TiersHealthy", kind, f"{name}: no space for 1 GiB", conditions=reported
                )
            off = f"{name}: group 3 has block size 7"
            await reports("EnginesCompatible", "EngineUnsupported", off, **ENGINE_OFF)
            rejected = f"{name} rejected live values: ram.loadWeight: 0"
            await reports(
                "Tuned",
                "LiveValuesRefused",
                rejected,
                liveRefusals=["ram.loadWeight: 0"],
            )
            not_attached = (
                f"0 of 1 pod attached; {name}: tierd is running and vllm is ready, but no engine "
                "process has attached: the plugin was not loaded, or this vLLM version is not "
                "supported; search the engine's log for kvtier."
            )
            await reports("Attached", "NotAttached", not_attached, sessions="none")

    run(scenario)


def test_the_first_hits_are_in_the_columns_before_the_next_period(
    full_cluster: Any, full_api: Any, nodes: ModuleType
) -> None:
    """With the default period of five minutes."""

    async def scenario(where: StatusNamespace) -> None:
        sections = {"controller": {**QUICK, "statusBytesSeconds": 300}}
        async with FakeTierdServer() as tierd, running_controller(where, sections):
            await where.policy()
            found = await where.until("Attached", "Unknown", "NoPods")
            tierd.document = status_document(
                tier_document("ram", hitTokens=0), generation=1, promptTokens=0
            )
            await where.deployment(where.injected(tierd.port, found["status"]["structuralHash"]))
            (pod,) = await where.pods()
            await where.run(pod["metadata"]["name"])
            await where.until("Ready", "True", "InForce")
            assert (await where.columns())["Hit%"] is None
            tierd.document = status_document(
                tier_document("ram", hitTokens=350), generation=1, promptTokens=1000
            )

            async def shown() -> bool:
                return bool((await where.columns())["Hit%"] == 35)

            await until("hits are shown", shown)
            # The end of the hits is written after five minutes.
            tierd.document = status_document(
                tier_document("ram", hitTokens=0), generation=1, promptTokens=0
            )
            await asyncio.sleep(3 * QUICK["pollSeconds"])
            assert (await where.columns())["Hit%"] == 35

    run_story(scenario, full_cluster, full_api, nodes)
