"""What prevents injection: conflicts with the pod as it is, and admission rules that the patched
pod violates. Pure.

The API server validates pods, and applies LimitRanges, quotas and Pod Security, after the webhook's
patch. A pod that it would reject because of the patch is skipped. Sources of the rules: the
admission plugins LimitRanger, ResourceQuota and PodSecurity, and the validation of pod-level
resources. Each function yields sentences with the numbers.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import msgspec

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.limits import LimitRange, LimitRangeItem
from kvtier_operator.api.names import INJECTED_NAMES
from kvtier_operator.api.pods import Container, Pod, PodSpec, PodVolume, ResourceRequirements
from kvtier_operator.injection.decision import AdmissionContext, Skipped
from kvtier_operator.injection.quota import quota_violations
from kvtier_operator.injection.resources import (
    CPU,
    MEMORY,
    Amounts,
    aggregated_requests,
    container_limits,
    container_requests,
    format_amount,
    has_pod_level_resources,
    parse_amount,
    parse_amounts,
    pod_limits,
    pod_requests,
)

ENFORCED_LABEL = "pod-security.kubernetes.io/enforce"


def name_conflict(pod: Pod) -> Skipped | None:
    """Containers and volumes with KVTier's names: the pod was configured by hand."""
    found = [
        *(f"container {each.name}" for each in pod.spec.all_containers if _is_ours(each.name)),
        *(f"volume {each.name}" for each in pod.spec.volumes if _is_ours(each.name)),
    ]
    if not found:
        return None
    return Skipped(
        SkipReason.ALREADY_CONFIGURED,
        f"the pod already has {', '.join(found)}; rename or remove what begins with "
        f"{INJECTED_NAMES}",
    )


def mount_conflict(spec: PodSpec, engine: Container, mount_paths: Sequence[str]) -> Skipped | None:
    """Mounts of the engine's container that are at a path of ``mount_paths``, or read-only above
    one. In a read-only volume the runtime cannot create the mount point, and the container never
    starts.
    """
    volumes = {volume.name: volume for volume in spec.volumes}
    for mount in engine.volume_mounts:
        path = posixpath.normpath(mount.mount_path)
        volume = volumes.get(mount.name, PodVolume())
        for added in mount_paths:
            if path == added:
                return Skipped(
                    SkipReason.ALREADY_CONFIGURED,
                    f"container {engine.name} mounts {mount.name} at {path}, which KVTier needs; "
                    "mount it elsewhere",
                )
            if (mount.read_only or volume.is_read_only) and (
                path == "/" or added.startswith(f"{path}/")
            ):
                return Skipped(
                    SkipReason.WOULD_NOT_START,
                    f"container {engine.name} mounts {mount.name} read-only at {path}, which "
                    f"prevents a mount at {added}; "
                    "mount it elsewhere, or writable",
                )
    return None


def admission_violations(patched: Pod, context: AdmissionContext) -> list[str]:
    """Why the API server would reject the patched pod, in the order of its checks."""
    spec = with_default_resources(patched.spec, context.limit_ranges)
    return [
        *pod_level_violations(spec),
        *limit_range_violations(spec, context.limit_ranges),
        *pod_security_violations(spec, context.namespace_labels),
        *quota_violations(spec, context.quotas),
    ]


def with_default_resources(spec: PodSpec, limit_ranges: Sequence[LimitRange]) -> PodSpec:
    """The spec with the requests and limits that LimitRanges set where a container has none."""
    default: dict[str, str | int | float] = {}
    default_request: dict[str, str | int | float] = {}
    for limit_range in limit_ranges:
        for item in limit_range.spec.limits:
            if item.type == "Container":
                default.update(item.default)
                default_request.update(item.default_request)
    if not default and not default_request:
        return spec

    def with_defaults(container: Container) -> Container:
        resources = container.resources
        # A container's own limit is its default request; the LimitRange's default request comes
        # after it.
        requests = {**default_request, **resources.limits, **resources.requests}
        limits = {**default, **resources.limits}
        changed = ResourceRequirements(requests=requests, limits=limits, claims=resources.claims)
        return msgspec.structs.replace(container, resources=changed)

    return msgspec.structs.replace(
        spec,
        containers=tuple(map(with_defaults, spec.containers)),
        init_containers=tuple(map(with_defaults, spec.init_containers)),
    )


