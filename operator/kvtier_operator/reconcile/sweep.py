"""What dead policies left: volumes, which no owner takes with it, and whatever lost its owner. Removed at every resync.

A policy counts as dead only once the API server itself has said so: a cache that lags, or a definition that was taken
away for a moment, must not cost anybody anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtier_operator.cluster.contract import CLAIMS, CONFIG_MAPS, PODS, POLICIES, VOLUMES, ApiError, Cache, Client, Kind
from kvtier_operator.cluster.contract import Object as Found
from kvtier_operator.reconcile.apply import delete
from kvtier_operator.reconcile.drift import is_leaving
from kvtier_operator.reconcile.observe import NAMESPACE_LABEL, UID_LABEL, mounted_claims
from kvtier_operator.reconcile.plan import Deletion
from kvtier_operator.render.volumes import POLICY_LABEL

WHY = "its policy is gone; the data stay"
SWEPT: tuple[Kind, ...] = (VOLUMES, CLAIMS, CONFIG_MAPS)
"""Kinds in which something may be left behind."""


def candidates(cache: Cache, is_live: Callable[[str, str, str], bool]) -> Iterator[Deletion]:
    """What carries the uid of a policy that is not among those known to live. ``is_live``: namespace, name, uid."""
    mounted: dict[str, frozenset[str]] = {}
    for kind in SWEPT:
        for each in cache.list(kind):
            owner = owner_of(each)
            if owner is None or is_leaving(each) or is_live(*owner):
                continue
            namespace = owner[0]
            if kind is VOLUMES:
                claim = ((each.get("spec") or {}).get("claimRef") or {}).get("name", "")
                released = (each.get("status") or {}).get("phase") in ("Released", "Failed")
                if not released and cache.get(CLAIMS, namespace, claim) is not None:
                    continue
            elif kind is CLAIMS:
                if namespace not in mounted:
                    mounted[namespace] = mounted_claims(cache.list(PODS, namespace))
                if each["metadata"]["name"] in mounted[namespace]:
                    continue
            yield Deletion(kind, each, WHY)


async def sweep(cache: Cache, client: Client, is_live: Callable[[str, str, str], bool]) -> int:
    """Removes them; returns how many. Raises ``ApiError``; the next sweep goes on."""
    asked: dict[tuple[str, str, str], bool] = {}
    removed = 0
    for deletion in list(candidates(cache, is_live)):
        owner = owner_of(deletion.found)
        if owner is None:
            continue
        if owner not in asked:
            asked[owner] = await is_dead(client, *owner)
        if asked[owner]:
            await delete(deletion, client)
            removed += 1
    return removed


async def is_dead(client: Client, namespace: str, name: str, uid: str) -> bool:
    """Whether the API server knows no such policy. Not where it does not know policies at all."""
    try:
        found = await client.get(POLICIES, namespace, name)
    except ApiError as error:
        if error.status == 404 and error.reason == "NotFound" and error.message.startswith(POLICIES.plural):
            return True
        raise
    return bool(found["metadata"]["uid"] != uid)


def owner_of(found: Found) -> tuple[str, str, str] | None:
    """Namespace, name and uid of the policy that the object was made for; None where it does not say."""
    metadata = found["metadata"]
    labels = metadata.get("labels") or {}
    namespace = metadata.get("namespace") or labels.get(NAMESPACE_LABEL)
    name, uid = labels.get(POLICY_LABEL), labels.get(UID_LABEL)
    return (namespace, name, uid) if namespace and name and uid else None
