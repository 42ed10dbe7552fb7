"""What the controller's account may write, as the API server of an installed chart enforces it.

Each escalation is a call with the account's token that the controller itself never makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import guard_leader_worker_sets
import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

OPERATOR = "kvtier-system"
SPACE = "guarded"
VALUES = {
    "rollout": {"enabled": True},
    "storage": {"createVolumes": True},
    "allowedVolumes": [
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}
    ],
}
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
UID = "0f7d4c7e-0000-4000-8000-000000000001"
LABELS = {
    "app.kubernetes.io/managed-by": "kvtier",
    "kvtier.io/policy": "chat",
    "kvtier.io/policy-uid": UID,
}
OWNER = {"apiVersion": "kvtier.io/v1alpha1", "kind": "KVTierPolicy", "name": "chat", "uid": UID}
CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
CONTAINERS = [{"name": "main", "image": "example.com/image"}]
PRIVILEGED = [{**CONTAINERS[0], "securityContext": {"privileged": True}}]
RESTARTED = {"kvtier.io/restarted-for": "3f9c1a2b"}


def core(resource: str, name: str = "", namespace: str = SPACE) -> str:
    return f"/api/v1/namespaces/{namespace}/{resource}" + (f"/{name}" if name else "")


def apps(resource: str, name: str = "", namespace: str = SPACE) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/{resource}" + (f"/{name}" if name else "")


def child(kind: str, name: str, labels: Any = None, owners: Any = None, **rest: Any) -> Any:
    """An object as the controller creates it for policy ``chat``."""
    metadata = {
        "name": name,
        "labels": LABELS if labels is None else labels,
        "ownerReferences": [OWNER] if owners is None else owners,
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **rest}


def template(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app": "web"}, "annotations": {"team": "a"}},
        "spec": {"containers": CONTAINERS, **spec},
    }


def workload(kind: str, **spec: Any) -> dict[str, Any]:
    selector = {"matchLabels": {"app": "web"}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "web"},
        "spec": {"replicas": 0, "selector": selector, "template": template(), **spec},
    }


def event(kind: str = "Pod", component: str = "kvtier", **rest: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat.1", "namespace": SPACE},
        "involvedObject": {"kind": kind, "name": "chat", "namespace": SPACE, "uid": UID},
        "reportingComponent": component,
        "source": {"component": component},
        "reason": "Attached",
        "type": "Normal",
        **rest,
    }


def volume(name: str = "kvtier-mine", **rest: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {**LABELS, "kvtier.io/policy-namespace": SPACE}},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": SPACE, "name": "x"},
            "nfs": {"server": "nas.example", "path": "/kv"},
            **rest,
        },
    }


@dataclass(frozen=True)
class Call:
    """One call as the controller's account. ``name`` says what an attacker would gain."""

    name: str
    method: str
    path: str
    body: Any = None
    content_type: str = "application/json"
    query: tuple[str, ...] = field(default=("dryRun=All",))

    def send(self, api: Any) -> tuple[int, Any]:
        url = f"{self.path}?{'&'.join(self.query)}" if self.query else self.path
        status, body = api.request(self.method, url, self.body, content_type=self.content_type)
        return status, body


def patch(name: str, path: str, body: Any) -> Call:
    return Call(name, "PATCH", path, body, MERGE)


def pod_template(**parts: Any) -> dict[str, Any]:
    return {"spec": {"template": parts}}


