"""Whether a pod finds no node because of what was added to it: would it fit without that, and does
not with it? Pure.

A cluster that is merely full, or waits for its autoscaler, answers no: then the pod would wait
without tiers as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from kvtier_operator.api.pods import PodSpec, decode
from kvtier_operator.controller import objects
from kvtier_operator.injection.resources import parse_amount, pod_limits, pod_requests
from kvtier_operator.kube.resources import Object

Amounts = Mapping[str, Fraction]
KEEPING_OUT = ("NoSchedule", "NoExecute")


def asked(
    described: Mapping[str, Any], with_injected: bool, which: str = "requests"
) -> dict[str, Fraction]:
    """Effective ``requests`` or ``limits`` of a pod's spec, with or without the injected
    containers.
    """
    spec = decode(described, PodSpec)
    if not with_injected:
        own = tuple(each for each in spec.init_containers if not objects.ours(each.name))
        spec = msgspec.structs.replace(spec, init_containers=own)
    return pod_requests(spec) if which == "requests" else pod_limits(spec)


def insufficient_resources(pod: Object, nodes: Sequence[Object], pods: Iterable[Object]) -> str:
    """The resource and node that decide it, as words; empty where what was added does not.
    ``pods``: all of the cluster.
    """
    described = objects.spec(pod)
    bare, whole = asked(described, with_injected=False), asked(described, with_injected=True)
    if bare == whole:
        return ""
    used: dict[str, defaultdict[str, Fraction]] = {}
    for other in pods:
        place = str(objects.spec(other).get("nodeName") or "")
        if place and not objects.ended(other):
            sums = used.setdefault(place, defaultdict(Fraction))
            sums["pods"] += 1
            for resource, value in asked(objects.spec(other), with_injected=True).items():
                sums[resource] += value
    crowded = ""
    for node in nodes:
        if not _open_to(described, node):
            continue
        taken: Amounts = used.get(objects.name(node), defaultdict(Fraction))
        free = {
            resource: parse_amount(written) - taken.get(resource, Fraction(0))
            for resource, written in (objects.status(node).get("allocatable") or {}).items()
        }
        if _lacking({**bare, "pods": Fraction(1)}, free):
            continue
        lacking = _lacking(whole, free)
        if not lacking:
            # It fits as it is: whatever keeps it from being scheduled, it is not its size.
            return ""
        if not crowded:
            crowded = f"node {objects.name(node)} has room for it without tiers, and too little {lacking[0]} with them"
    return crowded


def _lacking(wanted: Amounts, free: Amounts) -> list[str]:
    return sorted(
        name for name, value in wanted.items() if value > 0 and value > free.get(name, Fraction(0))
    )


def _open_to(described: Mapping[str, Any], node: Object) -> bool:
    """Whether the node takes pods with these selectors and tolerations. Affinity is not looked at."""
    about = objects.spec(node)
    if about.get("unschedulable"):
        return False
    wanted = described.get("nodeSelector") or {}
    if any(objects.labels(node).get(key) != value for key, value in wanted.items()):
        return False
    tolerations = described.get("tolerations") or ()
    return all(
        any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in about.get("taints") or ()
        if taint.get("effect") in KEEPING_OUT
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") in (None, ""):
        return toleration.get("operator") == "Exists"
    if toleration.get("key") != taint.get("key"):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (
        taint.get("value") or ""
    )
