"""OpenShift's security context constraints, and hostNetwork: what KVTier renders is admitted."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="charts are rendered by Helm's own code: helm-python-sdk")

import charts
import openshift
from openshift import ANYUID, HOSTNETWORK_V2, RESTRICTED_V2, Constraints
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed
from tests.support import pod_objects
from tests.support.pod_objects import container, engine, file_tier, memory_tier

from kvtier.config.host_ports import HOST_POD_VARIABLE
from kvtier_operator.api.names import PAYLOAD_CONTAINER, POLICY_ANNOTATION, TIERD_CONTAINER

POLICIES_KNOWN = 'kvtier_webhook_policies{state="readable"}'
CLAIM = file_tier("claim", {"persistentVolumeClaim": {"claimName": "kv"}})
SCRATCH = file_tier("scratch", {"emptyDir": {"sizeLimit": "2Gi"}}, "Pod")
FIRST = openshift.FIRST_USER


@pytest.fixture(scope="module")
def constraints(full_api: Any) -> Iterator[None]:
    path = f"{openshift.POLICIES}/mutatingadmissionpolicies"
    if full_api.request("GET", path)[0] != 200:
        pytest.skip("the API server has no MutatingAdmissionPolicy (Kubernetes 1.36)")
    with openshift.enforce(full_api, RESTRICTED_V2, HOSTNETWORK_V2, ANYUID):
        yield


@pytest.fixture(scope="module")
def webhook(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    # With hostnetwork-v2 the group must be one of the namespace's.
    groups = {"policyBounds": {"storageGids": [{"min": FIRST, "max": FIRST}]}}
    process = WebhookProcess(tmp_path_factory.mktemp("openshift"), full_cluster, groups)
    hooks = admission.configurations(process)
    with admission.definition(full_cluster, full_api, nodes), process, installed(full_api, *hooks):
        yield process


@pytest.fixture
def space(full_api: Any, nodes: ModuleType) -> Iterator[Callable[[Constraints | None], str]]:
    """Makes namespaces, with injection enabled and the rules of an SCC."""
    made: list[str] = []

    def make(scc: Constraints | None) -> str:
        name = f"scc-{secrets.token_hex(3)}"
        metadata = openshift.namespace_metadata(scc) if scc else {"labels": {}}
        metadata["labels"].update(LABELLED)
        nodes.ok(
            full_api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, **metadata}})
        )
        made.append(name)
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        nodes.wait_for("the default account", lambda: full_api.request("GET", path)[0] == 200)
        return name

    yield make
    for name in made:
        full_api.request("DELETE", f"/api/v1/namespaces/{name}")


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chart's Deployments by component."""
    with charts.helm.Chart.load(charts.CHART) as chart:
        texts = chart.render(values, name="kvtier", namespace=charts.NAMESPACE)
    found = {}
    for name in ("controller", "webhook"):
        (text,) = (text for path, text in texts.items() if path.endswith(f"/{name}.yaml"))
        bodies = [body for body in charts.yaml.safe_load_all(text) if body]
        found[name] = next(body for body in bodies if body["kind"] == "Deployment")
    return found


@pytest.mark.usefixtures("constraints")
@pytest.mark.parametrize(
    ("scc", "values"),
    [
        (RESTRICTED_V2, {}),
        (HOSTNETWORK_V2, {"webhook": {"hostNetwork": True}}),
    ],
    ids=["restricted-v2", "hostnetwork-v2"],
)
def test_the_operators_pods_are_admitted_and_run_as_users_of_their_namespace(
    full_api: Any,
    nodes: ModuleType,
    space: Callable[[Constraints | None], str],
    scc: Constraints,
    values: dict[str, Any],
) -> None:
    namespace = space(scc)
    for component, deployment in rendered(values).items():
        template = deployment["spec"]["template"]
        del template["spec"]["serviceAccountName"]
        template["metadata"]["name"] = component
        path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
        spec = nodes.ok(full_api.request("POST", path, template))["spec"]
        assert spec["containers"][0]["securityContext"]["runAsUser"] == FIRST
        assert spec["securityContext"]["runAsNonRoot"] is True


def test_the_rules_are_enforced(
    full_api: Any, constraints: None, space: Callable[[Constraints | None], str]
) -> None:
    """Each of these pods is refused by restricted-v2: the imitation is no empty frame."""
    namespace = space(RESTRICTED_V2)
    pods = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    host_path = {"name": "v", "hostPath": {"path": "/mnt"}}
    refused: dict[str, dict[str, Any]] = {
        "runAsUser": {"securityContext": {"runAsUser": 65532}},
        "fsGroup": {"securityContext": {"fsGroup": 65532}},
        "seccomp": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
        "volumes": {"volumes": [host_path]},
        "hostNetwork": {"hostNetwork": True},
        "hostPort": {"containers": [engine(ports=[{"containerPort": 80, "hostPort": 80}])]},
        "hostPID": {"hostPID": True},
    }
    for what, spec in refused.items():
        pod = pod_objects.pod(metadata={"namespace": namespace})
        pod["spec"].update(spec)
        status, body = full_api.request("POST", pods, pod)
        assert status in (403, 422), what
        assert "restricted-v2" in body["message"], body["message"]
    admitted = pod_objects.pod(metadata={"namespace": namespace})
    assert full_api.request("POST", pods, admitted)[0] == 201


ENGINES: dict[str, tuple[Constraints, dict[str, Any]]] = {
    "restricted": (RESTRICTED_V2, pod_objects.pod()),
    "own-user": (
        RESTRICTED_V2,
        pod_objects.pod(engine(securityContext={"runAsUser": FIRST + 7, "runAsGroup": 0})),
    ),
    "host-network": (
        HOSTNETWORK_V2,
        pod_objects.pod(engine(ports=[{"containerPort": 8000}]), hostNetwork=True),
    ),
    "root": (ANYUID, pod_objects.pod(engine(securityContext={"runAsUser": 0}))),
    "image-user": (ANYUID, pod_objects.pod()),
}