HOOK = "/apis/admissionregistration.k8s.io/v1/{}webhookconfigurations"
ROLES = "/apis/rbac.authorization.k8s.io/v1"
WEB, SET = apps("deployments", "web"), apps("statefulsets", "web")
ADMIN_BINDING = {
    "metadata": {"name": "owned"},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "cluster-admin",
    },
    "subjects": [{"kind": "User", "name": "eve", "apiGroup": "rbac.authorization.k8s.io"}],
}
SECRET = {"type": "Opaque", "data": {"token": "eA=="}}
ESCALATIONS = [
    # Workloads: run something else, or with other rights.
    patch("privileged Deployment", WEB, pod_template(spec={"containers": PRIVILEGED})),
    patch("host namespace", WEB, pod_template(spec={"hostNetwork": True})),
    patch("other account", WEB, pod_template(spec={"serviceAccountName": "admin"})),
    patch("host directory", WEB, pod_template(spec={"volumes": [
        {"name": "root", "hostPath": {"path": "/"}}
    ]})),
    patch("other image", WEB, pod_template(spec={"containers": [
        {"name": "main", "image": "evil.example/image"}
    ]})),
    patch("runtime class", WEB, pod_template(spec={"runtimeClassName": "none"})),
    patch("pods of another Service", WEB, pod_template(metadata={"labels": {"role": "api"}})),
    patch("annotation of a mesh", WEB, pod_template(
        metadata={"annotations": {"sidecar.istio.io/inject": "false"}}
    )),
    patch("annotation removed", WEB, pod_template(metadata={"annotations": {"team": None}})),
    patch("annotation changed", WEB, pod_template(
        metadata={"annotations": {"team": "b", **RESTARTED}}
    )),
    patch("scaled to zero", WEB, {"spec": {"replicas": 99}}),
    patch("paused", WEB, {"spec": {"paused": True}}),
    patch("strategy", WEB, {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}}),
    patch("history removed", WEB, {"spec": {"revisionHistoryLimit": 0}}),
    patch("labels of a Deployment", WEB, {"metadata": {"labels": {"owned": "yes"}}}),
    patch("owner of a Deployment", WEB, {"metadata": {"ownerReferences": [OWNER]}}),
    patch("finalizer of a Deployment", WEB, {"metadata": {"finalizers": ["example.com/x"]}}),
    patch("privileged StatefulSet", SET, pod_template(spec={"containers": PRIVILEGED})),
    patch("StatefulSet never updated", SET, {"spec": {"updateStrategy": {
        "type": "OnDelete", "rollingUpdate": None
    }}}),
    patch("kube-system Deployment", apps("deployments", "dns", "kube-system"), pod_template(
        spec={"containers": PRIVILEGED}
    )),
    patch("kube-system restart", apps("deployments", "dns", "kube-system"), pod_template(
        metadata={"annotations": RESTARTED}
    )),
    Call("new Deployment", "POST", apps("deployments"), workload("Deployment")),
    Call("Deployment deleted", "DELETE", WEB),
    Call("DaemonSet", "POST", apps("daemonsets"), workload("DaemonSet")),
    patch("scale", f"{WEB}/scale", {"spec": {"replicas": 9}}),
    # Pods.
    Call("privileged pod", "POST", core("pods"), {
        "metadata": {"name": "x"}, "spec": {"containers": PRIVILEGED}
    }),
    Call("pod that was not injected", "DELETE", core("pods", "bare")),
    Call("pod of kube-system", "DELETE", core("pods", "injected", "kube-system")),
    Call("pod of the operator's namespace", "DELETE", core("pods", "injected", OPERATOR)),
    Call("all pods", "DELETE", core("pods")),
    Call("exec", "POST", core("pods", "injected/exec"), None, query=("command=sh",)),
    patch("ephemeral container", core("pods", "injected/ephemeralcontainers"), {}),
    patch("annotation of a pod", core("pods", "bare"), {
        "metadata": {"annotations": {"kvtier.io/structural": "{}"}}
    }),
    # ConfigMaps.
    patch("aws-auth", core("configmaps", "aws-auth", "kube-system"), {
        "data": {"mapUsers": "- groups: [system:masters]"}
    }),
    Call("ConfigMap in kube-system", "POST", core("configmaps", "", "kube-system"), child(
        "ConfigMap", "chat-live"
    )),
    Call("ConfigMap in kube-public", "POST", core("configmaps", "", "kube-public"), child(
        "ConfigMap", "chat-live"
    )),
    patch("ConfigMap of another application", core("configmaps", "mine"), {"data": {"a": "b"}}),
    patch("taken over with labels", core("configmaps", "mine"), {
        "metadata": {"labels": LABELS, "ownerReferences": [OWNER]}
    }),
    Call("taken over with apply", "PATCH", core("configmaps", "mine"), child(
        "ConfigMap", "mine", data={"a": "b"}
    ), APPLY, ("dryRun=All", "fieldManager=kvtier", "force=true")),
    Call("foreign ConfigMap deleted", "DELETE", core("configmaps", "mine")),
    Call("ConfigMap of any name", "POST", core("configmaps"), child("ConfigMap", "coredns")),
    Call("ConfigMap without an owner", "POST", core("configmaps"), child(
        "ConfigMap", "chat-live", owners=[]
    )),
    Call("ConfigMap that deletes a node with it", "POST", core("configmaps"), child(
        "ConfigMap", "chat-live",
        owners=[OWNER, {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}],
    )),
    patch("node as another owner of live values", core("configmaps", "chat-live"), {
        "metadata": {"ownerReferences": [
            OWNER, {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"},
        ]}
    }),
    patch("own settings", core("configmaps", "kvtier-settings", OPERATOR), {"data": {"x": "y"}}),
    # Secrets.
    Call("token of another account", "POST", core("secrets"), child(
        "Secret", "chat-token", type="kubernetes.io/service-account-token",
    ) | {"metadata": {
        "name": "chat-token", "labels": LABELS, "ownerReferences": [OWNER],
        "annotations": {"kubernetes.io/service-account.name": "default"},
    }}),
    Call("Secret of any name", "POST", core("secrets"), child("Secret", "db", **SECRET)),
    Call("Secret with other keys", "POST", core("secrets"), child(
        "Secret", "chat-token", type="Opaque", data={"password": "eA=="}
    )),
    Call("foreign Secret deleted", "DELETE", core("secrets", "db")),
    Call("Secret changed", "PATCH", core("secrets", "db"), {"data": {"a": "eA=="}}, MERGE),
    Call("Secret read", "GET", core("secrets", "db"), query=()),
    Call("Secret read by a patch", "PATCH", core("secrets", "db"), {}, MERGE, ()),
    Call("Secret read by a dry run", "PATCH", core("secrets", "db"), {}, MERGE),
    Call("Secret read by an apply", "PATCH", core("secrets", "db"), {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "db", "labels": LABELS}
    }, APPLY, ("dryRun=All", "fieldManager=kvtier", "force=true")),
    Call("Secret of another name read", "PATCH", core("secrets", "labelled"), {}, MERGE),
    Call("token changed", "PATCH", core("secrets", "chat-token"), {
        "data": {"token": "eA=="}
    }, MERGE, ()),
    Call("token of an account read", "PATCH", core("secrets", "old-token"), {}, MERGE),
    Call("Secrets listed", "GET", core("secrets"), query=()),
    Call("certificate deleted", "DELETE", core("secrets", "kvtier-webhook-certificates", OPERATOR)),
    Call("another Secret of the operator", "POST", core("secrets", "", OPERATOR), {
        "metadata": {"name": "other"}, **SECRET
    }),
    # Storage.
    Call("foreign claim deleted", "DELETE", core("persistentvolumeclaims", "data")),
    patch("foreign claim taken over", core("persistentvolumeclaims", "data"), {
        "metadata": {"labels": LABELS, "ownerReferences": [OWNER]}
    }),
    Call("claim from a snapshot", "POST", core("persistentvolumeclaims"), child(
        "PersistentVolumeClaim", "chat-disk-1",
        spec={**CLAIM, "dataSource": {"kind": "PersistentVolumeClaim", "name": "data"}},
    )),
    Call("claim without an owner", "POST", core("persistentvolumeclaims"), child(
        "PersistentVolumeClaim", "chat-disk-1", owners=[], spec=CLAIM
    )),
    Call("host volume", "POST", "/api/v1/persistentvolumes", volume(
        nfs=None, hostPath={"path": "/etc"}
    )),
    Call("volume on another server", "POST", "/api/v1/persistentvolumes", volume(
        nfs={"server": "evil.example", "path": "/kv"}
    )),
    Call("foreign volume deleted", "DELETE", "/api/v1/persistentvolumes/kvtier-foreign"),
    patch("foreign volume bound elsewhere", "/api/v1/persistentvolumes/kvtier-foreign", {
        "spec": {"claimRef": {"namespace": "other", "name": "x"}}
    }),
    # Events, Leases, policies.
    Call("Event of another component", "POST", core("events"), event(component="kubelet")),
    Call("Event about a node", "POST", core("events"), event("Node")),
    patch("Event of another component changed", core("events", "theirs"), {"count": 9}),
    Call("Lease of another controller", "POST",
         f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR}/leases",
         {"metadata": {"name": "other"}}),
    Call("Lease of a node", "POST",
         "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
         {"metadata": {"name": "kvtier-controller"}}),
    patch("policy", f"/apis/kvtier.io/v1alpha1/namespaces/{SPACE}/kvtierpolicies/chat", {
        "spec": {"minLoadTokens": 9}
    }),
    # Rights and admission.
    Call("cluster-admin", "POST", f"{ROLES}/clusterrolebindings", ADMIN_BINDING),
    patch("own role", f"{ROLES}/clusterroles/kvtier-controller", {"rules": [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    ]}),
    Call("token of an account", "POST", core("serviceaccounts", "default/token"), {"spec": {}}),
    Call("the guard deleted", "DELETE",
         "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/kvtier-controller"),
    Call("the guard's binding deleted", "DELETE",
         "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/kvtier-controller"),
    Call("own webhook for everything", "POST", HOOK.format("mutating"), {
        "metadata": {"name": "other"}
    }),
    Call("node label", "PATCH", "/api/v1/nodes/any", {"metadata": {"labels": {"a": "b"}}}, MERGE),
    patch("namespace label", f"/api/v1/namespaces/{SPACE}", {"metadata": {"labels": {
        "pod-security.kubernetes.io/enforce": "privileged"
    }}}),
]  # fmt: skip
"""Without ``# fmt: skip`` each call would take ten lines."""

