"""The steps to a second API version (docs/decisions/0009-api-versions.md), with today's schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier_operator.api import crd

NEXT = "v1beta1"
PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvtierpolicies.kvtier.io"
POLICIES = "/apis/kvtier.io/{}/namespaces/{}/kvtierpolicies"
MERGE = "application/merge-patch+json"


def definition(stored: str, served: tuple[str, ...] = ("v1alpha1", NEXT)) -> dict[str, Any]:
    """The definition with versions that have the same fields. ``stored`` is one of ``served``."""
    body = crd.definition()
    (only,) = body["spec"]["versions"]
    body["spec"]["versions"] = [
        {**copy.deepcopy(only), "name": name, "storage": name == stored} for name in served
    ]
    body["spec"]["conversion"] = {"strategy": "None"}
    return body


def policy(version: str, name: str) -> dict[str, Any]:
    return {
        "apiVersion": f"kvtier.io/{version}",
        "kind": "KVTierPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": {"app": name}},
            "tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}],
        },
    }


class Versions:
    """The definition and the policies on one API server."""

    def __init__(self, cluster: Any, api: Any, nodes: Any, namespace: str) -> None:
        self._cluster, self._api, self._nodes = cluster, api, nodes
        self.namespace = namespace

    def apply(self, body: dict[str, Any]) -> None:
        """Sets the definition, and waits until its versions are served as it says."""
        self._cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))
        wanted = {each["name"] for each in body["spec"]["versions"]}

        def settled() -> bool:
            for version in ("v1alpha1", NEXT):
                status = self._api.request("GET", POLICIES.format(version, self.namespace))[0]
                if (status == 200) != (version in wanted):
                    return False
            return True

        self._nodes.wait_for(f"{sorted(wanted)} are served", settled)

    def create(self, version: str, name: str) -> None:
        path = POLICIES.format(version, self.namespace)
        self._nodes.ok(self._api.request("POST", path, policy(version, name)))

    def read(self, version: str, name: str) -> dict[str, Any]:
        path = f"{POLICIES.format(version, self.namespace)}/{name}"
        return dict(self._nodes.ok(self._api.request("GET", path)))

    def stored(self) -> set[str]:
        return set(self._nodes.ok(self._api.request("GET", PATH))["status"]["storedVersions"])

    def rewrite(self) -> None:
        """Stores every object again, and records that the earlier version is stored no more."""
        path = POLICIES.format(NEXT, self.namespace)
        for body in self._nodes.ok(self._api.request("GET", path))["items"]:
            body |= {"apiVersion": f"kvtier.io/{NEXT}", "kind": "KVTierPolicy"}
            self._nodes.ok(self._api.request("PUT", f"{path}/{body['metadata']['name']}", body))
        status = {"status": {"storedVersions": [NEXT]}}
        self._nodes.ok(self._api.request("PATCH", f"{PATH}/status", status, content_type=MERGE))


@pytest.fixture
def versions(kubernetes_cluster: Any, api: Any, nodes: Any) -> Iterator[Versions]:
    kubernetes_cluster.kubectl(
        "delete", "crd", "kvtierpolicies.kvtier.io", "--ignore-not-found", seconds=120
    )
    yield Versions(kubernetes_cluster, api, nodes, api.namespace)
    kubernetes_cluster.kubectl(
        "delete", "crd", "kvtierpolicies.kvtier.io", "--ignore-not-found", seconds=120
    )


def test_a_second_version_comes_and_the_first_goes_without_a_conversion_webhook(
    versions: Versions,
) -> None:
    versions.apply(definition("v1alpha1", ("v1alpha1",)))
    versions.create("v1alpha1", "old")
    uid = versions.read("v1alpha1", "old")["metadata"]["uid"]

    # Release N: both are served, with the same content.
    versions.apply(definition("v1alpha1"))
    versions.create(NEXT, "new")
    for name in ("old", "new"):
        first, second = versions.read("v1alpha1", name), versions.read(NEXT, name)
        assert first["spec"] == second["spec"]
        assert first["metadata"]["generation"] == second["metadata"]["generation"] == 1
    # A rollback: what was written in the new version is read in the old one.
    versions.apply(definition("v1alpha1", ("v1alpha1",)))
    assert versions.read("v1alpha1", "new")["spec"]["minLoadTokens"] == 512

    # Release N+1: the new version is stored. A rollback to N reads it.
    versions.apply(definition(NEXT))
    versions.create("v1alpha1", "later")
    versions.apply(definition("v1alpha1"))
    assert versions.read("v1alpha1", "later")["spec"]["podSelector"]
    versions.apply(definition(NEXT))
    assert versions.stored() == {"v1alpha1", NEXT}

    # Release N+2: everything is rewritten. N+4 drops the old version.
    versions.rewrite()
    assert versions.stored() == {NEXT}
    versions.apply(definition(NEXT, (NEXT,)))
    assert versions.read(NEXT, "old")["metadata"]["uid"] == uid
    assert {versions.read(NEXT, name)["spec"]["selection"] for name in ("new", "later")} == {"Cost"}
