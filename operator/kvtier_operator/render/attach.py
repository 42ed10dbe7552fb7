"""Gives a pod its tiers, or says in one sentence why not. Pure: no clock, no cluster, no randomness; thread-safe.

The rules and the faults they prevent: CLUSTER, sections 1 to 3; for people: ``docs/attaching.md``. The pod that is given
is never changed, and neither are the command, the probes or the grace period of the one that is returned. A pod that has
its tiers comes back as it is.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from kvtier import __version__
from kvtier.errors import ConfigurationError
from kvtier.topology.models import Daemon
from kvtier_operator.api.engine import Connector, Delivery, EngineType
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.render import collisions, configured, connectors, containers, names
from kvtier_operator.render.attachment import Attached, Decision, PodObject, Skipped, SkipReason, Surroundings
from kvtier_operator.render.command import Said, read
from kvtier_operator.render.patching import Draft, engine_daemon, other_connector, sidecar
from kvtier_operator.render.refusal import refusals
from kvtier_operator.render.structure import structure
from kvtier_operator.render.topology import content_hash
from kvtier_operator.settings import Settings

NATIVE_SIDECARS = (1, 29)
IMAGE_VOLUMES = (1, 33)
IMAGE_VOLUMES_BY_DEFAULT = (1, 35)
MAX_SENTENCES = 4
MAX_MESSAGE = 1_000
"""Characters of a reason; it goes into an annotation, a condition and an Event."""


def attach(policy: KVTierPolicy, pod: PodObject, around: Surroundings, settings: Settings) -> Decision:
    """Decides about a pod that ``policy`` governs."""
    decision = _decide(policy, pod, around, settings)
    if isinstance(decision, Skipped) and len(decision.message) > MAX_MESSAGE:
        return Skipped(decision.reason, decision.message[: MAX_MESSAGE - 3] + "...")
    return decision


def _decide(policy: KVTierPolicy, pod: PodObject, around: Surroundings, settings: Settings) -> Decision:
    if names.STRUCTURAL_ANNOTATION in ((pod.get("metadata") or {}).get("annotations") or {}):
        return Attached(copy.deepcopy(dict(pod)))
    skipped = _pod_left_alone(policy, pod, around)
    if skipped is not None:
        return skipped
    too_many = containers.too_many(pod)
    if too_many is not None:
        return Skipped(SkipReason.NO_ENGINE_CONTAINER, too_many)
    engine = containers.engine_container(policy, pod)
    if isinstance(engine, str):
        return Skipped(SkipReason.NO_ENGINE_CONTAINER, engine)
    container = pod["spec"]["containers"][engine.index]
    said = read(container)
    skipped = _engine_left_alone(pod, container, said)
    if skipped is not None:
        return skipped
    try:
        given = structure(policy, pod, around)
        if isinstance(given, Skipped):
            return given
        return _patched(policy, around, settings, Draft.of(pod, engine.index, said, given))
    except ConfigurationError as error:
        return Skipped(SkipReason.NOT_ACCEPTED, f"the policy cannot be rendered: {error}")


def _patched(policy: KVTierPolicy, around: Surroundings, settings: Settings, draft: Draft) -> Decision:
    if policy.spec.engine.connector is not Connector.KVTIER:
        skipped = other_connector(draft, policy, settings)
    elif policy.spec.engine.daemon is Daemon.ENGINE:
        skipped = engine_daemon(draft, policy, settings)
    else:
        skipped = sidecar(draft, policy, settings)
    if skipped is not None:
        return skipped
    _look_at_command(policy, draft)
    if policy.spec.engine.delivery is Delivery.IMAGE_VOLUME and _oldest(around) < IMAGE_VOLUMES_BY_DEFAULT:
        draft.notes.append("image volumes of this Kubernetes need the feature gate ImageVolume in all its parts")
    refused = refusals(draft.pod, around)
    if refused:
        return Skipped(
            SkipReason.WOULD_BE_REFUSED,
            f"the API server would refuse the pod with its tiers: {'; '.join(refused[:MAX_SENTENCES])}",
        )
    _annotate(draft, policy)
    return Attached(draft.pod, tuple(draft.notes))


def _pod_left_alone(policy: KVTierPolicy, pod: PodObject, around: Surroundings) -> Skipped | None:
    unsupported = containers.unsupported_owner(pod)
    if unsupported is not None:
        return Skipped(SkipReason.UNSUPPORTED_OWNER, unsupported)
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        return Skipped(SkipReason.DISABLED, "spec.attach.mode is ConfigMapOnly: nothing is injected")
    if ((pod.get("metadata") or {}).get("labels") or {}).get(names.INJECT_LABEL) == "disabled":
        return Skipped(
            SkipReason.DISABLED, f"the pod's label {names.INJECT_LABEL} is disabled; remove it to attach the pod"
        )
    if around.refusals:
        return Skipped(
            SkipReason.NOT_ACCEPTED, f"the policy is not accepted: {'; '.join(list(around.refusals)[:MAX_SENTENCES])}"
        )
    if policy.spec.engine.type is not EngineType.VLLM:
        message = f"spec.engine.type is {policy.spec.engine.type.value}; this version attaches VLLM"
        return Skipped(SkipReason.UNSUPPORTED_ENGINE, message)
    impossible = connectors.impossible(policy)
    if impossible:
        return Skipped(SkipReason.NOT_ACCEPTED, f"the policy is not accepted: {impossible[0]}")
    if (((pod.get("spec") or {}).get("os")) or {}).get("name") == "windows":
        return Skipped(SkipReason.UNSUPPORTED_ENGINE, "the pod is for Windows; engines are attached on Linux")
    if around.suspended is not None:
        return Skipped(
            SkipReason.SUSPENDED,
            f"an earlier pod of this owner did not start with tiers ({around.suspended}); tried again after "
            f"{policy.spec.attach.retry_seconds} s, or when the policy changes",
        )
    return collisions.taken_names(pod) or _too_old(policy, around)


def _too_old(policy: KVTierPolicy, around: Surroundings) -> Skipped | None:
    """A pod may be scheduled to any node, so the oldest kubelet counts."""
    engine = policy.spec.engine
    oldest = _oldest(around)
    shown = f"{oldest[0]}.{oldest[1]}"
    sidecar_wanted = engine.connector is Connector.KVTIER and engine.daemon is Daemon.SIDECAR
    if sidecar_wanted and oldest < NATIVE_SIDECARS:
        return Skipped(
            SkipReason.NO_NATIVE_SIDECARS,
            f"a kubelet is of version {shown}, and native sidecars need 1.29; upgrade it, or set spec.engine.daemon: Engine",
        )
    if engine.delivery is Delivery.IMAGE_VOLUME and oldest < IMAGE_VOLUMES:
        return Skipped(
            SkipReason.WOULD_NOT_START,
            f"a kubelet is of version {shown}, and image volumes need 1.33; set spec.engine.delivery: InitContainer",
        )
    return None


def _oldest(around: Surroundings) -> tuple[int, int]:
    """The oldest kubelet; where none is known, as new as can be: nodes may be yet to come."""
    found = [re.match(r"v?(\d+)\.(\d+)", version) for version in around.kubelet_versions]
    return min(((int(match[1]), int(match[2])) for match in found if match), default=(9, 0))


def _engine_left_alone(pod: PodObject, engine: Mapping[str, Any], said: Said) -> Skipped | None:
    own = configured.own_transfer_config(engine, said)
    if own is not None:
        return Skipped(
            SkipReason.ALREADY_CONFIGURED,
            f"container {engine['name']} brings its own KV configuration, which is left alone: {own}; remove it to attach the pod",
        )
    hosts = configured.several_hosts(pod, engine, said)
    if hosts is not None:
        return Skipped(
            SkipReason.MULTI_HOST,
            f"the ranks of one engine are on several hosts ({hosts}), and tiers belong to one pod; keep tensor and pipeline "
            "parallel within a pod",
        )
    return None


def _look_at_command(policy: KVTierPolicy, draft: Draft) -> None:
    if policy.spec.engine.delivery is Delivery.IMAGE:
        return
    if configured.python_ignores_path(draft.said):
        draft.notes.append(
            "the command's Python ignores PYTHONPATH (-I or -E), so the plugin will not be found; use delivery: Image"
        )
    if configured.assigns(draft.engine, "PYTHONPATH"):
        draft.notes.append(
            "the command sets PYTHONPATH itself, so the plugin may not be found; let it extend $PYTHONPATH, or use delivery: Image"
        )


def _annotate(draft: Draft, policy: KVTierPolicy) -> None:
    metadata = draft.pod.setdefault("metadata", {})
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop(names.SKIPPED_ANNOTATION, None)
    annotations[names.STRUCTURAL_ANNOTATION] = draft.structure.text
    annotations[names.POLICY_ANNOTATION] = policy.metadata.name
    annotations[names.POLICY_UID_ANNOTATION] = policy.metadata.uid or ""
    annotations[names.HASH_ANNOTATION] = content_hash(policy.spec)
    annotations[names.VERSION_ANNOTATION] = __version__
    if draft.notes:
        annotations[names.NOTES_ANNOTATION] = json.dumps(draft.notes, ensure_ascii=False)
    local = draft.storage.local
    if local:
        said = [name for name in annotations.get(names.SAFE_TO_EVICT_ANNOTATION, "").split(",") if name]
        annotations[names.SAFE_TO_EVICT_ANNOTATION] = ",".join([*said, *(name for name in local if name not in said)])
    metadata["annotations"] = annotations
    metadata["labels"] = {**(metadata.get("labels") or {}), names.ATTACHED_LABEL: "true"}