SETS = f"/apis/{guard_leader_worker_sets.GROUP}/v1/namespaces/{SPACE}/leaderworkersets"
ESCALATIONS += [
    Call("LeaderWorkerSet created", "POST", SETS, guard_leader_worker_sets.objects()[0]),
    Call("LeaderWorkerSet deleted", "DELETE", f"{SETS}/both"),
    *(
        patch(f"LeaderWorkerSet: {name}", f"{SETS}/{found}", body)
        for name, (found, body) in guard_leader_worker_sets.ESCALATIONS.items()
    ),
]
WRITES = [
    Call("live values", "PATCH", core("configmaps", "chat-live"), child(
        "ConfigMap", "chat-live", data={"live.json": "{}"}
    ), APPLY, ("dryRun=All", "fieldManager=kvtier", "force=true")),
    Call("live values of another policy", "PATCH", core("configmaps", "next-live"), child(
        "ConfigMap", "next-live", {**LABELS, "kvtier.io/policy": "next"},
        [{**OWNER, "name": "next"}],
    ), APPLY, ("dryRun=All", "fieldManager=kvtier", "force=true")),
    Call("live values deleted", "DELETE", core("configmaps", "chat-live")),
    Call("token", "POST", core("secrets"), child(
        "Secret", "chat-token", **SECRET
    ), query=("dryRun=All", "fieldManager=kvtier")),
    Call("token read", "PATCH", core("secrets", "chat-token"), {}, MERGE),
    Call("claim", "PATCH", core("persistentvolumeclaims", "chat-disk-2"), child(
        "PersistentVolumeClaim", "chat-disk-2", spec=CLAIM
    ), APPLY, ("dryRun=All", "fieldManager=kvtier", "force=true")),
    Call("volume", "POST", "/api/v1/persistentvolumes", volume()),
    Call("injected pod", "DELETE", core("pods", "injected")),
    Call("Event about a pod", "POST", core("events"), event()),
    Call("Event about a policy", "POST", core("events"), event("KVTierPolicy")),
    patch("restart of a Deployment", WEB, pod_template(metadata={"annotations": RESTARTED})),
    patch("restart of a StatefulSet", SET, pod_template(metadata={"annotations": RESTARTED})),
    Call("Lease", "POST", f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR}/leases", {
        "metadata": {"name": "kvtier-controller"}
    }),
    patch("certificate", core("secrets", "kvtier-webhook-certificates", OPERATOR), {
        "data": {"tls.crt": "eQ=="}
    }),
]  # fmt: skip