def pod_level_violations(spec: PodSpec) -> Iterator[str]:
    """The containers' requests together must fit the pod's, and each limit of a container the pod's
    limit.
    """
    if not has_pod_level_resources(spec):
        return
    limits = parse_amounts(spec.resources.limits)
    # Without a pod-level request the pod-level limit bounds the containers' requests.
    bounds = {**limits, **parse_amounts(spec.resources.requests)}
    requests = aggregated_requests(spec)
    for name in (CPU, MEMORY):
        if name in bounds and requests.get(name, Fraction(0)) > bounds[name]:
            yield (
                f"with tiers the containers request {format_amount(name, requests[name])} {name}, "
                "and the pod-level "
                f"request is {format_amount(name, bounds[name])} (spec.resources)"
            )
        for container in spec.all_containers:
            limit = container_limits(container).get(name)
            if name in limits and limit is not None and limit > limits[name]:
                yield (
                    f"{container.name} needs {format_amount(name, limit)} {name}, and the "
                    "pod-level limit is "
                    f"{format_amount(name, limits[name])} (spec.resources)"
                )


def limit_range_violations(spec: PodSpec, limit_ranges: Sequence[LimitRange]) -> Iterator[str]:
    """Bounds of the namespace, for each container and for the pod."""
    for limit_range in limit_ranges:
        name = limit_range.metadata.name
        for item in limit_range.spec.limits:
            if item.type == "Container":
                # All containers: memoryPolicy Grow may have changed the engine's.
                for each in spec.all_containers:
                    for violation in _violations(
                        container_requests(each), container_limits(each), item
                    ):
                        yield f"{each.name} {violation} per container (LimitRange {name})"
            elif item.type == "Pod":
                requests, limits = (
                    pod_requests(spec, overhead=False),
                    pod_limits(spec, overhead=False),
                )
                for violation in _violations(requests, limits, item):
                    yield f"the pod with tiers {violation} per pod (LimitRange {name})"


def pod_security_violations(spec: PodSpec, labels: Mapping[str, str]) -> Iterator[str]:
    """Injected volumes that the namespace's Pod Security level forbids. Injected containers meet
    the strictest level.
    """
    level = labels.get(ENFORCED_LABEL)
    if level not in ("baseline", "restricted"):
        return
    for volume in spec.volumes:
        if _is_ours(volume.name) and volume.host_path is not None:
            yield (
                f"the namespace enforces Pod Security level {level}, which forbids the hostPath of "
                f"volume {volume.name}; "
                "use a claim"
            )


def _violations(requests: Amounts, limits: Amounts, item: LimitRangeItem) -> Iterator[str]:
    for name, least in parse_amounts(item.min).items():
        if name not in requests:
            yield f"has no request of {name}, and the minimum is {format_amount(name, least)}"
        else:
            lowest = min(requests[name], limits.get(name, requests[name]))
            if lowest < least:
                yield (
                    f"has {format_amount(name, lowest)} {name}, and the minimum is "
                    f"{format_amount(name, least)}"
                )
    for name, most in parse_amounts(item.max).items():
        if name not in limits:
            yield f"has no limit of {name}, and the maximum is {format_amount(name, most)}"
        else:
            highest = max(limits[name], requests.get(name, limits[name]))
            if highest > most:
                yield (
                    f"has {format_amount(name, highest)} {name}, and the maximum is "
                    f"{format_amount(name, most)}"
                )
    for name, ratio in item.max_limit_request_ratio.items():
        request, limit = requests.get(name), limits.get(name)
        if not request or not limit:
            yield (
                f"has no request or no limit of {name}, and a limit must be at most {ratio} times "
                "the request"
            )
        elif limit / request > parse_amount(ratio):
            yield (
                f"requests {format_amount(name, request)} {name} with a limit of "
                f"{format_amount(name, limit)}, and a "
                f"limit must be at most {ratio} times the request"
            )


def _is_ours(name: str) -> bool:
    return name.startswith(INJECTED_NAMES)
