"""The permissions that the code declares are sufficient for the controller, and necessary."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from tests.support import controllers
from tests.support.controllers import file_tier, policy, running, settings, settled, until

from kvtier_operator.kube.client import ApiClient, connect, open_client
from kvtier_operator.kube.credentials import from_kubeconfig
from kvtier_operator.kube.resources import CLAIMS, POLICIES, VOLUMES, Kind
from kvtier_operator.rbac import CONTROLLER, Permission, Scope, rules

ROLES = Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)
BINDINGS = Kind(
    "rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount")
SECTIONS = {
    "storage": {"createVolumes": True},
    "allowedVolumes": [
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}
    ],
    "controller": {"resyncSeconds": 1},
}
TIERS = [
    file_tier("shared", {"nfs": {"server": "nas.example", "path": "/kv/chat"}}),
    file_tier(
        "disk",
        {"claimTemplate": {"storageClassName": "none-such", "accessModes": ["ReadWriteMany"]}},
    ),
]
FOLLOWED = [each for each in CONTROLLER if each.scope is not Scope.OWN and not each.names]
SOMETIMES_CALLED = ("namespaces", "nodes", "leaderworkersets")
"""Asked about only if a pod was missed, if one finds no node, and if the kind is served."""
ALWAYS_CALLED = [
    each
    for each in FOLLOWED
    if not set(each.resources) & set(SOMETIMES_CALLED) and each.verbs != ("patch",)
] + [each for each in FOLLOWED if each.resources == ("kvtierpolicies/status",)]


def _all_rules(permissions: Sequence[Permission]) -> list[dict[str, Any]]:
    on = frozenset({"storage.createVolumes", "rollout.enabled"})
    return [
        rule for scope in (Scope.WATCHED, Scope.CLUSTER) for rule in rules(permissions, scope, on)
    ]


class Limited:
    """A client of an account that has these rules, and the responses of the API server."""

    def __init__(
        self, cluster: Any, admin: ApiClient, namespace: str, permissions: Sequence[Permission]
    ) -> None:
        self._cluster = cluster
        self._admin = admin
        self._namespace = namespace
        self._permissions = permissions
        self.responses: Counter[tuple[str, str, int]] = Counter()

    async def client(self) -> AbstractAsyncContextManager[ApiClient]:
        name, group = self._namespace, "rbac.authorization.k8s.io"
        await self._admin.apply(
            ROLES,
            {
                "apiVersion": f"{group}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": name},
                "rules": _all_rules(self._permissions),
            },
        )
        await self._admin.apply(
            BINDINGS,
            {
                "apiVersion": f"{group}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": name},
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
                "subjects": [
                    {"kind": "ServiceAccount", "name": "limited", "namespace": self._namespace}
                ],
            },
        )
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "limited"}}
        await self._admin.create(ACCOUNTS, self._namespace, account)
        tokens = replace(ACCOUNTS, plural="serviceaccounts/limited/token", kind="TokenRequest")
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = (await self._admin.create(tokens, self._namespace, request))["status"]["token"]
        access = await from_kubeconfig(self._cluster.kubeconfig, self._cluster.context)
        access.configuration.api_key["BearerToken"] = f"Bearer {token}"
        return open_client(access, observer=self._observe)

    def _observe(self, verb: str, kind: str, status: int, seconds: float) -> None:
        self.responses[verb, kind, status] += 1

    @property
    def forbidden(self) -> set[tuple[str, str]]:
        return {(verb, kind) for verb, kind, status in self.responses if status == 403}

    async def remove(self) -> None:
        for kind in (BINDINGS, ROLES):
            found = await self._admin.get(kind, None, self._namespace)
            await self._admin.delete(kind, None, self._namespace, uid=found["metadata"]["uid"])


def test_the_controllers_permissions_are_sufficient(full_cluster: Any) -> None:
    """A policy is created, changed and deleted, its claims are replaced, its data is removed."""

    async def scenario() -> None:
        async with connect(full_cluster.kubeconfig, full_cluster.context) as admin:
            await controllers.install_definition(admin)
            namespace = await controllers.make_namespace(admin, "rights")
            limited = Limited(full_cluster, admin, namespace, FOLLOWED)
            async with (
                await limited.client() as client,
                running(client, settings(namespace, **SECTIONS)) as controller,
            ):
                await admin.apply(
                    POLICIES, policy(namespace, tiers=TIERS, attach={"mode": "ConfigMapOnly"})
                )
                await settled(controller, admin, namespace)
                await admin.apply(POLICIES, policy(namespace, tiers=TIERS[:1]))
                await settled(controller, admin, namespace)
                found = await admin.get(POLICIES, namespace, "chat")

                async def one_claim() -> bool:
                    return len(await admin.list(CLAIMS, namespace)) == 1

                await until("the other claim is removed", one_claim)
                await admin.delete(POLICIES, namespace, "chat", uid=found["metadata"]["uid"])

                async def no_volume() -> bool:
                    return not await admin.list(
                        VOLUMES, labels=f"{controllers.NAMESPACE_LABEL}={namespace}"
                    )

                await until("the volume is removed", no_volume)
            assert limited.forbidden == set()
            done = {(verb, kind) for verb, kind, status in limited.responses if 200 <= status < 300}
            assert {
                ("delete", "PersistentVolume"),
                ("delete", "ConfigMap"),
                ("create", "Secret"),
            } <= done
            await limited.remove()
            await controllers.drop_namespace(admin, namespace)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "cut", ALWAYS_CALLED, ids=lambda cut: "-".join(cut.resources).replace("/", "-")
)
def test_a_missing_permission_is_reported(full_cluster: Any, cut: Permission) -> None:
    async def scenario() -> None:
        async with connect(full_cluster.kubeconfig, full_cluster.context) as admin:
            await controllers.install_definition(admin)
            namespace = await controllers.make_namespace(admin, "cut")
            limited = Limited(
                full_cluster, admin, namespace, [each for each in FOLLOWED if each is not cut]
            )
            await admin.apply(POLICIES, policy(namespace, tiers=TIERS))
            async with (
                await limited.client() as client,
                running(client, settings(namespace, **SECTIONS)) as controller,
            ):

                async def refused() -> bool:
                    return bool(limited.forbidden)

                await until("a call is forbidden", refused)
                plural = cut.resources[0].partition("/")[0]
                if "list" in cut.verbs:

                    async def named() -> bool:
                        return any(kind.startswith(plural) for kind in controller.cache.problems())

                    await until("the controller says which kind it cannot list", named)
            await limited.remove()
            await controllers.drop_namespace(admin, namespace)

    asyncio.run(scenario())
