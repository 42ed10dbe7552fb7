"""Whether a quota or a LimitRange rejected a pod because of the injected containers. Pure.

The API server's messages contain the numbers. The owner's pod template contains the resources of
the pod without injected containers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from kvtier_operator.api.pods import Container, PodSpec
from kvtier_operator.controller.injection_breaker.insufficient_resources import without_injected
from kvtier_operator.injection.resources import parse_amount, pod_limits, pod_requests

_QUOTA = re.compile(
    r"exceeded quota: [^,]+, requested: (?P<requested>.+?), used: (?P<used>.+?), "
    r"limited: (?P<limited>[^;]+)"
)
_RANGE = re.compile(
    r"(?P<bound>maximum|minimum) (?P<resource>[a-z-]+) usage per (?P<scope>Container|Pod) "
    r"is (?P<allowed>[0-9.A-Za-z]+), but (?P<which>limit|request) is (?P<given>[0-9.A-Za-z]+)"
)
_RATIO = re.compile(
    r"(?P<resource>[a-z-]+) max limit to request ratio per (?:Container|Pod) "
    r"is (?P<allowed>[0-9.A-Za-z]+)"
)
INJECTED_RESOURCES = ("cpu", "memory", "ephemeral-storage")
"""Resources that injected containers request."""
NOTHING = Fraction(0)


def is_resource_rejection(message: str) -> bool:
    """Whether a quota or a LimitRange rejected the pod."""
    return any(pattern.search(message) for pattern in (_QUOTA, _RANGE, _RATIO))


def caused_by_injection(template: PodSpec, message: str) -> bool:
    """Whether the pod would have been admitted without the injected containers. ``template``: the
    spec of the owner's pod template.
    """
    verdicts = [
        *(_quota_is_cause(template, found) for found in _QUOTA.finditer(message)),
        *(_range_is_cause(template, found) for found in _RANGE.finditer(message)),
        *(_ratio_is_cause(template, found) for found in _RATIO.finditer(message)),
    ]
    return bool(verdicts) and all(verdicts)


def _quota_is_cause(template: PodSpec, found: re.Match[str]) -> bool:
    requested, used, limited = (
        _parse_amounts(found[part]) for part in ("requested", "used", "limited")
    )
    exceeded = [
        name
        for name in limited
        if requested.get(name, NOTHING) + used.get(name, NOTHING) > limited[name]
    ]
    for name in exceeded:
        which, resource = "requests", name
        if name.startswith(("requests.", "limits.")):
            which, _, resource = name.partition(".")
        if resource not in INJECTED_RESOURCES:
            return False
        own = _own_amounts(template, which).get(resource, NOTHING)
        if own + used.get(name, NOTHING) > limited[name]:
            return False
    return bool(exceeded)


def _range_is_cause(template: PodSpec, found: re.Match[str]) -> bool:
    which, resource = f"{found['which']}s", found["resource"]
    if found["scope"] == "Pod":
        own = _own_amounts(template, which).get(resource, NOTHING)
        return found["bound"] == "maximum" and own <= parse_amount(found["allowed"])
    given = parse_amount(found["given"])
    return all(
        _amount(container, which, resource) != given for container in template.all_containers
    )


def _ratio_is_cause(template: PodSpec, found: re.Match[str]) -> bool:
    allowed, resource = parse_amount(found["allowed"]), found["resource"]
    for container in template.all_containers:
        limit = _amount(container, "limits", resource)
        request = _amount(container, "requests", resource)
        if limit is not None and request and limit / request > allowed:
            return False
    return True


def _own_amounts(template: PodSpec, which: str) -> Mapping[str, Fraction]:
    own = without_injected(template)
    return pod_requests(own) if which == "requests" else pod_limits(own)


def _amount(container: Container, which: str, resource: str) -> Fraction | None:
    resources = container.resources
    value = (resources.requests if which == "requests" else resources.limits).get(resource)
    return None if value is None else parse_amount(value)


def _parse_amounts(text: str) -> dict[str, Fraction]:
    """Amounts by name, from ``limits.cpu=16,limits.memory=98Gi``."""
    pairs = (pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    return {name.strip(): parse_amount(value.strip()) for name, value in pairs}
