"""Accepted and StorageReady: what is found about a policy and about the claims behind its tiers. Pure.

Reasons of ``Accepted``: ``Accepted``, ``PartlyExpressed`` (True: fields that the chosen connector cannot say),
``PartlyApplied`` (True: the API server refused something that pods can do without); ``Invalid``, ``VolumeNotAllowed``,
``Unsupported``, ``TooLarge`` (False: no pod is attached).

Reasons of ``StorageReady``: ``NoClaims``, ``Bound`` (True); ``ClaimPending`` (Unknown: pods are attached, and wait with
the claim); ``ClaimMissing``, ``ClaimLost``, ``ClaimTerminating``, ``ClaimNotShared``, ``ApplyRefused``, ``NotAccepted``
(False: pods are attached without network volumes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.refusals import Refusal
from kvtier_operator.api.tiers import Sharing, Tier
from kvtier_operator.cluster.contract import Object
from kvtier_operator.reconcile.drift import is_leaving
from kvtier_operator.reconcile.facts import Finding, Verdict

ACCEPTED = "Accepted"
STORAGE_READY = "StorageReady"
SHARED_MODES = frozenset({"ReadWriteMany"})


class Reason(StrEnum):
    """Of both conditions."""

    ACCEPTED = "Accepted"
    PARTLY_EXPRESSED = "PartlyExpressed"
    PARTLY_APPLIED = "PartlyApplied"
    INVALID = "Invalid"
    VOLUME_NOT_ALLOWED = "VolumeNotAllowed"
    UNSUPPORTED = "Unsupported"
    TOO_LARGE = "TooLarge"
    NO_CLAIMS = "NoClaims"
    BOUND = "Bound"
    CLAIM_PENDING = "ClaimPending"
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_LOST = "ClaimLost"
    CLAIM_TERMINATING = "ClaimTerminating"
    CLAIM_NOT_SHARED = "ClaimNotShared"
    APPLY_REFUSED = "ApplyRefused"
    NOT_ACCEPTED = "NotAccepted"


def not_accepted(reason: Reason, refusals: Iterable[Refusal]) -> tuple[Finding, Finding]:
    """Both conditions of a policy that is not followed."""
    text = "; ".join(refusal.message for refusal in refusals)
    return (
        Finding(ACCEPTED, "False", reason.value, text),
        Finding(
            STORAGE_READY, "False", Reason.NOT_ACCEPTED.value, "Nothing is made for a policy that is not accepted."
        ),
    )


def accepted(gaps: Sequence[Refusal]) -> Finding:
    """Of a policy that is followed; ``gaps``: what its connector cannot say."""
    if gaps:
        text = "; ".join(gap.message for gap in gaps)
        return Finding(ACCEPTED, "True", Reason.PARTLY_EXPRESSED.value, text)
    return Finding(ACCEPTED, "True", Reason.ACCEPTED.value, "The policy is accepted as written.")


def partly_applied(problems: Sequence[str]) -> Finding:
    """Of a policy that is followed, while something that its pods can do without was refused."""
    return Finding(ACCEPTED, "True", Reason.PARTLY_APPLIED.value, "; ".join(problems))


def storage_refused(problems: Sequence[str]) -> Finding:
    """A volume or claim that the API server refused."""
    return Finding(STORAGE_READY, "False", Reason.APPLY_REFUSED.value, "; ".join(problems))


def storage(policy: KVTierPolicy, claims: dict[str, str], found: dict[str, Object], made: frozenset[str]) -> Finding:
    """From the claims as they are. ``claims``: tier to name; ``made``: names that the operator makes itself.

    The worst claim gives status and reason; the message names every claim that is not bound.
    """
    if not claims:
        return Finding(STORAGE_READY, "True", Reason.NO_CLAIMS.value, "No tier needs a claim.")
    judged = [
        _judge(policy, policy.spec.tier(tier), name, found.get(name), name in made) for tier, name in claims.items()
    ]
    for verdict in ("False", "Unknown"):
        matching = [(reason, text) for status, reason, text in judged if status == verdict]
        if matching:
            others = [text for status, _, text in judged if status not in ("True", verdict)]
            message = "; ".join([*(text for _, text in matching), *others])
            return Finding(STORAGE_READY, "False" if verdict == "False" else "Unknown", matching[0][0].value, message)
    bound = ", ".join(sorted(set(claims.values())))
    return Finding(STORAGE_READY, "True", Reason.BOUND.value, f"Every claim is bound: {bound}.")


def _judge(
    policy: KVTierPolicy, tier: Tier, name: str, claim: Object | None, made: bool
) -> tuple[Verdict, Reason, str]:
    where = f"tier {tier.name}: claim {policy.namespace}/{name}"
    if claim is None:
        if made:
            return "Unknown", Reason.CLAIM_PENDING, f"{where} is being made"
        volume = tier.file_system.volume if tier.file_system is not None else None
        if volume is not None and volume.nfs is not None:
            hint = (
                f"the operator may make no volumes (storage.createVolumes), so an administrator makes a volume for "
                f"{volume.nfs.server}:{volume.nfs.path} and this claim"
            )
        else:
            hint = "create it"
        return "False", Reason.CLAIM_MISSING, f"{where} does not exist; {hint}"
    if is_leaving(claim):
        return "False", Reason.CLAIM_TERMINATING, f"{where} is being deleted; it is made anew once no pod uses it"
    spec, phase = claim.get("spec") or {}, (claim.get("status") or {}).get("phase") or "Pending"
    modes = spec.get("accessModes") or []
    cluster = tier.file_system is not None and tier.file_system.sharing is Sharing.CLUSTER
    if cluster and not made and not SHARED_MODES.intersection(modes):
        text = f"{where} has accessModes {', '.join(modes)}; sharing: Cluster needs ReadWriteMany"
        return "False", Reason.CLAIM_NOT_SHARED, text
    if phase == "Lost":
        return "False", Reason.CLAIM_LOST, f"{where} has lost its volume {spec.get('volumeName', '')}".rstrip()
    if phase != "Bound":
        return "Unknown", Reason.CLAIM_PENDING, f"{where} is {phase}"
    return "True", Reason.BOUND, ""
