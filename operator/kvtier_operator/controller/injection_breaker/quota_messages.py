"""Whether a pod that a quota or a LimitRange refused would have been admitted without what was
added to it. Pure.

The API server's messages have the numbers; the owner's template says what the pod asks for by
itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvtier_operator.controller.injection_breaker.insufficient_resources import asked
from kvtier_operator.injection.resources import parse_amount

_QUOTA = re.compile(
    r"exceeded quota: [^,]+, requested: (?P<requested>.+?), used: (?P<used>.+?), limited: (?P<limited>[^;]+)"
)
_RANGE = re.compile(
    r"(?P<bound>maximum|minimum) (?P<resource>[a-z-]+) usage per (?P<scope>Container|Pod) is (?P<allowed>[0-9.A-Za-z]+), "
    r"but (?P<which>limit|request) is (?P<given>[0-9.A-Za-z]+)"
)
_RATIO = re.compile(
    r"(?P<resource>[a-z-]+) max limit to request ratio per (?:Container|Pod) is (?P<allowed>[0-9.A-Za-z]+)"
)
ADDED = ("cpu", "memory", "ephemeral-storage")
"""Of these the injected containers ask for something."""


def by_numbers(message: str) -> bool:
    """Whether a quota or a LimitRange refused."""
    return any(pattern.search(message) for pattern in (_QUOTA, _RANGE, _RATIO))


def ours(described: Mapping[str, Any], message: str) -> bool:
    """Whether the refusal goes away without the injected parts. ``described``: the spec of the
    owner's pod template.
    """
    verdicts = [
        *(_quota_is_ours(described, found) for found in _QUOTA.finditer(message)),
        *(_range_is_ours(described, found) for found in _RANGE.finditer(message)),
        *(_ratio_is_ours(described, found) for found in _RATIO.finditer(message)),
    ]
    return bool(verdicts) and all(verdicts)


def _amounts(written: str) -> dict[str, Fraction]:
    pairs = (pair.split("=", 1) for pair in written.split(",") if "=" in pair)
    return {name.strip(): parse_amount(value.strip()) for name, value in pairs}


def _quota_is_ours(described: Mapping[str, Any], found: re.Match[str]) -> bool:
    requested, used, limited = (_amounts(found[part]) for part in ("requested", "used", "limited"))
    exceeded = [
        name
        for name in limited
        if requested.get(name, Fraction(0)) + used.get(name, Fraction(0)) > limited[name]
    ]
    for name in exceeded:
        which, _, resource = (
            name.rpartition(".")
            if name.startswith(("requests.", "limits."))
            else ("requests", "", name)
        )
        if resource not in ADDED:
            return False
        own = asked(described, with_injected=False, which=which).get(resource, Fraction(0))
        if own + used.get(name, Fraction(0)) > limited[name]:
            return False
    return bool(exceeded)


def _range_is_ours(described: Mapping[str, Any], found: re.Match[str]) -> bool:
    which = f"{found['which']}s"
    if found["scope"] == "Pod":
        own = asked(described, with_injected=False, which=which).get(found["resource"], Fraction(0))
        return found["bound"] == "maximum" and own <= parse_amount(found["allowed"])
    given = parse_amount(found["given"])
    return all(
        _of(container, which, found["resource"]) != given for container in _containers(described)
    )


def _ratio_is_ours(described: Mapping[str, Any], found: re.Match[str]) -> bool:
    allowed = parse_amount(found["allowed"])
    for container in _containers(described):
        limit, request = (
            _of(container, which, found["resource"]) for which in ("limits", "requests")
        )
        if limit is not None and request and limit / request > allowed:
            return False
    return True


def _containers(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(described.get("initContainers") or ()), *(described.get("containers") or ())]


def _of(container: Mapping[str, Any], which: str, resource: str) -> Fraction | None:
    written = ((container.get("resources") or {}).get(which) or {}).get(resource)
    return None if written is None else parse_amount(written)