WRITES += [
    patch(f"LeaderWorkerSet: {name}", f"{SETS}/{found}", body)
    for name, (found, body) in guard_leader_worker_sets.WRITES.items()
]


@pytest.fixture(scope="module")
def account(
    full_cluster: Any, charts: ModuleType, full_api: Any, nodes: ModuleType, rest: ModuleType
) -> Iterator[Any]:
    """The API server as the controller's account, with the chart installed and objects of others in
    place.
    """
    charts.without_definition(full_cluster)
    with charts.Release(full_cluster.kubeconfig, full_cluster.context) as found:
        try:
            found.install(VALUES)
            nodes.make_namespace(full_api, SPACE)
            definition = guard_leader_worker_sets.definition()
            full_api.request("POST", guard_leader_worker_sets.DEFINITIONS, definition)
            nodes.wait_for("the kind is served", lambda: full_api.request("GET", SETS)[0] == 200)
            for path, body in _objects_of_others():
                status, answer = full_api.request("POST", path, body)
                # A controller of another test may have left its certificate.
                assert status in (201, 409), answer
            name = f"system:serviceaccount:{OPERATOR}:kvtier-controller"
            api = rest.Api(
                full_cluster.kubeconfig, full_cluster.context, "default", impersonate=name
            )
            first = ("paused", "privileged StatefulSet", "foreign ConfigMap deleted")

            def in_force() -> bool:
                return all(
                    "ValidatingAdmissionPolicy" in str(call.send(api)[1].get("message"))
                    for call in ESCALATIONS
                    if call.name in first
                )

            nodes.wait_for("the guard is in force", in_force)
            yield api
        finally:
            found.uninstall()
            for path in (core("configmaps", "aws-auth", "kube-system"),
                         core("pods", "injected", "kube-system"),
                         core("pods", "injected", OPERATOR),
                         apps("deployments", "dns", "kube-system"),
                         "/api/v1/persistentvolumes/kvtier-foreign",
                         core("secrets", "kvtier-webhook-certificates", OPERATOR),
                         f"{guard_leader_worker_sets.DEFINITIONS}/leaderworkersets."
                         f"{guard_leader_worker_sets.GROUP}",
                         f"/api/v1/namespaces/{SPACE}"):  # fmt: skip
                full_api.request("DELETE", path)


