"""Applies a plan: server-side apply of the objects that differ, deletion of the obsolete ones.

A permanent failure (a quota, an admission policy, an invalid value) is reported and does not stop
the rest of the plan. Any other failure is raised, and the whole reconcile is retried. Every step
leaves a state from which the next reconcile continues, so the operator can be killed at any point.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvtier_operator.controller.children.plan import (
    Deletion,
    Desired,
    Plan,
    differs,
    with_current_spec,
)
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.kube.resources import CONFIG_MAPS, ApiError, Client, Kind, NotingCache, Object
from kvtier_operator.render.volumes import MANAGED_BY

logger = logging.getLogger(__name__)
PERMANENT_FAILURES = frozenset({400, 403, 405, 413, 422})
"""HTTP statuses that a retry of the same call does not change: the policy or the cluster has to
change first.
"""


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """An object that could not be applied. ``message``: one sentence that names the object and the
    cause.
    """

    kind: Kind
    message: str

    @property
    def affects_storage(self) -> bool:
        """Whether a tier lacks its storage as a result. Live values do not: every pod has a copy of
        them.
        """
        return self.kind is not CONFIG_MAPS


async def apply_plan(plan: Plan, client: Client, cache: NotingCache) -> list[ApplyFailure]:
    """Applies and deletes, one call after another. Raises ``ApiError`` for failures that a retry
    may solve.
    """
    failures: list[ApplyFailure] = []
    for desired in plan.apply:
        try:
            problem = await _apply(desired, client, cache)
        except ApiError as error:
            if error.status not in PERMANENT_FAILURES:
                raise
            problem = f"the API server rejected it: {error.message}"
        if problem:
            described = _described(desired.kind, desired.body)
            failures.append(ApplyFailure(desired.kind, f"{described}: {problem}"))
            logger.warning("could not apply %s: %s", described, problem)
    for deletion in plan.delete:
        await delete_object(deletion, client)
    return failures


async def delete_object(deletion: Deletion, client: Client) -> None:
    """Deletes exactly the observed version of the object: one that has changed since stays until
    the next reconcile.
    """
    metadata = deletion.existing["metadata"]
    try:
        await client.delete(
            deletion.kind,
            metadata.get("namespace"),
            metadata["name"],
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
        )
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        # The watch delivers the change, which triggers another reconcile.
        return
    logger.info("deleted %s: %s", _described(deletion.kind, deletion.existing), deletion.reason)


async def _apply(desired: Desired, client: Client, cache: NotingCache) -> str:
    """Applies one object. Returns why it could not, or an empty string."""
    if desired.existing is None:
        # The cache may be stale, or another application may own the name.
        existing = await get_existing(client, desired.kind, desired.body)
        if existing is not None:
            if is_foreign(existing):
                return (
                    f"another {desired.kind.kind} has this name; rename or delete it, "
                    "or rename the policy"
                )
            cache.note(desired.kind, existing)
            body = with_current_spec(desired.body, existing)
            if is_terminating(existing) or not differs(body, existing):
                return ""
            desired = Desired(desired.kind, body, existing)
    cache.note(desired.kind, await client.apply(desired.kind, desired.body))
    logger.info("applied %s", _described(desired.kind, desired.body))
    return ""


async def get_existing(client: Client, kind: Kind, body: Object) -> Object | None:
    """The object of that name from the API server, or None."""
    metadata = body["metadata"]
    try:
        return await client.get(kind, metadata.get("namespace"), metadata["name"])
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def is_foreign(existing: Object) -> bool:
    """Whether the object was created by something other than KVTier."""
    labels = existing["metadata"].get("labels") or {}
    return any(labels.get(key) != value for key, value in MANAGED_BY.items())


def _described(kind: Kind, body: Object) -> str:
    metadata = body["metadata"]
    namespace = metadata.get("namespace")
    return f"{kind.kind} {f'{namespace}/' if namespace else ''}{metadata['name']}"
