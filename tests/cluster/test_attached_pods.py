"""Attached pods before a real API server: accepted where ``attach`` says so, refused exactly where
it says that.

Nothing runs here. Each pod first passes the server by itself, so that it has the defaults a webhook
sees; then as it would be with its tiers. Both are dry runs: admission answers, nothing is stored.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import (
    GUARANTEED,
    container,
    engine,
    file_tier,
    memory_tier,
    variables,
)

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import TIERD_CONTAINER
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.decision import Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Images, Settings

SETTINGS = Settings(
    images=Images(payload="registry.local/payload:1", tierd="registry.local/payload:1")
)
ENFORCE = "pod-security.kubernetes.io/enforce"
CONFIG = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def bounds(kind: str, **item: Any) -> tuple[str, dict[str, Any]]:
    return "limitranges", {
        "metadata": {"name": "bounds"},
        "spec": {"limits": [{"type": kind, **item}]},
    }


def share(hard: dict[str, str], **spec: Any) -> tuple[str, dict[str, Any]]:
    return "resourcequotas", {"metadata": {"name": "share"}, "spec": {"hard": hard, **spec}}


Setup = tuple[dict[str, str], list[tuple[str, dict[str, Any]]]]
PRIORITY = {
    "matchExpressions": [
        {"scopeName": "PriorityClass", "operator": "In", "values": ["system-node-critical"]}
    ]
}
SETUPS: dict[str, Setup] = {
    "plain": ({}, []),
    "baseline": ({ENFORCE: "baseline"}, []),
    "restricted": ({ENFORCE: "restricted"}, []),
    "container-max-memory": ({}, [bounds("Container", max={"memory": "1700Mi"})]),
    "container-max-wide": ({}, [bounds("Container", max={"memory": "16Gi", "cpu": "8"})]),
    "container-max-cpu": ({}, [bounds("Container", max={"cpu": "4"})]),
    "container-min": ({}, [bounds("Container", min={"memory": "200Mi"})]),
    "container-min-low": ({}, [bounds("Container", min={"memory": "64Mi", "cpu": "50m"})]),
    "container-ratio": ({}, [bounds("Container", maxLimitRequestRatio={"cpu": "4"})]),
    "container-ratio-wide": (
        {},
        [bounds("Container", maxLimitRequestRatio={"cpu": "10", "memory": "1"})],
    ),
    "container-storage": ({}, [bounds("Container", max={"ephemeral-storage": "4Gi"})]),
    "container-default": (
        {},
        [
            bounds(
                "Container",
                default={"cpu": "2", "memory": "2Gi", "ephemeral-storage": "2Gi"},
                defaultRequest={"cpu": "500m", "memory": "1Gi"},
            ),
            share({"limits.memory": "5Gi", "limits.ephemeral-storage": "5Gi", "requests.cpu": "2"}),
        ],
    ),
    "pod-max": ({}, [bounds("Pod", max={"memory": "9Gi"})]),
    "pod-max-wide": ({}, [bounds("Pod", max={"memory": "10Gi"})]),
    "pod-max-cpu": ({}, [bounds("Pod", max={"cpu": "6"})]),
    "pod-min": ({}, [bounds("Pod", min={"memory": "1Gi", "cpu": "1"})]),
    "pod-ratio": ({}, [bounds("Pod", maxLimitRequestRatio={"cpu": "5"})]),
    "quota-memory": ({}, [share({"requests.memory": "9Gi", "limits.memory": "9Gi"})]),
    "quota-memory-wide": ({}, [share({"requests.memory": "10Gi", "limits.memory": "10Gi"})]),
    "quota-plain-names": ({}, [share({"memory": "3Gi", "cpu": "3"})]),
    "quota-cpu-limit": ({}, [share({"limits.cpu": "9"})]),
    "quota-pods": ({}, [share({"pods": "1"})]),
    "quota-count": ({}, [share({"count/pods": "1"})]),
    "quota-storage": ({}, [share({"requests.ephemeral-storage": "1Gi"})]),
    "quota-storage-wide": (
        {},
        [share({"requests.ephemeral-storage": "6Gi", "limits.ephemeral-storage": "6Gi"})],
    ),
    "quota-best-effort": ({}, [share({"pods": "0"}, scopes=["BestEffort"])]),
    "quota-not-best-effort": ({}, [share({"pods": "0"}, scopes=["NotBestEffort"])]),
    "quota-terminating": ({}, [share({"pods": "0"}, scopes=["Terminating"])]),
    "quota-not-terminating": ({}, [share({"requests.cpu": "4"}, scopes=["NotTerminating"])]),
    "quota-priority": ({}, [share({"pods": "0"}, scopeSelector=PRIORITY)]),
}

ENOUGH = {"requests": {"cpu": "8", "memory": "12Gi"}, "limits": {"cpu": "8", "memory": "12Gi"}}
TIGHT = {"requests": {"cpu": "4500m", "memory": "8Gi"}, "limits": {"cpu": "8", "memory": "16Gi"}}
SMALL = {"limits": {"cpu": "2", "memory": "1Gi"}}
BURST = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "8Gi"}}

PODS: dict[str, dict[str, Any]] = {
    "best-effort": pod_objects.pod(),
    "guaranteed": pod_objects.pod(engine(resources=GUARANTEED)),
    "burstable": pod_objects.pod(engine(resources=BURST)),
    "restricted": pod_objects.pod(engine(securityContext=RESTRICTED, resources=BURST)),
    "restricted-pod-wide": pod_objects.pod(
        engine(
            securityContext={"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        ),
        securityContext={
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    ),
    "root": pod_objects.pod(engine(securityContext={"runAsUser": 0}, resources=GUARANTEED)),
    "scratch": pod_objects.pod(
        engine(resources={"limits": {"ephemeral-storage": "4Gi", "memory": "2Gi"}})
    ),
    "job": pod_objects.pod(
        engine(resources=GUARANTEED), activeDeadlineSeconds=600, restartPolicy="Never"
    ),
    "pod-level": pod_objects.pod(
        engine(resources={"requests": {"cpu": "2", "memory": "4Gi"}}), resources=ENOUGH
    ),
    "pod-level-tight": pod_objects.pod(
        engine(resources={"requests": {"cpu": "4"}}), resources=TIGHT
    ),
    "pod-level-small": pod_objects.pod(engine(), resources=SMALL),
    "pod-level-guaranteed": pod_objects.pod(engine(resources=GUARANTEED), resources=ENOUGH),
    "own-sidecar": pod_objects.pod(
        engine(resources=GUARANTEED),
        initContainers=[
            {"name": "log", "image": "x", "restartPolicy": "Always", "resources": GUARANTEED}
        ],
    ),
    "large-init": pod_objects.pod(
        engine(resources=BURST),
        initContainers=[
            {"name": "get", "image": "x", "resources": {"limits": {"cpu": "8", "memory": "9Gi"}}}
        ],
    ),
    "host-network": pod_objects.pod(
        engine(resources=BURST, ports=[{"containerPort": 8000}]), hostNetwork=True
    ),
}

HOST_PATH = file_tier("nvme", {"hostPath": {"path": "/mnt/kv"}})
POLICIES: dict[str, KVTierPolicy] = {
    "ram": pod_objects.policy(),
    "host-path": pod_objects.policy(memory_tier(), HOST_PATH),
    "claims": pod_objects.policy(
        memory_tier(),
        file_tier("claim", {"persistentVolumeClaim": {"claimName": "kv"}}),
        file_tier("scratch", {"emptyDir": {"sizeLimit": "2Gi"}}, "Pod"),
        file_tier("own", {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}, "Pod"),
        file_tier("shared", {"nfs": {"server": "nas.example", "path": "/kv"}}, "Cluster"),
        isolation={"keySecretRef": {"name": "tenant"}},
    ),
    "in-the-engine": pod_objects.policy(
        memory_tier(), HOST_PATH, engine={"daemon": "Engine"}, resources={"memoryPolicy": "Grow"}
    ),
    "offloading": pod_objects.policy(
        memory_tier(),
        file_tier("claim", {"persistentVolumeClaim": {"claimName": "kv"}}),
        engine={"connector": "Offloading"},
        resources={"memoryPolicy": "Ignore"},
    ),
}


class Space:
    """A namespace, and what a webhook knows of it."""

    def __init__(self, api: Any, nodes: ModuleType, name: str, setup: Setup) -> None:
        self.api, self.name = api, name
        self._known: dict[str, Any] = {}
        labels, made = setup
        nodes.make_namespace(api, name, labels)
        for plural, body in made:
            nodes.ok(api.request("POST", f"/api/v1/namespaces/{name}/{plural}", body))
        if any(plural == "resourcequotas" for plural, _ in made):
            nodes.wait_for(
                "quotas are counted",
                lambda: all(each.get("status") for each in self._list("resourcequotas")),
            )
        found = nodes.ok(api.request("GET", f"/api/v1/namespaces/{name}"))
        self.around = pod_objects.context(
            namespace_labels=found["metadata"]["labels"],
            limit_ranges=self._list("limitranges"),
            quotas=self._list("resourcequotas"),
            kubelet_versions=("v1.37.2",),
        )

    def _list(self, plural: str) -> list[dict[str, Any]]:
        status, body = self.api.request("GET", f"/api/v1/namespaces/{self.name}/{plural}")
        assert status == 200, body
        return list(body["items"])

    def create(self, pod: dict[str, Any]) -> tuple[int, Any]:
        """Everything but storing."""
        document = copy.deepcopy(pod)
        document["metadata"]["namespace"] = self.name
        status, body = self.api.request(
            "POST", f"/api/v1/namespaces/{self.name}/pods?dryRun=All", document
        )
        return int(status), body

    def by_itself(self, shape: str) -> Any:
        """A pod as the webhook receives it, with the server's defaults. None if the server rejects
        it.
        """
        if shape not in self._known:
            status, body = self.create(PODS[shape])
            self._known[shape] = body if status == 201 else None
        return self._known[shape]

    def policy(self, policy: KVTierPolicy) -> KVTierPolicy:
        """The policy, in this namespace."""
        return policy.model_copy(
            update={"metadata": policy.metadata.model_copy(update={"namespace": self.name})}
        )


@pytest.fixture(scope="module")
def spaces(full_api: Any, nodes: ModuleType) -> Iterator[dict[str, Space]]:
    token = secrets.token_hex(3)
    made = {
        name: Space(full_api, nodes, f"attached-{token}-{name}", setup)
        for name, setup in SETUPS.items()
    }
    yield made
    for space in made.values():
        full_api.request("DELETE", f"/api/v1/namespaces/{space.name}")


@pytest.mark.parametrize("setup", SETUPS)
def test_the_api_server_rejects_exactly_the_pods_that_are_expected_to_be_rejected(
    spaces: dict[str, Space], setup: str
) -> None:
    space = spaces[setup]
    wrong, attached, refused = [], 0, 0
    for shape in PODS:
        by_itself = space.by_itself(shape)
        if by_itself is None:
            continue
        for which, policy in POLICIES.items():
            decision = inject(space.policy(policy), by_itself, space.around, SETTINGS)
            if isinstance(decision, Injected):
                attached += 1
                status, body = space.create(decision.pod)
                if status != 201:
                    wrong.append(
                        f"{shape}/{which} was attached, and {status}: {body.get('message')}"
                    )
                elif body["status"]["qosClass"] != pod_objects.qos_class(decision.pod["spec"]):
                    wrong.append(f"{shape}/{which}: class {body['status']['qosClass']}")
                elif by_itself["status"]["qosClass"] == "Guaranteed" != body["status"]["qosClass"]:
                    wrong.append(f"{shape}/{which} is no longer Guaranteed")
                continue
            assert decision.reason is SkipReason.WOULD_BE_REFUSED, decision
            refused += 1
            blindly = inject(space.policy(policy), by_itself, pod_objects.context(), SETTINGS)
            if isinstance(blindly, Skipped):
                blindly = _patched_all_the_same(space.policy(policy), by_itself)
            status, body = space.create(blindly.pod)
            if status == 201:
                wrong.append(f"{shape}/{which} was left alone and is accepted: {decision.message}")
    assert not wrong, "\n".join(wrong)
    assert attached + refused > 0


def _patched_all_the_same(policy: KVTierPolicy, pod: dict[str, Any]) -> Injected:
    """The decision without the pod's own resources, which are put back afterwards."""
    spec = {key: value for key, value in pod["spec"].items() if key != "resources"}
    decision = inject(policy, {**pod, "spec": spec}, pod_objects.context(), SETTINGS)
    assert isinstance(decision, Injected), decision
    decision.pod["spec"]["resources"] = pod["spec"]["resources"]
    return decision


