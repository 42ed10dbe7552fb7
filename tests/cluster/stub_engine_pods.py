"""Pods of the stub engine, and policies for them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import images
from nodes import ok, wait_for
from serving import container_status, pods_of

STORAGE_GID = 3000
IMPATIENT = {"startTimeoutSeconds": 10, "retrySeconds": 600}
"""``attach`` of policies that prevent a pod from starting. A busy machine starts others late."""
CONTAINER = "engine"
PORT = 8000
APP = "engine"


def deployment(
    *,
    container: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    name: str = APP,
) -> dict[str, Any]:
    """A Deployment of one stub engine. ``container`` and ``pod`` override parts of their specs."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "terminationGracePeriodSeconds": 2,
                    "containers": [
                        {
                            "name": CONTAINER,
                            "image": images.PAYLOAD,
                            "imagePullPolicy": "Never",
                            # A command that tells of vLLM, as an engine's does.
                            "command": [
                                "/usr/local/bin/python3",
                                "/stand-in/stub_engine.py",
                                "vllm",
                                "serve",
                            ],
                            "volumeMounts": [{"name": "stand-in", "mountPath": "/stand-in"}],
                            "readinessProbe": {
                                "httpGet": {"path": "/health", "port": PORT},
                                "periodSeconds": 1,
                            },
                            "resources": {
                                "limits": {"memory": "256Mi"},
                                "requests": {"cpu": "10m", "memory": "64Mi"},
                            },
                            **(container or {}),
                        }
                    ],
                    "volumes": [{"name": "stand-in", "configMap": {"name": "stand-in"}}],
                    **(pod or {}),
                },
            },
        },
    }


def memory(capacity: str = "16Mi") -> dict[str, Any]:
    """The first tier."""
    return {"name": "ram", "memory": {"capacity": capacity}}


def files(volume: Mapping[str, Any], name: str = "disk", sharing: str = "Node") -> dict[str, Any]:
    """A file tier on ``volume``, however full this machine's disk is."""
    return {
        "name": name,
        "fileSystem": {
            "capacity": "256Mi",
            "minFree": "0",
            "sharing": sharing,
            "volume": dict(volume),
        },
    }


def policy(*tiers: Mapping[str, Any], name: str = "tiers", **spec: Any) -> dict[str, Any]:
    """A policy for the stand-in engine; RAM only where no tier is named."""
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": {"app": APP}},
            "engine": {"containerName": CONTAINER},
            "selection": "Weighted",
            "security": {"storageGid": STORAGE_GID},
            "resources": {"daemon": {"requests": {"cpu": "20m"}, "limits": {"cpu": "2"}}},
            "attach": {"startTimeoutSeconds": 120, "retrySeconds": 600},
            "tiers": [dict(tier) for tier in tiers] or [memory()],
            **spec,
        },
    }


