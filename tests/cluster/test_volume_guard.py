"""What bounds the volumes that the operator's account may create, as the API server applies it.

A PersistentVolume may stand for any path of a node, and Pod Security does not see behind a claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

NAMESPACE = "kvtier-system"
EXPORT = {
    "namespaces": ["serving"],
    "nfs": {"server": "NAS.example", "exportPrefix": "/kv"},
    "mountOptions": ["vers", "sec=krb5p"],
}


def volume(name: str, **spec: Any) -> dict[str, Any]:
    body = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {"namespace": "serving", "name": "x"},
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**body, **spec},
    }


def nfs(path: str, server: str = "nas.example") -> dict[str, Any]:
    return {"nfs": {"server": server, "path": path}}


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (volume("kvtier-a", **nfs("/kv")), None),
        (
            volume("kvtier-a", **nfs("/kv/below"), mountOptions=["soft", "timeo=50", "vers=4.1"]),
            None,
        ),
        # An option that is listed with a value is allowed with that value, as the operator reads
        # the list.
        (volume("kvtier-a", **nfs("/kv"), mountOptions=["sec=krb5p", "soft"]), None),
        (volume("kvtier-a", **nfs("/kv"), mountOptions=["sec=krb5"]), "mount options"),
        (volume("kvtier-a", **nfs("/kv"), mountOptions=["sec"]), "mount options"),
        (volume("other", **nfs("/kv")), "name starts with kvtier-"),
        (volume("kvtier-a", hostPath={"path": "/etc"}), "for an NFS export"),
        (volume("kvtier-a", **nfs("/kvx")), "nas.example:/kvx"),
        (volume("kvtier-a", **nfs("/kv/../etc")), "without .."),
        (volume("kvtier-a", **nfs("/kv", "evil.example")), "evil.example:/kv"),
        (
            volume("kvtier-a", **nfs("/kv"), claimRef={"namespace": "other", "name": "x"}),
            'namespace "other"',
        ),
        (volume("kvtier-a", **nfs("/kv"), mountOptions=["sec=none"]), "mount options"),
        (
            volume("kvtier-a", **nfs("/kv"), persistentVolumeReclaimPolicy="Delete"),
            "reclaim policy Retain",
        ),
    ],
)
def test_the_operators_account_creates_volumes_of_allowed_exports_only(
    volume_guard: Any, body: dict[str, Any], refusal: str | None
) -> None:
    status, answer = volume_guard.request("POST", "/api/v1/persistentvolumes?dryRun=All", body)
    if refusal is None:
        assert status == 201, answer
    else:
        assert status == 422, answer
        assert refusal in answer["message"]


@pytest.fixture(scope="module")
def volume_guard(
    full_cluster: Any, charts: ModuleType, full_api: Any, nodes: ModuleType, rest: ModuleType
) -> Iterator[Any]:
    """The API server as the controller's account, with the guard in force."""
    charts.without_definition(full_cluster)
    with charts.Release(full_cluster.kubeconfig, full_cluster.context) as found:
        try:
            found.install({"storage": {"createVolumes": True}, "allowedVolumes": [EXPORT]})
            account = f"system:serviceaccount:{NAMESPACE}:kvtier-controller"
            api = rest.Api(
                full_cluster.kubeconfig, full_cluster.context, "default", impersonate=account
            )

            def guarded() -> bool:
                answer = api.request(
                    "POST", "/api/v1/persistentvolumes?dryRun=All", volume("other", **nfs("/kv"))
                )
                return "name starts with kvtier-" in str(answer[1].get("message"))

            nodes.wait_for("the guard is in force", guarded)
            yield api
        finally:
            found.uninstall()


def test_other_accounts_may_create_any_volume(volume_guard: Any, full_api: Any) -> None:
    body = volume("mine", hostPath={"path": "/srv"})
    assert full_api.request("POST", "/api/v1/persistentvolumes?dryRun=All", body)[0] == 201
