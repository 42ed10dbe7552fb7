"""Injection: adds tiers to a pod, or says in one sentence why not. Pure and thread-safe.

``inject`` decodes the pod once; what decides takes the decoded pod. The patch is made on a copy of
the document. The pod that is passed in never changes, and neither do command, probes and grace
period of the one that is returned. A pod that is injected is returned as it is. The rules are in
``docs/attaching.md``.

There are three forms of injection: tierd in a sidecar (the default), tierd started by the engine
(``daemon: Engine``), and the configuration of another connector.
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
from kvtier_operator.api.engine import Connector, Delivery
from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.injection import (
    checks,
    engine_container,
    engine_memory,
    environment,
    existing_config,
    sidecar,
)
from kvtier_operator.injection.decision import (
    AdmissionContext,
    Decision,
    Injected,
    PodObject,
    Skipped,
)
from kvtier_operator.injection.engine_container import EnginePod, local_ranks
from kvtier_operator.injection.existing_config import TOPOLOGY_VARIABLE
from kvtier_operator.injection.resources import MEMORY, format_amount, parse_amount, parse_amounts
from kvtier_operator.injection.sidecar import PodStorage
from kvtier_operator.injection.structure import Structure, decide_structure
from kvtier_operator.render import connectors
from kvtier_operator.render.documents import (
    POD_TIERS_DIRECTORY,
    POD_TOPOLOGY_DIRECTORY,
    content_hash,
)
from kvtier_operator.render.engine import payload_path
from kvtier_operator.settings import Settings

RANKS_VARIABLE = "KVTIER_LOCAL_RANKS"
POD_VARIABLE = "KVTIER_POD_UID"
TOKEN_VARIABLE = "KVTIER_TOKEN_FILE"  # noqa: S105  (a name)
NATIVE_SIDECARS = (1, 29)
IMAGE_VOLUMES = (1, 33)
IMAGE_VOLUMES_BY_DEFAULT = (1, 35)
MAX_SENTENCES = 4
MAX_MESSAGE = 1_000
"""Characters of a message, which goes into an annotation, a condition and an Event."""


@dataclass(slots=True)
class Draft:
    """The patched pod while it is made. ``pod`` is a deep copy of the document; ``spec`` and
    ``engine`` are parts of it. ``target`` is the pod before injection.
    """

    target: EnginePod
    structure: Structure
    pod: dict[str, Any]
    spec: dict[str, Any]
    engine: dict[str, Any]
    storage: PodStorage = field(default_factory=PodStorage)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, document: PodObject, index: int, target: EnginePod, structure: Structure) -> Draft:
        """``index``: of the engine in ``spec.containers``."""
        pod = copy.deepcopy(dict(document))
        spec = pod["spec"]
        notes = list(structure.notes)
        return cls(target, structure, pod, spec, spec["containers"][index], notes=notes)


def inject(
    policy: KVTierPolicy, document: PodObject, context: AdmissionContext, settings: Settings
) -> Decision:
    """Injects a pod that ``policy`` governs, or skips it. Raises ``InvalidObjectError`` if the
    document is not a pod.
    """
    decision = _decide(policy, document, context, settings)
    if isinstance(decision, Skipped) and len(decision.message) > MAX_MESSAGE:
        return Skipped(decision.reason, decision.message[: MAX_MESSAGE - 3] + "...")
    return decision


def _decide(
    policy: KVTierPolicy, document: PodObject, context: AdmissionContext, settings: Settings
) -> Decision:
    pod = decode_pod(document)
    if names.STRUCTURAL_ANNOTATION in pod.metadata.annotations:
        return Injected(copy.deepcopy(dict(document)))
    skipped = _skip_by_pod_or_policy(policy, pod, context)
    if skipped is not None:
        return skipped
    too_large = engine_container.too_large(pod)
    if too_large is not None:
        return Skipped(SkipReason.NO_ENGINE_CONTAINER, too_large)
    engine = engine_container.engine_container(policy, pod)
    if isinstance(engine, Skipped):
        return engine
    target = EnginePod.of(pod, engine.index)
    skipped = _skip_by_engine(target)
    if skipped is not None:
        return skipped
    try:
        structure = decide_structure(policy, pod, context)
        if isinstance(structure, Skipped):
            return structure
        draft = Draft.of(document, engine.index, target, structure)
        return _inject(policy, context, settings, draft)
    except ConfigurationError as error:
        return Skipped(SkipReason.NOT_ACCEPTED, f"the policy cannot be rendered: {error}")


def _inject(
    policy: KVTierPolicy, context: AdmissionContext, settings: Settings, draft: Draft
) -> Decision:
    if policy.spec.engine.connector is not Connector.KVTIER:
        skipped = _inject_other_connector(draft, policy, settings)
    elif policy.spec.engine.daemon is Daemon.ENGINE:
        skipped = _inject_engine_daemon(draft, policy, settings)
    else:
        skipped = _inject_sidecar(draft, policy, settings)
    if skipped is not None:
        return skipped
    _note_python_path(policy, draft)
    by_image_volume = policy.spec.engine.delivery is Delivery.IMAGE_VOLUME
    if by_image_volume and _oldest_kubelet(context) < IMAGE_VOLUMES_BY_DEFAULT:
        draft.notes.append(
            "image volumes need the feature gate ImageVolume in all components of this Kubernetes "
            "version"
        )
    violations = checks.admission_violations(decode_pod(draft.pod), context)
    if violations:
        return Skipped(
            SkipReason.WOULD_BE_REFUSED,
            "the API server would reject the pod with its tiers: "
            f"{'; '.join(violations[:MAX_SENTENCES])}",
        )
    _annotate(draft, policy)
    return Injected(draft.pod, tuple(draft.notes))


# Skipped pods. Anything that would prevent the pod from starting is skipped.


def _skip_by_pod_or_policy(
    policy: KVTierPolicy, pod: Pod, context: AdmissionContext
) -> Skipped | None:
    unsupported = engine_container.unsupported_owner(pod)
    if unsupported is not None:
        return Skipped(SkipReason.UNSUPPORTED_OWNER, unsupported)
    if policy.spec.attach.mode is AttachMode.CONFIG_MAP_ONLY:
        return Skipped(SkipReason.DISABLED, "spec.attach.mode is ConfigMapOnly: no pod is injected")
    if pod.metadata.labels.get(names.INJECT_LABEL) == "disabled":
        return Skipped(
            SkipReason.DISABLED,
            f"the pod has the label {names.INJECT_LABEL}=disabled; remove it to inject the pod",
        )
    if context.policy_errors:
        errors = "; ".join(list(context.policy_errors)[:MAX_SENTENCES])
        return Skipped(SkipReason.NOT_ACCEPTED, f"the policy is invalid: {errors}")
    impossible = connectors.policy_errors(policy)
    if impossible:
        return Skipped(SkipReason.NOT_ACCEPTED, f"the policy is invalid: {impossible[0]}")
    if pod.spec.os.name == "windows":
        return Skipped(
            SkipReason.UNSUPPORTED_ENGINE, "the pod runs on Windows; engines are supported on Linux"
        )
    if context.suspended is not None:
        return Skipped(
            SkipReason.SUSPENDED,
            f"an earlier pod of this owner did not start with tiers ({context.suspended}); "
            "injection is retried after "
            f"{policy.spec.attach.retry_seconds} s, or when the policy changes",
        )
    return checks.name_conflict(pod) or _skip_by_kubelet(policy, context)


def _skip_by_kubelet(policy: KVTierPolicy, context: AdmissionContext) -> Skipped | None:
    """The pod may be scheduled on any of these nodes, so the oldest kubelet counts."""
    engine = policy.spec.engine
    oldest = _oldest_kubelet(context)
    version = f"{oldest[0]}.{oldest[1]}"
    needs_sidecar = engine.connector is Connector.KVTIER and engine.daemon is Daemon.SIDECAR
    if needs_sidecar and oldest < NATIVE_SIDECARS:
        return Skipped(
            SkipReason.NO_NATIVE_SIDECARS,
            f"a node that could run the pod has kubelet {version}, and native sidecars need 1.29; "
            "upgrade it, exclude it in the pod's nodeSelector, or set spec.engine.daemon: Engine",
        )
    if engine.delivery is Delivery.IMAGE_VOLUME and oldest < IMAGE_VOLUMES:
        return Skipped(
            SkipReason.WOULD_NOT_START,
            f"a node that could run the pod has kubelet {version}, and image volumes need 1.33; "
            "set spec.engine.delivery: InitContainer",
        )
    return None


def _oldest_kubelet(context: AdmissionContext) -> tuple[int, int]:
    """Major and minor version. Without a node for the pod the newest: one may be added, and if it
    is too old, the injection breaker reacts.
    """
    found = [re.match(r"v?(\d+)\.(\d+)", version) for version in context.kubelet_versions]
    return min(((int(match[1]), int(match[2])) for match in found if match), default=(9, 0))


def _skip_by_engine(target: EnginePod) -> Skipped | None:
    engine, command = target.engine, target.command
    own = existing_config.own_transfer_config(engine, command)
    if own is not None:
        return Skipped(
            SkipReason.ALREADY_CONFIGURED,
            f"container {engine.name} has its own KV configuration: {own}; remove it to inject "
            "the pod",
        )
    hosts = existing_config.multi_host_reason(target.pod, engine, command)
    if hosts is not None:
        return Skipped(
            SkipReason.MULTI_HOST,
            f"the ranks of the engine run on several hosts ({hosts}), and tiers serve one pod; run "
            "tensor and pipeline "
            "parallelism within a pod",
        )
    return None


# The three forms of injection.


def _inject_sidecar(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """tierd runs in its own container, which alone mounts the storage."""
    storage, tiers = draft.storage, draft.structure.tiers
    sidecar.add_shared(storage, policy)
    sidecar.add_payload(storage, policy, settings)
    sidecar.hide_service_account(storage)
    sidecar.add_token(storage, policy, storage.daemon)
    sidecar.add_secrets(storage, policy, tiers, storage.daemon)
    sidecar.add_tiers(storage, policy, tiers, settings, storage.daemon)
    variables = {TOPOLOGY_VARIABLE: POD_TOPOLOGY_DIRECTORY, **_rank_variables(draft, policy)}
    skipped = _patch_engine(draft, policy, variables)
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    container = sidecar.tierd_container(policy, settings, draft.target, storage, draft.structure)
    _add_init_container(draft, container)
    _note_pod_memory_limit(draft, policy)
    _patch_pod(draft, policy, settings)
    return None


def _inject_engine_daemon(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """The engine starts tierd in its own container, which mounts the storage and is charged for the
    pool.
    """
    storage, tiers = draft.storage, draft.structure.tiers
    sidecar.add_shared(storage, policy)
    sidecar.add_payload(storage, policy, settings)
    sidecar.add_token(storage, policy, storage.engine)
    sidecar.add_secrets(storage, policy, tiers, storage.engine)
    sidecar.add_tiers(storage, policy, tiers, settings, storage.engine)
    variables = {
        TOPOLOGY_VARIABLE: POD_TOPOLOGY_DIRECTORY,
        TOKEN_VARIABLE: names.TOKEN_FILE,
        **_rank_variables(draft, policy),
    }
    skipped = _patch_engine(draft, policy, variables)
    skipped = skipped or _charge_engine(draft, policy, sidecar.daemon_bytes(policy, tiers))
    if skipped is not None:
        return skipped
    if draft.structure.port is None:
        draft.engine["env"] = [*draft.engine["env"], sidecar.host_pod_variable()]
    _add_payload_container(draft, policy, settings)
    _patch_pod(draft, policy, settings)
    return None


def _inject_other_connector(
    draft: Draft, policy: KVTierPolicy, settings: Settings
) -> Skipped | None:
    """vLLM's own offloading, or LMCache, in the engine's container, which mounts the storage. The
    plugin applies the configuration.
    """
    storage, tiers = draft.storage, draft.structure.tiers
    paths = {
        tier.name: f"{POD_TIERS_DIRECTORY}/{tier.name}"
        for tier in tiers
        if tier.file_system is not None
    }
    spec = policy.spec.model_copy(update={"tiers": list(tiers)})
    ranks = local_ranks(policy, draft.target.engine, draft.target.command)
    if ranks is None:
        ranks = 1
        draft.notes.append(
            "the number of the engine's ranks is unknown, 1 is assumed; set spec.engine.localRanks"
        )
    rendered = connectors.render(policy.model_copy(update={"spec": spec}), paths, ranks)
    sidecar.add_payload(storage, policy, settings)
    sidecar.add_tiers(storage, policy, tiers, settings, storage.engine)
    variables = {
        connectors.TRANSFER_CONFIG_VARIABLE: rendered.transfer_config_text,
        **rendered.environment,
    }
    skipped = _patch_engine(draft, policy, variables)
    skipped = skipped or _charge_engine(draft, policy, rendered.engine_memory_bytes)
    if skipped is not None:
        return skipped
    _add_pod_uid(draft)
    _add_payload_container(draft, policy, settings)
    _patch_pod(draft, policy, settings)
    draft.notes += engine_memory.grow_shared_memory(
        draft.target, (draft.spec, draft.engine), rendered.shared_memory_bytes
    )
    return None


# Parts of the patch.


def _rank_variables(draft: Draft, policy: KVTierPolicy) -> dict[str, str]:
    """What depends on the pod is passed in its environment, because the hash of the structure is
    the policy's.
    """
    ranks = local_ranks(policy, draft.target.engine, draft.target.command)
    return {} if ranks is None else {RANKS_VARIABLE: str(ranks)}


def _patch_engine(
    draft: Draft, policy: KVTierPolicy, variables: Mapping[str, str]
) -> Skipped | None:
    """Adds mounts and variables to the engine's container."""
    target, mounts = draft.target, draft.storage.engine
    mount_paths = [str(mount["mountPath"]) for mount in mounts]
    skipped = checks.mount_conflict(target.pod.spec, target.engine, mount_paths)
    if skipped is not None:
        return skipped
    engine = policy.spec.engine
    payload = None
    if engine.delivery is not Delivery.IMAGE:
        payload = payload_path(names.PAYLOAD_DIRECTORY, engine.type)
    wanted = environment.EngineEnvironment(payload, engine.python_path, engine.hash_seed, variables)
    draft.engine["env"], notes = environment.patch_environment(draft.engine, wanted)
    draft.notes += notes
    if mounts:
        draft.engine["volumeMounts"] = [*(draft.engine.get("volumeMounts") or ()), *mounts]
    return None