class Place:
    """A namespace of one test, with its objects and requests."""

    def __init__(self, cluster: Any, api: Any, namespace: str) -> None:
        self._cluster, self._api, self.namespace = cluster, api, namespace

    def prepare(self) -> None:
        """Gives the namespace what pods of the stand-in engine mount."""
        text = Path(__file__).with_name("stub_engine.py").read_text(encoding="utf-8")
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "stand-in"},
                "data": {"stub_engine.py": text},
            }
        )

    def apply(self, *bodies: Mapping[str, Any]) -> None:
        """`kubectl apply` of objects of this namespace."""
        for body in bodies:
            self._cluster.kubectl("-n", self.namespace, "apply", "-f", "-", stdin=json.dumps(body))

    def apply_policy(self, body: Mapping[str, Any]) -> None:
        """Applies a policy and waits until the controller has written its status."""
        self.apply(body)
        name = str(body["metadata"]["name"])
        try:
            wait_for("the policy is looked at", lambda: self.condition("Accepted", name), 60)
        except AssertionError as error:
            options = (
                "-n",
                "kvtier-system",
                "logs",
                "-l",
                "app.kubernetes.io/component=controller",
                "--tail=60",
            )
            raise AssertionError(
                f"{error}\n{self._cluster.kubectl(*options, check=False)}"
            ) from None

    def policy(self, name: str = "tiers") -> dict[str, Any]:
        """A policy as it is."""
        path = f"/apis/kvtier.io/v1alpha1/namespaces/{self.namespace}/kvtierpolicies/{name}"
        return dict(ok(self._api.request("GET", path)))

    def condition(self, kind: str, name: str = "tiers") -> dict[str, Any]:
        """A condition of a policy; empty before there is one."""
        conditions = self.policy(name).get("status", {}).get("conditions", ())
        return next((dict(each) for each in conditions if each["type"] == kind), {})

    def skipped(self, name: str = "tiers") -> list[dict[str, Any]]:
        """``status.skippedPods``."""
        return list(self.policy(name).get("status", {}).get("skippedPods", ()))

    def events(self, reason: str) -> list[dict[str, Any]]:
        """Events of one reason."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        return [
            each for each in ok(self._api.request("GET", path))["items"] if each["reason"] == reason
        ]

    def pods(self, app: str = APP) -> list[dict[str, Any]]:
        """Pods that are not being deleted."""
        return pods_of(self._api, self.namespace, app)

    def ready(
        self, seconds: float = 60, app: str = APP, other_than: str = "", restarts: int = 0
    ) -> dict[str, Any]:
        """The pod, once its engine serves."""

        def found() -> Any:
            for pod in self.pods(app):
                status = container_status(pod, CONTAINER)
                other = pod["metadata"]["uid"] != other_than
                if other and status.get("ready") and status["restartCount"] >= restarts:
                    return pod
            return None

        try:
            return dict(wait_for(f"a ready pod in {self.namespace}", found, seconds))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None

    def attached(self, pod: Mapping[str, Any], seconds: float = 30) -> dict[str, Any]:
        """What the engine of a pod has seen, once it is attached."""
        try:
            wait_for("the engine is attached", lambda: seen(pod).get("attached"), seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{seen(pod)}\n{self.explain()}") from None
        return seen(pod)

    def explain(self) -> str:
        """What a person would look at first."""
        parts = [
            self._cluster.kubectl("-n", self.namespace, "describe", "pods,kvtp", check=False)[
                -8000:
            ]
        ]
        for container in ("kvtier-tierd", CONTAINER):
            options = (
                "-n",
                self.namespace,
                "logs",
                "-l",
                f"app={APP}",
                "-c",
                container,
                "--tail=30",
            )
            parts.append(
                f"--- {container}\n" + self._cluster.kubectl(*options, check=False)[-4000:]
            )
        return "\n".join(parts)


def seen(pod: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine of a pod has seen."""
    return _ask(pod, "GET", "/seen")


def do(pod: Mapping[str, Any], what: str, **options: object) -> dict[str, Any]:
    """One command: ``store``, ``load`` or ``touch``."""
    query = "&".join(f"{name.rstrip('_')}={value}" for name, value in options.items())
    return _ask(pod, "POST", f"/{what}?{query}")


def _ask(pod: Mapping[str, Any], method: str, path: str) -> dict[str, Any]:
    address = f"http://{pod['status']['podIP']}:{PORT}{path}"
    with urllib.request.urlopen(
        urllib.request.Request(address, method=method), timeout=60
    ) as answer:
        return dict(json.load(answer))


def injected(pod: Mapping[str, Any]) -> bool:
    """Whether the pod was given tiers."""
    return "kvtier.io/structural" in pod["metadata"].get("annotations", {})


def skip_annotation(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Why a selected pod was left alone, as its annotation says."""
    return dict(json.loads(pod["metadata"].get("annotations", {}).get("kvtier.io/skipped", "{}")))


def below(directory: Path) -> list[Path]:
    """Everything below a directory."""
    return sorted(directory.rglob("*"))
