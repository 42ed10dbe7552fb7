"""``kvtier why POD``: why a pod is or is not attached, and what would happen to a new one.

The state is the controller's (``pod_view``), the decision the webhook's (``mutate``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.reports import PodStatusSource, read_reports
from kvtier.cli.cluster.snapshot import (
    NamespaceSnapshot,
    policies_of,
    read_snapshot,
    recreated,
)
from kvtier.cli.console import console
from kvtier_operator.api.names import NOTES_ANNOTATION
from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import LabelSelector, describe
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.controller.pods import pod_view
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.controller.pods.reports import NO_REPORT
from kvtier_operator.controller.rollout import outdated
from kvtier_operator.injection.governing import governing, precedence, selects
from kvtier_operator.kube.resources import PODS
from kvtier_operator.render.documents import content_hash
from kvtier_operator.webhook.mutate import MutationResult

NOT_GOVERNED = "NotGoverned"
FINISHED = "Finished"
TERMINATING = "Terminating"
ATTACHED, SKIPPED, UNCHANGED = "Attached", "Skipped", "Unchanged"


@dataclass(frozen=True, slots=True)
class IfCreatedNow:
    """What the webhook would do with this pod. ``result``: Attached, Skipped or Unchanged."""

    result: str
    reason: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodExplanation:
    """Why a pod is in its state. ``policy``: the one that governs it; empty: none. ``notes``: what
    was found while the pod was injected. ``others``: policies that select it too, and why they do
    not govern it. ``now``: None if it makes no difference.
    """

    namespace: str
    pod: str
    policy: str
    state: str
    reason: str
    message: str
    notes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    now: IfCreatedNow | None = None
    not_checked: tuple[str, ...] = ()


async def explain_pod(
    reader: ClusterReader, name: str, source: PodStatusSource, now: float | None = None
) -> PodExplanation:
    """Explains a pod of the reader's namespace. ``now``: seconds since 1970. Raises
    ``CommandError``.
    """
    document = await reader.get(PODS, reader.namespace, name)
    snapshot = await read_snapshot(reader)
    pod = decode_pod(document)
    policies = policies_of(snapshot)
    policy = governing(policies, reader.namespace, pod.metadata.labels)
    if pod.has_ended or pod.is_terminating:
        state = FINISHED if pod.has_ended else TERMINATING
        return _explanation(reader, pod, policy, (state, state, "the pod no longer runs an engine"))
    preview = created_now(snapshot, recreated(document))
    if policy is None:
        why = (NOT_GOVERNED, NOT_GOVERNED, _why_not_governed(pod, policies))
        return _explanation(reader, pod, None, why)
    reports = await read_reports(reader, source, [pod], policy.metadata.name)
    last = reports.get(pod.metadata.uid, NO_REPORT)
    clock = time.time() if now is None else now
    view = pod_view.view(policy, pod, last, clock, snapshot.enabled)
    why = (view.state.value, view.reason, _message(policy, view))
    interesting = not view.has_tiers or bool(outdated(policy, [view], content_hash(policy.spec)))
    return _explanation(
        reader,
        pod,
        policy,
        why,
        others=_others(pod, policy, policies),
        now=preview if interesting else None,
    )


def created_now(snapshot: NamespaceSnapshot, pod: dict[str, Any]) -> IfCreatedNow:
    """What would happen to a pod that is created now, the API server's part included."""
    namespace = snapshot.namespace
    if snapshot.webhook_installed is False:
        return IfCreatedNow(
            UNCHANGED, "NoWebhook", "KVTier's webhook is not registered; install the chart"
        )
    if snapshot.enabled is False:
        wanted = describe(snapshot.settings.webhook.namespace_selector)
        message = (
            f"the labels of namespace {namespace} do not match {wanted}, so the API server does "
            f"not call the webhook; run kubectl label namespace {namespace} {wanted}"
        )
        return IfCreatedNow(UNCHANGED, "NotEnabled", message)
    watched = snapshot.settings.watch_namespaces
    if watched and namespace not in watched:
        message = f"the operator does not watch namespace {namespace}: see watchNamespaces"
        return IfCreatedNow(UNCHANGED, "NotWatched", message)
    result: MutationResult | None = snapshot.admit(pod)
    if result is None:
        return _left_alone(snapshot, decode_pod(pod))
    return IfCreatedNow(result.result, result.reason, result.message, result.notes)


def _left_alone(snapshot: NamespaceSnapshot, pod: Pod) -> IfCreatedNow:
    """The webhook makes no decision about such a pod."""
    policies = policies_of(snapshot)
    policy = governing(policies, snapshot.namespace, pod.metadata.labels)
    if policy is None:
        return IfCreatedNow(UNCHANGED, NOT_GOVERNED, _why_not_governed(pod, policies))
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        message = "spec.attach.mode is ConfigMapOnly: no pod is injected"
        return IfCreatedNow(UNCHANGED, "Disabled", message)
    return IfCreatedNow(
        UNCHANGED, "UnsupportedOwner", "static pods and pods of a DaemonSet are not supported"
    )


