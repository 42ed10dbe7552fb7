"""What the webhook knows of the cluster, ready to be asked in the milliseconds that an admission may take.

Everything here runs on the event loop's thread and answers from memory. Policies are parsed when they change, not when
they are asked for; what is counted over many objects (kubelet versions, groups of pods) is kept counted.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import allowlist
from kvtier_operator.api.limits import decode_limit_range, decode_quota
from kvtier_operator.api.pods import decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import InvalidDocumentError, validated
from kvtier_operator.injection.decision import AdmissionContext, PodObject
from kvtier_operator.injection.existing_config import GROUP_LABEL
from kvtier_operator.injection.governing import governing
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


@dataclass(frozen=True, slots=True)
class WebhookPolicy:
    """A policy as it was last seen. ``policy`` is None where it cannot be read, which the controller reports."""

    raw: Object
    policy: KVTierPolicy | None
    refusals: tuple[str, ...]


class _Selectors:
    """One namespace's policies by one of the labels that they ask for, so that a pod is compared with the few policies that may
    select it, and not with five hundred.
    """

    def __init__(self) -> None:
        self._labels: dict[str, tuple[str, str] | None] = {}
        self._by_label: dict[tuple[str, str] | None, dict[str, KVTierPolicy]] = {}
        """Under ``None`` those that ask for no label by its value."""

    def put(self, policy: KVTierPolicy) -> None:
        """Adds one that is not there."""
        name = policy.metadata.name
        label = next(iter((policy.spec.pod_selector.match_labels or {}).items()), None)
        self._labels[name] = label
        self._by_label.setdefault(label, {})[name] = policy

    def drop(self, name: str) -> None:
        """Forgets one, if it is there."""
        if name not in self._labels:
            return
        label = self._labels.pop(name)
        policies = self._by_label[label]
        del policies[name]
        if not policies:
            del self._by_label[label]

    def candidates(self, labels: Mapping[str, str]) -> Iterator[KVTierPolicy]:
        """Every policy that may select a pod with these labels."""
        for label in (
            None,
            *((key, value) for key, value in labels.items() if isinstance(value, str)),
        ):
            yield from self._by_label.get(label, {}).values()


class WebhookLister:
    """Follows a cache. ``wall_clock``: seconds since 1970."""

    def __init__(self, cache: Cache, settings: Settings, wall_clock: Callable[[], float]) -> None:
        self._cache = cache
        self._settings = settings
        self._wall_clock = wall_clock
        self._policies: dict[str, dict[str, WebhookPolicy]] = {}
        self._selectors: dict[str, _Selectors] = {}
        self._nodes: dict[str, str] = {}
        self._kubelets: Counter[str] = Counter()
        self._groups: dict[tuple[str, str], dict[str, Object]] = {}

    def changed(self, kind: Kind, changed: Object, event: str) -> None:
        """What the cache calls for every object that came, changed or went."""
        gone = event == DELETED
        if kind == POLICIES:
            self._policy_changed(changed, gone)
        elif kind == NODES:
            self._node_changed(changed, gone)
        elif kind == PODS:
            self._pod_changed(changed, gone)

    def synced(self) -> bool:
        """Whether everything has been listed once."""
        return self._cache.synced()

    def policies(self, namespace: str) -> Sequence[KVTierPolicy]:
        """The namespace's policies that can be read."""
        known = self._policies.get(namespace, {}).values()
        return [each.policy for each in known if each.policy is not None]

    def namespace_labels(self, namespace: str) -> Mapping[str, str] | None:
        """Labels of a namespace; None while it is not known."""
        found = self._cache.get(NAMESPACES, None, namespace)
        return None if found is None else _metadata(found).get("labels") or {}

    def counts(self) -> tuple[int, int]:
        """How many policies can be read, and how many cannot."""
        known = [
            each.policy is not None
            for policies in self._policies.values()
            for each in policies.values()
        ]
        return sum(known), len(known) - sum(known)

    def governing(self, namespace: str, labels: Mapping[str, str]) -> KVTierPolicy | None:
        """The policy that governs a pod with these labels, if any: the oldest that selects it."""
        selectors = self._selectors.get(namespace)
        return (
            None
            if selectors is None
            else governing(selectors.candidates(labels), namespace, labels)
        )

    def surroundings(
        self, policy: KVTierPolicy, namespace: str, pod: PodObject
    ) -> AdmissionContext:
        """What is known around a pod that this policy governs."""
        known = self._policies.get(namespace, {}).get(policy.metadata.name)
        return AdmissionContext(
            namespace_labels=self.namespace_labels(namespace) or {},
            limit_ranges=tuple(
                decode_limit_range(each) for each in self._cache.list(LIMIT_RANGES, namespace)
            ),
            quotas=tuple(decode_quota(each) for each in self._cache.list(QUOTAS, namespace)),
            kubelet_versions=tuple(self._kubelets),
            siblings=tuple(decode_pod(each) for each in self._siblings(namespace, pod)),
            storage_ready=known is None or not _condition_is(known.raw, "StorageReady", "False"),
            suspended=None if known is None else self._suspended(known.raw, pod),
            policy_errors=() if known is None else known.refusals,
        )

    def _policy_changed(self, raw: Object, gone: bool) -> None:
        namespace, name = _metadata(raw)["namespace"], _metadata(raw)["name"]
        policies = self._policies.setdefault(namespace, {})
        selectors = self._selectors.setdefault(namespace, _Selectors())
        before = policies.get(name)
        if gone:
            policies.pop(name, None)
            selectors.drop(name)
            if not policies:
                del self._policies[namespace], self._selectors[namespace]
        elif before is not None and _same_intent(before.raw, raw):
            # Only the status changed, which is read as it comes: parsing 500 policies anew for that takes half a second.
            policies[name] = WebhookPolicy(raw, before.policy, before.refusals)
        else:
            policies[name] = known = self._known(raw)
            selectors.drop(name)
            if known.policy is not None:
                selectors.put(known.policy)

    def _known(self, raw: Object) -> WebhookPolicy:
        try:
            policy = validated(KVTierPolicy, {**raw, "status": None})
        except InvalidDocumentError as error:
            metadata = _metadata(raw)
            logger.warning(
                "policy %s/%s cannot be read: %s", metadata["namespace"], metadata["name"], error
            )
            return WebhookPolicy(raw, None, tuple(refusal.message for refusal in error.errors))
        outside = allowlist.volume_errors(policy, self._settings.allowed_volumes)
        return WebhookPolicy(raw, policy, tuple(refusal.message for refusal in outside))

    def _node_changed(self, node: Object, gone: bool) -> None:
        name = _metadata(node)["name"]
        version = ((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion") or ""
        before = self._nodes.pop(name, "")
        if before:
            self._kubelets[before] -= 1
            if not self._kubelets[before]:
                del self._kubelets[before]
        if version and not gone:
            self._nodes[name] = version
            self._kubelets[version] += 1

    def _pod_changed(self, pod: Object, gone: bool) -> None:
        metadata = _metadata(pod)
        key = (metadata["namespace"], (metadata.get("labels") or {}).get(GROUP_LABEL) or "")
        if not key[1]:
            return
        pods = self._groups.setdefault(key, {})
        if gone:
            pods.pop(metadata["name"], None)
        else:
            pods[metadata["name"]] = pod
        if not pods:
            del self._groups[key]

    def _siblings(self, namespace: str, pod: PodObject) -> Sequence[PodObject]:
        metadata = _metadata(pod)
        group = (metadata.get("labels") or {}).get(GROUP_LABEL)
        if not group:
            return ()
        pods = self._groups.get((namespace, group), {})
        # A pod that is being replaced says nothing about those that come.
        return tuple(
            each
            for name, each in pods.items()
            if name != metadata.get("name") and not _metadata(each).get("deletionTimestamp")
        )

    def _suspended(self, raw: Object, pod: PodObject) -> str | None:
        owner = decode_pod(pod).controller
        if owner is None:
            return None
        for entry in (raw.get("status") or {}).get("suspendedOwners") or ():
            if entry.get("uid") == owner.uid and not self._past(entry.get("until")):
                until = f" until {entry['until']}" if entry.get("until") else ""
                return f"{entry.get('kind')} {entry.get('name')} is left alone{until}: {entry.get('reason') or 'a pod did not start'}"
        return None

    def _past(self, until: str | None) -> bool:
        if not until:
            return False
        try:
            moment = datetime.datetime.fromisoformat(until)
        except ValueError:
            return True
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp() <= self._wall_clock()


def _same_intent(before: Object, after: Object) -> bool:
    left, right = _metadata(before), _metadata(after)
    same = all(
        left.get(key) == right.get(key)
        for key in ("uid", "labels", "annotations", "creationTimestamp", "deletionTimestamp")
    )
    return same and before.get("spec") == after.get("spec")


def _condition_is(raw: Object, kind: str, status: str) -> bool:
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return any(entry.get("type") == kind and entry.get("status") == status for entry in conditions)


def _metadata(document: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata: Mapping[str, Any] = document.get("metadata") or {}
    return metadata
