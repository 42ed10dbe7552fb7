"""The operator with the chart's permissions: local processes with tokens of its accounts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

from charts import NAMESPACE, Release, without_definition
from nodes import make_namespace, ok, wait_for
from operator_processes import Settings, operator, settings_of

from kvtier_operator import rbac
from kvtier_operator.certs import certificates
from kvtier_operator.rbac import Scope

EXPORT = {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}
VALUES = {
    "storage": {"createVolumes": True},
    "allowedVolumes": [EXPORT],
    "controller": {"resyncSeconds": 2, "pollSeconds": 1, "statusBytesSeconds": 1},
}
RIGHTS = "/apis/rbac.authorization.k8s.io/v1"
ROLE = f"{RIGHTS}/clusterroles/kvtier-controller"
HOOKS = "/apis/admissionregistration.k8s.io/v1/{}webhookconfigurations/kvtier"
MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def release(full_cluster: Any, full_api: Any) -> Iterator[Release]:
    without_definition(full_cluster)
    with Release(full_cluster.kubeconfig, full_cluster.context) as release:
        try:
            release.install(VALUES)
            yield release
        finally:
            release.uninstall()
            # The API server deletes every object of the kind first, with growing pauses.
            full_cluster.kubectl(
                "delete", "crd", "kvtierpolicies.kvtier.io", "--ignore-not-found", seconds=300
            )


@pytest.fixture
def chart(release: Release) -> Settings:
    """The chart is installed; its settings, for processes on this machine."""
    return settings_of(release.upgrade(VALUES))


def policy(namespace: str, name: str, *tiers: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    memory = {"name": "ram", "memory": {"capacity": "1Gi"}}
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": {"app": name}},
            "tiers": [memory, *map(dict, tiers)],
            **spec,
        },
    }


def files(volume: Mapping[str, Any], name: str = "disk") -> dict[str, Any]:
    return {
        "name": name,
        "fileSystem": {"capacity": "1Gi", "sharing": "Cluster", "volume": dict(volume)},
    }


NFS = {"nfs": {"server": "nas.example", "path": "/kv/a"}}
CLAIM = {
    "claimTemplate": {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
}


def _accepted(api: Any, namespace: str, name: str) -> str:
    path = f"/apis/kvtier.io/v1alpha1/namespaces/{namespace}/kvtierpolicies/{name}"
    conditions = ok(api.request("GET", path)).get("status", {}).get("conditions", ())
    return next((str(each["status"]) for each in conditions if each["type"] == "Accepted"), "")


def _exists(api: Any, path: str) -> bool:
    return bool(api.request("GET", path)[0] == 200)


def test_the_charts_permissions_are_sufficient_for_the_controller(
    chart: Settings, full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path: Path
) -> None:
    api, namespace = full_api, make_namespace(full_api, "rights", {"kvtier.io/inject": "enabled"})
    policies = f"/apis/kvtier.io/v1alpha1/namespaces/{namespace}/kvtierpolicies"
    core = f"/api/v1/namespaces/{namespace}"
    with (
        nodes.FakeNode(api, "rights-node"),
        operator("controller", full_cluster, api, chart, tmp_path) as controller,
    ):
        ok(
            api.request(
                "POST", policies, policy(namespace, "chat", files(NFS), files(CLAIM, "claimed"))
            )
        )
        ok(
            api.request(
                "POST", policies, policy(namespace, "written", attach={"mode": "ConfigMapOnly"})
            )
        )
        wait_for(
            "both are accepted",
            lambda: {_accepted(api, namespace, each) for each in ("chat", "written")} == {"True"},
        )
        for path in ("configmaps/chat-live", "secrets/chat-token", "configmaps/written-structural"):
            wait_for(path, lambda path=path: _exists(api, f"{core}/{path}"))
        wait_for("an NFS volume", lambda: _volumes(api, namespace) == 1)
        # A governed pod that was created without the webhook is reported.
        pod = {
            "metadata": {"name": "missed", "labels": {"app": "chat"}},
            "spec": {"containers": [{"name": "vllm", "image": "x"}]},
        }
        ok(api.request("POST", f"{core}/pods", pod))
        wait_for(
            "it is bound",
            lambda: api.request("GET", f"{core}/pods/missed")[1]["spec"].get("nodeName"),
        )
        nodes.run_pod(api, namespace, "missed")
        wait_for(
            "the policy counts it",
            lambda: _status(api, policies, "chat").get("pods", {}).get("selected") == 1,
        )
        wait_for(
            "Events",
            lambda: api.request("GET", f"{core}/events?fieldSelector=source=kvtier")[0] == 200,
        )
        # A live value changes, the structural ConfigMap is removed, the policy is deleted.
        change = {"spec": {"minLoadTokens": 1024}}
        ok(api.request("PATCH", f"{policies}/chat", change, content_type=MERGE))
        wait_for(
            "live values",
            lambda: '"minLoadTokens": 1024' in json.dumps(json.loads(_live(api, core))),
        )
        ok(
            api.request(
                "PATCH",
                f"{policies}/written",
                {"spec": {"attach": {"mode": "Webhook"}}},
                content_type=MERGE,
            )
        )
        wait_for(
            "what it no longer needs goes",
            lambda: not _exists(api, f"{core}/configmaps/written-structural"),
        )
        ok(api.request("DELETE", f"{policies}/chat"))
        for kind in ("mutating", "validating"):
            assert (
                "caBundle"
                in api.request("GET", HOOKS.format(kind))[1]["webhooks"][0]["clientConfig"]
            )
        assert controller.calls("403") == {}, controller.log()
        done = {verb for verb, _ in controller.calls("200")} | {
            verb for verb, _ in controller.calls("201")
        }
        assert {"list", "watch", "get"} <= done
    api.request("DELETE", core)


def test_a_removed_permission_is_named_in_the_policys_status(
    chart: Settings, full_cluster: Any, full_api: Any, tmp_path: Path
) -> None:
    api, namespace = full_api, make_namespace(full_api, "cut", {"kvtier.io/inject": "enabled"})
    policies = f"/apis/kvtier.io/v1alpha1/namespaces/{namespace}/kvtierpolicies"
    role = ok(api.request("GET", ROLE))
    cut = [
        _without_create(rule) if "configmaps" in rule["resources"] else rule
        for rule in role["rules"]
    ]
    ok(api.request("PATCH", ROLE, {"rules": cut}, content_type=MERGE))
    try:
        with operator("controller", full_cluster, api, chart, tmp_path) as controller:
            ok(api.request("POST", policies, policy(namespace, "chat")))
            wait_for(
                "a call is forbidden",
                lambda: any(kind == "ConfigMap" for _, kind in controller.calls("403")),
            )
            forbidden = {kind for _, kind in controller.calls("403")}
            assert forbidden == {"ConfigMap"}, controller.log()
            # Nothing else suffers, and with the right back it is made good without a restart.
            wait_for(
                "the token",
                lambda: _exists(api, f"/api/v1/namespaces/{namespace}/secrets/chat-token"),
            )
            ok(api.request("PATCH", ROLE, {"rules": role["rules"]}, content_type=MERGE))
            live = f"/api/v1/namespaces/{namespace}/configmaps/chat-live"
            wait_for("the live values", lambda: _exists(api, live), 90)
    finally:
        ok(api.request("PATCH", ROLE, {"rules": role["rules"]}, content_type=MERGE))
        api.request("DELETE", f"/api/v1/namespaces/{namespace}")


def test_the_charts_permissions_are_sufficient_for_the_webhook(
    chart: Settings, full_cluster: Any, full_api: Any, tmp_path: Path
) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "webhook").mkdir()
    with (
        operator("controller", full_cluster, full_api, chart, tmp_path / "controller"),
        operator("webhook", full_cluster, full_api, chart, tmp_path / "webhook") as webhook,
    ):
        assert webhook.calls("403") == {}, webhook.log()
        written = {verb for verb, _ in {**webhook.calls("200"), **webhook.calls("201")}}
        assert written <= {"get", "list", "watch"}


def test_with_mounted_certificates_both_need_fewer_permissions_and_do_not_change_the_ca(
    release: Release, full_cluster: Any, full_api: Any, tmp_path: Path
) -> None:
    # Reinstalled, because an upgrade does not undo a test's manual changes to a role.
    release.uninstall()
    release.install(VALUES)
    settings = settings_of(
        release.upgrade({**VALUES, "webhook": {"certificates": {"mode": "Mounted"}}})
    )
    _no_rule_beyond_the_code(full_api)
    directory = tmp_path / "certificates"
    for each in ("controller", "webhook", "certificates"):
        (tmp_path / each).mkdir()
    issued = certificates.issue(("localhost",), time.time(), 3600)
    (directory / "tls.crt").write_bytes(issued.certificate)
    (directory / "tls.key").write_bytes(issued.key)
    settings["webhook"]["certificates"]["directory"] = str(directory)
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets/kvtier-webhook-certificates"
    full_api.request("DELETE", secret)
    # As cert-manager's injector leaves it, or an administrator.
    bundle = certificates.encode_bundle(issued.authority)
    for kind in ("mutating", "validating"):
        hooks = ok(full_api.request("GET", HOOKS.format(kind)))["webhooks"]
        for hook in hooks:
            hook["clientConfig"]["caBundle"] = bundle
        ok(full_api.request("PATCH", HOOKS.format(kind), {"webhooks": hooks}, content_type=MERGE))
    namespace = make_namespace(full_api, "mounted", {"kvtier.io/inject": "enabled"})
    policies = f"/apis/kvtier.io/v1alpha1/namespaces/{namespace}/kvtierpolicies"
    with (
        operator(
            "controller", full_cluster, full_api, settings, tmp_path / "controller"
        ) as controller,
        # It is ready only once it has the certificate, and copies of all it asks about.
        operator("webhook", full_cluster, full_api, settings, tmp_path / "webhook") as webhook,
    ):
        ok(
            full_api.request(
                "POST", policies, policy(namespace, "chat", files(NFS), files(CLAIM, "claimed"))
            )
        )
        wait_for("it is accepted", lambda: _accepted(full_api, namespace, "chat") == "True")
        for path in ("configmaps/chat-live", "secrets/chat-token"):
            wait_for(
                path, lambda path=path: _exists(full_api, f"/api/v1/namespaces/{namespace}/{path}")
            )
        assert controller.calls("403") == {}, controller.log()
        assert webhook.calls("403") == {}, webhook.log()
        assert not _exists(full_api, secret)
        for kind in ("mutating", "validating"):
            found = ok(full_api.request("GET", HOOKS.format(kind)))["webhooks"]
            assert {hook["clientConfig"]["caBundle"] for hook in found} == {bundle}
    full_api.request("DELETE", f"{policies}/chat")
    full_api.request("DELETE", f"/api/v1/namespaces/{namespace}")


def _no_rule_beyond_the_code(api: Any) -> None:
    """The rules that the API server has: an upgrade must remove those no longer needed."""
    on = frozenset({rbac.CREATE_VOLUMES})
    for account, given in (("controller", rbac.CONTROLLER), ("webhook", rbac.WEBHOOK)):
        watched, cluster, own = (rbac.rules(given, scope, on) for scope in Scope)
        assert {group for rule in own for group in rule["apiGroups"]} <= {"coordination.k8s.io"}
        assert (
            ok(api.request("GET", f"{RIGHTS}/clusterroles/kvtier-{account}"))["rules"]
            == cluster + watched
        )
        role = f"{RIGHTS}/namespaces/{NAMESPACE}/roles/kvtier-{account}"
        if own:
            assert ok(api.request("GET", role))["rules"] == own
        else:
            assert not _exists(api, role)
            assert not _exists(api, role.replace("/roles/", "/rolebindings/"))


def _without_create(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {**rule, "verbs": [verb for verb in rule["verbs"] if verb not in ("create", "patch")]}


def _status(api: Any, policies: str, name: str) -> dict[str, Any]:
    return dict(ok(api.request("GET", f"{policies}/{name}")).get("status", {}))


def _live(api: Any, core: str) -> str:
    return str(ok(api.request("GET", f"{core}/configmaps/chat-live"))["data"]["live.json"])


def _volumes(api: Any, namespace: str) -> int:
    found = ok(api.request("GET", "/api/v1/persistentvolumes"))["items"]
    return sum(body["spec"].get("claimRef", {}).get("namespace") == namespace for body in found)
