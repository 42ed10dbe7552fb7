"""Every field of the CustomResourceDefinition has an effect, or is reported.

For each field and each connector, the field's value is changed and everything that follows from a
policy is computed again: documents, objects, pods, conditions, suspensions, restarts. If nothing
differs, ``NotEnforced`` or ``PartlyExpressed`` must name the field. The documents that engine and
tierd read are an effect only if their code reads the value.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from tests.support import pod_objects
from tests.support.pods import NOON, at, injected_pod, running, scheduled

from kvtier.config import models
from kvtier_operator.api.documents import load_policy
from kvtier_operator.api.fields import FieldDocument, Shape, all_fields
from kvtier_operator.api.pods import OwnerReference, decode_pod
from kvtier_operator.api.policy import KVTierPolicy, PolicySpec
from kvtier_operator.api.selector import matches
from kvtier_operator.api.unenforced import NOT_ENFORCED, is_listed, not_enforced
from kvtier_operator.api.validation import InvalidDocumentError
from kvtier_operator.controller.cached_policy import parse_policy
from kvtier_operator.controller.children.observe import Observed
from kvtier_operator.controller.children.plan import plan
from kvtier_operator.controller.injection_breaker import detectors
from kvtier_operator.controller.injection_breaker.breaker import suspended_owners
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure, Reason
from kvtier_operator.controller.pods import pod_view
from kvtier_operator.controller.pods.reports import NO_REPORT
from kvtier_operator.controller.rollout import plan_rollout
from kvtier_operator.injection.decision import Injected
from kvtier_operator.injection.inject import inject
from kvtier_operator.kube.resources import DEPLOYMENTS, REPLICA_SETS, Kind, Object
from kvtier_operator.render import connectors
from kvtier_operator.render.documents import content_hash
from kvtier_operator.settings import Settings

CONNECTOR = Path(models.__file__).resolve().parents[1]
SETTINGS = Settings.model_validate(
    {
        "storage": {"createVolumes": True},
        "rollout": {"enabled": True},
        "allowedVolumes": [
            {"namespaces": ["*"], "hostPath": "/mnt"},
            {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/"}},
            {"namespaces": ["*"], "nfs": {"server": "other.example", "exportPrefix": "/"}},
        ],
    }
)
RAM = {"name": "ram", "memory": {"capacity": "1Gi"}}
CLAIM = {"storageClassName": "fast", "accessModes": ["ReadWriteMany"], "resources": {
    "requests": {"storage": "3Gi"}
}}  # fmt: skip
VOLUMES: dict[str, dict[str, Any]] = {
    "emptyDir": {"sizeLimit": "9Gi", "medium": ""},
    "ephemeral": {"volumeClaimTemplate": {
        "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}}, "spec": CLAIM
    }},
    "persistentVolumeClaim": {"claimName": "mine"},
    "claimTemplate": CLAIM,
    "hostPath": {"path": "/mnt/kv", "type": "Directory"},
    "nfs": {"server": "nas.example", "path": "/kv", "mountOptions": ["noatime"]},
}  # fmt: skip
ALTERNATIVES: dict[str, Any] = {
    "engine.hashSeed": "7",
    "tiers[].fileSystem.minFree": "7%",
    "engine.containerName": "second",
    "engine.pythonPath": "/more",
    "isolation.keySecretRef.name": "keys",
    "podSelector.matchExpressions[].operator": "NotIn",
    "tiers[].fileSystem.volume.hostPath.type": "DirectoryOrCreate",
    "tiers[].fileSystem.volume.hostPath.path": "/mnt/other",
    "tiers[].fileSystem.volumes[].hostPath.type": "DirectoryOrCreate",
    "tiers[].fileSystem.volumes[].hostPath.path": "/mnt/other",
    "tiers[].fileSystem.volumes[].ephemeral.volumeClaimTemplate.spec.accessModes": [
        "ReadWriteOnce"
    ],
    "tiers[].fileSystem.volume.nfs.server": "other.example",
    "tiers[].fileSystem.volume.nfs.path": "/other",
    "tiers[].fileSystem.volume.nfs.mountOptions": ["nodiratime"],
    "tiers[].lmcache.url": "redis://other:6379",
    "tiers[].fileSystem.volume.claimTemplate.accessModes": ["ReadWriteOnce"],
    "tiers[].fileSystem.volume.ephemeral.volumeClaimTemplate.spec.accessModes": [
        "ReadWriteOnce"
    ],
    "resources.daemon.requests": {"cpu": "2"},
    "resources.daemon.limits": {"cpu": "9"},
}  # fmt: skip
"""Values for fields whose type does not suggest one."""
NEEDS: dict[str, dict[str, Any]] = {
    "isolation.encryption": {"isolation": {"keySecretRef": {"name": "keys"}}},
    "resources.memoryPolicy": {"engine": {"daemon": "Engine"}},
    "resources.daemon.requests": {"resources": {"daemon": {"limits": {"cpu": "8"}}}},
}
"""What a policy must have for a field to matter."""
REFUSED = (
    "tiers[].fileSystem.volume.hostPath.type",
    "tiers[].fileSystem.volumes[].hostPath.type",
)
"""Fields with one valid value."""
UNREAD = {"schema_version", "local_ranks", "hash_seed"}
"""Values of the documents that engine and tierd do not read. The operator puts the last two into
the engine's environment.
"""


def _leaves() -> list[tuple[str, FieldDocument]]:
    return [
        (path, document)
        for path, document in all_fields(PolicySpec)
        if document.shape.kind != "object"
        and not (document.shape.kind == "list" and document.shape.item is not None
                 and document.shape.item.kind == "object")
    ]  # fmt: skip


LEAVES = _leaves()


def _base(path: str, connector: str) -> dict[str, Any]:
    """A spec in which the field can be set."""
    spec: dict[str, Any] = {
        "podSelector": {
            "matchLabels": {"app": "chat"},
            "matchExpressions": [{"key": "x", "operator": "In", "values": ["y"]}],
        },
        "engine": {"connector": connector},
        "tiers": [json.loads(json.dumps(RAM))],
    }
    if path.startswith("tiers[].lmcache"):
        reference = {"name": "auth"}
        remote = {"url": "redis://cache:6379", "credentialsSecretRef": reference}
        spec["tiers"].append({"name": "remote", "lmcache": remote})
    elif ".memory." not in path:
        below = re.search(r"\.volumes?(?:\[\])?\.(\w+)", path)
        source = below[1] if below is not None and below[1] in VOLUMES else "hostPath"
        if path.endswith("sharing"):
            source = "persistentVolumeClaim"
        volume = json.loads(json.dumps({source: VOLUMES[source]}))
        # Storage for all pods of a node: every source allows it.
        sharing = "Pod" if source in ("emptyDir", "ephemeral") else "Node"
        files = {"capacity": "2Gi", "sharing": sharing, "volume": volume}
        if ".volumes[]" in path:
            one = {"name": "disk0", "capacity": "2Gi", **volume}
            files = {"sharing": sharing, "volumes": [one]}
        spec["tiers"].append({"name": "disk", "fileSystem": files})
    for key, value in NEEDS.get(path, {}).items():
        spec[key] = {**spec.get(key, {}), **json.loads(json.dumps(value))}
    return spec


def _others(shape: Shape, path: str, current: Any) -> list[Any]:
    """Valid values, at least one of which is not the current one."""
    if path in ALTERNATIVES:
        return [ALTERNATIVES[path]]
    if shape.enum:
        return [value for value in shape.enum if value]
    return [_other(shape, current)]


def _other(shape: Shape, current: Any) -> Any:
    if shape.kind == "integer":
        step = shape.multiple_of or 1
        start = current if current is not None else (shape.minimum or 0)
        return start - step if start + step > (shape.maximum or 1 << 40) else start + step
    if shape.kind == "quantity":
        return "5Gi"
    if shape.kind == "map":
        return {"app": "other"}
    if shape.kind == "list":
        return ["other"]
    return "other"


def _variants(spec: dict[str, Any], path: str, document: FieldDocument) -> Iterator[dict[str, Any]]:
    """The spec with each other value of a field, written out."""
    current = _set(json.loads(json.dumps(spec)), path, None, document.default)
    for value in _others(document.shape, path, current):
        found = json.loads(json.dumps(spec))
        _set(found, path, value, document.default)
        yield found


def _set(found: dict[str, Any], path: str, value: Any, default: Any) -> Any:
    """Sets a field, and returns what it was."""
    *parents, last = path.split(".")
    place: Any = found
    for part in parents:
        name = part.removesuffix("[]")
        place = place.setdefault(name, {})
        if part.endswith("[]"):
            place = place[-1]
    current = place.get(last, default)
    place[last] = value
    return current


def _policy(spec: dict[str, Any]) -> KVTierPolicy:
    metadata = {
        "name": "chat",
        "namespace": "serving",
        "uid": pod_objects.POLICY_UID,
        "generation": 3,
        "creationTimestamp": at(NOON - 7200),
    }
    document = {"apiVersion": "kvtier.io/v1alpha1", "kind": "KVTierPolicy", "spec": spec}
    return load_policy(json.dumps({**document, "metadata": metadata}))


def _pods() -> Iterator[dict[str, Any]]:
    gpu = {"limits": {"nvidia.com/gpu": "2", "memory": "8Gi", "cpu": "4"}}
    small = {"limits": {"nvidia.com/gpu": "1", "memory": "1Gi", "cpu": "4"}}
    yield pod_objects.pod()
    yield pod_objects.pod(pod_objects.engine(resources=gpu))
    yield pod_objects.pod(pod_objects.engine(resources=small))
    yield pod_objects.pod(pod_objects.engine(), pod_objects.engine("second"))


def _effects(policy: KVTierPolicy) -> str:
    """Everything that follows from a policy, without its structural hash and without what the
    connectors of others do not read.
    """
    raw = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    claim = {
        "metadata": {"name": "mine", "namespace": "serving"},
        "spec": {"accessModes": ["ReadWriteOnce"]},
        "status": {"phase": "Bound"},
    }
    planned = plan(Observed(parse_policy(raw), claims={"mine": claim}), SETTINGS)
    storage = [each for each in planned.conditions if each.type == "StorageReady"]
    ours = policy.spec.engine.connector.value == "KVTier"
    applied = [_read_by_engines(desired.body, ours) for desired in planned.apply]
    context = pod_objects.context(kubelet_versions=("v1.36.0",))
    decisions = [dataclasses.asdict(inject(policy, pod, context, SETTINGS)) for pod in _pods()]
    for decision in decisions:
        annotations = (decision.get("pod") or {}).get("metadata", {}).get("annotations", {})
        text = annotations.pop("kvtier.io/structural", None)
        if text is not None and ours:
            annotations["structural"] = _without_unread(json.loads(text))
    owner = OwnerReference(api_version="apps/v1", kind="ReplicaSet", name="r", uid="r")
    failure = InjectionFailure(owner, Reason.UNSCHEDULABLE, "x")
    selected = [
        matches(policy.spec.pod_selector, labels)
        for labels in ({"app": "chat", "x": "y"}, {"app": "chat"}, {"app": "other", "x": "y"},
                       {"app": "chat", "x": "z"}, {"app": "chat", "x": "other"},
                       {"app": "chat", "other": "y"})
    ]  # fmt: skip
    waiting = decode_pod(scheduled(injected_pod(), since=NOON - 120))
    found = {
        "accepted": planned.accepted,
        "applied": applied,
        "storage": str(storage),
        "pods": decisions,
        "selected": selected,
        "suspended": [each.until for each in suspended_owners(policy, [], [failure], NOON)],
        "blocked": detectors.is_blocked(policy, waiting, NOON),
        "restart": str(_restart(policy)),
    }
    return json.dumps(found, sort_keys=True, default=str).replace(content_hash(policy.spec), "HASH")


def _read_by_engines(body: dict[str, Any], ours: bool) -> dict[str, Any]:
    """An applied object, its documents without what is not read."""
    if body["kind"] != "ConfigMap":
        return body
    data = body["data"].items() if ours else ()
    return {**body, "data": {key: _without_unread(json.loads(text)) for key, text in data}}


def _without_unread(document: Any) -> Any:
    if isinstance(document, dict):
        return {
            key: _without_unread(value)
            for key, value in document.items()
            if key not in {to_camel(name) for name in UNREAD}
        }
    return [_without_unread(each) for each in document] if isinstance(document, list) else document


def _restart(policy: KVTierPolicy) -> object:
    template = {"metadata": {"labels": {"app": "chat"}}, "spec": {}}
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat", "uid": "d",
             "controller": True}  # fmt: skip
    objects: dict[Kind, Object] = {
        REPLICA_SETS: {"metadata": {"name": "chat-5d", "uid": "r", "ownerReferences": [owner]},
                       "spec": {"template": template}},
        DEPLOYMENTS: {"metadata": {"name": "chat", "uid": "d", "generation": 1},
                      "spec": {"replicas": 1, "template": template}, "status": {}},
    }  # fmt: skip
    pod = decode_pod(running(injected_pod(structural_hash="older000")))
    views = [pod_view.view(policy, pod, NO_REPORT, NOON)]
    return plan_rollout(policy, views, "HASH", lambda kind, name: objects.get(kind)).restart


def _reported(policy: KVTierPolicy, path: str) -> bool:
    """Whether a condition of the policy names the field or an object that holds it."""
    messages = [*not_enforced(policy, may_restart=True)]
    messages += [error.message for error in connectors.unsupported_fields(policy)]
    messages += [error.message for error in connectors.policy_errors(policy)]
    concrete = f"spec.{path}".replace("tiers[]", f"tiers[{len(policy.spec.tiers) - 1}]")
    concrete = concrete.replace("volumes[]", "volumes")
    fields = [message.split(":")[0] for message in messages]
    return any(concrete == field or concrete.startswith(f"{field}.") for field in fields)


@pytest.mark.parametrize(
    ("path", "document", "connector"),
    [
        pytest.param(path, document, connector, id=f"{path}-{connector}")
        for path, document in LEAVES
        for connector in ("KVTier", "Offloading", "LMCache")
        if path != "engine.connector" or connector == "KVTier"
    ],
)
def test_a_field_has_an_effect_or_is_reported(
    path: str, document: FieldDocument, connector: str
) -> None:
    spec = _base(path, connector)
    before = _effects(_policy(spec))
    variants = list(_variants(spec, path, document))
    assert variants
    if path in REFUSED:
        with pytest.raises(InvalidDocumentError):
            _policy(variants[0])
        return
    policies = [_policy(each) for each in variants]
    listed = is_listed(f"spec.{path}") and connector == "KVTier"
    for policy in policies if listed else ():
        assert _reported(policy, path)
    assert any(_effects(policy) != before or _reported(policy, path) for policy in policies)


def test_a_listed_field_exists() -> None:
    known = {f"spec.{path}" for path, _ in all_fields(PolicySpec)}
    assert NOT_ENFORCED.keys() <= known


def _documents(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name in model.model_fields:
        yield model.__name__, name


def _attributes_read() -> set[str]:
    """Names of attributes that the engine side reads, outside of the models and the command."""
    found = set()
    for path in CONNECTOR.rglob("*.py"):
        parts = path.relative_to(CONNECTOR).parts
        if parts[0] in ("cli", "scorecard", "harness", "testing") or path.name == "models.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def test_engine_and_tierd_read_every_value_of_the_documents() -> None:
    """Otherwise a rendered value would count as an effect although nothing happens."""
    kinds = [
        each
        for each in vars(models).values()
        if isinstance(each, type) and issubclass(each, models.Document)
    ]
    read = _attributes_read()
    fields = {name for kind in kinds for _, name in _documents(kind)}
    assert fields - read == UNREAD


def test_the_sample_pods_are_injected() -> None:
    """Otherwise no field of injection would make a difference."""
    policy = _policy(_base("chunkTokens", "KVTier"))
    context = pod_objects.context(kubelet_versions=("v1.36.0",))
    for pod in list(_pods())[:2]:
        assert isinstance(inject(policy, pod, context, SETTINGS), Injected)
