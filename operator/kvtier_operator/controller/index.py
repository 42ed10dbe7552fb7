"""Which policies there are, and which of them selects and governs which pod. Kept up with every change, so that nobody
has to go through all pods and all policies.

Of the policies that select a pod the oldest governs it: by creation time, then by uid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches
from kvtier_operator.controller.children.observe import CachedPolicy, claims_of, read
from kvtier_operator.kube.queue import Key
from kvtier_operator.kube.resources import PODS, Cache, Object

Age = tuple[str, str]
Label = tuple[str, str]


@dataclass(slots=True)
class _Space:
    """One namespace. ``selected``: policy to names of pods; ``selecting``: pod to policies, oldest first. ``anchored``:
    policies by one label that their pods must have (None: of those that demand none), ``labelled``: pods by each label,
    so that nobody is compared with everybody.
    """

    policies: dict[str, CachedPolicy] = field(default_factory=dict)
    selected: dict[str, set[str]] = field(default_factory=dict)
    selecting: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)
    claims: dict[str, set[str]] = field(default_factory=dict)
    anchored: dict[Label | None, set[str]] = field(default_factory=dict)
    labelled: dict[Label, set[str]] = field(default_factory=dict)

    def set_labels(self, pod: str, labels: Mapping[str, str] | None) -> None:
        """A pod's labels; None: the pod is gone."""
        for label in (self.labels.pop(pod, None) or {}).items():
            _discard(self.labelled, label, pod)
        if labels is not None:
            self.labels[pod] = labels
            for label in labels.items():
                self.labelled.setdefault(label, set()).add(pod)

    def may_select(self, policy: KVTierPolicy) -> Iterable[str]:
        """Pods among which all that the policy selects are."""
        anchor = _anchor(policy)
        return list(self.labels) if anchor is None else list(self.labelled.get(anchor, ()))

    def may_be_selected(self, labels: Mapping[str, str]) -> Iterable[str]:
        """Policies among which all that select such a pod are."""
        anchors: list[Label | None] = [None, *labels.items()]
        return [name for anchor in anchors for name in self.anchored.get(anchor, ())]


def _anchor(policy: KVTierPolicy) -> Label | None:
    return next(iter((policy.spec.pod_selector.match_labels or {}).items()), None)


def _discard(sets: dict[Any, set[str]], key: Any, name: str) -> None:
    held = sets.get(key, set())
    held.discard(name)
    if not held:
        sets.pop(key, None)


def age(known: CachedPolicy) -> Age:
    """What orders policies."""
    metadata = known.raw["metadata"]
    return str(metadata.get("creationTimestamp") or ""), known.uid


