"""What the webhook's caches would hold about a namespace, read once. The webhook's own lister
indexes it, so that commands decide from what the webhook decides from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from kvtier.cli.cluster.access import ClusterReader
from kvtier_operator.api.names import (
    HASH_ANNOTATION,
    NOTES_ANNOTATION,
    POLICY_ANNOTATION,
    POLICY_UID_ANNOTATION,
    STRUCTURAL_ANNOTATION,
    VERSION_ANNOTATION,
)
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches
from kvtier_operator.api.stored import read_status
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.injection.inject import inject
from kvtier_operator.kube.lister import Store
from kvtier_operator.kube.resources import (
    CONFIG_MAPS,
    LIMIT_RANGES,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    QUOTAS,
    Cache,
    Kind,
    Object,
)
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.lister import WebhookLister
from kvtier_operator.webhook.mutate import MutationResult, mutate, mutation_request
from kvtier_operator.webhook.review import AdmissionRequest

SETTINGS_NAME = "kvtier-settings"
SETTINGS_KEY = "settings.yaml"
INJECTED = (
    STRUCTURAL_ANNOTATION,
    POLICY_ANNOTATION,
    POLICY_UID_ANNOTATION,
    HASH_ANNOTATION,
    VERSION_ANNOTATION,
    NOTES_ANNOTATION,
)
OF_A_LIFE = ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "managedFields")
"""Metadata that a new pod does not have."""


class StoreCache(Cache):
    """The objects of a ``Store``, all of them read."""

    def __init__(self) -> None:
        self.store = Store()

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self.store.get(kind, namespace or "", name)

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        return self.store.of(kind, namespace)

    def synced(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class NamespaceSnapshot:
    """One namespace. ``settings``: the operator's; ``settings_known`` is False if they could not be
    read, and defaults stand in. ``enabled``: whether the API server calls the webhook for the
    namespace; None: not known. ``webhook_installed``: None: not known.
    """

    namespace: str
    cache: StoreCache
    lister: WebhookLister
    settings: Settings
    settings_known: bool
    enabled: bool | None
    webhook_installed: bool | None

    def admit(self, pod: Object) -> MutationResult | None:
        """What the webhook answers if this pod is created now; None: it leaves it unchanged without
        a decision.
        """
        request = AdmissionRequest(
            uid="preview",
            operation="CREATE",
            group="",
            kind="Pod",
            sub_resource="",
            namespace=self.namespace,
            name="",
            object=pod,
            old=None,
            dry_run=True,
        )
        found = mutation_request(request, self.lister, self.settings)
        if found is None:
            return None
        if not self.settings_known:
            # The defaults allow no volume. What the controller found with the real settings counts.
            errors = self._not_accepted(found.policy)
            found = replace(found, context=replace(found.context, policy_errors=errors))
        return mutate(found, self.settings, inject)

    def _not_accepted(self, policy: KVTierPolicy) -> tuple[str, ...]:
        document = self.cache.get(POLICIES, self.namespace, policy.metadata.name)
        status = read_status((document or {}).get("status"))
        conditions = (status.conditions if status is not None else None) or ()
        return tuple(
            each.message
            for each in conditions
            if each.type == "Accepted" and each.status == "False"
        )

    def with_policy(self, document: Object) -> NamespaceSnapshot:
        """The same with a policy added or replaced."""
        cache = StoreCache()
        for kind in (NAMESPACES, LIMIT_RANGES, QUOTAS, NODES, PODS, POLICIES):
            for each in self.cache.list(kind):
                cache.store.put(kind, each)
        cache.store.put(POLICIES, document)
        return NamespaceSnapshot(
            self.namespace,
            cache,
            indexed(cache, self.settings),
            self.settings,
            self.settings_known,
            self.enabled,
            self.webhook_installed,
        )


async def read_snapshot(reader: ClusterReader, *, all_pods: bool = False) -> NamespaceSnapshot:
    """Reads the namespace of ``reader``. ``all_pods``: all of its pods, not only those of groups.

    Raises ``CommandError`` if the policies may not be read; what else may not be read is noted.
    """
    namespace, cache = reader.namespace, StoreCache()
    policies = await reader.list(POLICIES, namespace)
    space = await reader.try_get(NAMESPACES, None, namespace, "the namespace's label")
    labels = "" if all_pods else GROUP_LABEL
    if all_pods:
        pods = await reader.list(PODS, namespace)
    else:
        pods = await reader.try_list(PODS, namespace, "groups of pods", labels)
    found = {
        POLICIES: policies,
        NAMESPACES: [space] if space is not None else [],
        LIMIT_RANGES: await reader.try_list(LIMIT_RANGES, namespace, "limit ranges"),
        QUOTAS: await reader.try_list(QUOTAS, namespace, "quotas"),
        NODES: await reader.try_list(NODES, None, "versions of kubelets"),
        PODS: pods,
    }
    for kind, each in found.items():
        for body in each:
            cache.store.put(kind, body)
    settings = await _settings(reader)
    webhook = await _webhook(reader, settings or Settings())
    enabled = None
    if space is not None:
        selector = (settings or Settings()).webhook.namespace_selector
        enabled = matches(selector, space["metadata"].get("labels") or {})
    lister = indexed(cache, settings or Settings())
    return NamespaceSnapshot(
        namespace,
        cache,
        lister,
        settings or Settings(),
        settings is not None,
        enabled,
        webhook,
    )


def indexed(cache: StoreCache, settings: Settings) -> WebhookLister:
    """The webhook's index of the objects."""
    lister = WebhookLister(cache, settings, time.time)
    for kind in (POLICIES, NODES, PODS):
        for each in cache.list(kind):
            lister.changed(kind, each, "ADDED")
    return lister