def _objects_of_others() -> list[tuple[str, Any]]:
    pod = {"spec": {"containers": CONTAINERS}}
    injected = {"name": "injected", "annotations": {"kvtier.io/structural": "{}"}}
    claim = {"metadata": {"name": "data"}, "spec": {**CLAIM, "storageClassName": ""}}
    dns = workload("Deployment") | {"metadata": {"name": "dns"}}
    return [
        (core("configmaps", "", "kube-system"), {"metadata": {"name": "aws-auth"}}),
        (apps("deployments", "", "kube-system"), dns),
        (core("pods", "", "kube-system"), {"metadata": injected, **pod}),
        (core("pods", "", OPERATOR), {"metadata": injected, **pod}),
        (core("configmaps"), {"metadata": {"name": "mine"}}),
        (core("configmaps"), child("ConfigMap", "chat-live", data={"live.json": "{}"}, owners=[])),
        (core("secrets"), {"metadata": {"name": "db"}, **SECRET}),
        (core("secrets"), child("Secret", "labelled", owners=[], **SECRET)),
        (core("secrets"), child("Secret", "chat-token", owners=[], **SECRET)),
        (core("secrets"), {"metadata": {
            "name": "old-token",
            "annotations": {"kubernetes.io/service-account.name": "default"},
        }, "type": "kubernetes.io/service-account-token"}),
        (core("secrets", "", OPERATOR), {
            "metadata": {"name": "kvtier-webhook-certificates"},
            "type": "Opaque", "data": {"tls.crt": "eA=="},
        }),
        (core("persistentvolumeclaims"), claim),
        (core("pods"), {"metadata": {"name": "bare"}, **pod}),
        (core("pods"), {"metadata": injected, **pod}),
        (core("events"), event("Node", "kubelet", metadata={"name": "theirs"})
         | {"involvedObject": {"kind": "Pod", "name": "x", "namespace": SPACE}}),
        (apps("deployments"), workload("Deployment")),
        (apps("statefulsets"), workload("StatefulSet", serviceName="web")),
        *((SETS, body) for body in guard_leader_worker_sets.objects()),
        ("/api/v1/persistentvolumes", {
            "metadata": {"name": "kvtier-foreign"}, "spec": volume()["spec"]
        }),
    ]  # fmt: skip


