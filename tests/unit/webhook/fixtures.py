"""A fake cache, and documents of policies, pods and admission reviews."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_operator.kube.resources import POLICIES, Cache, Kind, Object
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.lister import WebhookLister

SERVING = "serving"


class FakeCache(Cache):
    """Holds what a test puts in, and notifies a listener as the real cache does."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str, str], Object] = {}
        self.complete = True
        self.listener: WebhookLister | None = None

    def put(self, kind: Kind, found: Mapping[str, Any]) -> None:
        key = (kind, found["metadata"].get("namespace") or "", found["metadata"]["name"])
        event = "MODIFIED" if key in self.objects else "ADDED"
        self.objects[key] = found
        if self.listener is not None:
            self.listener.changed(kind, found, event)

    def drop(self, kind: Kind, namespace: str, name: str) -> None:
        found = self.objects.pop((kind, namespace, name))
        if self.listener is not None:
            self.listener.changed(kind, found, "DELETED")

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self.objects.get((kind, namespace or "", name))

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        return [
            found
            for (each, space, _), found in self.objects.items()
            if each == kind and (namespace is None or space == namespace)
        ]

    def synced(self) -> bool:
        return self.complete


class Clock:
    """A clock that tests move."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Fixture:
    """Everything that decisions need."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings.model_validate(settings)
        self.cache, self.clock = FakeCache(), Clock()
        self.lister = WebhookLister(self.cache, self.settings, self.clock)
        self.cache.listener = self.lister

    def policy(
        self, name: str = "chat", *, created: int = 1, uid: str = "", **spec: Any
    ) -> dict[str, Any]:
        """Puts a policy in."""
        document = policy_document(name, **spec)
        document["metadata"] |= {
            "uid": uid or f"uid-{name}",
            "creationTimestamp": f"2026-01-01T00:00:{created:02d}Z",
            "resourceVersion": str(created),
            "generation": 1,
        }
        self.cache.put(POLICIES, document)
        return document


def policy_document(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """A policy as a person writes it."""
    return {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": name, "namespace": SERVING},
        "spec": {
            "podSelector": {"matchLabels": {"app": "engine"}},
            "tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}],
            **spec,
        },
    }


def disk(path: str = "/mnt/kv", **volume: Any) -> dict[str, Any]:
    """A file tier."""
    files = {"capacity": "1Gi", "sharing": "Node", "volume": volume or {"hostPath": {"path": path}}}
    return {"name": "disk", "fileSystem": files}


def pod(**metadata: Any) -> dict[str, Any]:
    """A pod at admission: neither name nor uid."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "engine-", "labels": {"app": "engine"}, **metadata},
        "spec": {
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm:1",
                    "command": ["vllm", "serve", "model"],
                    "resources": {"limits": {"cpu": "4", "memory": "16Gi"}},
                }
            ]
        },
    }


def admission_review(
    found: Mapping[str, Any],
    operation: str = "CREATE",
    old: Mapping[str, Any] | None = None,
    **request: Any,
) -> dict[str, Any]:
    """An AdmissionReview about an object."""
    group, _, version = str(found.get("apiVersion", "v1")).rpartition("/")
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "question",
            "kind": {"group": group, "version": version, "kind": found.get("kind", "Pod")},
            "operation": operation,
            "namespace": SERVING,
            "object": copy.deepcopy(dict(found)),
            "oldObject": copy.deepcopy(dict(old)) if old is not None else None,
            **request,
        },
    }


def body(review: Mapping[str, Any]) -> bytes:
    return json.dumps(review).encode()
