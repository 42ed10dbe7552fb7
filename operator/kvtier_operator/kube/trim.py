"""Removes fields that the operator does not read from objects before they are cached.

A cluster has thousands of pods, and the operator reads few fields of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
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


class Outline(dict[str, Any]):
    """A pod without a policy, as ``Outliner`` keeps it: not to be decoded as a pod of a policy."""

    __slots__ = ()


OUTLINE_METADATA = ("name", "namespace", "uid", "resourceVersion")
OUTLINE_CONTAINER = ("name", "resources", "restartPolicy")
OUTLINE_SPEC = ("nodeName", "resources", "overhead")
MAX_SHARED = 8192


class Outliner:
    """Reduces pods to what identifies them, what a selector reads (labels), and what they take of
    their nodes and claims. Pods of a workload share all of that, so that each costs about 1 KB.

    For one thread.
    """

    def __init__(self, max_shared: int = MAX_SHARED) -> None:
        self._max_shared = max_shared
        self._shared: dict[str, Any] = {}

    def outline(self, pod: Object) -> Outline:
        """The outline of a trimmed pod."""
        held, spec = pod["metadata"], pod.get("spec") or {}
        about = {key: held[key] for key in OUTLINE_METADATA if key in held}
        about["labels"] = self._one(held.get("labels") or {})
        kept = {key: spec[key] for key in OUTLINE_SPEC if key in spec}
        for group in CONTAINER_LISTS[:2]:
            if spec.get(group):
                kept[group] = [
                    {key: each[key] for key in OUTLINE_CONTAINER if key in each}
                    for each in spec[group]
                ]
        volumes = spec.get("volumes") or ()
        claims = [each for each in volumes if each.get("persistentVolumeClaim")]
        if claims:
            kept["volumes"] = claims
        phase = (pod.get("status") or {}).get("phase")
        return Outline(
            metadata=about,
            spec=self._one(kept),
            status=self._one({"phase": phase} if phase else {}),
        )

    def _one(self, value: Mapping[str, Any]) -> Any:
        """An equal object that others have too. Those that were used last are remembered."""
        key = json.dumps(value, sort_keys=True)
        found = self._shared.pop(key, value)
        self._shared[key] = found
        if len(self._shared) > self._max_shared:
            del self._shared[next(iter(self._shared))]
        return found
