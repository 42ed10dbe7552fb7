"""Fields of a policy that this version accepts and does not act on.

A field is listed here, and nowhere else, until something implements it. A policy that sets a listed
field is accepted; its ``Accepted`` condition has the reason ``NotEnforced`` and names the field,
and the webhook warns. A listed field has no default in the schema, so that a field that the policy
does not set is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from kvtier_operator.api.base import Path
from kvtier_operator.api.engine import Connector
from kvtier_operator.api.fields import ITEM, dotted, fields_of
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import RolloutStrategy

NOT_ENFORCED: Final[dict[str, str]] = {
    "spec.monitoring.podMonitor": "no PodMonitor is created; docs/monitoring.md has one to apply",
}
"""By path, what this version does instead. An entry for an object covers the fields in it."""
BY_CONNECTOR: Final[dict[str, frozenset[Connector]]] = {}
"""Connectors that implement a listed field, or that reject it themselves."""


NO_RESTARTS: Final = (
    "spec.rollout.strategy: has no effect: rollout.enabled is false in the values of the chart, so "
    "the operator may not restart workloads"
)


def is_listed(pattern: str) -> bool:
    """Whether a field (``spec.tiers[].lmcache.url``) is listed, or is in an object that is."""
    return any(
        pattern == listed or pattern.startswith((f"{listed}.", f"{listed}{ITEM}"))
        for listed in NOT_ENFORCED
    )


def not_enforced(policy: KVTierPolicy, may_restart: bool) -> list[str]:
    """One message for each field that the policy sets and that has no effect:
    ``spec.monitoring.podMonitor: ...``. ``may_restart``: whether the operator may restart
    workloads.
    """
    connector = policy.spec.engine.connector
    restarts = policy.spec.rollout.strategy is RolloutStrategy.RESTART_WORKLOADS
    found = [NO_RESTARTS] if restarts and not may_restart else []
    if policy.spec.tenants.max_percent < 100:
        found += [
            f"spec.tenants.maxPercent: has no effect on tier {tier.name}: KVTier does not evict "
            "from an lmcache tier by tenant"
            for tier in policy.spec.tiers
            if tier.lmcache is not None
        ]
    return found + [
        f"{dotted(path)}: has no effect in this version: {NOT_ENFORCED[pattern]}"
        for pattern, path in _written(policy, "", ())
        if connector not in BY_CONNECTOR.get(pattern, frozenset())
    ]


def unknown_field(path: str) -> str:
    """The message about a field that the CustomResourceDefinition has and this version has not."""
    return f"{path}: has no effect: this version of the operator does not know the field"


def _written(value: Any, pattern: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Listed fields that are set, with the path of each."""
    if pattern in NOT_ENFORCED:
        if value not in (None, ""):
            yield pattern, path
        return
    if isinstance(value, BaseModel):
        for document in fields_of(type(value)):
            if document.attribute in value.model_fields_set:
                below = f"{pattern}.{document.alias}" if pattern else document.alias
                yield from _written(
                    getattr(value, document.attribute), below, (*path, document.alias)
                )
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _written(item, f"{pattern}{ITEM}", (*path, index))
