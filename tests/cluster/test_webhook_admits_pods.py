"""The API server admits the same pods with KVTier as without it."""

from __future__ import annotations

import collections
import copy
import json
import random
import secrets
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, policy

from kvtier_operator.api.names import POLICY_ANNOTATION, SKIPPED_ANNOTATION

ENFORCE = "pod-security.kubernetes.io/enforce"
PODS_PER_SPACE = 30
SEED = 20
MESSAGES = 3
"""How many rejected pods a failure shows."""
POLICIES_KNOWN = 'kvtier_webhook_policies{state="readable"}'
Guard = tuple[str, dict[str, Any]]


def bounds(kind: str, **item: Any) -> Guard:
    return "limitranges", {
        "metadata": {"generateName": "bounds-"},
        "spec": {"limits": [{"type": kind, **item}]},
    }


def share(hard: dict[str, str], **spec: Any) -> Guard:
    return "resourcequotas", {
        "metadata": {"generateName": "share-"},
        "spec": {"hard": hard, **spec},
    }


SPACES: dict[str, tuple[dict[str, str], list[Guard]]] = {
    "plain": ({}, []),
    "baseline": ({ENFORCE: "baseline"}, []),
    "restricted": ({ENFORCE: "restricted"}, []),
    "bounded-containers": (
        {},
        [
            bounds(
                "Container",
                max={"cpu": "8", "memory": "12Gi"},
                min={"cpu": "100m"},
                maxLimitRequestRatio={"cpu": "16"},
            )
        ],
    ),
    "bounded-pods": (
        {},
        [bounds("Pod", max={"memory": "20Gi"}, maxLimitRequestRatio={"memory": "4"})],
    ),
    "defaults": (
        {},
        [
            bounds(
                "Container",
                default={"cpu": "2", "memory": "4Gi"},
                defaultRequest={"cpu": "1", "memory": "1Gi"},
            ),
            share(
                {
                    "limits.memory": "24Gi",
                    "requests.cpu": "8",
                    "limits.ephemeral-storage": "20Gi",
                    "pods": "3",
                }
            ),
        ],
    ),
    "scoped-quotas": (
        {ENFORCE: "baseline"},
        [
            share({"requests.memory": "16Gi"}, scopes=["NotBestEffort"]),
            share({"limits.memory": "20Gi"}, scopes=["Terminating"]),
            share({"pods": "2"}, scopes=["BestEffort"]),
        ],
    ),
}


def tier(name: str, volume: dict[str, Any], **files: Any) -> dict[str, Any]:
    return {
        "name": name,
        "fileSystem": {"capacity": "1Gi", "sharing": "Node", "volume": volume, **files},
    }


def policies() -> Iterator[dict[str, Any]]:
    """Each for pods with its own name as a label."""
    ram = {"name": "ram", "memory": {"capacity": "2Gi"}}
    variants: dict[str, dict[str, Any]] = {
        "ram": {},
        "huge": {"tiers": [{"name": "ram", "memory": {"capacity": "64Gi"}}]},
        "host": {"tiers": [ram, tier("disk", {"hostPath": {"path": "/mnt/kv"}})]},
        "local": {
            "tiers": [
                ram,
                tier("disk", {"emptyDir": {"sizeLimit": "10Gi"}}, sharing="Pod"),
                tier(
                    "long-" + "x" * 58,
                    {
                        "ephemeral": {
                            "volumeClaimTemplate": {
                                "spec": {"resources": {"requests": {"storage": "1Gi"}}}
                            }
                        }
                    },
                    sharing="Pod",
                ),
            ]
        },
        "claims": {
            "tiers": [
                ram,
                tier("mine", {"persistentVolumeClaim": {"claimName": "kv"}}),
                tier("nas", {"nfs": {"server": "nas.example", "path": "/kv"}}, sharing="Cluster"),
            ]
        },
        "engine": {"engine": {"daemon": "Engine"}, "resources": {"memoryPolicy": "Grow"}},
        "strict": {"engine": {"daemon": "Engine"}, "resources": {"memoryPolicy": "Validate"}},
        "image": {
            "engine": {"delivery": "ImageVolume"},
            "isolation": {"keySecretRef": {"name": "key"}},
        },
        "thrifty": {"resources": {"daemon": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}}},
        "offloading": {"engine": {"connector": "Offloading"}},
        "lmcache": {"engine": {"connector": "LMCache"}},
        "named": {"engine": {"containerName": "vllm", "localRanks": 4, "hashSeed": "7"}},
    }
    for name, spec in variants.items():
        yield policy(name, {"policy": name}, **spec)


