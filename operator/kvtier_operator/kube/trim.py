"""Removes fields that the operator does not read from objects before they are cached.

A cluster has thousands of pods, and the operator reads few fields of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvtier_operator.kube.resources import Object

Trim = Callable[[dict[str, Any]], Object]
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation with kubectl's copy of the whole object."""
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
    """An equal value in which equal strings share memory.

    Keys, names, images and annotations repeat in every pod of a workload.
    """
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, dict):
        return {sys.intern(key): shared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shared(item) for item in value]
    return value


def metadata(found: dict[str, Any]) -> Object:
    """For every kind: without the metadata that only the API server and kubectl need."""
    about = found.get("metadata")
    if isinstance(about, dict):
        about.pop("managedFields", None)
        about.pop("selfLink", None)
        annotations = about.get("annotations")
        if annotations and LAST_APPLIED in annotations:
            del annotations[LAST_APPLIED]
    kept: Object = shared(found)
    return kept


def pod(found: dict[str, Any]) -> Object:
    """For pods: without environments, probes and scheduling. States, volumes and images stay."""
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
    """For workloads: of the pod template only labels and annotations."""
    template = (found.get("spec") or {}).get("template")
    if isinstance(template, dict):
        template.pop("spec", None)
    return metadata(found)
