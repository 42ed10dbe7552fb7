"""Garbage collection of objects whose policy is gone, and a notice about the data that stays
behind.

Objects: PersistentVolumes have no namespaced owner, and an owner reference can be removed, so the
cluster's own garbage collector does not delete everything. ``collect_garbage`` runs at every
resync. A policy counts as gone only once the API server itself says so: a stale cache, or a CRD
that was removed for a moment, must not delete anything.

Data: a hostPath directory or an NFS export outlives its policy. The operator mounts neither, so it
cannot delete the files; ``orphaned_data_events`` names the directories once, when the policy is
deleted. A policy that is deleted while the controller is down gets no such Event; the directory's
name contains the policy's uid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.conditions import EventReason
from kvtier_operator.api.volumes import Volume
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.children.apply import delete_object
from kvtier_operator.controller.children.observe import NAMESPACE_LABEL, UID_LABEL, mounted_claims
from kvtier_operator.controller.children.plan import Deletion
from kvtier_operator.controller.events import NORMAL, Event, policy_reference
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
    Object,
)
from kvtier_operator.render.volumes import POLICY_LABEL

COLLECTED_KINDS: tuple[Kind, ...] = (VOLUMES, CLAIMS, CONFIG_MAPS)
DELETION_REASON = "its policy no longer exists; the data is kept"
IsLive = Callable[[str, str, str], bool]
"""Whether a policy is known to exist, by namespace, name and uid."""


async def collect_garbage(cache: Cache, client: Client, is_live: IsLive) -> int:
    """Deletes objects whose policy is gone; returns how many. Raises ``ApiError``; the next resync
    continues.
    """
    gone: dict[tuple[str, str, str], bool] = {}
    removed = 0
    for deletion in list(garbage(cache, is_live)):
        owner = owning_policy(deletion.existing)
        if owner is None:
            continue
        if owner not in gone:
            gone[owner] = await policy_is_gone(client, *owner)
        if gone[owner]:
            await delete_object(deletion, client)
            removed += 1
    return removed


def garbage(cache: Cache, is_live: IsLive) -> Iterator[Deletion]:
    """Objects that carry the uid of a policy that is not known to exist, and that no pod needs."""
    mounted: dict[str, frozenset[str]] = {}
    for kind in COLLECTED_KINDS:
        for each in cache.list(kind):
            owner = owning_policy(each)
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
            yield Deletion(kind, each, DELETION_REASON)


def owning_policy(found: Object) -> tuple[str, str, str] | None:
    """Namespace, name and uid of the policy that the object was created for; None if its labels do
    not say.
    """
    metadata = found["metadata"]
    labels = metadata.get("labels") or {}
    namespace = metadata.get("namespace") or labels.get(NAMESPACE_LABEL)
    name, uid = labels.get(POLICY_LABEL), labels.get(UID_LABEL)
    return (namespace, name, uid) if namespace and name and uid else None


async def policy_is_gone(client: Client, namespace: str, name: str, uid: str) -> bool:
    """Asks the API server. Raises ``ApiError`` if it does not know the kind at all: then nothing is
    known.
    """
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


def orphaned_data_events(deleted: CachedPolicy, allowed: Sequence[AllowedVolume]) -> list[Event]:
    """One Event for each tier on a hostPath or an NFS export. Pure. None for a policy that was
    never applied: no pod has mounted anything for it.
    """
    policy = deleted.policy
    if policy is None or not (deleted.raw.get("status") or {}).get("liveGeneration"):
        return []
    found = []
    for each in [each for tier in policy.spec.tiers for each in tier.volumes]:
        location = _location(each.volume)
        if not location:
            continue
        directory = sub_path(policy, each.volume, allowed)
        if directory is None:
            message = (
                f"its data stays in {location} until it is evicted, "
                "because other policies share the directory"
            )
        else:
            message = (
                f"directory {directory} stays in {location} with its data; "
                "delete it once no pod uses it"
            )
        found.append(
            Event(
                policy_reference(policy),
                NORMAL,
                EventReason.DATA_LEFT.value,
                f"tier {each.key}: {message}",
            )
        )
    return found


def _location(volume: Volume) -> str:
    if volume.host_path is not None:
        return f"{volume.host_path.path} on each node where its pods ran"
    if volume.nfs is not None:
        return f"{volume.nfs.server}:{volume.nfs.path}"
    return ""
