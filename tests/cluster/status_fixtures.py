"""Fixtures for tests of a policy's status: real workloads on a fake node. The tests set the state
of pods as a kubelet would; tierd is a small HTTP server, or the real one on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self

from aiohttp import web
from tests.support import controllers
from tests.support.controllers import condition, until
from tests.support.pods import bare_pod, injected_pod, status_document

from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    EVENTS,
    PODS,
    POLICIES,
    SECRETS,
    Kind,
    Object,
)

QUICK = {"pollSeconds": 0.3, "pollTimeoutSeconds": 2, "statusBytesSeconds": 1}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


class FakeTierdServer:
    """Answers ``/status`` with ``document``, or with ``body`` if it is set. Records the tokens."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = status_document(generation=1)
        self.body: bytes | None = None
        self.tokens: set[str] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_get("/status", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops the server."""
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization", ""))
        if self.body is not None:
            return web.Response(body=self.body)
        return web.json_response(self.document)


@dataclass
class StatusNamespace:
    """A namespace with policy ``chat`` and a fake node. ``api`` and ``nodes`` set pod states."""

    client: ApiClient
    api: Any
    nodes: ModuleType
    namespace: str
    node: str
    uid: str = ""
    made: list[tuple[Kind, str]] = field(default_factory=list)

    async def policy(self, **spec: Any) -> Object:
        """Creates or changes the policy."""
        body = controllers.policy(self.namespace, **spec)
        found = await self.client.apply(POLICIES, body)
        self.uid = found["metadata"]["uid"]
        return found

    async def deployment(
        self, pod: Mapping[str, Any], name: str = "chat", replicas: int = 1, **spec: Any
    ) -> Object:
        """A Deployment whose pods are as ``pod``, for the node; ``spec``: more of the pods'."""
        metadata = {
            key: pod["metadata"][key] for key in ("labels", "annotations") if key in pod["metadata"]
        }
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "chat"}},
                "template": {"metadata": metadata, "spec": {**pod["spec"], **self._spec(), **spec}},
            },
        }
        return await self.client.create(DEPLOYMENTS, self.namespace, body)

    def injected(self, port: int, structural_hash: str, **more: Any) -> dict[str, Any]:
        """A pod as the webhook injects it for this policy."""
        return injected_pod(port=port, structural_hash=structural_hash, policy_uid=self.uid, **more)

    async def bare(self, name: str, **annotations: str) -> Object:
        """A selected pod without owner and without tiers."""
        pod = bare_pod(name, owner="")
        body = {
            "metadata": {
                "name": name,
                "labels": pod["metadata"]["labels"],
                "annotations": annotations,
            },
            "spec": {**pod["spec"], **self._spec()},
        }
        return await self.client.create(PODS, self.namespace, body)

    def _spec(self) -> dict[str, Any]:
        return {
            "nodeSelector": {"kubernetes.io/hostname": self.node},
            "terminationGracePeriodSeconds": 0,
        }

    async def pods(self, count: int = 1) -> list[Object]:
        """The pods that are not terminating, once there are ``count`` and each has a node."""

        async def placed() -> list[Object] | None:
            found = [
                each
                for each in await self.client.list(PODS, self.namespace)
                if "deletionTimestamp" not in each["metadata"] and each["spec"].get("nodeName")
            ]
            return (
                sorted(found, key=lambda each: str(each["metadata"]["name"]))
                if len(found) == count
                else None
            )

        found: list[Object] = await until(f"{count} pods with a node", placed)
        return found

    async def run(self, name: str) -> None:
        """Sets the pod's status to running."""
        await asyncio.to_thread(self.nodes.run_pod, self.api, self.namespace, name)

    async def hold(self, name: str, container: str, reason: str, message: str = "") -> None:
        """Sets the pod's status to waiting."""
        await asyncio.to_thread(
            self.nodes.hold_pod, self.api, self.namespace, name, container, reason, message
        )

    async def finish(self, name: str) -> None:
        """Removes a terminating pod."""
        await asyncio.to_thread(self.nodes.finish_deletion, self.api, self.namespace, name)

    async def until(self, kind: str, status: str, reason: str, seconds: float = 30) -> Object:
        """The policy, once a condition has this status and reason."""
        last: dict[str, Any] = {}

        async def reached() -> Object | None:
            found = await self.client.get(POLICIES, self.namespace, "chat")
            last.clear()
            last.update(condition(found, kind))
            return found if (last.get("status"), last.get("reason")) == (status, reason) else None

        try:
            found: Object = await until(f"{kind} is {status}, {reason}", reached, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last}") from None
        return found

    async def token(self) -> str:
        """The policy's bearer token."""

        async def made() -> Object | None:
            found = [
                each
                for each in await self.client.list(SECRETS, self.namespace)
                if each["metadata"]["name"] == "chat-token"
            ]
            return found[0] if found else None

        secret = await until("the token", made)
        return base64.b64decode(secret["data"]["token"]).decode()

    async def events(self, reason: str) -> list[Object]:
        """Events of KVTier with that reason, once there is one."""

        async def posted() -> list[Object]:
            found = await self.client.list(EVENTS, self.namespace)
            return [
                each
                for each in found
                if each["reason"] == reason and each["source"].get("component") == "kvtier"
            ]

        found: list[Object] = await until(f"an Event {reason}", posted)
        return found

    async def columns(self, wide: bool = False) -> dict[str, Any]:
        """The columns of ``kubectl get kvtp chat``."""
        path = f"/apis/kvtier.io/v1alpha1/namespaces/{self.namespace}/kvtierpolicies/chat"
        status, table = await asyncio.to_thread(self.api.request, "GET", path, None, TABLE)
        if status != 200:
            raise AssertionError(f"{status}: {table}")
        names = [
            column["name"]
            for column in table["columnDefinitions"]
            if wide or column["priority"] == 0
        ]
        return dict(zip(names, table["rows"][0]["cells"], strict=False))


