"""What of a pod stands in the way of what would be added. Pure.

What the API server will refuse of a patched pod, before it does. Pure.

It validates, and applies limits, quota and Pod Security, after the patch: what is injected can keep an engine's pod from
being made at all. Each function yields sentences with the numbers. Sources of the rules: admission plugins LimitRanger,
ResourceQuota and PodSecurity, and the validation of pod-level resources.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import INJECTED_NAMES
from kvtier_operator.injection.decision import AdmissionContext, PodObject, Skipped
from kvtier_operator.injection.quota import over_quota
from kvtier_operator.injection.resources import (
    CPU,
    MEMORY,
    Amounts,
    amount,
    amounts,
    container_requests,
    containers,
    has_pod_level,
    limits_of,
    pod_limits,
    pod_requests,
    requests_of,
    shown,
)

READ_ONLY_SOURCES = ("configMap", "secret", "downwardAPI", "projected", "image")


def taken_names(pod: PodObject) -> Skipped | None:
    """Containers and volumes that somebody wrote with KVTier's names: a pod that was attached by hand."""
    spec = pod.get("spec") or {}
    found = [f"container {each.get('name')}" for each in containers(spec)]
    found += [f"volume {each.get('name')}" for each in spec.get("volumes") or ()]
    ours = [each for each in found if each.split(" ", 1)[1].startswith(INJECTED_NAMES)]
    if not ours:
        return None
    return Skipped(
        SkipReason.ALREADY_CONFIGURED,
        f"the pod has {', '.join(ours)} already; rename or remove what begins with {INJECTED_NAMES}",
    )


def mounts(
    spec: Mapping[str, Any], engine: Mapping[str, Any], added: Sequence[Mapping[str, Any]]
) -> Skipped | None:
    """Mounts of the engine's container that are where something has to be mounted, or are read-only above it, so that
    no directory to mount on can be made and the container would never start.
    """
    sources = {str(volume.get("name")): volume for volume in spec.get("volumes") or ()}
    for mount in engine.get("volumeMounts") or ():
        path = posixpath.normpath(str(mount.get("mountPath")))
        volume = sources.get(str(mount.get("name")), {})
        fixed = bool(mount.get("readOnly")) or any(source in volume for source in READ_ONLY_SOURCES)
        for wanted in (str(each["mountPath"]) for each in added):
            if path == wanted:
                message = f"container {engine['name']} mounts {mount.get('name')} at {path}, where KVTier's own would be"
                return Skipped(SkipReason.ALREADY_CONFIGURED, f"{message}; mount it elsewhere")
            if fixed and (path == "/" or wanted.startswith(f"{path}/")):
                return Skipped(
                    SkipReason.WOULD_NOT_START,
                    f"container {engine['name']} mounts {mount.get('name')} read-only at {path}, so nothing can be mounted at "
                    f"{wanted}; mount it elsewhere, or writable",
                )
    return None


ENFORCED_LABEL = "pod-security.kubernetes.io/enforce"


def refusals(pod: PodObject, around: AdmissionContext) -> list[str]:
    """Why the patched pod would be refused, in the order in which the API server would find out."""
    spec = with_defaults(pod.get("spec") or {}, around.limit_ranges)
    return [
        *pod_level(spec),
        *limit_ranges(spec, around.limit_ranges),
        *pod_security(spec, around.namespace_labels),
        *over_quota(spec, around.quotas),
    ]


def with_defaults(spec: Mapping[str, Any], ranges: Sequence[PodObject]) -> dict[str, Any]:
    """The spec with what LimitRanges add to containers that do not say it."""
    default: dict[str, Any] = {}
    default_request: dict[str, Any] = {}
    for each in _items(ranges, "Container"):
        default.update(each.get("default") or {})
        default_request.update(each.get("defaultRequest") or {})
    if not default and not default_request:
        return dict(spec)

    def filled(container: Mapping[str, Any]) -> dict[str, Any]:
        resources = container.get("resources") or {}
        limits = {**default, **(resources.get("limits") or {})}
        # What a container limits itself it asks for, unless it says otherwise; only then the default counts.
        own = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return {
            **container,
            "resources": {**resources, "limits": limits, "requests": {**default_request, **own}},
        }

    return {
        **spec,
        **{
            kind: [filled(each) for each in spec[kind]]
            for kind in ("containers", "initContainers")
            if spec.get(kind)
        },
    }


