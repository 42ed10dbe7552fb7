"""What is decided about a pod at admission, as values. The deciding is in ``kvtier_operator.injection.inject``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.api.conditions import SkipReason

PodObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """What is known of a pod's namespace and cluster, from caches. Objects are as the API server sends them.

    ``siblings``: pods of the same LeaderWorkerSet group. ``storage_ready``: False while the policy's ``StorageReady``
    condition is False. ``suspended``: why this pod's owner is suspended, or None. ``refusals``: sentences why the policy
    is not accepted (allow-lists included).
    """

    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    limit_ranges: Sequence[PodObject] = ()
    quotas: Sequence[PodObject] = ()
    kubelet_versions: Sequence[str] = ()
    siblings: Sequence[PodObject] = ()
    storage_ready: bool = True
    suspended: str | None = None
    refusals: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Attached:
    """The pod with its tiers, as a whole object, and sentences that a person should know."""

    pod: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """The pod stays as it is; ``message`` is one sentence that says why and what to do."""

    reason: SkipReason
    message: str


Decision = Attached | Skipped