def recreated(pod: Object) -> dict[str, Any]:
    """A pod as its owner would create it again: without its node, its state and, if it was
    injected, without what was injected.
    """
    metadata = {key: value for key, value in pod["metadata"].items() if key not in OF_A_LIFE}
    annotations = dict(metadata.get("annotations") or {})
    spec = {key: value for key, value in (pod.get("spec") or {}).items() if key != "nodeName"}
    if STRUCTURAL_ANNOTATION in annotations:
        annotations = {key: value for key, value in annotations.items() if key not in INJECTED}
        for part in ("initContainers", "volumes"):
            if part in spec:
                spec[part] = [each for each in spec[part] if not _is_injected(each)]
        spec["containers"] = [_without_mounts(each) for each in spec.get("containers") or ()]
    metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _is_injected(part: Mapping[str, Any]) -> bool:
    return str(part.get("name") or "").startswith("kvtier-")


def _without_mounts(container: Mapping[str, Any]) -> dict[str, Any]:
    """A container without injected mounts and variables. Extended variables stay extended."""
    kept = dict(container)
    if "volumeMounts" in kept:
        kept["volumeMounts"] = [each for each in kept["volumeMounts"] if not _is_injected(each)]
    if "env" in kept:
        kept["env"] = [
            each for each in kept["env"] if not str(each.get("name")).startswith("KVTIER_")
        ]
    return kept


async def _settings(reader: ClusterReader) -> Settings | None:
    purpose = "the operator's settings (allowedVolumes, images); defaults are assumed"
    found = await reader.try_get(CONFIG_MAPS, reader.operator_namespace, SETTINGS_NAME, purpose)
    if found is None:
        if not any(each.startswith(purpose) for each in reader.not_checked):
            reader.not_checked.append(
                f"{purpose}: ConfigMap {SETTINGS_NAME} does not exist in namespace "
                f"{reader.operator_namespace}; see --operator-namespace"
            )
        return None
    try:
        return Settings.model_validate(
            yaml.safe_load((found.get("data") or {}).get(SETTINGS_KEY) or "") or {}
        )
    except (yaml.YAMLError, ValidationError):
        reader.not_checked.append(f"{purpose}: this version of kvtier cannot read them")
        return None


async def _webhook(reader: ClusterReader, settings: Settings) -> bool | None:
    """Whether the webhook is registered; None: it may not be read."""
    before = len(reader.not_checked)
    purpose = "whether the webhook is registered"
    name = settings.webhook.certificates.mutating_configuration
    found = await reader.try_get(MUTATING_WEBHOOKS, None, name, purpose)
    return None if len(reader.not_checked) > before else found is not None


def policies_of(snapshot: NamespaceSnapshot) -> list[KVTierPolicy]:
    """The readable policies of the namespace, by name."""
    found = snapshot.lister.policies(snapshot.namespace)
    return sorted(found, key=lambda each: each.metadata.name)
