"""What is decided about a pod at admission, and from what. ``kvtier_operator.injection.inject``
decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.limits import LimitRange, ResourceQuota
from kvtier_operator.api.pods import Pod

PodObject = Mapping[str, Any]
"""A pod as a parsed document, with every field that the API server sent. It is patched, and never
read for a decision."""


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """What the caches hold about a pod's namespace and cluster.

    ``kubelet_versions``: of the nodes that the pod can be scheduled on. ``siblings``: pods of the
    same LeaderWorkerSet group. ``storage_ready``: False while the policy's ``StorageReady``
    condition is False. ``suspended``: why injection is suspended for the pod's owner, or None.
    ``policy_errors``: why the policy is invalid (allow-lists included).
    """

    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    limit_ranges: Sequence[LimitRange] = ()
    quotas: Sequence[ResourceQuota] = ()
    kubelet_versions: Sequence[str] = ()
    siblings: Sequence[Pod] = ()
    storage_ready: bool = True
    suspended: str | None = None
    policy_errors: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Injected:
    """The pod with its tiers, as a document, and notes for the pod's owner."""

    pod: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """The pod stays as it is. ``message``: one sentence that says why and what to do."""

    reason: SkipReason
    message: str


Decision = Injected | Skipped
