"""Which policy governs a pod. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import matches


def age(policy: KVTierPolicy) -> tuple[str, str]:
    """Sorts older policies first. Kubernetes writes times so that text sorts as time; one that was never created is
    the youngest.
    """
    return (policy.metadata.creation_timestamp or "9999", policy.metadata.uid or "")


def selects(policy: KVTierPolicy, namespace: str, labels: Mapping[str, str]) -> bool:
    """Whether the policy is about a pod with these labels. One that is being deleted is about none."""
    return (
        policy.namespace == namespace
        and policy.metadata.deletion_timestamp is None
        and matches(policy.spec.pod_selector, labels)
    )


def governing(
    policies: Iterable[KVTierPolicy], namespace: str, labels: Mapping[str, str]
) -> KVTierPolicy | None:
    """Of the policies that select a pod the oldest: by creation, then by uid. A ``ConfigMapOnly`` policy takes part,
    though it injects nothing: who writes pods by hand must not get another policy's sidecar.
    """
    return min(
        (policy for policy in policies if selects(policy, namespace, labels)), key=age, default=None
    )