def test_the_setups_have_injected_and_skipped_pods(spaces: dict[str, Space]) -> None:
    answers: dict[bool, int] = {True: 0, False: 0}
    for space in spaces.values():
        for shape in PODS:
            by_itself = space.by_itself(shape)
            if by_itself is not None:
                for policy in POLICIES.values():
                    decision = inject(space.policy(policy), by_itself, space.around, SETTINGS)
                    answers[isinstance(decision, Injected)] += 1
    assert min(answers.values()) >= 100, answers


GPU = {"limits": {"nvidia.com/gpu": "8"}}
SHAPES: dict[str, dict[str, Any]] = {
    "shell string": pod_objects.pod(
        engine(command=["sh", "-c", "exec vllm serve m -tp 2 --port 8000"])
    ),
    "python -m": pod_objects.pod(
        engine(command=["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"])
    ),
    "foreign launcher": pod_objects.pod(
        engine(command=["/opt/launch/start"], args=["serve"], image="org/launcher:1", resources=GPU)
    ),
    "arguments in a variable": pod_objects.pod(
        engine(
            command=["sh", "-c", "vllm serve $VLLM_ARGS"],
            env=[{"name": "VLLM_ARGS", "value": "m -tp 2"}],
        )
    ),
    "$(VAR) in arguments": pod_objects.pod(
        engine(args=["-tp", "$(TP)"], env=[{"name": "TP", "value": "2"}])
    ),
    "native sidecars of its own": PODS["own-sidecar"],
    "a mesh's container first": pod_objects.pod(
        {
            "name": "istio-proxy",
            "image": "istio/proxyv2:1",
            "ports": [{"containerPort": 15090, "name": "http-envoy-prom"}],
        },
        engine(),
        initContainers=[{"name": "istio-init", "image": "istio/proxyv2:1"}],
    ),
    "read-only root, restricted": pod_objects.pod(
        engine(securityContext={**RESTRICTED, "readOnlyRootFilesystem": True})
    ),
    "a /dev/shm of its own": pod_objects.pod(
        engine(volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}]),
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}],
    ),
    "hostIPC": pod_objects.pod(hostIPC=True),
    "path from elsewhere": pod_objects.pod(
        engine(
            env=[
                {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}
            ]
        )
    ),
    "a variable twice": pod_objects.pod(
        engine(env=[{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}])
    ),
    "a claimed device": pod_objects.pod(
        engine(resources={"claims": [{"name": "gpu"}]}),
        {"name": "other", "image": "x"},
        resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
    ),
    "no image's user, host network": PODS["host-network"],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", ["claims", "in-the-engine", "offloading"])
