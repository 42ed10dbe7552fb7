"""The webhook's view of the cluster, indexed for lookups within the time limit of an admission
request.

``WebhookLister`` belongs to the event loop's thread and answers from memory. Policies are parsed
when they change, not when they are looked up. Aggregates over many objects (kubelet versions,
groups of pods) are updated with each change.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import allowlist
from kvtier_operator.api.limits import decode_limit_range, decode_quota
from kvtier_operator.api.nodes import Node, decode_node
from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.stored import read_stored
from kvtier_operator.api.validation import InvalidDocumentError
from kvtier_operator.injection.decision import AdmissionContext
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.injection.governing import governing
from kvtier_operator.injection.scheduling import schedulable
from kvtier_operator.kube.resources import (
    LIMIT_RANGES,
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

logger = logging.getLogger(__name__)
DELETED = "DELETED"
Label = tuple[str, str]


@dataclass(frozen=True, slots=True)
class WebhookPolicy:
    """A cached policy.

    ``policy`` is None if the document cannot be parsed. ``errors`` are the reasons why the policy
    is not accepted, which the controller reports in its status.
    """

    raw: Object
    policy: KVTierPolicy | None
    errors: tuple[str, ...]


class WebhookLister:
    """Indexes the objects of ``cache``. ``wall_clock`` returns Unix time."""

    def __init__(self, cache: Cache, settings: Settings, wall_clock: Callable[[], float]) -> None:
        self._cache = cache
        self._settings = settings
        self._wall_clock = wall_clock
        self._policies: dict[str, dict[str, WebhookPolicy]] = {}
        self._selectors: dict[str, _SelectorIndex] = {}
        self._nodes: dict[str, dict[str, Node]] = {}
        """By kubelet version, then by name."""
        self._groups: dict[tuple[str, str], dict[str, Pod]] = {}

    def changed(self, kind: Kind, changed: Object, event: str) -> None:
        """Handles an object that was added, modified or deleted in the cache."""
        deleted = event == DELETED
        if kind == POLICIES:
            self._policy_changed(changed, deleted)
        elif kind == NODES:
            self._node_changed(changed, deleted)
        elif kind == PODS:
            self._pod_changed(changed, deleted)

    def synced(self) -> bool:
        """Whether the initial list of every kind is complete."""
        return self._cache.synced()

    def policies(self, namespace: str) -> Sequence[KVTierPolicy]:
        """The readable policies of a namespace."""
        cached = self._policies.get(namespace, {}).values()
        return [each.policy for each in cached if each.policy is not None]

    def namespace_labels(self, namespace: str) -> Mapping[str, str] | None:
        """The labels of a namespace; None if it is not in the cache."""
        found = self._cache.get(NAMESPACES, None, namespace)
        return None if found is None else _metadata(found).get("labels") or {}

    def counts(self) -> tuple[int, int]:
        """The number of readable and of unreadable policies."""
        readable = [
            each.policy is not None
            for policies in self._policies.values()
            for each in policies.values()
        ]
        return sum(readable), len(readable) - sum(readable)

    def governing(self, namespace: str, labels: Mapping[str, str]) -> KVTierPolicy | None:
        """The policy that governs a pod with these labels, if any."""
        selectors = self._selectors.get(namespace)
        if selectors is None:
            return None
        return governing(selectors.candidates(labels), namespace, labels)

    def admission_context(self, policy: KVTierPolicy, namespace: str, pod: Pod) -> AdmissionContext:
        """The cluster state that a decision about a pod governed by ``policy`` depends on."""
        cached = self._policies.get(namespace, {}).get(policy.metadata.name)
        return AdmissionContext(
            namespace_labels=self.namespace_labels(namespace) or {},
            limit_ranges=tuple(map(decode_limit_range, self._cache.list(LIMIT_RANGES, namespace))),
            quotas=tuple(map(decode_quota, self._cache.list(QUOTAS, namespace))),
            kubelet_versions=self._kubelet_versions(pod),
            siblings=self._siblings(namespace, pod),
            storage_ready=cached is None or not _has_condition(cached.raw, "StorageReady", "False"),
            suspended=None if cached is None else self._suspension(cached.raw, pod),
            policy_errors=() if cached is None else cached.errors,
        )

    def _policy_changed(self, raw: Object, deleted: bool) -> None:
        namespace, name = _metadata(raw)["namespace"], _metadata(raw)["name"]
        policies = self._policies.setdefault(namespace, {})
        selectors = self._selectors.setdefault(namespace, _SelectorIndex())
        previous = policies.get(name)
        if deleted:
            policies.pop(name, None)
            selectors.remove(name)
            if not policies:
                del self._policies[namespace], self._selectors[namespace]
        elif previous is not None and _only_status_changed(previous.raw, raw):
            # Parsing 500 policies takes half a second, and status changes all the time.
            policies[name] = WebhookPolicy(raw, previous.policy, previous.errors)
        else:
            policies[name] = cached = self._parse(raw)
            selectors.remove(name)
            if cached.policy is not None:
                selectors.add(cached.policy)

    def _parse(self, raw: Object) -> WebhookPolicy:
        try:
            policy = read_stored({**raw, "status": None}).policy
        except InvalidDocumentError as error:
            metadata = _metadata(raw)
            logger.warning(
                "cannot read policy %s/%s: %s", metadata["namespace"], metadata["name"], error
            )
            return WebhookPolicy(raw, None, tuple(each.message for each in error.errors))
        disallowed = allowlist.not_allowed(policy, self._settings)
        return WebhookPolicy(raw, policy, tuple(each.message for each in disallowed))

    def _node_changed(self, document: Object, deleted: bool) -> None:
        node = decode_node(document)
        for version, nodes in list(self._nodes.items()):
            if nodes.pop(node.metadata.name, None) is not None and not nodes:
                del self._nodes[version]
        version = node.status.node_info.kubelet_version
        if version and not deleted:
            self._nodes.setdefault(version, {})[node.metadata.name] = node

    def _kubelet_versions(self, pod: Pod) -> tuple[str, ...]:
        """Of the nodes that the pod can be scheduled on."""
        return tuple(
            version
            for version, nodes in self._nodes.items()
            if any(True for _ in schedulable(nodes.values(), pod.spec))
        )

    def _pod_changed(self, document: Object, deleted: bool) -> None:
        pod = decode_pod(document)
        key = (pod.metadata.namespace, pod.metadata.labels.get(GROUP_LABEL) or "")
        if not key[1]:
            return
        pods = self._groups.setdefault(key, {})
        if deleted:
            pods.pop(pod.metadata.name, None)
        else:
            pods[pod.metadata.name] = pod
        if not pods:
            del self._groups[key]

    def _siblings(self, namespace: str, pod: Pod) -> Sequence[Pod]:
        """The other pods of the LeaderWorkerSet group.

        Terminating pods belong to an earlier one.
        """
        group = pod.metadata.labels.get(GROUP_LABEL)
        if not group:
            return ()
        return tuple(
            each
            for name, each in self._groups.get((namespace, group), {}).items()
            if name != pod.metadata.name and not each.is_terminating
        )

    def _suspension(self, raw: Object, pod: Pod) -> str | None:
        """Why the injection breaker suspended the pod's owner, or None."""
        owner = pod.controller
        if owner is None:
            return None
        for entry in (raw.get("status") or {}).get("suspendedOwners") or ():
            if entry.get("uid") == owner.uid and not self._is_past(entry.get("until")):
                until = f" until {entry['until']}" if entry.get("until") else ""
                reason = entry.get("reason") or "a pod did not start"
                subject = f"{entry.get('kind')} {entry.get('name')}"
                return f"injection is suspended for {subject}{until}: {reason}"
        return None

    def _is_past(self, until: str | None) -> bool:
        if not until:
            return False
        try:
            time = datetime.datetime.fromisoformat(until)
        except ValueError:
            return True
        if time.tzinfo is None:
            time = time.replace(tzinfo=datetime.UTC)
        return time.timestamp() <= self._wall_clock()


