"""A pod while it is given its tiers: what is added, for each way in which an engine can have them. Pure.

Gives a pod its tiers, or says in one sentence why not. Pure: no clock, no cluster, no randomness; thread-safe.

The rules and the faults they prevent: CLUSTER, sections 1 to 3; for people: ``docs/attaching.md``. The pod that is given
is never changed, and neither are the command, the probes or the grace period of the one that is returned. A pod that has
its tiers comes back as it is.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier import __version__
from kvtier.config.models import Daemon
from kvtier.errors import ConfigurationError
from kvtier_operator.api import names
from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.engine import Connector, Delivery, EngineType
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.injection import (
    checks,
    engine_container,
    environment,
    existing_config,
    resources,
    sidecar,
)
from kvtier_operator.injection import sidecar as parts
from kvtier_operator.injection.checks import refusals
from kvtier_operator.injection.command_line import Said, read
from kvtier_operator.injection.decision import (
    AdmissionContext,
    Attached,
    Decision,
    PodObject,
    Skipped,
)
from kvtier_operator.injection.engine_container import local_ranks
from kvtier_operator.injection.existing_config import TOPOLOGY_VARIABLE
from kvtier_operator.injection.resources import (
    MEMORY,
    amount,
    amounts,
    has_pod_level,
    qos_class,
    shown,
)
from kvtier_operator.injection.sidecar import Storage
from kvtier_operator.injection.structure import Structure, structure
from kvtier_operator.render import connectors
from kvtier_operator.render.documents import (
    POD_TIERS_DIRECTORY,
    POD_TOPOLOGY_DIRECTORY,
    content_hash,
)
from kvtier_operator.settings import Settings

RANKS_VARIABLE = "KVTIER_LOCAL_RANKS"
TOKEN_VARIABLE = "KVTIER_TOKEN_FILE"  # noqa: S105  (a name)


@dataclass(slots=True)
class Draft:
    """``pod`` is a copy of its own. ``whole``: it is Guaranteed by its containers and has to stay so."""

    pod: dict[str, Any]
    spec: dict[str, Any]
    engine: dict[str, Any]
    said: Said
    structure: Structure
    whole: bool
    storage: Storage = field(default_factory=Storage)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, pod: PodObject, index: int, said: Said, structure: Structure) -> Draft:
        """Begins with a copy of the pod."""
        copied = copy.deepcopy(dict(pod))
        spec = copied["spec"]
        whole = not has_pod_level(spec) and qos_class(spec) == "Guaranteed"
        return cls(
            copied,
            spec,
            spec["containers"][index],
            said,
            structure,
            whole,
            notes=list(structure.notes),
        )


def with_sidecar(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """The usual way: tierd in a container of its own, which alone mounts the storage."""
    found, tiers = draft.storage, draft.structure.tiers
    sidecar.add_shared(found, policy)
    sidecar.add_payload(found, policy, settings)
    sidecar.add_no_account(found)
    sidecar.add_token(found, policy, found.daemon)
    sidecar.add_secrets(found, policy, tiers, found.daemon)
    sidecar.add_tiers(found, policy, tiers, settings, found.daemon)
    skipped = _engine(
        draft, policy, {TOPOLOGY_VARIABLE: POD_TOPOLOGY_DIRECTORY, **_ranks(draft, policy)}
    )
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    container = parts.tierd(
        policy, settings, draft.engine, draft.spec, found, draft.structure, draft.whole
    )
    draft.spec["initContainers"] = [*(draft.spec.get("initContainers") or ()), container]
    _note_shared_limit(draft, policy)
    _finish(draft, policy, settings)
    return None


def with_engine_daemon(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """The engine starts tierd in its own container, which mounts the storage and pays for the pool."""
    found, tiers = draft.storage, draft.structure.tiers
    sidecar.add_shared(found, policy)
    sidecar.add_payload(found, policy, settings)
    sidecar.add_token(found, policy, found.engine)
    sidecar.add_secrets(found, policy, tiers, found.engine)
    sidecar.add_tiers(found, policy, tiers, settings, found.engine)
    plain = {
        TOPOLOGY_VARIABLE: POD_TOPOLOGY_DIRECTORY,
        TOKEN_VARIABLE: names.TOKEN_FILE,
        **_ranks(draft, policy),
    }
    skipped = _engine(draft, policy, plain)
    skipped = skipped or resources.fit(
        policy, draft.engine, parts.daemon_bytes(policy, draft.structure.tiers), draft.notes
    )
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    _finish(draft, policy, settings)
    return None


def with_other_connector(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """vLLM's own offloading, or LMCache: inside the engine, which mounts the storage; the plugin sets its configuration."""
    found, tiers = draft.storage, draft.structure.tiers
    paths = {
        tier.name: f"{POD_TIERS_DIRECTORY}/{tier.name}"
        for tier in tiers
        if tier.file_system is not None
    }
    spec = policy.spec.model_copy(update={"tiers": list(tiers)})
    ranks = local_ranks(policy, draft.engine, draft.said)
    if ranks is None:
        ranks = 1
        draft.notes.append(
            "how many ranks the engine has is not known, one is assumed; set spec.engine.localRanks"
        )
    rendered = connectors.render(policy.model_copy(update={"spec": spec}), paths, ranks)
    sidecar.add_payload(found, policy, settings)
    sidecar.add_tiers(found, policy, tiers, settings, found.engine)
    plain = {
        connectors.TRANSFER_CONFIG_VARIABLE: rendered.transfer_config_text,
        **rendered.environment,
    }
    skipped = _engine(draft, policy, plain)
    skipped = skipped or resources.fit(
        policy, draft.engine, rendered.engine_memory_bytes, draft.notes
    )
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    _finish(draft, policy, settings)
    resources.shared_memory(draft.spec, draft.engine, rendered.shared_memory_bytes, draft.notes)
    return None


