"""What no deletion takes along: directories of nodes and exports in which a policy's pods stored.

The operator mounts none of them, so it can neither look into them nor empty them; it says which they are, once, when a
policy goes. A policy that goes while the controller is away is not told of; its directory has its uid for a name.

What dead policies left: volumes, which no owner takes with it, and whatever lost its owner. Removed at every resync.

A policy counts as dead only once the API server itself has said so: a cache that lags, or a definition that was taken
away for a moment, must not cost anybody anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.conditions import EventReason
from kvtier_operator.api.volumes import Volume
from kvtier_operator.controller.children.apply import delete
from kvtier_operator.controller.children.observe import (
    NAMESPACE_LABEL,
    UID_LABEL,
    CachedPolicy,
    mounted_claims,
)
from kvtier_operator.controller.children.plan import Deletion
from kvtier_operator.controller.events import NORMAL, Event, about_policy
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.injection.sidecar import sub_path
from kvtier_operator.kube.resources import (
    CLAIMS,
    CONFIG_MAPS,
    PODS,
    POLICIES,
    VOLUMES,
    ApiError,
    Cache,
    Client,
    Kind,
)
from kvtier_operator.kube.resources import Object as Found
from kvtier_operator.render.volumes import POLICY_LABEL


def orphaned_data(gone: CachedPolicy, allowed: Sequence[AllowedVolume]) -> list[Event]:
    """One note for each tier on a node's directory or an export. Pure. None of a policy that was never in force: no pod
    has mounted anything for it.
    """
    policy = gone.policy
    if policy is None or not (gone.raw.get("status") or {}).get("liveGeneration"):
        return []
    notes = []
    for tier in policy.spec.tiers:
        place = _place(tier.file_system.volume) if tier.file_system is not None else ""
        if not place:
            continue
        own = sub_path(policy, tier, allowed)
        if own is None:
            text = f"what it stored in {place} stays among what others store there, and is evicted like theirs"
        else:
            text = f"directory {own} in {place} stays with what it stored; remove it once no pod uses it any more"
        notes.append(
            Event(
                about_policy(policy),
                NORMAL,
                EventReason.DATA_LEFT.value,
                f"tier {tier.name}: {text}",
            )
        )
    return notes


def _place(volume: Volume) -> str:
    if volume.host_path is not None:
        return f"{volume.host_path.path} of each node where its pods ran"
    if volume.nfs is not None:
        return f"{volume.nfs.server}:{volume.nfs.path}"
    return ""


WHY = "its policy is gone; the data stay"
SWEPT: tuple[Kind, ...] = (VOLUMES, CLAIMS, CONFIG_MAPS)
"""Kinds in which something may be left behind."""


def candidates(cache: Cache, is_live: Callable[[str, str, str], bool]) -> Iterator[Deletion]:
    """What carries the uid of a policy that is not among those known to live. ``is_live``: namespace, name, uid."""
    mounted: dict[str, frozenset[str]] = {}
    for kind in SWEPT:
        for each in cache.list(kind):
            owner = owner_of(each)
            if owner is None or is_terminating(each) or is_live(*owner):
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


async def collect_garbage(
    cache: Cache, client: Client, is_live: Callable[[str, str, str], bool]
) -> int:
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
        if (
            error.status == 404
            and error.reason == "NotFound"
            and error.message.startswith(POLICIES.plural)
        ):
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
