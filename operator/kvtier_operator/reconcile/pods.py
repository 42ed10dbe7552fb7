"""Looking after a policy's pods: what they say becomes status and Events, what keeps one from starting is undone, and
workloads are restarted where the policy asks for it.

Called once per reconcile, after the plan was applied. Level-triggered: everything is decided from the objects, the
status in force and the last answers of the pods; what is remembered beyond that (``PodReports``) only saves work.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.cluster.contract import Cache, Client
from kvtier_operator.reconcile.facts import PlanFacts, StatusResult
from kvtier_operator.reconcile.poll import PodReports
from kvtier_operator.reconcile.status import StatusInputs, compute_status
from kvtier_operator.settings import Settings

__all__ = ["PodReports", "StatusInputs", "StatusResult", "compute_status", "look_after"]


async def look_after(
    policy: KVTierPolicy,
    cache: Cache,
    client: Client,
    reports: PodReports,
    clock: Callable[[], float],
    settings: Settings,
    plan_facts: PlanFacts,
) -> StatusResult:
    """Looks at the pods of ``policy`` once. ``policy.status`` is the status in force; ``clock``: seconds since 1970.

    The caller writes the returned status where it differs from the one in force; bytes and percentages in it are those
    in force until they may change. Events are posted, stuck pods deleted and workloads restarted in here. A call that
    fails is logged, counted and tried again at ``wake_seconds``: ``ApiError`` is not raised.
    """
    status = compute_status(policy, StatusInputs(facts=plan_facts, now=clock(), previous=policy.status))
    return StatusResult(status)
