"""Policies and pods for tests, as small as they can be."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_operator.api.documents import load_policy
from kvtier_operator.api.limits import decode_limit_range, decode_quota
from kvtier_operator.api.pods import PodSpec, decode, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection import resources
from kvtier_operator.injection.decision import AdmissionContext, PodObject

POLICY_UID = "7d8f8f3e-0000-4000-8000-000000000001"
GUARANTEED = {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}}


def memory_tier(capacity: str = "1Gi") -> dict[str, Any]:
    """The first tier."""
    return {"name": "ram", "memory": {"capacity": capacity}}


def file_tier(name: str, volume: dict[str, Any], sharing: str = "Node") -> dict[str, Any]:
    """A file tier on a volume as policies write it."""
    return {"name": name, "fileSystem": {"capacity": "1Gi", "sharing": sharing, "volume": volume}}


def policy(
    *tiers: dict[str, Any], name: str = "chat", namespace: str = "serving", **spec: Any
) -> KVTierPolicy:
    """A policy that selects ``app: chat``, with a memory tier of 1 GiB where no tiers are given.
    ``spec``: further fields, in camelCase.
    """
    document = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": POLICY_UID,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "podSelector": {"matchLabels": {"app": "chat"}},
            "tiers": list(tiers) or [memory_tier()],
            **spec,
        },
    }
    return load_policy(json.dumps(document))


def engine(name: str = "vllm", **fields: Any) -> dict[str, Any]:
    """A container that runs ``vllm serve``, unless ``fields`` say otherwise."""
    container = {
        "name": name,
        "image": "vllm/vllm-openai:v0.24.0",
        "command": ["vllm", "serve", "org/model"],
        **fields,
    }
    return {key: copy.deepcopy(value) for key, value in container.items() if value is not None}


def pod(
    *containers: dict[str, Any], metadata: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """A pod that the policy selects, with an engine where no containers are given. ``spec``:
    further fields of its spec.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "chat-",
            "namespace": "serving",
            "labels": {"app": "chat"},
            **(metadata or {}),
        },
        "spec": {"containers": list(containers) or [engine()], **copy.deepcopy(spec)},
    }


def context(
    limit_ranges: Sequence[Mapping[str, Any]] = (),
    quotas: Sequence[Mapping[str, Any]] = (),
    siblings: Sequence[PodObject] = (),
    **fields: Any,
) -> AdmissionContext:
    """An admission context from documents."""
    return AdmissionContext(
        limit_ranges=[decode_limit_range(each) for each in limit_ranges],
        quotas=[decode_quota(each) for each in quotas],
        siblings=[decode_pod(each) for each in siblings],
        **fields,
    )


def qos_class(spec: Mapping[str, Any]) -> str:
    """The QoS class of a pod's spec."""
    return resources.qos_class(decode(spec, PodSpec))


def container(found: PodObject, name: str) -> dict[str, Any]:
    """A container or init container of a pod. Raises ``KeyError``."""
    for each in [*(found["spec"].get("initContainers") or ()), *found["spec"]["containers"]]:
        if each["name"] == name:
            return dict(each)
    raise KeyError(name)


def volume(found: PodObject, name: str) -> dict[str, Any]:
    """A volume of a pod. Raises ``KeyError``."""
    for each in found["spec"].get("volumes") or ():
        if each["name"] == name:
            return dict(each)
    raise KeyError(name)


def variables(found: dict[str, Any]) -> dict[str, Any]:
    """Variables of a container by name: the value, or where it comes from."""
    return {
        each["name"]: each.get("valueFrom") or each.get("value", "")
        for each in found.get("env") or ()
    }
