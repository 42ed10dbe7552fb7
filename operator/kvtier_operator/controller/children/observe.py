"""What a plan is made from: a policy and the objects that exist for it, read from the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_operator.api.names import POLICY_UID_ANNOTATION
from kvtier_operator.controller.cached_policy import CachedPolicy, claims_of
from kvtier_operator.kube.resources import CLAIMS, CONFIG_MAPS, PODS, VOLUMES, Cache, Object
from kvtier_operator.render.documents import live_name, structural_name
from kvtier_operator.render.volumes import POLICY_LABEL

UID_LABEL = POLICY_UID_ANNOTATION
"""On every object that the operator creates: the uid of the policy that it belongs to. Names can be
reused, uids cannot.
"""
SELECTED_NODE = "volume.kubernetes.io/selected-node"
"""Annotation of the scheduler on a claim that a pod waits for."""
NAMESPACE_LABEL = "kvtier.io/policy-namespace"
"""On PersistentVolumes, which have no namespace."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A policy and the objects around it.

    ``config_maps`` and ``claims``: by name, those that the policy needs or that carry its label.
    ``volumes``: those that were created for a policy of this name. ``mounted_claims``: claims that
    a pod of the namespace mounts; filled only if there is a claim that might be deleted.
    ``first_use_claims``: pending claims that are bound when a pod uses them.
    """

    cached: CachedPolicy
    config_maps: Mapping[str, Object] = field(default_factory=dict)
    claims: Mapping[str, Object] = field(default_factory=dict)
    volumes: Sequence[Object] = ()
    mounted_claims: frozenset[str] = frozenset()
    first_use_claims: frozenset[str] = frozenset()


def observe(cached: CachedPolicy, cache: Cache) -> Observed:
    """Reads what concerns a policy from the cache. The cost grows with the claims of the policy's
    namespace.
    """
    metadata = cached.raw["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    needed = set(claims_of(cached.policy).values())
    claims: dict[str, Object] = {}
    has_obsolete_claim = False
    for claim in cache.list(CLAIMS, namespace):
        claim_metadata = claim["metadata"]
        labelled = (claim_metadata.get("labels") or {}).get(POLICY_LABEL) == name
        is_needed = claim_metadata["name"] in needed
        if labelled or is_needed:
            claims[claim_metadata["name"]] = claim
            has_obsolete_claim = has_obsolete_claim or not is_needed
    names = (
        [live_name(cached.policy), structural_name(cached.policy)]
        if cached.policy is not None
        else []
    )
    config_maps = [cache.get(CONFIG_MAPS, namespace, each) for each in names]
    return Observed(
        cached,
        {each["metadata"]["name"]: each for each in config_maps if each is not None},
        claims,
        [each for each in cache.list(VOLUMES) if volume_owner(each) == (namespace, name)],
        # Listing all pods of the namespace is only worth it if a claim might be deleted.
        mounted_claims(cache.list(PODS, namespace)) if has_obsolete_claim else frozenset(),
    )


def unused_storage_class(claim: Object) -> str:
    """The StorageClass of a claim that is pending and that no pod has been scheduled for; else
    empty.
    """
    metadata, spec = claim["metadata"], claim.get("spec") or {}
    phase = (claim.get("status") or {}).get("phase") or "Pending"
    scheduled = SELECTED_NODE in (metadata.get("annotations") or {})
    if phase != "Pending" or scheduled or metadata.get("deletionTimestamp"):
        return ""
    return str(spec.get("storageClassName") or "")


def volume_owner(volume: Object) -> tuple[str, str]:
    """Namespace and name of the policy that a PersistentVolume was created for; empty if it carries
    no such labels.
    """
    labels = volume["metadata"].get("labels") or {}
    return labels.get(NAMESPACE_LABEL, ""), labels.get(POLICY_LABEL, "")


def mounted_claims(pods: Sequence[Object]) -> frozenset[str]:
    """Claims that pods mount. Pods that have ended do not count."""
    return frozenset(
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        for volume in (pod.get("spec") or {}).get("volumes") or ()
        if volume.get("persistentVolumeClaim")
    )
