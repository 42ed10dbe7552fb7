"""Namespaces and policies that are deleted, recreated or renamed while the controller runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from tests.cluster.status_fixtures import (
    FakeTierdServer,
    StatusNamespace,
    run_story,
    running_controller,
)
from tests.support import controllers
from tests.support.controllers import condition, file_tier, policy, running, settings, until
from tests.support.pods import status_document

from kvtier_operator.controller.children.observe import NAMESPACE_LABEL
from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import (
    CONFIG_MAPS,
    NAMESPACES,
    POLICIES,
    SECRETS,
    VOLUMES,
    ApiError,
)

RunScenario = Callable[[Callable[[StatusNamespace], Awaitable[None]]], None]
EXPORT = file_tier("shared", {"nfs": {"server": "nas.example", "path": "/kv/chat"}})
ALLOWED = {
    "storage": {"createVolumes": True},
    "allowedVolumes": [
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}
    ],
}


@pytest.fixture
def run(full_cluster: Any, full_api: Any, nodes: ModuleType) -> RunScenario:
    """Runs a scenario in a labelled namespace of its own."""
    return lambda scenario: run_story(scenario, full_cluster, full_api, nodes)


async def _is_gone(client: ApiClient, namespace: str) -> bool:
    try:
        await client.get(NAMESPACES, None, namespace)
    except ApiError as error:
        if error.status == 404:
            return True
        raise
    return False


@pytest.mark.parametrize("pause", [0.0, 0.3, 2.0], ids=["at once", "in the middle", "at rest"])
def test_a_namespace_can_be_deleted_while_its_policies_are_reconciled(
    full_cluster: Any, pause: float
) -> None:
    async def scenario() -> None:
        async with connect(full_cluster.kubeconfig, full_cluster.context) as client:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "going")
            async with running(
                client, settings(namespace, **ALLOWED, controller={"resyncSeconds": 2})
            ) as controller:
                for number in range(8):
                    await client.apply(POLICIES, policy(namespace, f"p{number}", tiers=[EXPORT]))
                await asyncio.sleep(pause)
                found = await client.get(NAMESPACES, None, namespace)
                await client.delete(NAMESPACES, None, namespace, uid=found["metadata"]["uid"])
                await until("the namespace is gone", lambda: _is_gone(client, namespace))

                async def forgotten() -> bool:
                    return not controller.enqueuer.index.keys() and not controller.queue.busy

                await until("the controller has forgotten its policies", forgotten)
                assert not controller.cache.problems()

                async def removed() -> bool:
                    return not await client.list(VOLUMES, labels=f"{NAMESPACE_LABEL}={namespace}")

                await until("volumes of its policies are removed", removed)
                # The namespace is made again under the same name, and works.
                again = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
                await client.create(NAMESPACES, None, again)
                await client.apply(POLICIES, policy(namespace, "p1"))

                async def accepted() -> bool:
                    return (
                        condition(await client.get(POLICIES, namespace, "p1"), "Accepted").get(
                            "status"
                        )
                        == "True"
                    )

                await until("a policy there is followed", accepted)
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_renamed_policy_takes_over_the_pods_as_outdated(run: RunScenario) -> None:
    """Renaming creates a policy and deletes the previous one. Running pods do not change."""

    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            first = await where.policy()
            found = await where.until("Attached", "Unknown", "NoPods")
            tierd.document = status_document(generation=1)
            await where.deployment(where.injected(tierd.port, found["status"]["structuralHash"]))
            (pod,) = await where.pods()
            await where.run(pod["metadata"]["name"])
            await where.until("Ready", "True", "InForce")
            await where.token()

            body = {**policy(where.namespace, "renamed"), "spec": first["spec"]}
            await where.client.apply(POLICIES, body)
            await where.client.delete(
                POLICIES, where.namespace, "chat", uid=first["metadata"]["uid"]
            )

            async def renamed() -> Any:
                held = await where.client.get(POLICIES, where.namespace, "renamed")
                return held if condition(held, "UpToDate").get("reason") == "Outdated" else None

            held = await until("the pod is reported as outdated", renamed)
            assert held["status"]["summary"]["pods"] in ("0/1", "1/1")
            (same,) = await where.pods()
            assert same["metadata"]["uid"] == pod["metadata"]["uid"]
            # What the first one's pods mount goes with it; they hold their last values.
            for kind, name in ((CONFIG_MAPS, "chat-live"), (SECRETS, "chat-token")):

                async def collected(kind: Any = kind, name: str = name) -> bool:
                    return name not in {
                        each["metadata"]["name"]
                        for each in await where.client.list(kind, where.namespace)
                    }

                await until(f"{name} is collected", collected)
            names = {
                each["metadata"]["name"]
                for each in await where.client.list(SECRETS, where.namespace)
            }
            assert "renamed-token" in names

    run(scenario)
