"""The chart on a real API server with all controllers, managed by Helm's own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

NAMESPACE = "kvtier-system"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/kvtierpolicies.kvtier.io"
POLICIES = "/apis/kvtier.io/v1alpha1/namespaces/{}/kvtierpolicies"
HOOKS = "/apis/admissionregistration.k8s.io/v1/{}webhookconfigurations/kvtier"
EXPORT = {
    "namespaces": ["serving"],
    "nfs": {"server": "NAS.example", "exportPrefix": "/kv"},
    "mountOptions": ["vers"],
}


@pytest.fixture
def release(full_cluster: Any, charts: ModuleType) -> Iterator[Any]:
    charts.without_definition(full_cluster)
    with charts.Release(full_cluster.kubeconfig, full_cluster.context) as found:
        try:
            yield found
        finally:
            found.uninstall()
            # The API server deletes every object of the kind first, with growing pauses.
            full_cluster.kubectl(
                "delete", "crd", "kvtierpolicies.kvtier.io", "--ignore-not-found", seconds=300
            )


def policy(name: str, **spec: Any) -> dict[str, Any]:
    body = {
        "podSelector": {"matchLabels": {"app": "x"}},
        "tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}],
    }
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {**body, **spec},
    }


def established(api: Any) -> bool:
    conditions = api.request("GET", CRD)[1].get("status", {}).get("conditions", ())
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


def allowed(api: Any, account: str, verb: str, resource: str, group: str = "", **more: str) -> bool:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{NAMESPACE}:{account}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": {"verb": verb, "group": group, "resource": resource, **more},
        },
    }
    status, body = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    assert status == 201, body
    return bool(body["status"]["allowed"])


def test_an_installed_chart_has_a_crd_two_deployments_and_webhooks_that_fail_open(
    release: Any, charts: ModuleType, full_api: Any, nodes: ModuleType
) -> None:
    objects = charts.rendered(release.install())
    nodes.wait_for("the definition is established", lambda: established(full_api))
    kinds = {body["kind"] for body in objects}
    assert {
        "CustomResourceDefinition",
        "Deployment",
        "Service",
        "MutatingWebhookConfiguration",
    } <= kinds
    deployments = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    names = {body["metadata"]["name"] for body in full_api.request("GET", deployments)[1]["items"]}
    assert names == {"kvtier-controller", "kvtier-webhook"}

    def pods() -> Any:
        found = full_api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")[1]["items"]
        return found if len(found) == 4 else None

    nodes.wait_for("two pods of the controller and two of the webhook", pods)
    # Nothing answers behind the Service, and everything can be created and deleted nevertheless.
    assert full_api.request("POST", POLICIES.format("default"), policy("first"))[0] == 201
    namespace = nodes.make_namespace(full_api, "labelled", {"kvtier.io/inject": "enabled"})
    pod = {"metadata": {"name": "engine"}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    assert full_api.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod)[0] == 201
    full_api.request("DELETE", f"/api/v1/namespaces/{namespace}")
    nodes.wait_for(
        "the namespace goes",
        lambda: full_api.request("GET", f"/api/v1/namespaces/{namespace}")[0] == 404,
    )


def test_the_operators_pods_are_admitted_under_the_restricted_pod_security_standard(
    release: Any, full_api: Any, nodes: ModuleType
) -> None:
    if full_api.request("GET", f"/api/v1/namespaces/{NAMESPACE}")[0] == 404:
        nodes.make_namespace(full_api, NAMESPACE)
    try:
        full_api.request(
            "PATCH",
            f"/api/v1/namespaces/{NAMESPACE}",
            {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
            content_type="application/merge-patch+json",
        )
        release.install()
        nodes.wait_for(
            "four pods",
            lambda: (
                len(full_api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")[1]["items"])
                == 4
            ),
        )
    finally:
        full_api.request(
            "PATCH",
            f"/api/v1/namespaces/{NAMESPACE}",
            {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": None}}},
            content_type="application/merge-patch+json",
        )


def test_an_upgrade_updates_the_crd_and_keeps_policies_and_the_ca_bundle(
    release: Any, charts: ModuleType, full_api: Any, nodes: ModuleType, tmp_path: Path
) -> None:
    release.install()
    nodes.wait_for("the definition is established", lambda: established(full_api))
    nodes.ok(full_api.request("POST", POLICIES.format("default"), policy("kept")))
    before = full_api.request("GET", f"{POLICIES.format('default')}/kept")[1]
    for kind in ("mutating", "validating"):
        patch = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": CA}]
        nodes.ok(
            full_api.request(
                "PATCH", HOOKS.format(kind), patch, content_type="application/json-patch+json"
            )
        )

    release.upgrade(chart=charts.changed_chart(tmp_path, "0.2.0", "laterField"))

    def known() -> bool:
        status, body = full_api.request(
            "POST",
            f"{POLICIES.format('default')}?dryRun=All&fieldValidation=Strict",
            policy("x", laterField="y"),
        )
        return bool(status == 201 and body["spec"].get("laterField") == "y")

    nodes.wait_for("the later definition is served", known)
    after = full_api.request("GET", f"{POLICIES.format('default')}/kept")[1]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    for kind in ("mutating", "validating"):
        assert (
            full_api.request("GET", HOOKS.format(kind))[1]["webhooks"][0]["clientConfig"][
                "caBundle"
            ]
            == CA
        )
    # And back: the field is gone, policies that lack it are as they were.
    release.upgrade()
    nodes.wait_for("the earlier definition is served", lambda: not known())
    assert (
        full_api.request("GET", f"{POLICIES.format('default')}/kept")[1]["spec"] == before["spec"]
    )


def test_uninstalling_keeps_crd_and_policies_and_leaves_nothing_that_blocks_deletion(
    release: Any, full_api: Any, full_cluster: Any, nodes: ModuleType
) -> None:
    release.install({"storage": {"createVolumes": True}, "allowedVolumes": [EXPORT]})
    nodes.wait_for("the definition is established", lambda: established(full_api))
    nodes.ok(full_api.request("POST", POLICIES.format("default"), policy("left")))
    release.uninstall()
    status, body = full_api.request("GET", f"{POLICIES.format('default')}/left")
    assert status == 200
    assert not body["metadata"].get("finalizers")
    for kind in ("mutating", "validating"):
        assert full_api.request("GET", HOOKS.format(kind))[0] == 404
    left = full_cluster.kubectl(
        "get",
        "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings",
        "--selector=app.kubernetes.io/part-of=kvtier",
        "--output=name",
    )
    assert left == ""
    # Re-installed under the same name: Helm takes the definition that stayed.
    release.install()
    assert full_api.request("GET", f"{POLICIES.format('default')}/left")[0] == 200
    release.uninstall()
    assert full_api.request("DELETE", f"{POLICIES.format('default')}/left")[0] == 200
    assert full_api.request("GET", f"{POLICIES.format('default')}/left")[0] == 404
    full_api.request("DELETE", CRD)
    nodes.wait_for("the definition goes", lambda: full_api.request("GET", CRD)[0] == 404)
    nodes.ok(full_api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}"))
    nodes.wait_for(
        "the operator's namespace goes",
        lambda: full_api.request("GET", f"/api/v1/namespaces/{NAMESPACE}")[0] == 404,
    )


def test_accounts_have_the_permissions_they_need_and_cannot_escalate(
    release: Any, full_api: Any
) -> None:
    release.install()
    for account in ("kvtier-controller", "kvtier-webhook"):
        assert allowed(full_api, account, "watch", "kvtierpolicies", "kvtier.io")
        assert allowed(full_api, account, "watch", "pods")
        for verb, resource, group in (
            ("create", "pods", ""),
            ("create", "pods/exec", ""),
            ("create", "persistentvolumes", ""),
            ("delete", "nodes", ""),
            ("create", "clusterroles", "rbac.authorization.k8s.io"),
            ("bind", "clusterroles", "rbac.authorization.k8s.io"),
            ("impersonate", "users", ""),
            ("create", "serviceaccounts/token", ""),
            ("create", "mutatingwebhookconfigurations", "admissionregistration.k8s.io"),
            ("delete", "kvtierpolicies", "kvtier.io"),
            ("update", "kvtierpolicies", "kvtier.io"),
        ):
            assert not allowed(full_api, account, verb, resource, group, namespace="serving"), (
                f"{account} {verb} {resource}"
            )
    # The webhook writes nothing at all.
    for resource in ("configmaps", "secrets", "persistentvolumeclaims", "events", "pods"):
        for verb in ("create", "patch", "update", "delete"):
            assert not allowed(full_api, "kvtier-webhook", verb, resource, namespace="serving")
    hooks = {"group": "admissionregistration.k8s.io"}
    assert allowed(
        full_api,
        "kvtier-controller",
        "patch",
        "mutatingwebhookconfigurations",
        **hooks,
        name="kvtier",
    )
    assert not allowed(
        full_api,
        "kvtier-controller",
        "patch",
        "mutatingwebhookconfigurations",
        **hooks,
        name="other",
    )


def test_creating_a_policy_requires_its_own_permission(
    release: Any, full_api: Any, nodes: ModuleType
) -> None:
    release.install()
    aggregated = full_api.request("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/edit")[1]
    verbs = {
        verb
        for rule in aggregated["rules"]
        if "kvtier.io" in rule["apiGroups"]
        for verb in rule["verbs"]
    }
    # Reading comes from the cluster role view, which edit includes.
    assert verbs <= {"get", "list", "watch"}


CA = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUJkRENDQVJxZ0F3SUJBZ0lVZg=="
