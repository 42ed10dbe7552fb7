"""Whether a pod fits into what its namespace's quotas have left. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from kvtier_operator.api.limits import QuotaScope, ResourceQuota
from kvtier_operator.api.pods import PodSpec
from kvtier_operator.injection.resources import (
    CPU,
    MEMORY,
    STORAGE,
    Amounts,
    container_limits,
    container_requests,
    format_amount,
    has_pod_level_resources,
    parse_amounts,
    pod_limits,
    pod_requests,
    qos_class,
)

COMPUTE = (CPU, MEMORY, STORAGE)
REQUIRED = (CPU, MEMORY)
"""Resources that every container must set if a quota counts them."""


def quota_violations(spec: PodSpec, quotas: Sequence[ResourceQuota]) -> Iterator[str]:
    """What does not fit, with the numbers."""
    usage = _usage(spec) if quotas else {}
    for quota in quotas:
        if not all(_in_scope(spec, scope) for scope in quota.spec.all_scopes):
            continue
        name = quota.metadata.name
        hard = parse_amounts({**quota.spec.hard, **quota.status.hard})
        used = parse_amounts(quota.status.used)
        yield from (f"{sentence} (ResourceQuota {name})" for sentence in _not_set(spec, hard))
        for resource, most in hard.items():
            needed, taken = usage.get(resource), used.get(resource, Fraction(0))
            if needed and taken + needed > most:
                kind = resource.removeprefix("requests.").removeprefix("limits.")
                left = format_amount(kind, max(most - taken, Fraction(0)))
                yield (
                    f"with tiers the pod needs {format_amount(kind, needed)} of {resource}, and "
                    f"{left} of "
                    f"{format_amount(kind, most)} is left (ResourceQuota {name})"
                )


def _usage(spec: PodSpec) -> Amounts:
    usage: Amounts = {"pods": Fraction(1), "count/pods": Fraction(1)}
    for name, value in pod_requests(spec).items():
        usage[f"requests.{name}"] = value
        if name in COMPUTE:
            usage[name] = value
    for name, value in pod_limits(spec).items():
        usage[f"limits.{name}"] = value
    return usage


def _not_set(spec: PodSpec, hard: Amounts) -> Iterator[str]:
    """A quota on cpu or memory requires the value of every container, unless the pod has it as a
    whole.
    """
    if has_pod_level_resources(spec):
        return
    for name in REQUIRED:
        for kind, amounts_of, resources in (
            ("requests", container_requests, (name, f"requests.{name}")),
            ("limits", container_limits, (f"limits.{name}",)),
        ):
            if any(resource in hard for resource in resources):
                lacking = [
                    each.name for each in spec.all_containers if name not in amounts_of(each)
                ]
                if lacking:
                    yield f"{', '.join(lacking)} must have {kind} of {name}"


def _in_scope(spec: PodSpec, scope: QuotaScope) -> bool:
    match scope.scope_name:
        case "Terminating":
            return spec.active_deadline_seconds is not None
        case "NotTerminating":
            return spec.active_deadline_seconds is None
        case "BestEffort":
            return qos_class(spec) == "BestEffort"
        case "NotBestEffort":
            return qos_class(spec) != "BestEffort"
        case "PriorityClass":
            return _priority_in_scope(spec.priority_class_name, scope)
        case "CrossNamespacePodAffinity":
            terms = (*spec.affinity.pod_affinity.terms, *spec.affinity.pod_anti_affinity.terms)
            return any(term.namespaces or term.namespace_selector is not None for term in terms)
    return True


def _priority_in_scope(priority_class: str, scope: QuotaScope) -> bool:
    match scope.operator:
        case "In":
            return priority_class in scope.values
        case "NotIn":
            return priority_class not in scope.values
        case _:
            return bool(priority_class) == (scope.operator == "Exists")
