"""What the parts of a reconcile hand to one another, as values.

The loop observes and plans; ``PlanFacts`` is what looking after the pods needs of that, and ``StatusResult`` what comes
back. Conditions travel as ``ConditionUpdate`` (no times, no generation); ``conditions`` turns them into what is written.

Conditions: from what was found in this reconcile to what is written. Pure.

``Ready`` sums up whether pods of the policy have working tiers. What only says that a newer state has not reached every
pod (``UpToDate``, ``Tuned``) does not make a policy unready.

Accepted and StorageReady: what is found about a policy and about the claims behind its tiers. Pure.

Reasons of ``Accepted``: ``Accepted``, ``PartlyExpressed`` (True: fields that the chosen connector cannot say),
``PartlyApplied`` (True: the API server refused something that pods can do without); ``Invalid``, ``VolumeNotAllowed``,
``Unsupported``, ``TooLarge`` (False: no pod is attached).

Reasons of ``StorageReady``: ``NoClaims``, ``Bound`` (True); ``ClaimPending`` (Unknown: pods are attached, and wait with
the claim); ``ClaimMissing``, ``ClaimLost``, ``ClaimTerminating``, ``ClaimNotShared``, ``ApplyRefused``, ``NotAccepted``
(False: pods are attached without network volumes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from kvtier_operator.api.conditions import PolicyReason
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import Condition, PolicyStatus
from kvtier_operator.api.tiers import Sharing, Tier
from kvtier_operator.api.validation import FieldError
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.kube.resources import Object

Verdict = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition as found in this reconcile: ``reason`` in one word, ``message`` one sentence for people."""

    type: str
    status: Verdict
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What is known of a policy when its pods are looked after.

    ``findings``: Accepted and StorageReady. ``pods``: pods that the selector matches and this policy governs, in no
    order; ``conflicted``: pods that it matches too but an older policy governs, each with that policy's name.
    ``claims``: tier to claim, only of tiers whose claim the operator makes or expects. ``accepted`` is False where
    nothing was applied, and then new pods are left alone. ``live_generation``: of the live ConfigMap as it stands after
    this reconcile. ``token``: bearer token of the policy's pods, None while the Secret is missing.
    """

    structural_hash: str
    live_generation: int
    accepted: bool
    findings: tuple[ConditionUpdate, ...] = ()
    pods: Sequence[Object] = ()
    conflicted: Sequence[tuple[Object, str]] = ()
    claims: dict[str, str] = field(default_factory=dict)
    token: str | None = None


@dataclass(frozen=True, slots=True)
class StatusResult:
    """What looking after the pods came to.

    ``status``: the whole status to be written (the loop compares it with the one in force, and writes on a difference).
    ``wake_seconds``: when the policy should be looked at again without any event; None: at the next resync.
    """

    status: PolicyStatus
    wake_seconds: float | None = None


ORDER = (
    "Ready",
    "Accepted",
    "StorageReady",
    "Attached",
    "UpToDate",
    "Tuned",
    "EnginesCompatible",
    "TiersHealthy",
)
"""As they are listed in a status."""
DECIDE_READY = ("Accepted", "StorageReady", "EnginesCompatible", "Attached", "TiersHealthy")
"""In the order in which they speak for Ready: what must be repaired first comes first."""
MAX_MESSAGE = 1024
READY_MESSAGE = "The policy is in force."


def ready(findings: Iterable[ConditionUpdate]) -> ConditionUpdate:
    """The summary: the first that is False, else the first that is Unknown, else True."""
    by_type = {finding.type: finding for finding in findings}
    relevant = [by_type[name] for name in DECIDE_READY if name in by_type]
    for verdict in ("False", "Unknown"):
        for finding in relevant:
            if finding.status == verdict:
                return ConditionUpdate(
                    "Ready", verdict, finding.reason, f"{finding.type}: {finding.message}"
                )
    return ConditionUpdate("Ready", "True", "InForce", READY_MESSAGE)


def stamped(
    findings: Iterable[ConditionUpdate],
    previous: Sequence[Condition] | None,
    generation: int,
    now: float,
) -> list[Condition]:
    """Conditions to write, ``Ready`` included where it is not among them. ``now``: seconds since 1970.

    A condition whose status stays keeps its transition time, so that the same findings give the same conditions.
    """
    found = {finding.type: finding for finding in findings}
    if "Ready" not in found:
        found["Ready"] = ready(found.values())
    before = {condition.type: condition for condition in previous or ()}
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = []
    for name in names:
        finding, old = found[name], before.get(name)
        kept = old is not None and old.status == finding.status
        message = finding.message
        conditions.append(
            Condition.model_validate(
                {
                    "type": name,
                    "status": finding.status,
                    "reason": finding.reason,
                    "message": message
                    if len(message) <= MAX_MESSAGE
                    else message[: MAX_MESSAGE - 1] + "…",
                    "observedGeneration": generation,
                    "lastTransitionTime": old.last_transition_time
                    if kept and old is not None
                    else moment,
                }
            )
        )
    return conditions


ACCEPTED = "Accepted"
STORAGE_READY = "StorageReady"
SHARED_MODES = frozenset({"ReadWriteMany"})


def not_accepted(
    reason: PolicyReason, refusals: Iterable[FieldError]
) -> tuple[ConditionUpdate, ConditionUpdate]:
    """Both conditions of a policy that is not followed."""
    text = "; ".join(refusal.message for refusal in refusals)
    return (
        ConditionUpdate(ACCEPTED, "False", reason.value, text),
        ConditionUpdate(
            STORAGE_READY,
            "False",
            PolicyReason.NOT_ACCEPTED.value,
            "Nothing is made for a policy that is not accepted.",
        ),
    )


def accepted(gaps: Sequence[FieldError]) -> ConditionUpdate:
    """Of a policy that is followed; ``gaps``: what its connector cannot say."""
    if gaps:
        text = "; ".join(gap.message for gap in gaps)
        return ConditionUpdate(ACCEPTED, "True", PolicyReason.PARTLY_EXPRESSED.value, text)
    return ConditionUpdate(
        ACCEPTED, "True", PolicyReason.ACCEPTED.value, "The policy is accepted as written."
    )


def partly_applied(problems: Sequence[str]) -> ConditionUpdate:
    """Of a policy that is followed, while something that its pods can do without was refused."""
    return ConditionUpdate(ACCEPTED, "True", PolicyReason.PARTLY_APPLIED.value, "; ".join(problems))


def storage_refused(problems: Sequence[str]) -> ConditionUpdate:
    """A volume or claim that the API server refused."""
    return ConditionUpdate(
        STORAGE_READY, "False", PolicyReason.APPLY_REFUSED.value, "; ".join(problems)
    )


def storage(
    policy: KVTierPolicy, claims: dict[str, str], found: dict[str, Object], made: frozenset[str]
) -> ConditionUpdate:
    """From the claims as they are. ``claims``: tier to name; ``made``: names that the operator makes itself.

    The worst claim gives status and reason; the message names every claim that is not bound.
    """
    if not claims:
        return ConditionUpdate(
            STORAGE_READY, "True", PolicyReason.NO_CLAIMS.value, "No tier needs a claim."
        )
    judged = [
        _judge(policy, policy.spec.tier(tier), name, found.get(name), name in made)
        for tier, name in claims.items()
    ]
    for verdict in ("False", "Unknown"):
        matching = [(reason, text) for status, reason, text in judged if status == verdict]
        if matching:
            others = [text for status, _, text in judged if status not in ("True", verdict)]
            message = "; ".join([*(text for _, text in matching), *others])
            return ConditionUpdate(
                STORAGE_READY,
                "False" if verdict == "False" else "Unknown",
                matching[0][0].value,
                message,
            )
    bound = ", ".join(sorted(set(claims.values())))
    return ConditionUpdate(
        STORAGE_READY, "True", PolicyReason.BOUND.value, f"Every claim is bound: {bound}."
    )


def _judge(
    policy: KVTierPolicy, tier: Tier, name: str, claim: Object | None, made: bool
) -> tuple[Verdict, PolicyReason, str]:
    where = f"tier {tier.name}: claim {policy.namespace}/{name}"
    if claim is None:
        if made:
            return "Unknown", PolicyReason.CLAIM_PENDING, f"{where} is being made"
        volume = tier.file_system.volume if tier.file_system is not None else None
        if volume is not None and volume.nfs is not None:
            hint = (
                f"the operator may make no volumes (storage.createVolumes), so an administrator makes a volume for "
                f"{volume.nfs.server}:{volume.nfs.path} and this claim"
            )
        else:
            hint = "create it"
        return "False", PolicyReason.CLAIM_MISSING, f"{where} does not exist; {hint}"
    if is_terminating(claim):
        return (
            "False",
            PolicyReason.CLAIM_TERMINATING,
            f"{where} is being deleted; it is made anew once no pod uses it",
        )
    spec, phase = claim.get("spec") or {}, (claim.get("status") or {}).get("phase") or "Pending"
    modes = spec.get("accessModes") or []
    cluster = tier.file_system is not None and tier.file_system.sharing is Sharing.CLUSTER
    if cluster and not made and not SHARED_MODES.intersection(modes):
        text = f"{where} has accessModes {', '.join(modes)}; sharing: Cluster needs ReadWriteMany"
        return "False", PolicyReason.CLAIM_NOT_SHARED, text
    if phase == "Lost":
        return (
            "False",
            PolicyReason.CLAIM_LOST,
            f"{where} has lost its volume {spec.get('volumeName', '')}".rstrip(),
        )
    if phase != "Bound":
        return "Unknown", PolicyReason.CLAIM_PENDING, f"{where} is {phase}"
    return "True", PolicyReason.BOUND, ""
