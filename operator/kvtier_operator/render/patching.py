"""A pod while it is given its tiers: what is added, for each way in which an engine can have them. Pure."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.api.engine import Delivery
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.render import collisions, connectors, engine_memory, environment, names, storage
from kvtier_operator.render import sidecar as parts
from kvtier_operator.render.attachment import PodObject, Skipped
from kvtier_operator.render.command import Said
from kvtier_operator.render.configured import TOPOLOGY_VARIABLE
from kvtier_operator.render.containers import local_ranks
from kvtier_operator.render.documents import POD_TOPOLOGY_DIRECTORY
from kvtier_operator.render.resources import MEMORY, amount, amounts, has_pod_level, qos_class, shown
from kvtier_operator.render.storage import Storage
from kvtier_operator.render.structure import Structure
from kvtier_operator.render.topology import POD_TIERS_DIRECTORY
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
        return cls(copied, spec, spec["containers"][index], said, structure, whole, notes=list(structure.notes))


def sidecar(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """The usual way: tierd in a container of its own, which alone mounts the storage."""
    found, tiers = draft.storage, draft.structure.tiers
    storage.add_shared(found, policy)
    storage.add_payload(found, policy, settings)
    storage.add_no_account(found)
    storage.add_token(found, policy, found.daemon)
    storage.add_secrets(found, policy, tiers, found.daemon)
    storage.add_tiers(found, policy, tiers, settings, found.daemon)
    skipped = _engine(draft, policy, {TOPOLOGY_VARIABLE: POD_TOPOLOGY_DIRECTORY, **_ranks(draft, policy)})
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    container = parts.tierd(policy, settings, draft.engine, draft.spec, found, draft.structure, draft.whole)
    draft.spec["initContainers"] = [*(draft.spec.get("initContainers") or ()), container]
    _note_shared_limit(draft, policy)
    _finish(draft, policy, settings)
    return None


def engine_daemon(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """The engine starts tierd in its own container, which mounts the storage and pays for the pool."""
    found, tiers = draft.storage, draft.structure.tiers
    storage.add_shared(found, policy)
    storage.add_payload(found, policy, settings)
    storage.add_token(found, policy, found.engine)
    storage.add_secrets(found, policy, tiers, found.engine)
    storage.add_tiers(found, policy, tiers, settings, found.engine)
    plain = {TOPOLOGY_VARIABLE: POD_TOPOLOGY_DIRECTORY, TOKEN_VARIABLE: names.TOKEN_FILE, **_ranks(draft, policy)}
    skipped = _engine(draft, policy, plain)
    skipped = skipped or engine_memory.fit(
        policy, draft.engine, parts.daemon_bytes(policy, draft.structure.tiers), draft.notes
    )
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    _finish(draft, policy, settings)
    return None


def other_connector(draft: Draft, policy: KVTierPolicy, settings: Settings) -> Skipped | None:
    """vLLM's own offloading, or LMCache: inside the engine, which mounts the storage; the plugin sets its configuration."""
    found, tiers = draft.storage, draft.structure.tiers
    paths = {tier.name: f"{POD_TIERS_DIRECTORY}/{tier.name}" for tier in tiers if tier.file_system is not None}
    spec = policy.spec.model_copy(update={"tiers": list(tiers)})
    ranks = local_ranks(policy, draft.engine, draft.said)
    if ranks is None:
        ranks = 1
        draft.notes.append("how many ranks the engine has is not known, one is assumed; set spec.engine.localRanks")
    rendered = connectors.render(policy.model_copy(update={"spec": spec}), paths, ranks)
    storage.add_payload(found, policy, settings)
    storage.add_tiers(found, policy, tiers, settings, found.engine)
    plain = {connectors.TRANSFER_CONFIG_VARIABLE: rendered.transfer_config_text, **rendered.environment}
    skipped = _engine(draft, policy, plain)
    skipped = skipped or engine_memory.fit(policy, draft.engine, rendered.engine_memory_bytes, draft.notes)
    if skipped is not None:
        return skipped
    _add_payload_container(draft, policy, settings)
    _finish(draft, policy, settings)
    engine_memory.shared_memory(draft.spec, draft.engine, rendered.shared_memory_bytes, draft.notes)
    return None


def _ranks(draft: Draft, policy: KVTierPolicy) -> dict[str, str]:
    """What is derived from the pod goes into its environment, since the structure's hash is the policy's."""
    ranks = local_ranks(policy, draft.engine, draft.said)
    return {} if ranks is None else {RANKS_VARIABLE: str(ranks)}


def _engine(draft: Draft, policy: KVTierPolicy, plain: dict[str, str]) -> Skipped | None:
    """Mounts and variables of the engine's container; nothing else of it changes."""
    skipped = collisions.mounts(draft.spec, draft.engine, draft.storage.engine)
    if skipped is not None:
        return skipped
    engine = policy.spec.engine
    payload = None if engine.delivery is Delivery.IMAGE else names.PAYLOAD_DIRECTORY
    wanted = environment.Wanted(payload, engine.python_path, engine.hash_seed, plain)
    draft.engine["env"], notes = environment.attached(draft.engine, wanted)
    draft.notes += notes
    if draft.storage.engine:
        draft.engine["volumeMounts"] = [*(draft.engine.get("volumeMounts") or ()), *draft.storage.engine]
    return None


def _add_payload_container(draft: Draft, policy: KVTierPolicy, settings: Settings) -> None:
    if policy.spec.engine.delivery is not Delivery.INIT_CONTAINER:
        return
    if not any(volume["name"] == names.NO_ACCOUNT_VOLUME for volume in draft.storage.volumes):
        storage.add_no_account(draft.storage)
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
