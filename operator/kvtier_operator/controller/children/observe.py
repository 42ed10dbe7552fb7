"""What a plan is made from: a policy and the objects that exist because of it, as values. Answers from the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_operator.api.names import POLICY_UID_ANNOTATION
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import FieldError, InvalidDocumentError, validated
from kvtier_operator.kube.resources import CLAIMS, CONFIG_MAPS, PODS, VOLUMES, Cache, Object
from kvtier_operator.render.documents import live_name, structural_name
from kvtier_operator.render.volumes import POLICY_LABEL, claim_name

UID_LABEL = POLICY_UID_ANNOTATION
"""On everything that was made for a policy: whose it is, also when another policy has the name."""
NAMESPACE_LABEL = "kvtier.io/policy-namespace"
"""On volumes, which have no namespace themselves."""


@dataclass(frozen=True, slots=True)
class CachedPolicy:
    """A policy as last seen. ``policy`` is None where it cannot be read, and ``refusals`` say why."""

    raw: Object
    policy: KVTierPolicy | None
    refusals: tuple[FieldError, ...] = ()

    @property
    def uid(self) -> str:
        """Of this policy, and no other that ever has its name."""
        return str(self.raw["metadata"].get("uid", ""))

    @property
    def generation(self) -> int:
        """Of the spec."""
        return int(self.raw["metadata"].get("generation", 0))


def read(raw: Object) -> CachedPolicy:
    """Parses a policy as the API server sends it."""
    try:
        return CachedPolicy(raw, validated(KVTierPolicy, dict(raw)))
    except InvalidDocumentError as error:
        return CachedPolicy(raw, None, tuple(error.errors))


@dataclass(frozen=True, slots=True)
class Observed:
    """``config_maps`` and ``claims``: by name, those that the policy needs or that carry its label. ``volumes``: those
    made for a policy of this name. ``mounted_claims``: claims that a pod of the namespace mounts.
    """

    known: CachedPolicy
    config_maps: Mapping[str, Object] = field(default_factory=dict)
    claims: Mapping[str, Object] = field(default_factory=dict)
    volumes: Sequence[Object] = ()
    mounted_claims: frozenset[str] = frozenset()


def observe(known: CachedPolicy, cache: Cache) -> Observed:
    """Reads from the cache what concerns a policy; costs what the policy's namespace holds of claims."""
    metadata = known.raw["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    needed = set(claims_of(known.policy).values())
    claims: dict[str, Object] = {}
    stale = False
    for claim in cache.list(CLAIMS, namespace):
        about = claim["metadata"]
        ours = (about.get("labels") or {}).get(POLICY_LABEL) == name
        if ours or about["name"] in needed:
            claims[about["name"]] = claim
            stale = stale or (ours and about["name"] not in needed)
    names = (
        [live_name(known.policy), structural_name(known.policy)] if known.policy is not None else []
    )
    maps = [cache.get(CONFIG_MAPS, namespace, each) for each in names]
    return Observed(
        known,
        {each["metadata"]["name"]: each for each in maps if each is not None},
        claims,
        [each for each in cache.list(VOLUMES) if volume_owner(each) == (namespace, name)],
        # Only a claim that nobody needs any more makes it worth to look at every pod.
        mounted_claims(cache.list(PODS, namespace)) if stale else frozenset(),
    )


def claims_of(policy: KVTierPolicy | None) -> dict[str, str]:
    """Tier to the claim behind it, of all tiers that have one."""
    if policy is None:
        return {}
    named = {tier.name: claim_name(policy, tier) for tier in policy.spec.tiers}
    return {tier: name for tier, name in named.items() if name is not None}


def volume_owner(volume: Object) -> tuple[str, str]:
    """Namespace and name of the policy that a volume was made for."""
    labels = volume["metadata"].get("labels") or {}
    return labels.get(NAMESPACE_LABEL, ""), labels.get(POLICY_LABEL, "")


def mounted_claims(pods: Sequence[Object]) -> frozenset[str]:
    """Claims in the volumes of pods that have not ended."""
    return frozenset(
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        for volume in (pod.get("spec") or {}).get("volumes") or ()
        if volume.get("persistentVolumeClaim")
    )