@contextlib.asynccontextmanager
async def status_namespace(
    cluster: Any, api: Any, nodes: ModuleType, labels: Mapping[str, str] | None = None
) -> AsyncIterator[StatusNamespace]:
    """A namespace and a node, removed at the end."""
    name = f"status-{secrets.token_hex(4)}"
    async with connect(cluster.kubeconfig, cluster.context) as client:
        await controllers.install_definition(client)
        chosen = {"kvtier.io/inject": "enabled"} if labels is None else dict(labels)
        await asyncio.to_thread(nodes.make_namespace, api, name, chosen)
        node = nodes.FakeNode(api, f"{name}-node")
        await asyncio.to_thread(node.__enter__)
        try:
            yield StatusNamespace(client, api, nodes, name, node.name)
        finally:
            await asyncio.to_thread(node.__exit__, None, None, None)
            await controllers.drop_namespace(client, name)
            for pod in await client.list(PODS, name):
                await asyncio.to_thread(nodes.finish_deletion, api, name, pod["metadata"]["name"])


@contextlib.asynccontextmanager
async def running_controller(
    where: StatusNamespace, sections: Mapping[str, Any] | None = None
) -> AsyncIterator[Any]:
    """Runs the controller for that namespace. ``sections``: of its settings."""
    chosen = controllers.settings(where.namespace, **{"controller": QUICK, **(sections or {})})
    async with controllers.running(where.client, chosen) as found:
        yield found


def run_story(
    scenario: Callable[[StatusNamespace], Any],
    cluster: Any,
    api: Any,
    nodes: ModuleType,
    **more: Any,
) -> None:
    """Runs a test in a new namespace."""

    async def main() -> None:
        async with status_namespace(cluster, api, nodes, **more) as where:
            await scenario(where)

    asyncio.run(main())


def skipped(reason: str, message: str) -> dict[str, str]:
    """The webhook's annotation."""
    return {
        "kvtier.io/skipped": json.dumps({"policy": "chat", "reason": reason, "message": message})
    }
