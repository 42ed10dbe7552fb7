"""The conditions of a policy, the input that the pod reconciler gets from the plan, and the
conditions Accepted and StorageReady. Pure.

During a reconcile a condition is a ``ConditionUpdate``, without times and generation;
``serialize.to_conditions`` adds them. ``Ready`` says whether the controller has done what the
policy asks of it: the policy is accepted, its storage is ready and its live values are written.
Tools that wait for a policy must not wait for pods, so conditions about pods do not make a policy
unready; they only give the reason.

Reasons of ``Accepted``: ``Accepted``, ``NotEnforced`` (True: this version does not act on some
fields), ``PartlyExpressed`` (True: the connector has no equivalent of
some fields), ``PartlyApplied`` (True: the API server rejected an object that pods do not need);
``Invalid``, ``VolumeNotAllowed``, ``Unsupported``, ``TooLarge`` (False: no pod is injected).

Reasons of ``StorageReady``: ``NoClaims``, ``Bound``, ``BindsOnFirstUse`` (True); ``ClaimPending``
(Unknown: pods are injected, and wait for the claim); ``ClaimMissing``, ``ClaimLost``,
``ClaimTerminating``, ``ClaimNotShared``, ``ApplyRefused``, ``NotAccepted`` (False: pods are
injected without network volumes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtier_operator.api.conditions import PolicyReason, Reason
from kvtier_operator.api.file_tier import MountedVolume, Sharing
from kvtier_operator.api.pods import Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import FieldError
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.kube.resources import Object

ConditionStatus = Literal["True", "False", "Unknown"]
ACCEPTED = "Accepted"
STORAGE_READY = "StorageReady"
READY_ORDER = (ACCEPTED, STORAGE_READY)
"""The conditions that decide Ready. The first one that is not True gives the reason: what must be
fixed first.
"""
READY_MESSAGE = "The policy is in force."
SHARED_MODES = frozenset({"ReadWriteMany"})


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition as found in this reconcile. ``message``: one sentence for people."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ReconcileInput:
    """What the pod reconciler needs to know about a policy after its plan was applied.

    ``accepted``: False: nothing was applied, and new pods are not injected. ``conditions``:
    Accepted and StorageReady. ``pods``: those that this policy governs, in no order.
    ``governed_by_others``: for each pod that the selector matches and another policy governs, that
    policy's name. ``claims``: by tier, of tiers that have one. ``live_generation``: of the live
    ConfigMap. ``token``: bearer token of the policy's pods; None while the Secret is missing.
    ``not_written``: why the live values could not be written; empty: they are.
    """

    structural_hash: str
    live_generation: int
    accepted: bool
    conditions: tuple[ConditionUpdate, ...] = ()
    pods: Sequence[Pod] = ()
    governed_by_others: Sequence[str] = ()
    claims: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    not_written: str = ""


def ready(conditions: Iterable[ConditionUpdate]) -> ConditionUpdate:
    """Ready from the conditions that decide it: the first that is False, else the first that is
    Unknown, else True.
    """
    by_type = {condition.type: condition for condition in conditions}
    relevant = [by_type[name] for name in READY_ORDER if name in by_type]
    statuses: tuple[ConditionStatus, ...] = ("False", "Unknown")
    for status in statuses:
        for condition in relevant:
            if condition.status == status:
                message = f"{condition.type}: {condition.message}"
                return ConditionUpdate("Ready", status, condition.reason, message)
    return ConditionUpdate("Ready", "True", Reason.IN_FORCE.value, READY_MESSAGE)


def not_accepted(
    reason: PolicyReason, errors: Iterable[FieldError]
) -> tuple[ConditionUpdate, ConditionUpdate]:
    """Accepted and StorageReady of a policy that is not applied."""
    message = "; ".join(error.message for error in errors)
    return (
        ConditionUpdate(ACCEPTED, "False", reason.value, message),
        ConditionUpdate(
            STORAGE_READY,
            "False",
            PolicyReason.NOT_ACCEPTED.value,
            "No object is created for a policy that is not accepted.",
        ),
    )


def accepted(gaps: Sequence[FieldError], without_effect: Sequence[str] = ()) -> ConditionUpdate:
    """Accepted of a policy that is applied. ``gaps``: fields that its connector has no equivalent
    of. ``without_effect``: messages about fields that this version does not act on.
    """
    if without_effect:
        message = "; ".join([*without_effect, *(gap.message for gap in gaps)])
        return ConditionUpdate(ACCEPTED, "True", PolicyReason.NOT_ENFORCED.value, message)
    if gaps:
        message = "; ".join(gap.message for gap in gaps)
        return ConditionUpdate(ACCEPTED, "True", PolicyReason.PARTLY_EXPRESSED.value, message)
    return ConditionUpdate(ACCEPTED, "True", PolicyReason.ACCEPTED.value, "The policy is valid.")


def partly_applied(problems: Sequence[str]) -> ConditionUpdate:
    """Accepted of a policy of which an object could not be applied that pods do not need."""
    return ConditionUpdate(ACCEPTED, "True", PolicyReason.PARTLY_APPLIED.value, "; ".join(problems))


def storage_apply_failed(problems: Sequence[str]) -> ConditionUpdate:
    """StorageReady of a policy of which a volume or a claim could not be applied."""
    return ConditionUpdate(
        STORAGE_READY, "False", PolicyReason.APPLY_REFUSED.value, "; ".join(problems)
    )


def storage_ready(
    policy: KVTierPolicy,
    claims: Mapping[str, str],
    found: Mapping[str, Object],
    created: frozenset[str],
    first_use: frozenset[str] = frozenset(),
) -> ConditionUpdate:
    """StorageReady from the state of the claims. ``claims``: names by volume; ``found``: existing
    claims by name; ``created``: names of claims that the operator creates; ``first_use``: names of
    claims that are bound when a pod uses them.

    The worst claim gives status and reason. The message names every claim that is not bound.
    """
    if not claims:
        return ConditionUpdate(
            STORAGE_READY, "True", PolicyReason.NO_CLAIMS.value, "No tier needs a claim."
        )
    states = [
        ("True", PolicyReason.BINDS_ON_FIRST_USE, "")
        if name in first_use
        else _claim_state(policy, policy.spec.volume(key), name, found.get(name), name in created)
        for key, name in claims.items()
    ]
    statuses: tuple[ConditionStatus, ...] = ("False", "Unknown")
    for status in statuses:
        worst = [(reason, message) for each, reason, message in states if each == status]
        if worst:
            others = [message for each, _, message in states if each not in ("True", status)]
            text = "; ".join([*(message for _, message in worst), *others])
            return ConditionUpdate(STORAGE_READY, status, worst[0][0].value, text)
    waiting = sorted(first_use.intersection(claims.values()))
    if waiting:
        return ConditionUpdate(
            STORAGE_READY,
            "True",
            PolicyReason.BINDS_ON_FIRST_USE.value,
            f"The storage class binds these claims when a pod uses them: {', '.join(waiting)}.",
        )
    bound = ", ".join(sorted(set(claims.values())))
    return ConditionUpdate(
        STORAGE_READY, "True", PolicyReason.BOUND.value, f"Every claim is bound: {bound}."
    )


def _claim_state(
    policy: KVTierPolicy, mounted: MountedVolume, name: str, claim: Object | None, created: bool
) -> tuple[ConditionStatus, PolicyReason, str]:
    where = f"tier {mounted.key}: claim {policy.namespace}/{name}"
    if claim is None:
        if created:
            return "Unknown", PolicyReason.CLAIM_PENDING, f"{where} is being created"
        nfs = mounted.volume.nfs
        if nfs is not None:
            hint = (
                "the operator may not create volumes (storage.createVolumes); "
                "ask an administrator to create a PersistentVolume for "
                f"{nfs.server}:{nfs.path} and this claim"
            )
        else:
            hint = "create it"
        return "False", PolicyReason.CLAIM_MISSING, f"{where} does not exist; {hint}"
    if is_terminating(claim):
        message = f"{where} is being deleted; it is recreated once no pod uses it"
        return "False", PolicyReason.CLAIM_TERMINATING, message
    spec, phase = claim.get("spec") or {}, (claim.get("status") or {}).get("phase") or "Pending"
    modes = spec.get("accessModes") or []
    files = policy.spec.tier(mounted.tier).file_system
    cluster = files is not None and files.sharing is Sharing.CLUSTER
    if cluster and not created and not SHARED_MODES.intersection(modes):
        message = (
            f"{where} has accessModes {', '.join(modes)}; sharing: Cluster needs ReadWriteMany"
        )
        return "False", PolicyReason.CLAIM_NOT_SHARED, message
    if phase == "Lost":
        message = f"{where} has lost its volume {spec.get('volumeName', '')}".rstrip()
        return "False", PolicyReason.CLAIM_LOST, message
    if phase != "Bound":
        return "Unknown", PolicyReason.CLAIM_PENDING, f"{where} is {phase}"
    return "True", PolicyReason.BOUND, ""
