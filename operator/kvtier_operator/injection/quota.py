"""Whether a pod fits what is left of a namespace's quotas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvtier_operator.injection.decision import PodObject
from kvtier_operator.injection.resources import (
    CPU,
    MEMORY,
    STORAGE,
    Amounts,
    amounts,
    containers,
    has_pod_level,
    limits_of,
    pod_limits,
    pod_requests,
    qos_class,
    requests_of,
    shown,
)

COMPUTE = (CPU, MEMORY, STORAGE)
EVERY_CONTAINER = (CPU, MEMORY)
"""What every container has to say where a quota counts it."""


def over_quota(spec: Mapping[str, Any], quotas: Sequence[PodObject]) -> Iterator[str]:
    """What does not fit, with the numbers."""
    usage = _usage(spec) if quotas else {}
    for quota in quotas:
        if not _applies(spec, quota.get("spec") or {}):
            continue
        name = (quota.get("metadata") or {}).get("name")
        status = quota.get("status") or {}
        hard = amounts(
            {**((quota.get("spec") or {}).get("hard") or {}), **(status.get("hard") or {})}
        )
        used = amounts(status.get("used"))
        yield from (f"{sentence} (ResourceQuota {name})" for sentence in _unsaid(spec, hard))
        for resource, most in hard.items():
            asked, taken = usage.get(resource), used.get(resource, Fraction(0))
            if asked and taken + asked > most:
                kind = resource.removeprefix("requests.").removeprefix("limits.")
                yield (
                    f"with tiers the pod takes {shown(kind, asked)} of {resource}, and {shown(kind, max(most - taken, Fraction(0)))} "
                    f"of {shown(kind, most)} is left (ResourceQuota {name})"
                )


def _usage(spec: Mapping[str, Any]) -> Amounts:
    usage: Amounts = {"pods": Fraction(1), "count/pods": Fraction(1)}
    for name, value in pod_requests(spec).items():
        usage[f"requests.{name}"] = value
        if name in COMPUTE:
            usage[name] = value
    for name, value in pod_limits(spec).items():
        usage[f"limits.{name}"] = value
    return usage


def _unsaid(spec: Mapping[str, Any], hard: Amounts) -> Iterator[str]:
    """A quota on cpu or memory wants every container to say what it takes, unless the pod says it as a whole."""
    if has_pod_level(spec):
        return
    for name in EVERY_CONTAINER:
        for kind, of, resources in (
            ("requests", requests_of, (name, f"requests.{name}")),
            ("limits", limits_of, (f"limits.{name}",)),
        ):
            if any(resource in hard for resource in resources):
                silent = [
                    str(each.get("name")) for each in containers(spec) if name not in of(each)
                ]
                if silent:
                    yield f"{', '.join(silent)} must say {kind} of {name}"


def _applies(spec: Mapping[str, Any], quota: Mapping[str, Any]) -> bool:
    scopes = [{"scopeName": scope, "operator": "Exists"} for scope in quota.get("scopes") or ()]
    scopes += (quota.get("scopeSelector") or {}).get("matchExpressions") or []
    return all(_in_scope(spec, scope) for scope in scopes)


def _in_scope(spec: Mapping[str, Any], scope: Mapping[str, Any]) -> bool:
    name, operator = str(scope.get("scopeName")), str(scope.get("operator"))
    values = [str(value) for value in scope.get("values") or ()]
    if name in ("Terminating", "NotTerminating"):
        return (spec.get("activeDeadlineSeconds") is not None) == (name == "Terminating")
    if name in ("BestEffort", "NotBestEffort"):
        return (qos_class(spec) == "BestEffort") == (name == "BestEffort")
    if name == "PriorityClass":
        priority = str(spec.get("priorityClassName") or "")
        if operator == "In":
            return priority in values
        if operator == "NotIn":
            return priority not in values
        return bool(priority) == (operator == "Exists")
    if name == "CrossNamespacePodAffinity":
        return _crosses(spec)
    return True


def _crosses(spec: Mapping[str, Any]) -> bool:
    affinity = spec.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        terms = affinity.get(kind) or {}
        found = list(terms.get("requiredDuringSchedulingIgnoredDuringExecution") or ())
        found += [
            each.get("podAffinityTerm") or {}
            for each in terms.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        ]
        if any(
            term.get("namespaces") or term.get("namespaceSelector") is not None for term in found
        ):
            return True
    return False
