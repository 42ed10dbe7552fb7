"""Which policy governs a pod: the only implementation, used by webhook and controller. Pure.

Of the policies that select a pod the oldest governs it, by creation time and then by uid. A policy
that is being deleted governs no pod. A policy with ``attach.mode: ConfigMapOnly`` governs pods
although it injects nothing, because a pod that a person configured must not get the sidecar of
another policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from kvtier_operator.api.selector import LabelSelector, matches

NEVER_CREATED = "9999"
"""Sorts after every creation time."""


class SelectingPolicy(Protocol):
    """What decides which pods a policy governs. ``KVTierPolicy`` has it; so may smaller records."""

    @property
    def namespace(self) -> str:
        """Namespace of the policy and of its pods."""

    @property
    def uid(self) -> str | None:
        """None: not created yet."""

    @property
    def creation_timestamp(self) -> str | None:
        """As Kubernetes writes times, so that text sorts as time. None: not created yet."""

    @property
    def deletion_timestamp(self) -> str | None:
        """Set if the policy is being deleted."""

    @property
    def pod_selector(self) -> LabelSelector:
        """Selects the pods."""


Policy = TypeVar("Policy", bound=SelectingPolicy)


def precedence(policy: SelectingPolicy) -> tuple[str, str]:
    """Sort key: the policy that governs comes first. One that was never created comes last."""
    return policy.creation_timestamp or NEVER_CREATED, policy.uid or ""


def selects(policy: SelectingPolicy, namespace: str, labels: Mapping[str, str]) -> bool:
    """Whether the policy selects pods with these labels and is not being deleted."""
    return (
        not policy.deletion_timestamp
        and policy.namespace == namespace
        and matches(policy.pod_selector, labels)
    )


def governing(
    policies: Iterable[Policy], namespace: str, labels: Mapping[str, str]
) -> Policy | None:
    """The policy that governs a pod with these labels, or None."""
    selecting = (policy for policy in policies if selects(policy, namespace, labels))
    return min(selecting, key=precedence, default=None)
