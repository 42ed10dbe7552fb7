"""What is left of objects in memory. A cluster has thousands of pods, and of each the operator reads little."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvtier_operator.kube.resources import Object

Trim = Callable[[dict[str, Any]], Object]
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""kubectl's copy of the whole object, as an annotation."""
POD_SPEC_DROPPED = (
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "schedulingGates",
    "readinessGates",
)
CONTAINER_DROPPED = (
    "env",
    "envFrom",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
)
CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
STATUS_DROPPED = ("podIPs", "hostIPs", "qosClass", "observedGeneration")


def shared(value: Any) -> Any:
    """The same with equal texts held once: keys, names, images and documents repeat in every pod of a workload."""
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, dict):
        return {sys.intern(key): shared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shared(item) for item in value]
    return value


def metadata(found: dict[str, Any]) -> Object:
    """Without what only the API server and kubectl need. What every kind gets."""
    about = found.get("metadata")
    if isinstance(about, dict):
        about.pop("managedFields", None)
        about.pop("selfLink", None)
        annotations = about.get("annotations")
        if annotations and LAST_APPLIED in annotations:
            del annotations[LAST_APPLIED]
    kept: Object = shared(found)
    return kept


def whole(found: dict[str, Any]) -> Object:
    """Pods for who looks into containers: metadata is trimmed, nothing else."""
    return metadata(found)


def pod(found: dict[str, Any]) -> Object:
    """Pods for who looks at states, volumes and images, not at environments, probes and scheduling."""
    spec, status = found.get("spec") or {}, found.get("status") or {}
    for key in POD_SPEC_DROPPED:
        spec.pop(key, None)
    for group in CONTAINER_LISTS:
        for container in spec.get(group) or ():
            for key in CONTAINER_DROPPED:
                container.pop(key, None)
    for key in STATUS_DROPPED:
        status.pop(key, None)
    return metadata(found)


def workload(found: dict[str, Any]) -> Object:
    """Deployments and the like: of the template only labels and annotations, not what its containers are."""
    template = (found.get("spec") or {}).get("template")
    if isinstance(template, dict):
        template.pop("spec", None)
    return metadata(found)


def claim(found: dict[str, Any]) -> Object:
    """Claims; their status carries little beside the phase."""
    return metadata(found)