class PolicyIndex:
    """Fed by the changes of a cache; asked by the loop. Methods that take a change return the policies whose pods it
    concerns.
    """

    def __init__(self) -> None:
        self._spaces: dict[str, _Space] = {}

    def known(self, key: Key) -> CachedPolicy | None:
        """The policy as last seen."""
        space = self._spaces.get(key[0])
        return space.policies.get(key[1]) if space is not None else None

    def keys(self) -> list[Key]:
        """All policies."""
        return [
            (namespace, name)
            for namespace, space in self._spaces.items()
            for name in space.policies
        ]

    def in_namespace(self, namespace: str) -> list[Key]:
        """Policies of a namespace."""
        space = self._spaces.get(namespace)
        return [(namespace, name) for name in space.policies] if space is not None else []

    def naming_claim(self, namespace: str, claim: str) -> list[Key]:
        """Policies with a tier on that claim."""
        space = self._spaces.get(namespace)
        return (
            [(namespace, name) for name in space.claims.get(claim, ())] if space is not None else []
        )

    def pods(self, key: Key, cache: Cache) -> tuple[list[Object], list[tuple[Object, str]]]:
        """Pods that the policy governs, and those that it selects but another governs, with that one's name."""
        namespace, name = key
        space = self._spaces.get(namespace)
        governed: list[Object] = []
        conflicted: list[tuple[Object, str]] = []
        for pod_name in space.selected.get(name, ()) if space is not None else ():
            pod = cache.get(PODS, namespace, pod_name)
            if pod is None or space is None:
                continue
            oldest = space.selecting[pod_name][0]
            if oldest == name:
                governed.append(pod)
            else:
                conflicted.append((pod, oldest))
        return governed, conflicted

    def put_policy(self, raw: Object, cache: Cache) -> set[Key]:
        """A policy was made or changed."""
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        space = self._spaces.setdefault(namespace, _Space())
        before, known = space.policies.get(name), read(raw)
        if before is not None and before.policy is not None:
            self._forget(space, name, before.policy)
        space.policies[name] = known
        if known.policy is not None:
            for claim in claims_of(known.policy).values():
                space.claims.setdefault(claim, set()).add(name)
            space.anchored.setdefault(_anchor(known.policy), set()).add(name)
        if (
            before is not None
            and age(before) == age(known)
            and _selector(before) == _selector(known)
        ):
            return {(namespace, name)}
        if not space.labels:
            for pod in cache.list(PODS, namespace):
                space.set_labels(pod["metadata"]["name"], pod["metadata"].get("labels") or {})
        affected = {name}
        candidates = space.may_select(known.policy) if known.policy is not None else ()
        for pod_name in {*candidates, *space.selected.get(name, ())}:
            is_selected = known.policy is not None and matches(
                known.policy.spec.pod_selector, space.labels[pod_name]
            )
            others = [other for other in space.selecting.get(pod_name, ()) if other != name]
            if is_selected or pod_name in space.selected.get(name, ()):
                affected.update(others)
                self._assign(space, pod_name, [*others, name] if is_selected else others)
        return {(namespace, other) for other in affected}

    def drop_policy(self, namespace: str, name: str) -> set[Key]:
        """A policy is gone. Returns the others."""
        space = self._spaces.get(namespace)
        known = space.policies.pop(name, None) if space is not None else None
        if space is None or known is None:
            return set()
        if known.policy is not None:
            self._forget(space, name, known.policy)
        affected: set[str] = set()
        for pod_name in list(space.selected.get(name, ())):
            others = [other for other in space.selecting[pod_name] if other != name]
            affected.update(others)
            self._assign(space, pod_name, others)
        space.selected.pop(name, None)
        if not space.policies:
            del self._spaces[namespace]
        return {(namespace, other) for other in affected}

    def put_pod(self, pod: Object) -> set[Key]:
        """A pod was made or changed."""
        metadata = pod["metadata"]
        namespace, name, labels = (
            metadata["namespace"],
            metadata["name"],
            metadata.get("labels") or {},
        )
        space = self._spaces.get(namespace)
        if space is None:
            return set()
        old = space.selecting.get(name, ())
        if space.labels.get(name) != labels:
            space.set_labels(name, labels)
            self._assign(
                space,
                name,
                [
                    other
                    for other in space.may_be_selected(labels)
                    if _selects(space, other, labels)
                ],
            )
        return {(namespace, other) for other in {*old, *space.selecting.get(name, ())}}

    def drop_pod(self, namespace: str, name: str) -> set[Key]:
        """A pod is gone."""
        space = self._spaces.get(namespace)
        if space is None:
            return set()
        old = space.selecting.get(name, ())
        space.set_labels(name, None)
        self._assign(space, name, ())
        return {(namespace, other) for other in old}

    def _assign(self, space: _Space, pod_name: str, names: Iterable[str]) -> None:
        for other in space.selecting.get(pod_name, ()):
            space.selected.get(other, set()).discard(pod_name)
        ordered = tuple(sorted(names, key=lambda name: age(space.policies[name])))
        for other in ordered:
            space.selected.setdefault(other, set()).add(pod_name)
        if ordered:
            space.selecting[pod_name] = ordered
        else:
            space.selecting.pop(pod_name, None)

    @staticmethod
    def _forget(space: _Space, name: str, policy: KVTierPolicy) -> None:
        for claim in claims_of(policy).values():
            _discard(space.claims, claim, name)
        _discard(space.anchored, _anchor(policy), name)


def _selects(space: _Space, name: str, labels: Mapping[str, str]) -> bool:
    policy = space.policies[name].policy
    return policy is not None and matches(policy.spec.pod_selector, labels)


def _selector(known: CachedPolicy) -> object:
    return known.policy.spec.pod_selector if known.policy is not None else None