def some(choose: random.Random, probability: float = 0.3, **options: Any) -> dict[str, Any]:
    """Some of these fields."""
    return {
        key: copy.deepcopy(value) for key, value in options.items() if choose.random() < probability
    }


def resources(choose: random.Random) -> dict[str, Any]:
    cpu, memory = (
        choose.choice(["500m", "2", "3500m", "8"]),
        choose.choice(["512Mi", "2Gi", "4Gi", "10Gi"]),
    )
    both = {"cpu": cpu, "memory": memory, **some(choose, **{"ephemeral-storage": "1Gi"})}
    gpu = {"nvidia.com/gpu": "1"} if choose.random() < 0.4 else {}
    return choose.choice(
        [
            {},
            {"requests": both},
            {"limits": {**both, **gpu}},
            {"requests": {**both, **gpu}, "limits": {**both, **gpu}},
            {"requests": {"cpu": "250m", "memory": "256Mi", **gpu}, "limits": {**both, **gpu}},
            {"limits": {"memory": memory, **gpu}, "requests": {"cpu": "1", **gpu}},
        ]
    )


SECURE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def container(choose: random.Random, name: str, secure: dict[str, Any]) -> dict[str, Any]:
    port = {
        "containerPort": choose.choice([8000, 9400, 9401]),
        **some(choose, name=f"p-{name}"[:15]),
    }
    return {
        "name": name,
        "image": f"registry.example/{choose.choice(['vllm', 'other'])}:1",
        "resources": resources(choose),
        **copy.deepcopy(secure),
        **some(
            choose,
            env=[{"name": "PYTHONPATH", "value": "/own"}, {"name": "VLLM_PLUGINS", "value": "own"}],
            envFrom=[{"secretRef": {"name": "own", "optional": True}}],
            ports=[port],
            volumeMounts=[{"name": "own", "mountPath": "/dev/shm"}],
            livenessProbe={"tcpSocket": {"port": 8000}},
            lifecycle={"preStop": {"sleep": {"seconds": 1}}},
            workingDir="/srv",
        ),
    }