def test_there_are_at_least_fifty_escalations_and_their_names_differ() -> None:
    assert len({call.name for call in ESCALATIONS}) == len(ESCALATIONS) >= 50


@pytest.mark.parametrize("call", ESCALATIONS, ids=lambda call: call.name)
def test_an_escalation_is_denied(account: Any, call: Call) -> None:
    status, body = call.send(account)
    message = str(body.get("message"))
    by_rights = status == 403 and "cannot" in message
    by_guard = status in (403, 422) and "ValidatingAdmissionPolicy" in message
    assert by_rights or by_guard, (status, message)


@pytest.mark.parametrize("call", WRITES, ids=lambda call: call.name)
def test_what_the_controller_writes_is_allowed(account: Any, call: Call) -> None:
    status, body = call.send(account)
    # An object of that name may exist already; the API server asks the guard first.
    assert status in (200, 201) or body.get("reason") == "AlreadyExists", body


def test_the_webhooks_can_be_changed_only_in_their_ca_bundle(account: Any, full_api: Any) -> None:
    for kind in ("mutating", "validating"):
        path = f"{HOOK.format(kind)}/kvtier"
        (hook,) = full_api.request("GET", path)[1]["webhooks"]
        everything = [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"],
                       "resources": ["*/*"]}]  # fmt: skip
        for changed in (
            {**hook, "rules": everything},
            {**hook, "namespaceSelector": {"matchLabels": {"any": "other"}}},
            {**hook, "failurePolicy": "Fail"},
            {**hook, "clientConfig": {"url": "https://evil.example/"}},
        ):
            status, body = patch("", path, {"webhooks": [changed]}).send(account)
            assert status in (403, 422), (changed, body)
            assert "ValidatingAdmissionPolicy" in body["message"]
        bundle = {**hook, "clientConfig": {**hook["clientConfig"], "caBundle": CA}}
        assert patch("", path, {"webhooks": [bundle]}).send(account)[0] == 200


def test_other_accounts_are_not_limited(account: Any, full_api: Any) -> None:
    assert patch("", WEB, {"spec": {"replicas": 1}}).send(full_api)[0] == 200
    assert Call("", "DELETE", core("configmaps", "mine")).send(full_api)[0] == 200


def test_without_rollout_enabled_workloads_cannot_be_patched_at_all(
    full_cluster: Any, charts: ModuleType, account: Any, nodes: ModuleType
) -> None:
    with charts.Release(full_cluster.kubeconfig, full_cluster.context) as found:
        found.upgrade({**VALUES, "rollout": {"enabled": False}})
        call = patch("", WEB, pod_template(metadata={"annotations": RESTARTED}))
        nodes.wait_for("the patch is forbidden", lambda: call.send(account)[0] == 403)
        for path in (WEB, SET):
            body = pod_template(metadata={"annotations": RESTARTED})
            assert patch("", path, body).send(account)[0] == 403
        assert account.request("GET", apps("deployments"))[0] == 403
        found.upgrade(VALUES)


CA = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUJkRENDQVJxZ0F3SUJBZ0lVZg=="
