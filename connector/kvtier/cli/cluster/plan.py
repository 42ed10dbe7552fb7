"""``kvtier plan FILE``: what applying a policy would do to pods that run.

Which policy governs a pod, which pods are outdated and which workloads are restarted is computed by
the controller's functions; what new pods get, by the webhook's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from kvtier.cli.cluster.access import ClusterReader
from kvtier.cli.cluster.snapshot import (
    NamespaceSnapshot,
    policies_of,
    read_snapshot,
    recreated,
)
from kvtier.cli.cluster.why import created_now
from kvtier.cli.console import console, print_table
from kvtier.cli.inputs import CommandError
from kvtier_operator.api import allowlist
from kvtier_operator.api.base import Change
from kvtier_operator.api.fields import fields_of
from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.quantity import Quantity
from kvtier_operator.api.settings import RolloutStrategy
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods import pod_view
from kvtier_operator.controller.pods.reports import NO_REPORT
from kvtier_operator.controller.rollout import GetObject, outdated, plan_rollout
from kvtier_operator.injection.governing import governing
from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    LEADER_WORKER_SETS,
    PODS,
    POLICIES,
    REPLICA_SETS,
    STATEFUL_SETS,
    Kind,
    Object,
)
from kvtier_operator.render.documents import content_hash, live

NEVER = "9999-12-31T23:59:59Z"
"""Creation time of a policy that does not exist yet: it sorts after every other."""
LIVE, OUTDATED, RESTARTED, UNCHANGED = "Live", "Outdated", "Restarted", "Unchanged"
WITHOUT, RELEASED = "WithoutTiers", "Released"
MEANINGS = {
    UNCHANGED: "nothing changes for the pod",
    LIVE: "the new values reach the running engine within about two minutes",
    OUTDATED: "keeps its earlier structure until it is replaced",
    RESTARTED: "the controller restarts its workload, one workload at a time",
    WITHOUT: "runs without tiers; only a new pod gets them",
    RELEASED: "the policy no longer governs it; it keeps its tiers until it is replaced",
}


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field with another value. ``live``: it applies to running engines."""

    path: str
    before: str
    after: str
    live: bool


@dataclass(frozen=True, slots=True)
class PodEffect:
    """What happens to one pod. ``effect``: a key of ``MEANINGS``. ``detail``: more about it."""

    pod: str
    effect: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What applying one policy does. ``errors``: why it would not be accepted."""

    namespace: str
    name: str
    is_new: bool
    changes: tuple[FieldChange, ...]
    pods: tuple[PodEffect, ...]
    restarts: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()


async def plan_policy(reader: ClusterReader, policy: KVTierPolicy) -> PolicyPlan:
    """The plan for one policy in the reader's namespace. Raises ``CommandError``."""
    snapshot = await read_snapshot(reader, all_pods=True)
    existing = next(
        (each for each in policies_of(snapshot) if each.metadata.name == policy.metadata.name), None
    )
    document = _applied(snapshot, policy)
    after = snapshot.with_policy(document)
    applied = next(
        each for each in policies_of(after) if each.metadata.name == policy.metadata.name
    )
    get = await _owners(reader)
    effects, restarts = _effects(snapshot, after, existing, applied, get)
    errors = []
    if snapshot.settings_known:
        errors = [each.message for each in allowlist.not_allowed(applied, snapshot.settings)]
    return PolicyPlan(
        namespace=reader.namespace,
        name=policy.metadata.name,
        is_new=existing is None,
        changes=tuple(changes(existing, applied)),
        pods=tuple(effects),
        restarts=tuple(restarts),
        errors=tuple(errors),
        not_checked=tuple(dict.fromkeys(reader.not_checked)),
    )


def _applied(snapshot: NamespaceSnapshot, policy: KVTierPolicy) -> Object:
    """The document that the API server would hold after ``kubectl apply``."""
    found = snapshot.cache.get(POLICIES, snapshot.namespace, policy.metadata.name)
    metadata = (found or {}).get("metadata") or {
        "name": policy.metadata.name,
        "namespace": snapshot.namespace,
        "uid": "",
        "creationTimestamp": NEVER,
        "generation": 0,
    }
    spec = policy.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document: dict[str, Any] = {
        "apiVersion": POLICIES.api_version,
        "kind": POLICIES.kind,
        "metadata": dict(metadata),
        "spec": spec,
    }
    status = (found or {}).get("status")
    if isinstance(status, Mapping):
        # A changed policy ends all suspensions, and its storage is judged again.
        kept = {key: value for key, value in status.items() if key != "suspendedOwners"}
        document["status"] = kept
    return document


