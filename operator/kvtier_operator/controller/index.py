"""Which policies exist, and which pods each of them selects and governs.

The index is updated with every change of a policy or a pod, so that no reconcile goes through all
pods. The oldest policy that selects a pod governs it; ``injection/governing.py`` has the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.api.pods import Pod, decode_pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.controller.cached_policy import CachedPolicy, claims_of, parse_policy
from kvtier_operator.injection.governing import NEVER_CREATED, precedence, selects
from kvtier_operator.kube.queue import Key
from kvtier_operator.kube.resources import PODS, Cache, Object
from kvtier_operator.kube.trim import Outline

Label = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SelectedPods:
    """The pods that a policy's selector matches. ``governed``: by this policy.
    ``governed_by_others``: for each of the rest the name of the policy that governs it.
    """

    governed: tuple[Pod, ...] = ()
    governed_by_others: tuple[str, ...] = ()


@dataclass(slots=True)
class _NamespaceIndex:
    """One namespace.

    ``selected``: pod names by policy. ``selecting``: policies by pod, oldest first. ``by_claim``:
    policies by claim. ``by_required_label``: policies by one label that their selector requires
    (None: it requires none), and ``pods_by_label``: these two keep a change from being compared
    with every pod and every policy.
    """

    policies: dict[str, CachedPolicy] = field(default_factory=dict)
    selected: dict[str, set[str]] = field(default_factory=dict)
    selecting: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)
    by_claim: dict[str, set[str]] = field(default_factory=dict)
    by_required_label: dict[Label | None, set[str]] = field(default_factory=dict)
    pods_by_label: dict[Label, set[str]] = field(default_factory=dict)

    def set_labels(self, pod: str, labels: Mapping[str, str] | None) -> None:
        """Records a pod's labels; None: the pod is gone."""
        for label in (self.labels.pop(pod, None) or {}).items():
            _discard(self.pods_by_label, label, pod)
        if labels is not None:
            self.labels[pod] = labels
            for label in labels.items():
                self.pods_by_label.setdefault(label, set()).add(pod)

    def candidate_pods(self, policy: KVTierPolicy) -> Iterable[str]:
        """A superset of the pods that the policy selects."""
        label = _required_label(policy)
        return list(self.labels) if label is None else list(self.pods_by_label.get(label, ()))

    def candidate_policies(self, labels: Mapping[str, str]) -> Iterable[str]:
        """A superset of the policies that select a pod with these labels."""
        keys: list[Label | None] = [None, *labels.items()]
        return [name for key in keys for name in self.by_required_label.get(key, ())]

    def selects(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether a policy selects a pod with these labels."""
        policy = self.policies[name].policy
        return policy is not None and selects(policy, policy.namespace, labels)

    def add_policy(self, name: str, cached: CachedPolicy) -> None:
        """Adds a policy without assigning pods to it."""
        self.policies[name] = cached
        if cached.policy is not None:
            for claim in claims_of(cached.policy).values():
                self.by_claim.setdefault(claim, set()).add(name)
            self.by_required_label.setdefault(_required_label(cached.policy), set()).add(name)

    def remove_policy(self, name: str) -> CachedPolicy | None:
        """Removes a policy and returns it. Pods stay assigned to it."""
        cached = self.policies.pop(name, None)
        if cached is not None and cached.policy is not None:
            for claim in claims_of(cached.policy).values():
                _discard(self.by_claim, claim, name)
            _discard(self.by_required_label, _required_label(cached.policy), name)
        return cached

    def assign(self, pod: str, names: Iterable[str]) -> None:
        """Records the policies that select a pod."""
        for other in self.selecting.get(pod, ()):
            self.selected.get(other, set()).discard(pod)
        ordered = tuple(sorted(names, key=self._precedence))
        for other in ordered:
            self.selected.setdefault(other, set()).add(pod)
        if ordered:
            self.selecting[pod] = ordered
        else:
            self.selecting.pop(pod, None)

    def _precedence(self, name: str) -> tuple[str, str]:
        policy = self.policies[name].policy
        return precedence(policy) if policy is not None else (NEVER_CREATED, "")


class PolicyIndex:
    """For one event loop. Methods that take a change return the policies to reconcile because of
    it.
    """

    def __init__(self) -> None:
        self._namespaces: dict[str, _NamespaceIndex] = {}

    def get(self, key: Key) -> CachedPolicy | None:
        """The policy as last received."""
        space = self._namespaces.get(key[0])
        return space.policies.get(key[1]) if space is not None else None

    def keys(self) -> list[Key]:
        """All policies."""
        return [
            (namespace, name)
            for namespace, space in self._namespaces.items()
            for name in space.policies
        ]

    def in_namespace(self, namespace: str) -> list[Key]:
        """The policies of a namespace."""
        space = self._namespaces.get(namespace)
        return [(namespace, name) for name in space.policies] if space is not None else []

    def using_claim(self, namespace: str, claim: str) -> list[Key]:
        """Policies with a tier on that claim."""
        space = self._namespaces.get(namespace)
        names = space.by_claim.get(claim, ()) if space is not None else ()
        return [(namespace, name) for name in names]

    def pods(self, key: Key, cache: Cache) -> SelectedPods:
        """The pods that a policy selects, decoded from the cache."""
        namespace, name = key
        space = self._namespaces.get(namespace)
        if space is None:
            return SelectedPods()
        governed: list[Pod] = []
        others: list[str] = []
        for pod_name in space.selected.get(name, ()):
            pod = cache.get(PODS, namespace, pod_name)
            if pod is None or isinstance(pod, Outline):
                continue
            oldest = space.selecting[pod_name][0]
            if oldest == name:
                governed.append(decode_pod(pod))
            else:
                others.append(oldest)
        return SelectedPods(tuple(governed), tuple(others))

    def has_outlines(self, key: Key, cache: Cache) -> bool:
        """Whether only outlines are held of pods that the policy selects."""
        namespace, name = key
        space = self._namespaces.get(namespace)
        return space is not None and any(
            isinstance(cache.get(PODS, namespace, each), Outline)
            for each in space.selected.get(name, ())
        )

    def selects_any(self, pod: Object) -> bool:
        """Whether a policy selects the pod."""
        space = self._namespaces.get(pod["metadata"]["namespace"])
        labels = pod["metadata"].get("labels") or {}
        return space is not None and any(
            space.selects(name, labels) for name in space.candidate_policies(labels)
        )

    def put_policy(self, raw: Object, cache: Cache) -> set[Key]:
        """A policy was created or changed."""
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        space = self._namespaces.setdefault(namespace, _NamespaceIndex())
        cached = parse_policy(raw)
        before = space.remove_policy(name)
        space.add_policy(name, cached)
        if before is not None and _selection(before) == _selection(cached):
            return {(namespace, name)}
        if not space.labels:
            for pod in cache.list(PODS, namespace):
                space.set_labels(pod["metadata"]["name"], pod["metadata"].get("labels") or {})
        affected = {name}
        candidates = space.candidate_pods(cached.policy) if cached.policy is not None else ()
        selected_before = set(space.selected.get(name, ()))
        for pod_name in {*candidates, *selected_before}:
            is_selected = space.selects(name, space.labels[pod_name])
            if is_selected or pod_name in selected_before:
                others = [other for other in space.selecting.get(pod_name, ()) if other != name]
                affected.update(others)
                space.assign(pod_name, [*others, name] if is_selected else others)
        return {(namespace, other) for other in affected}

    def drop_policy(self, namespace: str, name: str) -> set[Key]:
        """A policy is gone. Returns other policies only."""
        space = self._namespaces.get(namespace)
        if space is None or space.remove_policy(name) is None:
            return set()
        affected: set[str] = set()
        for pod_name in list(space.selected.get(name, ())):
            others = [other for other in space.selecting[pod_name] if other != name]
            affected.update(others)
            space.assign(pod_name, others)
        space.selected.pop(name, None)
        if not space.policies:
            del self._namespaces[namespace]
        return {(namespace, other) for other in affected}

    def put_pod(self, pod: Object) -> set[Key]:
        """A pod was created or changed."""
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        labels = metadata.get("labels") or {}
        space = self._namespaces.get(namespace)
        if space is None:
            return set()
        before = space.selecting.get(name, ())
        if space.labels.get(name) != labels:
            space.set_labels(name, labels)
            space.assign(
                name,
                [
                    other
                    for other in space.candidate_policies(labels)
                    if space.selects(other, labels)
                ],
            )
        return {(namespace, other) for other in {*before, *space.selecting.get(name, ())}}

    def drop_pod(self, namespace: str, name: str) -> set[Key]:
        """A pod is gone."""
        space = self._namespaces.get(namespace)
        if space is None:
            return set()
        before = space.selecting.get(name, ())
        space.set_labels(name, None)
        space.assign(name, ())
        return {(namespace, other) for other in before}


def _required_label(policy: KVTierPolicy) -> Label | None:
    return next(iter((policy.spec.pod_selector.match_labels or {}).items()), None)


def _discard(sets: dict[Any, set[str]], key: Any, name: str) -> None:
    members = sets.get(key, set())
    members.discard(name)
    if not members:
        sets.pop(key, None)


def _selection(cached: CachedPolicy) -> object:
    """What decides which pods a policy selects and governs."""
    policy = cached.policy
    if policy is None:
        return None
    return precedence(policy), policy.spec.pod_selector, policy.metadata.deletion_timestamp
