"""Carrying out a plan: server-side apply of what differs, deletion of what should not be.

What the API server refuses for good (a quota, a policy of the cluster, a value it does not take) is reported and does
not keep the rest from being applied; anything else is raised, and the whole is tried again later. Every step leaves a
state from which the next look goes on, so it does not matter where the operator is killed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvtier_operator.controller.children.plan import Deletion, Desired, Plan, adapt, differs
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.kube.resources import CONFIG_MAPS, ApiError, Client, Kind, NotingCache, Object
from kvtier_operator.render.volumes import MANAGED_BY

logger = logging.getLogger(__name__)
REFUSED_FOR_GOOD = frozenset({400, 403, 405, 413, 422})
"""The same call will be refused again until somebody changes something else."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that could not be applied: kind, and one sentence for people."""

    kind: Kind
    message: str


async def carry_out(plan: Plan, client: Client, cache: NotingCache) -> list[Refused]:
    """Applies and deletes, one call after the other. Raises ``ApiError`` for what may work later."""
    refused: list[Refused] = []
    for desired in plan.apply:
        try:
            problem = await _apply(desired, client, cache)
        except ApiError as error:
            if error.status not in REFUSED_FOR_GOOD:
                raise
            problem = f"the API server refused it: {error.message}"
        if problem:
            named = _named(desired.kind, desired.body)
            refused.append(Refused(desired.kind, f"{named}: {problem}"))
            logger.warning("not applied: %s: %s", named, problem)
    for deletion in plan.delete:
        await delete(deletion, client)
    return refused


async def delete(deletion: Deletion, client: Client) -> None:
    """Deletes exactly what was seen, unless it has changed since."""
    metadata = deletion.found["metadata"]
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
        # It has changed or gone: the watch brings what it is now, and with it another look.
        return
    logger.info("deleted %s: %s", _named(deletion.kind, deletion.found), deletion.why)


async def _apply(desired: Desired, client: Client, cache: NotingCache) -> str:
    """Applies; returns why not, or an empty text."""
    if desired.found is None:
        # The cache may be behind, or the name taken by somebody else's: what is there is looked at once.
        there = await existing(client, desired.kind, desired.body)
        if there is not None:
            if is_foreign(there):
                return f"another {desired.kind.kind} has this name; rename or delete it, or rename the policy"
            cache.note(desired.kind, there)
            body = adapt(desired.body, there)
            if is_terminating(there) or not differs(body, there):
                return ""
            desired = Desired(desired.kind, body, there)
    cache.note(desired.kind, await client.apply(desired.kind, desired.body))
    logger.info("applied %s", _named(desired.kind, desired.body))
    return ""


async def existing(client: Client, kind: Kind, body: Object) -> Object | None:
    """The object of that name as the API server has it, or None."""
    metadata = body["metadata"]
    try:
        return await client.get(kind, metadata.get("namespace"), metadata["name"])
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def is_foreign(found: Object) -> bool:
    """Whether KVTier neither made the object nor rendered it."""
    labels = found["metadata"].get("labels") or {}
    return any(labels.get(key) != value for key, value in MANAGED_BY.items())


def concerns_storage(refused: Refused) -> bool:
    """Whether a tier lacks its storage because of it; live values have their copy in the pods."""
    return refused.kind is not CONFIG_MAPS


def _named(kind: Kind, body: Object) -> str:
    metadata = body["metadata"]
    namespace = metadata.get("namespace")
    return f"{kind.kind} {f'{namespace}/' if namespace else ''}{metadata['name']}"