def _explanation(
    reader: ClusterReader,
    pod: Pod,
    policy: KVTierPolicy | None,
    why: tuple[str, str, str],
    *,
    others: tuple[str, ...] = (),
    now: IfCreatedNow | None = None,
) -> PodExplanation:
    return PodExplanation(
        namespace=pod.metadata.namespace,
        pod=pod.metadata.name,
        policy=policy.metadata.name if policy is not None else "",
        state=why[0],
        reason=why[1],
        message=why[2],
        notes=tuple(pod_notes(pod)),
        others=others,
        now=now,
        not_checked=tuple(dict.fromkeys(reader.not_checked)),
    )


def pod_notes(pod: Pod) -> list[str]:
    """What the webhook noted when it injected the pod. Anyone who may edit pods can change it."""
    try:
        found = json.loads(pod.metadata.annotations.get(NOTES_ANNOTATION, "[]")[:8_192])
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [each for each in found[:16] if isinstance(each, str)]


def _message(policy: KVTierPolicy, view: PodView) -> str:
    if not view.has_tiers:
        return view.message
    stale = outdated(policy, [view], content_hash(policy.spec))
    if not stale:
        return view.message
    if not view.same_policy:
        return f"{view.message}; its tiers come from another policy, or an earlier one of this name"
    return f"{view.message}; its structure is an earlier one than the policy's: replace the pod"


def _others(pod: Pod, policy: KVTierPolicy, policies: Sequence[KVTierPolicy]) -> tuple[str, ...]:
    """Policies that select the pod too."""
    labels, namespace = pod.metadata.labels, pod.metadata.namespace
    selecting = [
        each for each in policies if each is not policy and selects(each, namespace, labels)
    ]
    return tuple(
        f"policy {each.metadata.name} selects the pod too, but {policy.metadata.name} is older "
        "and governs it"
        for each in sorted(selecting, key=precedence)
    )


def _why_not_governed(pod: Pod, policies: Sequence[KVTierPolicy]) -> str:
    if not policies:
        return f"namespace {pod.metadata.namespace} has no KVTierPolicy"
    reasons = "; ".join(_mismatch(pod, each) for each in policies[:4])
    more = f"; and {len(policies) - 4} more" if len(policies) > 4 else ""
    return f"no policy selects the pod: {reasons}{more}"


def _mismatch(pod: Pod, policy: KVTierPolicy) -> str:
    """The first requirement of a policy's selector that the pod does not meet."""
    name, labels = policy.metadata.name, pod.metadata.labels
    if policy.deletion_timestamp:
        return f"{name} is being deleted"
    selector: LabelSelector = policy.spec.pod_selector
    for key, value in (selector.match_labels or {}).items():
        if labels.get(key) != value:
            found = f"{key}={labels[key]}" if key in labels else f"no label {key}"
            return f"{name} needs the label {key}={value}, and the pod has {found}"
    for each in selector.match_expressions or ():
        only = selector.model_copy(update={"match_labels": None, "match_expressions": [each]})
        if not selects(_with_selector(policy, only), policy.namespace, labels):
            values = f" ({', '.join(each.values)})" if each.values else ""
            return f"{name} needs {each.key} {each.operator.value}{values}"
    return f"{name} does not select it"


def _with_selector(policy: KVTierPolicy, selector: LabelSelector) -> KVTierPolicy:
    spec = policy.spec.model_copy(update={"pod_selector": selector})
    return policy.model_copy(update={"spec": spec})


def to_json(found: PodExplanation) -> dict[str, Any]:
    """The output of ``-o json``."""
    now = found.now
    return {
        "namespace": found.namespace,
        "pod": found.pod,
        "policy": found.policy or None,
        "state": found.state,
        "reason": found.reason,
        "message": found.message,
        "notes": list(found.notes),
        "otherPolicies": list(found.others),
        "ifCreatedNow": None
        if now is None
        else {
            "result": now.result,
            "reason": now.reason or None,
            "message": now.message or None,
            "notes": list(now.notes),
        },
        "notChecked": list(found.not_checked),
    }


def show(found: PodExplanation) -> None:
    """Prints the explanation."""
    out = console()
    title = Text(f"pod {found.namespace}/{found.pod}: ")
    style = "green" if found.state == PodState.ATTACHED.value else "yellow"
    out.print(title.append(found.state, style=style))
    out.print(Text(f"  policy: {found.policy or 'none'}"))
    if found.reason != found.state:
        out.print(Text(f"  reason: {found.reason}"))
    out.print(Text(f"  {found.message}"))
    for note in found.notes:
        out.print(Text(f"  note: {note}"))
    for other in found.others:
        out.print(Text(f"  {other}"))
    if found.now is not None:
        line = f"if it were created now: {found.now.result}"
        reason = f" ({found.now.reason})" if found.now.reason else ""
        out.print(Text(line + reason))
        if found.now.message:
            out.print(Text(f"  {found.now.message}"))
        for note in found.now.notes:
            out.print(Text(f"  note: {note}"))
    for each in found.not_checked:
        out.print(Text(f"not checked: {each}", style="yellow"))