def _add_pod_uid(draft: Draft) -> None:
    """The plugin names what the engine leaves in ``/dev/shm`` after the pod, to remove it later."""
    source = {"fieldRef": {"fieldPath": "metadata.uid"}}
    draft.engine["env"] = [*draft.engine["env"], {"name": POD_VARIABLE, "valueFrom": source}]


def _charge_engine(draft: Draft, policy: KVTierPolicy, needed_bytes: int) -> Skipped | None:
    engine = draft.target.engine
    skipped = engine_memory.memory_too_small(policy, engine, needed_bytes)
    if skipped is None:
        draft.notes += engine_memory.grow_memory(policy, engine, draft.engine, needed_bytes)
    return skipped


def _add_payload_container(draft: Draft, policy: KVTierPolicy, settings: Settings) -> None:
    if policy.spec.engine.delivery is not Delivery.INIT_CONTAINER:
        return
    if not any(volume["name"] == names.NO_ACCOUNT_VOLUME for volume in draft.storage.volumes):
        sidecar.hide_service_account(draft.storage)
    _add_init_container(draft, sidecar.payload_container(settings, draft.target, draft.storage))


def _add_init_container(draft: Draft, container: dict[str, Any]) -> None:
    draft.spec["initContainers"] = [*(draft.spec.get("initContainers") or ()), container]