def test_pods_of_every_shape_are_injected_and_admitted(
    spaces: dict[str, Space], shape: str, which: str
) -> None:
    restricted = "restricted" in shape and which != "in-the-engine"  # that policy mounts a hostPath
    space = spaces["restricted" if restricted else "plain"]
    status, by_itself = space.create(SHAPES[shape])
    assert status == 201, by_itself
    decision = inject(space.policy(POLICIES[which]), by_itself, space.around, SETTINGS)
    assert isinstance(decision, Injected), decision
    status, body = space.create(decision.pod)
    assert status == 201, body["message"]
    for new, old in zip(body["spec"]["containers"], by_itself["spec"]["containers"], strict=True):
        assert (new.get("command"), new.get("args")) == (old.get("command"), old.get("args"))
    assert "PYTHONPATH" in variables(container(body, "vllm"))
    if which == "claims":
        tierd = container(body, TIERD_CONTAINER)
        accounts = [
            mount for mount in tierd["volumeMounts"] if "serviceaccount" in mount["mountPath"]
        ]
        assert [mount["name"] for mount in accounts] == ["kvtier-no-account"]
        assert (
            body["spec"]["terminationGracePeriodSeconds"]
            == by_itself["spec"]["terminationGracePeriodSeconds"]
        )


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_image_volumes_pass_pod_security(spaces: dict[str, Space], level: str) -> None:
    space = spaces[level]
    policy = space.policy(pod_objects.policy(engine={"delivery": "ImageVolume"}))
    status, by_itself = space.create(PODS["restricted"])
    assert status == 201, by_itself
    decision = inject(policy, by_itself, space.around, SETTINGS)
    assert isinstance(decision, Injected), decision
    status, body = space.create(decision.pod)
    assert status == 201, body["message"]


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            pod_objects.pod(engine(args=["--kv-transfer-config", CONFIG])),
            SkipReason.ALREADY_CONFIGURED,
        ),
        (
            pod_objects.pod(
                engine(command=["sh", "-c", f"vllm serve m --kv-transfer-config '{CONFIG}'"])
            ),
            SkipReason.ALREADY_CONFIGURED,
        ),
        (
            pod_objects.pod(
                engine(
                    command=["sh", "-c", "ray start --head && vllm serve m -tp 16"], resources=GPU
                ),
                metadata={"labels": {"app": "chat", "leaderworkerset.sigs.k8s.io/group-key": "g"}},
            ),
            SkipReason.MULTI_HOST,
        ),
    ],
)
def test_pods_with_server_defaults_are_skipped_with_the_reason(
    spaces: dict[str, Space], pod: dict[str, Any], reason: SkipReason
) -> None:
    space = spaces["plain"]
    status, by_itself = space.create(pod)
    assert status == 201, by_itself
    decision = inject(space.policy(pod_objects.policy()), by_itself, space.around, SETTINGS)
    assert isinstance(decision, Skipped)
    assert decision.reason is reason


def test_an_injected_pod_is_stored_and_returned_unchanged(
    spaces: dict[str, Space],
) -> None:
    space = spaces["plain"]
    policy = space.policy(POLICIES["claims"])
    decision = inject(policy, space.create(pod_objects.pod())[1], space.around, SETTINGS)
    assert isinstance(decision, Injected)
    stored = space.create(decision.pod)[1]
    assert inject(policy, stored, space.around, SETTINGS) == Injected(stored)