@pytest.mark.usefixtures("constraints")
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_admitted_is_admitted_with_its_tiers(
    full_api: Any,
    nodes: ModuleType,
    webhook: WebhookProcess,
    space: Callable[[Constraints | None], str],
    name: str,
) -> None:
    scc, pod = ENGINES[name]
    namespace = space(scc)
    pod["metadata"].pop("namespace", None)
    policy = pod_objects.policy(
        memory_tier(), CLAIM, SCRATCH, namespace=namespace, security={"storageGid": FIRST}
    )
    _know(full_api, nodes, webhook, namespace, policy)
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict"
    found = nodes.ok(full_api.request("POST", path, pod))
    assert POLICY_ANNOTATION in found["metadata"]["annotations"], found["metadata"]
    assert found["metadata"]["annotations"]["openshift.io/scc"] == scc.name
    assert found["spec"]["securityContext"]["supplementalGroups"] == [FIRST]
    own = container(found, "vllm")["securityContext"]
    for injected in (TIERD_CONTAINER, PAYLOAD_CONTAINER):
        context = container(found, injected)["securityContext"]
        # The same user as the engine, or each image's own.
        assert context.get("runAsUser") == own.get("runAsUser")


def _know(
    api: Any, nodes: ModuleType, webhook: WebhookProcess, namespace: str, policy: Any
) -> None:
    """Creates a policy and waits until the webhook has it."""
    document = json.loads(policy.model_dump_json(by_alias=True, exclude_unset=True))
    document["metadata"] = {"name": policy.metadata.name}
    known = webhook.metric(POLICIES_KNOWN)
    path = f"/apis/kvtier.io/v1alpha1/namespaces/{namespace}/kvtierpolicies"
    nodes.ok(api.request("POST", path, document))
    nodes.wait_for("the policy is known", lambda: webhook.metric(POLICIES_KNOWN) == known + 1)


def _bound(api: Any, namespace: str) -> dict[str, str]:
    """Node by pod."""
    pods = api.request("GET", f"/api/v1/namespaces/{namespace}/pods")[1]["items"]
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in pods
        if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
    }


def _remove(api: Any, nodes: ModuleType, namespace: str, name: str) -> None:
    """Deletes a Deployment, and its pods as their kubelet would."""
    api.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def gone() -> bool:
        found = api.request("GET", pods)[1]["items"]
        for pod in found:
            nodes.finish_deletion(api, namespace, pod["metadata"]["name"])
        return not found

    nodes.wait_for("the pods are gone", gone, 60)


def test_engines_with_host_network_share_a_node(
    full_api: Any,
    nodes: ModuleType,
    webhook: WebhookProcess,
    space: Callable[[Constraints | None], str],
) -> None:
    """As a rolling update needs it: pods of one template, and no more nodes than pods."""
    namespace = space(None)
    _know(full_api, nodes, webhook, namespace, pod_objects.policy(namespace=namespace))
    pod = pod_objects.pod(hostNetwork=True)
    template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "shared"}
    deployment = {
        "metadata": {"name": "chat"},
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": template["metadata"]["labels"]},
            "template": template,
        },
    }
    with nodes.FakeNode(full_api, "shared"):
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        nodes.ok(full_api.request("POST", path, deployment))
        nodes.wait_for("all pods have the node", lambda: len(_bound(full_api, namespace)) == 3, 30)
        pods = full_api.request("GET", f"/api/v1/namespaces/{namespace}/pods")[1]["items"]
        for each in pods:
            tierd = container(each, TIERD_CONTAINER)
            assert HOST_POD_VARIABLE in [variable["name"] for variable in tierd["env"]]
        _remove(full_api, nodes, namespace, "chat")


def test_the_webhook_with_host_network_is_updated_on_as_many_nodes_as_replicas(
    full_api: Any, nodes: ModuleType, space: Callable[[Constraints | None], str]
) -> None:
    namespace = space(None)
    deployment = rendered({"webhook": {"hostNetwork": True}})["webhook"]
    del (
        deployment["metadata"]["namespace"],
        deployment["spec"]["template"]["spec"]["serviceAccountName"],
    )
    deployment["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/os": "linux"}
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            stack.enter_context(nodes.FakeNode(full_api, name))
        nodes.ok(full_api.request("POST", path, deployment))

        def complete(generation: int) -> bool:
            for name in _bound(full_api, namespace):
                nodes.run_pod(full_api, namespace, name)
            for pod in full_api.request("GET", f"/api/v1/namespaces/{namespace}/pods")[1]["items"]:
                if "deletionTimestamp" in pod["metadata"]:
                    nodes.finish_deletion(full_api, namespace, pod["metadata"]["name"])
            status = full_api.request("GET", f"{path}/kvtier-webhook")[1].get("status", {})
            counts = [
                status.get(key) for key in ("replicas", "updatedReplicas", "availableReplicas")
            ]
            return bool(status.get("observedGeneration") == generation and counts == [2, 2, 2])

        nodes.wait_for("both replicas run", lambda: complete(1), 60)
        assert sorted(_bound(full_api, namespace).values()) == ["one", "two"]
        change = {"spec": {"template": {"metadata": {"annotations": {"changed": "yes"}}}}}
        nodes.ok(
            full_api.request("PATCH", f"{path}/kvtier-webhook", change, content_type=nodes.MERGE)
        )
        nodes.wait_for("both replicas are replaced", lambda: complete(2), 60)
        _remove(full_api, nodes, namespace, "kvtier-webhook")