def _note_pod_memory_limit(draft: Draft, policy: KVTierPolicy) -> None:
    limit = parse_amounts(draft.target.pod.spec.resources.limits).get(MEMORY)
    if limit is not None:
        needed = parse_amount(sidecar.daemon_bytes(policy, draft.structure.tiers))
        draft.notes.append(
            f"the pod-level memory limit of {format_amount(MEMORY, limit)} includes the tiers' "
            f"{format_amount(MEMORY, needed)}"
        )


def _patch_pod(draft: Draft, policy: KVTierPolicy, settings: Settings) -> None:
    """Volumes, the storage group and the pull secret."""
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


def _note_python_path(policy: KVTierPolicy, draft: Draft) -> None:
    if policy.spec.engine.delivery is Delivery.IMAGE:
        return
    if existing_config.python_ignores_path(draft.target.command):
        draft.notes.append(
            "the command runs Python with -I or -E, which ignore PYTHONPATH, so the plugin is not "
            "found; use delivery: Image"
        )
    if existing_config.overwrites_variable(draft.target.command, environment.PATH):
        draft.notes.append(
            "the command overwrites PYTHONPATH, so the plugin may not be found; extend "
            "$PYTHONPATH, or use delivery: Image"
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
    node_local = draft.storage.node_local
    if node_local:
        written = annotations.get(names.SAFE_TO_EVICT_ANNOTATION, "").split(",")
        declared = [name for name in written if name]
        added = [name for name in node_local if name not in declared]
        annotations[names.SAFE_TO_EVICT_ANNOTATION] = ",".join([*declared, *added])
    metadata["annotations"] = annotations
    metadata["labels"] = {**(metadata.get("labels") or {}), names.ATTACHED_LABEL: "true"}