def _effects(
    before: NamespaceSnapshot,
    after: NamespaceSnapshot,
    existing: KVTierPolicy | None,
    applied: KVTierPolicy,
    get: GetObject,
) -> tuple[list[PodEffect], list[str]]:
    """The pods that the policy governs, or governed, and the workloads to restart, in order."""
    namespace, restarts = before.namespace, set()
    live_changes = existing is None or live(existing) != live(applied)
    old, new = policies_of(before), policies_of(after)
    effects: list[PodEffect] = []
    for document in sorted(before.cache.list(PODS, namespace), key=objects.name):
        pod = decode_pod(document)
        if pod.has_ended or pod.is_terminating:
            continue
        governs = governing(new, namespace, pod.metadata.labels)
        if governs is None or governs.metadata.name != applied.metadata.name:
            governed = governing(old, namespace, pod.metadata.labels)
            if governed is not None and governed.metadata.name == applied.metadata.name:
                effects.append(_released(pod, governs))
            continue
        effect = _effect(after, applied, pod, live_changes, get)
        if effect.effect is RESTARTED:
            restarts.add(effect.detail)
        if effect.effect is WITHOUT:
            effect = _without_tiers(after, document)
        effects.append(effect)
    return effects, sorted(restarts)


def _effect(
    after: NamespaceSnapshot, applied: KVTierPolicy, pod: Pod, live_changes: bool, get: GetObject
) -> PodEffect:
    """What happens to a pod that the policy governs."""
    name, structure = pod.metadata.name, content_hash(applied.spec)
    view = pod_view.view(applied, pod, NO_REPORT, time.time(), after.enabled)
    if not view.has_tiers:
        return PodEffect(name, WITHOUT)
    if not outdated(applied, [view], structure):
        return PodEffect(name, LIVE if live_changes else UNCHANGED)
    if applied.spec.rollout.strategy is not RolloutStrategy.RESTART_WORKLOADS:
        return PodEffect(name, OUTDATED)
    if after.settings_known and not after.settings.rollout.enabled:
        return PodEffect(name, OUTDATED, "rollout.enabled is false in the values of the chart")
    progress = plan_rollout(applied, [view], structure, get)
    if progress.restart is not None:
        return PodEffect(name, RESTARTED, str(progress.restart))
    if progress.unsupported:
        each = progress.unsupported[0]
        return PodEffect(name, OUTDATED, f"restart {each.owner} yourself: {each.reason}")
    if progress.ineffective:
        owner = progress.ineffective[0]
        return PodEffect(name, OUTDATED, f"{owner} was restarted for this structure already")
    return PodEffect(name, RESTARTED, progress.in_progress)


def _without_tiers(after: NamespaceSnapshot, document: Object) -> PodEffect:
    """A pod without tiers: what its successor would get."""
    preview = created_now(after, recreated(document))
    found = f"a new one: {preview.result}"
    if preview.message:
        found += f" ({preview.reason}: {preview.message})"
    return PodEffect(objects.name(document), WITHOUT, found)


def _released(pod: Pod, governs: KVTierPolicy | None) -> PodEffect:
    other = "no policy selects it"
    if governs is not None:
        other = f"policy {governs.metadata.name} governs it"
    return PodEffect(pod.metadata.name, RELEASED, other)


async def _owners(reader: ClusterReader) -> GetObject:
    """Workloads of the namespace, read once. Those that may not be read are noted."""
    found: dict[tuple[Kind, str], Object] = {}
    purpose = "which workloads would be restarted"
    for kind in (REPLICA_SETS, DEPLOYMENTS, STATEFUL_SETS, LEADER_WORKER_SETS):
        for each in await reader.try_list(kind, reader.namespace, purpose):
            found[kind, objects.name(each)] = each
    return lambda kind, name: found.get((kind, name))