def pod_level(spec: Mapping[str, Any]) -> Iterator[str]:
    """Containers together must fit what the pod asks for, and each what the pod may use."""
    if not has_pod_level(spec):
        return
    resources = spec.get("resources") or {}
    limits = amounts(resources.get("limits"))
    requests = {**limits, **amounts(resources.get("requests"))}
    asked = container_requests(spec)
    for name in (CPU, MEMORY):
        if name in requests and asked.get(name, Fraction(0)) > requests[name]:
            yield (
                f"with tiers the containers ask for {shown(name, asked[name])} {name}, and the pod's own request is "
                f"{shown(name, requests[name])} (spec.resources)"
            )
        for each in containers(spec):
            value = limits_of(each).get(name)
            if name in limits and value is not None and value > limits[name]:
                yield (
                    f"{each['name']} needs {shown(name, value)} {name}, and the pod's own limit is "
                    f"{shown(name, limits[name])} (spec.resources)"
                )


def limit_ranges(spec: Mapping[str, Any], ranges: Sequence[PodObject]) -> Iterator[str]:
    """Bounds of a namespace, for each container and for the pod."""
    for limit_range in ranges:
        name = (limit_range.get("metadata") or {}).get("name")
        for item in (limit_range.get("spec") or {}).get("limits") or ():
            if item.get("type") == "Container":
                # All, not only those that were added: the engine's may have grown.
                for each in containers(spec):
                    for sentence in _outside(requests_of(each), limits_of(each), item):
                        yield f"{each['name']} {sentence} per container (LimitRange {name})"
            elif item.get("type") == "Pod":
                for sentence in _outside(pod_requests(spec, False), pod_limits(spec, False), item):
                    yield f"the pod with tiers {sentence} per pod (LimitRange {name})"


def _outside(requests: Amounts, limits: Amounts, item: Mapping[str, Any]) -> Iterator[str]:
    for name, least in amounts(item.get("min")).items():
        if name not in requests:
            yield f"asks for no {name}, and at least {shown(name, least)} is wanted"
        else:
            lowest = min(requests[name], limits.get(name, requests[name]))
            if lowest < least:
                yield f"has {shown(name, lowest)} {name}, and at least {shown(name, least)} is wanted"
    for name, most in amounts(item.get("max")).items():
        if name not in limits:
            yield f"has no limit of {name}, and at most {shown(name, most)} is allowed"
        else:
            highest = max(limits[name], requests.get(name, limits[name]))
            if highest > most:
                yield f"has {shown(name, highest)} {name}, and at most {shown(name, most)} is allowed"
    for name, written in (item.get("maxLimitRequestRatio") or {}).items():
        ratio, request, limit = amount(written), requests.get(name), limits.get(name)
        if not request or not limit:
            yield f"has no request or no limit of {name}, and limits of at most {written} times the request are allowed"
        elif limit / request > ratio:
            yield (
                f"asks for {shown(name, request)} {name} with a limit of {shown(name, limit)}, and at most {written} times "
                "the request is allowed"
            )


def pod_security(spec: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[str]:
    """What a namespace's level forbids of the injected volumes; the containers obey the strictest level."""
    level = labels.get(ENFORCED_LABEL)
    if level not in ("baseline", "restricted"):
        return
    for volume in spec.get("volumes") or ():
        if str(volume.get("name")).startswith(INJECTED_NAMES) and "hostPath" in volume:
            yield (
                f"the namespace enforces Pod Security level {level}, which forbids the hostPath of volume {volume['name']}; "
                "use a claim"
            )


def _items(ranges: Sequence[PodObject], kind: str) -> Iterator[Mapping[str, Any]]:
    for limit_range in ranges:
        for item in (limit_range.get("spec") or {}).get("limits") or ():
            if item.get("type") == kind:
                yield item