def _ranks(draft: Draft, policy: KVTierPolicy) -> dict[str, str]:
    """What is derived from the pod goes into its environment, since the structure's hash is the policy's."""
    ranks = local_ranks(policy, draft.engine, draft.said)
    return {} if ranks is None else {RANKS_VARIABLE: str(ranks)}


def _engine(draft: Draft, policy: KVTierPolicy, plain: dict[str, str]) -> Skipped | None:
    """Mounts and variables of the engine's container; nothing else of it changes."""
    skipped = checks.mounts(draft.spec, draft.engine, draft.storage.engine)
    if skipped is not None:
        return skipped
    engine = policy.spec.engine
    payload = None if engine.delivery is Delivery.IMAGE else names.PAYLOAD_DIRECTORY
    wanted = environment.Wanted(payload, engine.python_path, engine.hash_seed, plain)
    draft.engine["env"], notes = environment.attached(draft.engine, wanted)
    draft.notes += notes
    if draft.storage.engine:
        draft.engine["volumeMounts"] = [
            *(draft.engine.get("volumeMounts") or ()),
            *draft.storage.engine,
        ]
    return None


def _add_payload_container(draft: Draft, policy: KVTierPolicy, settings: Settings) -> None:
    if policy.spec.engine.delivery is not Delivery.INIT_CONTAINER:
        return
    if not any(volume["name"] == names.NO_ACCOUNT_VOLUME for volume in draft.storage.volumes):
        sidecar.add_no_account(draft.storage)
    container = parts.payload(settings, draft.engine, draft.spec, draft.storage, draft.whole)
    draft.spec["initContainers"] = [*(draft.spec.get("initContainers") or ()), container]


def _note_shared_limit(draft: Draft, policy: KVTierPolicy) -> None:
    limit = amounts((draft.spec.get("resources") or {}).get("limits")).get(MEMORY)
    if limit is not None:
        draft.notes.append(
            f"the pod's own memory limit of {shown(MEMORY, limit)} holds the tiers' "
            f"{shown(MEMORY, amount(parts.daemon_bytes(policy, draft.structure.tiers)))} too"
        )


def _finish(draft: Draft, policy: KVTierPolicy, settings: Settings) -> None:
    """What concerns the pod as a whole."""
    spec = draft.spec
    spec["volumes"] = [*(spec.get("volumes") or ()), *draft.storage.volumes]
    if any(tier.file_system is not None for tier in draft.structure.tiers):
        context = dict(spec.get("securityContext") or {})
        groups = list(context.get("supplementalGroups") or ())
        gid = policy.spec.security.storage_gid
        context["supplementalGroups"] = groups if gid in groups else [*groups, gid]
        spec["securityContext"] = context
    secret = settings.images.pull_secret
    secrets = list(spec.get("imagePullSecrets") or ())
    if secret and all(each.get("name") != secret for each in secrets):
        spec["imagePullSecrets"] = [*secrets, {"name": secret}]


NATIVE_SIDECARS = (1, 29)
IMAGE_VOLUMES = (1, 33)
IMAGE_VOLUMES_BY_DEFAULT = (1, 35)
MAX_SENTENCES = 4
MAX_MESSAGE = 1_000
"""Characters of a reason; it goes into an annotation, a condition and an Event."""


def attach(
    policy: KVTierPolicy, pod: PodObject, around: AdmissionContext, settings: Settings
) -> Decision:
    """Decides about a pod that ``policy`` governs."""
    decision = _decide(policy, pod, around, settings)
    if isinstance(decision, Skipped) and len(decision.message) > MAX_MESSAGE:
        return Skipped(decision.reason, decision.message[: MAX_MESSAGE - 3] + "...")
    return decision


def _decide(
    policy: KVTierPolicy, pod: PodObject, around: AdmissionContext, settings: Settings
) -> Decision:
    if names.STRUCTURAL_ANNOTATION in ((pod.get("metadata") or {}).get("annotations") or {}):
        return Attached(copy.deepcopy(dict(pod)))
    skipped = _pod_left_alone(policy, pod, around)
    if skipped is not None:
        return skipped
    too_many = engine_container.too_many(pod)
    if too_many is not None:
        return Skipped(SkipReason.NO_ENGINE_CONTAINER, too_many)
    engine = engine_container.engine_container(policy, pod)
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