def any_pod(choose: random.Random, name: str) -> dict[str, Any]:
    """Some pod or other that the policy of this name selects."""
    secure = {"securityContext": SECURE} if choose.random() < 0.6 else {}
    engine = container(choose, choose.choice(["vllm", "engine", "x" * 63]), secure)
    engine |= choose.choice(
        [
            {"command": ["vllm", "serve", "model"]},
            {"command": ["sh", "-c", "exec vllm serve model --tensor-parallel-size $(N)"]},
            {"args": ["serve", "model", "--kv-transfer-config", "{}"]},
            {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server"], "args": ["-tp=2"]},
            {},
        ]
    )
    others = [
        container(choose, f"side-{index}", secure) for index in range(choose.choice([0, 0, 1, 2]))
    ]
    containers = [engine, *others]
    choose.shuffle(containers)
    init = container(choose, "init", secure) | some(choose, restartPolicy="Always")
    if init.get("restartPolicy") != "Always":
        for key in ("livenessProbe", "lifecycle"):
            init.pop(key, None)
    spec: dict[str, Any] = {
        "containers": containers,
        "volumes": [{"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
        **some(
            choose,
            initContainers=[init],
            securityContext={
                "runAsUser": 2000,
                "fsGroup": 3000,
                "supplementalGroups": [7],
                "runAsNonRoot": True,
            },
            shareProcessNamespace=True,
            automountServiceAccountToken=False,
            terminationGracePeriodSeconds=1,
            activeDeadlineSeconds=600,
            restartPolicy="Never",
            enableServiceLinks=False,
        ),
        **some(
            choose,
            0.1,
            hostNetwork=True,
            hostIPC=True,
            resources={
                "requests": {"cpu": "9", "memory": "14Gi"},
                "limits": {"cpu": "12", "memory": "20Gi"},
            },
        ),
    }
    annotations = some(
        choose,
        **{
            "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "own",
            SKIPPED_ANNOTATION: "{}",
        },
    )
    return {
        "metadata": {
            "generateName": "any-",
            "labels": {"policy": name},
            "annotations": annotations,
        },
        "spec": spec,
    }


@pytest.fixture(scope="module")
def webhook(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    allowed = [
        {"namespaces": ["*"], "hostPath": "/mnt/kv"},
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/"}},
    ]
    process = WebhookProcess(
        tmp_path_factory.mktemp("refuses"), full_cluster, {"allowedVolumes": allowed}
    )
    hooks = admission.configurations(process)
    with admission.definition(full_cluster, full_api, nodes), process, installed(full_api, *hooks):
        yield process


def made(api: Any, nodes: ModuleType, labels: dict[str, str], guards: list[Guard]) -> str:
    name: str = nodes.make_namespace(api, f"refuses-{secrets.token_hex(3)}", labels)
    for plural, body in guards:
        nodes.ok(api.request("POST", f"/api/v1/namespaces/{name}/{plural}", body))
    quotas = f"/api/v1/namespaces/{name}/resourcequotas"

    def counted() -> bool:
        return all(
            (each.get("status") or {}).get("hard")
            for each in api.request("GET", quotas)[1]["items"]
        )

    nodes.wait_for("quotas are counted", counted)
    return name


def test_a_pod_that_is_admitted_without_kvtier_is_admitted_with_it(
    full_api: Any, nodes: ModuleType, webhook: WebhookProcess
) -> None:
    choose = random.Random(SEED)
    names = [each["metadata"]["name"] for each in policies()]
    seen: collections.Counter[str] = collections.Counter()
    refused: list[str] = []
    for space, (labels, guards) in SPACES.items():
        plain, injected = (
            made(full_api, nodes, labels, guards),
            made(full_api, nodes, {**labels, **LABELLED}, guards),
        )
        for document in policies():
            path = f"/apis/kvtier.io/v1alpha1/namespaces/{injected}/kvtierpolicies"
            nodes.ok(full_api.request("POST", path, document))
        nodes.wait_for(
            "all policies are known", lambda: webhook.metric(POLICIES_KNOWN) % len(names) == 0
        )
        for _ in range(PODS_PER_SPACE):
            document = any_pod(choose, choose.choice(names))
            query = "pods?dryRun=All&fieldValidation=Strict"
            if full_api.request("POST", f"/api/v1/namespaces/{plain}/{query}", document)[0] != 201:
                seen["refused as it is"] += 1
                continue
            status, body = full_api.request(
                "POST", f"/api/v1/namespaces/{injected}/{query}", document
            )
            if status != 201:
                refused.append(f"{space}: {body['message'][:600]}\n{json.dumps(document)}")
                continue
            annotations = body["metadata"].get("annotations") or {}
            skipped = json.loads(annotations.get(SKIPPED_ANNOTATION, "{}"))
            seen[
                "attached"
                if POLICY_ANNOTATION in annotations
                else skipped.get("reason", "untouched")
            ] += 1
        for namespace in (plain, injected):
            full_api.request("DELETE", f"/api/v1/namespaces/{namespace}")
    assert not refused, f"{len(refused)} of {sum(seen.values())}; {dict(seen)}\n" + "\n".join(
        refused[:MESSAGES]
    )
    assert seen["untouched"] == 0, dict(seen)
    assert seen["attached"] > 50, dict(seen)
    assert seen["WouldBeRefused"] > 5, dict(seen)