def changes(before: KVTierPolicy | None, after: KVTierPolicy) -> list[FieldChange]:
    """The fields of the spec that differ, in the policy's order; all of them, if it is new.

    Structural fields count as written, as in the structural hash. An absent live field has its
    default, which the API server adds to the stored policy.
    """
    old = {each.path: each for each in _leaves(before.spec, "spec")} if before is not None else {}
    new = {each.path: each for each in _leaves(after.spec, "spec")}
    found = []
    for path in [*new, *(each for each in old if each not in new)]:
        left, right = old.get(path, _Leaf(path)), new.get(path, _Leaf(path))
        if left.key != right.key:
            is_live = (new.get(path) or old[path]).live
            found.append(FieldChange(path, left.text, right.text, is_live))
    return found


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A field without subfields. ``key``: equal for equal values, such as 1Gi and 1024Mi."""

    path: str
    text: str = ""
    key: str = ""
    live: bool = False


def _leaves(model: BaseModel, path: str) -> Iterator[_Leaf]:
    for document in fields_of(type(model)):
        value, inner = getattr(model, document.attribute), f"{path}.{document.alias}"
        if isinstance(value, BaseModel):
            yield from _leaves(value, inner)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                key = getattr(item, "name", None) or index
                yield from _leaves(item, f"{inner}[{key}]")
        elif value is not None:
            is_live = document.change is Change.LIVE
            if is_live or document.attribute in model.model_fields_set:
                key = str(value.value) if isinstance(value, Quantity) else _text(value)
                yield _Leaf(inner, _text(value), key, is_live)


def _text(value: object) -> str:
    if isinstance(value, Quantity):
        return value.text
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={each}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value.value) if hasattr(value, "value") else str(value)


def counts(found: PolicyPlan) -> dict[str, int]:
    """Number of pods by effect."""
    return dict(Counter(each.effect for each in found.pods))


def to_json(plans: Sequence[PolicyPlan]) -> dict[str, Any]:
    """The output of ``-o json``."""
    return {
        "policies": [
            {
                "namespace": each.namespace,
                "name": each.name,
                "new": each.is_new,
                "accepted": not each.errors,
                "errors": list(each.errors),
                "changes": [
                    {
                        "field": change.path,
                        "before": change.before or None,
                        "after": change.after or None,
                        "change": "live" if change.live else "structural",
                    }
                    for change in each.changes
                ],
                "pods": [
                    {"name": pod.pod, "effect": pod.effect, "detail": pod.detail or None}
                    for pod in each.pods
                ],
                "counts": counts(each),
                "restarts": list(each.restarts),
                "notChecked": list(each.not_checked),
            }
            for each in plans
        ]
    }


def show(found: PolicyPlan) -> None:
    """Prints the plan of one policy."""
    out = console()
    kind = "new policy" if found.is_new else "policy"
    out.print(Text(f"{kind} {found.namespace}/{found.name}", style="bold"))
    for error in found.errors:
        out.print(Text(f"  not accepted: {error}", style="red"))
    if not found.is_new:
        for change in found.changes:
            how = "live" if change.live else "structural"
            before, after = change.before or "none", change.after or "none"
            out.print(Text(f"  {change.path}: {before} -> {after} ({how})"))
        if not found.changes:
            out.print(Text("  no field changes"))
    if not found.pods:
        out.print(Text("  no running pod is affected"))
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("POD", "EFFECT", "DETAIL"):
            table.add_column(title)
        for pod in found.pods:
            table.add_row(Text(pod.pod), Text(pod.effect), Text(pod.detail))
        print_table(table)
        for effect, number in counts(found).items():
            out.print(Text(f"{objects.plural(number, 'pod')} {effect}: {MEANINGS[effect]}"))
    for index, workload in enumerate(found.restarts):
        out.print(Text(f"restart {index + 1}: {workload}"))
    for each in found.not_checked:
        out.print(Text(f"not checked: {each}", style="yellow"))


def policy_namespace(policy: KVTierPolicy, given: str | None, default: str) -> str:
    """The namespace that ``kubectl apply`` would use. Raises ``CommandError`` as kubectl does if
    the file and the option differ.
    """
    written = policy.metadata.namespace
    if written and given and written != given:
        raise CommandError(
            f"policy {policy.metadata.name} is in namespace {written}, and --namespace is {given}"
        )
    return written or given or default