def _patched(
    policy: KVTierPolicy, around: AdmissionContext, settings: Settings, draft: Draft
) -> Decision:
    if policy.spec.engine.connector is not Connector.KVTIER:
        skipped = with_other_connector(draft, policy, settings)
    elif policy.spec.engine.daemon is Daemon.ENGINE:
        skipped = with_engine_daemon(draft, policy, settings)
    else:
        skipped = with_sidecar(draft, policy, settings)
    if skipped is not None:
        return skipped
    _look_at_command(policy, draft)
    if (
        policy.spec.engine.delivery is Delivery.IMAGE_VOLUME
        and _oldest(around) < IMAGE_VOLUMES_BY_DEFAULT
    ):
        draft.notes.append(
            "image volumes of this Kubernetes need the feature gate ImageVolume in all its parts"
        )
    refused = refusals(draft.pod, around)
    if refused:
        return Skipped(
            SkipReason.WOULD_BE_REFUSED,
            f"the API server would refuse the pod with its tiers: {'; '.join(refused[:MAX_SENTENCES])}",
        )
    _annotate(draft, policy)
    return Attached(draft.pod, tuple(draft.notes))


def _pod_left_alone(
    policy: KVTierPolicy, pod: PodObject, around: AdmissionContext
) -> Skipped | None:
    unsupported = engine_container.unsupported_owner(pod)
    if unsupported is not None:
        return Skipped(SkipReason.UNSUPPORTED_OWNER, unsupported)
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        return Skipped(
            SkipReason.DISABLED, "spec.attach.mode is ConfigMapOnly: nothing is injected"
        )
    if ((pod.get("metadata") or {}).get("labels") or {}).get(names.INJECT_LABEL) == "disabled":
        return Skipped(
            SkipReason.DISABLED,
            f"the pod's label {names.INJECT_LABEL} is disabled; remove it to attach the pod",
        )
    if around.refusals:
        return Skipped(
            SkipReason.NOT_ACCEPTED,
            f"the policy is not accepted: {'; '.join(list(around.refusals)[:MAX_SENTENCES])}",
        )
    if policy.spec.engine.type is not EngineType.VLLM:
        message = f"spec.engine.type is {policy.spec.engine.type.value}; this version attaches VLLM"
        return Skipped(SkipReason.UNSUPPORTED_ENGINE, message)
    impossible = connectors.impossible(policy)
    if impossible:
        return Skipped(SkipReason.NOT_ACCEPTED, f"the policy is not accepted: {impossible[0]}")
    if (((pod.get("spec") or {}).get("os")) or {}).get("name") == "windows":
        return Skipped(
            SkipReason.UNSUPPORTED_ENGINE, "the pod is for Windows; engines are attached on Linux"
        )
    if around.suspended is not None:
        return Skipped(
            SkipReason.SUSPENDED,
            f"an earlier pod of this owner did not start with tiers ({around.suspended}); tried again after "
            f"{policy.spec.attach.retry_seconds} s, or when the policy changes",
        )
    return checks.taken_names(pod) or _too_old(policy, around)


def _too_old(policy: KVTierPolicy, around: AdmissionContext) -> Skipped | None:
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


def _oldest(around: AdmissionContext) -> tuple[int, int]:
    """The oldest kubelet; where none is known, as new as can be: nodes may be yet to come."""
    found = [re.match(r"v?(\d+)\.(\d+)", version) for version in around.kubelet_versions]
    return min(((int(match[1]), int(match[2])) for match in found if match), default=(9, 0))


def _engine_left_alone(pod: PodObject, engine: Mapping[str, Any], said: Said) -> Skipped | None:
    own = existing_config.own_transfer_config(engine, said)
    if own is not None:
        return Skipped(
            SkipReason.ALREADY_CONFIGURED,
            f"container {engine['name']} brings its own KV configuration, which is left alone: {own}; remove it to attach the pod",
        )
    hosts = existing_config.several_hosts(pod, engine, said)
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
    if existing_config.python_ignores_path(draft.said):
        draft.notes.append(
            "the command's Python ignores PYTHONPATH (-I or -E), so the plugin will not be found; use delivery: Image"
        )
    if existing_config.assigns(draft.engine, "PYTHONPATH"):
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
        said = [
            name for name in annotations.get(names.SAFE_TO_EVICT_ANNOTATION, "").split(",") if name
        ]
        annotations[names.SAFE_TO_EVICT_ANNOTATION] = ",".join(
            [*said, *(name for name in local if name not in said)]
        )
    metadata["annotations"] = annotations
    metadata["labels"] = {**(metadata.get("labels") or {}), names.ATTACHED_LABEL: "true"}