class _SelectorIndex:
    """The policies of one namespace, by the first label that each requires.

    A pod is then compared with the few policies that may select it instead of with all of them.
    Policies that require no label by value are under ``None``.
    """

    def __init__(self) -> None:
        self._labels: dict[str, Label | None] = {}
        self._by_label: dict[Label | None, dict[str, KVTierPolicy]] = {}

    def add(self, policy: KVTierPolicy) -> None:
        """Adds a policy that is not in the index."""
        name = policy.metadata.name
        label = next(iter((policy.spec.pod_selector.match_labels or {}).items()), None)
        self._labels[name] = label
        self._by_label.setdefault(label, {})[name] = policy

    def remove(self, name: str) -> None:
        """Removes a policy if it is in the index."""
        if name not in self._labels:
            return
        label = self._labels.pop(name)
        policies = self._by_label[label]
        del policies[name]
        if not policies:
            del self._by_label[label]

    def candidates(self, labels: Mapping[str, str]) -> Iterator[KVTierPolicy]:
        """Every policy that may select a pod with these labels."""
        yield from self._by_label.get(None, {}).values()
        for key, value in labels.items():
            if isinstance(value, str):
                yield from self._by_label.get((key, value), {}).values()


def _only_status_changed(before: Object, after: Object) -> bool:
    left, right = _metadata(before), _metadata(after)
    same = all(
        left.get(key) == right.get(key)
        for key in ("uid", "labels", "annotations", "creationTimestamp", "deletionTimestamp")
    )
    return same and before.get("spec") == after.get("spec")


def _has_condition(raw: Object, kind: str, status: str) -> bool:
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return any(entry.get("type") == kind and entry.get("status") == status for entry in conditions)


def _metadata(document: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata: Mapping[str, Any] = document.get("metadata") or {}
    return metadata
