"""What the controller keeps of pods without a policy, with real watches."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support import controllers
from tests.support.controllers import until

from kvtier_operator.controller.controller import Controller
from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import PODS, POLICIES, Kind
from kvtier_operator.kube.trim import Outline

ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount")


def pod(namespace: str, name: str, app: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        "spec": {"containers": [{"name": "main", "image": "x", "args": ["--flag"]}]},
    }


def whole(controller: Controller) -> set[str]:
    held = controller.cache.list(PODS)
    return {each["metadata"]["name"] for each in held if not isinstance(each, Outline)}


def test_only_pods_that_a_policy_selects_are_kept_whole(
    kubernetes_cluster: Any,
) -> None:
    async def selected(client: ApiClient, namespace: str, count: int) -> None:
        async def counted() -> bool:
            found = await client.get(POLICIES, namespace, "chat")
            pods = (found.get("status") or {}).get("pods") or {}
            return bool(pods.get("selected") == count)

        await until(f"{count} pods are selected", counted)

    async def scenario() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)
            namespace = await controllers.make_namespace(client, "outlines")
            await client.apply(
                ACCOUNTS,
                {
                    "apiVersion": "v1",
                    "kind": "ServiceAccount",
                    "metadata": {"name": "default", "namespace": namespace},
                },
            )
            for number in range(3):
                await client.create(PODS, namespace, pod(namespace, f"chat-{number}", "chat"))
                await client.create(PODS, namespace, pod(namespace, f"web-{number}", "web"))
            async with controllers.running(client, controllers.settings(namespace)) as controller:
                await controller.cache.wait_synced()
                assert len(controller.cache.list(PODS)) == 6
                assert whole(controller) == set()
                await client.apply(POLICIES, controllers.policy(namespace))
                await selected(client, namespace, 3)
                assert whole(controller) == {"chat-0", "chat-1", "chat-2"}
                label = {"metadata": {"labels": {"app": "chat"}}}
                await client.patch(PODS, namespace, "web-1", label)
                await selected(client, namespace, 4)
                assert whole(controller) == {"chat-0", "chat-1", "chat-2", "web-1"}
            # The policy is there before the pods now.
            async with controllers.running(client, controllers.settings(namespace)) as controller:
                await controller.cache.wait_synced()
                assert whole(controller) == {"chat-0", "chat-1", "chat-2", "web-1"}
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())
